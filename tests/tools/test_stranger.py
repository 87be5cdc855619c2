"""Commands on a run folder in which a stranger has replaced a file: no harm, no traceback.

Nothing outside the folder is created or changed, nothing hangs, and nothing that controls
a terminal is printed.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from my_project import exits, failures, files
from my_project import manifest as manifests
from my_project import train as train_module
from my_project.config import Config
from my_project.launching import attempts
from ragged import Ragged
from runs import change, make_config, train
from world import run_world

LIMIT_SECONDS = 240  # of one command on one file; a slow machine needs a hundredth
HUGE_BYTES = 100 << 20
ESCAPES, HTML = "\x1b]0;title\x07\x1b[31m\x9b2J", "<script>alert(1)</script><img src=x>"
KEPT = {"kind", "outcome", "event", "id", "launch", "cause", "class_path", "run_name", "run"}
KEPT |= {"sha256", "runs_folder", "resume", "host", "params"}  # they identify the run


@dataclass(frozen=True, kw_only=True)
class Speaking(Ragged):
    """Ragged data, with answers that are text."""

    def predict(self, model: Any, data_info: dict[str, Any], argument: str) -> str:
        return f"{argument} {data_info.get('word')}"


# ---- what replaces a file ------------------------------------------------------------------------
def link(path: Path, outside: Path) -> None:
    path.rename(outside / "target")
    path.symlink_to(outside / "target")


def dangling(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside / "none")


def pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path, outside: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, HUGE_BYTES)


def escapes(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: f"{value}{ESCAPES}" if isinstance(value, str) else value)


def html(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: f"{value}{HTML}" if isinstance(value, str) else value)


def other_types(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: ["x"] if not isinstance(value, (dict, list)) else value)


def texts(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: "x" if isinstance(value, (int, float)) else value)


def not_finite(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: math.inf if type(value) is float else value)


def no_numbers(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: math.nan if type(value) is float else value)


def large_numbers(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: 1e308 if type(value) is float else value)


def large_integers(path: Path, outside: Path) -> None:
    rewrite(path, lambda value: 10**400 if type(value) is float else value)


def alias_of_itself(path: Path, outside: Path) -> None:
    path.write_text("run_name: &x {a: *x}\nrecipe: a\n")


def list_in_itself(path: Path, outside: Path) -> None:
    path.write_text("run_name: &x [*x]\nrecipe: a\n")


def dates(path: Path, outside: Path) -> None:
    path.write_text("run_name: [{2020-01-01: 1}]\nrecipe: a\n")


def list_of_classes(path: Path, outside: Path) -> None:
    path.write_text("recipe: [a]\n")


SHAPES = (link, dangling, pipe, folder, huge)
CONTENTS = (escapes, html, other_types, texts)
NUMBERS = (not_finite, no_numbers, large_numbers, large_integers)
YAML = (alias_of_itself, list_in_itself, dates, list_of_classes)


def rewrite(path: Path, function: Callable[[Any], Any]) -> None:
    """Change each value of a JSON or YAML file, keeping its hash valid; append to other texts."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            marked = {f"validation/{function('x')}": 0.5} if function("x") != "x" else {}
            return {k: v if k in KEPT else changed(v) for k, v in value.items()} | marked
        return function([*map(changed, value)] if isinstance(value, list) else value)

    text = path.read_text(errors="replace")
    if path.name == "manifest.json":
        content = json.loads(text)["manifest"]
        named = {"state": changed(content["state"]), "files": content["files"]}
        path.write_text(manifests.manifest_text(changed(content) | named))
    elif path.suffix == ".json":
        path.write_text(json.dumps(changed(json.loads(text))))
    elif path.suffix == ".jsonl":
        lines = [json.dumps(changed(json.loads(line))) for line in text.splitlines()]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(changed(yaml.safe_load(text))))
    elif path.suffix != ".safetensors":
        path.write_text(f"{text}{function('')}\n")


# ---- the run and the commands --------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Config:
    """Make a finished run with one of each file that a run folder can have."""
    runs = tmp_path_factory.mktemp("stranger") / "runs"
    config = make_config(runs, Speaking(), steps=4, checkpoints__every_steps=2)
    config = change(config, evaluation__best_metric="validation/accuracy")
    assert train(config) == 0
    launch = files.read_json(config.folder / "run.json")["launch"]
    line = {"event": "start", "id": launch, "launch": launch, "time": time.time() - 9, "attempt": 0}
    end = {"event": "end", "id": launch, "time": time.time(), "outcome": "finished", "cause": ""}
    assert attempts.append(config.folder, [line | {"nodes": 1, "world_size": 1}, end])
    frames = [failures.frame_at("/a/b.py", 3, "loss", "x = 1")]
    failure = failures.record(reason="it broke", cause="exception", frames=frames)
    failure = replace(failure, launch=launch, step=1)
    failures.write_error(config.folder, failure)
    logs = config.folder / "logs/node_0" / time.strftime("%Y%m%dT%H%M%S_1", time.gmtime())
    logs.mkdir(parents=True)
    (logs / "rank_00000.log").write_text("a line\n")
    (logs / "rank_00000.json").write_text(json.dumps(failure.to_json()))
    (logs / "signal_rank_00000.json").write_text(json.dumps({"signal": "SIGTERM", "rank": 0}))
    ended = {"exit_codes": {"0": 1}, "killed": [], "signal": None, "time": time.time()}
    (logs / "launcher.json").write_text(json.dumps(ended))
    for lock in runs.glob(".prepare_data.*lock"):
        assert list(runs.glob(f"{lock.stem}.*.finished"))
    (config.folder / "report.html").write_text("another page")
    return config


