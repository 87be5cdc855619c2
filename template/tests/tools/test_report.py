"""The report: what stands in it, from which files, and that a stranger's text stays text."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from histories import PNG, about, records_of, write_attack, write_history

from my_project.config import ConfigError
from my_project.tools.report import charts
from my_project.tools.report.page import SCRIPT
from my_project.tools.report.report import write_report

MOST_BYTES = 300_000
VOID = {"meta", "img", "br"}
DRAWN = {"svg", "path"}
TEXT = {
    *("html", "head", "title", "style", "body", "script", "header", "nav", "section", "footer"),
    *("h1", "h2", "h3", "h4", "p", "a", "b", "i", "small", "span", "div", "code", "pre"),
    *("dl", "dt", "dd", "ul", "li", "figure", "figcaption", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


class Page(HTMLParser):
    """What a browser finds in a page: its elements, its text by section, and its curves."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert self.open == [], "each element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += f"{data} "

    @property
    def sections(self) -> list[str]:
        return [str(found["id"]) for tag, found in self.elements if tag == "section"]

    @property
    def pictures(self) -> list[str]:
        return [str(found["src"]) for tag, found in self.elements if tag == "img"]

    def figure(self, title: str) -> str:
        """Return the source of a chart."""
        (found,) = re.findall(
            rf"<figure[^>]*><figcaption>{re.escape(title)}\b.*?</figure>", self.source
        )
        return found

    def curve(self, title: str, name: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a curve, as the page's script reads them."""
        found = self.figure(title)
        x0, x1, _ = map(float, re.findall(r'data-x="(.*?)"', found)[0].split())
        y0, y1, is_log = map(float, re.findall(r'data-y="(.*?)"', found)[0].split())
        (drawn,) = re.findall(rf'data-name="{re.escape(name)}" d="(.*?)"', found)
        # where a line begins it stands still: one point alone would not be seen
        numbers = (
            np.array(re.findall(r"-?\d+", drawn.replace("l0 0", " ")), float)
            .reshape(-1, 2)
            .cumsum(axis=0)
        )
        x, y = numbers[:, 0] / charts.WIDTH, 1 - numbers[:, 1] / charts.HEIGHT
        values = y0 * (y1 / y0) ** y if is_log else y0 + (y1 - y0) * y
        return list(x0 + (x1 - x0) * x), list(values)


def report(*folders: Path, output: str | None = None) -> Page:
    return Page(write_report(list(folders), output))


# ---- content -------------------------------------------------------------------------------------
def test_a_report_is_one_small_file_with_every_section(tmp_path):
    run = write_history(tmp_path / "digits", preempted_at=(1000,), killed_at=(1750,))
    assert write_report([run]) == run / "report.html"
    page = report(run)
    assert len(page.source.encode()) < MOST_BYTES
    assert page.sections == [
        *("curves", "evaluations", "speed", "timeline", "configuration", "provenance"),
    ]
    assert "http" not in page.source.replace('<meta http-equiv="Content', ""), "no network"
    for title in ("Loss", "validation/accuracy", "Samples per second", "Peak memory, GiB"):
        assert page.figure(title)
    text = re.sub(r"\s+", " ", page.text)
    for shown in (
        "digits finished",
        "3,000 of 3,000",
        "in 3 starts",
        "on 2 hosts",
        "rank 3 on gpu-a",
    ):
        assert shown in text
    for shown in ("torch 2.15.0", "fa31e5abac", "multi_gpu.yaml", "optim.weight_decay 0.05"):
        assert shown in text


def test_curves_show_the_values_of_the_records(tmp_path):
    found = list(records_of(steps=400, lr=0.01))
    page = report(write_history(tmp_path / "run", records=found))
    intervals = [record for record in found if record["kind"] == "interval"]
    for title, name, column, scale in (
        ("Loss", "training", "loss", 1),
        ("Peak memory", "largest rank", "peak_memory_bytes", 2**-30),
        ("Wait for data", "median rank", "data_seconds_median", 1000),
    ):
        steps, values = page.curve(title, name)
        assert steps == pytest.approx([record["step"] for record in intervals], abs=0.3)
        wanted = [record[column] * scale for record in intervals]
        assert values == pytest.approx(wanted, abs=2e-4 * max(wanted), rel=1e-3)
    evaluated = [record for record in found if record["kind"] == "evaluation"]
    steps, values = page.curve("Loss", "validation")
    assert steps == pytest.approx([record["step"] for record in evaluated], abs=0.3)
    assert values == pytest.approx(
        [record["validation/loss"] for record in evaluated], abs=3e-4, rel=1e-3
    )


def test_values_over_many_decades_are_drawn_on_a_log_scale(tmp_path):
    found = [{"step": step, "loss": 10.0 ** -(step / 100)} for step in range(0, 500, 10)]
    page = report(write_history(tmp_path / "run", records=found))
    assert "log scale" in page.figure("Loss")
    _, values = page.curve("Loss", "training")
    assert values == pytest.approx([record["loss"] for record in found], rel=2e-3)


def test_values_that_are_not_finite_leave_a_gap(tmp_path):
    found: list[dict[str, Any]] = [{"step": i, "loss": 1.0 + i} for i in range(10)]
    found[4]["loss"] = found[5]["loss"] = None
    page = report(write_history(tmp_path / "run", records=found))
    steps, values = page.curve("Loss", "training")
    assert steps == pytest.approx([0, 1, 2, 3, 6, 7, 8, 9], abs=0.01)
    assert values == pytest.approx([1, 2, 3, 4, 7, 8, 9, 10], abs=0.01)


def test_many_records_are_drawn_as_groups_that_keep_each_spike(tmp_path):
    same = {"kind": "interval", "loss": 1.0, "samples_per_second": 100.0}
    found = [same | {"step": i} for i in range(1, 20_001)]
    found[7776]["loss"] = 5.0
    page = report(write_history(tmp_path / "run", records=found, steps=20_000))
    assert "Drawn: 400 groups of 20,000 records." in page.text
    steps, values = page.curve("Loss", "training")
    assert len(steps) == 400
    assert max(values) == pytest.approx(1.08, abs=0.01), "the mean of 49 times 1 and once 5"
    assert re.findall(r'class="spike" d="M(\d+ \d+)h0"', page.figure("Loss")) == ["389 0"]


@pytest.mark.slow
def test_a_report_of_200_000_records_is_small_and_needs_little_memory(tmp_path):
    run = tmp_path / "long"
    write_history(run, steps=2_000_000, evaluate_every=2000)
    code = (
        "import resource, sys; from pathlib import Path;"
        "import my_project.tools.report.report as it;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "it.write_report([Path(sys.argv[1])]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True
    )
    assert (run / "metrics.jsonl").stat().st_size > 150e6
    assert int(done.stdout) < 300_000, "kB; the records as dictionaries need over a GB"
    assert (run / "report.html").stat().st_size < MOST_BYTES
    assert "400 groups of 200,000 records" in Page(run / "report.html").text


def test_the_time_axis_has_starts_stops_and_kills(tmp_path):
    found = list(records_of(steps=1000, lr=0.01, preempted_at=(400,), killed_at=(700,)))
    page = report(write_history(tmp_path / "run", records=found))
    text = re.sub(r"\s+", " ", page.text)
    assert "400 to 700 8 gpu-a x 4, gpu-b x 4 no stop" in text
    assert "0 to 400 8 gpu-a x 4, gpu-b x 4 preempted: SIGTERM" in text
    assert "1 of 2 restarts followed such an end" in text


def test_skipped_steps_and_changed_numerics_are_said(tmp_path):
    found = list(records_of(steps=100, lr=0.01))
    found[5] |= {"skipped_steps": 7}
    found.append({"kind": "numerics", "step": 100, "changed": {"precision": ["no", "bf16"]}})
    page = report(write_history(tmp_path / "run", records=found))
    assert "Skipped: 7 steps" in page.text
    assert "At step 100: precision no to bf16." in page.text


# ---- outcomes ------------------------------------------------------------------------------------
def test_a_failed_run_shows_the_first_failure_and_the_command_doctor(tmp_path):
    run = write_history(tmp_path / "a run", state="failed", steps=200, failure={})
    later = json.loads(next((run / "errors").iterdir()).read_text())
    later |= {"rank": 0, "cause": "lost contact", "reason": "lost contact", "time": 0.0}
    (run / "errors" / "20260921T110000_rank_00000_step_00000120.json").write_text(json.dumps(later))
    text = report(run).text
    assert "mat1 and mat2 shapes cannot be multiplied" in text
    assert "lost contact" not in text, "which follows from the failure"
    assert "Rank 3 on gpu-b, at step 120, in recipe.py, line 41, in loss." in text
    assert f"python -m my_project doctor '{run}'" in text
    shutil.rmtree(run / "errors")
    (run / "status.json").write_text('{"outcome": "failed", "reason": "killed by the kernel"}')
    assert "killed by the kernel" in report(run).text


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("finished", "finished"),
        ("running", "interrupted"),  # since no process holds its lock
        ("preempted", "preempted"),
        ("???", "???"),
    ],
)
def test_the_outcome_is_at_the_top(tmp_path, state, shown):
    page = report(write_history(tmp_path / "run", state=state, steps=100))
    assert f"run  {shown} " in page.text
    assert ("The same command as before continues" in page.text) == (state in "running preempted")


