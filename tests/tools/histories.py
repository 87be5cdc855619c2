"""Run folders as training leaves them, made without training: for tests of what reads them."""

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAGUlEQVR4nGNgYGBg+A8FDAwM"
    "/yEAyIWLAADuvhfpFgVJ0wAAAABJRU5ErkJggg=="
)
BEGAN = 1_790_000_000.0  # seconds since 1970


def write_history(folder: Path, **settings: Any) -> Path:
    """Write a run folder; see `records_of` for its curves."""
    options = {"state": "finished", "steps": 3000, "lr": 0.01, "failure": None, "records": None}
    options |= settings
    folder.mkdir(parents=True)
    made = options.pop("records")
    state, failure = options.pop("state"), options.pop("failure")
    records = list(records_of(**options)) if made is None else made
    with (folder / "metrics.jsonl").open("w") as file:
        for record in records:
            kind = "interval" if {"loss", "samples_per_second"} & {*record} else "evaluation"
            file.write(json.dumps({"kind": kind} | record) + "\n")
    done = records[-1]["step"] if records else 0
    status = {"outcome": state, "step": done, "steps": options["steps"], "reason": ""}
    status |= {"seconds": 12.5, "paused_seconds": 1.0}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text(CONFIG.replace("LR", str(options["lr"])))
    (folder / "run.json").write_text(json.dumps(about(folder)))
    if failure is not None:
        (folder / "errors").mkdir()
        name = "20260921T120000_rank_00003_step_00000120.json"
        (folder / "errors" / name).write_text(json.dumps(FAILURE | failure))
    return folder


CONFIG = """
recipe:
  class_path: my_project.recipes.image_classification.ImageClassification
  init_args: {model: mini_resnet, width: 16, label_smoothing: 0.0}
batches: {global_batch_size: 64, micro_batch_size: 16, workers: null}
steps: 3000
optim: {class_path: torch.optim.AdamW, lr: LR, weight_decay: 0.05, schedule: cosine}
evaluation: {every_steps: 250, best_metric: validation/accuracy, best_mode: max}
run_name: image_classification
seed: 0
"""

FAILURE = {
    "rank": 3,
    "host": "gpu-b",
    "step": 120,
    "launch": "0490364b",
    "time": BEGAN,
    "reason": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)",
    "cause": "exception",
    "exit_code": 1,
    "attempt": 0,
    "at": {"file": "recipe.py", "line": 41, "function": "loss", "code": "x @ w", "library": None},
    "frames": [],
    "details": "",
}


def about(folder: Path) -> dict[str, Any]:
    """Return the content of run.json."""
    return {
        "run": "4148bd8d",
        "launch": "0490364b",
        "numerics": {"precision": "bf16", "tf32": True, "deterministic": False},
        "lengths": {"the training set": 1438, "validation set validation": 359},
        "recipe_sha256": "8cbb3a6d53451f24cbd349fd4bb5cbb016d9ad5ffb8cda98e678bef8a79662fb",
        "launcher": [
            *("python", "-m", "accelerate.commands.launch", "--config_file"),
            *("accelerate_configs/multi_gpu.yaml", "-m", "my_project.train", "--config"),
            "configs/image_classification.yaml",
        ],
        "command": ["python", "-u", "-m", "my_project.train", "--optim.lr", "0.01"],
        "folder": str(folder.parent),
        "host": "gpu-a",
        "python": "3.11.7",
        "packages": {"torch": "2.15.0", "accelerate": "1.15.0"},
        "git_commit": "fa31e5abac404b0c5e0aebba58cc28a32b779d6a",
        "git_dirty": True,
        "environment": {"ACCELERATE_MIXED_PRECISION": "bf16", "WORLD_SIZE": "8"},
    }


