"""What launch.py and ssh.sh do: several nodes, the preflight, one machine."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import HAS_TOOLS, PROJECT
from my_project import launch, rendezvous
from my_project.config import ConfigError

WHERE = str(PROJECT / "accelerate_configs")
TRAIN = ("-m", "my_project.train", "--config", "tiny.yaml")
SECRET = "hf_QWERTYqwerty123"
CONFIG = """
run_name: tiny
recipe: {class_path: ragged.Ragged}
batches: {global_batch_size: 16, micro_batch_size: 4, workers: 0}
steps: 8
telemetry: {every_steps: 2}
"""


def parsed(*flags: str, where: str = "multi_node_cpu") -> launch.Launch:
    return launch.parse(["--config_file", f"{WHERE}/{where}.yaml", *flags, *TRAIN])


def test_flags_win_over_the_file_and_what_follows_from_them_is_added(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    four = parsed("--num_machines", "2", "--num_processes", "8", "--machine_rank", "1")
    assert (four.nodes, four.world_size, four.node_rank, four.processes_per_node) == (2, 8, 1, 4)
    hsdp = parsed("--num_machines=4", "--num_processes=32", where="multi_node_hsdp")
    assert "--parallelism_config_dp_replicate_size=4" in hsdp.flags
    assert "--parallelism_config_dp_shard_size=8" in hsdp.flags


@pytest.mark.skipif(not HAS_TOOLS, reason="tools/ was deleted")
def test_a_preflight_that_fails_starts_no_training(tmp_path, monkeypatch):
    class Fails:
        stop_signal_at = None

        def run(self, function: Any, *_: object) -> dict[int, int]:
            assert function.args[0] == "my_project.tools.preflight"
            return {0: 1}

    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launch, "Workers", Fails)
    assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN, "--preflight"]) == 1


def test_the_launcher_tells_other_nodes_no_secret(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(rendezvous, "wait_for_nodes", lambda me, *_, **__: told.append(me) or 1 / 0)
    monkeypatch.setattr(launch, "prepare_environment", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # it names the interface to the others
    arguments = ["--config_file", f"{WHERE}/multi_node_cpu.yaml", "--num_machines", "2",
                 "--num_processes", "2", "--main_process_ip", "127.0.0.1",
                 *TRAIN, "--telemetry.trackers", f"[pwd={SECRET}]"]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    monkeypatch.setattr(launch, "Workers", SimpleNamespace)
    with pytest.raises(ZeroDivisionError):
        launch.main(arguments)
    assert SECRET not in told[0].run
    assert told[0].run.startswith("my_project.train --config tiny.yaml")
    with pytest.raises(ConfigError, match=r"hub_token holds a secret, .* HF_TOKEN") as refusal:
        launch.main([*arguments, "--recipe.init_args.hub_token", SECRET])
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("listed", ["", "a slots=8\nb slots=4"])
def test_a_host_list_that_cannot_be_used_is_refused(tmp_path, listed):
    (tmp_path / "hosts.txt").write_text(f"# the nodes\n{listed}\n")
    done = subprocess.run(
        [PROJECT / "launch/ssh.sh", tmp_path / "hosts.txt", "--config", "tiny.yaml"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2
    assert "write a node per line as: gpu-a slots=8" in done.stderr
