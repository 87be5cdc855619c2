"""Mirrored runs, through a server for S3: eight kills, a paused or stopped server, secrets."""

import json
import os
import shutil
import time
from pathlib import Path

import fsspec
import mirror_kills
import pytest
from mirror_kills import run_config, start
from runs import assert_same_weights
from s3_server import s3_server
from world import World, run_world

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_runs_that_lose_their_machine_eight_times_go_on_to_the_same_bits(capsys):
    mirror_kills.main(["--kills", "8"])
    assert capsys.readouterr().out.count(": 2 kills, went on from ") == 4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("server") / "s3") as running:
        yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = run_config(tmp_path_factory.mktemp("whole"))
    assert run_world(1, start, {}, False, config) == [0]
    return config


def reaches(config, step: int) -> None:
    deadline = time.monotonic() + mirror_kills.SECONDS
    path = config.folder / "metrics.jsonl"
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("fault", ["paused", "away"])
def test_a_server_that_is_away_for_a_while_stops_no_step(tmp_path, server, whole, fault):
    if fault == "away" and server.name == "moto":
        pytest.skip("moto forgets all that it has")
    config = run_config(tmp_path, checkpoints__mirror=f"{server.url}/{fault}")
    world = World(1, start, server.environment, False, config)
    reaches(config, 3)
    server.pause() if fault == "paused" else server.stop()
    reaches(config, 8)
    server.resume() if fault == "paused" else server.start()
    assert world.results() == [0]
    shutil.rmtree(config.runs_folder)
    assert run_world(1, start, server.environment, False, config) == [0]
    assert_same_weights(config, whole)
    assert_same_weights(config, whole, part="best")


def test_a_server_that_refuses_is_told_before_training(tmp_path, server):
    """No file or message may hold a credential."""
    secret = "wrongsecret/with+signs=="
    environment = server.environment | {"AWS_SECRET_ACCESS_KEY": secret}
    missing = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    # boto takes an empty variable for none; HOME and the metadata of a machine may have others
    without_keys = {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }
    for name, env, url, code, said in (
        ("wrong-key", environment, server.url, 2, "the mirror s3://"),
        ("no-key", environment | without_keys, server.url, 2, "locate credentials: set the"),
        ("no-bucket", server.environment, "s3://no-such-bucket", 1, "cannot be used"),
        ("no-server", server.environment | missing, server.url, 1, "cannot be used"),
    ):
        (tmp_path / name).mkdir()
        config = run_config(tmp_path / name, checkpoints__mirror=f"{url}/{name}")
        error = run_world(1, refused, env, config)[0]
        assert error["exit_code"] == code, error
        assert said in error["text"]
        assert env["AWS_SECRET_ACCESS_KEY"] not in json.dumps(error)
        for path in Path(config.runs_folder).rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes()


def refused(environment: dict[str, str], config) -> dict:
    from my_project.files import ConfigError

    with pytest.raises(ConfigError) as error:
        start(environment, False, config)
    return {"exit_code": error.value.exit_code, "text": str(error.value)}


def test_the_mirror_is_small_named_as_the_page_says_and_has_no_secret(tmp_path, server):
    names = (
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_API_KEY", "AZURE_STORAGE_KEY",
        "AZURE_CLIENT_SECRET", "GCS_PRIVATE_KEY",
    )  # fmt: skip
    secrets = {name: f"{name.lower()}+12345678/abc" for name in names}
    secrets |= {"AWS_SECRET_ACCESS_KEY": server.environment["AWS_SECRET_ACCESS_KEY"]}
    del secrets["AWS_SESSION_TOKEN"]  # the server would ask for its session
    config = run_config(tmp_path, checkpoints__mirror=f"{server.url}/secrets")
    assert run_world(1, start, server.environment | secrets, False, config) == [0]
    os.environ |= server.environment
    names = fsspec.filesystem("s3", skip_instance_cache=True).find("bucket/secrets/run")
    files = {name.removeprefix("bucket/secrets/run/") for name in names}
    assert {"config.yaml", "run.json", "status.json", "best.json", "export.json"} <= files
    assert len([name for name in files if name.startswith("metrics/")]) <= 5
    assert sum(name.endswith("/manifest.json") for name in files) <= 3
    assert not [name for name in files if name.startswith("parts/")]
    copied = shutil.copytree(config.runs_folder, tmp_path / "here")
    shutil.rmtree(config.runs_folder)
    assert run_world(1, start, server.environment | secrets, False, config) == [0]
    for path in (*copied.rglob("*"), *Path(config.runs_folder).rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        for value in {*secrets.values()} - {server.environment["AWS_SECRET_ACCESS_KEY"]}:
            assert value.encode() not in content, path
