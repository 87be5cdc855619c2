"""One accelerate config per node, from a host list."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import PROJECT
from world import free_port

from my_project.cluster import hosts
from my_project.config import ConfigError

CONFIGS = PROJECT / "accelerate_configs"
STUB = """
import json, os, pathlib
kept = {name: os.environ.get(name) for name in ("RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")}
pathlib.Path(os.environ["STUB_FOLDER"], kept["RANK"] + ".json").write_text(json.dumps(kept))
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the host list is empty"),
        ("a slots=8\nb slots=4\n", "12 // 2 = 6 processes on each node"),
        ("a slots=8\na slots=8\n", "line 2: a is in the list twice"),
        ("a 8\n", "write a host as: name slots=8"),
        ("a slots=0\n", "write a host as: name slots=8"),
    ],
)
def test_a_host_list_that_cannot_be_used_is_refused(text, sentence):
    with pytest.raises(ConfigError) as refusal:
        hosts.read_hosts(text)
    assert sentence in str(refusal.value)


def write_nodes(folder: Path, host_list: str, where: str, **more: str) -> list[Path]:
    (folder / "hosts.txt").write_text(host_list)
    arguments = argparse.Namespace(
        list=False,
        hosts=str(folder / "hosts.txt"),
        where=str(CONFIGS / f"{where}.yaml"),
        folder=str(folder / "nodes"),
        address=more.get("address", ""),
        port=int(more.get("port", "29500")),
    )
    hosts.main(arguments)
    return sorted((folder / "nodes").iterdir())


def test_each_node_has_a_file_and_none_is_overwritten(tmp_path):
    hosts = "# two\ngpu-a slots=4\ngpu-b slots=4\n"
    files = write_nodes(tmp_path, hosts, "multi_node_hsdp")
    first, second = (yaml.safe_load(path.read_text()) for path in files)
    assert (first.pop("machine_rank"), second.pop("machine_rank")) == (0, 1)
    assert first == second
    assert (first["num_machines"], first["num_processes"]) == (2, 8)
    assert first["main_process_ip"] == "gpu-a"
    assert first["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }
    write_nodes(tmp_path, hosts, "multi_node_hsdp")  # the same again
    with pytest.raises(ConfigError, match="exists and differs"):
        write_nodes(tmp_path, "gpu-a slots=2\ngpu-b slots=2\n", "multi_node_hsdp")
    with pytest.raises(ConfigError, match=r"multi_gpu\.yaml is for one machine"):
        write_nodes(tmp_path, hosts, "multi_gpu")


@pytest.mark.slow
def test_the_files_of_the_nodes_launch_them(tmp_path):
    port = free_port()
    hosts = "a slots=3\nb slots=3\n"
    files = write_nodes(
        tmp_path, hosts, "multi_node_cpu", address="127.0.0.1", port=str(port)
    )  # fmt: skip
    (tmp_path / "stub.py").write_text(STUB)
    environment = dict(os.environ) | {"STUB_FOLDER": str(tmp_path)}
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, "stub.py"],
            cwd=tmp_path,
            env=environment,
        )
        for path in files
    ]
    assert [launcher.wait(120) for launcher in launchers] == [0, 0]
    places = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(int(p["RANK"]) for p in places) == list(range(6))
    assert {p["CUDA_VISIBLE_DEVICES"] for p in places} == {"-1,-1,-1"}
    assert {p["MASTER_PORT"] for p in places} == {str(port)}
