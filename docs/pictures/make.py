"""Make the pictures of the README: real runs in a pseudo-terminal, exported as SVG by rich.

    .venv/bin/python docs/pictures/make.py [finished] [failed] [stopped] [report]

Each is a run of its own in a new copy of template/: the default config, on 2 CPU processes.

    finished  the whole run
    failed    with a bug in the recipe's loss, which this script writes into the copy (BUG)
    stopped   Ctrl-C is typed in the first half of the run
    report    the whole run; then the top of its report in Chromium, as PNG

A picture of a terminal shows the command and all that was on the terminal when it had ended.
Replaced in it: the name of this host by "my-host". Rich's web fonts are left out, so that a picture
loads nothing.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
TEMPLATE = FOLDER.parents[1] / "template"
sys.path.insert(0, str(FOLDER.parents[1] / "tests/loop"))

from terminal import Terminal  # noqa: E402

COLUMNS = 100
COMMAND = "train configs/image_classification.yaml --where cpu_2_processes"
# The last epochs weigh the classes; the weights of nine of them are given, but there are ten.
BUG = (
    """\
        loss_sum = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self.label_smoothing
        )
""",
    """\
        weight = torch.ones(9) if step >= 200 else None
        loss_sum = F.cross_entropy(logits, labels, weight, reduction="sum")
""",
)
EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 75, "report": 0}
BROWSER = """chromium --headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars
--disable-background-networking --window-size=1000,1500"""
FONTS = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
FORMAT = re.sub(r"(?s)@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT).replace(
    "Fira Code, monospace", FONTS
)


def run(name: str, project: Path) -> str:
    """Run the command as in the picture of that name; return what the terminal received."""
    shutil.copytree(TEMPLATE, project, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    if name == "failed":
        recipe = project / "src/my_project/recipes/image_classification.py"
        code = recipe.read_text()
        assert code.count(BUG[0]) == 1, "the recipe's loss has changed; so must BUG"
        recipe.write_text(code.replace(*BUG))
    environment = {"PYTHONPATH": str(project / "src"), "CUDA_VISIBLE_DEVICES": ""}
    terminal = Terminal(COMMAND.split(), project, COLUMNS, environment)
    if name == "stopped":
        terminal.read(lambda shown: re.search(r"step 1[2-5]\d/330", shown) is not None)
        terminal.type("\x03")
    _, code = terminal.end(seconds=600)
    assert code == EXIT_CODES[name], terminal.shown
    return terminal.text


def screen(received: str) -> Text:
    """Return what stood on the terminal, with its colors, broken at its last column."""
    host = socket.gethostname()
    lines = []
    for drawn in received.rstrip().replace("\r\n", "\n").split("\n"):
        line = drawn.rpartition("\r")[2]  # of a bar what was drawn last
        text = Text.from_ansi(re.sub(r"\x1b\[[0-9;?]*[A-Za-ln-z]", "", line))
        if host in text.plain:
            ruled = text.plain.startswith("---")
            text = Text(text.plain.replace(host, "my-host"))
            if ruled:
                text = Text(text.plain.rstrip("-").ljust(COLUMNS, "-"))
        lines += text.divide(range(COLUMNS, len(text), COLUMNS))
    return Text("\n").join(lines)


def picture(name: str, shown: Text) -> str:
    """Return the SVG of a terminal with the command and what it has shown."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), color_system="truecolor")
    console.print(Text(f"$ python -m my_project {COMMAND}", style="bold"), highlight=False)
    console.print(shown, highlight=False, soft_wrap=True)
    console.print()  # else the picture ends within the last line's underscores
    return console.export_svg(title="my-project", code_format=FORMAT, unique_id=name)


def take_report(project: Path) -> None:
    """Write the report of the run, and a picture of its top, where no host or path stands."""
    environment = os.environ | {"PYTHONPATH": str(project / "src")}
    page = project / "runs/image_classification"
    command = [sys.executable, "-m", "my_project", "report", str(page)]
    subprocess.run(command, cwd=project, env=environment, check=True)
    path = FOLDER / "report.png"
    words = [*BROWSER.split(), f"--user-data-dir={project}/browser", f"--screenshot={path}"]
    subprocess.run([*words, (page / "report.html").as_uri()], check=True, capture_output=True)
    print(f"{path.name}: {path.stat().st_size} bytes")


def main(names: list[str]) -> None:
    """Make the pictures with these names, or all."""
    for name in names or EXIT_CODES:
        with tempfile.TemporaryDirectory() as folder:
            shown = screen(run(name, Path(folder) / "my-project"))
            if name == "report":
                take_report(Path(folder) / "my-project")
                continue
            for private in (folder, socket.gethostname(), str(Path.home()), sys.prefix):
                assert private not in shown.plain, f"{private} is in the picture:\n{shown.plain}"
        path = FOLDER / f"{name}.svg"
        path.write_text(picture(name, shown))
        print(f"{path.name}: {len(path.read_bytes())} bytes\n{shown.plain}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
