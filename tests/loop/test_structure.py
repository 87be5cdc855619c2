"""What imports what: the rules that keep each module in its place, read from the source text."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def statements(node: ast.AST, deferred: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the imports in a tree, each with whether it runs later, in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, deferred
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from statements(child, deferred or is_function)


@cache
def imports(name: str) -> list[tuple[str, bool, bool]]:
    """List what a module imports: its name, whether it is of this package, whether it runs later.

    Names of this package begin below it, however they are written.
    """
    path, found = PATHS[name], []
    folder = path.relative_to(PACKAGE).parent.parts
    for node, deferred in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [PACKAGE.name, *folder[: len(folder) - node.level + 1], *base]
            # of a package a module is imported; of a module what stands in it
            names = [".".join([*base, alias.name]) for alias in node.names]
        for dotted in names:
            top, _, rest = dotted.partition(".")
            if top == PACKAGE.name:
                rest = rest if rest in PATHS else rest.rpartition(".")[0]
                found.append((rest, True, deferred))
            else:
                found.append((dotted, False, deferred))
    return found


def own_imports(name: str, with_deferred: bool = True) -> set[str]:
    """Name the modules of this package that a module imports."""
    return {
        other
        for other, is_own, deferred in imports(name)
        if is_own and other and other != name and (with_deferred or not deferred)
    }


def chains(name: str, with_deferred: bool) -> dict[str, str]:
    """Map all that a module imports, directly or through others, to the way there."""
    found, left = {name: name}, [name]
    while left:
        here = left.pop()
        for other in sorted(own_imports(here, with_deferred) - found.keys()):
            found[other] = f"{found[here]} -> {other}"
            left.append(other)
    return found


def is_tool(name: str) -> bool:
    return name.partition(".")[0] == "tools"


def test_nothing_imports_a_tool():
    for name in (*MODULES, *RECIPES):
        for other, is_own, _ in () if is_tool(name) else imports(name):
            assert not (is_own and is_tool(other)), f"{name} imports {other}: tools/ can be deleted"


def test_the_loop_imports_no_module_by_its_name_as_text():
    for name in chains("train", with_deferred=True):
        text = PATHS[name].read_text(encoding="utf-8")
        assert "runpy" not in text, name
        for argument in re.findall(r"import_module\((.*)\)", text):
            assert PACKAGE.name not in argument, f"{name} imports {argument}"
            assert "__package__" not in argument, f"{name} imports {argument}"


def test_data_and_optimizer_know_nothing_of_the_run_folder():
    for start in [name for name in MODULES if name.startswith(("loading", "optim"))]:
        ways = chains(start, with_deferred=True)
        assert "run_folder" not in ways, ways["run_folder"]


def test_modules_import_each_other_relatively_and_recipes_nothing_of_the_loop():
    for name in (*MODULES, *RECIPES):
        text = PATHS[name].read_text(encoding="utf-8")
        assert not re.search(rf"(?m)^\s*(from|import) {PACKAGE.name}\b", text), name
        assert not (name in RECIPES and re.search(r"(?m)^\s*from \.", text)), name


def test_no_imports_run_in_a_circle():
    """Those in functions count too."""
    graph = {name: own_imports(name) for name in MODULES}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*way, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


RUN = """
import runpy, sys
try:
    runpy.run_module("my_project.train", run_name="__main__", alter_sys=True)
except SystemExit as exit:
    print("LOADED", exit.code, *sys.modules)
"""


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


def test_the_map_in_the_readme_names_every_module():
    readme = (TESTS.parent / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"## Files\n.*?```\n(.*?)```", readme, re.S)
    for name in MODULES:
        assert re.search(rf"(?<!\w){name.rpartition('.')[2]}\b", text), name
    for file in re.findall(r"\w+\.py\b", text):
        assert file.removesuffix(".py") in PATHS, f"there is no {file}"
