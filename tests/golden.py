"""Compare what the training package computes, bit by bit, with what it computed at a9ab39b.

    python tests/golden.py              # make golden: record the old commit, compare this tree
    python tests/golden.py --only NAME  # some cases

For a refactor that must change nothing: the tests allow rounding, this does not. Each case is a
short run of `my_project.train.main` on CPU processes, with the recipes, configs and processes of
golden_harness.py. Recorded are the tensors of its exports and checkpoints, metrics.jsonl, the
values in the state of a checkpoint, config.yaml and data_info.json, and the keys and names of
everything else in the run folder. Runs of the old code are not continued: their checkpoints have
another format.

The bits depend on the machine and the installed versions, so the old commit is recorded where it is
compared, from a worktree of it in FOLDER, once; a record is never committed. What differs on
purpose goes into REMOVED.
"""

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BASE = "a9ab39b"
# Patterns of facts, or of names of files, that only one of the two states has: "* stage_to".
REMOVED: tuple[str, ...] = (
    *("* straggler *", "* spike *"),  # notices that followed from the clock
    *("* stage_to", "*/run.json format"),
    # what format 2 of a run folder has added
    *("*/status.json note", "*/status.json failure *", "*/status.json silent*"),
    *("*/errors/* errno", "*/errors/* signal", "*/errors/* progress_time", "*/errors/* num_items"),
    *("*/errors/* loss_is_finite", "*/errors/* skipped_*", "*/errors/* at", "*/errors/* at *"),
    *("*/errors/.looking", "*/errors/.first_*", "*/run.json hosts*"),
    *("*/status.json first_step_time", "*/status.json from_step", "* every_minutes"),
    *("* keep_best", "* on_failure"),
    *("*/step.json*", "* items_per_second", "* tokens_per_second", "*/status.json trackers*"),
    *("*/state.json interval_scalars", "* scheduled_steps*", "* best_of*"),
    # format 4 of a checkpoint: state.json is in the manifest, with the results of its evaluation
    *("*/state.json", "*/manifest.json *", "*/.step_*.by_time", "*/state.json evaluat*"),
    *("*/state.json results*", "*/state.json best", "*/state.json best_step"),
    # the lock lies in the folder; a tied weight is written once
    *(".*.lock", "*/.lock", "*/model.safetensors head.weight", "*/model.safetensors metadata"),
    # a stream has no epochs; the lanes of its cases never end, so the old code stays in the first
    *("*/state.json epoch", "*/state.json epoch_start", "stream/metrics.jsonl * epoch"),
)

REPOSITORY = Path(__file__).resolve().parents[1]

# Times, speeds, memory, identities and sentences: only that they are there is compared.
VOLATILE = re.compile(
    r"second|memory|utili[sz]ation|reason|launch|sha256|mfu|_share$|^(run|host|pid|time|slowest_rank)$"
)
KEYS_ONLY = {"run.json", "manifest.json"}
SECONDS = 240  # for one part of a case; the machine may be busy

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One start of a run."""

    processes: int
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop: tuple[int, int] | None = None  # SIGTERM in this step on this rank
    kill: tuple[int, int] | None = None  # SIGKILL
    fsdp: int = 0  # replicas of the shards; 0: DDP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run folder, or two, made by several starts one after the other."""

    make: Callable[[], Any]  # the config, with paths below the working folder
    parts: list[Part]


# ---- the cases -----------------------------------------------------------------------------------
RECIPES = {
    "image_classification": {"recipe__width": 8},
    "causal_lm": {
        "recipe__data": "files", "recipe__data_path": "inputs/texts",
        "recipe__cache_path": "cache", "recipe__validation_fraction": 0.3,
        "recipe__sequence_length": 16, "recipe__width": 32, "recipe__depth": 2,
        "recipe__dropout": 0.1, "optim__decay_steps": 3,
    },
    "embedding": {
        "recipe__data": "pairs", "recipe__data_path": "inputs/pairs", "recipe__buckets": 512,
        "recipe__width": 16,
    },
    "segmentation": {"recipe__scenes": 28, "recipe__width": 4},
    "finetune": {
        "recipe__model": "inputs/encoder", "recipe__data": "files",
        "recipe__data_path": "inputs/finetune",
    },
}  # fmt: skip


