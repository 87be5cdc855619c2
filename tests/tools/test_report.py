"""The report: what stands in it, from which files, and that a stranger's text stays text."""

import json
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
from my_project.files import ConfigError
from my_project.tools.report.page import SCRIPT
from my_project.tools.report.report import shorten, write_report

MOST_BYTES = 300_000
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "script", "footer", "h1", "h2", "h3"),
    *("p", "b", "i", "span", "div", "code", "pre", "output", "figure", "figcaption", "details"),
    *("summary", "table", "tr", "th", "td", "svg", "path", "img"),
}


class Page(HTMLParser):
    """What a browser finds in a page: its elements, its text, and its curves."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] not in ("style", "script"):
            self.text += f"{data} "

    @property
    def pictures(self) -> list[str]:
        return [str(found["src"]) for tag, found in self.elements if tag == "img"]

    def figure(self, title: str) -> str:
        """Return the source of a chart."""
        (found,) = re.findall(
            rf"<figure><figcaption>{re.escape(title)}\b.*?</figure>", self.source, re.DOTALL
        )
        return found

    def names(self, title: str) -> list[str]:
        """Return the names of the curves in a chart."""
        return re.findall(r'data-name="(.*?)"', self.figure(title))

    def marks(self, title: str, kind: str) -> list[float]:
        """Return the steps of the vertical lines of a kind in a chart."""
        (drawn,) = re.findall(rf'class="{kind}" d="(M\d+ \d+v.*?)"', self.figure(title))
        x0, x1, *_ = self.axes(title)
        return [x0 + (x1 - x0) * int(x) / 1000 for x in re.findall(r"M(\d+)", drawn)]

    def axes(self, title: str) -> list[float]:
        """Return the ends of both axes of a chart, and whether that of values is logarithmic."""
        return [
            float(word) for word in re.findall(r'data-axes="(.*?)"', self.figure(title))[0].split()
        ]

    def curve(self, title: str, name: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a curve, as the page's script reads them."""
        x0, x1, y0, y1, is_log = self.axes(title)
        (drawn,) = re.findall(rf'data-name="{re.escape(name)}" d="(.*?)"', self.figure(title))
        drawn = re.sub(r"M[\d ]+L", " ", drawn)  # the first point stands there twice
        points = np.array(re.findall(r"\d+", drawn), float).reshape(-1, 2)
        x, y = points[:, 0] / 1000, 1 - points[:, 1] / 10_000
        return list(x0 + (x1 - x0) * x), list(y0 * (y1 / y0) ** y if is_log else y0 + (y1 - y0) * y)


def report(*folders: Path, output: str | None = None) -> Page:
    return Page(write_report(list(folders), output))


# ---- curves --------------------------------------------------------------------------------------
def test_curves_show_the_values_of_the_records_on_one_axis_of_steps(tmp_path):
    found = list(records_of(steps=400, lr=0.01))
    run = write_history(tmp_path / "run", records=found)
    page = report(run)
    assert len(page.source) < MOST_BYTES
    assert "http" not in page.source.replace("http-equiv", ""), "no network"
    kinds = {
        kind: [one for one in found if one["kind"] == kind] for kind in ("interval", "evaluation")
    }
    for title, name, kind, column, scale in (
        ("Loss", "training", "interval", "loss", 1),
        ("Loss", "validation/loss", "evaluation", "validation/loss", 1),
        ("Gradient norm", "before clipping", "interval", "gradient_norm", 1),
        ("Peak memory", "", "interval", "peak_memory_bytes", 2**-30),
        ("validation/accuracy", "validation/accuracy", "evaluation", "validation/accuracy", 1),
    ):
        steps, values = page.curve(title, name)
        assert page.axes(title)[:2] == [0, 400], "one axis for all"
        assert steps == pytest.approx([one["step"] for one in kinds[kind]], abs=0.3)
        wanted = [one[column] * scale for one in kinds[kind]]
        assert values == pytest.approx(wanted, abs=2e-4 * max(wanted), rel=1e-3)


