"""Nodes that leave a run, come back or wait as spares: nine of the cases of node_faults.py.

make faults runs them all, and prints the table of docs/faults.md.
"""

import shutil

import node_faults
import pytest
import torch
from hosts import NEEDS_HOSTS, PLAIN, PROJECT, Hosts
from node_faults import CASES
from safetensors.torch import load_file

pytestmark = NEEDS_HOSTS
WRONG_SETTING = 2
NINE = [
    "power 1 step back",
    "power 1 2 step",
    "power 2 join",
    "power 2 save",
    "power 2 export",
    "cut 20 s 2 step",
    "launcher told to stop 2 evaluation",
    "power 0 step",
    "launcher told to stop 0 step back",
]


@pytest.mark.parametrize("name", NINE)
def test_a_run_loses_nodes_and_goes_on_or_ends_by_name(name):
    case = next(case for case in CASES if str(case) == name)
    assert node_faults.run(case)


def test_a_newcomer_with_other_code_is_refused_and_the_run_goes_on(tmp_path):
    with Hosts(tmp_path, 3) as hosts:
        node_faults.make_project(tmp_path)
        other = shutil.copytree(PROJECT / "src", tmp_path / "other")
        with (other / "my_project/optim.py").open("a") as file:
            file.write("\nOTHER = 1\n")
        for host in range(3):
            node_faults.launch(hosts, host, nodes=3)
        hosts.wait_for(lambda: hosts.steps() >= 15)
        node_faults.kill(hosts.pids(2))
        hosts.wait_for(lambda: hosts.status()["nodes"] == "2 of 3" and hosts.steps() >= 30)
        path = f"{other}:{PLAIN['PYTHONPATH']}"
        node_faults.launch(hosts, 2, nodes=3, PYTHONPATH=path)
        codes = hosts.wait(200)
        assert codes[:2] == [0, 0], hosts.outputs()
        assert codes[3] == WRONG_SETTING, hosts.outputs()
        assert "the code on host2 (hash " in hosts.output(2)
        assert "differs from that on host0" in hosts.output(2)
        starts = (hosts.run_folder / "starts.jsonl").read_text()
        assert starts.count('"event": "start"') == 2, "the newcomer made nobody start again"
        ours = load_file(hosts.run_folder / "export/model.safetensors")
        torch.testing.assert_close(ours, node_faults.right_weights(), rtol=1e-9, atol=1e-9)
