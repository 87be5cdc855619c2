"""Lose hosts of a run on four hosts, by each fault, at each time; print what the run does.

    python tests/node_faults.py             as root: all cases, 25 minutes; a table in Markdown
    python tests/node_faults.py power cut   the cases with one of these words

The hosts are network namespaces (hosts.py). Each case must end as `expected` says: with the weights
of an uninterrupted run and one record per step, or with a message on a remaining host. No
process may run afterwards, and no two starts may overlap.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from hosts import ADDRESSES, CONFIG, PATIENCE, PLAIN, PROJECT, Hosts, kill
from safetensors.torch import load_file

COUNT, STEPS, LOST_SECONDS = 4, 150, 6
ENVIRONMENT = PLAIN | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RECIPE = """
import time
from dataclasses import dataclass
from pathlib import Path

from ragged import Ragged


@dataclass(frozen=True, kw_only=True)
class Slow(Ragged):
    def build_metrics(self):
        Path("evaluates").touch()
        time.sleep(0.3)
        return super().build_metrics()

    def export(self, model, data_info, tensors, folder):
        if folder:  # on rank 0
            time.sleep(0.3)
        return "model", tensors
"""
SETTINGS = (
    CONFIG.replace("ragged.Ragged", "slow.Slow").replace("steps: 400", f"steps: {STEPS}")
    + "evaluation: {every_steps: 50, sanity_check: false}\n"
)


@dataclass(frozen=True)
class NodeFault:
    """What happens to which hosts, when, and whether they come back."""

    what: str  # a key of FAULTS
    hosts: tuple[int, ...] = (2,)
    when: str = "step"  # a key of TIMES
    back: bool = False  # a new launcher is started on these hosts a while after the fault
    options: tuple[str, ...] = ()  # more options of the launchers
    expected: str = "right"  # weights and records; or a message on a remaining host

    def __str__(self) -> str:
        return " ".join((self.what, *map(str, self.hosts), self.when, *["back"] * self.back))


def cut(seconds: float) -> Callable[[Hosts, int], None]:
    def cut_off(hosts: Hosts, host: int) -> None:
        hosts.cable(host, "down")
        if seconds:
            threading.Timer(seconds, put_back, (hosts, host)).start()

    def put_back(hosts: Hosts, host: int) -> None:
        with suppress(Exception):  # the case may have ended
            hosts.cable(host, "up")

    return cut_off


FAULTS: dict[str, Callable[[Hosts, int], None]] = {
    "power": Hosts.lose,
    "cut": cut(0),
    "cut 3 s": cut(LOST_SECONDS / 2),
    "cut 20 s": cut(20),
    "cut 60 s": cut(60),
    "launcher killed": lambda hosts, host: kill([hosts.commands[host].pid]),
    "launcher told to stop": lambda hosts, host: kill([hosts.commands[host].pid], signal.SIGTERM),
    "processes killed": lambda hosts, host: kill(hosts.workers(host)),
    "all killed": lambda hosts, host: kill(hosts.pids(host)),
    "stopped": lambda hosts, host: kill(hosts.pids(host), signal.SIGSTOP),
}
TIMES: dict[str, Callable[[Hosts], bool]] = {
    "join": lambda hosts: "node 2 of" in hosts.output(2),
    "start": lambda hosts: all(hosts.workers(host) for host in range(COUNT)),
    "step": lambda hosts: hosts.steps() >= 25,
    "save": lambda hosts: any(hosts.run_folder.glob("checkpoints/.step_00000040*.partial")),
    "evaluation": lambda hosts: (hosts.folder / "evaluates").exists() and hosts.steps() > 40,
    "end": lambda hosts: hosts.steps() >= STEPS - 1,
    "export": lambda hosts: any(hosts.run_folder.glob(".export_*.partial")),
}
CASES = [
    *(NodeFault("power", (host,), back=back) for host in (1, 3) for back in (False, True)),
    *(NodeFault("power", (2,), when) for when in TIMES if when != "step"),
    NodeFault("power", (1, 2)),
    NodeFault("power", (1, 3), back=True),
    NodeFault("power", (1, 2, 3), expected="nodes 1, 2, 3 of 4 did not connect"),
    *(NodeFault("cut", (2,), when) for when in ("start", "step", "save", "end")),
    *(NodeFault("cut 3 s", (host,)) for host in (0, 2)),
    NodeFault("cut 20 s", (2,), options=("--wait_for_node_0", "60")),
    NodeFault("cut 20 s", (2,)),
    NodeFault("cut 60 s", (2,), options=("--wait_for_node_0", "90")),
    *(NodeFault("launcher killed", (host,), back=True) for host in (1, 3)),
    *(NodeFault("launcher killed", (2,), when) for when in ("join", "start", "evaluation", "end")),
    *(NodeFault("launcher told to stop", (2,), when, back=when == "step") for when in TIMES),
    *(NodeFault("processes killed", (host,)) for host in (0, 2)),
    NodeFault("processes killed", (0,), "export"),
    NodeFault("all killed", (3,), back=True),
    NodeFault("all killed", (3,), "save"),
    NodeFault("stopped", (2,)),
    # if node 0 is lost, the other nodes end, or wait for it
    NodeFault("power", (0,), expected="the run ends, since node 0 is lost"),
    NodeFault("power", (0,), "start", expected="the run ends, since node 0 is lost"),
    NodeFault("cut", (0,), expected="the run ends, since node 0 is lost"),
    NodeFault("power", (0,), back=True, options=("--wait_for_node_0", "90")),
    NodeFault("launcher told to stop", (0,), expected="preempted: SIGTERM"),
    NodeFault("launcher told to stop", (0,), back=True, options=("--wait_for_node_0", "90")),
]


@cache
def right_weights() -> dict[str, torch.Tensor]:
    """Train on one process without an interruption; return the weights."""
    with tempfile.TemporaryDirectory() as name:
        make_project(Path(name))
        subprocess.run(
            [sys.executable, "-m", "my_project.train", "--config", "tiny.yaml",
             "--recipe.init_args.seconds", "0"],
            cwd=name, env=os.environ | PLAIN | {"ACCELERATE_USE_CPU": "1"}, check=True,
            capture_output=True,
        )  # fmt: skip
        return load_file(f"{name}/runs/tiny/export/model.safetensors")


def make_project(folder: Path) -> None:
    for name in ("src", "accelerate_configs"):
        (folder / name).symlink_to(PROJECT / name)
    (folder / "slow.py").write_text(RECIPE)
    (folder / "tiny.yaml").write_text(SETTINGS)


def launch(
    hosts: Hosts, host: int, *options: str, nodes: int = COUNT, min_nodes: int = 2, **more: str
) -> None:
    """Start the launcher on a host, with one process; `more` are environment variables."""
    hosts.start(
        host, sys.executable, "-m", "my_project.launch",
        "--config_file", "accelerate_configs/cpu_2_processes.yaml",
        "--num_machines", str(nodes), "--num_processes", str(nodes), "--machine_rank", str(host),
        "--main_process_ip", ADDRESSES[0], "--main_process_port", "29500",
        "--min_machines", str(min_nodes), "--lost_node_seconds", str(LOST_SECONDS),
        "--join_timeout_seconds", str(20 * PATIENCE), *options,
        "-m", "my_project.train", "--config", "tiny.yaml", **ENVIRONMENT | more,
    )  # fmt: skip


def run(fault: NodeFault) -> str:
    """Inject a fault; return a short summary of what the run did.

    Raises:
        AssertionError: the run did not do what is expected.
    """
    with tempfile.TemporaryDirectory() as name, Hosts(Path(name), COUNT) as hosts:
        make_project(hosts.folder)
        for host in range(COUNT):
            launch(hosts, host, *fault.options)
        while not TIMES[fault.when](hosts):
            assert any(command.poll() is None for command in hosts.commands), hosts.outputs()
            time.sleep(0.002)
        began, before = time.monotonic(), hosts.steps()
        for host in fault.hosts:
            FAULTS[fault.what](hosts, host)
        # do not wait for launchers that are gone for good
        gone = fault.hosts if fault.what in ("power", "stopped", "all killed") else ()
        left = [command for host, command in enumerate(hosts.commands) if host not in gone]
        pause, last, stepped = 0.0, before, began
        is_back = not fault.back
        while any(command.poll() is None for command in left):
            now, steps = time.monotonic(), hosts.steps()
            assert now < began + 180 * PATIENCE, f"{fault} hangs:\n{hosts.outputs()}"
            if steps != last:
                pause, last, stepped = max(pause, now - stepped), steps, now
            if not is_back and now > began + 3 and (0 in fault.hosts or steps > before + 20):
                is_back = True
                for host in fault.hosts:
                    hosts.cable(host, "up")
                    launch(hosts, host, *fault.options)
                    left.append(hosts.commands[-1])
            time.sleep(0.02)
        ended_at = time.monotonic() - began
        kill([pid for host in fault.hosts for pid in hosts.pids(host)])
        codes = [command.poll() for command in left]
        shown = hosts.outputs()
        status = hosts.run_folder / "status.json"
        assert status.exists() or fault.expected != "right", f"{fault}: nothing began\n{shown}"
        deadline = time.monotonic() + 10 * PATIENCE
        while pids := hosts.pids():
            assert time.monotonic() < deadline, f"{fault}: processes {pids} are left\n{shown}"
            time.sleep(0.1)
        assert is_back, f"{fault}: it ended before a host came back\n{shown}"
        if fault.expected != "right":
            survivors = [host for host in range(COUNT) if host not in fault.hosts]
            assert any(fault.expected in hosts.output(host) for host in survivors), shown
            assert 0 not in codes, shown
            assert ended_at < 60 * PATIENCE, f"{fault}: it took {ended_at:.0f} s to end\n{shown}"
            return f"ends after {ended_at:.1f} s: {fault.expected}"
        status = hosts.status()
        lines = (hosts.run_folder / "starts.jsonl").read_text().splitlines()
        starts = [json.loads(line) for line in lines]
        assert status["outcome"] == "finished", f"{fault}: {status}\n{shown}"
        ours = load_file(hosts.run_folder / "export/model.safetensors")
        torch.testing.assert_close(ours, right_weights(), rtol=1e-9, atol=1e-9)
        records = (hosts.run_folder / "metrics.jsonl").read_text().splitlines()
        steps = [line["step"] for line in map(json.loads, records) if line["kind"] == "interval"]
        assert steps == list(range(1, STEPS + 1)), f"{fault}: not one record per step"
        nodes = [event["nodes"] for event in starts if event["event"] == "start"]
        times = [event["time"] for event in starts]
        assert times == sorted(times), "no two starts at the same time"
        numbers = " -> ".join(map(str, nodes))
        return f"goes on: {numbers} nodes; longest pause {pause:.1f} s"


def main(words: list[str]) -> int:
    """Run cases, and print a table; return 1 if one of them did not do what is expected."""
    wrong = 0
    print("| fault | on node | when | new launcher | what the run does |\n|---|---|---|---|---|")
    for case in CASES:
        if words and not any(word in str(case) for word in words):
            continue
        try:
            outcome = run(case)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            wrong += 1
            outcome = f"WRONG: {error}"
        back = "yes" if case.back else "no"
        more = f", `{' '.join(case.options)}`" if case.options else ""
        hosts = ", ".join(map(str, case.hosts))
        print(f"| {case.what} | {hosts} | {case.when} | {back}{more} | {outcome} |", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
