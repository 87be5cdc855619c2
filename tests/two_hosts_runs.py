"""What the tests on two hosts share: a run, its folder, and waiting for it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from two_hosts import PATIENCE, TwoHosts, available

NEEDS_TWO_HOSTS = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="needs root and iproute2 for network namespaces"),
]
PROJECT = Path(__file__).parents[1] / "template"
CONFIG = f"""
run_name: tiny
recipe: {{class_path: ragged.Ragged, init_args: {{dtype: float64, dropout: 0.2, seconds: 0.05}}}}
batches: {{global_batch_size: 16, micro_batch_size: 4, workers: 0}}
steps: 400
optim: {{lr: 0.01, ema_decay: 0.9}}
checkpoints: {{every_steps: 20}}
telemetry: {{every_steps: 1, trackers: []}}
distributed: {{timeout_seconds: {5 * PATIENCE:g}, startup_timeout_seconds: {60 * PATIENCE:g}}}
"""
STOPS_AT = ("--steps", "100000")
PLAIN = {
    "PYTHONPATH": f"{PROJECT / 'src'}:{PROJECT / 'tests'}",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


def run_folder(hosts: TwoHosts) -> Path:
    return hosts.folder / "runs/tiny"


def status(hosts: TwoHosts) -> dict:
    return json.loads((run_folder(hosts) / "status.json").read_text())


def steps(hosts: TwoHosts) -> int:
    path = run_folder(hosts) / "metrics.jsonl"
    return path.read_text().count('"interval"') if path.exists() else 0


def wait_for(hosts: TwoHosts, condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, hosts.output(0) + hosts.output(1)
        assert any(c.poll() is None for c in hosts.commands), hosts.output(0) + hosts.output(1)
        time.sleep(0.1)


def reference_weights(folder: Path, total: int) -> dict:
    """Train the same on one process, in this one's child, without a network."""
    from safetensors.torch import load_file

    subprocess.run(
        [sys.executable, "-m", "my_project.train", "--config", "tiny.yaml", "--run_name", "alone",
         "--recipe.init_args.seconds", "0", "--runs_folder", "alone", "--steps", str(total)],
        cwd=folder, env=os.environ | PLAIN | {"ACCELERATE_USE_CPU": "1"}, check=True,
        capture_output=True,
    )  # fmt: skip
    return load_file(folder / "alone/alone/export/model.safetensors")


def assert_finished_with_the_right_weights(hosts: TwoHosts, total: int) -> None:
    import torch
    from safetensors.torch import load_file

    assert status(hosts)["outcome"] == "finished", hosts.output(0)
    ours = load_file(run_folder(hosts) / "export/model.safetensors")
    theirs = reference_weights(hosts.folder, total)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-9)
    assert steps(hosts) == total, "one record per step"
