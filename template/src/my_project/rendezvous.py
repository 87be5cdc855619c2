"""Check that all nodes of a run are there and reach each other, before its processes start.

torchrun waits 15 minutes for a missing node or an unreachable address, and then ends with a
traceback. Here each node connects to node 0 at the address and port that training will use, sends
a description of itself, and tries a connection to every other node. If anything is wrong, all nodes
end with the same message. Then the launchers stay connected to that of node 0, which notices within
half a minute that a host has crashed or been cut off, where gloo and NCCL would wait for ten.
Imports no torch.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from .config import ConfigError
from .files import TransientError

CONNECT_SECONDS = 5.0  # timeout of one connection between two nodes
LATE_SECONDS = 10.0  # how long node 0 stays after an error, to report it to nodes that come late
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
    port: int = 0  # of the probe socket, to which the other nodes connect
    token: str = ""  # a new one at each start
    refusal: str = ""  # why it will not start its processes again after a failure


# ---- network interfaces --------------------------------------------------------------------------
def interfaces() -> dict[str, str]:
    """Return the IP address of each interface."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, address.address.split("%")[0])
    return found


def interface_to(address: str) -> tuple[str, str]:
    """Return the interface through which this node reaches the main node, and its IP address.

    GLOO_SOCKET_IFNAME decides if it is set. On the main node itself, its name may resolve to a
    loopback address (Debian's 127.0.1.1), which other nodes cannot use; then the only interface
    that is up and is not loopback is taken.

    Raises:
        ConfigError: the variable names an interface that this node lacks, or loopback.
    """
    usable = {name: ip for name, ip in interfaces().items() if not _is_loopback(ip)}
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        for name in names.split(","):
            if name in usable:
                return names, usable[name]
        listed = ", ".join(f"{name} ({ip})" for name, ip in usable.items()) or "only loopback"
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME is {names}, but {socket.gethostname()} has no such interface; it"
            f" has {listed}. Fix the variable where it is set (launch/network.sh)."
        )
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
    if len(up) == 1:
        return up[0], usable[up[0]]
    return "", ip  # with several interfaces, gloo and NCCL choose


def _is_loopback(ip: str) -> bool:
    return ip.startswith("127.") or ip == "::1"


# ---- the rendezvous ------------------------------------------------------------------------------
def wait_for_nodes(
    me: Node, address: str, port: int, seconds: float, say: Callable[[str], None] = print
) -> "OtherNodes":
    """Wait until all nodes are there, and check that each reaches each.

    Args:
        me: this node.
        address: of node 0, as the other nodes reach it.
        port: on which node 0 listens; can be listened on again afterwards.
        seconds: how long to wait for all nodes.
        say: called every half minute with the nodes that are missing.

    Returns:
        All nodes, with the connections to those that this one watches.

    Raises:
        ConfigError: on every node, what is wrong and what to do; a TransientError if the same
            command may succeed later (a node was late or unreachable, the port was in use).
    """
    family = socket.AF_INET6 if ":" in me.ip else socket.AF_INET
    # other nodes connect to the probe socket; nothing is ever sent over it
    with socket.socket(family, socket.SOCK_STREAM) as probe_socket:
        try:
            probe_socket.bind((me.ip if me.interface else "", 0))
        except OSError:
            probe_socket.bind(("", 0))
        probe_socket.listen(me.nodes + 8)
        probe_port = probe_socket.getsockname()[1]
        me = Node(**asdict(me) | {"port": probe_port, "token": me.token or uuid.uuid4().hex})
        deadline = time.monotonic() + seconds
        run = _join if me.rank else _serve
        answer, connections = run(me, address, port, deadline, seconds, say)
    if answer.get("error"):
        for connection in connections.values():
            connection.close()
        raise (TransientError if answer["is_transient"] else ConfigError)(answer["error"])
    return OtherNodes([Node(**node) for node in answer["nodes"]], connections)


