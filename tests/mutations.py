"""Mutation testing: does the test suite find as much as the one at a9ab39b did?

    python tests/mutations.py draw            # write tests/mutations/*.patch; say which apply
    python tests/mutations.py try --tree old  # the suite of a9ab39b; appends to results.jsonl
    python tests/mutations.py try --tree new  # the suite of HEAD; both can be stopped and go on
    python tests/mutations.py table           # caught by both, by one, by none

`draw` lists every mutation (an operator swapped, a constant changed, a condition negated; a `not`,
a call, a named argument, a `return` or a `break` gone) of FILES at a9ab39b, shuffles them with a
fixed seed, so that a file weighs by its size, and keeps one per line. Not drawn are texts for
people (errors, logs, f-strings, docstrings), annotations and decorators, what only a GPU runs, what
NEUTRAL matches (most are waiting times and sizes of buffers), ints above 100, and positional
arguments dropped (nearly always a TypeError).

`try` takes the first 60 patches that also apply to the working tree, wherever their lines have
moved. Where a statement was rewritten, carried/ may hold its mutation by the same name, made by
hand against the new code; a patch whose code is gone leaves its place to the next.

The quick tests that TARGETS names come first ("targeted"), then the other quick ones ("others");
survivors get the slow tests that TARGETS names ("slow"). Each of these stages has --minutes, and a
timeout counts as caught: give more where others use the machine, or the tests would seem better.
A line of results.jsonl is the result of one stage; one that is deleted is tried again.
"""

import argparse
import ast
import difflib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BASE, SEED, DRAWN, TRIED = "a9ab39b", 25, 150, 60
REPOSITORY = Path(__file__).resolve().parents[1]
PATCHES = REPOSITORY / "tests/mutations"
RESULTS = PATCHES / "results.jsonl"
WORK = REPOSITORY / "build/mutations"
PACKAGE = "template/src/my_project"
STEP = ("train", "recipe", "state", "step_sums", "optim", "devices", "collectives", "sharding")
FILES = re.compile(rf"{PACKAGE}/({'|'.join(STEP)}|stopping|checkpoint/\w+|loading/\w+)\.py")
# Words in the names of the test files that are most likely to catch a mutation of these files.
TARGETS = {
    "train|state|step_sums": "same_curve evaluation resume optim records stopping overfit",
    "recipe": "contract structure config",
    "optim": "optim fp16 same_curve sharded",
    "devices|collectives": "accelerate_configs contract process launch config resume",
    "sharding": "sharded fsdp_on_cpu blocks fp16 optim",
    "stopping": "stopping process doctor launch_node resume",
    "checkpoint": "checkpoint damage resume sharded export evaluation",
    "loading": "loader streams permutation prepare_once same_curve resume overfit",
}
STAGES = ("targeted", "others", "slow")
CAUGHT = ("caught", "timeout")

SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
TEXTS = re.compile(r"\b(print\w*|filterwarnings|sleep|log_\w+|\w*Error)$|^(logger|warnings)\.")
GPU_ONLY = re.compile(r"cuda|cublas|mps|gpu|xpu|nccl|pin_memory|event\.", re.IGNORECASE)
NEUTRAL = re.compile(
    "seconds|timeout|poll|monotonic|BLOCK|buffer|chunk|indent|strict|encoding|[GM]iB"
)
NOT_NUMBERS = re.compile(r"""f?["']|set\(|[({\[]|.*keys\(\)$""")  # operands
NOT_MUTATED = ("annotation", "returns", "decorator_list")

Edit = tuple[int, int, str, str]  # start and end in bytes, the new text, what is done