def from_card(name: str, accumulation: int, processes: int, **settings: Any) -> Callable[[], Any]:
    """Return what makes a recipe's config from its file, shortened to 6 steps."""

    def make() -> Any:
        from golden_harness import change
        from my_project.command_line import parse

        template = Path(os.environ["GOLDEN_TEMPLATE"])
        config = parse(["--config", str(template / f"configs/{name}.yaml")])
        short = RECIPES[name] | {
            "steps": 6, "epochs": None, "optim__warmup_steps": 2, "batches__global_batch_size": 16,
            "batches__micro_batch_size": 16 // processes // accumulation,
            "evaluation__every_steps": 3, "checkpoints__every_steps": 2,
            "telemetry__every_steps": 1, "telemetry__trackers": [], "run_name": "run",
        }  # fmt: skip
        return change(config, **short | settings)

    return make


def ragged(recipe: dict[str, Any], **settings: Any) -> Callable[[], Any]:
    """Return what makes a config of the recipe for tests: 10 steps of 16 samples."""

    def make() -> Any:
        from golden_harness import Ragged, Streamed, make_config
        from my_project.config import CheckpointsConfig

        kind = Streamed if "book" in recipe else Ragged
        known = {f"checkpoints__{f.name}" for f in dataclasses.fields(CheckpointsConfig)}
        gone = {"checkpoints__keep_best"} - known
        return make_config(kind(**recipe), **{k: v for k, v in settings.items() if k not in gone})

    return make


