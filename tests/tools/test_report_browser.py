"""The report in a real browser: what fits, what a finger reads, and that nothing is loaded."""

import html
import json
import re
import shutil
import subprocess
import threading
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
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>')
# In a copy of a page, beside its own script: measures it, and tells the page around it.
MEASURE = """
<script>
addEventListener("load", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const found = {width: innerWidth, scroll: document.documentElement.scrollWidth};
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  const clientX = box.left + box.width / 2;
  plot.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY: box.top + 9}));
  found.tip = plot.querySelector("output").textContent;
  parent.postMessage({name: NAME, found}, "*");
});
</script>"""


def title_of(page: Path) -> str:
    """Open a page in a browser of its own; return the title that it then has."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={page.parent / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return html.unescape(re.findall("<title>(.*?)</title>", done.stdout)[0])


def test_nothing_leaves_the_page_of_a_phone_and_a_finger_reads_values(tmp_path):
    several = [write_history(tmp_path / f"lr={lr}", lr=lr) for lr in (0.01, 0.02, 0.03)]
    words = [*records_of(steps=500, lr=9), {"step": 3000, "x" * 90: 0.5, "sample": "word" * 99}]
    pages = {
        "one": write_report(several[:1]),
        "three": write_report(several, str(tmp_path / "three.html")),
        "long words": write_report([write_history(tmp_path / ("n" * 200), records=words)]),
        "attack": write_report([write_attack(tmp_path, "http://127.0.0.1:1/x")]),
    }
    frames = ""
    for name, path in pages.items():  # without the policy, so that only escaping protects a page
        source = POLICY.sub("", path.read_text(encoding="utf-8"))
        script = MEASURE.replace("NAME", json.dumps(name))
        copy = tmp_path / f"{name}.html"
        copy.write_text(source.replace("</body>", f"{script}</body>"), encoding="utf-8")
        frames += f'<iframe src="{copy.name}" style="width:{PHONE}px;height:3000px"></iframe>'
    around = tmp_path / "around.html"
    around.write_text(
        "<title>[]</title><script>const all = []; addEventListener('message', ({data}) => {"
        f"all.push(data); document.title = JSON.stringify(all)}})</script><body>{frames}",
        encoding="utf-8",
    )
    messages: list[Any] = json.loads(title_of(around))
    assert "owned" not in messages, "a script of a stranger ran"
    found = {one["name"]: one["found"] for one in messages}
    assert found.keys() == pages.keys()
    for name, one in found.items():
        assert one["scroll"] <= one["width"] == PHONE, name
    lines = (several[0] / "metrics.jsonl").read_text().splitlines()
    (loss,) = (
        one["loss"] for one in map(json.loads, lines) if one["step"] == 1500 and "loss" in one
    )
    step, training, _ = found["one"]["tip"].split("\n")
    assert (step, training.split()[0]) == ("step 1,500", "training")
    assert float(training.split()[1]) == pytest.approx(loss, rel=2e-3)


def test_a_page_loads_nothing_and_runs_no_script_but_its_own(tmp_path):
    """Neither where all is escaped, nor, thanks to its policy, where that were forgotten."""
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
        address = f"http://127.0.0.1:{serving.server_port}/x.png"
        run = write_attack(tmp_path, address)
        escaped = write_report([run], str(tmp_path / "escaped.html")).read_text(encoding="utf-8")
        attack = ATTACK.replace("SERVER", address).replace(
            "parent.postMessage('owned','*')", "document.title='owned'"
        )
        style = f'<div style="background:url({address}?style)">x</div>'
        raw = escaped.replace("<h1>", f"{style}<h1>{attack}")

        def title(source: str) -> str:
            path = tmp_path / "page.html"
            path.write_text(source, encoding="utf-8")
            return title_of(path)

        assert "owned" not in title(POLICY.sub("", escaped)).split()
        assert requests == []
        assert title(raw) != "owned"
        assert requests == []
        # and the attack is one
        assert title(POLICY.sub("", raw)) == "owned"
        assert {"/x.png", "/x.png?style"} <= set(requests)
        serving.shutdown()
