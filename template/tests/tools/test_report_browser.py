"""The report in a real browser: what fits, what a finger reads, and that nothing is loaded."""

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from histories import ATTACK, records_of, write_attack, write_history

from my_project.report.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(NAMES)} is installed"),
]
PHONE, DESK = 390, 1280
# In a copy of a page, beside its own script: measures it, and tells the page around it.
MEASURE = """
<script>
addEventListener("load", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const found = {width: innerWidth, scroll: document.documentElement.scrollWidth, wrong: []};
  const box = one => one.getBoundingClientRect();
  for (const one of document.querySelectorAll("body *")) {
    const inside = one.closest(".scroll, svg, pre, .key");
    if (!inside && (box(one).right > innerWidth + 1 || box(one).left < -1))
      found.wrong.push("off the page: " + one.outerHTML.slice(0, 200));
    const isHidden = getComputedStyle(one).overflowX === "hidden";
    if (!inside && isHidden && one.scrollWidth > one.clientWidth)
      found.wrong.push("cut off: " + one.outerHTML.slice(0, 200));
  }
  for (const plot of document.querySelectorAll(".plot, .hours")) {
    const labels = [...plot.querySelectorAll("i")].map(box);
    for (const [i, a] of labels.entries()) for (const b of labels.slice(i + 1))
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
        found.wrong.push("labels overlap: " + plot.textContent.slice(0, 100));
  }
  for (const line of document.querySelectorAll("path.line"))
    if (line.getAttribute("d").length > 40 && box(line).width < 1)
      found.wrong.push("not drawn: " + line.dataset.name);
  found.plots = document.querySelectorAll(".plot").length;
  found.page = getComputedStyle(document.body).backgroundColor;
  const first = document.querySelector(".plot[data-x]");
  if (first) {
    const at = box(first), x = at.left + at.width / 2;
    first.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: at.top + 9}));
    found.tip = document.querySelector(".tip").textContent;
    first.dispatchEvent(new PointerEvent("pointerleave"));
    found.tips = document.querySelectorAll(".tip, .cursor").length;
  }
  parent.postMessage({name: NAME, found}, "*");
});
</script>"""