def records_of(
    *,
    steps: int,
    lr: float,
    preempted_at: tuple[int, ...] = (),
    killed_at: tuple[int, ...] = (),
    spiked_at: tuple[int, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the records of a run: intervals of 10 steps, an evaluation and a save every 250.

    Args:
        steps: of the whole run.
        lr: the peak of the learning rate; a higher one learns faster here.
        preempted_at: steps at which the run stops, and starts again.
        killed_at: steps from which it starts again without having stopped.
        spiked_at: steps at which the loss is forty times what it was.
    """
    elapsed, best = 0.0, 0.0

    def common(kind: str, step: int) -> dict[str, Any]:
        where = {"step": step, "epoch": round(step * 64 / 1438, 4)}
        return {"kind": kind, **where, "elapsed_seconds": elapsed, "time": BEGAN + elapsed * 1.05}

    def start(step: int) -> dict[str, Any]:
        hosts = ["gpu-a"] * 4 + ["gpu-b"] * 4
        path = f"checkpoints/step_{step:08d}" if step else None
        return common("start", step) | {"world_size": 8, "hosts": hosts, "resumed_from": path}

    yield start(0)
    for step in range(10, steps + 1, 10):
        done = step / steps
        elapsed += 1.2
        loss = (2.4 * math.exp(-6 * done * lr / 0.01) + 0.03) * (40 if step in spiked_at else 1)
        yield common("interval", step) | {
            "steps": 10,
            "skipped": 0,
            "skipped_steps": 0,
            "loss": loss,
            "learning_rate": lr * (1 + math.cos(math.pi * done)) / 2,
            "gradient_norm": 2.2 * (1 + 3 * math.exp(-40 * done)),
            "samples_per_second": 533.0,
            "peak_memory_bytes": int(9.1e9 + 2e8 * done),
            "step_seconds": 0.12,
            "data_share": 0.05,
            "forward_share": 0.26,
            "backward_share": 0.48,
            "slowest_rank": 3,
            "slowest_host": "gpu-a",
        }
        if step % 250 == 0 or step == steps:
            elapsed += 3.1
            accuracy = 1 - 0.9 * math.exp(-5 * done)
            results = {"validation/accuracy": accuracy, "validation/loss": loss * 1.2 + 0.05}
            extra = {"seconds": 3.1, "is_best": accuracy > best}
            yield common("evaluation", step) | extra | results
            best = max(best, accuracy)
            elapsed += 0.4
            yield common("checkpoint", step) | {"seconds": 0.4}
        if step in preempted_at:
            yield common("stop", step) | {"reason": "SIGTERM"}
        if step in preempted_at + killed_at:
            elapsed += 8
            yield start(step)


# ---- a stranger's text ---------------------------------------------------------------------------
ATTACK = (
    "</script><script>parent.postMessage('owned','*')</script></style></title>"
    "<img src=SERVER onerror=\"parent.postMessage('owned','*')\">"
    '"><img src=SERVER>\' onload=\'parent.postMessage("owned","*")\' style=\'background:url(SERVER)'
)


def write_attack(folder: Path, server: str) -> Path:
    """Write a run folder each of whose texts is an attack."""
    attack = ATTACK.replace("SERVER", server)
    run = folder / attack.replace("/", "\u2044")[:60]
    found = list(records_of(steps=200, lr=0.01, spiked_at=(100,), preempted_at=(150,)))
    for record in found:
        for name in ("slowest_host", "reason", "resumed_from"):
            if name in record:
                record[name] = attack
        if record["kind"] == "start":
            record["hosts"] = [attack]
        if record["kind"] == "evaluation":
            record |= {attack: 0.5, f"{attack}/loss": 0.7, "sample": attack, "pictures": [attack]}
    found.append({"kind": "numerics", "step": 200, "changed": {attack: [attack, attack]}})
    at = {"file": attack, "line": 1, "function": attack, "code": attack, "library": None}
    failure = {"reason": attack, "host": attack, "at": at}
    write_history(run, records=found, state="failed", failure=failure)
    settings = {attack: attack, "evaluation": {"best_metric": attack}, "list": [attack]}
    (run / "config.yaml").write_text(json.dumps(settings))
    content = {
        name: attack if isinstance(value, str) else {attack: attack, "x": [attack]}
        if isinstance(value, dict) else [attack] * 3 if isinstance(value, list) else value
        for name, value in about(run).items()
    }  # fmt: skip
    content |= {"launch": "0490364b", "launcher": ["--config_file", attack]}
    (run / "run.json").write_text(json.dumps(content))
    return run