class Sites(ast.NodeVisitor):
    """List the mutations of a source."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self.edits: list[Edit] = []
        self.statement = ""
        self.visit(ast.parse(source))

    def span(self, node: Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def replace(self, node: ast.AST, new: str, what: str) -> None:
        self.edits.append((*self.span(node), new, what))

    def swap(self, left: ast.AST, operator: ast.AST, right: ast.AST) -> None:
        """Swap the operator between two operands."""
        old, new = SWAPS.get(type(operator), ("", ""))
        start, end = self.span(left)[1], self.span(right)[0]
        places = [*re.finditer(rf"(?<!\w){re.escape(old)}(?!\w)", self.source[start:end].decode())]
        is_boundary = new in ("<", "<=", ">", ">=")
        if old and len(places) == 1 and not (is_boundary and NEUTRAL.search(self.statement)):
            begin, stop = (start + place for place in places[0].span())
            self.edits.append((begin, stop, new, f"`{old}` to `{new}`"))

    def visit(self, node: ast.AST) -> None:
        """Add the mutations of a node and of what it holds, but for what is exempt."""
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.Call) and TEXTS.search(ast.unparse(node.func)):
            return
        if isinstance(node, ast.keyword) and NEUTRAL.search(node.arg or ""):
            return
        if isinstance(node, ast.stmt):
            start, end = self.span(node)
            body = getattr(node, "body", None)
            self.statement = self.source[start : self.span(body[0])[0] if body else end].decode()
            if GPU_ONLY.search(self.statement):
                for part in getattr(node, "orelse", ()):
                    self.visit(part)
                return
        self.add(node)
        for field, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST) and field not in NOT_MUTATED:
                    self.visit(part)

    def add(self, node: ast.AST) -> None:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                self.swap(left, operator, right)
            case ast.BinOp(left=left, op=operator, right=right):
                if not any(NOT_NUMBERS.match(self.text(side)) for side in (left, right)):
                    self.swap(left, operator, right)
            case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as operator, value=value):
                self.swap(target, operator, value)
            case ast.BoolOp(op=operator, values=values):
                for left, right in itertools.pairwise(values):
                    self.swap(left, operator, right)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.replace(node, f"({self.text(operand)})", "`not` removed")
            case ast.Constant(value=bool() as value):
                self.replace(node, str(not value), f"`{value}` to `{not value}`")
            case ast.Constant(value=int() as value):
                if value <= 100 and not NEUTRAL.search(self.statement):
                    self.replace(node, str(value + 1), f"`{value}` to `{value + 1}`")
            case ast.Expr(value=ast.Call() as call):
                if not TEXTS.search(ast.unparse(call.func)):
                    self.replace(node, "pass", "the call deleted")
            case ast.Return(value=ast.expr() as value):
                if ast.unparse(value) not in ("None", "False", "''", "0", "[]"):
                    self.replace(value, "None", "`None` returned")
            case ast.Break() | ast.Continue():
                self.replace(node, "pass", f"`{self.text(node)}` deleted")
            case ast.keyword(arg=str()):
                start, end = self.span(node)
                comma = re.match(rb"(,\s*)?", self.source[end:])
                end += comma.end() if comma else 0
                self.edits.append((start, end, "", f"argument `{node.arg}` dropped"))
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.UnaryOp):
                self.replace(test, f"not ({self.text(test)})", "the condition negated")


# ---- draw and apply ------------------------------------------------------------------------------
def git(*arguments: str, folder: Path = REPOSITORY) -> str:
    """Return what a git command prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def draw() -> None:
    """Write the patches, and say which apply to which tree."""
    found = []
    for path in git("ls-tree", "-r", "--name-only", BASE, PACKAGE).split():
        if FILES.fullmatch(path):
            source = git("show", f"{BASE}:{path}").encode()
            found += [(path, source, edit) for edit in Sites(source).edits]
    random.Random(SEED).shuffle(found)
    PATCHES.mkdir(exist_ok=True)
    lines = set()
    for path, source, (start, end, new, what) in found:
        line = source[:start].count(b"\n") + 1
        if (path, line) in lines or len(lines) == DRAWN:
            continue
        lines.add((path, line))
        old, changed = source.decode(), (source[:start] + new.encode() + source[end:]).decode()
        both = [text.splitlines(keepends=True) for text in (old, changed)]
        diff = difflib.unified_diff(both[0], both[1], f"a/{path}", f"b/{path}")
        name = path.removeprefix(f"{PACKAGE}/").removesuffix(".py").replace("/", "_")
        (PATCHES / f"{len(lines):03}_{name}_{line}.patch").write_text(f"{what}\n\n{''.join(diff)}")
    print(f"{len(lines)} of {len(found)} mutations drawn; {len(applying())} apply to this tree")


