"""Emulate hosts on one machine: each has a network namespace, a hostname and a cable to a switch.

This needs root and iproute2. All hosts share the disk, except for folders that `disk` binds for
one host.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from shell import succeed

ip = partial(succeed, "ip")
# Time limits of the tests on two hosts are multiples of this: TEST_PATIENCE=5 on a busy machine.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
ADDRESSES = tuple(f"10.77.0.{host + 1}" for host in range(6))
NAMES = "".join(f"{address} host{host}\n" for host, address in enumerate(ADDRESSES))
ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
ENTER_WITH_DISK = 'mount --bind "$1" "$2"; shift 2; ' + ENTER


def available() -> bool:
    """Return whether this process can make network namespaces."""
    if os.geteuid() != 0:
        return False
    try:
        name = f"probe{os.getpid()}"
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


NEEDS_HOSTS = [
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


def steps(run_folder: Path) -> int:
    """Return the number of a run's records of steps."""
    path = run_folder / "metrics.jsonl"
    return path.read_text().count('"interval"') if path.exists() else 0


def kill(pids: Iterable[int], sign: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes, some of which may have ended since they were listed."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


class Hosts:
    """Starts commands on host 0, host 1, ... and pulls cables; removes all hosts at the end."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.folder = folder
        self.count = count
        self.run_folder = folder / "runs/tiny"
        self.namespaces = [f"cca{os.getpid()}h{i}" for i in range(count)]
        self.switch = f"cca{os.getpid()}s"
        self.commands: list[subprocess.Popen] = []

    def __enter__(self) -> "Hosts":
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{NAMES}")
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for host in range(self.count):
            self.add(host)
        return self

    def add(self, host: int) -> None:
        """Make a host, and connect it to the switch."""
        name, port = self.namespaces[host], f"port{host}"
        ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", name, "type", "veth",
            "peer", "name", port, "netns", self.switch)  # fmt: skip
        ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
        ip("-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "veth0")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "veth0", "up")

    def __exit__(self, *_: object) -> None:
        kill(self.pids())
        for command in self.commands:
            command.wait()
        for name in (*self.namespaces, self.switch):
            ip("netns", "del", name)

    def start(
        self, host: int, *command: str, disk: tuple[Path, Path] | None = None, **environment: str
    ) -> subprocess.Popen:
        """Start a command on a host; its output is appended to the file host<n>.txt.

        Args:
            host: the number of the host.
            command: the command and its arguments.
            disk: (folder, place): only this host sees the folder, at this place.
            environment: variables in addition to those of this process.
        """
        with (self.folder / f"host{host}.txt").open("ab") as output:
            process = subprocess.Popen(
                self.entering(host, *command, disk=disk),
                stdout=output, stderr=subprocess.STDOUT, cwd=self.folder,
                env=dict(os.environ) | environment,
                # tests in the background of a shell ignore SIGINT, and their children inherit that
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )  # fmt: skip
        self.commands.append(process)
        return process

    def entering(
        self, host: int, *command: str, disk: tuple[Path, Path] | None = None
    ) -> list[str]:
        """Return a command line that runs a command on a host."""
        arguments = [f"host{host}", str(self.folder / "hosts"), *command]
        script = ENTER
        if disk:
            script, arguments = ENTER_WITH_DISK, [*map(str, disk), *arguments]
        return [
            # not `ip netns exec`, which hides /sys/fs/cgroup
            "nsenter", f"--net=/run/netns/{self.namespaces[host]}",
            "unshare", "--uts", "--mount", "bash", "-ec", script, "_", *arguments,
        ]  # fmt: skip

    def output(self, host: int) -> str:
        """Return what the commands on a host have printed."""
        path = self.folder / f"host{host}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def outputs(self) -> str:
        """Return what the commands on all hosts have printed."""
        return "".join(f"---- host {host}\n{self.output(host)}" for host in range(self.count))

    def cable(self, host: int, state: str) -> None:
        """Pull the cable of a host out of the switch ("down") or put it back ("up")."""
        ip("-n", self.switch, "link", "set", f"port{host}", state)

    def lose(self, host: int) -> None:
        """Cut a host off and kill all its processes, as a power failure does."""
        self.cable(host, "down")
        kill(self.pids(host))

    def pids(self, host: int | None = None) -> list[int]:
        """Return the processes of one host, or of all hosts."""
        names = self.namespaces if host is None else [self.namespaces[host]]
        return [int(pid) for name in names for pid in ip("netns", "pids", name).split()]

    def workers(self, host: int) -> list[int]:
        """Return the training processes of a host, by rank."""
        by_rank = {}
        for pid in self.pids(host):
            try:
                environment = Path(f"/proc/{pid}/environ").read_text().replace("\0", "\n")
                name = Path(f"/proc/{pid}/comm").read_text()  # "rank 0" if it was forked
            except OSError:
                continue
            if rank := re.search(r"(?m)^(?:RANK=|rank )(\d+)$", f"{name}{environment}"):
                by_rank[int(rank[1])] = pid
        return [by_rank[rank] for rank in sorted(by_rank)]

    def wait(self, seconds: float) -> list[int]:
        """Wait until the commands have ended; return their exit codes.

        Args:
            seconds: the time limit; it is multiplied by PATIENCE.
        """
        deadline = time.monotonic() + seconds * PATIENCE
        return [command.wait(max(0.1, deadline - time.monotonic())) for command in self.commands]

    def wait_for(self, condition: Callable[[], object], seconds: float = 300) -> None:
        """Wait until a condition holds; fail after `seconds`, or if all commands have ended."""
        deadline = time.monotonic() + seconds * PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.outputs()
            assert any(c.poll() is None for c in self.commands), self.outputs()
            time.sleep(0.1)

    def status(self) -> dict:
        return json.loads((self.run_folder / "status.json").read_text())

    def steps(self) -> int:
        return steps(self.run_folder)

    def assert_finished_with_the_right_weights(self, total: int) -> None:
        """Compare the weights with those of a run on one process, without a network."""
        import torch
        from safetensors.torch import load_file

        assert self.status()["outcome"] == "finished", self.output(0)
        subprocess.run(
            [sys.executable, "-m", "my_project.train", "--config", "tiny.yaml", "--run_name",
             "alone", "--recipe.init_args.seconds", "0", "--steps", str(total)],
            cwd=self.folder, env=os.environ | PLAIN | {"ACCELERATE_USE_CPU": "1"}, check=True,
            capture_output=True,
        )  # fmt: skip
        file = "export/model.safetensors"
        tiny, alone = (load_file(self.folder / "runs" / name / file) for name in ("tiny", "alone"))
        torch.testing.assert_close(tiny, alone, rtol=1e-9, atol=1e-9)
        assert self.steps() == total, "one record per step"
