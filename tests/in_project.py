"""Run the tests of the loop and the tools on a project with any names.

    python tests/in_project.py template -m "not slow and not gpu"
    make test-loop PROJECT=~/leaf-scanner ARGS="-k resume"

A project has only the tests that its owner needs for their own recipe; tests/loop and tests/tools
have the others. All of them are put into a folder of links to the project, in build/, with the
project's names instead of the template's. All other arguments are passed to pytest.
"""

import os
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = REPOSITORY / "template"
POST_GEN = runpy.run_path(str(REPOSITORY / "hooks/post_gen_project.py"))


def prepared(project: Path) -> Path:
    """Make the folder in which to run pytest; return it."""
    packages = [path.parent for path in project.glob("src/*/train.py")]
    if len(packages) != 1:
        print(f"error: {project} is not a generated project: give its folder.", file=sys.stderr)
        raise SystemExit(2)
    package = packages[0]
    slug = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
    names = {"package_name": package.name, "project_slug": slug}
    words = {POST_GEN["DEFAULTS"][question]: name for question, name in names.items()}

    folder = REPOSITORY / "build/in_project" / slug
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tests").mkdir(parents=True)
    for path in project.iterdir():
        if path.name not in ("tests", "runs", ".venv"):
            (folder / path.name).symlink_to(path)

    tests = {"": TEMPLATE / "tests", "loop": REPOSITORY / "tests/loop"}
    if (package / "tools").is_dir():
        tests["tools"] = REPOSITORY / "tests/tools"
    for name, source in tests.items():
        for file in source.rglob("*.py"):
            recipe = file.stem.removeprefix("test_")
            if file.parent.name == "recipes" and not (package / f"recipes/{recipe}.py").exists():
                continue
            link = folder / "tests" / name / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text(encoding="utf-8")
            filled = POST_GEN["replace"](text, words)
            if filled == text:
                link.symlink_to(file)
            else:
                link.write_text(filled, encoding="utf-8")
    return folder


if __name__ == "__main__":
    os.chdir(prepared(Path(sys.argv[1]).resolve()))
    helpers = ["--override-ini", "pythonpath=src tests tests/loop"]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", *helpers, *sys.argv[2:]])
