"""Record the code, packages and command of a run, and keep the code that each start ran.

    starts/<launch>/           for a start that differs from all earlier ones (see Kept.is_like)
      start.json               the fields of Kept, below
      code.patch               changes since the commit, and untracked code, for `git apply`
      sources.zip              code that is neither in the commit nor in code.patch
      requirements.txt         the imported distributions, for pip
      same_code.txt            later starts that ran the same code, one per line

Secrets are masked. tools/reproduce.py prints the commands that use these files.
"""

import ast
import hashlib
import inspect
import io
import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from .config import Config, to_yaml
from .files import discard, flush_to_disk, from_object, open_own, read_json
from .manifest import put_in_place
from .process import CODE
from .safety.redaction import (
    MASK,
    is_masked,
    is_secret,
    mask,
    mask_command,
    mask_private_keys,
    mask_unnamed,
)
from .words import PACKAGE

logger = logging.getLogger(__name__)
RECORDED_PACKAGES = ("torch", "accelerate", "safetensors", "torchmetrics", "numpy", "scikit-learn")
MOST_BYTES = 1_000_000  # maximum size of the code that a start keeps
MOST_CHANGED_BYTES = 64_000_000  # maximum size of the changed files that git compares
GIT_SECONDS = 10.0
# The environment variables that run.json records, unless their names are those of secrets.
RECORDED_VARIABLES = re.compile(
    r"(ACCELERATE|CUBLAS|CUDA|FSDP|GLOO|NCCL|OMP|PARALLELISM_CONFIG|PYTORCH|TORCH|TORCHELASTIC)_\w+"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|RESTART_COUNT)|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|FI_EFA_\w+"
)
LITERAL = re.compile(  # in Python: name = "value", name: str = "value", "name": "value"
    r"""(?P<name>(?<![\w.-])[\w.-]+)
    (?P<sign>["']?\]?\s*(?::[\w\s.|\[\]]+)?[=:]=?\s*[rbfu]{0,2}(?P<quote>["']))
    (?P<value>(?:(?!(?P=quote)).){6,}(?=(?P=quote)))""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The code and config that wrote a checkpoint or an export."""

    run: str = ""
    start: str = ""  # the folder in starts/ that contains the code; "" if it was not kept
    commit: str | None = None
    code: str = ""  # the result of code_digest
    packages: dict[str, str] = field(default_factory=dict)  # imported distributions
    config: str = ""  # the settings, as in config.yaml


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The content of start.json."""

    code: str  # the result of code_digest
    package: str = PACKAGE
    python: str = platform.python_version()
    packages: dict[str, str] = field(default_factory=dict)  # versions of imported distributions
    commit: str | None = None  # None: not in git, or nothing is committed yet
    repository: str = ""  # the top folder of the repository
    remote: str = ""  # the URL of the remote
    folder: str = "."  # the start's current folder, relative to the repository
    search_path: tuple[str, ...] = (".",)  # folders where imports begin, relative to the repository
    submodules: dict[str, str] = field(default_factory=dict)  # the commit of each, by folder
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of code.patch and sources.zip
    masked: tuple[str, ...] = ()  # files in which a secret was masked
    not_kept: str = ""  # what is missing, and why

    def is_like(self, other: "Kept") -> bool:
        """Return whether all fields are equal; compare only packages that both starts import."""
        both = self.packages.keys() & other.packages.keys()
        is_same = all(self.packages[name] == other.packages[name] for name in both)
        return is_same and replace(self, packages={}) == replace(other, packages={})


def source_hash(file: str | Path | None) -> str | None:
    """Return the SHA-256 of a source file; None if it is unknown or was removed."""
    with suppress(OSError):
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()


def modules() -> list[Path]:
    """Return the project's modules."""
    # is_file() leaves out broken links, which editors use to lock a file
    return sorted(path for path in Path(__file__).parent.rglob("*.py") if path.is_file())


def code_digest(recipe: object) -> str:
    """Return a hash of the source files of the loop, and of the recipe and its base classes.

    Tools and other recipes are left out, since they may be edited while a run is under way. So are
    base classes of other packages, and other modules that the recipe imports. This has a price: if
    one of these is edited during a launch, the copy that a restart in place stores has the edit,
    but the restart runs what the launcher imported before.
    """
    package, kinds = Path(__file__).parent, type(recipe).__mro__
    names = [kind.__module__ for kind in kinds if kind.__module__.startswith(f"{__package__}.")]
    modules = [sys.modules.get(name) for name in (type(recipe).__module__, *names)]
    paths = {Path(getattr(module, "__file__", None) or "") for module in modules}
    for path in package.rglob("*.py"):
        # editors, and copies from macOS, leave files with other names beside a module
        is_module = path.stem.isidentifier()
        if is_module and path.relative_to(package).parts[0] not in ("recipes", "tools"):
            paths.add(path)
    hashes = [
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in paths
        if path.is_file()  # not a broken link, with which an editor locks a file
    ]
    return hashlib.sha256(str(sorted(hashes)).encode()).hexdigest()[:8]


def installed(source: str | None = None) -> dict[str, str]:
    """Return the versions of RECORDED_PACKAGES and of the packages that the recipe imports.

    A package whose module has a different name is listed by the name of the module: cv2, PIL.
    """
    versions = {}
    for name in (*RECORDED_PACKAGES, *imports_of(source)):
        if name not in sys.stdlib_module_names:
            release = getattr(sys.modules.get(name), "__version__", None)
            with suppress(PackageNotFoundError):
                release = version(name)
            versions |= {name: str(release)} if release else {}
    return versions


def imports_of(source: str | None) -> list[str]:
    """Return the top-level modules that a source file imports, including inside functions."""
    names: set[str] = set()
    # ValueError: a wrong encoding or a zero byte
    with suppress(OSError, ValueError, SyntaxError):
        for node in ast.walk(ast.parse(Path(source or "").read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return sorted(names)


def provenance(source: str | None = None) -> dict[str, Any]:
    """Return what is needed to reproduce the run, without secrets.

    Args:
        source: the recipe's file; git is asked about the repository that contains the file.
    """
    folder = Path(source or __file__).resolve().parent
    # the package may be installed in an environment that another project's repository ignores
    is_tracked = _git(folder, "check-ignore", "-q", ".") is None
    commit = _git(folder, "rev-parse", "HEAD") if is_tracked else None
    changes = _git(folder, "status", "--porcelain") if is_tracked else None
    return {
        "recipe_sha256": source_hash(source),
        "command": mask_command(sys.orig_argv),
        "launcher": _launcher(),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": installed(source),
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "environment": {
            name: mask(value)
            for name, value in sorted(os.environ.items())
            if RECORDED_VARIABLES.fullmatch(name) and not is_secret(name)
        },
    }


def _launcher() -> list[str]:
    """Return the command of the launcher that started this process; [] if none is found."""
    import psutil

    with suppress(psutil.Error):
        for parent in psutil.Process().parents()[:3]:
            words = parent.cmdline()
            if "train" in words or any(word.startswith("--config_file") for word in words):
                return mask_command(words)
    return []


def _git(folder: Path, *arguments: str, **variables: str) -> str | None:
    # in a git hook, git's environment variables name a different repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=True,
            timeout=GIT_SECONDS,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"} | variables,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# ---- the code of a start -------------------------------------------------------------------------
def keep_code(run_folder: Path, config: Config, run: str, start: str) -> Origin:
    """Keep in starts/ the code that this start runs, unless an earlier start has kept the same.

    Called by rank 0, before there are loader workers: a fork would inherit the pipes to git.

    Args:
        run_folder: the folder of the run.
        config: the run's config.
        run: the ID of the run.
        start: the name of this start.
    """
    imported = imported_distributions()
    packages = {name: release for name, (release, _) in imported.items()}
    kept = Kept(code=code_digest(config.recipe), packages=packages)
    starts = run_folder / "starts"
    try:
        starts.mkdir(exist_ok=True)
        for leftover in starts.glob(".*.partial"):  # left by a start that was killed
            discard(leftover)
        if os.environ.get(CODE) in (None, "", kept.code):
            kept, contents = code_that_runs(config, kept)
            contents["requirements.txt"] = requirements(imported).encode()
            name = _write(starts, kept, contents, start)
        else:  # edited after the launcher had imported it
            kept, name = _imported_before(starts, replace(kept, code=os.environ[CODE]), start)
    except OSError as error:  # the run goes on without a folder in starts/
        kept, name = replace(kept, not_kept=f"it could not be written or read: {error}"), ""
    if kept.not_kept:
        logger.warning("not all code of this start is kept: %s", mask(kept.not_kept))
    return Origin(
        run=run,
        start=name,
        commit=kept.commit,
        code=kept.code,
        packages=packages,
        config=to_yaml(config),
    )


def _write(starts: Path, kept: Kept, contents: dict[str, bytes], start: str) -> str:
    """Write a start's folder, or add the start to one with the same code; return its name."""
    for path, other in _starts(starts):
        if kept.is_like(other):
            _add(start, path)
            return path.name
    temporary = starts / f".{start}.partial"
    temporary.mkdir()
    contents["start.json"] = (json.dumps(asdict(kept), indent=1) + "\n").encode()
    for name, content in contents.items():
        (temporary / name).write_bytes(content)
        flush_to_disk(temporary / name)
    put_in_place(temporary, starts / start)
    return start


def _imported_before(starts: Path, kept: Kept, start: str) -> tuple[Kept, str]:
    """Add a start to an earlier one with the same code; return its content and its name.

    Called if files were edited after the launcher had imported them: a forked process runs the
    imported code.
    """
    for path, other in _starts(starts):
        if other.code == kept.code:
            _add(start, path)
            return other, path.name
    return replace(kept, not_kept="files were edited after the launcher had imported them"), ""


def _starts(starts: Path) -> Iterator[tuple[Path, Kept]]:
    """Yield the folders of starts whose start.json is intact, and its content."""
    for path in sorted(starts.glob("*/start.json")):
        with suppress(TypeError):  # a damaged file
            yield path.parent, from_object(Kept, read_json(path))


def _add(start: str, folder: Path) -> None:
    """Note that a start ran the code in another start's folder."""
    with open_own(folder / "same_code.txt", "ab") as file:
        file.write(f"{start}\n".encode())


def code_that_runs(config: Config, kept: Kept) -> tuple[Kept, dict[str, bytes]]:
    """Return the content of start.json, and the contents of the files with the code."""
    sources = _sources(config)
    patch, masked = "", set[str]()
    if top := _top_folder(Path(list(sources)[-1]).parent):
        kept = _in_git(kept, top, sources)
        sources = {
            path: str(path.relative_to(top)) if path.is_relative_to(top) else name
            for path, name in sources.items()
        }
        patch, tracked, problem = _changes(top, sources)
        patch, masked, left_out = masked_patch(patch)
        untracked = {path: name for path, name in sources.items() if path not in tracked}
        sources = untracked | {top / name: name for name in left_out if (top / name).is_file()}
        if lost := [name for name in left_out if not (top / name).is_file()]:
            lost = [f"the changes of {', '.join(lost)}, which contain a secret"]
        kept = replace(kept, not_kept="; ".join(filter(None, (kept.not_kept, problem, *lost))))
    archive, masked_in_archive = _archive(sources)
    contents = {"code.patch": os.fsencode(patch), "sources.zip": archive}
    contents = {name: content for name, content in contents.items() if content}
    masked |= masked_in_archive
    if (size := sum(map(len, contents.values()))) > MOST_BYTES:
        problem = f"it is {size / 1e6:.1f} MB, over the limit of {MOST_BYTES / 1e6:.0f} MB"
        kept, contents, masked = replace(kept, not_kept=problem), {}, set()
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return replace(kept, files=hashes, masked=tuple(sorted(masked))), contents


def _sources(config: Config) -> dict[Path, str]:
    """Return the files with a run's code, and the path of each in sources.zip.

    They are the accelerate configs in the current folder, the project's modules, and last the
    recipe's module.
    """
    package = Path(__file__).parent
    configs = filter(Path.is_file, Path("accelerate_configs").glob("*.yaml"))  # see modules()
    sources = {path.resolve(): str(path) for path in configs}
    inner = PACKAGE.replace(".", "/")
    sources |= {path.resolve(): f"{inner}/{path.relative_to(package)}" for path in modules()}
    recipe = Path(inspect.getsourcefile(type(config.recipe)) or __file__).resolve()
    name = type(config.recipe).__module__.replace(".", "/")
    name = f"{name}/__init__.py" if recipe.stem == "__init__" else f"{name}.py"
    return sources | {recipe: sources.pop(recipe, name)}


def _top_folder(folder: Path) -> Path | None:
    """Return the top folder of the repository that tracks a folder, if it has a commit."""
    is_tracked = _git(folder, "check-ignore", "-q", ".") is None
    lines = _git(folder, "rev-parse", "--show-toplevel", "HEAD") if is_tracked else None
    return Path(lines.splitlines()[0]).resolve() if lines else None


def _in_git(kept: Kept, top: Path, sources: dict[Path, str]) -> Kept:
    """Return `kept` with the state of the repository, except for changes.

    Args:
        kept: what is known of the start so far.
        top: the repository's top folder.
        sources: the result of _sources. If the path of a .py file ends with the file's name in
            sources.zip, the rest of the path is a folder on the search path.
    """
    here = Path.cwd().resolve()
    roots = {Path(str(p).removesuffix(name)) for p, name in sources.items() if p.suffix == ".py"}
    roots = {root for root in roots if root.is_dir() and root.is_relative_to(top)}
    submodules = {}
    if (top / ".gitmodules").is_file():
        for line in (_git(top, "submodule", "status", "--recursive") or "").splitlines():
            if match := re.fullmatch(r"[ +U]?(\w+) (.*?)( \(.*\))?", line):
                submodules[match[2]] = match[1]
    changed = [name for name in submodules if _git(top / name, "status", "--porcelain")]
    return replace(
        kept,
        commit=_git(top, "rev-parse", "HEAD"),
        repository=str(top),
        remote=mask(_git(top, "config", "--get", "remote.origin.url") or ""),
        folder=str(here.relative_to(top)) if here.is_relative_to(top) else ".",
        search_path=tuple(str(root.relative_to(top)) for root in (*sorted(roots - {top}), top)),
        submodules=submodules,
        not_kept=f"the changes in the submodules {', '.join(changed)}" if changed else "",
    )


def _changes(top: Path, sources: Iterable[Path]) -> tuple[str, set[Path], str]:
    """Return a patch against the commit, the files that need no other copy, and a problem.

    Those files are in the commit or in the patch. Untracked files among the sources and in the
    package are added to a copy of the index, never to the user's index.
    """
    paths = [str(Path(__file__).resolve().parent), *map(str, sources)]
    paths = [path for path in paths if Path(path).is_relative_to(top)]
    with tempfile.TemporaryDirectory() as folder:
        index, output = Path(folder, "index"), Path(folder, "patch")
        with suppress(OSError):  # there is a commit, but no index
            # copy2 keeps the time of the index: git reads files that changed at that time or later
            shutil.copy2(top / (_git(top, "rev-parse", "--git-path", "index") or ""), index)
        git = partial(_git, top, GIT_INDEX_FILE=str(index))
        listed = git("ls-files", "-z", "--others", "--exclude-standard", "--", *paths)
        if new := [name for name in (listed or "").split("\0") if name]:
            git("add", "--intent-to-add", "--", *new)
        options = ("--ignore-submodules=all", "--no-renames", "--no-ext-diff", "--no-textconv")
        diff = ("diff", "HEAD", "--no-color", "--no-relative", *options)
        names = git(*diff, "--name-only", "-z")
        changed = [top / name for name in (names or "").split("\0") if name]
        size = sum(path.lstat().st_size for path in changed if path.is_file())
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--binary", f"--output={output}")
        answer: str | None = None
        if names is not None and size <= MOST_CHANGED_BYTES:
            answer = git("-c", "core.quotePath=false", *diff, *prefixes)
        patch = os.fsdecode(output.read_bytes()) if answer is not None else ""
        tracked = git("ls-files", "-z", "--", *paths)
    is_large = size > MOST_CHANGED_BYTES or len(os.fsencode(patch)) > MOST_BYTES
    if is_large or answer is None:
        problem = f"git failed to list the changes since the commit within {GIT_SECONDS:.0f} s"
        if is_large:
            what, limit = "changes", MOST_BYTES
            if size > MOST_CHANGED_BYTES:
                what, limit = "files that changed", MOST_CHANGED_BYTES
            problem = f"the {what} since the commit exceed the {limit / 1e6:.0f} MB limit"
        return (
            "",
            set(),
            f"{problem}, so only {PACKAGE}, the recipe and accelerate_configs/ are kept",
        )
    return patch, {top / name for name in (tracked or "").split("\0")}, ""


def masked_patch(patch: str) -> tuple[str, set[str], list[str]]:
    """Mask secrets in the lines that a patch adds.

    If a line of the commit were masked, the patch would not apply, so such a file is left out.

    Returns:
        The patch, the files in which a secret was masked, and the files that were left out.
    """
    parts, masked, left_out = [], set[str](), []
    for part in re.split(r"(?m)^(?=diff --git )", patch):
        header, *hunks = re.split(r"(?m)^(?=@@ )", part, maxsplit=1)
        name = (
            re.findall(r"(?m)^(?:--- a|\+\+\+ b)/(.*?)\t?$", header) or [header.partition("\n")[0]]
        )[-1]
        text = "".join(hunks)
        lines, safe = (t.splitlines(keepends=True) for t in (text, mask_private_keys(text)))
        safe = [line[:1] + mask_file(line[1:], name) for line in safe]
        differing = [old for old, new in zip(lines, safe, strict=True) if old != new]
        masked |= {name} if differing else set()
        if all(line.startswith("+") for line in differing):
            parts.append(header + "".join(safe))
        else:
            left_out.append(name)
    return "".join(parts), masked, left_out


def mask_file(text: str, name: str) -> str:
    """Mask secrets in a file's text; those found by a name, in Python only in literals."""
    return mask_source(text) if name.endswith(".py") else mask(text)


def mask_source(text: str) -> str:
    """Mask secrets in Python code; a value such as HF_TOKEN or <token> is a name, not a secret."""

    def mask_literal(match: re.Match[str]) -> str:
        is_placeholder = re.fullmatch(r"[A-Z][A-Z_\d]+|[<\[].*[>\]]", match["value"])
        is_kept = is_placeholder or not is_masked(match["name"])
        return match[0] if is_kept else match["name"] + match["sign"] + MASK

    return LITERAL.sub(mask_literal, mask_unnamed(text))


def _archive(sources: dict[Path, str]) -> tuple[bytes, set[str]]:
    """Return a zip archive, equal for equal files, and the names of files with a masked secret."""
    if not sources:
        return b"", set()
    masked, output = set[str](), io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        for path, name in sorted(sources.items(), key=lambda item: item[1]):
            text = os.fsdecode(path.read_bytes())
            lines = mask_private_keys(text).splitlines(keepends=True)
            safe = "".join(mask_file(line, name) for line in lines)
            masked |= {name} if safe != text else set()
            archive.writestr(zipfile.ZipInfo(name), os.fsencode(safe), zipfile.ZIP_DEFLATED)
    return output.getvalue(), masked


# ---- packages ------------------------------------------------------------------------------------
def imported_distributions() -> dict[str, tuple[str, Distribution]]:
    """Return the version and distribution of each imported distribution but our own, by name.

    importlib.metadata.packages_distributions would take about three times as long.
    """
    own = PACKAGE.partition(".")[0]
    imported = {name.partition(".")[0] for name in sys.modules}
    modules = {dist: top_modules(dist) for dist in distributions()}
    used = [dist for dist, tops in modules.items() if tops & imported and own not in tops]
    parsed = [(dist.metadata, dist) for dist in reversed(used)]  # each access would parse again
    # if two distributions have the same name, Python imports the first
    named = {data["Name"]: (data["Version"], dist) for data, dist in parsed if data["Name"]}
    return dict(sorted(named.items()))


def top_modules(distribution: Distribution) -> set[str]:
    """Return the top-level modules and packages of a distribution."""
    if listed := distribution.read_text("top_level.txt"):
        return set(listed.split())
    return set(re.findall(r"(?m)^[^/,.\n]+", distribution.read_text("RECORD") or ""))


def requirements(imported: dict[str, tuple[str, Distribution]]) -> str:
    """Return the text of a requirements file for the imported distributions."""
    lines, indexes = [], set()
    for name, (release, distribution) in imported.items():
        line = f"{name}=={release}"
        # TypeError: a distribution from an index has no direct_url.json
        with suppress(ValueError, KeyError, TypeError):
            origin = json.loads(distribution.read_text("direct_url.json"))  # type: ignore[arg-type]
            line = f"# {line} was installed from {mask(origin['url'])}"
            vcs = origin["vcs_info"]
            line = f"{name} @ {vcs['vcs']}+{mask(origin['url'])}@{vcs['commit_id']}"
        lines.append(f"{line}\n")
        if name == "torch" and (build := re.search(r"\+((?:cpu|cu|rocm|xpu)[\d.]*)", line)):
            indexes.add(f"--extra-index-url https://download.pytorch.org/whl/{build[1]}\n")
    return "".join((*indexes, *lines))
