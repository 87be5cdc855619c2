"""Faults on two hosts, with the real launcher: the run ends in time, says why, and can go on."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts import ADDRESSES, CONFIG, NEEDS_HOSTS, PATIENCE, PLAIN, PROJECT, STOPS_AT, Hosts

pytestmark = NEEDS_HOSTS
ENVIRONMENT = PLAIN | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
OWN = (sys.executable, "-m", "my_project.launch")
PATIENT = re.sub("timeout_seconds: [0-9.e+]+", "timeout_seconds: 1800", CONFIG)  # the watchdog


def launch(
    hosts: Hosts,
    *arguments: str,
    processes: int = 2,
    launcher: tuple[str, ...] = ("accelerate", "launch"),
    disks: Sequence[tuple[Path, Path] | None] = (None, None),
) -> None:
    """Start the launcher on both hosts, with `processes` processes each."""
    for host in (0, 1):
        hosts.start(
            host, *launcher, "--config_file", "accelerate_configs/cpu_2_processes.yaml",
            "--num_machines", "2", "--num_processes", str(2 * processes),
            "--machine_rank", str(host), "--main_process_ip", ADDRESSES[0],
            "--main_process_port", "29500",
            "-m", "my_project.train", "--config", "tiny.yaml", *arguments,
            disk=disks[host], **ENVIRONMENT,
        )  # fmt: skip


def doctor(hosts: Hosts) -> str:
    command = [sys.executable, "-m", "my_project", "doctor", str(hosts.run_folder)]
    environment = os.environ | ENVIRONMENT
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return " ".join(told.stdout.split())


@pytest.mark.parametrize(("what", "host"), [("kill", 0), ("stop", 1), ("cable", None)])
def test_a_fault_ends_the_run_on_both_hosts_and_both_say_why(hosts, what, host):
    launch(hosts, *STOPS_AT)
    hosts.wait_for(lambda: hosts.steps() >= 10)
    if what == "cable":
        hosts.cable(1, "down")
    else:
        sign = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        os.kill(hosts.workers(host)[1], sign)
    # 5 s until it is noticed; 30 s more until the launcher kills a process that is stopped; gloo
    # itself would wait for 600
    assert all(code != 0 for code in hosts.wait(300))
    assert hosts.status()["outcome"] == "failed"
    paths = (hosts.run_folder / "errors").glob("*.json")
    errors = [json.loads(path.read_text()) for path in paths]
    said = {error["host"] for error in errors}
    assert said == {"host0", "host1"}, "a process of each host has left word"
    if what == "cable":
        assert len(errors) == 4
    else:
        assert f"no report from rank {2 * host + 1} on host{host}" in doctor(hosts)
    for at in (0, 1):
        assert "lost contact" in hosts.output(at) or "no progress" in hosts.output(at)


def test_killed_workers_on_either_host_are_restarted_in_place(hosts):
    launch(hosts, "--steps", "150", launcher=OWN)
    for host in (1, 0):
        before = hosts.steps()
        hosts.wait_for(lambda before=before: hosts.steps() >= before + 40)
        os.kill(hosts.workers(host)[0], signal.SIGKILL)
        hosts.wait_for(lambda: hosts.status()["outcome"] == "failed" or hosts.steps() > 100)
        hosts.wait_for(lambda: hosts.status()["outcome"] == "running", 120)
    assert hosts.wait(300) == [0, 0], hosts.output(0) + hosts.output(1)
    shown = hosts.output(0) + hosts.output(1)
    assert shown.count("resumed from") >= 2
    hosts.assert_finished_with_the_right_weights(150)


def test_launchers_notice_a_cut_cable_and_the_run_continues_once_back(hosts):
    """Long before gloo or the watchdog would; also if a launcher was stopped meanwhile."""
    (hosts.folder / "tiny.yaml").write_text(PATIENT)
    launch(hosts, "--steps", "200", launcher=(*OWN, "--wait_for_node_0", "60"))
    hosts.wait_for(lambda: hosts.steps() >= 30)
    launchers = [command.pid for command in hosts.commands]
    os.kill(launchers[1], signal.SIGSTOP)
    hosts.cable(1, "down")
    hosts.wait_for(lambda: "host1: node 1 has not answered" in hosts.output(0))
    os.kill(launchers[1], signal.SIGCONT)
    hosts.wait_for(lambda: "host0: node 0 has not answered" in hosts.output(1))
    hosts.cable(1, "up")
    assert hosts.wait(300) == [0, 0], hosts.output(0) + hosts.output(1)
    assert "all processes start again, restart 1" in hosts.output(0)
    hosts.assert_finished_with_the_right_weights(200)
    starts = map(json.loads, (hosts.run_folder / "starts.jsonl").read_text().splitlines())
    line = next(one for one in starts if one.get("outcome") == "failed")
    assert line["cause"] == "lost node"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_stays_away_ends_the_run_on_the_other_with_its_name(hosts, lost):
    (hosts.folder / "tiny.yaml").write_text(PATIENT)
    launch(hosts, *STOPS_AT, launcher=OWN)
    hosts.wait_for(lambda: hosts.steps() >= 30)
    hosts.lose(lost)
    assert hosts.wait(300)[1 - lost] == 1
    left = hosts.status()
    assert left["outcome"] == "failed"
    assert left["failure"]["cause"] == "lost node"
    assert left["reason"].startswith(f"rank {2 * lost} on host{lost}, step "), left["reason"]
    shown = {
        0: "the run ends, since node 0 is lost",
        1: "node 1 of 2 did not connect to 10.77.0.1 within 60 s",
    }
    assert shown[lost] in hosts.output(1 - lost)
    assert f"rank {2 * lost}, host host{lost}" in doctor(hosts), doctor(hosts)


def test_a_launcher_that_was_killed_stops_the_run_and_is_named_with_its_host(hosts):
    launch(hosts, *STOPS_AT, launcher=OWN)
    hosts.wait_for(lambda: hosts.steps() >= 10)
    os.kill(hosts.commands[1].pid, signal.SIGKILL)
    assert hosts.wait(300)[0] == 75
    left = hosts.status()
    assert left["outcome"] == "preempted"
    assert left["reason"] == "the launcher has exited, on rank 2 (host1)"


def test_a_process_that_hangs_ends_after_a_kill_on_the_other_host(hosts):
    """No collective notices it: the launchers tell each other."""
    (hosts.folder / "tiny.yaml").write_text(PATIENT)
    hangs = ("--recipe.fault", "hang", "--recipe.fault_at", "5", "--recipe.fault_on_rank", "0")
    launch(hosts, *STOPS_AT, *hangs, processes=1, launcher=OWN)
    hosts.wait_for(lambda: hosts.steps() == 3)  # a record is written two steps later
    time.sleep(2)
    os.kill(hosts.workers(1)[0], signal.SIGKILL)
    hosts.wait_for(lambda: "all processes start again, restart 1" in hosts.output(0))


def test_a_run_folder_that_is_not_shared_is_refused_at_the_start(hosts):
    place = hosts.folder / "runs"
    place.mkdir()
    disks = []
    for host in (0, 1):
        disk = hosts.folder / f"disk{host}"
        disk.mkdir()
        disks.append((disk, place))
    launch(hosts, "--steps", "60", disks=disks)
    assert all(code != 0 for code in hosts.wait(300))
    for host in (0, 1):
        assert "on host1 is not the folder that rank 0 on host0 wrote to" in hosts.output(host)
        assert "--runs_folder" in hosts.output(host)
        assert "step 1 of" not in hosts.output(host)


# ---- FSDP2 and HSDP by the commands of their cards -----------------------------------------------
SHARDED = """
run_name: tiny
recipe: {class_path: ragged.Deep, init_args: {dtype: float64, seconds: 0.05}}
batches: {global_batch_size: 16, micro_batch_size: 2, workers: 0}
steps: 60
optim: {lr: 0.05, ema_decay: 0.9, clip_norm: 8.0}
evaluation: {every_steps: 20}
telemetry: {every_steps: 1, trackers: []}
"""
CARD = re.compile(r"^# +python -m my_project.launch ((?:.*\\\n)*.*)", re.MULTILINE)


def card(where: str, host: int) -> list[str]:
    """Return the arguments of the command on a config's card, for a host without GPUs."""
    (command,) = CARD.findall((PROJECT / f"accelerate_configs/{where}.yaml").read_text())
    for shown, ours in {
        "\\\n#": "",
        "--num_processes 16": "--num_processes 4",
        "--machine_rank 0": f"--machine_rank {host}",
        "<address of node 0>": ADDRESSES[0],
        "configs/image_classification.yaml": "tiny.yaml",
        " -m ": " --gpu_ids=-1,-1 --mixed_precision no -m ",
    }.items():
        assert command.count(shown) >= 1, (shown, command)
        command = command.replace(shown, ours)
    return shlex.split(command)