def test_a_run_without_records_says_so(tmp_path):
    run = write_history(tmp_path / "run", state="running", records=[])
    for _ in range(2):
        page = report(run)
        assert "Nothing is recorded yet." in page.text
        assert "optim.lr" in page.text
        (run / "metrics.jsonl").unlink(missing_ok=True)
    for name in ("config.yaml", "run.json"):
        (run / name).unlink()
    assert "status.json" not in report(run).text


def test_a_line_that_is_being_written_is_no_damage(tmp_path):
    run = write_history(tmp_path / "run", state="running", steps=100)
    whole = report(run).text
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "interval", "step": 110, "lo')
    assert report(run).text == whole


# ---- several runs --------------------------------------------------------------------------------
def test_runs_are_compared_line_by_line_in_the_same_charts(tmp_path):
    runs = [
        write_history(tmp_path / f"image_classification-lr={lr}", lr=lr, steps=500)
        for lr in (0.01, 0.02, 0.03)
    ]
    path = write_report(runs)
    assert path.resolve() == tmp_path / "report.html"
    page = Page(path)
    assert len(page.source.encode()) < MOST_BYTES
    names = re.findall(r'data-name="(.*?)"', page.figure("Loss"))
    short = ["lr=0.01", "lr=0.02", "lr=0.03"]
    assert names == [*short, *(f"{name} validation" for name in short)]
    text = re.sub(r"\s+", " ", page.text)
    assert "What differs setting lr=0.01 lr=0.02 lr=0.03 optim.lr 0.01 0.02 0.03 All" in text
    assert all(run.name in text for run in runs)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [write_history(tmp_path / folder / "run", steps=100) for folder in ("a", "b")]
    page = report(*runs, *runs, output=str(tmp_path / "x.html"))
    assert "2 runs compared" in page.text
    assert re.findall(r'data-name="(.*?)"', page.figure("Gradient norm")) == ["a/run", "b/run"]
    assert "No setting differs." in page.text


