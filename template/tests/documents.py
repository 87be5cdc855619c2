"""The commands and the code in the documents, for tests that run them unchanged."""

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[1]
# The owner of a project may have deleted these folders.
HAS_TOOLS = (PROJECT / "src/my_project/tools").is_dir()
HAS_LAUNCHERS = (PROJECT / "launch").is_dir()
DOCUMENTS = sorted(
    path.relative_to(PROJECT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "accelerate_configs/*.md")
    for path in PROJECT.glob(pattern)
)

SHORT = """--epochs null --steps 2 --evaluation.every_steps null --telemetry.trackers []
--batches.global_batch_size 4 --batches.micro_batch_size 2 --batches.workers 0"""


def text_of(document: str, heading: str = "") -> str:
    """Return the text of a document, or of the section below a heading."""
    text = (PROJECT / document).read_text(encoding="utf-8")
    if not heading:
        return text
    kept, is_code = [], False
    for line in text.split(f"\n{heading}\n", 1)[1].splitlines(keepends=True):
        is_code ^= line.startswith("```")  # a comment in code is not a heading
        marks = line.partition(" ")[0]
        if not is_code and marks in ("#", "##", "###") and heading.startswith(marks):
            break
        kept.append(line)
    return "".join(kept)


def blocks(text: str, language: str) -> list[str]:
    """List the blocks of code of one language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def commands(text: str) -> list[str]:
    """List the commands; a command of several lines is joined to one line."""
    joined = (re.sub(r"\\\n\s*", "", block) for block in blocks(text, "bash"))
    return [line for block in joined for line in block.strip().splitlines()]


def card(path: Path) -> str:
    """Return the comment at the head of a config."""
    head = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
    assert head, "a config opens with a card"
    return re.sub(r"(?m)^# ?", "", head[0])


def train_as_typed(command: str, more: str = "") -> Any:
    """Run the command `train` in this process, which is faster; return its config.

    Args:
        command: a command of a document; its paths are relative to the current folder.
        more: settings that shorten the run.
    """
    from runs import train

    from my_project.settings import parse

    launcher = pytest.importorskip("my_project.launching.train")
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "my_project", "train"], command
    config = parse([*launcher.read_options(words[4:])[1], *more.split()])
    assert train(config) == 0, command
    return config


def train_recipe_config(recipe: str, folder: Path, **settings: Any) -> list[float]:
    """Train a recipe's config, shortened by the given settings, and return its losses."""
    from runs import change, train, values

    from my_project.settings import parse

    path = PROJECT / f"configs/{recipe}.yaml"
    config = parse(["--config", str(path), "--runs_folder", str(folder)])
    short = {"epochs": None, "evaluation__every_steps": None, "telemetry__every_steps": 1}
    config = change(config, **short | settings)
    assert train(config) == 0
    return values(config)


def predict_as_typed(command: str) -> str:
    """Run the command `predict` in this process, and return what it prints."""
    weight_commands = pytest.importorskip("my_project.commands")
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "my_project", "predict"], command
    with redirect_stdout(io.StringIO()) as printed:
        weight_commands.print_prediction(weight_commands.parse_predict(words[4:]))
    return printed.getvalue()


def train_on_own_data(recipe: str, folder: Path) -> dict[str, Any]:
    """Run a recipe's commands on the user's own data, 2 steps each; return configs by run name."""
    (folder / "configs").symlink_to(PROJECT / "configs")
    section = text_of("docs/your-own-recipe.md", f"### {recipe}")
    configs = [train_as_typed(command, SHORT) for command in commands(section)]
    return {config.run_name: config for config in configs}


def run_as_typed(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command as a user does in a project.

    Args:
        command: a command of a document.
        folder: the folder of the project.
        environment: additional variables.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False,
        timeout=600, env=os.environ | {"PATH": path} | environment,
    )  # fmt: skip