def mutated(patch: Path, tree: Path) -> tuple[Path, str] | None:
    """Return the file of a tree that a patch changes, and its new text.

    The lines that change are looked for in the whole package, for they may have moved or be
    indented otherwise; at least half of the lines around them must be there.
    """
    header, _, body = patch.read_text().partition("\n@@")
    path = header.rpartition("b/")[2].strip()
    hunk = body.splitlines()[1:]
    places = [i for i, line in enumerate(hunk) if line[0] != " "]
    core = hunk[places[0] : places[-1] + 1]
    around = {line.strip() for line in hunk[: places[0]] + hunk[places[-1] + 1 :]} - {""}
    old, new = ([line[1:] for line in core if line[0] in signs] for signs in (" -", " +"))
    best: list[tuple[Any, ...]] = []
    for file in sorted((tree / PACKAGE).rglob("*.py")):
        lines = file.read_text().splitlines()
        stripped = [line.strip() for line in lines]
        for i in range(len(lines)):
            if stripped[i : i + len(old)] == [line.strip() for line in old]:
                near = {*stripped[max(0, i - 4) : i], *stripped[i + len(old) : i + len(old) + 4]}
                if (score := len(near & around)) * 2 >= len(around):
                    best.append((score, file.name == Path(path).name, file, i, lines))
    best.sort(key=lambda place: place[:2])
    if not best or (len(best) > 1 and best[-1][:2] == best[-2][:2]):
        return None
    _, _, file, i, lines = best[-1]
    indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
    drawn_indent = old[0][: len(old[0]) - len(old[0].lstrip())]
    lines[i : i + len(old)] = [indent + line.removeprefix(drawn_indent) for line in new]
    text = "\n".join(lines) + "\n"
    compile(text, str(file), "exec")
    return file, text


def applied(patch: Path, suite: str, tree: Path) -> tuple[Path, str] | None:
    """Return what a patch makes of the old tree or the new one, there by hand where it must be."""
    carried = PATCHES / "carried" / patch.name
    return mutated(carried if suite == "new" and carried.exists() else patch, tree)


def applying() -> list[Path]:
    """Return the patches that apply to the working tree; the first of them are tried."""
    return [p for p in sorted(PATCHES.glob("*.patch")) if applied(p, "new", REPOSITORY)]


# ---- try -----------------------------------------------------------------------------------------
def worktree(suite: str) -> Path:
    """Return a clean tree of the old commit or of HEAD."""
    tree = WORK / suite
    if not tree.exists():
        git("worktree", "add", "--force", "--detach", str(tree), BASE)
        (tree / ".venv").symlink_to(REPOSITORY / ".venv")
    commit = BASE if suite == "old" else git("rev-parse", "HEAD").strip()
    git("checkout", "--quiet", "--force", "--detach", commit, folder=tree)
    git("clean", "-dfq", "--exclude", ".venv", folder=tree)
    return tree


def test_files(tree: Path, patch: Path, stage: str) -> list[str]:
    """Return the arguments that choose a stage's tests."""
    source = Path(re.findall(r"^--- a/(.*)", patch.read_text(), re.MULTILINE)[0])
    kind = source.parent.name if source.parent.name in TARGETS else source.stem
    words = next(words for stems, words in TARGETS.items() if re.fullmatch(stems, kind))
    named = {f"test_{word}.py" for word in words.split()}
    folders = {"tests": tree / "template/tests"}  # as in in_project.py
    folders |= {f"tests/{name}": tree / f"tests/{name}" for name in ("loop", "tools")}
    files = sorted(
        f"{name}/{path.relative_to(folder)}"
        for name, folder in folders.items()
        for path in folder.rglob("test_*.py")
        if (path.name in named) == (stage != "others")
    )
    return ["-m", f"{'' if stage == 'slow' else 'not '}slow and not gpu", *files]


