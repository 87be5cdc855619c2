"""No secret reaches config.yaml, run.json, status.json, errors/ or a log."""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from my_project import exits, provenance
from my_project.config import Config, ConfigError, to_dict
from my_project.failures import exit_with_error
from my_project.safety.redaction import is_secret, mask, mask_command
from my_project.settings import parse
from ragged import Ragged
from runs import make_config, status, train

SECRET = "hf_QWERTYqwerty123"


@dataclass(frozen=True, kw_only=True)
class Logged(Ragged):
    hub_token: str | None = None
    inner: dict[str, Any] = field(default_factory=dict)
    max_tokens: str = "many-of-them"
    secretary: str = "a-long-enough-name"
    token: int = 12345678
    eos_token: str = "<|endoftext|>"
    api_key_file: str = "/home/me/api_key"


@pytest.mark.parametrize(
    "name",
    ["token", "hub_token", "--recipe.init_args.hub_token", "HF_TOKEN", "hubToken", "--db-password",
     "api_key", "--api-key", "apiKey", "AWS_SECRET_ACCESS_KEY", "--secrets", "--mypassword",
     "--token_1", "HFTOKEN", "hf_tokens"],
)  # fmt: skip
def test_a_secret_is_known_by_the_last_words_of_its_name(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["tokens", "max_tokens", "token_count", "secretary", "pad_token", "eos_token", "key", "monkey",
     "api_key_file", "tokenizer", "password_length", "--max_new_tokens", "eos_token_2"],
)  # fmt: skip
def test_other_names_are_no_secrets(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        "train --recipe.init_args.hub_token=%s --steps 3",
        "Command '['python', '--api-key', '%s', '--steps', '3']'",
        "Recipe(hub_token='%s', samples=3)",
        '{"password": "%s", "samples": 3}',
        "hub_token: %s\nsamples: 3",
        "GET https://%s@host/path",
        "Authorization: %s",
        "GET https://host/path?access_token=%s&page=3",
    ],
)
def test_texts_are_masked(text):
    assert mask(text % "s3cr:t") == text % "***"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("failed: user=me password=x9&Kd,22 again", "failed: user=me password=*** again"),
        (r'{"password": "ab\"cdef", "a": 1}', '{"password": "***", "a": 1}'),
        ("{a: {password: x9)K},b: 1}", "{a: {password: ***},b: 1}"),
        ("f(password=x9,count=3)", "f(password=***,count=3)"),
    ],
)
def test_a_value_is_masked_to_its_end(text, masked):
    assert mask(text) == masked


def test_other_texts_stay_as_they_are():
    for text in ("step 3: 20 tokens: 7", "max_tokens=512", "eos_token: </s>", "a token is missing",
                 "mailto me@host", "https://host/a?b=c", "sort_key=name",
                 "http://host:8080/a@b", "http://host/a@b"):  # fmt: skip
        assert mask(text) == text


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        (
            ["train", "--hub_token", "a b", "--api-key=c d", "--steps=3"],
            ["train", "--hub_token", "***", "--api-key=***", "--steps=3"],
        ),
        (["--hub_token", "--S3cr3t"], ["--hub_token", "***"]),
        (["HF_TOKEN=S3cr3t"], ["HF_TOKEN=***"]),
        (["--init={'a': {'password': 'a b S3cr3t'}}"], ["--init=***"]),
        (["--x", "{password: a S3cr3t}"], ["--x", "***"]),
        (["--x", "{password: a=S3cr3t}"], ["--x", "***"]),
        (["--x", "Authorization: Bearer S3cr3t"], ["--x", "***"]),
        (["--x", "bearer S3cr3t12"], ["--x", "bearer ***"]),
        (["--url=https://user:S3cr3t#x@y@host/a"], ["--url=https://***@host/a"]),
        (["--max_tokens", "5", "--x={eos_token: a}"], ["--max_tokens", "5", "--x={eos_token: a}"]),
    ],
    ids=str,
)
def test_an_argument_is_masked_as_a_whole(given, masked):
    assert mask_command(given) == masked