def shards(hosts: Hosts, step: int) -> list[str]:
    folder = hosts.run_folder / f"checkpoints/step_{step:08d}"
    return sorted(path.name.split(".")[1] for path in folder.glob("model.rank_*.safetensors"))


def test_fsdp2_preempted_on_one_host_goes_on_as_hsdp_with_the_curve_of_ddp(hosts):
    """Each with the flags of its card; the first with accelerate launch, which has them too."""
    (hosts.folder / "tiny.yaml").write_text(SHARDED)
    for host in (0, 1):
        hosts.start(host, "accelerate", "launch", *card("multi_node_fsdp2", host), **ENVIRONMENT)
    hosts.wait_for(lambda: hosts.steps() >= 3)
    os.kill(hosts.workers(1)[1], signal.SIGTERM)
    hosts.wait(300)
    left = hosts.status()
    assert left["outcome"] == "preempted", hosts.output(0) + hosts.output(1)
    every_rank = ["rank_00000", "rank_00001", "rank_00002", "rank_00003"]
    assert shards(hosts, left["step"]) == every_rank, "both hosts have saved their shards"

    hosts.commands.clear()
    for host in (0, 1):
        hosts.start(host, *OWN, *card("multi_node_hsdp", host), **ENVIRONMENT)
    assert hosts.wait(300) == [0, 0], hosts.output(0) + hosts.output(1)
    resumed = f"resumed from runs/tiny/checkpoints/step_{left['step']:08d}"
    assert resumed in hosts.output(0)
    assert shards(hosts, 60) == every_rank[:2], "the ranks of one host hold the whole model"

    hosts.commands.clear()
    hosts.start(
        0, "accelerate", "launch", "--config_file", "accelerate_configs/cpu_2_processes.yaml",
        "-m", "my_project.train", "--config", "tiny.yaml", "--run_name", "ddp",
        "--recipe.init_args.seconds", "0", **ENVIRONMENT,
    )  # fmt: skip
    assert hosts.wait(300) == [0], hosts.output(0)
    ours, theirs = (curve(hosts.folder / "runs" / name) for name in ("tiny", "ddp"))
    assert len(ours) == 2 * 60 + 2 * 3, "loss and gradient norm of each step, three evaluations"
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
    for host in (0, 1):
        assert "Warning" not in hosts.output(host), "of Python, which nobody could act on"


