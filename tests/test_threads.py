"""docs/accelerate-threads.md has the results of tests/threads.py, and names tests that exist."""

import ast
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from shell import succeed

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "docs/accelerate-threads.md").read_text(encoding="utf-8")
TESTS = [p for d in ("tests", "template/tests") for p in (REPOSITORY / d).rglob("test_*.py")]
ROW = r"(?m)^\| (?:\[#(\d+)\]\(\S+/issues/\1\)|`(\w+)`) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$"
ROWS = {thread or name: (theirs, here) for thread, name, theirs, here in re.findall(ROW, TEXT)}


def test_every_test_that_is_named_exists():
    assert len(ROWS) == 26
    assert len(re.findall(r"(?m)^\| ", TEXT)) == 1 + len(ROWS), "a row that is not understood"
    for thread, (_, here) in ROWS.items():
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", here)
        assert named or here.startswith("not here"), thread
        for file, function in named:
            (path,) = (path for path in TESTS if path.name == file)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, thread


@pytest.mark.slow
def test_the_document_says_what_the_script_measures():
    for library in ("transformers", "wandb"):
        pytest.importorskip(library)
    printed = succeed(sys.executable, REPOSITORY / "tests/threads.py")
    lines = [line.split(" | ") for line in printed.splitlines()]
    measured = {thread: rest for thread, *rest in lines}
    assert measured.keys() == {t for t, (theirs, _) in ROWS.items() if theirs != "read"}
    for thread, (_, expected, _, ours) in measured.items():
        assert ours.strip() in (expected, ""), thread
        assert ROWS[thread][1].startswith("right; ") == bool(ours.strip()), thread
    if f"accelerate {version('accelerate')} |" not in TEXT:
        pytest.skip("the table is of another version of accelerate: measure again")
    for thread, (marker, _, theirs, _) in measured.items():
        assert ROWS[thread][0] == f"{marker}: {theirs}", thread