def all_cases() -> dict[str, Case]:
    """List the cases by name; the number in it is that of the processes."""
    cases: dict[str, Case] = {}
    for processes in (1, 2):
        whole = [Part(processes=processes)]
        last = processes - 1  # the rank that is told to stop

        def stopped(step: int, processes: int = processes, last: int = last) -> list[Part]:
            return [Part(processes=processes, stop=(step, last)), Part(processes=processes)]

        def add(name: str, parts: list[Part], recipe: dict[str, Any], **settings: Any) -> None:
            cases[f"{name}_{processes}"] = Case(make=ragged(recipe, **settings), parts=parts)  # noqa: B023

        for name in RECIPES:
            for accumulation in (1, 2):
                made = from_card(name, accumulation, processes)
                cases[f"{name}_accumulation_{accumulation}_{processes}"] = Case(
                    make=made, parts=whole
                )
            made = from_card(name, 2, processes, optim__ema_decay=0.9)
            cases[f"{name}_stopped_{processes}"] = Case(make=made, parts=stopped(2))
        made = from_card(
            "finetune", 2, processes, recipe__lora_rank=2, recipe__lora_dropout=0.1, optim__lr=1e-2
        )
        cases[f"finetune_lora_stopped_{processes}"] = Case(make=made, parts=stopped(2))

        random = {"dropout": 0.2, "noise": 0.1}
        judged = {
            "evaluation__every_steps": 2, "checkpoints__every_steps": 2,
            "evaluation__best_metric": "validation/accuracy",
        }  # fmt: skip
        add("plain", whole, {})
        add("workers", whole, random, batches__workers=2)
        add("workers_stopped", stopped(4), random, batches__workers=2)
        add("random_unseeded_samples", whole, {"dropout": 0.2}, batches__seed_samples=False)
        add("float64", whole, random | {"dtype": "float64"})
        add("bf16", stopped(4), random, precision="bf16")
        add("clip_hard", whole, {}, optim__clip_norm=0.1)
        add("clip_none", whole, {}, optim__clip_norm=None)
        add("batch_norm", stopped(4), {"batch_norm": True})
        add("part_of_an_epoch", whole, {}, steps=None, epochs=2.5)
        add("records_every_3_stopped", stopped(5), {}, telemetry__every_steps=3)
        add("foreground_save", stopped(4), {}, checkpoints__background=False)
        add(
            "sgd_wsd_decay", stopped(4), {}, optim__class_path="torch.optim.SGD",
            optim__init_args={"momentum": 0.9, "nesterov": True}, optim__schedule="wsd",
            optim__decay_steps=4, optim__weight_decay=0.1,
        )  # fmt: skip
        add("linear_final_lr", whole, {}, optim__schedule="linear", optim__final_lr_fraction=0.1)
        add("ema_stopped", stopped(4), random, optim__ema_decay=0.8)
        add(
            "ema_best_rotation", stopped(4), random, optim__ema_decay=0.5, checkpoints__keep=1,
            checkpoints__keep_best=True, checkpoints__keep_every_steps=4, **judged,
        )  # fmt: skip
        # nothing gets better: best at 2, stopped with half the patience used, ended at 10 of 40
        patient = {"steps": 40, "optim__lr": 1e-7, "evaluation__patience": 4} | judged
        add("ema_patience_stopped", stopped(5), {}, optim__ema_decay=0.5, **patient)
        add("nonfinite", whole, {"explode_at": (3,)}, checkpoints__every_steps=1)
        add("nonfinite_stopped", stopped(3), {"explode_at": (0, 3, 4)}, checkpoints__every_steps=1)
        add("nonfinite_unscaled", whole, {"explode_at": (3,)}, optim__clip_norm=None)
        add("first_step_empty", whole, {"empty_at": (0,)}, checkpoints__every_steps=1)
        add("empty_stopped", stopped(3), {"empty_at": (0, 4)}, optim__ema_decay=0.8)
        add("nonfinite_ends_it", whole, {"explode_at": (2, 3, 4)}, optim__max_skipped_steps=3)
        constant = {"optim__schedule": "constant", "optim__warmup_steps": 0}
        one_step = [Part(processes=processes, settings={"steps": 1}), Part(processes=processes)]
        add("saved_at_step_1", one_step, random, **constant)
        add(
            "killed", [Part(processes=processes, kill=(7, last)), Part(processes=processes)],
            random, checkpoints__every_steps=3, checkpoints__background=False,
        )  # fmt: skip
        elsewhere = {"run_name": "other", "resume": "runs/run/checkpoints/step_00000006"}
        branch = [*stopped(4)[:1], Part(processes=processes, settings=elsewhere)]
        add("resumed_by_path", branch, random)
        anew = [*stopped(4)[:1], Part(processes=processes, settings={"resume": "never"})]
        add("begun_anew", anew, random)
        stream = {"book": "book", "noise": 0.1, "dropout": 0.2}
        streamed = {"run_name": "stream"} | constant
        add("stream_endless", whole, stream, **streamed)
        add("stream_endless_stopped", stopped(4), stream, **streamed)
        add("stream_endless_stopped_early", stopped(1), stream, batches__workers=2, **streamed)

    def add_on(name: str, parts: list[Part], recipe: dict[str, Any], **settings: Any) -> None:
        cases[name] = Case(make=ragged(recipe, **settings), parts=parts)

    for hook in ("fp16", "bf16"):
        options = {"distributed__ddp": {"comm_hook": hook}}
        stop_then_go = [Part(processes=2, stop=(4, 1)), Part(processes=2)]
        add_on(f"hook_{hook}_2", stop_then_go, {"explode_at": (2,)}, **options)
    add_on(
        "unused_parameter_2", [Part(processes=2)], {"unused_parameter": True},
        distributed__ddp={"find_unused_parameters": True},
    )  # fmt: skip
    for before, after in ((2, 1), (1, 2), (2, 4), (4, 2)):
        parts = [Part(processes=before, stop=(4, 0)), Part(processes=after)]
        recipe = {"dropout": 0.2, "noise": 0.1, "dtype": "float64"}
        add_on(f"processes_{before}_then_{after}", parts, recipe, optim__ema_decay=0.8)
        recipe = {"book": "book", "noise": 0.1}
        name = f"stream_endless_processes_{before}_then_{after}"
        add_on(name, parts, recipe, run_name="stream")
    for name, parts in {
        "fsdp_stopped_2": [Part(processes=2, fsdp=1, stop=(4, 1)), Part(processes=2, fsdp=1)],
        "fsdp_2_then_1": [Part(processes=2, fsdp=1, stop=(4, 0)), Part(processes=1)],
        "fsdp_2_then_4": [Part(processes=2, fsdp=1, stop=(4, 0)), Part(processes=4, fsdp=1)],
        "hsdp_4_then_ddp_2": [Part(processes=4, fsdp=2, stop=(4, 3)), Part(processes=2)],
    }.items():
        cases[name] = Case(make=sharded, parts=parts)
    return cases


def sharded() -> Any:
    """Make a config with accumulation, clipping that binds, EMA, evaluations and best/."""
    from golden_harness import Deep, make_config

    return make_config(
        Deep(dtype="float64"), batches__micro_batch_size=2, optim__ema_decay=0.9,
        optim__schedule="constant", optim__clip_norm=8.0, evaluation__every_steps=5,
        evaluation__best_metric="validation/auroc",
    )  # fmt: skip


