"""Two hosts on one machine: a network namespace each, a hostname, a cable; root and iproute2.

Everything on disk is storage that both share, but for what `disks` binds to a folder of each host.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

# Time limits of the tests on two hosts are multiples of this: TEST_PATIENCE=5 on a busy machine.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = "127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"
ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
ENTER_WITH_DISK = 'mount --bind "$1" "$2"; shift 2; ' + ENTER


def available() -> bool:
    """Tell whether this machine lets us make network namespaces."""
    if os.geteuid() != 0:
        return False
    try:
        name = f"probe{os.getpid()}"
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class TwoHosts:
    """Start commands on host 0 and host 1; pull the cable; leave nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespaces = [f"cca{os.getpid()}h{i}" for i in (0, 1)]
        self.commands: list[subprocess.Popen] = []

    def __enter__(self) -> "TwoHosts":
        (self.folder / "hosts").write_text(HOSTS)
        for name in self.namespaces:
            _ip("netns", "add", name)
        first, second = self.namespaces
        _ip("link", "add", "veth0", "netns", first, "type", "veth",
            "peer", "name", "veth0", "netns", second)  # fmt: skip
        for name, address in zip(self.namespaces, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "veth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        for command in self.commands:
            command.wait()
        for name in self.namespaces:
            _ip("netns", "del", name)

    def start(
        self, host: int, *command: str, disk: tuple[Path, Path] | None = None, **environment: str
    ) -> subprocess.Popen:
        """Start a command on a host; what it prints goes to the file host<n>.txt.

        Args:
            host: 0 or 1.
            command: and its arguments.
            disk: (folder, place): where this host alone sees the folder.
            environment: in addition to that of this process.
        """
        with (self.folder / f"host{host}.txt").open("ab") as output:
            process = subprocess.Popen(
                self.entering(host, *command, disk=disk),
                stdout=output, stderr=subprocess.STDOUT, cwd=self.folder,
                env=dict(os.environ) | environment,
                # tests that run in a shell's background ignore SIGINT, and so would what they start
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )  # fmt: skip
        self.commands.append(process)
        return process

    def entering(
        self, host: int, *command: str, disk: tuple[Path, Path] | None = None
    ) -> list[str]:
        """Make a command one that runs on a host."""
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
        """Read what the commands on a host have printed."""
        path = self.folder / f"host{host}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def cable(self, state: str) -> None:
        """Pull the cable ("down") or put it back ("up")."""
        _ip("-n", self.namespaces[0], "link", "set", "veth0", state)

    def pids(self, host: int | None = None) -> list[int]:
        """List the processes of one host, or of both."""
        names = self.namespaces if host is None else [self.namespaces[host]]
        return [int(pid) for name in names for pid in _ip("netns", "pids", name).split()]

    def workers(self, host: int) -> list[int]:
        """List the training processes of a host by local rank."""
        found = {}
        for pid in self.pids(host):
            try:
                environment = Path(f"/proc/{pid}/environ").read_text().replace("\0", "\n")
                name = Path(f"/proc/{pid}/comm").read_text()  # of a process that was forked
            except OSError:
                continue
            if rank := re.search(r"(?m)^(?:RANK=|rank )(\d+)$", f"{name}{environment}"):
                found[int(rank[1])] = pid
        return [found[rank] for rank in sorted(found)]

    def wait(self, seconds: float) -> list[int]:
        """Wait until the commands have ended; return their exit codes.

        Args:
            seconds: the limit, times PATIENCE.
        """
        deadline = time.monotonic() + seconds * PATIENCE
        return [command.wait(max(0.1, deadline - time.monotonic())) for command in self.commands]


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout
