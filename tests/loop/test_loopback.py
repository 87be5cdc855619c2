"""Processes of a run on a single machine communicate over loopback only."""

import os

import psutil
import pytest
from my_project import accelerator as accelerators
from runs import make_config
from world import run_world


@pytest.mark.parametrize(
    ("given", "processes", "wanted"), [("", 2, "lo"), ("", 4, None), ("eth9", 2, "eth9")]
)
def test_it_is_set_where_all_processes_are_here_and_what_is_set_stays(
    given, processes, wanted, monkeypatch
):
    environment = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": str(processes)}
    environment |= {"GLOO_SOCKET_IFNAME": given} if given else {}
    monkeypatch.setattr("os.environ", environment)
    init_method = accelerators.keep_on_this_machine()
    assert environment.get("GLOO_SOCKET_IFNAME") == wanted
    assert bool(init_method) == (processes == 2)
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torchrun's agent has a store
    assert accelerators.keep_on_this_machine() is None


def listening(folder) -> list[str]:
    """Return the addresses at which this process listens once all ranks have met."""
    with accelerators.start_accelerator(make_config(folder)) as accelerator:
        accelerator.wait_for_everyone()
        found = [
            one.laddr.ip
            for one in psutil.net_connections("tcp")
            if one.pid == os.getpid() and one.status == psutil.CONN_LISTEN
        ]
        accelerator.wait_for_everyone()
    return found


def test_all_ports_on_one_machine_are_on_its_loopback_interface(tmp_path):
    of_main, of_other = run_world(2, listening, tmp_path)
    assert of_main, "the store, and gloo"
    assert {*of_main, *of_other} == {"127.0.0.1"}
