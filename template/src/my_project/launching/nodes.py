"""The launchers of all nodes: they meet before each start, and know which has left or come.

torchrun waits 15 minutes for a missing node or an unreachable address, and then ends with a
traceback. Here each node connects to node 0 at the address and port that all were given, sends a
description of itself, and tries a connection to every other node. If anything is wrong, all nodes
end with the same message. The launchers stay connected to that of node 0, which notices within half
a minute that a host has crashed or been cut off, where gloo and NCCL would wait for ten.

With --min_machines a run goes on without nodes that have left, and takes nodes that come: one that
was lost, another in its place, or a spare. Node 0 alone decides who trains, so that the two halves
of a network that was cut in two never train in one folder: the half without it ends, or waits for
it. Imports no torch.
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

CONNECT_SECONDS = 5.0  # timeout of one connection between two nodes, and of its first message
ANSWER_SECONDS = 60.0  # within which node 0 answers, once its own time to wait has passed
JOIN_SECONDS = 30.0  # how long a new node 0 waits for the rest of a run that has lost it
LATE_SECONDS = 10.0  # how long node 0 stays after an error, to report it to nodes that come late
SAY_SECONDS = 30.0  # between lines about nodes that are missing
LOST_SECONDS = 30.0  # without an answer of a host's kernel
MAX_MESSAGE_BYTES = 1 << 20
THIS_LAUNCHER = uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node sends about itself."""

    rank: int  # of the node; `nodes` or more for a spare
    nodes: int  # that train
    min_nodes: int  # that go on when others have left; 0 if all are needed
    world_size: int  # processes of `nodes` nodes
    run: str  # what is trained; the same on every node
    code: str = ""  # files.code_digest of what its processes run
    host: str
    interface: str
    ip: str
    port: int = 0  # to which the other nodes try to connect; on node 0 then that of torch's store
    refusal: str = ""  # why it will not start its processes again after a failure
    has_waited: bool = False  # its processes, for others: they start again if a node has left
    start: str = ""  # Starts.id on node 0, which all nodes take over
    lowered_micro_batch_size: int = 0  # larger ones do not fit in its memory; 0: not known
    launcher: str = THIS_LAUNCHER
    is_new: bool = True  # it has taken part in no start yet

    @property
    def least(self) -> int:
        """Return how many nodes have to be there."""
        return self.min_nodes or self.nodes


NOBODY = Node(
    rank=-1, nodes=0, min_nodes=0, world_size=0, run="", host="", interface="", ip="", launcher=""
)


def received(message: dict[str, Any]) -> Node:
    """Return the node that a message describes, whose text is shown on a terminal.

    Raises:
        TypeError: it is not a node's.
    """
    node = Node(**message)
    for field, kind in Node.__annotations__.items():
        if type(value := getattr(node, field)) is not kind:
            raise TypeError(f"{field} is {value!r}")
    return replace(node, **{k: printable(v) for k, v in message.items() if isinstance(v, str)})