# ---- running a case ------------------------------------------------------------------------------
def run_part(case: Case, part: Part, work: Path) -> str:
    """Run one part in the working folder; return the exit codes, or how it failed."""
    from golden_harness import change, run_processes, start

    config = change(case.make(), runs_folder="runs", **part.settings)
    number = signal.SIGKILL if part.kill else signal.SIGTERM
    stop = part.stop or part.kill
    try:
        arguments = (start, str(work), config, stop, number, part.fsdp)
        codes = run_processes(part.processes, *arguments, seconds=SECONDS)
    except (RuntimeError, TimeoutError) as failure:
        if part.kill:
            return "killed"
        last = str(failure).strip().splitlines()[-1]
        return f"failed: {last.partition(':')[0]}"  # the sentence may change
    return repr(codes)


def run_case(case: Case, inputs: Path, work: Path) -> Facts:
    """Run the parts of a case in a new folder, with the data of the recipes; gather the facts."""
    (work / "book").mkdir(parents=True)
    shutil.copytree(inputs, work / "inputs")
    facts: Facts = {}
    for i, part in enumerate(case.parts):
        facts[f"exit codes of part {i}"] = run_part(case, part, work)
    return facts | facts_of(work / "runs") | books(work / "book")


# ---- facts ---------------------------------------------------------------------------------------
def facts_of(runs: Path) -> Facts:
    """Gather what is compared from all run folders."""
    facts: Facts = {}
    names = []
    for path in sorted(runs.glob("**/*")):
        relative = path.relative_to(runs)
        name = re.sub(r"\d{8}T\d{6}", "TIME", str(relative))
        names.append(name + "/" * path.is_dir())
        if path.suffix == ".safetensors":
            facts |= tensors(name, path)
            if path.parent.name == "export":
                facts[f"{name} bytes"] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".jsonl":
            seen: Counter[str] = Counter()  # a record that goes must not move those after it
            for content in map(json.loads, path.read_text().splitlines()):
                place = f"{name} {content.get('kind', 'line')} {content.get('step', '')}"
                seen[place] += 1
                facts |= flat(f"{place} {seen[place]}", content)
        elif path.suffix == ".json" and path.stat().st_size < 100_000:
            content = json.loads(path.read_text())
            if path.name == "run.json":
                content.pop("environment", None)  # the variables that are set here
            if path.parent.name == "errors":  # paths and lines of the code
                content.pop("frames")
                content.pop("details")
            if path.name == "manifest.json":
                state = content["manifest"].pop("state", {})
                facts |= flat(name.replace("manifest.json", "state.json"), state) if state else {}
            if path.name == "adapter_config.json":  # peft writes a set, in any order, and a path
                content["target_modules"] = sorted(content["target_modules"])
                content["base_model_name_or_path"] = "..."
            facts |= flat(name, content, keys_only=path.name in KEYS_ONLY)
        elif path.suffix == ".yaml":
            import yaml

            facts |= flat(name, yaml.safe_load(path.read_text()))
    return facts | {"files": sorted(names)}


def tensors(name: str, path: Path) -> Facts:
    """Return a digest of each tensor, without torch."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    facts: Facts = {f"{name} metadata": json.dumps(header.pop("__metadata__", None))}
    for key, about in header.items():
        start, end = (8 + length + offset for offset in about["data_offsets"])
        digest = hashlib.sha256(content[start:end]).hexdigest()[:20]
        facts[f"{name} {key}"] = f"{about['dtype']} {about['shape']} {digest}"
    return facts


def flat(prefix: str, value: Any, key: str = "", keys_only: bool = False) -> Facts:
    """List the leaves of plain data by their path; floats as they are written."""
    keys_only = keys_only or bool(key and VOLATILE.search(key))
    if isinstance(value, dict) and value:
        parts: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list) and value:
        parts = enumerate(value)
    else:
        return {prefix: "..." if keys_only else json.dumps(value)}
    facts: Facts = {}
    for name, part in parts:
        inner = key if isinstance(value, list) else str(name)
        facts |= flat(f"{prefix} {name}", part, inner, keys_only)
    return facts


def books(folder: Path) -> Facts:
    """Return what a stream's recipe noted of the samples that each step saw."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("seen_*"))
    }


def kept(facts: Facts) -> Facts:
    """Leave out what REMOVED names."""

    def is_removed(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name.rstrip("/"), pattern) for pattern in REMOVED)

    facts = {name: fact for name, fact in facts.items() if not is_removed(name)}
    if "files" in facts:
        facts["files"] = [name for name in facts["files"] if not is_removed(name)]
    return facts


