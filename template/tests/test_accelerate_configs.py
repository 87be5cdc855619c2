"""No key of an accelerate config is ignored, and its command gives each process its rank."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from documents import PROJECT, card

CONFIGS = sorted((PROJECT / "accelerate_configs").glob("*.yaml"))
# accepted and ignored by accelerate, or meant for something else
IGNORED = {"rdzv_backend", "same_network", "enable_cpu_affinity", "downcast_bf16"}


def read_command(path: Path) -> str:
    """Read the command of a card."""
    launcher = "accelerate launch"
    if path.stem.startswith("multi_node"):
        launcher = "python -m my_project.launch"  # it says which node is missing
    command = re.search(rf"(?m)^  +{launcher} ((?:.*\\\n)*.*)$", card(path))
    assert command
    return "accelerate launch " + " ".join(command[1].replace("\\\n", " ").split())


def test_the_table_lists_each_of_them():
    table = (CONFIGS[0].parent / "README.md").read_text()
    assert set(re.findall(r"`(\w+)\.yaml`", table)) == {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_key_is_unknown_or_ignored(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))  # an unknown key raises
    keys = yaml.safe_load(path.read_text())
    assert not IGNORED & keys.keys()
    known = vars(launch_command_parser().parse_args(["script.py"])).keys()
    for group in ("fsdp_config", "parallelism_config"):  # accelerate does not check their keys
        assert keys.get(group, {}).keys() <= known
    assert config.num_processes % config.num_machines == 0
    assert str(config.mixed_precision) in ("no", "bf16", "fp16")
    assert keys.get("main_process_port", 0) or config.num_machines == 1, "0 would hang"
    assert f"accelerate launch --config_file accelerate_configs/{path.name} " in read_command(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_its_command_gives_every_process_of_every_node_its_place(path, monkeypatch):
    """The command is that of the card; tests of the launcher compare it with accelerate launch."""
    launch = pytest.importorskip("my_project.launching.launch")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(PROJECT)
    keys = yaml.safe_load(path.read_text())
    command = read_command(path).replace("<address of node 0>", "127.0.0.1")
    command = command.replace("_port 29500", "_port 0")  # then the port is the default
    machines, places = keys["num_machines"], []
    for node in range(machines):
        node_command = command.replace("--machine_rank 0", f"--machine_rank {node}")
        assert machines == 1 or node == 0 or node_command != command
        places += launch.parse(shlex.split(node_command)[2:]).environments(attempt=0)
    total = keys["num_processes"]
    assert len(places) == total
    assert {p["ACCELERATE_MIXED_PRECISION"] for p in places} == {keys["mixed_precision"]}
    on_cpu = "cpu" in path.stem
    for place in places:  # accelerator.asked_for_cpu reads it to choose gloo or NCCL
        hidden = place.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")
        assert on_cpu == (hidden or place.get("ACCELERATE_USE_CPU", "").lower() == "true")
    if total == 1:
        return
    assert sorted(int(p["RANK"]) for p in places) == list(range(total))
    assert {p["WORLD_SIZE"] for p in places} == {str(total)}
    assert {p["LOCAL_WORLD_SIZE"] for p in places} == {str(total // machines)}
    assert len({p["GROUP_RANK"] for p in places}) == machines
    assert len({(p["MASTER_ADDR"], p["MASTER_PORT"]) for p in places}) == 1
    if machines > 1:
        assert (places[0]["MASTER_ADDR"], places[0]["MASTER_PORT"]) == ("127.0.0.1", "29500")
    sharded = "fsdp" in path.stem or "hsdp" in path.stem
    assert {p.get("ACCELERATE_USE_FSDP") for p in places} == {"true" if sharded else None}
    if sharded:
        assert {p["FSDP_VERSION"] for p in places} == {"2"}
    if "hsdp" in path.stem:
        assert {p["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] for p in places} == {"2"}
        assert {p["PARALLELISM_CONFIG_DP_SHARD_SIZE"] for p in places} == {str(total // 2)}