# ---- network interfaces --------------------------------------------------------------------------
def interfaces() -> dict[str, str]:
    """Return the IP address of each interface, without loopback."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            ip = address.address.split("%")[0]
            is_ip = address.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and not ipaddress.ip_address(ip).is_loopback:
                found.setdefault(name, ip)
    return found


def interface_to(address: str) -> tuple[str, str]:
    """Return the interface through which this node reaches the main node, and its IP address.

    GLOO_SOCKET_IFNAME decides if it is set. On the main node itself, its name may resolve to a
    loopback address (Debian's 127.0.1.1), which other nodes cannot use; then the only interface
    that is up is taken. With several, gloo and NCCL choose, and the name is "".
    """
    usable = interfaces()
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        found = [usable[name] for name in names.split(",") if name in usable]
        return names, next(iter(found), "")  # gloo refuses a name that is wrong
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; the kernel chooses the route
            ip = probe.getsockname()[0]
    except OSError:  # the name does not resolve yet, such as that of a pod that is starting
        ip = ""
    for name, its_ip in usable.items():
        if its_ip == ip:
            return name, ip
    states = psutil.net_if_stats()
    up = [name for name in usable if name in states and states[name].isup]
    return (up[0], usable[up[0]]) if len(up) == 1 else ("", ip)


def is_own(address: str) -> bool:
    """Return whether an address or name is one of this host, or is not known."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:  # the name does not resolve yet
        return True
    for family, kind, _, _, at in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(at)
            return True
    return False


# ---- the launchers -------------------------------------------------------------------------------
class OtherNodes:
    """The launchers of other nodes: node 0 is connected to all of them, each of them to node 0.

    The kernel finds out whether a host is there (TCP keepalive), so a launcher that is stopped or
    waits for storage is not lost. Nor is one that has ended, since its processes save first.
    """

    def __init__(
        self,
        address: str,
        port: int,
        lost_seconds: float = LOST_SECONDS,
        node_0_seconds: float = 0.0,
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: of node 0, as the other nodes reach it.
            port: on which the launcher of node 0 listens as long as it runs.
            lost_seconds: after which a host that does not answer is lost.
            node_0_seconds: how long to wait for another launcher of node 0, when it has left.
        """
        self.members: list[Node] = []  # the nodes of the current start, by rank
        self.lost: Node | None = None  # its host does not answer
        self.failed: Node | None = None  # it does not answer, or its processes have failed
        self._me = NOBODY
        self._address, self._port = address, port
        self._lost_seconds, self._node_0_seconds = lost_seconds, node_0_seconds
        self._deadline = 0.0  # of node 0, while it waits for others
        self._is_waiting = False  # as a spare, or a newcomer, while others train
        self._server: socket.socket | None = None  # of node 0
        self._connections: list[_Connection] = []  # the oldest first
        self._problem: ConfigError | None = None  # of a node that all of them need
        # otherwise a process would hold a connection after its launcher has ended
        os.register_at_fork(after_in_child=self.close)

    def meet(self, me: Node, seconds: float, *, has_saved: bool = False) -> None:
        """Wait until the nodes of the next start are there, and check that each reaches each.

        Args:
            me: this node.
            seconds: how long to wait for all nodes, or for node 0.
            has_saved: the run was stopped, and goes on with other nodes than before or not at all.

        Raises:
            ConfigError: on every node, what is wrong and what to do; a TransientError if the same
                command may succeed later (a node was late or unreachable, the port was in use).
            RunHasEnded: no start follows.
        """
        with _listen(me, 0) as probe_socket:  # nothing is ever sent over it
            self._me = me = replace(me, port=probe_socket.getsockname()[1])
            try:
                if me.rank:
                    self._join(me, seconds)
                else:
                    self._serve(me, seconds, has_saved)
            except (ConfigError, RunHasEnded):
                if me.rank or not self.members:  # spares are told at the end of the run
                    self.close()
                raise
        self.lost = self.failed = None

    @property
    def have_failed(self) -> bool:
        """Return whether the processes here have lost others."""
        self._read(0.0)
        return self.failed is not None

    @property
    def has_left(self) -> bool:
        """Return whether a launcher has ended to which this one was connected."""
        expected = min(1, len(self.members) - 1) if self._me.rank else len(self.members) - 1
        return sum(one.is_member for one in self._connections) < expected

    @property
    def newcomer(self) -> str:
        """Return on node 0 which node waits that the run can take in; "" without one."""
        here = 1 + sum(one.is_member for one in self._connections)
        nodes = [one.node for one in self._ready() if not one.is_member]
        if not nodes or here >= self._me.nodes or not self._me.min_nodes:
            return ""
        return f"node {nodes[0].rank} ({nodes[0].host})"

    @property
    def change(self) -> str:
        """Return on node 0 why a run that has saved goes on with other nodes; "" if it does not."""
        return "node left" if self.has_left else self.newcomer and "node came"

    def tell_failure(self) -> None:
        """Tell the other nodes that the processes here have failed, by way of node 0."""
        self._tell(self._me)

    def close(self, code: int | None = None, *, may_return: bool = False) -> None:
        """Close the connections, and tell nodes that wait with which exit code the run has ended.

        Args:
            code: of node 0; None in any other case.
            may_return: node 0 was told to stop, which may not hold for the others.
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
        """Wait for a message, a new connection or the end of one; take in all that are there."""
        listening = [self._server] if self._server else []
        sockets = [connection.socket for connection in self._connections]
        wait([*listening, *sockets], max(0.0, seconds))
        for server in listening:
            with suppress(OSError):  # there are no more
                while True:
                    self._connections.append(_Connection(server.accept()[0], self._lost_seconds))
        told = self.failed
        for connection in [*self._connections]:
            connection.read()
            try:
                while connection.inbox:
                    self._hear(connection, connection.inbox.popleft())
            except (ValueError, TypeError, LookupError):  # a port scan, another run's torchrun
                connection.is_closed = True
        for connection in [one for one in self._connections if one.is_closed or one.is_mute]:
            self._connections.remove(connection)
            connection.socket.close()
            if connection.is_lost and connection.is_member:
                self.lost = self.lost or connection.node
                self.failed = self.failed or connection.node
        if self._server and self.failed and not told:
            self._tell(self.failed)

    def _hear(self, connection: "_Connection", message: dict[str, Any]) -> None:
        if "failed" in message:
            if connection.is_member:
                named = [node for node in self.members if node.rank == message["failed"]]
                self.failed = self.failed or (named or [connection.node])[0]
        elif self._server:
            node = connection.node = received(message["node"])
            connection.is_ready = True
            for other in self._connections:
                if other is not connection and other.node.launcher == node.launcher:
                    other.is_closed = True  # the launcher has lost that connection
            if problem := self._problem_of(connection):
                connection.is_ready, connection.is_refused = False, True
                if connection.is_member or not self.members:
                    self._problem = self._problem or problem
                else:
                    connection.send({"error": str(problem), "is_transient": False})
                    connection.is_closed = True
            elif self.members and not connection.is_member:
                connection.send({"wait": self._waits_for()})
            else:
                left = max(0.0, self._deadline - time.monotonic())
                connection.send({"stay": left + ANSWER_SECONDS})

    # ---- node 0 ----------------------------------------------------------------------------------
    def _serve(self, me: Node, seconds: float, has_saved: bool) -> None:
        """Wait for the other nodes, have them probe each other, send them the result."""
        if not self._server:
            if not is_own(self._address):
                say(
                    f"{me.host} was started as node 0, but has no address {self._address}, which"
                    " the others were given: if that is another host, give this one another"
                    " --machine_rank."
                )
            self._server = _listen(me, self._port)
            self._server.setblocking(False)
        self._problem = self._problem or _refusal(me)
        before = {one.launcher for one in self.members}
        while True:
            self._gather(me, seconds, has_saved)
            chosen = self._ready()[: me.nodes - 1]
            launchers = {me.launcher, *(one.node.launcher for one in chosen)}
            if has_saved and not self._problem:
                self._end_if_saved(me, chosen, has_changed=launchers != before)
            self._problem = (
                self._problem
                or self._too_few(me, chosen, seconds)
                or self._waited(me, chosen, before)
            )
            # a node that does not answer is left out, if enough others are there
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
        """Have the chosen nodes begin the next start; say which have left and come."""
        before = {one.launcher: one.host for one in self.members}
        self.members = [me, *(one.node for one in chosen)]
        now = {one.launcher: one.host for one in self.members}
        for word, some, others in (("without", before, now), ("with", now, before)):
            if before and (hosts := [some[one] for one in some if one not in others]):
                say(f"the run goes on {word} {', '.join(hosts)}: {len(now)} of {me.nodes} nodes")
        for connection in self._connections:
            connection.is_member = connection in chosen
        for connection in [*self._connections]:
            if connection.is_member:
                connection.is_ready = connection.is_refused = False
                connection.send({"begins": me.start})
            elif connection.is_ready:
                connection.send({"wait": self._waits_for()})
            else:  # it has not come in time, and has to join again
                self._connections.remove(connection)
                connection.socket.close()

    def _end_if_saved(self, me: Node, chosen: "list[_Connection]", *, has_changed: bool) -> None:
        """End a run that was stopped, unless it can go on with other nodes than before."""
        if has_changed and 1 + len(chosen) >= me.least:
            return
        if has_changed:
            say(f"the run ends: {1 + len(chosen)} nodes are left, fewer than --min_machines")
        self.close(PREEMPTED)
        raise RunHasEnded(PREEMPTED)

    def _waited(
        self, me: Node, chosen: "list[_Connection]", before: set[str]
    ) -> ConfigError | None:
        """Return why processes that have waited for others are not started again."""
        now = {node.launcher: node for node in (me, *(one.node for one in chosen))}
        waited = [n.host for name, n in now.items() if n.has_waited and name in before]
        if not waited or before - now.keys():
            return None
        return ConfigError(
            f"processes on {', '.join(waited)} have waited for others, but no node has left: the"
            " error would repeat, so none starts again."
        )

    def _gather(self, me: Node, seconds: float, has_saved: bool) -> None:
        """Wait until all nodes are there that can be awaited, or for so many seconds."""
        began = time.monotonic()
        self._deadline, say_at = began + seconds, began + SAY_SECONDS
        while (now := time.monotonic()) < self._deadline:
            # at first the nodes themselves are awaited, not spares in their place
            there = [one for one in self._ready() if self.members or one.node.rank < me.nodes]
            if any(not one.node.is_new for one in there) and not self.members:
                # node 0 is a new one, of a run that may go on without some of its nodes
                self._deadline = min(self._deadline, began + JOIN_SECONDS)
            if self._problem:
                self._deadline = min(self._deadline, now + LATE_SECONDS)
                there = [one for one in self._connections if one.node is not NOBODY]
            least = me.least * (not has_saved) if self.members else me.nodes
            is_awaited = any(
                one.is_member and not (one.is_ready or one.is_refused) for one in self._connections
            )
            if 1 + len(there) >= least and not is_awaited:
                return
            self._read(min(say_at, self._deadline) - now)
            if time.monotonic() > say_at:
                say_at += SAY_SECONDS
                print(f"waiting for {self._missing(me)}", flush=True)

    def _ready(self) -> "list[_Connection]":
        """Return the nodes that wait for the next start, by rank; of each rank the oldest."""
        oldest: dict[int, _Connection] = {}
        for connection in self._connections:
            oldest.setdefault(connection.node.rank, connection)
        return [oldest[rank] for rank in sorted(oldest) if oldest[rank].is_ready]

    def _waits_for(self) -> str:
        """Return what a node waits for that is there while others train."""
        trains = f"the run trains on {len(self.members)} of {self.members[0].nodes} nodes: "
        if self.newcomer:
            return f"{trains}it saves, and goes on with this node too"
        return f"{trains}this one waits until a node is missing"

    def _missing(self, me: Node) -> str:
        """Return the names of the nodes that have not joined: nodes 1, 5 of 8."""
        there = {one.node.rank for one in self._ready()}
        ranks = [str(rank) for rank in range(1, me.nodes) if rank not in there]
        return f"node{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {me.nodes}"

    def _too_few(
        self, me: Node, chosen: "list[_Connection]", seconds: float
    ) -> TransientError | None:
        if 1 + len(chosen) >= me.least:
            return None
        names = ", ".join(f"{n.rank} ({n.host})" for n in (me, *(one.node for one in chosen)))
        return TransientError(
            f"{self._missing(me)} did not connect to {self._address} within {seconds:.0f} s;"
            f" connected: {names}. Read the output of the missing nodes; start them, or start this"
            f" run on fewer nodes. {self._address} must be an address of node 0, which is"
            f" {me.host}."
        )

    def _problem_of(self, connection: "_Connection") -> ConfigError | None:
        """Return why a node cannot join; None if it can."""
        me, node = self._me, connection.node
        options = {"nodes": "--num_machines", "world_size": "--num_processes", "run": "-m"}
        options["min_nodes"] = "--min_machines"
        for name, option in options.items():
            mine, theirs = getattr(me, name), getattr(node, name)
            if mine != theirs:
                return ConfigError(
                    f"{node.host} was started with {option} {theirs}, {me.host} with {mine}: give"
                    " every node the same, and every run on one host its own --main_process_port."
                )
        if node.code != me.code:
            return ConfigError(
                f"the code on {node.host} (hash {node.code}) is not that on {me.host} ({me.code}):"
                " give both the same copy of the project; if it was edited while the run was under"
                " way, start all nodes again."
            )
        others = [one.node for one in self._connections if not one.is_closed]
        same = [one for one in (me, *others) if one.rank == node.rank and one is not node]
        first = same[0] if same else None
        if not first or (self.members and node.rank):  # else it waits until that one has left
            return _refusal(node)
        # on the same host it may be a restarted pod whose old connection was cut off
        kind = TransientError if first.host == node.host else ConfigError
        return kind(
            f"{first.host} ({first.ip}) and {node.host} ({node.ip}) were both started as node"
            f" {node.rank}: give each its own --machine_rank, 0 to {me.nodes - 1}."
        )

    def _probe_all(self, me: Node, chosen: "list[_Connection]") -> bool:
        """Have each node connect to each other; return False to try again without some of them."""
        failures, silent = self._probes(me, chosen)
        if failures and not silent and me.min_nodes:
            # one may have left after its own probes: then it does not answer a second time
            failures, silent = self._probes(me, chosen)
        if silent and 1 + len(chosen) - len(silent) >= me.least:
            for connection in silent:
                self._connections.remove(connection)
                connection.socket.close()
            return False
        if failures:
            more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
            self._problem = TransientError(
                f"{'; '.join(failures[:4])}{more}. Allow connections between the nodes on all"
                " ports, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that"
                " allows them (launch/network.sh)."
            )
        return True

    def _probes(
        self, me: Node, chosen: "list[_Connection]"
    ) -> "tuple[list[str], list[_Connection]]":
        """Return which connections between nodes have failed, and the nodes without an answer."""
        nodes = [asdict(me), *(asdict(one.node) for one in chosen)]
        for connection in chosen:
            connection.send({"nodes": nodes})
        failures, silent = _probe(me, nodes), []
        deadline = time.monotonic() + 6 * CONNECT_SECONDS  # for all of them
        for connection in chosen:
            try:
                failures += connection.receive(deadline - time.monotonic())["probed"]
            except (OSError, ValueError, LookupError, TypeError) as error:
                failures.append(f"{connection.node.host} stopped answering ({error})")
                silent.append(connection)
        return failures, silent

    # ---- every other node ------------------------------------------------------------------------
    def _join(self, me: Node, seconds: float) -> None:
        """Connect to node 0 until it answers, and probe the other nodes."""
        deadline = time.monotonic() + seconds
        say_at = time.monotonic() + SAY_SECONDS
        while True:
            failure: Exception = ConnectionError("it was told to stop")
            self._is_waiting = False
            try:
                answer = self._ask(me, deadline)
                if not (answer.get("may_return") and self._node_0_seconds):
                    break
            # node 0 has not started, is starting again, or answers in another version's words
            except (OSError, ValueError, TypeError, LookupError) as error:
                failure = error
            self.close()
            if self._is_waiting:  # for a run that has lost its node 0
                deadline = time.monotonic() + self._node_0_seconds
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
        """Ask node 0 to take part in the next start; return its last answer, once that begins."""
        if not self._connections:
            at = (self._address, self._port)
            new = _Connection(socket.create_connection(at, CONNECT_SECONDS), self._lost_seconds)
            self._connections = [new]
        connection, nodes = self._connections[0], []
        connection.send({"node": asdict(me)})
        while True:
            answer = connection.receive(max(0.0, deadline - time.monotonic()) + ANSWER_SECONDS)
            if "nodes" in answer:
                nodes = [received(node) for node in answer["nodes"]]
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
    """Connect to every other node; return a message for each that could not be reached."""

    def probe(node: dict[str, Any]) -> str:
        try:
            socket.create_connection((node["ip"], node["port"]), CONNECT_SECONDS).close()
        except OSError as error:
            return (
                f"{me.host} ({me.interface} {me.ip}) does not reach {node['host']}"
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
            f"port {port} cannot be opened on {me.host} ({error.strerror}): another run may use it;"
            " give another --main_process_port on every node."
        ) from error


class _Connection:
    """A connection to another node that carries messages, one line of JSON each."""

    def __init__(self, connection: socket.socket, lost_seconds: float) -> None:
        """Have the kernel end it once the other host has not answered for so many seconds."""
        self.socket = connection
        self.node = NOBODY  # at its other end, once that has said who it is
        self.inbox: deque[dict[str, Any]] = deque()
        self.is_member = False  # the node takes part in the current start
        self.is_ready = False  # it waits for the next one
        self.is_refused = False
        self.is_closed = False
        self.is_lost = False  # by the kernel
        self._rest = b""
        self._began = time.monotonic()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each = max(1, int(lost_seconds / 6))
        options = {"TCP_KEEPIDLE": each, "TCP_KEEPINTVL": each, "TCP_KEEPCNT": 5}
        options["TCP_USER_TIMEOUT"] = int(1000 * lost_seconds)
        for name, value in options.items():
            if hasattr(socket, name):  # the last one on Linux only
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_mute(self) -> bool:
        """Return whether it has not said in time who it is."""
        return self.node is NOBODY and time.monotonic() > self._began + CONNECT_SECONDS

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a peer that has left is noticed by `read`."""
        with suppress(OSError):
            self.socket.settimeout(CONNECT_SECONDS)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> None:
        """Move what has come into the inbox, without waiting."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(1 << 16):
                self._rest += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:  # its launcher was killed
            self.is_closed = True
        except OSError:
            self.is_closed = self.is_lost = True
        *lines, self._rest = self._rest.split(b"\n")
        self.is_closed |= len(self._rest) > MAX_MESSAGE_BYTES
        try:
            self.inbox += map(json.loads, lines)
        except (ValueError, RecursionError):  # not a node of this run
            self.is_closed = True

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message and return it.

        Raises:
            OSError: none came in time, or the peer closed the connection.
        """
        deadline = time.monotonic() + seconds
        while not self.inbox:
            if self.is_closed:
                raise ConnectionError("it closed the connection")
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            wait([self.socket], min(left, SAY_SECONDS))
            self.read()
        return self.inbox.popleft()
