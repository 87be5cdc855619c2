"""The optional rooms of a project: what their owner may delete, and how.

    python tests/rooms.py            print the table in template/AGENTS.md
    python tests/rooms.py PROJECT commands provenance
                                     delete rooms of a generated project, as a person would by hand

Each room is an entry of ROOMS. tests/test_rooms.py deletes each one alone, and all together.
"""

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_LINES = 10  # maximum number of lines in other files that are deleted with a room
FEW_LINES = 3  # the same, for rooms that the recorder calls


@dataclass(frozen=True, kw_only=True)
class Room:
    """What is deleted with an optional room."""

    name: str
    goes: str
    """What the project no longer does, as a sentence."""
    files: tuple[str, ...]
    """Paths of files and folders in the project; those in the package lack src/my_project/."""
    word: str = ""
    """A regular expression. Each line of the files in `lines` that matches it is deleted; after
    that, no code of the core matches it. "" for a room that no other module uses."""
    lines: dict[str, int] = field(default_factory=dict)
    """Files, and how many of their lines match `word`."""
    settings: tuple[str, ...] = ()
    """Classes and fields of config.py, which are deleted with their docstrings."""
    most: int = MOST_LINES
    """The maximum number of lines in other files that are deleted with the room."""
    tests: tuple[str, ...] = ()
    """The test files of the room, below tests/."""
    needs: tuple[str, ...] = ()
    """Rooms that this one uses: it is deleted with any of them."""


