"""The README's commands, code and pictures; links, and files that must agree."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from documents import card
from shell import succeed
from test_size import STEP_FILES, TEMPLATE, counts

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(
    not (REPOSITORY / ".venv/installed").exists(), reason="needs the .venv that make makes"
)
def test_make_train_reaches_its_accuracy_and_shows_it_again():
    """The first call trains; the second neither installs, generates nor trains."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    shown = succeed("make", "train", cwd=REPOSITORY, env=outside)
    block = shown.split("--- finished: runs/image_classification -")[1]
    assert float(re.findall(r"validation/accuracy ([\d.]+)", block)[0]) >= 0.97
    folder = "runs/image_classification"
    assert f"weights  {folder}/best, {folder}/export" in block
    again = succeed("make", "train", cwd=REPOSITORY, env=outside)
    assert "validation/accuracy" in again
    for trace in ("uv pip install", "cookiecutter --no-input", "step 10 of"):
        assert trace not in again


PAGES = [path for folder in ("", "docs/", "docs/*/") for path in REPOSITORY.glob(f"{folder}*.md")]


@pytest.mark.parametrize(
    "page",
    [*sorted(PAGES), REPOSITORY / "recipes/README.md"],
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_links_lead_to_files(page: Path):
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        is_there = (page.parent / target).exists()
        assert is_there or target.startswith("https://"), target


@pytest.mark.parametrize("page", ["README.md", "docs/promises.md", "docs/security.md"])
def test_the_tests_that_a_promise_names_are_there(page: str):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?(?:\w+/)?test_\w+\.py)`", text)
    assert named
    for file in named:
        folders = ["."] if "/" in file else ["template/tests"]
        folders += ["tests", "tests/loop"] if page == "README.md" else []
        assert any((REPOSITORY / folder / file).is_file() for folder in folders), file


# ---- the README ----------------------------------------------------------------------------------
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "template/README.md"])
def test_a_readme_has_at_most_900_words(page: str):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    words = re.sub(r"(?ms)^```python\n.*?^```$", "", text).split()  # without the whole step
    assert len(words) <= 900


def test_the_sizes_that_the_readme_names_are_counted():
    found = counts()
    loop = found["lines of train.py and all that it imports"]
    sizes = [loop, found["lines of the package without tools/"] - loop, found["lines of tools/"]]
    named = [int(number.replace(",", "")) for number in re.findall(r"\d,\d00\b", README)]
    assert named == [round(size, -2) for size in sizes]
    files = found["files of train.py and all that it imports"]
    text = f"in {files} files; a step runs through {STEP_FILES} of them."
    assert text in " ".join(README.split())


@pytest.mark.parametrize("page", ["README.md", "template/docs/how-a-step-works.md"])
def test_the_step_shown_is_that_of_train_py(page: str):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    (shown,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    code = (REPOSITORY / "template/src/my_project/train.py").read_text(encoding="utf-8")
    assert shown.startswith("def train_step(")
    assert f"\n\n\n{shown}\n\n" in code, "whole, as it stands"


def test_root_folders_are_linked_file_by_file():
    """Each linked file exists in the root folder, and each root file is linked."""
    for folder, place, suffix in [
        ("accelerate_configs", "accelerate_configs", "*"),
        ("recipes", "configs", "*.yaml"),
        ("recipes", "src/my_project/recipes", "*.py"),
    ]:
        there = {path.name for path in (REPOSITORY / folder).glob(suffix)} - {"copy_recipe.py"}
        links = [path for path in (TEMPLATE / place).glob(suffix) if path.is_symlink()]
        assert {link.name for link in links} == there
        assert {link.resolve().parent for link in links} == {REPOSITORY / folder}


def test_what_a_recipe_needs_stands_at_its_head_and_in_its_extra():
    project = tomllib.loads((REPOSITORY / "template/pyproject.toml").read_text())["project"]
    for path in (REPOSITORY / "recipes").glob("*.yaml"):
        text = path.with_suffix(".py").read_text()
        head = tomllib.loads(re.sub(r"(?m)^# ?", "", text.split("# ///")[1].split("\n", 1)[1]))
        extra = project["optional-dependencies"][path.stem]
        assert set(head["dependencies"]) - set(project["dependencies"]) == set(extra), path.stem


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_comment_at_the_head_of_a_config_launches_that_config(path: Path):
    commands = re.findall(r"(?m)^  ((?:.*\\\n)*.*)$", card(path))
    launch, *predict = (shlex.split(command.replace("\\\n", " ")) for command in commands)
    accelerate_config = "accelerate_configs/cpu_2_processes.yaml"
    assert (REPOSITORY / accelerate_config).is_file()
    module = ["-m", "my_project.train", "--config", f"configs/{path.name}"]
    assert launch == ["accelerate", "launch", "--config_file", accelerate_config, *module]
    words = ["python", "-m", "my_project", "predict", f"runs/{path.stem}"]
    file = predict[-1][-1]
    assert predict == [words, [*words, file]]


def test_the_tests_that_a_project_names_are_where_it_says():
    promises = (REPOSITORY / "template/docs/promises.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)`((?:\\\*)?)", promises)
    assert len(named) > 15
    assert "`*" not in promises  # Markdown shows only an escaped star
    for file, is_elsewhere in named:
        folder = "tests/loop" if is_elsewhere else "template/tests"
        assert (REPOSITORY / folder / file).is_file(), file
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for document in ("docs/promises.md", "AGENTS.md"):
        text = (REPOSITORY / "template" / document).read_text(encoding="utf-8")
        assert f"cookiecutter-accelerate {version}" in text, document
    assert f"\nversion: {version}\n" in (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