def _serve(
    me: Node, address: str, port: int, deadline: float, seconds: float, say: Callable
) -> "tuple[dict[str, Any], dict[int, _Connection]]":
    """Run node 0's part: wait for all nodes, have them probe each other, send them the result.

    Returns:
        What it has sent, and the connections by the rank of the node.
    """
    present: dict[int, Node] = {0: me}
    connections: dict[str, _Connection] = {}  # by the token of the node
    error = ""
    is_transient = True
    with _open_port(me, port) as server:
        while len(connections) < me.nodes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, min(30.0, deadline - time.monotonic())))
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                if not error and time.monotonic() < deadline:
                    missing = [rank for rank in range(me.nodes) if rank not in present]
                    say(f"waiting for {_named(missing)} of {me.nodes}")
                continue
            connection = _Connection(accepted)
            try:
                node = Node(**connection.receive(CONNECT_SECONDS))
            except (OSError, ValueError, TypeError):
                connection.close()  # not a node of this run: a port scan, another run's torchrun
                continue
            for token in [token for token, other in connections.items() if other.is_closed]:
                connections.pop(token).close()  # started again, or elsewhere: an evicted pod
                present = {rank: other for rank, other in present.items() if other.token != token}
            problem = _mismatch(me, node) or _same_rank(present.get(node.rank), node)
            if problem and not error:
                # on the same host it may be a restarted pod whose old connection was cut off
                first = present.get(node.rank)
                error = problem
                is_transient = bool(first and first.host == node.host)
                deadline = time.monotonic() + LATE_SECONDS
            present.setdefault(node.rank, node)
            connections[node.token] = connection
        if not error and len(present) < me.nodes:
            error = _missing(me, list(present.values()), address, seconds)
        nodes = [] if error else [asdict(present[rank]) for rank in range(me.nodes)]
        if not error:
            for connection in connections.values():
                connection.send({"nodes": nodes})
            failures = _probe_others(me, nodes)
            for node in present.values():
                try:
                    if node is not me:
                        failures += connections[node.token].receive(6 * CONNECT_SECONDS)
                except (OSError, ValueError) as lost:
                    failures.append(f"{node.host} stopped answering ({lost})")
            error = _unreachable(failures)
        answer = {"error": error, "is_transient": is_transient, "nodes": nodes}
        for connection in connections.values():
            connection.send(answer)
    ranks = {node.token: node.rank for node in present.values()}
    return answer, {ranks.get(token, -1): one for token, one in connections.items()}


def _join(
    me: Node, address: str, port: int, deadline: float, seconds: float, say: Callable
) -> "tuple[dict[str, Any], dict[int, _Connection]]":
    """Run another node's part: connect to node 0 until it answers, and probe the other nodes.

    Returns:
        The answer, and the connection to node 0.
    """
    last_said = time.monotonic()
    failure: Exception | str = ""
    while time.monotonic() < deadline:
        connection = None
        try:
            connected = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            connection = _Connection(connected)
            connection.send(asdict(me))
            answer = connection.receive(deadline - time.monotonic() + LATE_SECONDS)
            if "error" not in answer:
                connection.send(_probe_others(me, answer["nodes"]))
                answer = connection.receive(12 * CONNECT_SECONDS)
            return answer, {0: connection}
        except (OSError, ValueError) as error:  # node 0 has not started, or is starting again
            failure = error
            if connection:
                connection.close()
        if time.monotonic() - last_said > 30:
            last_said = time.monotonic()
            say(f"waiting for node 0 at {address}:{port} ({failure})")
        time.sleep(0.2)
    return {
        "error": f"node 0 did not answer at {address}:{port} within {seconds:.0f} s ({failure}),"
        f" tried from {me.host} ({me.ip}): start it, correct --main_process_ip, or open the port in"
        " the firewall.",
        "is_transient": True,
    }, {}


