"""Inject 60 faults into runs, ask doctor, and compare its answer with the fault; Linux.

    python tests/faults.py             run the faults that build/faults/results.jsonl lacks, and
                                       print the table
    python tests/faults.py 3 17        run these two again
    python tests/faults.py --table     print the table of the results so far
    python tests/faults.py --sound 100 train 100 correct runs, in which nothing must be found wrong
    python tests/faults.py --files     let file operations of a run fail (tests/loop/file_faults.py)
    python tests/faults.py --kills-of-launch 56 --seed 1
                                       kill launchers and their processes (kills_of_launch.py)

The faults are drawn with a fixed seed. The expected answer of doctor (the rank, words of the cause)
and the expected exit code of the launcher follow from the fault, not from what they print. An
answer is right if it has the words and if the first rank that it names is the expected one, or any
rank if no single rank is to blame. Some faults need root: two hosts, a full disk, a control group.
"""

import argparse
import importlib
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import psutil
from hosts import ADDRESSES, PATIENCE, Hosts, steps

ROOT = Path(__file__).resolve().parents[1]
PATHS = [ROOT / folder for folder in ("template/src", "template/tests", "tests", "tests/loop")]
RESULTS = ROOT / "build/faults/results.jsonl"
CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1
SEED = 30
RUN = "runs/run"
CONFIG = """\
run_name: run
recipe: {{class_path: faulty.Faulty, init_args: {recipe}}}
batches: {{global_batch_size: 8, micro_batch_size: 2, workers: {workers}}}
steps: {steps}
optim: {{lr: 0.01, max_skipped_steps: 3}}
evaluation: {{every_steps: 6}}
checkpoints: {{every_steps: 4}}
telemetry: {{every_steps: 1, trackers: [], peak_tflops: 1.0}}
distributed:
  timeout_seconds: {timeout:g}
  startup_timeout_seconds: {startup:g}
  activation_checkpointing: {blocks}
"""
TIMEOUT_SECONDS, STARTUP_SECONDS = 4 * PATIENCE, 15 * PATIENCE
FAILED, WRONG_SETTING, PREEMPTED = 1, 2, 75
# Where a kill or a hang happens: at the start, in a step (most often), or in an evaluation.
INSTANTS = ("build_model", "loss", "loss", "loss", "update_metrics")
METHODS = (
    "prepare_data", "build_datasets", "build_model", "loss", "collate", "parameter_groups",
    "model_blocks", "build_metrics", "update_metrics", "flops_per_item", "export",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, the expected answer of doctor and the expected exit code."""

    kind: str
    words: str  # a regular expression for the cause
    exit_code: int = FAILED
    rank: int | None = None  # the rank to blame; None: no single rank
    recipe: dict[str, Any] = field(default_factory=dict)
    processes: int = 2
    workers: int = 0
    steps: int = 12
    needs_root: bool = False
    is_busy: bool = False  # two other processes take all CPU time they get


def drawn() -> list[Fault]:
    """Return the 60 faults."""
    draw = random.Random(SEED)
    faults: list[Fault] = []

    def add(kind: str, words: str, what: str, where: str = "loss", **more: Any) -> None:
        """Add a fault on a rank that is drawn; `rank` is the rank to blame, if that differs."""
        processes = more.pop("processes", draw.choice((1, 2, 2)))
        on_rank = more.pop("on_rank", draw.randrange(processes))
        step = more.pop("step", draw.randrange(1, 10))
        recipe = {"fault": what, "fault_in": where, "fault_at": step, "fault_on_rank": on_rank}
        recipe |= more.pop("recipe", {})
        more = {"rank": on_rank, "is_busy": draw.random() < 0.25} | more
        faults.append(Fault(kind=kind, words=words, recipe=recipe, processes=processes, **more))

    killed = "SIGKILL|signal 9|was killed"
    for instant in draw.sample(INSTANTS, 5):
        add("SIGKILL", killed, "signal", instant, recipe={"detail": "SIGKILL"})
    stalled = "stall|no progress|hang|hung"
    for instant in ("loss", "loss", "build_datasets", "update_metrics"):
        add("hang", stalled, "hang", instant)
    add("hang", stalled, "hang", "export", on_rank=0)
    add("hang", stalled, "receive", processes=2)
    for _ in range(3):
        # a stopped process writes nothing: if it is the only one, the launcher must report it
        add("SIGSTOP", f"no report|stopped|{stalled}", "signal", processes=2,
            recipe={"detail": "SIGSTOP"})  # fmt: skip
    for _ in range(3):
        # each host sees that the other one is gone, so either may be named
        add("cut cable", r"(?s)(?=.*host[01])(?=.*(network|answer|connect|contact))", "cable",
            rank=None, needs_root=True, processes=2, steps=5000,
            recipe={"seconds": 0.05})  # fmt: skip
    for instant in ("build_model", "loss", "loss"):
        # a disk that is full before the first step is refused, since no save would work
        code = WRONG_SETTING if instant == "build_model" else FAILED
        add("full disk", "disk|no space", "disk", instant, rank=0, needs_root=True, exit_code=code)
    for _ in range(3):
        add("NaN loss", "not finite|NaN", "nan", step=draw.randrange(1, 7))
    add("NaN weights", "not finite|NaN", "weights", rank=None, step=draw.randrange(1, 7))
    for what in ("device memory", "host memory", "python memory"):
        add("out of memory", "memory", what)
    add("out of memory", "memory", "kernel", needs_root=True)
    for _ in range(3):
        slow = {"slow_rank": draw.randrange(2), "seconds": 0.3}
        add("slow rank", "slow", "", processes=2, recipe=slow, rank=slow["slow_rank"], exit_code=0)
    for detail in ("0", "1", "7"):
        add("exit in a loader worker", "loader worker", "exit", "sample", workers=1,
            recipe={"detail": detail})  # fmt: skip
    add("SIGKILL of a loader worker", "loader worker", "signal", "sample", workers=1,
        recipe={"detail": "SIGKILL"})  # fmt: skip
    # the worker reads its first sample before the first step, where an exception exits with 2
    add("exception in a loader worker", "told to fail in sample", "raise", "sample", workers=1,
        exit_code=WRONG_SETTING)  # fmt: skip
    for _ in range(3):
        add("mismatched collective", "collective", "collective", processes=2,
            recipe={"detail": draw.choice(("1", "1000"))})  # fmt: skip
    for package in ("the recipe", "the loop"):
        # the other code is found before the first step
        add("other code on a host", "(?s)(?=.*host1)(?=.*(code|source))", package, rank=None,
            exit_code=WRONG_SETTING, processes=2, needs_root=True)  # fmt: skip
    for method in METHODS:
        only: dict[str, Any] = {"on_rank": 0} if method in ("flops_per_item", "export") else {}
        if method not in ("loss", "export"):
            only["exit_code"] = WRONG_SETTING  # it is called before the first step
        add("exception in a method", f"told to fail in {method}", "raise", method, **only)
    for _ in range(3):
        add(
            "os._exit(0)",
            r"exit(ed)? (with )?(exit )?(code )?0|left|no report",
            "exit",
            recipe={"detail": "0"},
        )
    for what in ("at once", "later"):
        # one start finishes; the other may be tried again, so it exits with 1, not 2
        add("two starts", "", what, rank=None, steps=300, recipe={"seconds": 0.05})
    for what in ("signal", "signal", "signal launcher"):
        add("preemption", "preempt|told to stop|SIGTERM", what, rank=None, exit_code=PREEMPTED,
            steps=5000, recipe={"detail": "SIGTERM"})  # fmt: skip
    return faults


FAULTS = drawn()


def is_right(fault: Fault, answer: str) -> bool:
    """Return whether doctor's answer names the rank and the cause before its remedy."""
    answer = " ".join(re.split(r"\n  (look at|remedy) ", answer)[0].split())
    first = re.search(r"\brank (\d+)", answer, re.IGNORECASE)
    blamed = int(first[1]) if first else None
    if fault.kind == "two starts":
        return is_sound(answer)
    return fault.rank in (None, blamed) and bool(re.search(fault.words, answer, re.IGNORECASE))


def is_sound(answer: str) -> bool:
    """Return whether doctor says that nothing is wrong, and nothing else."""
    rows = {
        line[2:10].strip(): line[11:].strip()
        for line in answer.splitlines()[1:]
        if line[2:3] != " "
    }
    is_fine = bool(re.search(r"nothing (is |was |looks )?wrong|no failure", answer, re.IGNORECASE))
    return is_fine and rows.keys() <= {"", "what", "known", "remedy"}


# ---- running -------------------------------------------------------------------------------------
def environment(*first: Path) -> dict[str, str]:
    """Return the environment variables of a run, with folders that Python searches first."""
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PYTHONPATH": os.pathsep.join(map(str, [*first, *PATHS])), "PATH": binaries}


def command(processes: int, *flags: str) -> list[str]:
    """Return the command that starts a run, without restarts in place."""
    where = ROOT / f"accelerate_configs/{'cpu' if processes == 1 else 'cpu_2_processes'}.yaml"
    launch = [sys.executable, "-m", "my_project.launch", "--config_file", str(where)]
    train = ["-m", "my_project.train", "--config", "run.yaml"]
    return [*launch, "--max_restarts", "0", *flags, *train]


@contextmanager
def busy(is_busy: bool) -> Iterator[None]:
    """Keep the CPU busy with two other processes, if `is_busy`."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(2 * is_busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def wait_for(condition: Any, *launchers: subprocess.Popen) -> None:
    """Wait until a condition holds, or a launcher has ended."""
    while not condition() and all(launcher.poll() is None for launcher in launchers):
        time.sleep(0.05)


def ended(launcher: subprocess.Popen) -> int:
    """Return the exit code of a launcher; kill it and its children if it does not end."""
    family = psutil.Process(launcher.pid)
    try:
        return launcher.wait(180 * PATIENCE)
    except subprocess.TimeoutExpired:
        with suppress(psutil.NoSuchProcess):
            for process in [*family.children(recursive=True), family]:
                process.kill()
        return launcher.wait()


def inject(fault: Fault, folder: Path) -> list[int]:
    """Train with a fault; return the exit codes of the launchers.

    Args:
        fault: the fault to inject.
        folder: an empty folder.
    """
    recipe, what = dict(fault.recipe), fault.recipe["fault"]
    with ExitStack() as stack:
        if what == "disk":
            (disk := folder / "runs").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "faults", disk], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
            # doctor is asked later, about a copy on a disk with free space
            stack.callback(shutil.copytree, disk, folder / "kept", dirs_exist_ok=True)
            recipe["detail"] = str(disk)
        if what == "kernel":
            group = CONTROL_GROUPS / f"faults_{os.getpid()}"
            group.mkdir()
            stack.callback(group.rmdir)
            (group / "memory.limit_in_bytes").write_text("100000000")
            recipe["detail"] = str(group)
        text = CONFIG.format(
            recipe=json.dumps(recipe), workers=fault.workers, steps=fault.steps,
            timeout=TIMEOUT_SECONDS, startup=STARTUP_SECONDS,
            blocks=str(recipe["fault_in"] == "model_blocks").lower(),
        )  # fmt: skip
        (folder / "run.yaml").write_text(text)
        if fault.kind in ("cut cable", "other code on a host"):
            return on_two_hosts(stack.enter_context(Hosts(folder)), fault, folder)
        return on_this_host(fault, folder)


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    """Start a command in a folder."""
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            arguments, cwd=folder, env=os.environ | environment(), stdout=output, stderr=output
        )


def on_this_host(fault: Fault, folder: Path) -> list[int]:
    """Start a run, or two; return their exit codes."""
    launchers = [start(folder, *command(fault.processes))]
    if fault.kind == "two starts":
        if fault.recipe["fault"] == "later":
            wait_for(lambda: steps(folder / RUN) > 2, *launchers)
        launchers.append(start(folder, *command(fault.processes)))
    return [ended(launcher) for launcher in launchers]


def on_two_hosts(hosts: Hosts, fault: Fault, folder: Path) -> list[int]:
    """Start a run on two hosts; return their exit codes."""
    paths: list[list[Path]] = [[], []]
    if fault.kind == "other code on a host":
        other = folder / "other"
        if fault.recipe["fault"] == "the recipe":
            other.mkdir()
            source, old, new = ROOT / "tests/faulty.py", 'float("nan")', 'float("inf")'
            (other / "faulty.py").write_text(source.read_text().replace(old, new))
        else:
            shutil.copytree(ROOT / "template/src", other, symlinks=False)
            with (other / "my_project/step_sums.py").open("a") as file:
                file.write("\nOTHER = 1\n")
        paths[1] = [other]
    for host in (0, 1):
        flags = ("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(host),
                 "--main_process_ip", ADDRESSES[0], "--main_process_port", "29500",
                 "--join_timeout_seconds", "60")  # fmt: skip
        hosts.start(host, *command(2, *flags), **environment(*paths[host]))
    if fault.kind == "cut cable":
        wait_for(lambda: steps(folder / RUN) > fault.recipe["fault_at"], *hosts.commands)
        hosts.cable(1, "down")
    return hosts.wait(180)


def doctor(folder: Path, run: Path | None = None) -> str:
    """Ask doctor about the run in a folder."""
    kept = folder / "kept/run"
    run = run or (kept if kept.exists() else folder / RUN)
    asked = [sys.executable, "-m", "my_project", "doctor", str(run)]
    done = subprocess.run(
        asked, cwd=folder, env=os.environ | environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def run(fault: Fault, folder: Path) -> dict[str, Any]:
    """Inject a fault; return the result."""
    began = time.time()
    with busy(fault.is_busy):
        codes = inject(fault, folder)
    # launchers refuse other code before a run folder exists, so their output is the answer
    is_refused = fault.kind == "other code on a host"
    answer = (folder / "host0.txt").read_text() if is_refused else doctor(folder)
    expected = (
        [0, fault.exit_code] if fault.kind == "two starts" else [fault.exit_code] * len(codes)
    )
    return {
        "kind": fault.kind,
        "is_right": is_right(fault, answer),
        "exits_right": sorted(codes) == expected,
        "exit_codes": codes,
        "seconds": round(time.time() - began, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "answer": answer,
    }


# ---- correct runs --------------------------------------------------------------------------------
FIVE = ("causal_lm", "embedding", "finetune", "image_classification", "segmentation")
OWN = ("Vae", "Ddpm", "Translation", "Detection", "Contrastive", "Paths", "Taught", "Frozen")
# "gan" follows the page on two optimizers, which edits train.py.
SOUND = ("Faulty", "Deep", "Noting", "Streamed", *OWN, *FIVE, "gan")
SOUND_MODULES = ("faulty", "sound_recipes", "streamed", "test_how_to")
MODULES = {"Faulty": "faulty", "Deep": "ragged", "Noting": "ragged", "Streamed": "streamed"}
SHORT = "--epochs null --steps 4 --overfit_batches 4 --batches.global_batch_size 8"


def sound_run(number: int, folder: Path) -> list[str]:
    """Train a correct run that is drawn by its number, in two starts if it is preempted.

    Returns:
        For each start doctor's answer, and lines on warnings, checks and wrong exit codes.
    """
    draw = random.Random(f"{SEED} {number}")
    name, processes = SOUND[number % len(SOUND)], draw.choice((1, 2, 4))
    train = ["--config", "run.yaml"]
    if name in FIVE:
        train = ["--config", str(ROOT / f"template/configs/{name}.yaml"), *SHORT.split()]
        train += ["--run_name", "sound"]
        if name != "embedding":  # its loss needs the global batch in one micro-batch per rank
            train += ["--batches.micro_batch_size", "2"]
    elif name == "gan":
        train = gan(folder)
    else:
        (folder / "run.yaml").write_text(sound_config(name, draw))
    ends = draw.choices(("whole", "stopped", "killed"), (5, 3, 2))[0]
    answers = []
    for flags in [["--stop_after", "0s"], []] if ends == "stopped" else [[]]:
        where = command(processes)[3:-4]  # up to -m
        where += ["--num_processes", "4"] * (processes == 4)
        where[where.index("--max_restarts") + 1] = "3"
        if not (child := os.fork()):  # a fork need not import again
            launched(folder, [*where, "-m", "my_project.train", *train, *flags])
        if ends == "killed":
            kill_a_rank(child, folder, draw)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (run,) = (path.parent for path in folder.glob("runs/*/config.yaml"))
        lines = [f"said: {text}" for text in [*checks(run), *warned(folder)]]
        if code != (PREEMPTED if flags else 0):
            lines.append(f"exit code {code}: {(folder / 'output.txt').read_text()}")
        doctors = "doctor\n  what     no failure" if ends == "killed" else doctor(folder, run)
        answers.append("\n".join([doctors, *lines]))
    return answers


def sound_config(name: str, draw: random.Random) -> str:
    """Return a config for a recipe of the tests, with settings that are drawn."""
    recipe = {"dropout": draw.choice((0.0, 0.2)), "samples": draw.choice((24, 70))}
    recipe |= {"book": "."} if name == "Streamed" else {}
    recipe |= {"noise": draw.choice((0.0, 0.1))}
    text = CONFIG.replace("faulty.Faulty", f"{MODULES.get(name, 'sound_recipes')}.{name}").format(
        recipe=json.dumps(recipe), workers=draw.choice((0, 0, 1)), steps=draw.randrange(5, 30),
        timeout=600, startup=1800, blocks="false",
    )  # fmt: skip
    text += f"precision: '{draw.choice(('no', 'bf16'))}'\n"
    return text.replace("lr: 0.01", draw.choice(("lr: 0.01", "lr: 0.01, ema_decay: 0.5")))


def kill_a_rank(launcher: int, folder: Path, draw: random.Random) -> None:
    """Kill one of the processes once they train; the launcher starts them again in place."""
    while not any(map(steps, folder.glob("runs/[!.]*"))) and not os.waitid(
        os.P_PID, launcher, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(0.02)
    with suppress(psutil.NoSuchProcess, IndexError):
        draw.choice(psutil.Process(launcher).children()).kill()


def gan(folder: Path) -> list[str]:
    """Apply the changes of the page on two optimizers; return the arguments of its run."""
    import test_how_to  # pyright: ignore[reportMissingImports]

    (folder / "src/my_project").mkdir(parents=True)
    (folder / "recipes").mkdir()
    shutil.copy(ROOT / "template/src/my_project/train.py", folder / "src/my_project")
    (diff,) = test_how_to.blocks(test_how_to.page_of("two-optimizers"), "diff")
    subprocess.run(["git", "apply", "-p0"], input=diff, text=True, cwd=folder, check=True)
    files = test_how_to.files_of("two-optimizers") | {"run.yaml": test_how_to.CONFIG}
    for file, text in files.items():
        (folder / file).write_text(text)
    flags = "--recipe my_project.recipes.table.Gan --run_name gan --epochs null --steps 40"
    unused = ["--distributed.ddp.find_unused_parameters", "true"]
    return ["--config", "run.yaml", *flags.split(), *unused]


def warned(folder: Path) -> list[str]:
    """Return the lines that were logged as warnings."""
    path = folder / "warnings.txt"
    return path.read_text().splitlines() if path.exists() else []


def checks(run: Path) -> list[str]:
    """Return the problems that the checks of a run have found."""
    path = run / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [f"check {r['check']}: {r['problem']}" for r in records if r.get("kind") == "check"]


def import_all(*more: str) -> None:
    """Import what a run imports, so that forks of this process need not."""
    sys.path[:0] = map(str, PATHS)
    from my_project.launching import launch

    launch.prepare_environment()
    for name in (launch.TRAIN, *launch.DEFERRED, "torchmetrics.classification", *more):
        importlib.import_module(name)


def note_warnings(file: Path) -> None:
    """Append each warning that this process or a fork of it logs to a file."""
    make = logging.getLogRecordFactory()

    def record(*arguments: Any, **more: Any) -> logging.LogRecord:
        made = make(*arguments, **more)
        if made.levelno >= logging.WARNING:
            with file.open("a") as lines:
                lines.write(" ".join(made.getMessage().split()) + "\n")
        return made

    logging.setLogRecordFactory(record)


def launched(folder: Path, arguments: list[str]) -> NoReturn:
    """Launch in this process, which has imported everything, and exit."""
    from my_project import exits
    from my_project.launching import launch

    os.chdir(folder)
    with open("output.txt", "a") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    note_warnings(folder / "warnings.txt")
    if (folder / "src").exists():  # it contains an edited train.py
        import test_how_to  # pyright: ignore[reportMissingImports]

        test_how_to.use(folder)
    try:
        exits.run(launch.main, arguments)
    except SystemExit as end:  # it must not reach the code that forked this process
        os._exit(end.code)  # type: ignore[arg-type]
    os._exit(1)


def sound_runs(count: int) -> list[int]:
    """Train the correct runs that have no result yet; return the numbers of runs with findings."""
    import_all(*SOUND_MODULES)
    file = RESULTS.with_name("sound.jsonl")
    by_number = results(file)
    for number in range(count):
        if number not in by_number:
            with tempfile.TemporaryDirectory() as folder:
                began = time.time()
                answers = sound_run(number, Path(folder))
            seconds = round(time.time() - began, 1)
            by_number[number] = {"number": number, "answers": answers, "seconds": seconds}
            with file.open("a") as results_file:
                results_file.write(json.dumps(by_number[number]) + "\n")
    numbers = range(count)
    return [n for n in numbers if not all(map(is_sound, by_number[n]["answers"]))]


# ---- files ---------------------------------------------------------------------------------------
def fail_files() -> list[str]:
    """Let file operations fail, be slow or have no effect; return the cases that went wrong."""
    sys.path[:0] = map(str, PATHS)
    cases: Any = importlib.import_module("file_faults")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        runs = cases.Runs(Path(folder), ROOT / "template/accelerate_configs/cpu.yaml")
        digest = cases.prepare(runs)
        for name in cases.CASES:
            lines.append(f"{name}: {cases.what_is_wrong(runs, name, digest) or 'right'}")
            print(lines[-1], flush=True)
        runs.close()
    return [line for line in lines if not line.endswith(": right")]


# ---- the table -----------------------------------------------------------------------------------
def results(path: Path) -> dict[int, dict[str, Any]]:
    """Return the newest result of each fault or correct run, by its number."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["number"]: line for line in map(json.loads, lines)}


def table() -> str:
    """Return the table of results by kind of fault."""
    rows = ["| fault | tried | named right | exit code right |", "| --- | --- | --- | --- |"]
    for kind in [*dict.fromkeys(fault.kind for fault in FAULTS), "all"]:
        tried = [case for case in results(RESULTS).values() if kind in (case["kind"], "all")]
        named, exits = (sum(case[name] for case in tried) for name in ("is_right", "exits_right"))
        rows.append(f"| {kind} | {len(tried)} | {named} | {exits} |")
    return "\n".join(rows)


def main() -> None:
    """Run faults, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--sound", type=int, default=0)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--kills-of-launch", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if options.files:
        raise SystemExit(len(fail_files()))
    if options.sound:
        print(f"{options.sound} correct runs; something is wrong in {sound_runs(options.sound)}")
        return
    if options.kills_of_launch:
        import kills_of_launch

        import_all("ragged")
        with tempfile.TemporaryDirectory() as folder:
            numbers = [*range(options.kills_of_launch)]
            kills_of_launch.kill_launches(numbers, options.seed, Path(folder))
        return
    left = [i for i in range(len(FAULTS)) if i not in results(RESULTS)]
    for number in [] if options.table else options.numbers or left:
        fault = FAULTS[number]
        if fault.needs_root and os.geteuid():
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = {"number": number} | run(fault, Path(folder))
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        right = "right" if result["is_right"] and result["exits_right"] else "WRONG"
        print(number, right, fault, result["exit_codes"], result["seconds"], flush=True)
    print(table())


if __name__ == "__main__":
    main()