def test_eight_runs_make_a_small_page_and_nine_are_refused(tmp_path):
    for i in range(8):
        write_history(tmp_path / f"run{i}", steps=10_000, seed=i)
    write_report(sorted(tmp_path.iterdir()))
    everything = sorted(tmp_path.iterdir())  # as runs/* is: with the report that is there now
    assert tmp_path / "report.html" in everything
    assert len(report(*everything).source.encode()) < MOST_BYTES
    write_history(tmp_path / "run8", steps=100)
    with pytest.raises(ConfigError, match="9 runs are given, but a report shows at most 8"):
        write_report(sorted(tmp_path.iterdir()))


# ---- the file ------------------------------------------------------------------------------------
def test_a_report_replaces_only_a_report(tmp_path):
    run = write_history(tmp_path / "run", steps=100)
    first = report(run).source
    (run / "metrics.jsonl").write_text("")
    assert report(run).source != first
    kept = tmp_path / "notes.html"
    kept.write_text("mine")
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "nowhere")
    for path in (kept, link):
        with pytest.raises(ConfigError, match="is not a report, so it is kept"):
            write_report([run], str(path))
    assert kept.read_text() == "mine"
    for path, what in ((tmp_path, "is a folder"), (tmp_path / "a/b.html", "there is no folder")):
        with pytest.raises(ConfigError, match=what):
            write_report([run], str(path))
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report([tmp_path])


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    run = write_history(tmp_path / "run", steps=100)
    first = report(run).source

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_report([run])
    assert (run / "report.html").read_text() == first
    assert not list(run.glob(".report*"))