def test_values_over_many_decades_are_drawn_on_a_log_scale(tmp_path):
    found = [{"step": step, "loss": 10.0 ** -(step / 100)} for step in range(0, 500, 10)]
    page = report(write_history(tmp_path / "run", records=found))
    assert "log scale" in page.figure("Loss")
    _, values = page.curve("Loss", "training")
    assert values == pytest.approx([record["loss"] for record in found], rel=2e-3)


def test_steps_without_a_finite_loss_leave_a_gap_that_is_marked(tmp_path):
    found: list[dict[str, Any]] = [{"step": 10 * i, "loss": 1.0 + i} for i in range(10)]
    found[4]["loss"] = found[5]["loss"] = None
    found[7] |= {"skipped": 3, "skipped_steps": 23}
    page = report(write_history(tmp_path / "run", records=found))
    steps, values = page.curve("Loss", "training")
    assert steps == pytest.approx([0, 10, 20, 30, 60, 70, 80, 90], abs=0.1)
    assert values == pytest.approx([1, 2, 3, 4, 7, 8, 9, 10], abs=0.01)
    (drawn,) = re.findall(r'data-name="training" d="(.*?)"', page.figure("Loss"))
    assert drawn.count("M") == 2, "a gap"
    assert page.marks("Loss", "skipped") == pytest.approx([40, 50, 70], abs=0.1)
    assert "23 skipped steps" in page.text
    assert "in the records of step 40, 50, 70." in page.text


def test_of_many_records_groups_are_drawn_and_each_spike_is_seen(tmp_path):
    same = {"kind": "interval", "loss": 1.0, "samples_per_second": 100.0}
    found = [same | {"step": i} for i in range(1, 20_001)]
    found[7776]["loss"] = 5.0
    page = report(write_history(tmp_path / "run", records=found, steps=20_000))
    steps, values = page.curve("Loss", "training")
    assert len(steps) == pytest.approx(400, abs=1)
    assert max(values) == pytest.approx(1.08, abs=0.01), "the mean of 49 times 1 and once 5"
    (band,) = re.findall(r'class="band c0" d="(.*?)z"', page.figure("Loss"))
    _, _, low, high, _ = page.axes("Loss")
    highest = min(int(y) for y in re.findall(r"\d+ (\d+)", band))
    assert low + (high - low) * (1 - highest / 10_000) == pytest.approx(5, abs=0.01)
    assert page.marks("Loss", "spike") == pytest.approx([7777], abs=20)


