"""The rendezvous check: every node ends in time, with the same message."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from my_project.config import ConfigError
from my_project.launching import nodes as meeting
from my_project.launching.nodes import Node
from world import free_port


def node(rank: int, nodes: int = 3, **more) -> Node:
    about = {"world_size": 2 * nodes, "run": "train", "host": f"host{rank}"}
    return Node(
        **{"rank": rank, "nodes": nodes, "interface": "lo", "ip": "127.0.0.1"} | about | more
    )


def meet(*nodes: Node, seconds: float = 20) -> list:
    """Start nodes on one port; return what each of them gets, or its error message.

    A message begins with the exit code of the node.
    """
    port = free_port()

    def call(me: Node) -> meeting.OtherNodes | str:
        try:
            return meeting.wait_for_nodes(me, "127.0.0.1", port, seconds)
        except ConfigError as error:
            return f"{error.exit_code}: {error}"

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(call, nodes))


def send(port: int, message: bytes) -> None:
    """Connect to node 0 as soon as it listens; send a message and leave."""
    for _ in range(100):
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(message)
            return
        except ConnectionRefusedError:
            threading.Event().wait(0.05)


def test_all_nodes_know_each_other_and_a_failure_reaches_all():
    third, first, *others = meet(*(node(rank, 4, start=f"of_{rank}.0") for rank in (3, 0, 1, 2)))
    assert {one.start for one in (third, first, *others)} == {"of_0.0"}
    others.append(third)
    for one in (first, *others):
        watched = [connection.node.host for connection in one._connections]
        assert watched == (["host1", "host2", "host3"] if one is first else ["host0"])
        assert not one.have_failed
    others[0].close()
    assert not first.have_failed
    others[1].tell_failure()
    first.tell_failure()  # at once, before it has read the other's
    assert not others[0].have_failed
    assert others[2].have_failed
    assert others[2].failed.host == "host0"


def test_a_node_that_never_comes_is_named_on_every_node():
    told = meet(node(0), node(2), seconds=1)
    assert told[0] == told[1]
    assert "node 1 of 3 did not connect to 127.0.0.1 within 1 s; connected: 0 (host0)" in told[0]
    assert "2 (host2)" in told[0]
    assert told[0].startswith("1: "), "it may come to the next try"


def test_a_main_node_that_is_not_there_ends_in_time():
    (told,) = meet(node(1), seconds=1)
    assert told.startswith("1: node 0 did not answer at 127.0.0.1")
    assert "--main_process_ip" in told


def test_two_nodes_of_one_rank_are_refused(monkeypatch):
    monkeypatch.setattr(meeting, "LATE_SECONDS", 1.0)
    for told in meet(node(0), node(1, host="a"), node(1, host="b")):
        assert told.startswith("2: ")
        assert "were both started as node 1: give each its own --machine_rank, 0 to 2" in told
        assert "a (127.0.0.1)" in told
        assert "b (127.0.0.1)" in told


def test_a_restarted_node_replaces_its_connection_foreign_ones_do_not():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        main = pool.submit(meeting.wait_for_nodes, node(0), "127.0.0.1", port, 20)
        first = json.dumps(asdict(node(1))).encode() + b"\n"
        types: list[dict] = [{"rank": []}, {"host": 7}, {"port": "\x1b[2J"}, {"nodes": None}]
        wrong = [json.dumps(asdict(node(1)) | one).encode() + b"\n" for one in types]
        for message in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b"\xff\n", b"", *wrong, first):
            send(port, message)
        again = pool.submit(meeting.wait_for_nodes, node(1), "127.0.0.1", port, 20)
        meeting.wait_for_nodes(node(2), "127.0.0.1", port, 20)
        assert [one.node.host for one in main.result()._connections] == ["host1", "host2"]
        assert len(again.result()._connections) == 1


def test_a_node_0_that_lacks_the_address_of_node_0_says_so(capsys):
    """Two hosts that were both started as node 0 would wait for each other."""
    told = {}
    for address in ("127.0.0.1", "192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError):
            meeting.wait_for_nodes(node(0), address, free_port(), 0.1)
        told[address] = "was started as node 0, but has no address" in capsys.readouterr().out
    assert told == {"127.0.0.1": False, "192.0.2.1": True, "no-such-host.invalid": False}


def test_what_another_node_says_of_itself_does_not_control_the_terminal():
    told = asdict(node(1)) | {"host": "\x1b]0;x\x07host", "run": "\x1b[2J"}
    known = meeting.received(told)
    assert (known.host, known.run) == ("?]0;x?host", "?[2J")


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"nodes": 3}, "host1 was started with --num_machines 3, host0 with 2: give every node"),
        ({"world_size": 16}, "host1 was started with --num_processes 16, host0 with 4"),
        ({"run": "other"}, "host1 was started with -m other, host0 with train"),
    ],
)
def test_nodes_with_different_arguments_are_refused(other, sentence):
    for told in meet(node(0, 2), node(1, **{"nodes": 2, "world_size": 4} | other)):
        assert told.startswith(f"2: {sentence}")


def test_a_node_that_others_cannot_reach_is_named():
    """192.0.2.1 is reserved for documentation, so no host answers."""
    unreachable = node(1, 2, ip="192.0.2.1", interface="eth7")
    for told in meet(node(0, 2), unreachable):
        assert "1: host0 (lo 127.0.0.1) does not reach host1 (eth7 192.0.2.1)" in told
        assert "GLOO_SOCKET_IFNAME" in told


def test_the_interface_is_the_variables_or_the_only_one_besides_loopback(
    monkeypatch,
):
    monkeypatch.setattr(meeting, "interfaces", lambda: {"eth0": "10.0.0.1", "eth1": "10.1.0.1"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert meeting.interface_to("127.0.0.1") == ("eth1", "10.1.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    state = SimpleNamespace(isup=True)
    monkeypatch.setattr("psutil.net_if_stats", lambda: {"eth0": state})
    assert meeting.interface_to("127.0.0.1") == ("eth0", "10.0.0.1")