def test_the_command_prints_the_path_and_imports_no_torch(tmp_path):
    write_history(tmp_path / "run", steps=100)
    code = (
        "import runpy, sys\n"
        "sys.argv = ['my_project', *sys.argv[1:]]\n"
        "try:\n    runpy.run_module('my_project', run_name='__main__', alter_sys=True)\n"
        "finally:\n    assert not {'torch', 'accelerate'} & set(sys.modules)\n"
    )

    def type_command(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, "report", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = type_command("run")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"run/report\.html \(\d+ kB\)\n", done.stdout)
    refused = type_command("nowhere")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: nowhere is not a run folder")


# ---- damage --------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [None, b"", b"\0{[\xff", b"[1]", b"{}", "folder"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "run.json", "config.yaml"])
def test_a_damaged_file_costs_only_its_section(tmp_path, name, content):
    run = write_history(tmp_path / "run", steps=300)
    before = set(report(run).sections)
    path = run / name
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    page = report(run)
    lost = {
        "metrics.jsonl": {"evaluations", "speed", "timeline"},
        "status.json": set(),
        "run.json": {"provenance"},
        "config.yaml": {"configuration"},
    }[name]
    assert before - set(page.sections) <= lost
    assert f"{name} is missing or damaged" in page.text or f"{name} has 1 damaged" in page.text


def test_any_value_of_a_record_may_be_of_a_wrong_type(tmp_path):
    chance = random.Random(0)
    values = [None, True, -1, 10**400, 1e308, -1e308, 5e-324, "x", "\ud800", [], [[1]], {}]
    values += [{"a": None}, float("nan"), float("inf"), 2**62, 0, 1.5]
    good = list(records_of(steps=500, lr=0.01, spiked_at=(200,), preempted_at=(300,)))
    run = write_history(tmp_path / "run", records=good, state="failed", failure={})
    paths = [*run.glob("*.json"), *run.glob("errors/*.json")]
    sources = {path: json.loads(path.read_text()) for path in paths}

    def spoil(record: dict[str, Any]) -> dict[str, Any]:
        changed = {name: chance.choice(values) for name in record if chance.random() < 0.1}
        return record | changed

    for _ in range(40):
        lines = [json.dumps(spoil(record)) for record in good if chance.random() < 0.9]
        (run / "metrics.jsonl").write_text("\n".join(lines))
        for path, content in sources.items():
            path.write_text(json.dumps(spoil(content)))
        page = report(run)
        assert "nan" not in re.findall(r' (?:d|style|data-[xy])="[^"]*', page.source)
        assert len(page.source.encode()) < MOST_BYTES


def test_a_page_stays_small_whatever_is_in_the_folder(tmp_path):
    found = [
        {"kind": "evaluation", "step": i} | {f"{'m' * 300}/{i}{j}": 0.5 for j in range(200)}
        for i in range(50)
    ]
    found += [{"kind": "start", "step": i, "hosts": ["h" * 999] * 99} for i in range(999)]
    found += [{"kind": "interval", "step": i, "loss": 99.0 * (i % 40 == 0)} for i in range(9999)]
    found += [
        {"kind": "evaluation", "step": 1, "sample": "s" * 10**6, "pictures": ["p" * 999] * 999}
    ]
    run = write_history(tmp_path / "run", records=found)
    (run / "config.yaml").write_text("".join(f"{'k' * 99}{i}: {'v' * 999}\n" for i in range(9999)))
    content = about(run) | {"environment": {f"E{i}": "v" * 999 for i in range(9999)}}
    content |= {"packages": {f"p{i}": "v" * 999 for i in range(9999)}, "command": ["c" * 10**6]}
    (run / "run.json").write_text(json.dumps(content))
    assert len(report(run).source.encode()) < 2 * MOST_BYTES


# ---- a stranger's text ---------------------------------------------------------------------------
def test_a_strangers_text_stays_text(tmp_path):
    run = write_attack(tmp_path, "http://127.0.0.1:1/x")
    other = write_attack(tmp_path / "b", "http://127.0.0.1:1/x")
    for page in (report(run), report(run, other)):
        assert page.text.count("parent.postMessage") > 20
        assert [tag for tag, _ in page.elements if tag == "script"] == ["script"]
        assert page.source.count(SCRIPT) == 1
        assert {tag for tag, _ in page.elements} <= VOID | DRAWN | TEXT
        names = {name for _, found in page.elements for name in found}
        assert not {name for name in names if name.startswith("on")}
        styles = [str(found["style"]) for _, found in page.elements if "style" in found]
        assert all(re.fullmatch(r"(top|left|flex):[\d.]+%?", style) for style in styles)
        assert not page.pictures