def told(command: str, run_folder: str, outside: Path) -> list[str]:
    """Return the words of a command on a run."""
    trust = ["--trust", f"{__name__}.Speaking"]
    return {
        "runs": ["runs", os.path.dirname(run_folder)],
        "report": ["report", run_folder, "--output", str(outside.parent / "report.html")],
        "doctor": ["doctor", run_folder],
        "doctor --json": ["doctor", run_folder, "--json"],
        "evaluate": ["evaluate", run_folder, *trust],
        "predict": ["predict", run_folder, "words", *trust],
        "export": ["export", f"{run_folder}/export", str(outside.parent / "one.safetensors")],
    }[command]


def called(command: str, config: Config, outside: Path) -> tuple[int, str]:
    """Run a command in this process; return its exit code and all that it printed."""
    from my_project.__main__ import main

    output = io.StringIO()
    code: Any = 0
    own, really_exit = os.getpid(), os._exit

    def leave_walk(code: int) -> None:
        if os.getpid() != own:  # a forked process: it would go on with the walk too
            really_exit(code)
        sys.exit(code)

    leave = mock.patch("os._exit", leave_walk)  # as evaluate does
    with leave, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if command in ("train", "longer"):
                exits.set_up_logging()
                config = change(config, steps=5) if command == "longer" else config
                exits.run(train_module.main, config)
            sys.argv[1:] = told(command, str(config.folder), outside)
            main()
        except SystemExit as end:
            code = end.code or 0
    return code, output.getvalue()


def replaced(config: Config, wanted: str, shapes: Any) -> Iterator[tuple[str, Callable]]:
    """Yield the name of each file in a runs folder, with each function that replaces it."""
    runs = config.folder.parent
    names = [str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()]
    for name in sorted(filter(re.compile(wanted).fullmatch, names)):
        for shape in shapes:
            yield name, shape


def walk(command: str, config: Config, wanted: str, shapes: Any) -> list[str]:
    """Run a command on a run with each file replaced in each way; return what went wrong."""
    wrong = []
    base = config.folder.parent.parent
    for name, shape in replaced(config, wanted, shapes):
        case = f"{command}, {name}, {shape.__name__}"
        place = base / "work"
        shutil.rmtree(place, ignore_errors=True)
        outside = place / "outside"
        shutil.copytree(config.folder.parent, place / "runs")
        outside.mkdir()
        (place / "case").write_text(case)
        now = change(config, runs_folder=str(place / "runs"))
        shape(place / "runs" / name, outside)
        before = {path.name: path.read_bytes() for path in outside.iterdir()}
        signal.alarm(LIMIT_SECONDS)  # ends this process, also in C code; the case is in its file
        try:
            code, output = called(command, now, outside)
        except BaseException as error:  # what a user would see as a traceback
            code, output = -1, f"Traceback: {error!r}"
        signal.alarm(0)
        if code not in (0, 1, 2) or "Traceback" in output:
            wrong.append(f"{case}: exit code {code}: {output[-1500:]}")
        if any(c in output for c in "\x1b\x07\x9b"):
            wrong.append(f"{case}: controls the terminal: {output!r}")
        if {path.name: path.read_bytes() for path in outside.iterdir()} != before:
            wrong.append(f"{case}: a file outside was created or changed")
        report = place / "report.html"
        if report.exists() and (
            "<script>alert" in report.read_text() or "\x1b" in report.read_text()
        ):
            wrong.append(f"{case}: not escaped in the report")
    return wrong


def check(
    command: str, config: Config, wanted: str = ".*", shapes: Any = SHAPES + CONTENTS
) -> None:
    case = config.folder.parent.parent / "work/case"
    try:
        wrong = run_world(1, walk, command, config, wanted, shapes, seconds=3000)[0]
    except RuntimeError as died:
        raise AssertionError(f"{case.read_text()}: {died}") from died
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def test_a_strangers_links_pipes_and_escapes_harm_no_command(run):
    """The quick part of the tests below."""
    for command in ("runs", "report", "doctor", "doctor --json"):
        check(command, run, "run/(status.json|metrics.jsonl)", (pipe, escapes, other_types))


@pytest.mark.parametrize("command", ["runs", "report", "doctor", "doctor --json"])
def test_no_number_and_no_yaml_of_a_stranger_ends_a_tool(run, command):
    check(command, run, "run/(status.json|metrics.jsonl|starts.jsonl|logs/.*json)", NUMBERS)
    check(command, run, "run/config.yaml", YAML)


def test_no_link_leads_a_write_out_of_the_run_folder(run):
    """For all files that a start opens without replacing them."""
    written = r"(run/)?(\.lock|\.run\.preparing|.*\.finished|metrics\.jsonl|starts\.jsonl)"
    check("longer", run, written, (dangling,))
    folder = run.folder.parent.parent / "launched"
    folder.mkdir()
    (folder / "starts.jsonl").symlink_to(folder / "outside")
    assert not attempts.append(folder, [{"event": "start"}])  # by the launcher
    assert not (folder / "outside").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["runs", "report", "doctor", "evaluate", "predict", "export"])
def test_no_file_of_a_strangers_run_harms_who_looks_at_it(run, command):
    """The last three read weights, and nothing of the checkpoints, logs and starts."""
    reads_all = command in ("runs", "report", "doctor")
    check(command, run, ".*" if reads_all else r"([^/]+/)?((export|best)/)?[^/]+")
    if reads_all:
        check(command, run, r".*\.(json|jsonl|yaml)", NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "longer"])
def test_no_file_of_a_strangers_run_harms_who_trains_it(run, command):
    """A finished run, and one that is continued; not files that training does not read."""
    shapes = (*SHAPES, escapes, other_types)
    check(command, run, r"(run/|run/checkpoints/step_00000004/)?[^/]+", shapes)
