"""The launchers of all nodes: they meet before each start, and notice nodes that leave or join.

torchrun waits 15 minutes for a missing node or an unreachable address, and then ends with a
traceback. Here each node connects to node 0 at the address and port given to all nodes, sends a
description of itself, and tries to connect to every other node. If anything is wrong, all nodes
end with the same message. The launchers stay connected to the launcher of node 0, which notices
within half a minute that a host has crashed or been cut off; gloo and NCCL would wait ten minutes.

With --min_machines a run goes on without nodes that have left, and takes in nodes that join: a node
that was lost, a replacement, or a spare. Node 0 alone decides which nodes train, so if the network
is split, its two halves never train in one run folder: the half without node 0 ends, or waits for
node 0. Imports no torch.
"""

import ipaddress
import json
import os
import socket
import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import psutil

from ..config import ConfigError
from ..files import TransientError
from ..process import PREEMPTED
from ..words import printable, say
from .attempts import RunHasEnded

CONNECT_SECONDS = 5.0  # timeout of a connection between two nodes, and of its first message
ANSWER_SECONDS = 60.0  # how long node 0 may take to answer after its own wait has ended
JOIN_SECONDS = 30.0  # how long a new node 0 waits for the nodes of a run that has lost its node 0
LATE_SECONDS = 10.0  # how long node 0 stays after an error, to report it to nodes that are late
SAY_SECONDS = 30.0  # time between two lines about missing nodes
LOST_SECONDS = 30.0  # a host whose kernel has not answered for this long is lost
MAX_MESSAGE_BYTES = 1 << 20
THIS_LAUNCHER = uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node sends about itself."""

    rank: int  # the number of the node; `nodes` or more for a spare
    nodes: int  # how many nodes train if none is missing (--num_machines)
    min_nodes: int  # how many nodes are enough to go on when others have left; 0: all are needed
    world_size: int  # the number of processes on `nodes` nodes
    run: str  # the module and its arguments; the same on every node
    preflight: bool = False  # its first processes check the cluster
    code: str = ""  # hash of the code that its processes run
    host: str
    interface: str
    ip: str
    port: int = 0  # the other nodes try to connect to it; on node 0, torch's store uses it later
    refusal: str = ""  # why this node will not start its processes again after a failure
    is_untried: bool = False  # its processes have done no step in the start that has ended
    has_waited: bool = False  # it stalled waiting for other ranks; restarts only if a node left
    start: str = ""  # Starts.id of the next start; all nodes take over that of node 0
    lowered_micro_batch_size: int = 0  # the largest size that may fit in its memory; 0: not known
    launcher: str = THIS_LAUNCHER
    is_new: bool = True  # this node has not taken part in a start yet

    @property
    def required_nodes(self) -> int:
        """Return how many nodes a start needs."""
        return self.min_nodes or self.nodes


NOBODY = Node(
    rank=-1, nodes=0, min_nodes=0, world_size=0, run="", host="", interface="", ip="", launcher=""
)


def parse_node(message: dict[str, Any]) -> Node:
    """Return the node that a message describes; its text is made safe to print on a terminal.

    Raises:
        TypeError: the message does not describe a node.
    """
    node = Node(**message)
    for field, kind in Node.__annotations__.items():
        if type(value := getattr(node, field)) is not kind:
            raise TypeError(f"{field} is {value!r}")
    return replace(node, **{k: printable(v) for k, v in message.items() if isinstance(v, str)})


# ---- network interfaces --------------------------------------------------------------------------
def interfaces() -> dict[str, str]:
    """Return the IP address of each network interface, except loopback."""
    ip_by_name: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            ip = address.address.split("%")[0]
            is_ip = address.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and not ipaddress.ip_address(ip).is_loopback:
                ip_by_name.setdefault(name, ip)
    return ip_by_name


def interface_to(address: str) -> tuple[str, str]:
    """Return the interface through which this node reaches node 0, and its IP address.

    If GLOO_SOCKET_IFNAME is set, it names the interface. On node 0 itself, the host name may
    resolve to a loopback address (Debian's 127.0.1.1), which other nodes cannot use. Then return
    the only interface that is up; if several are up, return no name (""): with_own_address finds
    it when a connection is open.
    """
    usable = interfaces()
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        ips = [usable[name] for name in names.split(",") if name in usable]
        return names, next(iter(ips), "")  # gloo refuses a wrong name
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; the kernel chooses the route
            ip = probe.getsockname()[0]
    # the name does not resolve yet, for example because its pod is starting; or it is malformed
    except (OSError, UnicodeError):
        ip = ""
    for name, usable_ip in usable.items():
        if usable_ip == ip:
            return name, ip
    states = psutil.net_if_stats()
    up = [name for name in usable if name in states and states[name].isup]
    return (up[0], usable[up[0]]) if len(up) == 1 else ("", ip)


def with_own_address(me: Node, connection: socket.socket) -> Node:
    """Return this node with the address that it has in a connection, if its interface is unknown.

    GLOO_SOCKET_IFNAME is then set too: gloo would use the address of the host name, which may be
    loopback.
    """
    if me.interface:
        return me
    ip = connection.getsockname()[0].removeprefix("::ffff:")  # IPv4 in an IPv6 socket
    for name in [name for name, usable_ip in interfaces().items() if usable_ip == ip]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        return replace(me, ip=ip, interface=name)
    return replace(me, ip=ip)


def may_be_own_address(address: str) -> bool:
    """Return whether an address or name belongs to this host, or does not resolve yet."""
    try:
        resolved = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, _, _, socket_address in resolved:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(socket_address)
            return True
    return False


# ---- the launchers -------------------------------------------------------------------------------
class OtherNodes:
    """The launchers of the other nodes: node 0 is connected to all, the others only to node 0.

    The kernel checks whether a host answers (TCP keepalive), so a launcher that is suspended or
    waits for storage does not count as lost. Nor does a launcher that has ended: its processes see
    that, and save before they end.
    """

    def __init__(
        self,
        address: str,
        port: int,
        lost_seconds: float = LOST_SECONDS,
        node_0_seconds: float = 0.0,
    ) -> None:
        """Store the settings; `meet` connects.

        Args:
            address: the address at which the other nodes reach node 0.
            port: the port on which the launcher of node 0 listens as long as it runs.
            lost_seconds: a host that has not answered for this long is lost.
            node_0_seconds: how long to wait for a new launcher of node 0 when the old one has left.
        """
        self.members: list[Node] = []  # the nodes of the current start, by rank
        self.lost: Node | None = None  # a node whose host does not answer
        self.failed: Node | None = None  # a node that is lost, or whose processes have failed
        self._me = NOBODY
        self._address, self._port = address, port
        self._lost_seconds, self._node_0_seconds = lost_seconds, node_0_seconds
        self._deadline = 0.0  # when node 0 stops waiting for others; time.monotonic()
        self._is_waiting = False  # this node is a spare or a newcomer, and others are training
        self._server: socket.socket | None = None  # None on all nodes but node 0
        self._connections: list[_Connection] = []  # the oldest first
        self._problem: ConfigError | None = None  # why no node can start
        # otherwise a forked process would keep the connections open after its launcher has ended
        os.register_at_fork(after_in_child=self.close)

    def meet(self, me: Node, seconds: float, *, has_saved: bool = False) -> None:
        """Wait until the nodes of the next start have joined; check that each reaches the others.

        Args:
            me: this node.
            seconds: how long to wait for all nodes, or for node 0.
            has_saved: the run saved and stopped; it goes on with different nodes, or ends.

        Raises:
            ConfigError: the nodes cannot start, and each of them raises it; or a run that is
                training has refused this node. It is a TransientError if the same command may
                succeed later (a node was late or unreachable, a port in use).
            RunHasEnded: the run has ended, so no start follows.
        """
        with _listen(me, 0) as probe_socket:  # other nodes connect to this port, but send nothing
            self._me = me = replace(me, port=probe_socket.getsockname()[1])
            try:
                if me.rank:
                    self._join(me, seconds)
                else:
                    self._serve(me, seconds, has_saved)
            except (ConfigError, RunHasEnded):
                # node 0 stays connected to its spares, to tell them later how the run ended
                if me.rank or not self.members:
                    self.close()
                raise
        self.lost = self.failed = None

    @property
    def have_failed(self) -> bool:
        """Return whether processes of another node have failed, or its host is lost."""
        self._read(0.0)
        return self.failed is not None

    @property
    def has_left(self) -> bool:
        """Return whether a launcher that this one was connected to has ended."""
        expected = min(1, len(self.members) - 1) if self._me.rank else len(self.members) - 1
        return sum(peer.is_member for peer in self._connections) < expected

    @property
    def newcomer(self) -> str:
        """Return, on node 0, the name of a waiting node that the run can take in, or ""."""
        num_members = 1 + sum(peer.is_member for peer in self._connections)
        nodes = [peer.node for peer in self._ready() if not peer.is_member]
        if not nodes or num_members >= self._me.nodes or not self._me.min_nodes:
            return ""
        return f"node {nodes[0].rank} ({nodes[0].host})"

    @property
    def change(self) -> str:
        """Return why the nodes change after a save: "node left" or "node came"; else ""."""
        return "node left" if self.has_left else self.newcomer and "node came"

    def tell_failure(self) -> None:
        """Tell the other nodes, through node 0, that processes of this node have failed."""
        self._tell(self._me)

    def close(self, code: int | None = None, *, may_return: bool = False) -> None:
        """Close the connections; first tell waiting nodes the exit code of the run.

        Args:
            code: the exit code, given by node 0 at the end of the run; None otherwise.
            may_return: perhaps only this node was told to stop, so a new node 0 may come; nodes
                with --wait_for_node_0 wait for it.
        """
        for connection in self._connections:
            if code is not None:
                connection.send({"ended": code, "may_return": may_return})
            connection.socket.close()
        if self._server:
            self._server.close()
        self._server, self._connections = None, []

    def _tell(self, failed: Node) -> None:
        for connection in self._connections:
            if connection.is_member and connection.node.rank != failed.rank:
                connection.send({"failed": failed.rank})

    def _read(self, seconds: float) -> None:
        """Wait until a message arrives or a connection opens or closes; handle all such events."""
        listening = [self._server] if self._server else []
        sockets = [connection.socket for connection in self._connections]
        wait([*listening, *sockets], max(0.0, seconds))
        for server in listening:
            with suppress(OSError):  # no connection is left to accept
                while True:
                    self._connections.append(_Connection(server.accept()[0], self._lost_seconds))
        failed_before = self.failed
        for connection in [*self._connections]:
            connection.read()
            try:
                while connection.inbox:
                    self._hear(connection, connection.inbox.popleft())
            except (ValueError, TypeError, LookupError):  # a port scan, or torchrun of another run
                connection.is_closed = True
        for connection in [peer for peer in self._connections if peer.is_closed or peer.is_mute]:
            self._connections.remove(connection)
            connection.socket.close()
            if connection.is_lost and connection.is_member:
                self.lost = self.lost or connection.node
                self.failed = self.failed or connection.node
        if self._server and self.failed and not failed_before:
            self._tell(self.failed)

    def _hear(self, connection: "_Connection", message: dict[str, Any]) -> None:
        if "failed" in message:
            if connection.is_member:
                failed = [node for node in self.members if node.rank == message["failed"]]
                self.failed = self.failed or (failed or [connection.node])[0]
        elif self._server:
            node = connection.node = parse_node(message["node"])
            connection.is_ready = True
            for other in self._connections:
                if other is not connection and other.node.launcher == node.launcher:
                    other.is_closed = True  # the launcher has connected again
            if problem := self._join_problem(connection):
                connection.is_ready, connection.is_refused = False, True
                is_needed = connection.is_member and not self._may_leave(node)
                if is_needed or not self.members:
                    self._problem = self._problem or problem
                else:
                    connection.send({"error": str(problem), "is_transient": False})
                    connection.is_closed = True
            elif self.members and not connection.is_member:
                connection.send({"wait": self._why_wait()})
            else:
                left = max(0.0, self._deadline - time.monotonic())
                connection.send({"stay": left})

    def _may_leave(self, node: Node) -> bool:
        """Return whether a node joined later, has done no step yet, and is not needed."""
        is_newcomer = any(old.is_new and old.launcher == node.launcher for old in self.members)
        has_joined = is_newcomer and not all(old.is_new for old in self.members)
        return node.is_untried and has_joined and len(self.members) > self._me.required_nodes

    # ---- node 0 ----------------------------------------------------------------------------------
    def _serve(self, me: Node, seconds: float, has_saved: bool) -> None:
        """Wait for the other nodes, have them probe each other, and send them the result."""
        if not self._server:
            if not may_be_own_address(self._address):
                say(
                    f"{me.host} was started as node 0, but --main_process_ip {self._address} is not"
                    " an address of this host: if it belongs to another host, give this one a"
                    " different --machine_rank."
                )
            self._server = _listen(me, self._port)
            self._server.setblocking(False)
        self._problem = self._problem or _refusal(me)
        before = {node.launcher for node in self.members}
        while True:
            waited_seconds = self._gather(me, seconds, has_saved)
            chosen = self._ready()[: me.nodes - 1]
            launchers = {me.launcher, *(peer.node.launcher for peer in chosen)}
            if has_saved and not self._problem:
                self._end_if_saved(me, chosen, has_changed=launchers != before)
            self._problem = (
                self._problem
                or self._missing_problem(chosen, waited_seconds)
                or self._waiting_problem(chosen, before)
            )
            # a node that does not answer, or a newcomer that is not reached, is left out if enough
            # others have joined
            if self._problem or self._probe_all(me, chosen):
                break
        if self._problem:
            is_transient = isinstance(self._problem, TransientError)
            for connection in self._connections:
                if connection.is_member or not self.members:
                    connection.send({"error": str(self._problem), "is_transient": is_transient})
            raise self._problem
        self._begin(me, chosen)

    def _begin(self, me: Node, chosen: "list[_Connection]") -> None:
        """Have the chosen nodes begin the next start; say which nodes have left and joined."""
        before = {node.launcher: node.host for node in self.members}
        self.members = [me, *(peer.node for peer in chosen)]
        now = {node.launcher: node.host for node in self.members}
        for word, first, second in (("without", before, now), ("with", now, before)):
            if before and (hosts := [first[key] for key in first if key not in second]):
                say(f"the run goes on {word} {', '.join(hosts)}: {len(now)} of {me.nodes} nodes")
        for connection in self._connections:
            connection.is_member = connection in chosen
        for connection in [*self._connections]:
            if connection.is_member:
                connection.is_ready = connection.is_refused = False
                connection.send({"begins": me.start})
            elif connection.is_ready:
                connection.send({"wait": self._why_wait()})
            else:  # the other node was late, and has to join again
                self._connections.remove(connection)
                connection.socket.close()

    def _end_if_saved(self, me: Node, chosen: "list[_Connection]", *, has_changed: bool) -> None:
        """End a run that was stopped, unless it can go on with different nodes."""
        if has_changed and 1 + len(chosen) >= me.required_nodes:
            return
        if has_changed:
            remaining = f"{1 + len(chosen)} of {me.nodes} nodes remain"
            say(f"the run ends: {remaining}, fewer than --min_machines {me.required_nodes}")
        self.close(PREEMPTED)
        raise RunHasEnded(PREEMPTED)

    def _waiting_problem(self, chosen: "list[_Connection]", before: set[str]) -> ConfigError | None:
        """Return why processes that stalled waiting for other ranks are not restarted, or None."""
        now = {node.launcher: node for node in (self._me, *(peer.node for peer in chosen))}
        waited = [n.host for name, n in now.items() if n.has_waited and name in before]
        if not waited or before - now.keys():
            return None
        return ConfigError(
            f"processes on {', '.join(waited)} stalled waiting for other ranks, but no node has"
            " left: the error would repeat, so no process is started again."
        )

    def _gather(self, me: Node, seconds: float, has_saved: bool) -> float:
        """Wait until all expected nodes have joined; return the time limit that applied.

        The limit is `seconds`, or less if a new node 0 continues a run or no node can start.
        """
        began = time.monotonic()
        self._deadline, say_at = began + seconds, began + SAY_SECONDS
        while (now := time.monotonic()) < self._deadline:
            # spares do not count at the first start, which waits for the nodes themselves
            joined = [peer for peer in self._ready() if self.members or peer.node.rank < me.nodes]
            is_continued = any(not peer.node.is_new for peer in joined) and not self.members
            if is_continued and me.min_nodes:
                # this new node 0 continues a run that may go on without some of its nodes
                self._deadline = min(self._deadline, began + JOIN_SECONDS)
            if self._problem:
                self._deadline = min(self._deadline, now + LATE_SECONDS)
                joined = [peer for peer in self._connections if peer.node is not NOBODY]
            needed = me.required_nodes * (not has_saved) if self.members else me.nodes
            is_member_missing = any(
                peer.is_member and not (peer.is_ready or peer.is_refused)
                for peer in self._connections
            )
            if 1 + len(joined) >= needed and not is_member_missing:
                break
            self._read(min(say_at, self._deadline) - now)
            if time.monotonic() > say_at:
                say_at += SAY_SECONDS
                print(f"waiting for {self._missing(me)}", flush=True)
        return self._deadline - began

    def _ready(self) -> "list[_Connection]":
        """Return the nodes that wait for the next start, by rank: the oldest node of each rank."""
        oldest: dict[int, _Connection] = {}
        for connection in self._connections:
            oldest.setdefault(connection.node.rank, connection)
        return [oldest[rank] for rank in sorted(oldest) if oldest[rank].is_ready]

    def _why_wait(self) -> str:
        """Return why a node has to wait while others are training."""
        trains = f"the run is training on {len(self.members)} of {self.members[0].nodes} nodes: "
        if self.newcomer:
            return f"{trains}it will save, then go on with this node too"
        return f"{trains}this node will wait until a node is missing"

    def _missing(self, me: Node) -> str:
        """Return the names of the nodes that have not joined, such as "nodes 1, 5 of 8"."""
        joined = {peer.node.rank for peer in self._ready()}
        ranks = [str(rank) for rank in range(1, me.nodes) if rank not in joined]
        if not ranks:  # a member with the rank of a spare is late
            ranks = [str(node.rank) for node in self.members[1:] if node.rank not in joined]
        return f"node{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {me.nodes}"

    def _missing_problem(self, chosen: "list[_Connection]", seconds: float) -> ConfigError | None:
        """Return an error naming the missing nodes if too few joined; None otherwise."""
        me = self._me
        if 1 + len(chosen) >= me.required_nodes:
            return None
        names = ", ".join(f"{n.rank} ({n.host})" for n in (me, *(peer.node for peer in chosen)))
        return TransientError(
            f"{self._missing(me)} did not connect to {self._address} within {seconds:.0f} s;"
            f" connected: {names}. Read the output of the missing nodes; start them, or start this"
            f" run on fewer nodes. {self._address} must be an address of node 0, which is"
            f" {me.host}."
        )

    def _join_problem(self, connection: "_Connection") -> ConfigError | None:
        """Return why a node cannot join; None if it can."""
        me, node = self._me, connection.node
        options = {"nodes": "--num_machines", "world_size": "--num_processes", "run": "-m"}
        options["min_nodes"] = "--min_machines"
        if me.is_new and node.is_new and not self.members:
            options["preflight"] = "--preflight"
        for name, option in options.items():
            own_value, value = getattr(me, name), getattr(node, name)
            if own_value != value:
                return ConfigError(
                    f"{node.host} was started with {option} {value}, {me.host} with {own_value}:"
                    f" give all nodes the same {option}; if these are two runs on one host, give"
                    " each its own --main_process_port."
                )
        if node.code != me.code:
            return ConfigError(
                f"the code on {node.host} (hash {node.code}) differs from that on {me.host}"
                f" ({me.code}): give both the same copy of the project; if it was edited during the"
                " run, start all nodes again."
            )
        others = [peer.node for peer in self._connections if not peer.is_closed]
        same_rank = [other for other in (me, *others) if other.rank == node.rank]
        first = next((other for other in same_rank if other is not node), None)
        # once the run has started, a second node of the same rank waits until the first has left
        if not first or (self.members and node.rank):
            return _refusal(node)
        # on the same host this may be a restarted pod whose old connection was cut off
        kind = TransientError if first.host == node.host else ConfigError
        return kind(
            f"{first.host} ({first.ip}) and {node.host} ({node.ip}) were both started as node"
            f" {node.rank}: give each its own --machine_rank, 0 to {me.nodes - 1}."
        )

    def _probe_all(self, me: Node, chosen: "list[_Connection]") -> bool:
        """Have all nodes connect to each other; return False to retry without some of them."""
        failures, silent = self._probes(chosen)
        if failures and not silent and me.min_nodes:
            # a node may have left after it sent its results; then the second round finds it silent
            failures, silent = self._probes(chosen)
        others = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
        problem = TransientError(
            f"{'; '.join(failures[:4])}{others}. Allow connections between the nodes on all ports,"
            " or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that allows them"
            " (launch/network.sh)."
        )
        # the members reached each other before, so a newcomer in a failed connection is at fault
        faulty = [
            peer
            for peer in chosen
            if self.members
            and not peer.is_member
            and any(peer.node.host in failure for failure in failures)
        ]
        left_out = silent or faulty
        if left_out and 1 + len(chosen) - len(left_out) >= me.required_nodes:
            for connection in left_out:
                if not silent:
                    say(f"the run goes on without {connection.node.host}: {problem}")
                    connection.send({"error": str(problem), "is_transient": True})
                self._connections.remove(connection)
                connection.socket.close()
            return False
        if failures:
            self._problem = problem
        return True

    def _probes(self, chosen: "list[_Connection]") -> "tuple[list[str], list[_Connection]]":
        """Return messages about failed connections between nodes, and nodes that did not answer."""
        for connection in chosen[:1]:
            self._me = with_own_address(self._me, connection.socket)
        nodes = [asdict(self._me), *(asdict(peer.node) for peer in chosen)]
        for connection in chosen:
            connection.send({"nodes": nodes})
        failures, silent = _probe(self._me, nodes), []
        deadline = time.monotonic() + 6 * CONNECT_SECONDS  # for all nodes together
        for connection in chosen:
            try:
                failures += connection.receive(deadline - time.monotonic())["probed"]
            except (OSError, ValueError, LookupError, TypeError) as error:
                failures.append(f"{connection.node.host} stopped answering ({error})")
                silent.append(connection)
        return failures, silent

    # ---- every other node ------------------------------------------------------------------------
    def _join(self, me: Node, seconds: float) -> None:
        """Try to connect to node 0 until it answers, and probe the other nodes."""
        deadline = time.monotonic() + seconds
        say_at = time.monotonic() + SAY_SECONDS
        while True:
            failure: Exception = ConnectionError("it was told to stop")
            self._is_waiting = False
            try:
                answer = self._ask(me, deadline)
                if not (answer.get("may_return") and self._node_0_seconds):
                    break
            # node 0 has not started, is restarting, or runs a different version
            except (OSError, ValueError, TypeError, LookupError) as error:
                failure = error
            self.close()
            if self._is_waiting:  # the run has lost its node 0
                seconds = self._node_0_seconds
                deadline = time.monotonic() + seconds
            if time.monotonic() > say_at:
                say_at = time.monotonic() + SAY_SECONDS
                say(f"waiting for node 0 at {self._address}:{self._port} ({failure})")
            if time.monotonic() > deadline:
                raise TransientError(
                    f"node 0 did not answer at {self._address}:{self._port} within {seconds:.0f} s"
                    f" ({failure}), tried from {me.host} ({me.ip}): start it, correct"
                    " --main_process_ip, or open the port in the firewall."
                )
            time.sleep(0.2)
        if "ended" in answer:
            raise RunHasEnded(int(answer["ended"]))
        if "error" in answer:
            kind = TransientError if answer["is_transient"] else ConfigError
            raise kind(printable(answer["error"]))

    def _ask(self, me: Node, deadline: float) -> dict[str, Any]:
        """Ask node 0 for a place in the next start; return its answer: begins, error or ended."""
        if not self._connections:
            node_0 = socket.create_connection((self._address, self._port), CONNECT_SECONDS)
            self._connections = [_Connection(node_0, self._lost_seconds)]
        connection, nodes = self._connections[0], []
        me = with_own_address(me, connection.socket)
        connection.send({"node": asdict(me)})
        while True:
            answer = connection.receive(max(0.0, deadline - time.monotonic()) + ANSWER_SECONDS)
            if "nodes" in answer:
                nodes = [parse_node(node) for node in answer["nodes"]]
                connection.send({"probed": _probe(me, answer["nodes"])})
            elif "stay" in answer:
                deadline = time.monotonic() + float(answer["stay"])
            elif "wait" in answer:
                say(printable(answer["wait"]))
                deadline, self._is_waiting = float("inf"), True
            elif "begins" in answer:
                self.members = nodes
                connection.node, connection.is_member = nodes[0], True
                return answer
            elif "error" in answer or "ended" in answer:
                return answer


def _probe(me: Node, nodes: list[dict[str, Any]]) -> list[str]:
    """Connect to every other node; return a message for each node that cannot be reached."""

    def probe(node: dict[str, Any]) -> str:
        try:
            socket.create_connection((node["ip"], node["port"]), CONNECT_SECONDS).close()
        except OSError as error:
            return (
                f"{me.host} ({me.interface} {me.ip}) cannot reach {node['host']}"
                f" ({node['interface']} {node['ip']}): {error}"
            )
        return ""

    others = [node for node in nodes if node["rank"] != me.rank]
    with ThreadPoolExecutor(64) as pool:
        return [failure for failure in pool.map(probe, others) if failure]


def _refusal(node: Node) -> ConfigError | None:
    if not node.refusal:
        return None
    return ConfigError(f"{node.host} does not start its processes again: {node.refusal}.")


def _listen(me: Node, port: int) -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=8 * me.nodes + 8, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise TransientError(
            f"port {port} cannot be opened on {me.host} ({error.strerror}): another run may be"
            " using it; give all nodes a different --main_process_port."
        ) from error


class _Connection:
    """A connection to another node that carries messages, one line of JSON each."""

    def __init__(self, connection: socket.socket, lost_seconds: float) -> None:
        """Have the kernel close the socket if its peer does not answer for `lost_seconds`."""
        self.socket = connection
        self.node = NOBODY  # the node at the other end, once it has described itself
        self.inbox: deque[dict[str, Any]] = deque()
        self.is_member = False  # the node takes part in the current start
        self.is_ready = False  # the node is waiting for the next start
        self.is_refused = False  # the node cannot take part in the next start
        self.is_closed = False
        self.is_lost = False  # the kernel has closed the socket, since the peer does not answer
        self._rest = b""  # the beginning of a message whose end has not arrived
        self._began = time.monotonic()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        interval = max(1, int(lost_seconds / 6))
        options = {"TCP_KEEPIDLE": interval, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": 5}
        options["TCP_USER_TIMEOUT"] = int(1000 * lost_seconds)
        for name, value in options.items():
            if hasattr(socket, name):  # TCP_USER_TIMEOUT exists on Linux only
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_mute(self) -> bool:
        """Return whether the other end has not described itself in time."""
        return self.node is NOBODY and time.monotonic() > self._began + CONNECT_SECONDS

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; ignore errors, since `read` notices that a peer has left."""
        with suppress(OSError):
            self.socket.settimeout(CONNECT_SECONDS)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> None:
        """Move the messages that have arrived to the inbox, without waiting."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(1 << 16):
                self._rest += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:  # the other launcher was killed
            self.is_closed = True
        except OSError:
            self.is_closed = self.is_lost = True
        *lines, self._rest = self._rest.split(b"\n")
        self.is_closed |= len(self._rest) > MAX_MESSAGE_BYTES
        try:
            self.inbox += map(json.loads, lines)
        except (ValueError, RecursionError):  # the peer is not a node of this run
            self.is_closed = True

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message and return it.

        Raises:
            OSError: no message arrived in time, or the peer closed the connection.
        """
        deadline = time.monotonic() + seconds
        self.read()  # a message may have arrived, even if no time is left
        while not self.inbox:
            if self.is_closed:
                raise ConnectionError("it closed the connection")
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            wait([self.socket], min(left, SAY_SECONDS))
            self.read()
        return self.inbox.popleft()