def test_text_that_no_reader_sees_is_replaced(tmp_path):
    found = [{"step": 1, "loss": 1.0}, {"step": 1, "a\u202eb\ud800\0/x": 0.5, "sample": "c\x1b[1m"}]
    page = report(write_history(tmp_path / "run", records=found))
    assert "a\ufffdb\ufffd\ufffd/x" in page.text
    assert "c\ufffd[1m" in page.text


def test_secrets_are_masked_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretvalue")
    run = write_history(tmp_path / "run", state="failed", steps=100, failure={})
    secret = "hf_verysecretvalue"
    (run / "config.yaml").write_text(f"note: {secret}\napi_key: letmein1\n")
    content = about(run) | {"host": secret, "command": ["train", "--password", "letmein2"]}
    content |= {"environment": {"WANDB_API_KEY": "letmein3", "URL": "https://me:letmein4@host/"}}
    (run / "run.json").write_text(json.dumps(content))
    (path,) = (run / "errors").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reason": f"no {secret}"}))
    where = tmp_path / "accelerate_configs"
    where.mkdir()
    (where / "multi_gpu.yaml").write_text("distributed_type: NO\npassword: letmein5\n")
    page = report(run)
    assert "letmein" not in page.source
    assert secret not in page.source
    assert page.text.count("***") >= 8


def test_the_accelerate_config_is_shown_as_it_is_now(tmp_path):
    run = write_history(tmp_path / "run", steps=100)
    path = tmp_path / "accelerate_configs/multi_gpu.yaml"
    path.parent.mkdir()
    path.write_text("distributed_type: MULTI_GPU  # four of them\n")
    text = report(run).text
    assert "distributed_type: MULTI_GPU  # four of them" in text
    path.write_text("users: [{token: of another program}]\n")
    assert "another program" not in report(run).text
    outside = tmp_path.parent / f"{tmp_path.name}.yaml"
    outside.write_text("distributed_type: OUTSIDE\n")
    path.unlink()
    path.symlink_to(outside)
    assert "OUTSIDE" not in report(run).text
    content = about(run) | {"launcher": ["accelerate", "launch", f"--config_file={outside}"]}
    (run / "run.json").write_text(json.dumps(content))
    text = report(run).text
    assert "OUTSIDE" not in text
    outside.unlink()


def test_pictures_come_from_the_run_folder_alone(tmp_path):
    run = tmp_path / "run"
    names = [
        *("a.png", "b/c.jpg", "../out.png", str(tmp_path / "out.png"), "link.png", "text.png"),
        *("large.png", "none.png", "b", "zero\0", "big1.png", "big2.png"),
    ]
    found = [{"step": 10, "loss": 1.0}, {"step": 10, "x": 0.5, "pictures": ["old.png"]}]
    found.append({"step": 20, "x": 0.6, "pictures": [*names, 3, None]})
    write_history(run, records=found)
    (run / "b").mkdir()
    (tmp_path / "out.png").write_bytes(PNG)
    (run / "link.png").symlink_to(tmp_path / "out.png")
    (run / "text.png").write_text("<svg onload=alert(1)>")
    contents = {"a.png": PNG, "old.png": PNG, "b/c.jpg": b"\xff\xd8\xff jpeg"}
    contents |= {"large.png": PNG + bytes(100_000)}
    contents |= dict.fromkeys(("big1.png", "big2.png"), PNG + bytes(90_000))
    for name, content in contents.items():
        (run / name).write_bytes(content)
    page = report(run)
    kinds = [source.partition(",")[0] for source in page.pictures]
    assert kinds == [f"data:image/{kind};base64" for kind in ("png", "jpeg", "png")]
    text = page.text.replace("\ufffd", "")
    assert "Pictures at step 20" in text
    for name, reason in (
        *((name, "it is outside of the run folder") for name in (names[2], names[3], "link.png")),
        *(("text.png", "it is neither PNG nor JPEG"), ("large.png", "it has more than 100 kB")),
        *(("none.png", "there is no such file"), ("b", "there is no such file")),
        *(("zero", "it cannot be read"), ("big2.png", "the pictures here have 150 kB at most")),
    ):
        assert f"{name} is not shown: {reason}." in text
