"""On one machine, what the processes say to each other stays on it."""

import contextlib
import ctypes
import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from runs import make_config
from world import run_world

from my_project import launch, roll_call, runtime
from my_project.config import Config


def name_this_host_by_an_address_of_its_own() -> None:
    """Have gloo find an address that others reach, as it does on most machines; as root only."""
    with contextlib.suppress(AttributeError, OSError):
        ips = [ip for ip in roll_call.interfaces().values() if not ip.startswith(("127.", "::1"))]
        if ips and ctypes.CDLL(None).unshare(0x04000000) == 0:  # CLONE_NEWUTS
            socket.sethostname(ips[0])


def sockets_of_gloo(config: Config) -> tuple[Any, list[str]]:
    name_this_host_by_an_address_of_its_own()
    with runtime.start(config) as accelerator:
        accelerator.wait_for_everyone()
        own = [c for c in psutil.net_connections("inet") if c.pid == os.getpid()]
        accelerator.wait_for_everyone()
    store = int(os.environ["MASTER_PORT"])
    ips = [
        end.ip
        for c in own
        if store not in [end.port for end in (c.laddr, c.raddr) if end]
        for end in (c.laddr, c.raddr)
        if end
    ]
    return os.environ.get("GLOO_SOCKET_IFNAME"), ips


@pytest.mark.slow
def test_on_one_machine_gloo_uses_the_loopback_interface(tmp_path):
    for interface, ips in run_world(2, sockets_of_gloo, make_config(tmp_path)):
        assert interface == roll_call.loopback()
        assert ips
        assert set(ips) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_launcher_sets_it_for_one_machine_and_leaves_what_is_set(monkeypatch):
    one, two = (SimpleNamespace(nodes=nodes, address="127.0.0.1") for nodes in (1, 2))
    monkeypatch.setattr(launch, "interface_to", lambda _: ("eth7", "10.0.0.1"))
    for given, machine, wanted in [
        ("", one, roll_call.loopback()),
        ("", two, "eth7"),
        ("eth9", one, "eth9"),
    ]:
        environment = {"GLOO_SOCKET_IFNAME": given} if given else {}
        monkeypatch.setattr("os.environ", environment)
        launch.prepare_environment(machine)
        assert environment["GLOO_SOCKET_IFNAME"] == wanted