@pytest.mark.parametrize(
    "where",
    [
        {"hub_token": SECRET},
        {"inner": {"a": [{"password": "abc"}]}},
        {"inner": {"hf_tokens": ["abcdefgh"]}},
        {"inner": {"hub_token": {"value": SECRET}}},
        {"inner": {"hub_token": b"abc"}},
        {"inner": {"password": 1234}},
        {"inner": {"secrets": 12345}},
        {"inner": {"place": "s3://me:abcdefgh@bucket"}},
        {"eos_token": "https://me:abcdefgh@host"},
    ],
    ids=str,
)
def test_a_setting_with_a_secret_is_refused_before_anything_is_written(tmp_path, where):
    config = make_config(tmp_path / "runs", Logged(**where), steps=2)
    with pytest.raises(ConfigError, match=r"holds a secret.* environment variable") as told:
        train(config)
    assert SECRET not in str(told.value)
    assert not (tmp_path / "runs").exists()


def test_a_secret_in_a_typed_group_is_refused_before_the_run_has_a_name():
    recipe = {"class_path": "test_redaction.Logged", "init_args": {"hub_token": SECRET}}
    words = ["--recipe", json.dumps(recipe), "--batches.global_batch_size", "16", "--steps", "2"]
    with pytest.raises(ConfigError, match=r"recipe\.hub_token holds a secret"):
        parse(words)


def test_a_typed_number_null_or_switch_is_no_secret_as_in_a_file():
    words = ["--recipe", "test_redaction.Logged", "--batches.global_batch_size=16", "--steps=2"]
    typed = ["--recipe.token=128009", "--recipe.hub_token=null", "--recipe.inner.use_password=true"]
    recipe: Any = parse([*words, *typed]).recipe
    assert (recipe.token, recipe.hub_token) == (128009, None)
    assert recipe.inner == {"use_password": True}
    for text in (SECRET, "12345678"):
        with pytest.raises(ConfigError, match=r"recipe\.hub_token holds a secret"):
            parse([*words, f"--recipe.hub_token={text}"])


def test_a_private_key_is_masked_on_all_of_its_lines():
    text = "key: |\n{0}  -----BEGIN RSA PRIVATE KEY-----\n{0}  {1}\n{0}  {1}\n{0}  -----END R"
    for sign in ("", "+"):
        assert mask(text.format(sign, "MII+abc=")) == text.format(sign, "***")


def test_what_a_run_writes_down_holds_no_secret(tmp_path, monkeypatch, capsys, caplog):
    """Of the command line, of the environment, and of what is said where it fails."""
    monkeypatch.setenv("MASTER_PASSWORD", SECRET)
    monkeypatch.setenv("NCCL_SOME_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr("sys.orig_argv", ["python", "--hub_token", SECRET, "http://me:pw@host"])

    def fail(self: Any, *_: Any) -> Any:
        raise OSError(f"cannot read http://me:pw@host with {SECRET}")

    monkeypatch.setattr(Logged, "loss", fail)
    config: Config = make_config(tmp_path, Logged(), steps=2, evaluation__sanity_check=False)
    caplog.set_level(logging.INFO)  # undone after the test, and with it what follows
    exits.set_up_logging()
    try:
        with pytest.raises(OSError, match="cannot read") as told:
            train(config)
        logging.getLogger("test").error("it failed", exc_info=told.value)
        with pytest.raises(SystemExit):
            exit_with_error(ConfigError(str(told.value)))
    finally:
        logging.getLogger().handlers.clear()
    assert "with ***" in status(config)["reason"]
    files = [path for path in config.folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "status.json"} <= {path.name for path in files}
    assert any(path.parent.name == "errors" for path in files)
    shown = capsys.readouterr()
    assert "it failed" in shown.out
    for text in [*(path.read_text(errors="replace") for path in files), shown.out, shown.err]:
        assert SECRET not in text
        assert "me:pw" not in text
    about = provenance.provenance()
    assert about["command"] == ["python", "--hub_token", "***", "http://***@host"]
    assert about["environment"]["NCCL_DEBUG"] == "WARN"
    assert not {"MASTER_PASSWORD", "NCCL_SOME_TOKEN"} & about["environment"].keys()


def test_a_secret_in_an_old_config_is_not_shown_where_settings_differ(tmp_path):
    config: Config = make_config(tmp_path, Logged(), steps=2)
    (config.folder / "export").mkdir(parents=True)
    saved = to_dict(config)
    saved["recipe"]["init_args"] |= {"hub_token": SECRET, "secretary": "s3://me:pw@host"}
    (config.folder / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match=r"hub_token \(\*\*\* there, \*\*\* here\)") as told:
        train(config)
    assert SECRET not in str(told.value)
    assert "'s3://***@host' there" in str(told.value)
