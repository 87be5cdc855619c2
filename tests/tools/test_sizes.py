"""The table of sizes in accelerate_configs/README.md, from simulated steps.

    PYTHONPATH=template/src:template/tests .venv/bin/python tests/tools/test_sizes.py

prints it.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from documents import PROJECT, text_of
from my_project.tools.simulate import SHARDED_SINCE, Simulator
from torch.torch_version import TorchVersion

pytest.importorskip("my_project.recipes.causal_lm")

from my_project.recipes.causal_lm import CausalLM

# accelerate config, nodes and GPUs per node
CLUSTERS = (
    ("gpu", 1, 1), ("fsdp2", 1, 8), ("multi_node_hsdp", 8, 8), ("multi_node_fsdp2", 8, 8)
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sized(CausalLM):
    """causal_lm without data: 32,000 tokens in the vocabulary, sequences of 2,048."""

    sequence_length: int = 2048

    def prepare_data(self) -> dict[str, Any]:
        return {"vocab_size": 32_000}

    def build_datasets(self, data_info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return [torch.zeros(self.sequence_length + 1, dtype=torch.long)] * 8, {}


RECIPES = {
    "124 M": Sized(width=768, depth=14, heads=12),
    "1 G": Sized(width=2048, depth=19, heads=16),
    "7 G": Sized(width=4096, depth=34, heads=32),
    "70 G": Sized(width=8192, depth=87, heads=64),
}


def row(name: str) -> str:
    """Return the line of the table for one model."""
    recipe = RECIPES[name]
    sizes = {key: getattr(recipe, key) for key in ("width", "depth", "heads")}
    with TemporaryDirectory() as folder:
        path = Path(folder, "sized.yaml")
        path.write_text(
            f"recipe:\n  class_path: test_sizes.Sized\n  init_args: {sizes}\nsteps: 1\n"
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


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 70 G: two minutes of CPU time
@pytest.mark.skipif(TorchVersion(torch.__version__) < SHARDED_SINCE, reason="needs a newer torch")
@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_sizes_is_that_of_simulated_steps(name: str):
    text = text_of("accelerate_configs/README.md", "## Sizes")
    assert "\n".join(head()) in text
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    shown, simulated = (
        [float(cell.replace(",", "")) for cell in cells.split("|")[2:-1]]
        for cells in (line, row(name))
    )
    assert shown == pytest.approx(simulated, rel=0.02)


if __name__ == "__main__":
    print(*head(), sep="\n")
    for name in RECIPES:
        print(row(name), flush=True)