@pytest.mark.slow
def test_a_report_of_a_million_records_is_small_and_needs_little_memory(tmp_path):
    run = write_history(tmp_path / "long", records=[{"step": 0, "loss": 1.0}])
    with (run / "metrics.jsonl").open("w") as file:
        for i in range(1_000_000):
            record = {"kind": "interval", "step": i, "loss": 1.0, "samples_per_second": 9.0}
            file.write(json.dumps(record | {"gradient_norm": 2.0, "data_share": 0.1}) + "\n")
    code = (
        "import resource, sys; from pathlib import Path;"
        "import my_project.tools.report.report as it;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "it.write_report([Path(sys.argv[1])]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 500_000, "kB; the records as dictionaries need over a GB"
    assert (run / "report.html").stat().st_size < MOST_BYTES


# ---- what happened -------------------------------------------------------------------------------
def test_starts_stops_kills_checkpoints_and_settings_are_there(tmp_path):
    found = list(records_of(steps=1000, lr=0.01, preempted_at=(400,), killed_at=(700,)))
    found.append({"kind": "numerics", "step": 1000, "changed": {"precision": ["no", "bf16"]}})
    page = report(write_history(tmp_path / "run", records=found))
    text = re.sub(r"\s+", " ", page.text)
    assert "400 to 700 8 gpu-a x 4, gpu-b x 4 killed" in text
    assert "0 to 400 8 gpu-a x 4, gpu-b x 4 preempted: SIGTERM" in text
    assert page.marks("Loss", "restart") == pytest.approx([400, 700], abs=1)
    assert page.marks("Loss", "checkpoint") == pytest.approx([250, 500, 750, 1000], abs=1)
    for shown in ("'precision': ['no', 'bf16']", "optim.weight_decay 0.05", "torch 2.15.0"):
        assert shown in text
    for shown in ("git_commit fa31e5abac", "multi_gpu.yaml", "the slowest was rank 3 on gpu-a"):
        assert shown in text
    assert "forward 26.0%" not in text
    assert re.search(r"Time of rank 0 data forward .* run [\d.]+% 26.0% 48.0% 11.0% 8.0%", text)


def test_of_one_process_nothing_is_said_of_the_slowest_rank(tmp_path):
    found = [
        record | {"world_size": 1, "hosts": ["gpu-a"]} for record in records_of(steps=400, lr=0.01)
    ]
    page = report(write_history(tmp_path / "run", records=found))
    assert "slowest" not in page.text
    assert "median rank" not in page.text


def test_the_command_is_shown_as_it_was_typed(tmp_path):
    run = write_history(tmp_path / "run", steps=100)
    words = ["-m", "my_project.train", "--config", "my own.yaml"]
    launcher = ["-m", "my_project.checked_launch", "0", "--config_file", "gpu.yaml"]
    content = about(run) | {"command": ["python", "-u", *words], "launcher": [*launcher, *words]}
    (run / "run.json").write_text(json.dumps(content))
    typed = "python -m my_project train --config 'my own.yaml' --where gpu.yaml"
    assert f"Command {typed}" in report(run).text


# ---- outcomes ------------------------------------------------------------------------------------
def test_a_failed_run_shows_the_first_failure_and_the_command_doctor(tmp_path):
    run = write_history(tmp_path / "a run", state="failed", steps=200, failure={})
    later = json.loads(next((run / "errors").iterdir()).read_text())
    later |= {"rank": 0, "cause": "lost contact", "reason": "lost contact", "time": 0.0}
    (run / "errors" / "20260921T110000_rank_00000_step_00000120.json").write_text(json.dumps(later))
    text = report(run).text
    assert "mat1 and mat2 shapes cannot be multiplied" in text
    assert "lost contact" not in text, "which follows from the failure"
    assert "Rank 3 on gpu-b, at step 120, in recipe.py, line 41, in loss" in text
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
    assert f"Outcome {shown} " in page.text
    assert ("The same command as before continues" in page.text) == (state in "running preempted")


def test_a_run_under_way_may_have_no_record_or_half_a_line(tmp_path):
    run = write_history(tmp_path / "run", state="running", records=[])
    assert "Nothing is recorded yet." in report(run).text
    (run / "metrics.jsonl").unlink()
    assert "Nothing is recorded yet." in report(run).text
    (run / "metrics.jsonl").write_text('{"kind": "interval", "step": 110, "lo')
    assert "damaged" not in report(run).text


# ---- several runs --------------------------------------------------------------------------------
def test_runs_are_compared_by_the_settings_that_differ_and_in_the_same_charts(tmp_path):
    rates = (0.01, 0.02, 0.03)
    runs = [
        write_history(tmp_path / f"image_classification-lr={lr}", lr=lr, steps=500) for lr in rates
    ]
    write_history(tmp_path / "short", steps=100)
    path = write_report(runs)
    assert path.resolve() == tmp_path / "report.html"
    page = Page(path)
    for title in ("Loss", "validation/accuracy", "Learning rate", "Samples per second"):
        assert page.names(title) == ["lr=0.01", "lr=0.02", "lr=0.03"]
    text = re.sub(r"\s+", " ", page.text)
    assert re.search(r"optim.lr 0.01 0.02 0.03 Outcome .*Curves", text), "before all else"
    assert "weight_decay" not in text.split("Curves")[0]
    assert all(run.name in text for run in runs)
    page = report(*runs, tmp_path / "short")
    assert page.axes("Loss")[:2] == page.axes("Learning rate")[:2] == [0, 500]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a", "b"], ["a", "b"]),
        (["a_long_name_runs-lr=0.1-seed=0", "a_long_name_runs-lr=2-seed=0"], ["lr=0.1", "lr=2"]),
        (["a_long_name_runs", "a_long_name_runs-lr=0.2"], ["a_long_name_runs", "lr=0.2"]),
        (["one/image_classification", "two/image_classification"], ["one", "two"]),
    ],
)  # fmt: skip
def test_long_names_are_shortened_to_what_differs(names, short):
    assert shorten(names) == short


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [write_history(tmp_path / folder / "run", steps=100) for folder in ("a", "b")]
    page = report(*runs, *runs, output=str(tmp_path / "x.html"))
    assert page.names("Gradient norm") == ["a/run", "b/run"]


