"""What imports what: the rules that keep each module in its place, read from the source text."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from world import TESTS, free_port

PACKAGE = TESTS.parent / "src/my_project"
# What a run imports only where it is used: metrics, trackers, a terminal, FSDP, data of recipes.
UNUSED = (
    "torchmetrics",
    "tensorboard",
    "torch.utils.tensorboard",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",  # of the launcher, by torch.distributed.checkpoint
    "rich",
    "datasets",
    "transformers",
    "peft",
    "torchvision",
    "sklearn",
    "wandb",
)


def name_of(path: Path) -> str:
    """Return a module's name below the package: tools.runs; a package has that of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
RECIPES = [name for name in PATHS if name.startswith("recipes.")]
MODULES = [
    name for name, path in PATHS.items() if path.name != "__init__.py" and name not in RECIPES
]


def test_imports_are_relative_and_neither_recipe_nor_loop_imports_a_tool():
    for name in (*MODULES, *RECIPES):
        text = PATHS[name].read_text(encoding="utf-8")
        assert not re.search(rf"(?m)^\s*(from|import) {PACKAGE.name}\b", text), name
        assert not (name in RECIPES and re.search(r"(?m)^\s*from \.", text)), name
        tool = re.search(r"(?m)^\s*from \.+(tools\b| import .*\btools\b).*", text)
        assert name.startswith("tools.") or not tool, f"{name}: {tool}: tools/ can be deleted"


# A tool reads files of a run, so it needs no more of the loop than what reads and names them. These
# three look at clusters, and take a step.
# provenance: of it the content of start.json
OF_THE_LOOP = {"run_files", "failures", "words", "files", "provenance"}
IMPORT_MORE = {"tools.planner", "tools.simulate", "tools.preflight"}


def imports_of(name: str) -> set[str]:
    """Return the modules of the package that a module imports, inside its functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(PATHS[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*name.split(".")[: -node.level], *(node.module or "").split(".")]
            base = [part for part in base if part]
            inner = {".".join([*base, alias.name]) for alias in node.names}
            found |= (inner | {".".join(base)}) & PATHS.keys()
    return found


def test_tools_import_of_the_loop_what_reads_run_folders_alone():
    tools = [name for name in MODULES if name.startswith("tools.")]
    for name in tools:
        of_the_loop = {found for found in imports_of(name) if not f"{found}.".startswith("tools.")}
        assert name in IMPORT_MORE or of_the_loop <= {*OF_THE_LOOP, ""}, f"{name}: {of_the_loop}"
    others = set(tools) - IMPORT_MORE
    assert not [name for name in others if imports_of(name) & IMPORT_MORE]


RUN = """
import runpy, sys
try:
    runpy.run_module("my_project.train", run_name="__main__", alter_sys=True)
except SystemExit as exit:
    print("LOADED", exit.code, *sys.modules)
"""


@pytest.mark.slow
def test_a_run_imports_only_what_it_uses(tmp_path: Path):
    """One process under DDP, which trains, saves and exports."""
    (tmp_path / "tiny.yaml").write_text(
        "recipe: {class_path: ragged.Ragged, init_args: {validation_samples: 0}}\n"
        "batches: {global_batch_size: 4, micro_batch_size: 4, workers: 0}\n"
        "telemetry: {trackers: []}\n"
        f"steps: 2\nruns_folder: {tmp_path}\n"
    )
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--config", str(tmp_path / "tiny.yaml")],
        env=os.environ | address | rank, capture_output=True, text=True, check=False,
    )  # fmt: skip
    code, *loaded = done.stdout.partition("LOADED ")[2].split()
    assert code == "0", done.stdout + done.stderr
    assert (tmp_path / "tiny" / "export" / "model.safetensors").is_file()
    assert {"torch", "torch.nn.parallel", "my_project.checkpoint.saving"} <= {*loaded}
    assert not {*UNUSED} & {*loaded}
    assert "leaked" not in done.stderr, done.stderr  # by C++ modules, if garbage is left at exit


def test_the_map_names_every_module():
    agents = (TESTS.parent / "AGENTS.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"## Map\n.*?```\n(.*?)```", agents, re.S)
    for name in MODULES:
        assert re.search(rf"(?<!\w){name.rpartition('.')[2]}\b", text), name
    for file in re.findall(r"\w+\.py\b", text):
        assert file.removesuffix(".py") in PATHS, f"there is no {file}"
