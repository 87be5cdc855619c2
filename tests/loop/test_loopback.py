"""On one machine, what the processes say to each other stays on it."""

import pytest
from my_project import devices


@pytest.mark.parametrize(
    ("given", "processes", "wanted"), [("", 2, "lo"), ("", 4, None), ("eth9", 2, "eth9")]
)
def test_it_is_set_where_all_processes_are_here_and_what_is_set_stays(
    given, processes, wanted, monkeypatch
):
    environment = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": str(processes)}
    environment |= {"GLOO_SOCKET_IFNAME": given} if given else {}
    monkeypatch.setattr("os.environ", environment)
    devices.keep_gloo_on_this_machine()
    assert environment.get("GLOO_SOCKET_IFNAME") == wanted