def pytest(tree: Path, until: float, *arguments: str) -> tuple[int | None, str]:
    """Run pytest; return its exit code, or None at the end of the time, and what it printed."""
    temporary = tempfile.mkdtemp(prefix="mutant-")  # a short path: it holds sockets
    environment = os.environ | {"MUTANT": temporary, "TMPDIR": temporary}
    python = str(REPOSITORY / ".venv/bin/python")
    in_project = tree / "tests/in_project.py"
    started = [str(in_project), "template"] if in_project.exists() else ["-m", "pytest", "-q"]
    output = Path(temporary, "output")
    code, left = None, max(1.0, until - time.monotonic())
    with output.open("w") as file, suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            [python, *started, "-x", "-n2", "--dist=worksteal", *arguments],
            cwd=tree if in_project.exists() else tree / "template",
            env=environment,
            stdout=file,
            stderr=file,
            timeout=left,
            check=False,
        ).returncode
    for path in Path("/proc").glob("[0-9]*/environ"):  # end all that it has started, orphans too
        with suppress(OSError):
            if f"MUTANT={temporary}\0".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    printed = output.read_text(errors="replace")
    shutil.rmtree(temporary, ignore_errors=True)
    return code, printed


def attempt(tree: Path, patch: Path, suite: str, stage: str, until: float) -> dict[str, str]:
    """Return the outcome of a stage, the test that caught the mutant, and the unstable ones.

    A failure counts where the test fails twice with the mutation and passes without.
    """
    mutant = applied(patch, suite, tree)
    assert mutant, f"{patch.name} does not apply to {tree}"
    original = mutant[0].read_text()
    unstable: list[str] = []

    def result(outcome: str, test: str = "") -> dict[str, str]:
        return {"outcome": outcome, "test": test, "unstable": " ".join(unstable)}

    arguments = test_files(tree, patch, stage)
    while True:
        mutant[0].write_text(mutant[1])
        but = [f"--deselect={test}" for test in unstable]
        code, printed = pytest(tree, until, *arguments, *but)
        if code in (0, 5):  # 5: no test has these marks
            return result("survived")
        failed = re.search(r"^(?:FAILED|ERROR) (tests.+?)(?: - .*)?$", printed, re.MULTILINE)
        test = failed[1] if failed else ""
        if code and (not test or test in unstable):
            return result("error", "".join(printed.splitlines()[-1:]))
        if code:
            code, _ = pytest(tree, until, *arguments[:2], test)
        if code is None:
            return result("timeout", test)
        mutant[0].write_text(original)
        if code and pytest(tree, until + 600, *arguments[:2], test)[0] == 0:
            return result("caught", test)
        unstable.append(test)


def results() -> list[dict[str, Any]]:
    """Read results.jsonl."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def try_all(suite: str, stages: list[str], minutes: float, first: int) -> None:
    """Try the patches that have no result yet, stage by stage."""
    for stage, patch in itertools.product(stages, applying()[:TRIED]):
        before = [r for r in results() if (r["patch"], r["suite"]) == (patch.name, suite)]
        is_done = any(r["outcome"] in CAUGHT or r["stage"] == stage for r in before)
        if is_done or int(patch.name[:3]) < first:
            continue
        tree, started = worktree(suite), time.monotonic()
        result: dict[str, Any] = {"patch": patch.name, "suite": suite, "stage": stage}
        result |= attempt(tree, patch, suite, stage, started + minutes * 60)
        result["seconds"] = round(time.monotonic() - started)
        result["machine"] = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        result["commit"] = git("rev-parse", "--short=7", "HEAD", folder=tree).strip()
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


def table() -> None:
    """Print how many each suite has caught, and the names but where both have."""
    last = {(result["patch"], result["suite"]): result for result in results()}
    names: dict[str, list[str]] = {}
    for patch in applying()[:TRIED]:
        says = []
        for suite in ("old", "new"):
            result = last.get((patch.name, suite), {"outcome": "not tried", "stage": ""})
            is_open = result["outcome"] == "survived" and result["stage"] != STAGES[-1]
            says.append(f"{suite}: {'survived so far' if is_open else result['outcome']}")
        names.setdefault(", ".join(says), []).append(patch.name)
    for what, patches in sorted(names.items()):
        print(f"{len(patches):3}  {what}")
        if what != "old: caught, new: caught":
            print("".join(f"       {name}\n" for name in patches), end="")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("draw", "try", "table"))
    parser.add_argument("--tree", choices=("old", "new"), default="old")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of a patch")
    given = parser.parse_args()
    if given.command == "try":
        try_all(given.tree, given.stages, given.minutes, given.first)
    else:
        {"draw": draw, "table": table}[given.command]()


if __name__ == "__main__":
    main()
