"""The report: its contents, the files they come from, and that a stranger's text stays text."""

import hashlib
import json
import math
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from my_project.files import ConfigError, read_json, read_yaml
from my_project.tools.report.history import read_history
from my_project.tools.report.page import SCRIPT
from my_project.tools.report.report import write_report
from runs import make_config, train

MOST_BYTES = 300_000
BEGAN = 1_790_000_000.0  # seconds since 1970
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "script", "footer", "h1", "h2", "h3"),
    *("p", "b", "i", "span", "div", "code", "pre", "output", "figure", "figcaption", "details"),
    *("summary", "table", "tr", "th", "td", "svg", "path", "img"),
}


class Page(HTMLParser):
    """A parsed page: its elements, its text and its curves."""

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
        """Return the steps of the vertical lines of one kind in a chart."""
        (drawn,) = re.findall(rf'class="{kind}" d="(M\d+ \d+v.*?)"', self.figure(title))
        x0, x1, *_ = self.axes(title)
        return [x0 + (x1 - x0) * int(x) / 1000 for x in re.findall(r"M(\d+)", drawn)]

    def axes(self, title: str) -> list[float]:
        """Return the ends of both axes of a chart, and whether the y axis is logarithmic."""
        return [
            float(word) for word in re.findall(r'data-axes="(.*?)"', self.figure(title))[0].split()
        ]

    def curve(self, title: str, name: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a curve, as the script of the page reads them."""
        x0, x1, y0, y1, is_log = self.axes(title)
        (drawn,) = re.findall(rf'data-name="{re.escape(name)}" d="(.*?)"', self.figure(title))
        drawn = re.sub(r"M[\d ]+L", " ", drawn)  # the path has the first point twice
        points = np.array(re.findall(r"\d+", drawn), float).reshape(-1, 2)
        x, y = points[:, 0] / 1000, 1 - points[:, 1] / 10_000
        return list(x0 + (x1 - x0) * x), list(y0 * (y1 / y0) ** y if is_log else y0 + (y1 - y0) * y)


def report(*folders: Path) -> Page:
    return Page(write_report(list(folders)))


# ---- run folders ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as training leaves it."""
    config = make_config(tmp_path_factory.mktemp("trained"), steps=2)
    assert train(config) == 0
    return config.folder


def copy(run: Path, folder: Path, records: list[dict[str, Any]]) -> Path:
    """Copy a run folder, with other records."""
    shutil.copytree(run, folder)
    lines = (json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def records_of(
    steps: int,
    lr: float = 0.01,
    preempted_at: tuple[int, ...] = (),
    killed_at: tuple[int, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the records of a run: intervals of 10 steps, an evaluation and a save every 250.

    Args:
        steps: of the whole run.
        lr: the peak of the learning rate; a higher one learns faster here.
        preempted_at: steps at which the run stops, and starts again.
        killed_at: steps from which it starts again without having stopped.
    """

    def record(kind: str, step: int, **more: Any) -> dict[str, Any]:
        seconds = 0.12 * step
        when = {"elapsed_seconds": seconds, "time": BEGAN + seconds}
        return {"kind": kind, "step": step} | when | more

    def start(step: int) -> dict[str, Any]:
        return record("start", step, world_size=8, hosts=["gpu-a"] * 4 + ["gpu-b"] * 4)

    yield start(0)
    for step in range(10, steps + 1, 10):
        done = step / steps
        loss = 2.4 * math.exp(-6 * done * lr / 0.01) + 0.03
        yield record("interval", step, loss=loss) | {
            "learning_rate": lr * (1 + math.cos(math.pi * done)) / 2,
            "gradient_norm": 2.2 * (1 + 3 * math.exp(-40 * done)),
            "samples_per_second": 533.0,
            "peak_memory_bytes": int(9.1e9 + 2e8 * done),
        }
        if step % 250 == 0 or step == steps:
            results = {"validation/accuracy": done, "validation/loss": loss * 1.2 + 0.05}
            yield record("evaluation", step) | results
            yield record("checkpoint", step)
        if step in preempted_at:
            yield record("stop", step, reason="SIGTERM")
        if step in preempted_at + killed_at:
            yield start(step)


# ---- curves --------------------------------------------------------------------------------------
def test_curves_show_the_values_of_the_records_on_one_axis_of_steps(trained, tmp_path):
    found = list(records_of(steps=400))
    for one in found:
        if "loss" in one:
            one["train/kl"] = one["loss"] ** 2  # a scalar of the recipe
    page = report(copy(trained, tmp_path / "run", found))
    assert len(page.source) < MOST_BYTES
    assert "://" not in page.source, "no network"
    kinds = {
        kind: [one for one in found if one["kind"] == kind] for kind in ("interval", "evaluation")
    }
    for title, name, kind, column, scale in (
        ("Loss", "training", "interval", "loss", 1),
        ("Loss", "validation/loss", "evaluation", "validation/loss", 1),
        ("train/kl", "", "interval", "train/kl", 1),
        ("Gradient norm", "before clipping", "interval", "gradient_norm", 1),
        ("Peak memory", "", "interval", "peak_memory_bytes", 2**-30),
        ("validation/accuracy", "validation/accuracy", "evaluation", "validation/accuracy", 1),
    ):
        steps, values = page.curve(title, name)
        assert page.axes(title)[:2] == [0, 400], "one axis for all"
        assert steps == pytest.approx([one["step"] for one in kinds[kind]], abs=0.3)
        wanted = [one[column] * scale for one in kinds[kind]]
        assert values == pytest.approx(wanted, abs=2e-4 * max(wanted), rel=1e-3)


def test_steps_without_a_finite_loss_leave_a_gap_that_is_marked(trained, tmp_path):
    one = {"kind": "interval", "rank_seconds_max": 0.1}
    found: list[dict[str, Any]] = [one | {"step": 10 * i, "loss": 1.0 + i} for i in range(10)]
    found[4]["loss"] = found[5]["loss"] = None
    found[7] |= {"skipped": 3, "skipped_steps": 23}
    page = report(copy(trained, tmp_path / "run", found))
    steps, values = page.curve("Loss", "training")
    assert steps == pytest.approx([0, 10, 20, 30, 60, 70, 80, 90], abs=0.1)
    assert values == pytest.approx([1, 2, 3, 4, 7, 8, 9, 10], abs=0.01)
    (drawn,) = re.findall(r'data-name="training" d="(.*?)"', page.figure("Loss"))
    assert drawn.count("M") == 2, "a gap"
    assert page.marks("Loss", "skipped") == pytest.approx([40, 50, 70], abs=0.1)
    assert "slowest rank" not in page.text, "there is one process"


def test_a_run_that_fails_before_its_first_interval_has_no_damaged_records(trained, tmp_path):
    run = copy(trained, tmp_path / "run", [{"kind": "start", "step": 0, "world_size": 1}])
    assert "metrics.jsonl is" not in report(run).text
    (run / "metrics.jsonl").write_text("")
    assert "metrics.jsonl is missing or damaged." in report(run).text
    (run / "metrics.jsonl").write_text("damaged\n")
    assert "damaged lines that are left out: 1." in report(run).text


def test_scalars_that_are_not_drawn_are_listed(trained, tmp_path):
    scalars = {f"train/s{i:02}": 1.0 for i in range(14)}
    page = report(copy(trained, tmp_path / "run", [{"kind": "interval", "step": 1} | scalars]))
    assert page.names("train/s11") == [""]
    said = "Not drawn, since a page shows 12 scalars of the recipe: train/s12, train/s13."
    assert said in page.text


def test_columns_have_one_order_in_all_processes(trained, tmp_path):
    one = {"kind": "interval", "step": 1, "train/a": 1.0, "train/b": 1.0, "loss": 1.0}
    history = read_history(copy(trained, tmp_path / "run", [one]))
    assert list(history.curves) == ["loss", "elapsed_seconds", "train/a", "train/b"]


def test_shares_of_the_time_count_the_first_interval(trained, tmp_path):
    one = {"kind": "interval", "time": BEGAN}
    found = [
        {"kind": "start", "step": 0, "elapsed_seconds": 10.0, "time": BEGAN},
        one | {"step": 1, "elapsed_seconds": 30.0, "data_share": 0.75},
        one | {"step": 2, "elapsed_seconds": 50.0, "data_share": 0.25},
    ]
    assert "Rank 0: data 50.0%" in re.sub(
        r"\s+", " ", report(copy(trained, tmp_path / "run", found)).text
    )


# ---- what happened -------------------------------------------------------------------------------
def test_what_happened_is_marked_and_how_each_start_ended_is_said(trained, tmp_path):
    found = list(records_of(steps=1000, preempted_at=(400,), killed_at=(700,)))
    (spike,) = (one for one in found if one["kind"] == "interval" and one["step"] == 500)
    spike["loss"] *= 40
    at = max(i for i, one in enumerate(found) if one["kind"] == "start" and one["step"] == 400)
    found.insert(at + 1, {"kind": "check", "step": 400, "problem": "other code: a.py"})
    run = copy(trained, tmp_path / "run", found)
    line = {"event": "start", "id": "a.0", "launch": "a", "time": BEGAN + 9}
    (run / "starts.jsonl").write_text(json.dumps(line) + "\n")
    text = re.sub(r"\s+", " ", report(run).text)
    assert "Starts not in starts.jsonl 1" in text, "the one without a launcher"
    assert "400 to 700 8 gpu-a x 4, gpu-b x 4 not recorded" in text
    time = found[at]["time"]
    ended = line | {"event": "end", "time": time + 1, "outcome": "killed", "cause": "SIGKILL"}
    lines = json.dumps(line | {"time": time - 1}), json.dumps(ended)
    (run / "starts.jsonl").write_text("\n".join(lines))
    page = report(run)
    text = re.sub(r"\s+", " ", page.text)
    assert "400 to 700 8 gpu-a x 4, gpu-b x 4 killed: SIGKILL" in text
    assert "0 to 400 8 gpu-a x 4, gpu-b x 4 preempted: SIGTERM" in text
    assert page.marks("Loss", "restart") == pytest.approx([400, 700], abs=1)
    assert page.marks("Loss", "spike") == pytest.approx([500], abs=1)
    assert page.marks("Loss", "check") == pytest.approx([400], abs=1)
    assert "Step 400: other code: a.py" in text
    assert page.marks("Loss", "checkpoint") == pytest.approx([250, 500, 750, 1000], abs=1)


# ---- several runs --------------------------------------------------------------------------------
def test_runs_are_compared_by_settings_that_differ_and_in_shared_charts(trained, tmp_path):
    runs = []
    for lr in (0.01, 0.02, 0.03):
        run = copy(trained, tmp_path / f"image_classification-lr={lr}", [*records_of(500, lr)])
        settings = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(settings.replace("  lr: 0.05\n", f"  lr: {lr}\n"))
        typed = ["/usr/bin/python", "-m", "accelerate.commands.launch", "--config_file"]
        about = read_json(run / "run.json") | {"launcher": typed}
        (run / "run.json").write_text(json.dumps(about))
        runs.append(run)
    page = report(*runs)
    for title in ("Loss", "validation/accuracy", "Learning rate", "Samples per second"):
        assert page.names(title) == ["lr=0.01", "lr=0.02", "lr=0.03"]
    text = re.sub(r"\s+", " ", page.text)
    assert re.search(r"optim.lr 0.01 0.02 0.03 ", text)
    assert "weight_decay" not in text.split("Curves")[0]
    assert "python -m accelerate.commands.launch --config_file" in text.split("Curves")[0], "typed"


def test_what_is_not_a_run_is_left_out_of_a_comparison(trained, tmp_path, capsys):
    runs = [copy(trained, tmp_path / name, [*records_of(100)]) for name in ("a", "b")]
    (tmp_path / "wandb").mkdir()
    (tmp_path / "mlflow.db").write_text("")
    assert "2 runs compared" in write_report(sorted(tmp_path.iterdir())).read_text()
    left_out = f"not runs: {tmp_path}/mlflow.db, {tmp_path}/wandb"
    assert left_out in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report([tmp_path / "wandb"])
    with pytest.raises(ConfigError, match="missing"):
        write_report([*runs, tmp_path / "missing"])


# ---- the file ------------------------------------------------------------------------------------
def test_a_report_replaces_only_a_report(trained, tmp_path):
    run = copy(trained, tmp_path / "run", [*records_of(100)])
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


# ---- strangers -----------------------------------------------------------------------------------
ATTACK = (
    "</script><script>parent.postMessage('owned','*')</script></style></title>"
    "<img src=http://127.0.0.1:1/x onerror=\"parent.postMessage('owned','*')\">"
    '"><img src=http://127.0.0.1:1/x>\' onload=\'parent.postMessage("owned","*")\''
    " style='background:url(http://127.0.0.1:1/x)"
)


def attacked(content: Any) -> Any:
    """Replace each text with the attack, and add it to each list and as a key to each dict."""
    if isinstance(content, dict):
        return {name: attacked(one) for name, one in content.items()} | {ATTACK: ATTACK}
    if isinstance(content, list):
        return [*map(attacked, content), ATTACK]
    return ATTACK if isinstance(content, str) else content


def attack(trained: Path, folder: Path, outcome: str) -> Path:
    """Copy a run folder; replace each of its texts with the attack."""
    found = [attacked(one) | {"kind": one["kind"]} for one in records_of(200, preempted_at=(150,))]
    results = {ATTACK: 0.5, f"{ATTACK}/loss": 0.7, "sample": ATTACK, "pictures": [ATTACK]}
    for record in found:
        record |= results if record["kind"] == "evaluation" else {}
    found.append({"kind": "numerics", "step": 200, "changed": {ATTACK: [ATTACK, ATTACK]}})
    found.append({"kind": "check", "step": 200, "check": ATTACK, "problem": ATTACK})
    run = copy(trained, folder / ATTACK.replace("/", "\u2044")[:60], found)
    for name, kept in {
        "config.yaml": {"evaluation": {"best_metric": ATTACK}},
        "run.json": {},
        "status.json": {"outcome": outcome},
    }.items():
        (run / name).write_text(json.dumps(attacked(read_yaml(run / name)) | kept))
    return run


def test_a_strangers_text_stays_text(trained, tmp_path):
    run, other = attack(trained, tmp_path, "failed"), attack(trained, tmp_path / "b", ATTACK)
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
        # even if a text were not escaped, a browser would neither run nor load anything in it
        policy = next(found for tag, found in page.elements if "http-equiv" in found)
        assert page.source.index("Content-Security-Policy") < page.source.index("<title>")
        digest = b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
        assert (policy["content"] or "").split("; ") == [
            "default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", "base-uri 'none'",
            "form-action 'none'", f"script-src 'sha256-{digest}'",
        ]  # fmt: skip


def test_pictures_come_from_the_run_folder_alone(trained, tmp_path):
    names = [
        *("a.png", "b/c.jpg", "../out.png", str(tmp_path / "out.png"), "link.png", "text.png"),
        *("none.png", "b", "zero\0", "loop.png"),
    ]
    shown = {"kind": "evaluation", "step": 20, "pictures": [*names, 3, None]}
    run = copy(trained, tmp_path / "run", [shown])
    (run / "b").mkdir()
    png = b"\x89PNG\r\n\x1a\n picture"
    (tmp_path / "out.png").write_bytes(png)
    (run / "link.png").symlink_to(tmp_path / "out.png")
    (run / "loop.png").symlink_to("loop.png")
    (run / "text.png").write_text("<svg onload=alert(1)>")
    (run / "a.png").write_bytes(png)
    (run / "b/c.jpg").write_bytes(b"\xff\xd8\xff jpeg")
    kinds = [source.partition(",")[0] for source in report(run).pictures]
    assert kinds == ["data:image/png;base64", "data:image/jpeg;base64"]


def test_evaluations_beside_training_are_drawn_and_marked(trained, tmp_path):
    """For a step that training has evaluated, its result; for a step trained again, the last."""
    run = copy(trained, tmp_path / "run", [])
    shutil.copy(trained / "metrics.jsonl", run)
    name = "validation/accuracy"
    before = report(run)
    lines = [{"step": step, "time": BEGAN, name: 0.125 * step} for step in (1, 3, 3, 10)]
    lines[2][name] = 0.875
    text = "".join(json.dumps({"kind": "evaluation"} | line) + "\n" for line in lines)
    (run / "evaluations.jsonl").write_text(text + "damaged\n")
    page = report(run)
    assert "3 (beside training)" in page.text
    assert "0.875" in page.text
    assert page.text.count("beside training") == len({1, 3, 10} - own_steps(run, name))
    assert "evaluations.jsonl has damaged lines" in page.text
    assert "beside training" not in before.text


def own_steps(run: Path, name: str) -> set[int]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"] for record in records if name in record}
