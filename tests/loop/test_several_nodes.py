"""What launch.py and ssh.sh do: several nodes, the preflight, one machine."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import HAS_TOOLS, PROJECT
from my_project import failures, launch, rendezvous
from my_project.config import ConfigError
from world import TESTS

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
    return launch.parse(["--config_file", f"{WHERE}/{where}.yaml", *flags, *TRAIN])[1]


needs_preflight = pytest.mark.skipif(not HAS_TOOLS, reason="tools/ was deleted")


@needs_preflight
def test_flags_win_over_the_file_and_what_follows_from_them_is_added(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    four = parsed("--num_machines", "2", "--num_processes", "8", "--machine_rank", "1")
    assert (four.nodes, four.world_size, four.node_rank, four.processes_per_node) == (2, 8, 1, 4)
    assert "--gpu_ids=-1,-1,-1,-1" in four.flags
    assert launch.summary(four, "eth0").endswith(
        "eth0): ranks 4 to 7 of 8, main node 127.0.0.1:29500, precision no, run folder runs/tiny"
    )
    hsdp = parsed("--num_machines=4", "--num_processes=32", where="multi_node_hsdp")
    assert "--parallelism_config_dp_replicate_size=4" in hsdp.flags
    assert "--parallelism_config_dp_shard_size=8" in hsdp.flags
    asked = parsed("--preflight", "--join_timeout_seconds", "5")
    assert asked.preflight
    assert "--preflight" not in asked.command("x"), "it is not accelerate's"
    _, among = launch.parse(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN, "--preflight"])
    assert among.preflight
    assert "--preflight" not in among.command("x"), "it is not train's"


@needs_preflight
def test_a_preflight_that_fails_ends_it_with_the_exit_code_of_a_wrong_setting(
    tmp_path, monkeypatch, capsys
):
    class Refuses:
        def __init__(self, *, torchrun: bool) -> None:
            self.torchrun, self.stop_signal_at = torchrun, None

        def run(self, command: list[str], log: Path | None = None) -> int:
            assert "my_project.tools.preflight" in command
            with pytest.raises(SystemExit, match="2"):
                failures.exit_with_error(ConfigError("lr is -1."))
            return 1

    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(launch, "Child", Refuses)
    assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN, "--preflight"]) == 2
    assert capsys.readouterr().err == "error: lr is -1.\n" * 2


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
    monkeypatch.setattr(launch, "Child", lambda **_: SimpleNamespace(torchrun=True))
    with pytest.raises(ZeroDivisionError):
        launch.main(arguments)
    assert SECRET not in told[0].run
    assert told[0].run.startswith("my_project.train --config tiny.yaml")
    with pytest.raises(ConfigError, match=r"hub_token holds a secret, .* HF_TOKEN") as refusal:
        launch.main([*arguments, "--recipe.init_args.hub_token", SECRET])
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("listed", ["", "a 8", "a slots=0", "a slots=8\nb slots=4", "a slots=8 b"])
def test_a_host_list_that_cannot_be_used_is_refused(tmp_path, listed):
    (tmp_path / "hosts.txt").write_text(f"# the nodes\n{listed}\n")
    done = subprocess.run(
        [PROJECT / "launch/ssh.sh", tmp_path / "hosts.txt", "--config", "tiny.yaml"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert "write a node per line as: gpu-a slots=8, with the same number of" in sentence


@pytest.mark.slow
def test_launch_on_one_machine_gives_the_weights_of_torchrun(tmp_path):
    for name in ("src", "accelerate_configs"):
        (tmp_path / name).symlink_to(PROJECT / name)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    environment = dict(os.environ) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{PROJECT / 'src'}:{TESTS}",
        "ACCELERATE_USE_CPU": "true",
    }
    train = "-m my_project.train --config tiny.yaml --run_name"
    commands = {
        "launch": f"python -m my_project.launch --config_file"
        f" accelerate_configs/cpu_2_processes.yaml {train} launch",
        "torchrun": f"torchrun --standalone --nproc_per_node 2 {train} torchrun",
    }
    weights = []
    for name, command in commands.items():
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append((tmp_path / f"runs/{name}/export/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