ROOMS = (
    Room(
        name="tools",
        goes="There is no `runs`, `report`, `doctor`, `planner` or `preflight`.",
        files=("tools/",),
    ),
    Room(
        name="launching",
        goes="There is no `train` (or `make train`), no `launch`, no restart in place and no"
        " summary at the end; `accelerate launch -m my_project.train` and torchrun still work. The"
        " scripts in launch/ and the planner need `launching/`, so they are deleted too.",
        files=("launching/", "launch.py", "tools/planner.py", "tools/simulate.py", "launch/"),
        word='launching|"launch": "launch"',
        lines={"__main__.py": 2},
        tests=("test_launch.py",),
    ),
    Room(
        name="commands",
        goes="There are no commands `evaluate` (or `make evaluate`), `predict` or `export`, and no"
        " protection from a stranger's folder of weights. Runs still export their weights.",
        files=("commands.py", "weights.py", "safety/trust.py", "safety/search_path.py"),
        word=r"search_path|\bcommands\b",
        lines={"__main__.py": 8},
        tests=("test_commands.py",),
    ),
    Room(
        name="follow",
        goes="There is no `evaluate --follow`, which evaluates checkpoints while a run trains;"
        " `report` still shows its earlier results.",
        files=("follow.py",),
        word=r"--follow|follow_run|arguments\.follow",
        lines={"commands.py": 5},
        tests=("test_follow.py",),
        needs=("commands",),
    ),
    Room(
        name="model_card",
        goes="export/ has no README.md.",
        files=("model_card.py",),
        word="model_card",
        lines={"checkpoint/exporting.py": 3, "tests/runs.py": 1},
        tests=("test_model_card.py",),
        needs=("commands",),  # the card has code that loads the weights
    ),
    Room(
        name="mirror",
        goes="A lost disk loses the run, all nodes need a shared disk, and commands accept no URL.",
        files=("mirror/",),
        word=r"[Mm]irror",
        lines={
            "train.py": 6,
            "config.py": 3,
            "ranks.py": 1,
            "run_files.py": 3,
            "run_folder.py": 2,
            "checkpoint/saving.py": 13,
            "checkpoint/resuming.py": 2,
            "follow.py": 3,
            "launching/train.py": 1,
        },
        settings=("mirror", "mirror_seconds"),
        tests=("test_mirror.py",),
        most=40,  # runs save to it and resume from it, and commands read it
    ),
    Room(
        name="provenance",
        goes="run.json does not record the code, packages and command of a run, no start keeps the"
        " code that it ran, there is no `runs --reproduce`, and preflight compares no packages.",
        files=("provenance.py", "tools/reproduce.py"),
        word=r"provenance|\binstalled\(|code_digest|reproduce",
        lines={
            "run_folder.py": 5,
            "manifest.py": 1,
            "checkpoint/saving.py": 1,
            "checkpoint/exporting.py": 1,
            "launching/launch.py": 4,
            "tools/preflight.py": 3,
            "tools/runs.py": 5,
        },
        most=20,  # it is in checkpoints and exports too, and launchers compare the code
    ),
    Room(
        name="ema",
        goes="No average of the weights is kept.",
        files=("ema.py",),
        word=r"\bema\b|EMA|\bema_|_ema\b",
        lines={
            "train.py": 8,
            "checkpoint/saving.py": 9,
            "checks/recipe.py": 4,
            "commands.py": 4,
            "weights.py": 3,
            "launching/train.py": 2,
            "tools/simulate.py": 8,
        },
        settings=("ema_decay",),
        tests=("test_ema.py",),
        most=40,  # it is saved, resumed, evaluated and exported
    ),
    Room(
        name="watchdog",
        goes="A run that hangs does not end itself, and nothing shows where it hangs.",
        files=("watchdog.py",),
        word="Watchdog",
        lines={"train.py": 3},
        tests=("test_watchdog.py",),
    ),
    Room(
        name="memory",
        goes="If a micro-batch does not fit in memory, the run ends, and no smaller one is tried.",
        files=("memory.py", "launching/memory.py"),
        word=r"memory import|import memory|memory_explained|\bmemory\.\w+\(|is_loss_a_sum"
        "|when_loss_is_no_sum"
        "|next_micro_batch|lowered_micro_batch",
        lines={
            "train.py": 2,
            "failures.py": 1,
            "run_folder.py": 2,
            "checks/recipe.py": 2,
            "launching/launch.py": 9,
            "launching/attempts.py": 2,
            "launching/nodes.py": 1,
        },
        most=19,  # the launchers of all nodes agree on the size
    ),
    Room(
        name="statistics",
        goes="On several processes, the running statistics of BatchNorm are those of rank 0.",
        files=("statistics.py",),
        word=r"\bstatistics\b|exact_statistics",
        lines={"train.py": 8},
    ),
    Room(
        name="streams",
        goes="Only map-style training data works.",
        files=("loading/streams.py",),
        word="is_stream|of_stream|of a stream|stream_states|StreamBatches|reads_streams",
        lines={
            "memory.py": 1,
            "train.py": 6,
            "state.py": 1,
            "contract.py": 2,
            "loading/layout.py": 7,
            "checks/agreement.py": 3,
            "checks/data.py": 4,
            "checks/recipe.py": 3,
            "tools/simulate.py": 5,
        },
        most=40,
    ),
    Room(
        name="sharding",
        goes="Only DDP works; an accelerate config with FSDP is refused.",
        files=("sharding.py", "tools/planner.py", "tools/simulate.py"),
        word="sharding",
        lines={
            "accelerator.py": 9,
            "parallel.py": 6,
            "evaluate.py": 3,
            "commands.py": 5,
            "records/log.py": 1,
        },
        needs=("blocks",),
        tests=("test_sharding.py",),
        most=40,
    ),
    Room(
        name="blocks",
        goes="No activations are recomputed. With torch.compile, accelerate compiles the whole"
        " model, in evaluations too.",
        files=("blocks.py",),
        word=r"(?<!model)_blocks|\bblocks_|\bblocks import",
        lines={"parallel.py": 3, "records/performance.py": 2},
        settings=("activation_checkpointing",),
    ),
    Room(
        name="checks",
        goes="Mistakes in recipes, data and code are no longer noticed.",
        files=("checks/",),
        word=r"\b[Cc]hecks\b",
        lines={"train.py": 10},
        settings=("ChecksConfig", "checks"),
        most=12,
    ),
    Room(
        name="screen",
        goes="A terminal shows the lines of the log, without a progress bar.",
        files=("records/screen.py",),
        word="[Ss]creen",
        lines={"records/recorder.py": 3},
        most=FEW_LINES,
    ),
    Room(
        name="trackers",
        goes="TensorBoard and other trackers get no records.",
        files=("records/trackers.py",),
        word=r"Trackers|trackers=\[\]",
        lines={"records/recorder.py": 3, "tests/runs.py": 1},
        settings=("trackers",),
        most=FEW_LINES + 1,  # the tests name the setting
    ),
    Room(
        name="profiling",
        goes="No steps are profiled.",
        files=("records/profiling.py",),
        word="Profiler",
        lines={"records/recorder.py": 3},
        settings=("ProfileConfig", "profile"),
        most=FEW_LINES,
    ),
    Room(
        name="performance",
        goes="Records do not show how fast the run is, or how the speed of ranks differs.",
        files=("records/performance.py",),
        word="[Pp]erformance",
        lines={"records/recorder.py": 3},
        settings=("peak_tflops",),
        most=FEW_LINES,
    ),
    Room(
        name="samples",
        goes="Evaluations show no predictions for samples.",
        files=("records/samples.py",),
        word=r"import samples|samples\.show",
        lines={"train.py": 2},
        settings=("samples",),
        most=FEW_LINES,
    ),
)
BY_NAME = {room.name: room for room in ROOMS}


# ---- the table -----------------------------------------------------------------------------------
def table() -> str:
    """Return the table of AGENTS.md."""
    rows = [
        ["Room", "Delete", "Delete the lines with", "Needs", "Effect"],
        ["---"] * 5,
    ]
    for room in sorted(ROOMS, key=lambda room: room.name):
        files = [*room.files, *(f"tests/{name}" for name in room.tests)]
        words = " or ".join(map(_code, room.word.split("|"))) if room.word else "none"
        places = ", ".join(f"`{file}` ({count})" for file, count in room.lines.items())
        lines = f"{words} in {places}" if places else "none"
        if room.settings:
            names = ", ".join(map(_code, room.settings))
            lines = f"{lines}; in `config.py` {names}"
        rows.append(
            [room.name, ", ".join(map(_code, files)), lines, ", ".join(room.needs), room.goes]
        )
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def _code(text: str) -> str:
    return f"`{text.strip()}`"


