"""A server that speaks S3 on loopback, for tests and benchmarks of object stores.

It is OpenStack Swift if that works here, or else moto: docs/decisions/0015-a-server-for-s3.md.
"""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session

START_SECONDS = 60 * float(os.environ.get("TEST_PATIENCE", "1"))
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
KEY, SECRET, REGION = "test:tester", "testing", "us-east-1"
SWIFT = ("account", "container", "object", "proxy")
# Long timeouts, for slow machines: with its default timeouts of 0.5 to 10 seconds, Swift would
# answer 503, or leave the update of a listing to a daemon that does not run here.
CONF = """
[DEFAULT]
bind_ip = {ip}
bind_port = {port}
user = {user}
workers = 0
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
fallocate_reserve = 0
conn_timeout = 30
node_timeout = 120
client_timeout = 300
container_update_timeout = 120
[pipeline:main]
pipeline = {pipeline}
[app:{name}-server]
use = egg:swift#{name}
account_autocreate = true
conn_timeout = 30
node_timeout = 120
recoverable_node_timeout = 120
error_suppression_limit = 1000000000
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
# nothing listens there, so each request asks the account and container servers
memcache_servers = {ip}:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
"""
PROXY = "catch_errors cache listing_formats s3api tempauth copy slo proxy-server"
SWIFT_CONF = """
[swift-hash]
swift_hash_path_suffix = test
[storage-policy:0]
name = one
default = yes
"""
RING = """
import sys
from swift.common.ring import RingBuilder
folder, ip, *ports = sys.argv[1:]
for name, port in zip(("account", "container", "object"), ports):
    builder = RingBuilder(part_power=1, replicas=1, min_part_hours=0)
    builder.add_dev(dict(region=1, zone=1, weight=1, ip=ip, port=int(port), device="disk"))
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{name}.ring.gz")
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that runs: its address, what a client needs, and its processes."""

    name: str
    """swift or moto."""
    folder: Path
    ip: str
    port: int
    commands: tuple[tuple[str, ...], ...]
    bucket: str = "bucket"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which botocore, and therefore s3fs, reaches the server."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": f"http://{self.ip}:{self.port}",
            "NO_PROXY": self.ip,
        }

    def start(self) -> None:
        """Start the processes; return once the server answers.

        The processes end with the calling thread, however it ends.
        """
        for command in self.commands:
            with (self.folder / "log.txt").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*DIES_WITH_PARENT, *command], stdout=log, stderr=log, cwd=self.folder
                    )
                )
        deadline, client = time.monotonic() + START_SECONDS, self.client()
        while not makes_bucket(client, self.bucket):
            is_late = time.monotonic() > deadline
            if is_late or any(process.poll() is not None for process in self.processes):
                log_text = (self.folder / "log.txt").read_text(errors="replace")
                raise AssertionError(f"{self.name} did not start: {log_text[-4000:]}")
            time.sleep(0.05)

    def client(self) -> BaseClient:
        """Return a client of botocore, which tries each request once."""
        return get_session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=Config(retries={"total_max_attempts": 1}, proxies={}),
        )

    def send(self, sign: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(sign)

    def pause(self) -> None:
        """Stop the server from answering; connections stay open."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the processes: connections are refused until the next start.

        Swift then still has its objects, moto has none.
        """
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes.clear()


def makes_bucket(client: BaseClient, bucket: str) -> bool:
    """Make a bucket unless it exists; return whether the server has it now."""
    try:
        client.create_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as error:
        return isinstance(error, client.exceptions.BucketAlreadyOwnedByYou)
    return True


@contextmanager
def s3_server(folder: Path, name: str | None = None) -> Iterator[Server]:
    """Run a server with one empty bucket, whose data is in a folder.

    The test is skipped if no server works here.

    Args:
        folder: a new folder.
        name: "swift" or "moto"; None for the first one that works here.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # the server has its own address, so no other process takes its ports while it is stopped
    ip = "127." + ".".join(str(random.SystemRandom().randrange(1, 255)) for _ in range(3))
    if name in (None, "swift") and installed("swift-proxy-server") and keeps_attributes(folder):
        server = swift(folder, ip)
    elif name in (None, "moto") and installed("moto_server"):
        server = moto(folder, ip)
    else:
        pytest.skip("needs swift of PyPI and a disk with user xattrs, or moto[server]")
    try:
        server.start()
        yield server
    finally:
        server.stop()


def installed(program: str) -> str:
    """Return the path of a program; "" if it is not installed."""
    return shutil.which(program, path=PATH) or ""


def keeps_attributes(folder: Path) -> bool:
    """Return whether files in the folder can hold the attributes that Swift stores."""
    try:
        os.setxattr(folder, "user.test", b"1" * 1000)
    except OSError:
        return False
    return True


def moto(folder: Path, ip: str) -> Server:
    (port,) = free_ports(ip, 1)
    command = (installed("moto_server"), "-H", ip, "-p", str(port))
    return Server(name="moto", folder=folder, ip=ip, port=port, commands=(command,))


def swift(folder: Path, ip: str) -> Server:
    """Write the configuration of one account, one container and one object server, and a proxy."""
    (folder / "devices/disk").mkdir(parents=True)
    (folder / "swift.conf").write_text(SWIFT_CONF)
    ports = free_ports(ip, len(SWIFT))
    commands = []
    for name, port in zip(SWIFT, ports, strict=True):
        path = folder / f"{name}-server.conf"
        conf = CONF.format(
            ip=ip, port=port, folder=folder, name=name, user=pwd.getpwuid(os.geteuid()).pw_name,
            pipeline=PROXY if name == "proxy" else f"{name}-server",
        )  # fmt: skip
        path.write_text(conf)
        commands.append((installed(f"swift-{name}-server"), str(path), "--verbose"))
    python = Path(commands[0][0]).with_name("python3")  # the interpreter that has Swift installed
    words = [python, "-W", "ignore", "-c", RING, folder, ip, *map(str, ports[:-1])]
    subprocess.run(words, check=True)
    return Server(name="swift", folder=folder, ip=ip, port=ports[-1], commands=tuple(commands))


def free_ports(ip: str, count: int) -> list[int]:
    listeners = [socket.create_server((ip, 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
