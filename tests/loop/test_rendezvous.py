"""The rendezvous of the nodes: on an error every node ends in time, with the same message."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from my_project.config import ConfigError
from my_project.files import wait_until
from my_project.launching import nodes as meeting
from my_project.launching.nodes import Node, OtherNodes
from world import free_port


def node(rank: int, nodes: int = 3, **more) -> Node:
    about = {"world_size": 2 * nodes, "run": "train", "host": f"host{rank}", "min_nodes": 0}
    about |= {"interface": "lo", "ip": "127.0.0.1", "launcher": f"of node {rank}", "code": "abcd"}
    return Node(**{"rank": rank, "nodes": nodes} | about | more)


def join(me: Node, port: int, seconds: float = 20, address: str = "127.0.0.1") -> OtherNodes:
    others = OtherNodes(address, port)
    others.meet(me, seconds)
    return others


def meet(*nodes: Node, seconds: float = 20) -> list:
    """Start nodes on one port; return what each of them gets, or its error message.

    A message begins with the exit code of the node.
    """
    port = free_port()

    def call(me: Node) -> OtherNodes | str:
        try:
            return join(me, port, seconds)
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


def watched(others: OtherNodes) -> list[str]:
    return sorted(peer.node.host for peer in others._connections if peer.is_member)


def told(others: OtherNodes) -> bool:
    """Return whether this node learns in time of a failure on another node."""
    return wait_until(lambda: others.have_failed, 5)


def test_all_nodes_know_each_other_and_a_failure_reaches_all():
    third, first, *others = meet(*(node(rank, 4, start=f"of_{rank}.0") for rank in (3, 0, 1, 2)))
    others.append(third)
    for peers in (first, *others):
        assert peers.members[0].start == "of_0.0"
        assert [member.rank for member in peers.members] == [0, 1, 2, 3]
        assert watched(peers) == (["host1", "host2", "host3"] if peers is first else ["host0"])
        assert not peers.have_failed
    others[0].close()
    assert not wait_until(lambda: first.have_failed, 0.5)
    others[1].tell_failure()
    assert told(first)
    assert told(third)
    assert first.failed.host == third.failed.host == "host2"
    assert not others[1].have_failed
    first.tell_failure()
    assert told(others[1])
    assert others[1].failed.host == "host0"


# ---- nodes that leave and join -------------------------------------------------------------------
def elastic(rank: int, **more) -> Node:
    return node(rank, **{"nodes": 3, "min_nodes": 2} | more)


@contextmanager
def started(*nodes: Node) -> Iterator[tuple[int, dict[int, OtherNodes], ThreadPoolExecutor]]:
    """Have nodes begin a run; yield the port, the launchers by rank, and a pool of threads."""
    port, everyone = free_port(), {me.rank: OtherNodes("127.0.0.1", 0) for me in nodes}
    with ThreadPoolExecutor(8) as pool:
        for others in everyone.values():
            others._port = port
        joined = [pool.submit(everyone[me.rank].meet, me, 20) for me in nodes if me.rank < 3]
        spares = [pool.submit(call, everyone[me.rank], me) for me in nodes if me.rank >= 3]
        for future in joined:
            future.result()
        assert wait_until(
            lambda: everyone[0].have_failed or len(everyone[0]._ready()) == len(spares), 5
        )
        for rank, waiting in zip((me.rank for me in nodes if me.rank >= 3), spares, strict=True):
            everyone[rank].waiting = waiting
        yield port, everyone, pool
        for others in everyone.values():
            others.close()


def call(others: OtherNodes, me: Node, **more) -> str:
    """Have a node meet the others; return the hosts that train, or how the node ends."""
    try:
        others.meet(me, 5, **more)
    except meeting.RunHasEnded as ended:
        return f"ended {ended.code}"
    except ConfigError as error:
        return str(error)
    return " ".join(member.host for member in others.members)


def meet_again(pool, everyone: dict[int, OtherNodes], *nodes: Node, **more) -> list[str]:
    futures = [pool.submit(call, everyone[me.rank], me, **more) for me in nodes]
    return [future.result() for future in futures]


def test_the_others_go_on_without_a_node_that_has_left():
    with started(*map(elastic, range(3))) as (_, everyone, pool):
        everyone[1].close()
        assert wait_until(lambda: not everyone[0].have_failed and everyone[0].change, 5)
        assert everyone[0].change == "node left"
        assert meet_again(pool, everyone, elastic(0), elastic(2)) == ["host0 host2"] * 2
        everyone[2].close()
        (said,) = meet_again(pool, everyone, elastic(0))
        assert "nodes 1, 2 of 3 did not connect" in said


def test_a_run_goes_on_on_one_node():
    two = [node(rank, 2, min_nodes=1) for rank in (0, 1)]
    with started(*two) as (_, everyone, pool):
        everyone[1].close()
        assert meet_again(pool, everyone, two[0]) == ["host0"]


def test_a_node_that_comes_waits_until_the_others_meet():
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        meet_again(pool, everyone, elastic(0), elastic(2))
        new = OtherNodes("127.0.0.1", port)
        taken = pool.submit(call, new, elastic(1, launcher="new", host="new"))
        assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
        assert everyone[0].newcomer == "node 1 (new)"
        assert not everyone[2].have_failed
        assert meet_again(pool, everyone, elastic(0), elastic(2)) == ["host0 new host2"] * 2
        assert taken.result() == "host0 new host2"
        assert not everyone[0].newcomer
        new.close()


def test_a_second_node_of_a_rank_waits_until_the_first_has_left():
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        new = OtherNodes("127.0.0.1", port)
        taken = pool.submit(call, new, elastic(1, launcher="new", host="new"))
        assert not wait_until(lambda: everyone[0].have_failed or everyone[0].newcomer, 1)
        same = meet_again(pool, everyone, *map(elastic, range(3)))
        assert same == ["host0 host1 host2"] * 3
        everyone[1].close()
        assert meet_again(pool, everyone, elastic(0), elastic(2)) == ["host0 new host2"] * 2
        assert taken.result() == "host0 new host2"
        new.close()


def test_a_spare_takes_the_place_of_a_node_that_has_left(capsys):
    with started(*map(elastic, range(4))) as (_, everyone, pool):
        assert [member.rank for member in everyone[0].members] == [0, 1, 2]
        assert not wait_until(lambda: everyone[0].have_failed or everyone[0].newcomer, 0.5)
        assert "will wait until a node is missing" in capsys.readouterr().out
        everyone[2].close()
        assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
        assert meet_again(pool, everyone, elastic(0), elastic(1)) == ["host0 host1 host3"] * 2
        assert everyone[3].waiting.result() == "host0 host1 host3"


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_spare_ends_with_the_exit_code_of_the_run(code):
    with started(*map(elastic, range(4))) as (_, everyone, _):
        everyone[0].close(code)
        assert everyone[3].waiting.result() == f"ended {code}"


def test_a_run_that_was_stopped_ends_unless_a_node_has_left_or_come():
    everywhere = [elastic(rank) for rank in range(3)]
    with started(*everywhere) as (_, everyone, pool):
        assert meet_again(pool, everyone, *everywhere, has_saved=True) == ["ended 75"] * 3
    with started(*everywhere) as (_, everyone, pool):
        everyone[1].close()
        left = everywhere[::2]
        assert meet_again(pool, everyone, *left, has_saved=True) == ["host0 host2"] * 2
        everyone[2].close()
        assert meet_again(pool, everyone, elastic(0), has_saved=True) == ["ended 75"]


def test_processes_that_have_waited_start_again_only_if_a_node_has_left():
    waited = [elastic(0), elastic(2, has_waited=True)]
    with started(*map(elastic, range(3))) as (_, everyone, pool):
        for said in meet_again(pool, everyone, *waited, elastic(1)):
            assert said.startswith(
                "processes on host2 stalled waiting for other ranks, but no node has left"
            )
    with started(*map(elastic, range(3))) as (_, everyone, pool):
        everyone[1].close()
        assert meet_again(pool, everyone, *waited) == ["host0 host2"] * 2


def test_a_late_member_with_the_rank_of_a_spare_is_named():
    with started(*map(elastic, range(4))) as (_, everyone, pool):
        everyone[2].close()
        assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
        meet_again(pool, everyone, elastic(0), elastic(1))
        for peer in everyone[0]._connections:
            peer.is_ready = peer.node.rank == 1
        assert everyone[0]._missing(elastic(0, nodes=2)) == "node 3 of 2"


def test_a_new_node_0_goes_on_with_nodes_that_have_waited_for_the_old_one(monkeypatch):
    """The third node is gone too; the new node 0 waits for it less long than at a first start."""
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 1.0)
    old = elastic(1, has_waited=True, is_new=False)
    for said in meet(elastic(0), old, seconds=600):
        assert not isinstance(said, str)
        assert [member.rank for member in said.members] == [0, 1]


@pytest.mark.parametrize("min_nodes", [0, 3])
def test_a_new_node_0_waits_as_long_as_at_a_first_start_if_all_nodes_are_needed(
    min_nodes, monkeypatch
):
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.5)
    old = node(1, min_nodes=min_nodes, is_new=False)
    for said in meet(node(0, min_nodes=min_nodes), old, seconds=2):
        assert f"within {2 if not min_nodes else 0.5:.0f} s" in said


def test_preflight_is_compared_at_the_first_start_only():
    for said in meet(node(0, 2), node(1, 2, preflight=True), seconds=5):
        assert "host1 was started with --preflight True, host0 with False: give all nodes" in said
    for said in meet(node(0, 2), node(1, 2, preflight=True, is_new=False), seconds=5):
        assert isinstance(said, OtherNodes), said


def test_a_node_waits_as_long_as_node_0_does(monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 1.0)
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        main = pool.submit(join, node(0), port, 60)
        impatient = pool.submit(join, node(1), port, 0.5)
        assert not wait_until(impatient.done, 3)
        join(node(2), port)
        assert watched(main.result()) == ["host1", "host2"]
        assert watched(impatient.result()) == ["host0"]


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_spare_waits_for_another_node_0_only_if_it_was_told_to(seconds):
    with started(*map(elastic, range(4))) as (port, everyone, pool):
        for others in everyone.values():
            others._node_0_seconds = seconds
        everyone[0].close(75, may_return=True)
        if not seconds:
            assert everyone[3].waiting.result() == "ended 75"
            return
        new = OtherNodes("127.0.0.1", port)
        again = pool.submit(call, new, elastic(0, launcher="new"))
        others = meet_again(pool, everyone, *(elastic(rank, is_new=False) for rank in (1, 2)))
        assert again.result() == others[0] == others[1] == "host0 host1 host2"
        # else the run may have ended before the spare looks for node 0 again
        assert wait_until(
            lambda: new.have_failed or any(peer.node.rank == 3 for peer in new._ready()), 20
        )
        assert not new.have_failed
        new.close(0)
        assert everyone[3].waiting.result() == "ended 0"


def test_a_spare_names_the_time_that_it_has_waited_for_another_node_0():
    with started(*map(elastic, range(4))) as (_, everyone, _):
        everyone[3]._node_0_seconds = 1.0
        everyone[0].close(75, may_return=True)
        assert "did not answer at 127.0.0.1" in (said := everyone[3].waiting.result())
        assert "within 1 s" in said, "not the 5 s of a first start"


def test_a_refusal_ends_the_members_and_not_a_spare():
    with started(*map(elastic, range(4))) as (_, everyone, pool):
        refusing = [elastic(0), elastic(1, refusal="the error would repeat"), elastic(2)]
        for said in meet_again(pool, everyone, *refusing):
            assert said == "host1 does not start its processes again: the error would repeat."
        assert not everyone[3].waiting.done()
        everyone[0].close(1)
        assert everyone[3].waiting.result() == "ended 1"


def test_without_min_machines_no_run_makes_room():
    three = [node(rank) for rank in range(3)]
    with started(*three) as (port, everyone, pool):
        everyone[1].close()
        new = OtherNodes("127.0.0.1", port)
        taken = pool.submit(call, new, node(1, launcher="new"))
        assert not wait_until(lambda: everyone[0].have_failed or everyone[0].newcomer, 1)
        same = meet_again(pool, everyone, three[0], three[2])
        assert same == [taken.result()] * 2 == ["host0 host1 host2"] * 2
        new.close()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"run": "other"}, "host1 was started with -m other"),
        ({"world_size": 9}, "host1 was started with --num_processes 9"),
        ({"min_nodes": 1}, "host1 was started with --min_machines 1"),
        ({"nodes": 4}, "host1 was started with --num_machines 4"),
        (
            {"code": "beef"},
            "the code on host1 (hash beef) differs from that on host0 (abcd): give both",
        ),
    ],
)
def test_a_newcomer_that_does_not_fit_is_refused_and_disturbs_nobody(wrong, sentence):
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        meet_again(pool, everyone, elastic(0), elastic(2))
        new = OtherNodes("127.0.0.1", port)
        said = pool.submit(call, new, elastic(1, launcher="new", **wrong))
        assert wait_until(lambda: not everyone[0].have_failed and said.done(), 5)
        assert not everyone[0].newcomer
        assert said.result().startswith(sentence)
        assert meet_again(pool, everyone, elastic(0), elastic(2)) == ["host0 host2"] * 2


def test_a_node_that_does_not_answer_is_left_out():
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        message = {"node": asdict(elastic(1, launcher="mute"))}
        with socket.create_connection(("127.0.0.1", port)) as mute:
            mute.sendall(json.dumps(message).encode() + b"\n")
            assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
            again = [pool.submit(call, everyone[rank], elastic(rank)) for rank in (0, 2)]
            while b'"nodes": [' not in mute.recv(1 << 16):
                pass  # the messages that tell it to wait
        assert [future.result() for future in again] == ["host0 host2"] * 2


def test_a_node_that_stays_silent_leaves_no_time_but_the_answers_of_others_are_read(monkeypatch):
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 0.3)
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        message = {"node": asdict(elastic(1, launcher="mute"))}
        with socket.create_connection(("127.0.0.1", port)) as mute:
            mute.sendall(json.dumps(message).encode() + b"\n")
            assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
            same = meet_again(pool, everyone, elastic(0), elastic(2))
    assert same == ["host0 host2"] * 2


def test_a_node_that_leaves_after_its_own_probes_is_left_out():
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        with socket.create_server(("127.0.0.1", 0)) as gone:
            about = elastic(1, launcher="gone", port=gone.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(json.dumps({"node": asdict(about)}).encode() + b"\n")
            assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
            again = [pool.submit(call, everyone[rank], elastic(rank)) for rank in (0, 2)]
            while b'"nodes": [' not in leaving.recv(1 << 16):
                pass
            leaving.sendall(b'{"probed": []}\n')
        assert [future.result() for future in again] == ["host0 host2"] * 2


def test_a_newcomer_that_the_members_cannot_reach_is_left_out_and_told(capsys):
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        new = OtherNodes("127.0.0.1", port)
        about = elastic(1, launcher="new", host="new", ip="192.0.2.1")
        said = pool.submit(call, new, about)
        assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
        same = meet_again(pool, everyone, elastic(0), elastic(2))
    assert same == ["host0 host2"] * 2
    assert "cannot reach new" in said.result()
    assert "the run goes on without new" in capsys.readouterr().out


@pytest.mark.parametrize("is_untried", [True, False])
def test_a_newcomer_that_fails_before_its_first_step_leaves_alone(is_untried):
    with started(*map(elastic, range(3))) as (port, everyone, pool):
        everyone[1].close()
        old = [elastic(rank, is_new=False) for rank in (0, 2)]
        meet_again(pool, everyone, *old)
        new = everyone[1] = OtherNodes("127.0.0.1", port)
        taken = pool.submit(call, new, elastic(1, launcher="new", host="new"))
        assert wait_until(lambda: not everyone[0].have_failed and everyone[0].newcomer, 5)
        assert meet_again(pool, everyone, *old) == [taken.result()] * 2 == ["host0 new host2"] * 2
        about = {"is_new": False, "is_untried": is_untried, "refusal": "no GPU"}
        refused = elastic(1, launcher="new", host="new", **about)
        *same, said = meet_again(pool, everyone, *old, refused)
    assert said == "new does not start its processes again: no GPU."
    assert same == ["host0 host2" if is_untried else said] * 2


def test_a_node_that_never_comes_is_named_on_every_node():
    said = meet(node(0), node(2), seconds=1)
    assert said[0] == said[1]
    assert "node 1 of 3 did not connect to 127.0.0.1 within 1 s; connected: 0 (host0)" in said[0]
    assert "2 (host2)" in said[0]
    assert said[0].startswith("1: "), "a retry may succeed"


def test_a_main_node_that_is_not_there_ends_in_time():
    (said,) = meet(node(1), seconds=1)
    assert said.startswith("1: node 0 did not answer at 127.0.0.1")
    assert "--main_process_ip" in said


def test_two_nodes_of_one_rank_are_refused(monkeypatch):
    monkeypatch.setattr(meeting, "LATE_SECONDS", 1.0)
    for said in meet(node(0), node(1, host="a"), node(1, host="b", launcher="another")):
        assert said.startswith("2: ")
        assert "were both started as node 1: give each its own --machine_rank, 0 to 2" in said
        assert "a (127.0.0.1)" in said
        assert "b (127.0.0.1)" in said


def test_a_restarted_node_replaces_its_connection_foreign_ones_do_not():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        main = pool.submit(join, node(0), port)

        def line(**more: object) -> bytes:
            return json.dumps({"node": asdict(node(1)) | more}).encode() + b"\n"

        first = line(launcher="an earlier one")
        wrong = [line(**field) for field in ({"rank": []}, {"host": 7}, {"port": "\x1b[2J"})]
        for message in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"rank": 1}\n',
            b"\xff\n",
            b"[" * 99999 + b"\n",
            b"",
            *wrong,
            first,
        ):
            send(port, message)
        again = pool.submit(join, node(1), port)
        join(node(2), port)
        assert watched(main.result()) == ["host1", "host2"]
        assert watched(again.result()) == ["host0"]


def test_a_launcher_that_has_lost_its_connection_joins_by_another():
    """Node 0 has not noticed that the first connection is lost: a cable was unplugged briefly."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool, socket.socket() as lost:
        main = pool.submit(join, node(0), port)
        assert wait_until(lambda: lost.connect_ex(("127.0.0.1", port)) == 0, 5)
        lost.sendall(json.dumps({"node": asdict(node(1))}).encode() + b"\n")
        assert json.loads(lost.recv(1 << 16))["stay"] <= 20, "the node adds ANSWER_SECONDS itself"
        again = pool.submit(join, node(1), port)
        assert wait_until(lambda: lost.recv(1 << 16) == b"", 5), "node 0 closes the old connection"
        join(node(2), port)
        assert watched(main.result()) == ["host1", "host2"]
        assert watched(again.result()) == ["host0"]


def test_a_node_0_that_lacks_the_address_of_node_0_says_so(capsys):
    """Two hosts that were both started as node 0 would wait for each other."""
    said = {}
    for address in ("127.0.0.1", "192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError):
            join(node(0), free_port(), 0.1, address)
        said[address] = "was started as node 0, but --main_process_ip" in capsys.readouterr().out
    assert said == {"127.0.0.1": False, "192.0.2.1": True, "no-such-host.invalid": False}


def test_what_another_node_says_of_itself_does_not_control_the_terminal():
    message = asdict(node(1)) | {"host": "\x1b]0;x\x07host", "run": "\x1b[2J"}
    parsed = meeting.parse_node(message)
    assert (parsed.host, parsed.run) == ("?]0;x?host", "?[2J")


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"nodes": 3}, "host1 was started with --num_machines 3, host0 with 2: give all nodes"),
        ({"world_size": 16}, "host1 was started with --num_processes 16, host0 with 4"),
        ({"run": "other"}, "host1 was started with -m other, host0 with train"),
        (
            {"code": "beef"},
            "the code on host1 (hash beef) differs from that on host0 (abcd): give both",
        ),
    ],
)
def test_nodes_with_different_arguments_or_code_are_refused(other, sentence):
    for said in meet(node(0, 2), node(1, **{"nodes": 2, "world_size": 4} | other)):
        assert said.startswith(f"2: {sentence}")