def _open_port(me: Node, port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port),
            family=family,
            backlog=me.nodes + 8,
            dualstack_ipv6=family == socket.AF_INET6,
        )
    except OSError as error:
        raise TransientError(
            f"port {port} cannot be opened on {me.host} ({error.strerror}): another run may use it;"
            " give another --main_process_port on every node."
        ) from error


def _named(ranks: list[int]) -> str:
    """Return the names of nodes by their ranks: node 3, or nodes 1, 2, 5."""
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))


def _mismatch(me: Node, node: Node) -> str:
    """Return a message if a node will not start, or two were started with different arguments."""
    for one in (me, node):
        if one.refusal:
            return f"{one.host} does not start its processes again: {one.refusal}."
    for name, flag in (("nodes", "--num_machines"), ("world_size", "--num_processes")):
        mine = getattr(me, name)
        theirs = getattr(node, name)
        if mine != theirs:
            return (
                f"{node.host} was started with {flag} {theirs}, {me.host} with {mine}: give every"
                " node the same."
            )
    if me.run != node.run:
        return (
            f"{node.host} would train {node.run}, {me.host} {me.run}: give every node the same"
            " arguments, and every run on one host its own --main_process_port."
        )
    return ""


def _same_rank(first: Node | None, second: Node) -> str:
    """Return a message if two nodes have one rank, else an empty string."""
    if first is None or first.token == second.token:
        return ""
    return (
        f"{first.host} ({first.ip}) and {second.host} ({second.ip}) were both started as node"
        f" {second.rank}: give each its own --machine_rank, 0 to {first.nodes - 1}."
    )


def _missing(me: Node, present: list[Node], address: str, seconds: float) -> str:
    """Return the message about nodes that did not come in time."""
    missing = [rank for rank in range(me.nodes) if rank not in {node.rank for node in present}]
    message = (
        f"{_named(missing)} of {me.nodes} did not connect to {address} within {seconds:.0f} s;"
        f" connected: {', '.join(f'{node.rank} ({node.host})' for node in present)}. Read the"
        " output of the missing nodes; start them, or start this run on fewer nodes."
    )
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError:
        resolved = set()
    own = set(interfaces().values())
    if not resolved & own and not any(map(_is_loopback, resolved)):
        message += (
            f" Also, {address} is not an address of node 0, {me.host} ({', '.join(sorted(own))}):"
            " check that --machine_rank 0 is on the right host."
        )
    return message


def _probe_others(me: Node, nodes: list[dict[str, Any]]) -> list[str]:
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


def _unreachable(failures: list[str]) -> str:
    """Return one message about all failed connections, or an empty string."""
    if not failures:
        return ""
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    return (
        f"{'; '.join(failures[:4])}{more}. Allow connections between the nodes on all ports, or set"
        " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that allows them"
        " (launch/network.sh)."
    )


class _Connection:
    """A connection that carries messages, one line of JSON each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message; a peer that has left is noticed by `receive`."""
        try:
            self.connection.settimeout(CONNECT_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

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

    def __init__(self, nodes: list[Node], connections: dict[int, _Connection]) -> None:
        self.nodes = nodes
        self.lost: Node | None = None  # its host does not answer
        self.failed: Node | None = None  # it does not answer, or its processes have failed
        self._connections = connections
        for connection in connections.values():
            connection.keep_alive()
        # else a process would hold the connection after its launcher has ended
        os.register_at_fork(after_in_child=self.close)

    @property
    def have_failed(self) -> bool:
        """Return whether the processes here have lost others."""
        for rank, connection in list(self._connections.items()):
            try:
                message = connection.connection.recv(len(FAILED))
            except BlockingIOError:
                continue
            except ConnectionResetError:  # its launcher was killed
                message = b""
            except OSError:
                self.lost = self.lost or self.nodes[rank]
                message = FAILED
            if message:
                self.failed = self.failed or self.nodes[rank]
            self._connections.pop(rank).close()
        return self.failed is not None

    def tell_failure(self) -> None:
        """Tell the other nodes that the processes here have failed, by way of node 0."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.connection.send(FAILED)
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