def browse(page: Path, *options: str) -> str:
    """Open a page in a browser of its own; return the document that it has become."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={page.parent / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return done.stdout


def measure(folder: Path, pages: dict[str, Path], width: int, *options: str) -> dict[str, Any]:
    """Open reports in frames of a width, all in one browser; return what MEASURE finds in each."""
    frames = ""
    for i, (name, path) in enumerate(pages.items()):
        source = without_policy(path.read_text(encoding="utf-8"))
        copy = folder / f"{i}_{width}.html"
        script = MEASURE.replace("NAME", json.dumps(name))
        copy.write_text(source.replace("</body>", f"{script}</body>"), encoding="utf-8")
        frames += f'<iframe src="{copy.name}" style="width:{width}px;height:3000px"></iframe>'
    around = folder / "around.html"
    around.write_text(
        "<title>[]</title><script>const all = []; addEventListener('message', ({data}) => {"
        f"all.push(data); document.title = JSON.stringify(all)}})</script><body>{frames}",
        encoding="utf-8",
    )
    found = re.findall("<title>(.*?)</title>", browse(around, *options))[0]
    messages = json.loads(html.unescape(found))
    assert "owned" not in messages, "a script of a stranger ran"
    return {one["name"]: one["found"] for one in messages}


def without_policy(source: str) -> str:
    """Return a page that may do everything, so that only escaping protects it."""
    found, count = re.subn(r'<meta http-equiv="Content-Security-Policy".*?>', "", source)
    assert count == 1
    return found


@contextmanager
def server() -> Iterator[tuple[str, list[str]]]:
    """Serve on this machine; yield the address, and a list to which each request is added."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/x.png", requests
        serving.shutdown()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Return the reports of runs of every kind."""
    runs = tmp_path_factory.mktemp("runs")
    several = [
        write_history(runs / f"image_classification-optim.lr={lr}-seed={lr}", lr=lr)
        for lr in (0.001 * 1.7**i for i in range(8))
    ]
    long = records_of(steps=2_000_000, lr=0.01, evaluate_every=2000, killed_at=(500_000,))
    sample = {"step": 3000, "x" * 90: 0.5, "sample": "long " * 99 + "word" * 99}
    words = [*records_of(steps=500, lr=9), sample]
    kinds = {
        "one": write_history(runs / "one", preempted_at=(500,), killed_at=(1000,)),
        "200,000 records": write_history(runs / "long", records=[*long], steps=2_000_000),
        "old": write_history(runs / "old", old=True),
        "new": write_history(runs / "new", records=[], state="running"),
        "failed": write_history(runs / "failed", state="failed", failure={}, steps=90),
        "long words": write_history(runs / ("n" * 200), records=words),
        "attack": write_attack(runs, "http://127.0.0.1:1/x"),
    }  # fmt: skip
    paths = {name: write_report([run]) for name, run in kinds.items()}
    paths["three"] = write_report(several[:3], str(runs / "three.html"))
    paths["eight"] = write_report(several, str(runs / "eight.html"))
    return paths


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_leaves_the_page_or_overlaps(tmp_path, pages, width):
    found = measure(tmp_path, pages, width)
    assert found.keys() == pages.keys()
    for name, one in found.items():
        assert one["width"] == width
        assert one["scroll"] <= width, (name, one["wrong"])
        assert one["wrong"] == [], name
        assert one["page"] == "rgb(255, 255, 255)"
        assert one["plots"] > 3 or name == "new"
    lines = (pages["one"].parent / "metrics.jsonl").read_text().splitlines()
    (loss,) = (
        one["loss"] for one in map(json.loads, lines) if one["step"] == 1500 and "loss" in one
    )
    step, training, _ = found["one"]["tip"].split("\n")
    assert (step, training.split()[0]) == ("step 1,500", "training")
    assert float(training.split()[1]) == pytest.approx(loss, rel=2e-3)
    assert found["one"]["tips"] == 0, "it goes with the pointer"
    assert found["three"]["tip"].count("validation") == 3


def test_the_page_is_dark_where_the_reader_wants_it(tmp_path, pages):
    dark = "--blink-settings=preferredColorScheme=0"
    found = measure(tmp_path, {"one": pages["one"]}, PHONE, dark)
    assert found["one"]["page"] == "rgb(19, 22, 26)"


def test_a_page_loads_nothing_and_runs_no_script_but_its_own(tmp_path):
    """Neither where all is escaped, nor, thanks to its policy, where that were forgotten."""
    with server() as (address, requests):
        run = write_attack(tmp_path, address)
        escaped = write_report([run], str(tmp_path / "escaped.html")).read_text(encoding="utf-8")
        attack = ATTACK.replace("SERVER", address).replace(
            "parent.postMessage('owned','*')", "document.title='owned'"
        )
        raw = escaped.replace("<h1>", f"<h1>{attack}")
        style = f'<div style="background:url({address}?style)">x</div>'
        raw = raw.replace("<h1>", f"{style}<h1>")

        def title(name: str, source: str) -> str:
            path = tmp_path / f"{name}.html"
            path.write_text(source, encoding="utf-8")
            return re.findall("<title>(.*?)</title>", browse(path))[0]

        assert "owned" not in title("a", without_policy(escaped)).split()
        assert requests == []
        assert title("b", raw) != "owned"
        assert requests == []
        # and the attack is one
        assert title("c", without_policy(raw)) == "owned"
        assert {"/x.png", "/x.png?style"} <= set(requests)


def test_a_screenshot_of_a_phone_shows_the_curves(tmp_path, pages):
    picture = tmp_path / "phone.png"
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{pages["one"].as_uri()}"'
        ' style="border:0;width:390px;height:900px"></iframe>'
    )
    browse(frame, f"--screenshot={picture}", "--window-size=500,900")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "an empty page has about 3 kB"
