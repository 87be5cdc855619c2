"""Print the commands that restore the code and the environment of a run and train it again."""

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..files import ConfigError, from_object, read_json, read_own
from ..provenance import Kept
from ..run_files import RunInfo
from ..words import printable, say
from .reader import read_run

CHANGES_NUMBERS = re.compile(r"OMP_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|NCCL_(ALGO|PROTO)")


def print_commands(folder: Path) -> None:
    """Print commands for a shell in an empty folder.

    Raises:
        ConfigError: the folder is not a run folder, or its code was not kept.
    """
    run = read_run(folder)
    path = start_folder(folder, run.info.launch)
    kept = None
    with suppress(TypeError):
        kept = from_object(Kept, read_json(path / "start.json"))
    if kept is None or not (kept.commit or kept.files):
        raise ConfigError(f"{path} does not have the code of a start: it was not kept, or is gone.")
    is_sound = re.fullmatch(r"[\w.]+", kept.package) and re.fullmatch(
        r"\d[\d.]+[\w+]*", kept.python
    )
    if not (is_sound and re.fullmatch("[0-9a-f]{7,64}", kept.commit or "0" * 40)):
        raise ConfigError(f"{path / 'start.json'} is damaged.")
    path = path.absolute()
    say(*code_lines(kept, path, f"{folder.resolve().name}-code"))
    say("", "# the environment", f"python{'.'.join(kept.python.split('.')[:2])} -m venv .venv")
    say(". .venv/bin/activate", line("pip", "install", "-r", str(path / "requirements.txt")))
    say("", *run_lines(kept, run.info, folder.absolute()))


def start_folder(folder: Path, start: str) -> Path:
    """Return the folder in starts/ with a start's code; an earlier start may have kept it."""
    for listed in sorted((folder / "starts").glob("*/same_code.txt")):
        with suppress(OSError):
            if start in read_own(listed).decode(errors="replace").split():
                return listed.parent
    return folder / "starts" / start


def line(*words: str) -> str:
    """Return a command; its words may be untrusted."""
    return shlex.join(words)


def note(text: str) -> str:
    """Return a comment of one line."""
    return f"# {printable(text)}"


def code_lines(kept: Kept, path: Path, name: str) -> Iterator[str]:
    """Yield the commands that restore the code in a folder of this name."""
    yield note(f"the code of the start {path.name}")
    if kept.commit:
        is_here = Path(kept.repository).is_dir()
        source = kept.repository if is_here or not kept.remote else kept.remote
        if source != kept.remote and kept.remote:
            yield note(f"the same repository: {kept.remote}")
        if not (is_here or kept.remote):
            yield note("WARNING: this repository is not here, and it had no remote: copy it here")
        yield line("git", "clone", "--quiet", "--no-checkout", "--", source, name)
        yield line("cd", "--", name)
        yield line("git", "checkout", "--quiet", "--detach", kept.commit)
    else:
        yield line("mkdir", "--", name)
        yield line("cd", "--", name)
    for folder, commit in kept.submodules.items():  # an outer one comes first
        outer = [other for other in kept.submodules if folder.startswith(f"{other}/")]
        parent = max(outer, key=len, default=".")
        name = os.path.relpath(folder, parent)
        yield line("git", "-C", parent, "submodule", "--quiet", "update", "--init", "--", name)
        yield line("git", "-C", folder, "checkout", "--quiet", "--detach", commit)
    if "code.patch" in kept.files:
        yield line("git", "apply", "--whitespace=nowarn", str(path / "code.patch"))
    if "sources.zip" in kept.files:
        yield line("python3", "-m", "zipfile", "-e", str(path / "sources.zip"), ".")
    for file, expected in kept.files.items():
        digest = ""
        with suppress(OSError):
            digest = hashlib.sha256(read_own(path / file)).hexdigest()
        if digest != expected:
            yield note(f"WARNING: {file} is missing or not what the start wrote")
    if kept.not_kept:
        yield note(f"WARNING: not all of the code was kept: {kept.not_kept}")
    for file in kept.masked:
        yield note(f"WARNING: a secret in {file} is masked (***): put it back before the run")


def run_lines(kept: Kept, info: RunInfo, folder: Path) -> Iterator[str]:
    """Yield the commands that train the run's config again, under another name."""
    place = f"{info.folder} on {info.host}"
    yield note(f"the run; relative paths in its config.yaml are relative to {place}")
    paths = ":".join(f"$PWD/{part}" for part in map(shlex.quote, kept.search_path))
    yield f"export PYTHONPATH={paths}"
    for name, value in info.environment.items():
        if CHANGES_NUMBERS.fullmatch(name):
            yield line("export", f"{name}={value}")
    if kept.folder != ".":
        yield line("mkdir", "-p", "--", kept.folder)
        yield line("cd", "--", kept.folder)
    words = train_words(kept.package, info, str(folder / "config.yaml"))
    if (hosts := len({*info.hosts})) > 1:
        own = [
            w.partition("=")[0] for w in words if w.startswith(("--machine_rank", "--node_rank"))
        ]
        each = f"run this on each host{', with its own ' * bool(own)}{' '.join(own)}"
        yield note(f"{len(info.hosts)} processes ran on {hosts} hosts: {each}")
    yield line(*words, "--run_name", f"{folder.name}-again")


def train_words(package: str, info: RunInfo, config: str) -> list[str]:
    """Return the command that trains a config, launched in the same way as the run."""
    launcher, train, count = [*info.launcher], f"{package}.train", str(len(info.hosts) or 1)
    hosts = list(dict.fromkeys(info.hosts))
    if train in launcher:  # accelerate launch, or the launcher of the project
        words = launcher[: launcher.index(train) + 1]
        at = words.index("launch") if "launch" in words else 0
        # python -m my_project launch, or the script: my-project launch
        if at and Path(words[at - 1]).name.replace("-", "_") == package:
            words = ["python", "-m", package, *words[at:]]
        elif at:
            words = ["accelerate", *words[at:]]
        else:
            words = ["python", *words[1:]]
        return [*words, "--config", config]
    if "train" in launcher:
        where = re.search(r"\0--where[=\0]([^\0]*)", "\0".join(launcher))
        chosen = ["--where", where[1]] if where else []
        return ["python", "-m", package, "train", config, "--num_processes", count, *chosen]
    if len(hosts) > 1:
        local = str(-(-len(info.hosts) // len(hosts)))
        words = ["torchrun", "--nnodes", str(len(hosts)), "--nproc_per_node", local]
        words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{hosts[0]}:29500"]
        return [*words, "-m", train, "--config", config]
    if count != "1":
        return ["torchrun", "--nproc_per_node", count, "-m", train, "--config", config]
    return ["python", "-m", train, "--config", config]
