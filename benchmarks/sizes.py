"""Print the table of sizes in accelerate_configs/README.md, from simulated steps.

    PYTHONPATH=template/src .venv/bin/python benchmarks/sizes.py

It takes about five minutes.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from my_project.recipes.causal_lm import CausalLM
from my_project.tools.simulate import Simulator

PROJECT = Path(__file__).parents[1] / "template"
# accelerate config, nodes and GPUs per node
CLUSTERS = (
    ("gpu", 1, 1), ("fsdp2", 1, 8), ("multi_node_hsdp", 8, 8), ("multi_node_fsdp2", 8, 8)
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sized(CausalLM):
    """causal_lm without data: a vocabulary of 32,000 tokens, sequences of 2,048 tokens."""

    sequence_length: int = 2048

    def prepare_data(self) -> dict[str, Any]:  # noqa: D102
        return {"vocab_size": 32_000}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: D102
        return [torch.zeros(self.sequence_length + 1, dtype=torch.long)] * 8, {}


RECIPES = {
    "124 M": Sized(width=768, depth=14, heads=12),
    "1 B": Sized(width=2048, depth=19, heads=16),
    "7 B": Sized(width=4096, depth=34, heads=32),
    "70 B": Sized(width=8192, depth=87, heads=64),
}


def row(name: str) -> str:
    """Return the line of the table for one model."""
    recipe = RECIPES[name]
    sizes = {key: getattr(recipe, key) for key in ("width", "depth", "heads")}
    with TemporaryDirectory() as folder:
        path = Path(folder, "sized.yaml")
        path.write_text(
            f"recipe:\n  class_path: sizes.Sized\n  init_args: {sizes}\nsteps: 1\n"
            "batches: {global_batch_size: 64, micro_batch_size: 1}\n"
            f"runs_folder: {folder}\n"
            "distributed: {activation_checkpointing: true}\n"
        )
        words = ["--config", str(path)]
        gigabytes = []
        for where, nodes, gpus in CLUSTERS:
            size = ["--batches.global_batch_size", str(nodes * gpus)]
            simulator = Simulator([*words, *size])
            step = simulator.step(str(PROJECT / f"accelerate_configs/{where}.yaml"), nodes, gpus)
            gigabytes.append(f"{float(f'{step.peak_bytes / 1e9:.3g}'):,g}")
    return f"| {' | '.join([name, *gigabytes])} |"


def head() -> list[str]:
    """Return the first two lines of the table."""
    columns = [f"`{where}`, {nodes * gpus}" for where, nodes, gpus in CLUSTERS]
    return [f"| {' | '.join(['parameters', *columns])} |", "|" + "---|" * (len(columns) + 1)]


if __name__ == "__main__":
    print(*head(), sep="\n")
    for name in RECIPES:
        print(row(name), flush=True)
