"""The loop and a recipe, copied by hand into repositories that exist, as recipes/README.md says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SHORT = " --epochs null --steps 3 --evaluation.every_steps null"


def readme_blocks() -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (REPOSITORY / "recipes/README.md").read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "src"])
def test_the_loop_and_a_recipe_run_in_a_repository_that_exists(tmp_path: Path, layout: str):
    repository = tmp_path / "their-repo"
    package = repository / ("src" if layout == "src" else ".") / "your_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Their own code."""\n')
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    environment = dict(os.environ) | {
        "REPO": str(repository),
        "FOLDER": str(package),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(package.parent),
    }
    copying, launching = readme_blocks()
    subprocess.run(["bash", "-ec", copying], cwd=REPOSITORY, env=environment, check=True)
    done = subprocess.run(
        ["bash", "-ec", launching.strip() + SHORT],
        cwd=repository, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = repository / "runs/image_classification"
    assert json.loads((run / "status.json").read_text())["outcome"] == "finished"
    assert "your_package.image_classification" in (run / "config.yaml").read_text()
    assert "my_project" not in "".join(p.read_text() for p in package.rglob("*.yaml"))
