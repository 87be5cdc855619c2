"""What the documents say is there: files, links, messages. Their commands fit a page, and run."""

import random
import re
import shutil
from pathlib import Path

import pytest
from documents import (
    DOCUMENTS,
    PROJECT,
    blocks,
    commands,
    run_as_typed,
    text_of,
    train_as_typed,
)
from runs import status

SOURCE = PROJECT / "src/my_project"
MORE = len(SOURCE.name) - 10  # letters of the package's name than in the template


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_or_a_heading(document):
    text = text_of(document)
    headings = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", text)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            path = (PROJECT / document).parent / target.partition("#")[0]
            assert path.exists(), target
            assert path.resolve().is_relative_to(PROJECT.resolve()), f"{target} is not of a project"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_fits_the_width_of_a_page(document):
    for block in re.findall(r"(?ms)^```.*?^```$", text_of(document)):
        for line in block.splitlines():
            assert len(line) - MORE * line.count(SOURCE.name) <= 100, line


@pytest.mark.skipif(
    not (SOURCE / "loading").is_dir(), reason="the modules do not lie in subpackages yet"
)
@pytest.mark.parametrize("document", ["AGENTS.md", "docs/how-a-step-works.md"])
def test_every_module_that_is_named_is_there(document):
    if not (PROJECT / document).exists():
        pytest.skip("not written yet")
    named = re.findall(r"`(?:src/my_project/)?([a-z_/]+(?:\.py|/))`", text_of(document))
    assert named
    for name in named:
        assert (SOURCE / name).exists() or (PROJECT / name).exists(), name


# ---- your own recipe -----------------------------------------------------------------------------
OWN = text_of("docs/your-own-recipe.md", "## A recipe in 40 lines")


def write_flowers(folder: Path) -> None:
    """Write a table of two classes that a small network can tell apart, and not by one number."""
    draw = random.Random(0)
    lines = ["petal,sepal,name"]
    for _ in range(400):
        petal, sepal = draw.uniform(-1, 1), draw.uniform(-1, 1)
        lines.append(f"{petal},{sepal},{'rose' if petal * sepal > 0 else 'lily'}")
    (folder / "data").mkdir()
    (folder / "data/flowers.csv").write_text("\n".join(lines))


def write_own(recipes: Path, configs: Path) -> None:
    (recipe,), (config,) = blocks(OWN, "python"), blocks(OWN, "yaml")
    (recipes / "table.py").write_text(recipe)
    (configs / "table.yaml").write_text(config)


def test_the_recipe_of_the_document_learns(tmp_path, monkeypatch):
    import my_project.recipes

    monkeypatch.chdir(tmp_path)
    for folder in ("recipes", "configs"):
        (tmp_path / folder).mkdir()
    write_flowers(tmp_path)
    write_own(tmp_path / "recipes", tmp_path / "configs")
    where = [*my_project.recipes.__path__, str(tmp_path / "recipes")]
    monkeypatch.setattr(my_project.recipes, "__path__", where)
    config = train_as_typed(commands(OWN)[0])
    assert status(config)["result"]["validation/loss"] < 0.2, "by chance it were ln 2 = 0.7"
    (recipe,) = blocks(OWN, "python")
    assert len([line for line in recipe.splitlines() if line]) <= 40


@pytest.mark.slow
def test_the_commands_of_your_own_recipe_run_as_they_stand(tmp_path):
    for name in ("src", "configs", "accelerate_configs"):
        shutil.copytree(PROJECT / name, tmp_path / name)
    write_flowers(tmp_path)
    write_own(tmp_path / "src/my_project/recipes", tmp_path / "configs")
    for command in commands(OWN):
        done = run_as_typed(command, tmp_path, PYTHONPATH=str(tmp_path / "src"))
        assert done.returncode == 0, done.stdout + done.stderr
    for run in ("table", "wide"):
        assert (tmp_path / "runs" / run / "export/model.safetensors").is_file()