def test_eight_runs_make_a_small_page_and_nine_are_refused(tmp_path):
    for i in range(8):
        write_history(tmp_path / f"run{i}", steps=10_000, seed=i)
    write_report(sorted(tmp_path.iterdir()))
    everything = sorted(tmp_path.iterdir())  # as runs/* is: with the report that is there now
    assert tmp_path / "report.html" in everything
    assert len(report(*everything).source) < MOST_BYTES
    write_history(tmp_path / "run8", steps=100)
    with pytest.raises(ConfigError, match="9 runs are given"):
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
    for path in (kept, link, tmp_path):
        with pytest.raises(ConfigError, match="is not a report, so it is kept"):
            write_report([run], str(path))
    assert kept.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([run], str(tmp_path / "a/b.html"))


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
    assert type_command("--help").stdout.startswith("usage: python -m my_project report ")


# ---- damage and strangers ------------------------------------------------------------------------
@pytest.mark.parametrize("content", [None, b"", b"\0{[\xff", b"[1]", b"{}", "folder"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "run.json", "config.yaml"])
def test_a_damaged_file_is_named_and_costs_only_what_stands_in_it(tmp_path, name, content):
    run = write_history(tmp_path / "run", steps=300)
    path = run / name
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    page = report(run)
    is_empty = name == "config.yaml" and content in (b"", b"{}")
    assert f"{name} is missing or damaged" in page.text or is_empty
    assert ("<figcaption>Loss" in page.source) == (name != "metrics.jsonl")


def test_damaged_lines_are_counted_and_the_others_drawn(tmp_path):
    run = write_history(tmp_path / "run", steps=300)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n[1]\n")
    page = report(run)
    assert "metrics.jsonl is missing or damaged: 2 lines are left out" in page.text
    assert len(page.curve("Loss", "training")[0]) == 30


def test_any_value_of_a_record_may_be_of_a_wrong_type(tmp_path):
    chance = random.Random(0)
    values = [None, True, -1, 10**400, 1e308, -1e308, 5e-324, "x", "\ud800", [], [[1]], {}]
    values += [{"a": None}, float("nan"), float("inf"), 2**62, 0, 1.5]
    good = list(records_of(steps=500, lr=0.01, spiked_at=(200,), preempted_at=(300,)))
    run = write_history(tmp_path / "run", records=good, state="failed", failure={})
    (run / "config.yaml").write_text("1: 2\nlist: [1, {x: y}]\nat: 2026-01-01\n")
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
        assert not re.findall(r'(?:d|style|data-axes)="[^"]*nan', page.source)
        assert len(page.source) < MOST_BYTES


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
    assert len(report(run).source) < 3 * MOST_BYTES


def test_a_strangers_text_stays_text(tmp_path):
    run = write_attack(tmp_path, "http://127.0.0.1:1/x")
    other = write_attack(tmp_path / "b", "http://127.0.0.1:1/x")
    for page in (report(run), report(run, other)):
        assert page.text.count("parent.postMessage") > 15
        assert page.source.count(SCRIPT) == 1
        assert {tag for tag, _ in page.elements} <= ELEMENTS
        assert [tag for tag, _ in page.elements].count("script") == 1
        names = {name for _, found in page.elements for name in found}
        assert not {name for name in names if name.startswith("on")}
        styles = [str(found["style"]) for _, found in page.elements if "style" in found]
        assert all(re.fullmatch(r"(top|left):[\d.]+%", style) for style in styles)
        assert not page.pictures


def test_text_that_no_reader_sees_is_replaced(tmp_path):
    found = [{"step": 1, "loss": 1.0}, {"step": 1, "a\u202eb\ud800\0/x": 0.5, "sample": "c\x1b[1m"}]
    page = report(write_history(tmp_path / "run", records=found))
    assert "a\ufffdb\ufffd\ufffd/x" in page.text
    assert "c\ufffd[1m" in page.text


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
    for name in (*names[2:10], "big2.png"):
        assert f"{name.replace(chr(0), '')} is not shown." in text
