"""On one machine, what the processes say to each other stays on it."""

import contextlib
import ctypes
import os
import socket
from typing import Any

import psutil
import pytest
from my_project import devices
from my_project.config import Config
from runs import make_config
from world import run_world


def name_this_host_by_an_address_of_its_own() -> None:
    """Have gloo find an address that others reach, as it does on most machines; as root only."""
    with contextlib.suppress(AttributeError, OSError):
        interfaces = psutil.net_if_addrs().values()
        ips = [a.address for all in interfaces for a in all if a.family == socket.AF_INET]
        ips = [ip for ip in ips if not ip.startswith("127.")]
        if ips and ctypes.CDLL(None).unshare(0x04000000) == 0:  # CLONE_NEWUTS
            socket.sethostname(ips[0])


def sockets_of_gloo(config: Config) -> tuple[Any, list[str]]:
    name_this_host_by_an_address_of_its_own()
    with devices.start(config) as accelerator:
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
        assert interface == devices.loopback()
        assert ips
        assert set(ips) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(
    ("given", "processes", "wanted"),
    [("", 2, devices.loopback()), ("", 4, None), ("eth9", 2, "eth9")],
)
def test_it_is_set_where_all_processes_are_here_and_what_is_set_stays(
    given, processes, wanted, monkeypatch
):
    environment = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": str(processes)}
    environment |= {"GLOO_SOCKET_IFNAME": given} if given else {}
    monkeypatch.setattr("os.environ", environment)
    devices.keep_gloo_on_this_machine()
    assert environment.get("GLOO_SOCKET_IFNAME") == wanted
