"""The report in a real browser: it loads nothing, and runs no script of a stranger."""

import html
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from histories import ATTACK, write_attack
from my_project.tools.report.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(NAMES)} is installed"),
]
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>')


def title_of(page: Path) -> str:
    """Open a page in a browser of its own; return the title that it then has."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={page.parent / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return html.unescape(re.findall("<title>(.*?)</title>", done.stdout)[0])


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
