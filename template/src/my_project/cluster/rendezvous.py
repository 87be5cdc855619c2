"""The nodes of a run meet before its processes start: who is there, and who reaches whom.

torchrun waits for a node that never comes, or for an address that nobody has, for 15 minutes and
ends with a traceback. Here each node calls node 0 at the address and port that training will use,
says who it is, and tries a connection to every other node. Whatever is wrong, all nodes end with
the same sentence. No word of it needs torch.
"""

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from ..config import ConfigError, TransientError

CONNECT_SECONDS = 5.0  # for one connection between two nodes
LATE_SECONDS = 10.0  # for which node 0 stays to tell latecomers what is wrong
LONGEST_MESSAGE = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node says of itself."""

    rank: int
    nodes: int
    processes: int  # of the whole run
    run: str  # what is trained; the same on every node
    host: str
    interface: str
    ip: str
    port: int = 0  # where it can be tried
    token: str = ""  # of this start


# ---- which interface the others are reached by ---------------------------------------------------
def interfaces() -> dict[str, str]:
    """List the IP address of each interface."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, address.address.split("%")[0])
    return found


def interface_to(address: str) -> tuple[str, str]:
    """Find the interface by which this node reaches the main one, and its IP address.

    GLOO_SOCKET_IFNAME decides where it is set. On the main node itself the name may stand for a
    loopback address (Debian's 127.0.1.1), which the others could not use; then the one interface
    that is none is taken.

    Raises:
        ConfigError: a variable names an interface that this node lacks, or loopback.
    """
    here = interfaces()
    usable = {name: ip for name, ip in here.items() if not _is_loopback(ip)}
    listed = ", ".join(f"{name} ({ip})" for name, ip in usable.items()) or "none but loopback"
    gloos = os.environ.get("GLOO_SOCKET_IFNAME")
    wanted = {
        "GLOO_SOCKET_IFNAME": f"={gloos}" if gloos else "",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", ""),
    }
    for variable, pattern in wanted.items():
        if pattern and not any(_matches(name, pattern) for name in usable):
            raise ConfigError(
                f"{variable} is {os.environ[variable]}, but {socket.gethostname()} has no such"
                f" interface to reach others by; it has {listed}. Mend it where it is set"
                " (launch/network.sh)."
            )
    if gloos:
        first = next(name for name in gloos.split(",") if name in usable)
        return gloos, usable[first]
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; the kernel chooses the way
            ip = probe.getsockname()[0]
    except OSError:  # a name that is not known yet: a pod's, at its start
        ip = ""
    for name, its in usable.items():
        if its == ip:
            return name, ip
    states = psutil.net_if_stats()
    up = [name for name in usable if name in states and states[name].isup]
    if len(up) == 1:
        return up[0], usable[up[0]]
    return "", ip  # several to choose from: gloo and NCCL decide


def _is_loopback(ip: str) -> bool:
    return ip.startswith("127.") or ip == "::1"


def _matches(name: str, wanted: str) -> bool:
    """Tell whether NCCL would use the interface: prefixes, ^ for all but, = for whole names."""
    found = re.fullmatch(r"(\^?)(=?)(.*)", wanted)
    assert found
    excluded, exact, names = found.groups()
    hit = any(name == n if exact else name.startswith(n) for n in names.split(","))
    return hit != bool(excluded)


# ---- the call ------------------------------------------------------------------------------------
def roll_call(
    me: Node, address: str, port: int, seconds: float, say: Callable[[str], None] = print
) -> list[Node]:
    """Meet the other nodes.

    Args:
        me: this node.
        address: of node 0, as the others reach it.
        port: on which node 0 waits; free again afterwards.
        seconds: how long to wait for all nodes to come.
        say: told every half minute what is being waited for.

    Returns:
        All nodes, by rank.

    Raises:
        ConfigError: on every node, what is wrong and what to do; a TransientError where another try
            may find the nodes there, reachable and the port free.
    """
    family = socket.AF_INET6 if ":" in me.ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as door:  # tried by others; nobody answers
        try:
            door.bind((me.ip if me.interface else "", 0))
        except OSError:
            door.bind(("", 0))
        door.listen(me.nodes + 8)
        me = Node(
            **asdict(me) | {"port": door.getsockname()[1], "token": me.token or uuid.uuid4().hex}
        )
        deadline = time.monotonic() + seconds
        if me.rank == 0:
            answer = _preside(me, address, port, deadline, seconds, say)
        else:
            answer = _attend(me, address, port, deadline, seconds, say)
    if answer.get("error"):
        raise (TransientError if answer["is_transient"] else ConfigError)(answer["error"])
    return [Node(**node) for node in answer["nodes"]]