# ---- deleting ------------------------------------------------------------------------------------
def with_dependents(names: Iterable[str]) -> list[Room]:
    """Return rooms and the rooms that need them, in the order of ROOMS."""
    gone = {*names}
    while more := {room.name for room in ROOMS if gone.intersection(room.needs)} - gone:
        gone |= more
    return [room for room in ROOMS if room.name in gone]


def package_of(project: Path) -> Path:
    """Return the folder of a project's package."""
    (path,) = project.glob("src/*/train.py")
    return path.parent


def path_of(file: str, project: Path) -> Path:
    """Return the path of a file or folder of a room."""
    is_of_package = not file.startswith(("launch/", "tests/"))
    return (package_of(project) if is_of_package else project) / file


def delete(project: Path, names: Iterable[str]) -> None:
    """Delete rooms of a project; sort its imports and format it.

    Raises:
        ValueError: the number of lines that match differs from that in the room's entry.
    """
    rooms = with_dependents(names)
    for room in rooms:
        for file, count in room.lines.items():
            path = path_of(file, project)
            if path.exists():
                matches = len(matching(path, room.word))
                if matches != count:
                    raise ValueError(f"{room.name}: {matches} lines match in {file}, not {count}")
    for room in rooms:
        for path in [path_of(file, project) for file in (*room.files, *own_tests(room))]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for file in sorted({file for room in rooms for file in room.lines}):
        path = path_of(file, project)
        if path.exists():
            words = [room.word for room in rooms if file in room.lines]
            gone = {number for word in words for number in matching(path, word)}
            path.write_text(without(path.read_text(encoding="utf-8"), gone), encoding="utf-8")
    names = {name for room in rooms for name in room.settings}
    path = package_of(project) / "config.py"
    path.write_text(without_settings(path.read_text(encoding="utf-8"), names), encoding="utf-8")
    for command in (["check", "--fix"], ["format"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", "."], cwd=project, check=False
        )


def own_tests(room: Room) -> list[str]:
    """Return the paths of a room's test files in the project."""
    return [f"tests/{name}" for name in room.tests]


def matching(path: Path, word: str) -> list[int]:
    """Return the indices of the lines that match."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines) if re.search(word, line)]


def without(text: str, gone: set[int]) -> str:
    """Return a text without some lines; if one opens a block, the rest of the block is dedented.

    Args:
        text: Python code.
        gone: the indices of the lines.
    """
    kept: list[str] = []
    opened: list[int] = []  # indents of the blocks whose first line was deleted
    for number, line in enumerate(text.splitlines(keepends=True)):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            opened = [outer for outer in opened if outer < indent]
        if number in gone:
            if _code_of(line).endswith(":"):
                opened.append(indent)
        else:
            kept.append(line[4 * len(opened) :] if line.strip() else line)
    return "".join(kept)


def without_settings(text: str, names: set[str]) -> str:
    """Return config.py without some classes and fields, and the docstrings of the fields."""
    gone: set[int] = set()
    tree = ast.parse(text)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for body in bodies:
        for node, after in zip(body, [*body[1:], None], strict=True):
            is_class = isinstance(node, ast.ClassDef) and node.name in names
            is_field = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in names
            if is_class or (is_field and body is not tree.body):
                decorators = getattr(node, "decorator_list", [])
                first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
                last = after if is_field and _is_docstring(after) else node
                gone |= {*range(first - 1, last.end_lineno or first)}
    lines = text.splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines) if number not in gone)


def _is_docstring(node: ast.stmt | None) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text and isinstance(node.value.value, str)


def _code_of(line: str) -> str:
    """Return a line without its comment, which may follow a block's colon."""
    return re.sub(r"\s#.*", "", line).strip()


# ---- what is left --------------------------------------------------------------------------------
def core(package: Path) -> list[Path]:
    """Return the modules that belong to no room, without the recipes."""
    optional = {package / file for room in ROOMS for file in room.files}
    return [
        path
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] != "recipes"
        and not optional.intersection([path, *path.parents])
    ]


def code(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line of code, without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for number, line in enumerate(lines, 1):
        if number not in prose and line.strip():
            yield number, line


def leftovers(package: Path, rooms: Iterable[Room]) -> list[str]:
    """Return the lines of code in the core that still name one of the rooms."""
    words = [room.word for room in rooms if room.word]
    return [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in core(package)
        for number, line in code(path)
        if any(re.search(word, line) for word in words)
    ]


def dangling_imports(package: Path) -> list[str]:
    """Return the relative imports of modules that do not exist, inside functions too."""
    dangling = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = path.parents[node.level - 1]
            for part in (node.module or "").split("."):
                base /= part
            if base.with_suffix(".py").is_file():
                continue
            names = [name.name for name in node.names]
            missing = [n for n in names if not ((base / n).is_dir() or (base / f"{n}.py").exists())]
            if missing:
                dangling.append(f"{path.relative_to(package)}:{node.lineno}: {', '.join(missing)}")
    return dangling


if __name__ == "__main__":
    if len(sys.argv) > 1:
        delete(Path(sys.argv[1]), sys.argv[2:])
    else:
        print(table(), end="")