def test_hsdp_goes_on_on_the_node_that_is_left_and_takes_the_other_back(hosts):
    """On one node as FSDP2: the mesh depends on the remaining nodes."""
    (hosts.folder / "tiny.yaml").write_text(
        SHARDED + f"distributed: {{timeout_seconds: {60 * PATIENCE:g}}}\n"
    )
    elastic = (*OWN, "--min_machines", "1", "--lost_node_seconds", "6")

    def start(host: int) -> None:
        more = ("--steps", "200", "--evaluation.every_steps", "null")
        more += ("--checkpoints.every_steps", "10")
        hosts.start(host, *elastic, *card("multi_node_hsdp", host), *more, **ENVIRONMENT)

    for host in (0, 1):
        start(host)
    hosts.wait_for(lambda: hosts.steps() >= 15)
    hosts.lose(1)
    hosts.wait_for(lambda: hosts.status()["nodes"] == "1 of 2" and hosts.steps() >= 50)
    hosts.cable(1, "up")
    start(1)
    assert hosts.wait(300)[::2] == [0, 0], hosts.outputs()
    lines = map(json.loads, (hosts.run_folder / "starts.jsonl").read_text().splitlines())
    assert [one["nodes"] for one in lines if one["event"] == "start"] == [2, 1, 2]
    assert hosts.status()["nodes"] == "2 of 2"

    hosts.commands.clear()
    hosts.start(
        0, "accelerate", "launch", "--config_file", "accelerate_configs/cpu_2_processes.yaml",
        "-m", "my_project.train", "--config", "tiny.yaml", "--run_name", "ddp", "--steps", "200",
        "--evaluation.every_steps", "null", "--recipe.init_args.seconds", "0", **ENVIRONMENT,
    )  # fmt: skip
    assert hosts.wait(300) == [0], hosts.output(0)
    ours, theirs = (curve(hosts.folder / "runs" / name) for name in ("tiny", "ddp"))
    assert len(ours) == 2 * 200 + 2, "two numbers of each step and of the evaluation, once"
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def curve(folder: Path) -> list[float]:
    """Return losses, gradient norms and results of evaluations, by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = ("loss", "gradient_norm", "validation/auroc", "validation/accuracy")
    return [line[name] for line in lines for name in names if name in line]