def _preside(
    me: Node, address: str, port: int, deadline: float, seconds: float, say: Callable
) -> dict[str, Any]:
    """Be node 0: wait for all, let them try each other, tell them the result."""
    come: dict[int, Node] = {0: me}
    lines: dict[str, _Line] = {}  # by the token of who calls
    error, is_transient = "", True
    with _open_port(me, port) as server:
        while len(lines) < me.nodes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, min(30.0, deadline - time.monotonic())))
            try:
                caller, _ = server.accept()
            except TimeoutError:
                if not error and time.monotonic() < deadline:
                    missing = [rank for rank in range(me.nodes) if rank not in come]
                    say(f"waiting for {_named(missing)} of {me.nodes}")
                continue
            line = _Line(caller)
            try:
                node = Node(**line.read(CONNECT_SECONDS))
            except (OSError, ValueError, TypeError):
                line.close()  # not one of ours: a port scan, another run's torchrun
                continue
            for token in [token for token, other in lines.items() if other.has_hung_up]:
                lines.pop(token).close()  # started again, or elsewhere: a pod that was evicted
                come = {rank: other for rank, other in come.items() if other.token != token}
            wrong = _mismatch(me, node) or _twice(come.get(node.rank), node)
            if wrong and not error:
                # the same host: perhaps a pod that is there again, whose connection was cut off
                first = come.get(node.rank)
                error, is_transient = wrong, bool(first and first.host == node.host)
                deadline = time.monotonic() + LATE_SECONDS
            come.setdefault(node.rank, node)
            lines[node.token] = line
        if not error and len(come) < me.nodes:
            error = _absent(me, list(come.values()), address, seconds)
        nodes = [] if error else [asdict(come[rank]) for rank in range(me.nodes)]
        if not error:
            for line in lines.values():
                line.write({"nodes": nodes})
            failures = _try_others(me, nodes)
            for node in come.values():
                try:
                    if node is not me:
                        failures += lines[node.token].read(6 * CONNECT_SECONDS)
                except (OSError, ValueError) as lost:
                    failures.append(f"{node.host} fell silent ({lost})")
            error = _unreached(failures)
        answer = {"error": error, "is_transient": is_transient, "nodes": nodes}
        for line in lines.values():
            line.write(answer)
            line.close()
    return answer


def _attend(
    me: Node, address: str, port: int, deadline: float, seconds: float, say: Callable
) -> dict[str, Any]:
    """Be any other node: call node 0 until it answers, and do what it says."""
    said = time.monotonic()
    why: Exception | str = ""
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            with closing(_Line(connection)) as line:
                line.write(asdict(me))
                answer = line.read(deadline - time.monotonic() + LATE_SECONDS)
                if "error" not in answer:
                    line.write(_try_others(me, answer["nodes"]))
                    answer = line.read(12 * CONNECT_SECONDS)
            return answer
        except (OSError, ValueError) as error:  # not there yet; or it ended, and starts again
            why = error
        if time.monotonic() - said > 30:
            said = time.monotonic()
            say(f"waiting for node 0 at {address}:{port} ({why})")
        time.sleep(0.5)
    return {
        "error": f"node 0 did not answer at {address}:{port} within {seconds:.0f} s ({why}), tried"
        f" from {me.host} ({me.ip}): start it, give its right address as --main_process_ip, or"
        " open the port in the firewall.",
        "is_transient": True,
    }


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
    """Name nodes by their ranks: node 3, or nodes 1, 2, 5."""
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))


def _mismatch(me: Node, node: Node) -> str:
    """Say what two nodes were told differently."""
    for name, flag in (("nodes", "--num_machines"), ("processes", "--num_processes")):
        mine, theirs = getattr(me, name), getattr(node, name)
        if mine != theirs:
            return (
                f"{node.host} was told of {theirs} {name}, {me.host} of {mine}: give every node the"
                f" same {flag}."
            )
    if me.run != node.run:
        return (
            f"{node.host} would train {node.run}, {me.host} {me.run}: give every node the same"
            " arguments, and every run on one host its own --main_process_port."
        )
    return ""


def _twice(first: Node | None, second: Node) -> str:
    if first is None or first.token == second.token:
        return ""
    return (
        f"{first.host} ({first.ip}) and {second.host} ({second.ip}) both say that they are node"
        f" {second.rank}: give each its own --machine_rank, 0 to {first.nodes - 1}."
    )


def _absent(me: Node, here: list[Node], address: str, seconds: float) -> str:
    missing = [rank for rank in range(me.nodes) if rank not in {n.rank for n in here}]
    sentence = (
        f"{_named(missing)} of {me.nodes} did not come to {address} within {seconds:.0f} s; there"
        f" are {', '.join(f'{n.rank} ({n.host})' for n in here)}. Look at what it printed;"
        " start it, or start this run on fewer nodes."
    )
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError:
        resolved = set()
    own = set(interfaces().values())
    if not resolved & own and not any(map(_is_loopback, resolved)):
        sentence += (
            f" And {address} is no address of node 0, {me.host} ({', '.join(sorted(own))}): is"
            " --machine_rank 0 on the right host?"
        )
    return sentence


def _try_others(me: Node, nodes: list[dict[str, Any]]) -> list[str]:
    """Connect to every other node; say which could not be reached."""

    def attempt(node: dict[str, Any]) -> str:
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
        return [failure for failure in pool.map(attempt, others) if failure]


def _unreached(failures: list[str]) -> str:
    if not failures:
        return ""
    more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
    return (
        f"{'; '.join(failures[:4])}{more}. Let the nodes open any port to each other, or name the"
        " interface by which they do in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        " (launch/network.sh)."
    )


class _Line:
    """Messages over a connection, one JSON text per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rb")

    def write(self, message: Any) -> None:
        """Send; whoever has left is noticed when read from."""
        try:
            self.connection.settimeout(CONNECT_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def read(self, seconds: float) -> Any:
        """Wait for a message.

        Raises:
            OSError: none came in time.
            ValueError: what came is none, or the other side has left.
        """
        self.connection.settimeout(max(0.1, seconds))
        line = self.file.readline(LONGEST_MESSAGE)
        if not line:
            raise ValueError("it hung up")
        return json.loads(line)

    @property
    def has_hung_up(self) -> bool:
        """Tell whether the other side has left."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Hang up."""
        self.file.close()
        self.connection.close()
