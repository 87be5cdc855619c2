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

from my_project.tools.report.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(NAMES)} is installed"),
]
PHONE = 390
# In a copy of a page, beside its own script: measures it, and tells the page around it.
MEASURE = """
<script>
addEventListener("load", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const found = {width: innerWidth, scroll: document.documentElement.scrollWidth};
  const box = one => one.getBoundingClientRect();
  found.plots = document.querySelectorAll(".plot").length;
  const first = document.querySelector(".plot[data-x]");
  if (first) {
    const at = box(first), x = at.left + at.width / 2;
    first.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: at.top + 9}));
    found.tip = document.querySelector(".tip").textContent;
  }
  parent.postMessage({name: NAME, found}, "*");
});
</script>"""


def browse(page: Path) -> str:
    """Open a page in a browser of its own; return the document that it has become."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={page.parent / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return done.stdout


def measure(folder: Path, pages: dict[str, Path], width: int) -> dict[str, Any]:
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
    found = re.findall("<title>(.*?)</title>", browse(around))[0]
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


def test_nothing_leaves_the_page_of_a_phone_and_a_finger_reads_values(tmp_path):
    several = [write_history(tmp_path / f"lr={lr}", lr=lr) for lr in (0.01, 0.02, 0.03)]
    words = [*records_of(steps=500, lr=9), {"step": 3000, "x" * 90: 0.5, "sample": "word" * 99}]
    pages = {
        "one": write_report(several[:1]),
        "three": write_report(several, str(tmp_path / "three.html")),
        "long words": write_report([write_history(tmp_path / ("n" * 200), records=words)]),
        "attack": write_report([write_attack(tmp_path, "http://127.0.0.1:1/x")]),
    }
    found = measure(tmp_path, pages, PHONE)
    assert found.keys() == pages.keys()
    for name, one in found.items():
        assert one["scroll"] <= one["width"] == PHONE, name
        assert one["plots"] > 3, name
    lines = (several[0] / "metrics.jsonl").read_text().splitlines()
    (loss,) = (
        one["loss"] for one in map(json.loads, lines) if one["step"] == 1500 and "loss" in one
    )
    step, training, _ = found["one"]["tip"].split("\n")
    assert (step, training.split()[0]) == ("step 1,500", "training")
    assert float(training.split()[1]) == pytest.approx(loss, rel=2e-3)


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
