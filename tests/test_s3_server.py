"""The S3 servers of the tests do what s3fs needs from an object store."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import s3fs
from s3_server import KEY, SECRET, START_SECONDS, Server, s3_server
from throttle import throttled

pytestmark = pytest.mark.slow
PART = 50 * 2**20  # the size of the parts that s3fs sends
STRANGE = ("a b+c%20d&e=f", "ü/日本", "checkpoint_1/.manifest.json")


@pytest.fixture(scope="module", params=["swift", "moto"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with s3_server(tmp_path_factory.mktemp("s3"), request.param) as server:
        yield server


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., s3fs.S3FileSystem]:
    """Return a function that connects like a program that has only the environment variables."""

    def connect(server: Server, tries: int = 5, read_timeout: int = 200) -> s3fs.S3FileSystem:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        files = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            # by default s3fs waits 15 s; a slow machine may need more
            config_kwargs={
                "retries": {"total_max_attempts": tries},
                "read_timeout": read_timeout,
            },
        )
        files.retries = tries
        return files

    return connect


@pytest.fixture
def store(
    server: Server, connect: Callable[..., s3fs.S3FileSystem], request: pytest.FixtureRequest
):
    """Return a client that tries each request once, and a folder in the bucket for this test."""
    return connect(server, tries=1), f"{server.bucket}/{request.node.originalname}"


def test_what_is_written_replaced_or_deleted_is_so_at_once(store):
    """Names with spaces and other letters are kept."""
    files, folder = store
    paths = [f"{folder}/{name}" for name in (*STRANGE, *range(20))]
    for number, path in enumerate(paths):
        for value in (b"first", path.encode()):
            files.pipe(path, value)
            assert files.cat(path) == value
            assert files.info(path)["size"] == len(value)
        assert files.find(folder) == sorted(paths[: number + 1])
    files.rm(path)
    assert files.find(folder) == sorted(paths[:-1])


def test_two_parts_of_50_mb_make_one_object(store, tmp_path):
    files, folder = store
    (tmp_path / "weights").write_bytes(os.urandom(2 * PART))
    files.put(str(tmp_path / "weights"), f"{folder}/weights")
    assert files.info(f"{folder}/weights")["size"] == 2 * PART
    assert files.info(f"{folder}/weights")["ETag"].strip('"').endswith("-2"), "of two parts"
    files.get(f"{folder}/weights", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == (tmp_path / "weights").read_bytes()
    middle = files.cat_file(f"{folder}/weights", start=PART - 10, end=PART + 10)
    assert middle == (tmp_path / "weights").read_bytes()[PART - 10 : PART + 10]


def test_parts_that_are_not_completed_make_no_object(store):
    files, folder = store
    path = f"{folder}/weights"
    bucket, key = path.split("/", 1)
    upload = files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    part = {"Bucket": bucket, "Key": key, "UploadId": upload}
    files.call_s3("upload_part", **part, PartNumber=1, Body=bytes(5 * 2**20))
    assert not files.exists(path)
    assert not files.find(folder)
    left = files.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]
    assert [one["Key"] for one in left] == [key]
    files.call_s3("abort_multipart_upload", **part)
    assert not files.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads")


def test_a_copy_is_an_object_of_its_own(store):
    files, folder = store
    for size in (10, 2 * PART):
        data = os.urandom(size)
        files.pipe(f"{folder}/first", data)
        files.copy(f"{folder}/first", f"{folder}/second")
        files.rm(f"{folder}/first")
        assert files.cat(f"{folder}/second") == data


def test_an_object_is_created_only_where_none_is(store):
    files, folder = store
    files.pipe_file(f"{folder}/lock", b"first", mode="create")
    with pytest.raises(OSError, match=r"pre-?conditions you specified did not hold"):
        files.pipe_file(f"{folder}/lock", b"second", mode="create")
    assert files.cat(f"{folder}/lock") == b"first"


def test_a_wrong_secret_is_refused(server):
    if server.name == "moto":
        pytest.skip("moto takes any secret")
    url = server.environment["AWS_ENDPOINT_URL"]
    for secret in ("wrong", SECRET):
        files = s3fs.S3FileSystem(key=KEY, secret=secret, endpoint_url=url)
        with pytest.raises(PermissionError) if secret == "wrong" else nullcontext():
            files.ls(server.bucket)


def test_a_server_that_is_paused_does_not_answer(server, connect):
    path = f"{server.bucket}/paused"
    connect(server).pipe(path, b"first")
    server.pause()
    try:
        with pytest.raises(Exception, match=r"(?i)timeout"):
            connect(server, tries=1, read_timeout=1).cat(path)
    finally:
        server.resume()
    assert connect(server).cat(path) == b"first"


def test_a_server_that_starts_again_has_its_data(server, connect):
    if server.name == "moto":
        pytest.skip("moto keeps its objects in memory")
    files = connect(server, tries=1)
    path, large = f"{server.bucket}/kept", f"{server.bucket}/large"
    files.pipe({path: b"first", large: bytes(2 * PART)})
    server.stop()
    with pytest.raises(Exception, match=r"(?i)connect"):
        files.cat(path)
    server.start()
    assert files.cat(path) == b"first"
    assert files.cat(large) == bytes(2 * PART)
    files.pipe(path, b"second")
    assert files.cat(path) == b"second"


def test_a_throttle_passes_on_every_byte_but_not_faster(server, connect):
    """Only a lower limit of the time is checked: a slow machine takes longer."""
    data = os.urandom(4_000_000)
    with throttled(server, 2_000_000) as slow:
        assert slow.environment["AWS_ENDPOINT_URL"] != server.environment["AWS_ENDPOINT_URL"]
        files, path = connect(slow), f"{slow.bucket}/slow"
        begin = time.monotonic()
        files.pipe(path, data)
        middle = time.monotonic()
        assert files.cat(path) == data
        assert min(middle - begin, time.monotonic() - middle) >= 2
    with pytest.raises(Exception, match=r"(?i)connect"):
        connect(slow, tries=1).cat(path)
    assert connect(server).cat(path) == data


@pytest.mark.parametrize("name", ["swift", "moto"])
def test_no_process_outlives_a_test_that_is_killed(name, tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from s3_server import s3_server\n"
        "from throttle import throttled\n"
        f"with s3_server(Path({str(tmp_path)!r}), {name!r}) as server, throttled(server, 1e6):\n"
        "    print(*(process.pid for process in server.processes), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    ) as child:
        shown = child.stdout.readline()
        processes = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        child.send_signal(signal.SIGKILL)
    if not shown:
        pytest.skip("not installed")
    assert {process.pid for process in processes} >= {int(pid) for pid in shown.split()}
    deadline = time.monotonic() + START_SECONDS
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
