"""Check that all nodes of a run are there and reach each other, before its processes start.

torchrun waits 15 minutes for a missing node or an unreachable address, and then ends with a
traceback. Here each node connects to node 0 at the address and port that training will use, sends
a description of itself, and tries a connection to every other node. If anything is wrong, all nodes
end with the same message. Then the launchers stay connected to that of node 0, which notices within
half a minute that a host has crashed or been cut off, where gloo and NCCL would wait for ten.
Imports no torch.
"""

import ipaddress
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from ..config import ConfigError
from ..files import TransientError
from ..words import printable, say

CONNECT_SECONDS = 5.0  # timeout of one connection between two nodes
LATE_SECONDS = 10.0  # how long node 0 stays after an error, to report it to nodes that come late
SAY_SECONDS = 30.0  # between lines about nodes that are missing
LOST_SECONDS = 30  # without an answer of a host's kernel
FAILED = b"failed"  # what a launcher says of its processes
MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node sends about itself."""

    rank: int  # of the node
    nodes: int
    world_size: int  # processes of the whole run
    run: str  # what is trained; the same on every node
    host: str
    interface: str
    ip: str
    port: int = 0  # to which the other nodes try to connect
    refusal: str = ""  # why it will not start its processes again after a failure
    start: str = ""  # Starts.id on node 0, which all nodes take over


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


# ---- the rendezvous ------------------------------------------------------------------------------
def wait_for_nodes(me: Node, address: str, port: int, seconds: float) -> "OtherNodes":
    """Wait until all nodes are there, and check that each reaches each.

    Args:
        me: this node.
        address: of node 0, as the other nodes reach it.
        port: on which node 0 listens; can be listened on again afterwards.
        seconds: how long to wait for all nodes.

    Returns:
        The connections to those that this one watches.

    Raises:
        ConfigError: on every node, what is wrong and what to do; a TransientError if the same
            command may succeed later (a node was late or unreachable, the port was in use).
    """
    with _listen(me, 0) as probe_socket:  # nothing is ever sent over it
        me = replace(me, port=probe_socket.getsockname()[1])
        run = _join if me.rank else _serve
        answer, connections = run(me, address, port, seconds)
    if answer["error"]:
        for connection in connections:
            connection.close()
        raise (TransientError if answer["is_transient"] else ConfigError)(answer["error"])
    return OtherNodes(connections, connections[0].node.start if me.rank else me.start)


def _listen(me: Node, port: int) -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=me.nodes + 8, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise TransientError(
            f"port {port} cannot be opened on {me.host} ({error.strerror}): another run may use it;"
            " give another --main_process_port on every node."
        ) from error


def _serve(
    me: Node, address: str, port: int, seconds: float
) -> "tuple[dict[str, Any], list[_Connection]]":
    """Run node 0's part: wait for all nodes, have them probe each other, send them the result."""
    joined: dict[int, _Connection] = {}  # by the rank of the node
    refused: list[_Connection] = []
    error: ConfigError | None = None
    deadline = time.monotonic() + seconds
    if not is_own(address):
        say(
            f"{me.host} was started as node 0, but has no address {address}, which the others were"
            " given: if that is another host, give this one another --machine_rank."
        )
    with _listen(me, port) as server:
        while len(joined) + len(refused) < me.nodes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, min(SAY_SECONDS, deadline - time.monotonic())))
            try:
                connection = _Connection(server.accept()[0])
            except TimeoutError:
                if time.monotonic() < deadline:
                    print(f"waiting for {_missing(me, joined)}", flush=True)
                continue
            try:
                connection.node = received(connection.receive(CONNECT_SECONDS))
            except (OSError, ValueError, TypeError):
                connection.close()  # not a node of this run: a port scan, another run's torchrun
                continue
            for rank in [rank for rank, other in joined.items() if other.is_closed]:
                joined.pop(rank).close()  # started again, or elsewhere: an evicted pod
            if problem := _problem(me, connection.node, joined):
                refused.append(connection)
                error = error or problem
                deadline = min(deadline, time.monotonic() + LATE_SECONDS)
            else:
                joined[connection.node.rank] = connection
        there = [me, *(joined[rank].node for rank in sorted(joined))]
        if not error and len(there) < me.nodes:
            names = ", ".join(f"{n.rank} ({n.host})" for n in there)
            error = TransientError(
                f"{_missing(me, joined)} did not connect to {address} within {seconds:.0f} s;"
                f" connected: {names}. Read the output of the missing nodes; start them, or start"
                f" this run on fewer nodes. {address} must be an address of node 0, which is"
                f" {me.host}."
            )
        error = error or _probe_all(me, [asdict(node) for node in there], joined)
        answer = {"error": str(error or ""), "is_transient": isinstance(error, TransientError)}
        connections = [*(joined[rank] for rank in sorted(joined)), *refused]
        for connection in connections:
            connection.send(answer)
    return answer, connections


def _join(
    me: Node, address: str, port: int, seconds: float
) -> "tuple[dict[str, Any], list[_Connection]]":
    """Run another node's part: connect to node 0 until it answers, and probe the other nodes."""
    deadline = time.monotonic() + seconds
    say_at = time.monotonic() + SAY_SECONDS
    failure: Exception | str = ""
    while time.monotonic() < deadline:
        connection = None
        try:
            connection = _Connection(socket.create_connection((address, port), CONNECT_SECONDS))
            connection.send(asdict(me))
            answer = connection.receive(deadline - time.monotonic() + LATE_SECONDS)
            if "error" not in answer:
                connection.node = received(answer["nodes"][0])
                connection.send(_probe(me, answer["nodes"]))
                answer = connection.receive(12 * CONNECT_SECONDS)
            return answer, [connection]
        # node 0 has not started, is starting again, or answers in another version's words
        except (OSError, ValueError, TypeError, LookupError) as error:
            failure = error
            if connection:
                connection.close()
        if time.monotonic() > say_at:
            say_at = time.monotonic() + SAY_SECONDS
            say(f"waiting for node 0 at {address}:{port} ({failure})")
        time.sleep(0.2)
    raise TransientError(
        f"node 0 did not answer at {address}:{port} within {seconds:.0f} s ({failure}),"
        f" tried from {me.host} ({me.ip}): start it, correct --main_process_ip, or open the port in"
        " the firewall."
    )


def _missing(me: Node, joined: "dict[int, _Connection]") -> str:
    """Return the names of the nodes that have not joined: nodes 1, 5 of 8."""
    ranks = [str(rank) for rank in range(1, me.nodes) if rank not in joined]
    return f"node{'s' * (len(ranks) > 1)} {', '.join(ranks)} of {me.nodes}"


def _problem(me: Node, node: Node, joined: "dict[int, _Connection]") -> ConfigError | None:
    """Return why a node cannot join; None if it can."""
    for one in (me, node):
        if one.refusal:
            return ConfigError(f"{one.host} does not start its processes again: {one.refusal}.")
    options = {"nodes": "--num_machines", "world_size": "--num_processes", "run": "-m"}
    for name, option in options.items():
        mine, theirs = getattr(me, name), getattr(node, name)
        if mine != theirs:
            return ConfigError(
                f"{node.host} was started with {option} {theirs}, {me.host} with {mine}: give every"
                " node the same, and every run on one host its own --main_process_port."
            )
    if node.rank and node.rank not in joined:
        return None
    first = joined[node.rank].node if node.rank else me
    # on the same host it may be a restarted pod whose old connection was cut off
    kind = TransientError if first.host == node.host else ConfigError
    return kind(
        f"{first.host} ({first.ip}) and {node.host} ({node.ip}) were both started as node"
        f" {node.rank}: give each its own --machine_rank, 0 to {me.nodes - 1}."
    )


def _probe_all(
    me: Node, nodes: list[dict[str, Any]], joined: "dict[int, _Connection]"
) -> ConfigError | None:
    """Have every node connect to every other one; return which cannot be reached, if any."""
    for connection in joined.values():
        connection.send({"nodes": nodes})
    failures = _probe(me, nodes)
    for connection in joined.values():
        try:
            failures += connection.receive(6 * CONNECT_SECONDS)
        except (OSError, ValueError) as lost:
            failures.append(f"{connection.node.host} stopped answering ({lost})")
    if not failures:
        return None
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    return TransientError(
        f"{'; '.join(failures[:4])}{more}. Allow connections between the nodes on all ports, or set"
        " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that allows them"
        " (launch/network.sh)."
    )


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
    with ThreadPoolExecutor(min(64, len(others))) as pool:
        return [failure for failure in pool.map(probe, others) if failure]


class _Connection:
    """A connection to another node that carries messages, one line of JSON each."""

    node: Node  # at its other end

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message; a peer that has left is noticed by `receive`."""
        with suppress(OSError):
            self.connection.settimeout(CONNECT_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Any:
        """Wait for a message and return it.

        Raises:
            OSError: none came in time.
            ValueError: the line is not JSON, or the peer closed the connection.
        """
        self.connection.settimeout(max(0.1, seconds))
        line = self.file.readline(MAX_MESSAGE_BYTES)
        if not line:
            raise ValueError("it closed the connection")
        return json.loads(line)

    @property
    def is_closed(self) -> bool:
        """Return whether the peer has closed the connection."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def keep_alive(self) -> None:
        """From now on, never block, and fail once the other host has not answered for long."""
        self.connection.setblocking(False)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seconds = {"TCP_KEEPIDLE": LOST_SECONDS // 6, "TCP_KEEPINTVL": LOST_SECONDS // 6}
        options = seconds | {"TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 1000 * LOST_SECONDS}
        for name, value in options.items():
            if hasattr(socket, name):  # the last one on Linux only
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Close the connection."""
        self.file.close()
        self.connection.close()


# ---- while the processes run ---------------------------------------------------------------------
class OtherNodes:
    """The launchers of other nodes: node 0 is connected to all of them, each of them to node 0.

    The kernel finds out whether a host is there (TCP keepalive), so a launcher that is stopped or
    waits for storage is not lost. Nor is one that has ended, since its processes save first.
    """

    def __init__(self, connections: list[_Connection], start: str) -> None:
        self.start = start  # Node.start of node 0
        self.lost: Node | None = None  # its host does not answer
        self.failed: Node | None = None  # it does not answer, or its processes have failed
        self._connections = connections
        for connection in connections:
            connection.keep_alive()
        # else a process would hold the connection after its launcher has ended
        os.register_at_fork(after_in_child=self.close)

    @property
    def have_failed(self) -> bool:
        """Return whether the processes here have lost others."""
        for connection in [*self._connections]:
            try:
                message = connection.connection.recv(len(FAILED))
            except BlockingIOError:
                continue
            except ConnectionResetError:  # its launcher was killed
                message = b""
            except OSError:
                self.lost = self.lost or connection.node
                message = FAILED
            if message:
                self.failed = self.failed or connection.node
            self._connections.remove(connection)
            connection.close()
        return self.failed is not None

    def tell_failure(self) -> None:
        """Tell the other nodes that the processes here have failed, by way of node 0."""
        for connection in self._connections:
            with suppress(OSError):
                connection.connection.send(FAILED)
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()
        self._connections = []
