"""The two commands of the README, and what keeps the repository in one piece."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(
    not (REPOSITORY / ".venv/installed").exists(), reason="needs the .venv that make makes"
)
def test_make_train_reaches_its_accuracy_and_shows_it_again():
    """The first call trains; the second neither installs, generates nor trains."""
    shown = make("train")
    accuracy = float(shown.split("validation/accuracy │")[1].split()[0])
    assert accuracy >= 0.97
    assert "exported weights" in shown
    again = make("train")
    assert "validation/accuracy" in again
    for trace in ("uv pip install", "cookiecutter --no-input", "step 10 of"):
        assert trace not in again


def make(target: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", target],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("readme", ["README.md", "recipes/README.md", "CONTRIBUTING.md"])
def test_code_fits_the_width_of_a_page_and_links_lead_to_files(readme: str):
    """As template/tests/test_documents.py asks of the documents of a project."""
    text = (REPOSITORY / readme).read_text()
    for block in re.findall(r"(?ms)^```.*?^```$", text):
        assert max(map(len, block.splitlines())) <= 100, block
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        is_there = ((REPOSITORY / readme).parent / target).exists()
        assert is_there or target.startswith("https://"), target


def test_root_folders_are_linked_file_by_file():
    """One truth: each linked file exists in the root folder, and each root file is linked."""
    for folder, place, suffix in [
        ("accelerate_configs", "accelerate_configs", "*"),
        ("recipes", "configs", "*.yaml"),
        ("recipes", "src/my_project/recipes", "*.py"),
    ]:
        there = {path.name for path in (REPOSITORY / folder).glob(suffix)} - {"copy_recipe.py"}
        linked = {
            path.name
            for path in (REPOSITORY / "template" / place).glob(suffix)
            if path.is_symlink()
        }
        assert linked == there
        for path in (REPOSITORY / "template" / place).glob(suffix):
            assert not path.is_symlink() or path.resolve().parent == REPOSITORY / folder


def test_dependencies_have_lower_bounds():
    project = tomllib.loads((REPOSITORY / "template/pyproject.toml").read_text())["project"]
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        assert all(">=" in requirement for requirement in group)


def test_what_a_recipe_needs_stands_at_its_head_and_in_its_extra():
    project = tomllib.loads((REPOSITORY / "template/pyproject.toml").read_text())["project"]
    for path in (REPOSITORY / "recipes").glob("*.yaml"):
        text = path.with_suffix(".py").read_text()
        head = tomllib.loads(re.sub(r"(?m)^# ?", "", text.split("# ///")[1].split("\n", 1)[1]))
        extra = project["optional-dependencies"][path.stem]
        assert set(head["dependencies"]) - set(project["dependencies"]) == set(extra), path.stem


def test_every_recipe_has_a_paragraph_on_your_own_data_which_a_test_runs():
    text = (REPOSITORY / "template/docs/your-own-recipe.md").read_text()
    for recipe in sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")):
        assert f"\n### {recipe}\n" in text.split("\n## Your own data\n")[1]
        (tests,) = (REPOSITORY / "template/tests").rglob(f"test_{recipe}.py")
        assert f'train_on_own_data("{recipe}"' in tests.read_text()


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_comment_at_the_head_of_a_config_launches_that_config(path: Path):
    head = re.match(r"(#.*\n)+", path.read_text())
    assert head, "a config opens with a card"
    assert max(map(len, head[0].splitlines())) <= 100
    card = re.sub(r"(?m)^# ?", "", head[0])
    commands = re.findall(r"(?m)^  ((?:.*\\\n)*.*)$", card)
    launch, predict = (shlex.split(command.replace("\\\n", " ")) for command in commands)
    accelerate_config = "accelerate_configs/cpu_2_processes.yaml"
    assert (REPOSITORY / accelerate_config).is_file()
    module = ["-m", "my_project.train", "--config", f"configs/{path.name}"]
    assert launch == ["accelerate", "launch", "--config_file", accelerate_config, *module]
    assert predict[:4] == ["python", "-m", "my_project", "predict"]
    assert predict[4] == f"runs/{path.stem}/export"
    assert len(predict) == 6
    for label in ("Hardware and time: ", "Expected: "):
        assert f"\n{label}" in card
    assert re.search(r"measured\s+\d{4}-\d\d-\d\d", card)
