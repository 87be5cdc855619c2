"""An owner deletes any optional room, or all of them; what is left trains, and resumes old runs."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import rooms
from rooms import BY_NAME, ROOMS
from test_generate import RENAMED, Desk
from test_size import code_lines
from test_wheel import IMPORT_ALL
from world import run_world

EVERY = [*BY_NAME]
CORE_LINES, CORE_FILES = 5_363, 33  # of code, after all rooms are deleted
# In the project with all rooms: a run to the end, and one that is stopped after its first step.
BEFORE = """
import sys
from pathlib import Path
from runs import change, make_config, train
whole, saved = (make_config(Path(sys.argv[1]), run_name=name) for name in ("whole", "saved"))
assert train(whole) == 0
assert train(change(saved, stop_after="0s")) == 75
"""
# In the remaining project, in the interpreter that has imported all its modules.
AFTER = """
import sys
from pathlib import Path
from runs import assert_same_weights, make_config, status, train
whole, saved = (make_config(Path(sys.argv[1]), run_name=name) for name in ("whole", "saved"))
assert train(make_config(Path(sys.argv[1]), run_name="new", steps=3)) == 0
step = status(saved)["step"]
assert 0 < step < 10
assert train(saved) == 0
assert status(saved)["from_step"] >= step
assert_same_weights(saved, whole)
"""
# On two processes: a run to the end, and a run until one of the processes is killed.
KILLED = """
import sys
from contextlib import suppress
from pathlib import Path
from ragged import Ragged
from runs import make_config, status, train
from world import run_world
whole, killed = (
    make_config(Path(sys.argv[1]), Ragged(dropout=0.1, **fault), run_name=name, **{SETTINGS})
    for name, fault in (("two", {{}}), ("killed", dict(fault="leave", fault_at=7)))
)
assert run_world(2, train, whole) == [0, 0]
with suppress(RuntimeError):  # rank 1 kills itself at step 7
    run_world(2, train, killed)
assert status(killed)["outcome"] == "failed"
"""
SETTINGS = {"checkpoints__every_steps": 2, "checkpoints__keep": 9}
COMPARED = """
import sys
from pathlib import Path
from runs import assert_same_weights, make_config, records, status
two, killed = (make_config(Path(sys.argv[1]), run_name=name) for name in ("two", "killed"))
assert status(killed)["outcome"] == "finished"
assert status(killed)["from_step"] > 1
assert [record["step"] for record in records(killed)] == [*range(1, 11)]
assert_same_weights(killed, two)
"""
COMMANDS_OF = {
    "tools": {"runs", "report", "doctor", "planner", "preflight"},
    "launching": {"train", "launch", "planner"},
    "commands": {"evaluate", "predict", "export"},
    "sharding": {"planner"},
}


# ---- by reading ----------------------------------------------------------------------------------
def copy(template: Path, folder: Path) -> Path:
    """Copy the template, which is a project too."""
    return shutil.copytree(template / "template", folder / "project")


@pytest.mark.parametrize("names", [*([name] for name in EVERY), EVERY], ids="+".join)
def test_what_is_left_names_no_room_that_is_gone(template: Path, tmp_path: Path, names: list[str]):
    project = copy(template, tmp_path)
    rooms.delete(project, names)
    gone = rooms.with_dependents(names)
    package = rooms.package_of(project)
    assert rooms.leftovers(package, gone) == []
    assert rooms.dangling_imports(package) == []
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run([*ruff, *command], cwd=project, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout.decode()


def test_a_room_changes_few_lines_elsewhere():
    for room in ROOMS:
        assert sum(room.lines.values()) <= room.most, room.name
        assert bool(room.lines) <= bool(room.word), room.name
        assert {*room.needs} <= BY_NAME.keys(), room.name


def test_files_that_are_not_there_and_other_counts_are_refused(template: Path, tmp_path: Path):
    project = copy(template, tmp_path)
    for room in ROOMS:
        for file in (*room.files, *room.lines, *rooms.own_tests(room)):
            assert rooms.path_of(file, project).exists(), f"{room.name}: {file}"
    path = rooms.path_of("__main__.py", project)
    path.write_text(f"{path.read_text()}search_path = 1\n")
    with pytest.raises(ValueError, match=r"commands: 9 lines match in __main__\.py, not 8"):
        rooms.delete(project, ["commands"])


def test_a_block_whose_first_line_goes_moves_to_the_left():
    text = """
with here:
    with room:  # of the room
        one()

        for x in room:
            two(x)
    three()