@pytest.mark.parametrize("min_nodes", [0, 1])
def test_a_node_that_others_cannot_reach_is_named(min_nodes):
    """192.0.2.1 is reserved for documentation, so no host answers."""
    unreachable = node(1, 2, ip="192.0.2.1", interface="eth7", min_nodes=min_nodes)
    for said in meet(node(0, 2, min_nodes=min_nodes), unreachable):
        assert "1: host0 (lo 127.0.0.1) cannot reach host1 (eth7 192.0.2.1)" in said
        assert "GLOO_SOCKET_IFNAME" in said


def test_a_node_whose_interface_is_unknown_has_the_address_of_its_connection(monkeypatch):
    """The name of node 0 resolved to an address of no use, or not yet (192.0.2.1: no host)."""
    for others in meet(*(node(rank, 2, interface="", ip="192.0.2.1") for rank in (0, 1))):
        assert isinstance(others, OtherNodes), others
    monkeypatch.setattr(meeting, "interfaces", lambda: {"eth0": "10.0.0.1", "eth1": "10.1.0.1"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    connection: Any = SimpleNamespace(getsockname=lambda: ("::ffff:10.1.0.1", 1, 0, 0))
    me = meeting.with_own_address(node(0, interface="", ip=""), connection)
    assert (me.interface, me.ip) == (os.environ["GLOO_SOCKET_IFNAME"], "10.1.0.1")
    assert me.interface == "eth1"


def test_a_malformed_address_is_an_error_of_the_connection():
    for rank in (0, 1):
        meeting.interface_to("gpu..a")
        with pytest.raises(ConfigError, match=r"did not (connect to|answer at)"):
            join(node(rank), free_port(), 0.1, "gpu..a")


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