# ---- record and compare --------------------------------------------------------------------------
def gather(folder: Path, only: list[str]) -> dict[str, Facts]:
    """Run the cases; return the facts by case."""
    cases = {name: case for name, case in all_cases().items() if is_chosen(name, only)}
    if not cases:
        raise SystemExit(f"no case is called {', '.join(only)}; there are {', '.join(all_cases())}")
    results: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:

        def run(name: str) -> None:
            started = time.monotonic()
            try:
                work = Path(temporary, name)
                results[name] = run_case(cases[name], folder / "inputs", work)
                shutil.rmtree(work, ignore_errors=True)
            except Exception:  # the other cases still tell something
                traceback.print_exc()
                results[name] = {"failed": "True"}
            print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(int(os.environ.get("GOLDEN_JOBS", "2"))) as pool:
            for _ in pool.map(run, cases):
                pass
    return results


def is_chosen(name: str, only: list[str]) -> bool:
    return not only or any(fnmatch.fnmatch(name, f"*{pattern}*") for pattern in only)


def record(folder: Path, only: list[str]) -> int:
    """Record the cases that FOLDER/record.json lacks."""
    from golden_harness import write_inputs

    path = folder / "record.json"
    if not (folder / "inputs").exists():
        temporary = Path(tempfile.mkdtemp(dir=folder))
        write_inputs(temporary)
        temporary.chmod(0o755)
        temporary.rename(folder / "inputs")
    before = json.loads(path.read_text())["cases"] if path.exists() else {}
    missing = [name for name in all_cases() if is_chosen(name, only) and name not in before]
    results = gather(folder, missing) if missing else {}
    content = {"made with": made_with(), "cases": before | results}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    for name, facts in results.items():
        if "failed" in facts:
            print(f"{name}: failed, see above")
        for key, value in facts.items():
            if key.startswith("exit codes") and not re.fullmatch(r"\[(0|75)(, (0|75))*\]", value):
                print(f"{name}: {key}: {value}")
    print(f"{len(results)} cases recorded")
    return 0


def compare(folder: Path, only: list[str]) -> int:
    """Run the cases; return 1 and name what differs from the record."""
    recorded = json.loads((folder / "record.json").read_text())
    print(f"made with {recorded['made with']}, compared with {made_with()}")
    results = gather(folder, only)
    wanted = {
        name: kept(facts) for name, facts in recorded["cases"].items() if is_chosen(name, only)
    }
    different = 0
    for name in sorted(wanted.keys() | results.keys()):
        theirs = wanted.get(name)
        ours = kept(results[name]) if name in results else None
        if ours == {"failed": "True"}:
            print(f"{name}: could not be run, see above")
            different += 1
            continue
        if theirs is None or ours is None:
            print(f"{name}: {'not recorded' if theirs is None else 'no longer run'}")
            different += 1
            continue
        keys = [
            key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)
        ]
        different += bool(keys)
        for key in keys[:12]:
            print(f"{name}: {key}: {difference(theirs.get(key), ours.get(key))}")
        if len(keys) > 12:
            print(f"{name}: ... and {len(keys) - 12} more")
    if different:
        print(f"{different} of {len(wanted.keys() | results.keys())} cases differ")
        return 1
    print(f"{len(results)} cases identical")
    return 0


def difference(theirs: Any, ours: Any) -> str:
    if isinstance(theirs, list) and isinstance(ours, list):
        gone = [part for part in theirs if part not in ours]
        new = [part for part in ours if part not in theirs]
        return f"without {gone}, with {new}"
    return f"{theirs} -> {ours}"


def made_with() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), "torch": version("torch"), "on": platform.node()}


def of_template(template: Path, command: str, folder: Path, only: list[str]) -> int:
    """Run record or compare in a process that imports the package of this template."""
    paths = [template / "src", Path(__file__).parent]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "GOLDEN_TEMPLATE": str(template),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
        "HF_HUB_OFFLINE": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    arguments = [sys.executable, __file__, "--folder", str(folder), "--step", command]
    return subprocess.run([*arguments, "--only", *only], env=environment, check=False).returncode


def main() -> int:
    """Record the old commit where that is not done, and compare the working tree."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build/golden")
    parser.add_argument("--base", default=BASE, help="the commit that is recorded")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--step", choices=("record", "compare"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if arguments.step:
        return {"record": record, "compare": compare}[arguments.step](folder, arguments.only)
    worktree = folder / "base"
    if not worktree.exists():
        folder.mkdir(parents=True, exist_ok=True)
        add = ["git", "worktree", "add", "--quiet", "--detach", str(worktree), arguments.base]
        subprocess.run(add, cwd=REPOSITORY, check=True)
    if code := of_template(worktree / "template", "record", folder, arguments.only):
        return code
    return of_template(REPOSITORY / "template", "compare", folder, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