four()
"""
    gone = {i for i, line in enumerate(text.splitlines()) if "room" in line}
    left = "\nwith here:\n    one()\n\n    two(x)\n    three()\nfour()\n"
    assert rooms.without(text, gone) == left


def test_a_room_goes_with_those_that_it_cannot_be_without(monkeypatch: pytest.MonkeyPatch):
    def room(name: str, *needs: str) -> rooms.Room:
        return rooms.Room(name=name, goes="", files=(), needs=needs)

    monkeypatch.setattr(rooms, "ROOMS", (room("c", "b"), room("a"), room("b", "a"), room("d")))
    assert [gone.name for gone in rooms.with_dependents(["a"])] == ["c", "a", "b"]
    assert [gone.name for gone in rooms.with_dependents(["c", "d"])] == ["c", "d"]


def test_the_table_of_agents_md_is_made_from_the_rooms(template: Path):
    agents = (template / "template/AGENTS.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"(?ms)^## Optional rooms\n(.*?)(?=^## |\Z)", agents)
    lines = [line for line in section.splitlines(keepends=True) if line.startswith("|")]
    assert "".join(lines) == rooms.table(), "python tests/rooms.py prints it"


def test_the_core_is_small(template: Path, tmp_path: Path, capsys):
    project = copy(template, tmp_path)
    rooms.delete(project, EVERY)
    sizes = [code_lines(path) for path in rooms.core(rooms.package_of(project))]
    with capsys.disabled():
        print(f"\nthe core: {sum(sizes)} lines of code in {sum(map(bool, sizes))} files")
    assert 0 < sum(sizes) <= CORE_LINES
    assert sum(map(bool, sizes)) <= CORE_FILES


# ---- by running ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("rooms"))
    desk.environment |= {
        "HOME": os.environ["HOME"],
        "TMPDIR": tempfile.gettempdir(),  # for sockets, whose paths are short
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    return desk


@pytest.fixture(scope="module")
def project(template: Path, desk: Desk) -> Path:
    """Make a project with all rooms, and runs of it."""
    project = desk.generate(template, **RENAMED)
    run_world(1, in_fork, project, BEFORE)
    return project


def without(desk: Desk, project: Path, names: list[str]) -> Path:
    """Return a copy of the project, and of its runs, without some rooms."""
    left = desk.folder / f"without-{'-'.join(names)}"
    shutil.copytree(project, left, ignore=shutil.ignore_patterns("__pycache__"))
    rooms.delete(left, names)
    return left


def listed(desk: Desk, project: Path) -> set[str]:
    """Return the commands that a project lists."""
    desk.environment["PYTHONPATH"] = f"{project}/src"
    lines = desk.succeed(sys.executable, "-m", "leafscan", cwd=project).splitlines()
    return {line.split()[0] for line in lines if line.startswith("  ")}


def in_fork(project: Path, code: str) -> None:
    """Run code that imports a project, in a process that has imported torch and the template."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.chdir(project)
    sys.path[:0] = [f"{project}/src", f"{project}/tests"]
    for path in project.glob("tests/*.py"):
        sys.modules.pop(path.stem, None)
    sys.argv[1:] = [f"{project}/runs"]
    exec(code, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_without_a_room_modules_import_and_older_runs_resume(desk: Desk, project: Path, name: str):
    left = without(desk, project, [name])
    gone = set().union(*(COMMANDS_OF.get(r.name, ()) for r in rooms.with_dependents([name])))
    assert listed(desk, left) == listed(desk, project) - gone
    run_world(1, in_fork, left, IMPORT_ALL + AFTER)


@pytest.fixture(scope="module")
def bare(desk: Desk, project: Path) -> Path:
    """Return the project without any room."""
    return without(desk, project, EVERY)


@pytest.mark.slow
def test_without_all_rooms_a_killed_run_of_two_has_the_same_weights(desk: Desk, bare: Path):
    assert listed(desk, bare) == set()
    run_world(1, in_fork, bare, IMPORT_ALL + AFTER)
    desk.environment["PYTHONPATH"] = f"{bare}/src:{bare}/tests"
    code = KILLED.format(SETTINGS=SETTINGS)
    desk.succeed(sys.executable, "-c", code, bare / "runs", cwd=bare)
    resumed = [
        *("accelerate", "launch", "--config_file", "accelerate_configs/cpu_2_processes.yaml"),
        *("-m", "leafscan.train", "--config", "runs/killed/config.yaml"),
        *("--recipe.init_args.fault", ""),
    ]
    desk.succeed(*resumed, cwd=bare)
    run_world(1, in_fork, bare, COMPARED)


@pytest.mark.slow
def test_without_all_rooms_lint_types_and_the_other_tests_pass(desk: Desk, bare: Path):
    desk.environment["PYTHONPATH"] = ""
    desk.succeed("make", "lint", cwd=bare)
    quick = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu"]
    desk.succeed(*quick, cwd=bare)
