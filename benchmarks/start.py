"""Time a launch from the command to the end of the first step, and measure its memory.

    python benchmarks/start.py                 5 rounds, about 5 minutes on 2 cores; Linux
    python benchmarks/start.py --rounds 3 --processes 8 --cases "train, torchrun" "train, ours"

Each round starts every case once: the train module of the project under torchrun, under accelerate
launch and by its own command, and a plain script under torchrun. All train the same MLP on CPU
processes (first_step.py). Other load on the machine changes the seconds, so CPU time is shown too:
that of all processes together until the first step has ended, and that of the launcher including
the children that it has waited for. Ratios compare with the first case of a round. All figures are
medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """\
recipe: {{class_path: first_step.Mlp}}
batches: {{global_batch_size: {size}, micro_batch_size: 32, workers: 0, seed_samples: false}}
optim: {{lr: 1.0e-3, weight_decay: 0.05}}
telemetry: {{trackers: []}}
steps: 20
"""
TORCHRUN, ACCELERATE, OURS = "train, torchrun", "train, accelerate launch", "train, ours"
PLAIN = "plain script, torchrun"


def commands(folder: Path, processes: int) -> dict[str, list[str]]:
    """Return the commands by name."""
    config = folder / "mlp.yaml"
    config.write_text(CONFIG.format(size=32 * processes), encoding="utf-8")
    where = folder / "where.yaml"  # cpu.yaml, or cpu_2_processes.yaml with another number
    name = "cpu" if processes == 1 else "cpu_2_processes"
    text = (ROOT / f"accelerate_configs/{name}.yaml").read_text(encoding="utf-8")
    text = text.replace('"-1,-1"', f'"{",".join(["-1"] * processes)}"')
    text = text.replace("num_processes: 2", f"num_processes: {processes}")
    where.write_text(text, encoding="utf-8")
    python = [sys.executable, "-m"]
    torchrun = [*python, "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launch = [*python, "accelerate.commands.launch", "--config_file", str(where)]
    train = ["-m", "my_project.train", "--config", str(config), "--runs_folder"]
    command = [*python, "my_project", "train", str(config), "--where", str(where), "--runs_folder"]
    return {
        TORCHRUN: [*torchrun, *train, str(folder / "a")],
        ACCELERATE: [*launch, *train, str(folder / "b")],
        OURS: [*command, str(folder / "c")],
        PLAIN: [*torchrun, str(ROOT / "benchmarks/first_step.py")],
    }


def start(command: list[str], processes: int, source: Path) -> dict[str, float]:
    """Run a command to its end; return seconds and MB."""
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(source), str(ROOT / "benchmarks")])
        settings = {"PYTHONPATH": paths, "START_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        settings |= {"ACCELERATE_USE_CPU": "true"}
        environment = os.environ | settings
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else modules are compiled each time
        begun = time.time()
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        ranks = range(processes)
        # an error after the last note does not matter, since nothing is measured then
        if not all((Path(folder) / f"19_{rank}.json").is_file() for rank in ranks):
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        first = [json.loads((Path(folder) / f"1_{rank}.json").read_text()) for rank in ranks]
        last = [json.loads((Path(folder) / f"19_{rank}.json").read_text()) for rank in ranks]
    return {
        "seconds": max(used["time"] for used in first) - begun,
        "processes' CPU s": sum(used["cpu_seconds"] for used in first),
        "launcher's CPU s": first[0]["launcher_cpu_seconds"],
        "RSS, MB": max(used["VmRSS"] for used in last),
        "anonymous RSS, MB": max(used["RssAnon"] for used in last),
    }


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    names = (TORCHRUN, ACCELERATE, OURS, PLAIN)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--source", type=Path, default=ROOT / "template/src", help="another copy")
    options = parser.parse_args()
    by_case: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            cases = commands(Path(folder), options.processes)
            for name in options.cases:
                numbers = start(cases[name], options.processes, options.source)
                if number:  # not the first round, which compiles modules and reads them from disk
                    by_case.setdefault(name, []).append(numbers)
    baseline = by_case[options.cases[0]]
    columns = [*baseline[0]]
    print(f"| {options.rounds} rounds | {' | '.join(columns)} | seconds, ratio | CPU s, ratio |")
    print("|---" * (len(columns) + 3) + "|")
    for name, rounds in by_case.items():
        cells = [f"{statistics.median(r[column] for r in rounds):.4g}" for column in columns]
        for parts in (columns[:1], columns[1:3]):
            pairs = zip(rounds, baseline, strict=True)
            ratios = [sum(a[p] for p in parts) / sum(b[p] for p in parts) for a, b in pairs]
            cells.append(f"{statistics.median(ratios):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
