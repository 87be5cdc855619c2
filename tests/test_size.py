"""Ceilings for the size of what a user owns; decision 0011 says when one may rise.

A line of code is one that is not blank, a comment or part of a docstring, so documentation costs
nothing. The files of recipes/ belong to the user and do not count.
"""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest
import step_files

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = REPOSITORY / "template"
PACKAGE = TEMPLATE / "src/my_project"
CEILINGS = {
    "lines of train.py and all that it imports": 8_997,
    "files of train.py and all that it imports": 55,
    "lines of the package without tools/": 11_837,
    "lines of tools/": 2_727,
    "lines of template/tests": 4_733,
    "lines of template/tests and tests": 24_195,
    "settings": 60,
    "methods of a recipe": 14,
    "lines of launching/": 2_131,
    "lines of main in train.py": 40,
    "lines of train_step in train.py": 45,
    "Any per 1,000 lines without tools/ and launching/": 15,
}
STEP_FILES = 28
NO_CODE = {
    getattr(tokenize, name)
    for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
}


@cache
def code_line_numbers(path: Path) -> set[int]:
    """Return the numbers of the lines that hold code."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return lines


def code_lines(path: Path) -> int:
    """Count the lines that hold code."""
    return len(code_line_numbers(path))


def imported(module: Path) -> set[Path]:
    """Return the modules of the package that a module imports, including inside functions."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = module.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found |= {base.with_suffix(".py"), *(base / f"{name.name}.py" for name in node.names)}
    return {path for path in found if path.is_file()}


def counts() -> dict[str, int]:
    """Return all counts that have a ceiling."""
    modules = [path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts]
    tools = [path for path in modules if "tools" in path.relative_to(PACKAGE).parts]
    loop, left = set(), {PACKAGE / "train.py"}
    while left:
        loop.add(path := left.pop())
        left |= imported(path) - loop
    launching = [path for path in modules if "launching" in path.parts]
    rest = {*modules} - {*tools} - {*launching}
    uses = sum(map(uses_of_any, rest))
    tests = [
        sum(map(code_lines, f.rglob("*.py"))) for f in (TEMPLATE / "tests", REPOSITORY / "tests")
    ]
    return {
        "lines of train.py and all that it imports": sum(map(code_lines, loop)),
        "files of train.py and all that it imports": len(loop),
        "lines of the package without tools/": sum(map(code_lines, {*modules} - {*tools})),
        "lines of tools/": sum(map(code_lines, tools)),
        "lines of template/tests": tests[0],
        "lines of template/tests and tests": sum(tests),
        "settings": settings(),
        "methods of a recipe": methods(),
        "lines of launching/": sum(map(code_lines, launching)),
        "lines of main in train.py": functions()["main"],
        "lines of train_step in train.py": functions()["train_step"],
        "Any per 1,000 lines without tools/ and launching/": round(
            1000 * uses / sum(map(code_lines, rest))
        ),
    }


def functions() -> dict[str, int]:
    """Return the number of code lines of each function in train.py, by name."""
    path = PACKAGE / "train.py"
    return {
        node.name: len(
            code_line_numbers(path) & {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def uses_of_any(path: Path) -> int:
    """Count how often a module names Any."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def settings() -> int:
    """Count the fields of the dataclasses in config.py that do not hold another one of them."""
    tree = ast.parse((PACKAGE / "config.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.decorator_list]
    fields = [line for one in classes for line in one.body if isinstance(line, ast.AnnAssign)]
    return sum(not ast.unparse(field.annotation).endswith("Config") for field in fields)


def methods() -> int:
    """Count the methods of a recipe: the keys of PARAMETERS in recipe.py."""
    for node in ast.parse((PACKAGE / "recipe.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARAMETERS":
            assert isinstance(node.value, ast.Dict)
            return len(node.value.keys)
    return 0


@pytest.mark.parametrize("what", CEILINGS)
def test_nothing_grows_above_its_ceiling(what):
    found = counts()[what]
    assert 0 < found <= CEILINGS[what], f"{what}: {found}"


@pytest.mark.slow
def test_a_step_passes_few_files(tmp_path, monkeypatch):
    from world import run_world

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = run_world(2, step_files.entered, tmp_path)[0]
    assert {"train.py", "checkpoint/saving.py", "loading/seeding.py"} <= {*found}
    assert len(found) <= STEP_FILES, found
