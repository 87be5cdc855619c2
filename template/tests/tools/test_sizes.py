"""The table of sizes in accelerate_configs/README.md, which the planner computes.

    python tests/cluster/test_sizes.py

prints it.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from documents import PROJECT, text_of
from torch.torch_version import TorchVersion

from my_project.cluster import planner
from my_project.cluster.simulate import SHARDED_SINCE, simulate
from my_project.command_line import parse
from my_project.config import BatchesConfig, Config, DistributedConfig
from my_project.cost import Activations, Model, inspect_recipe

pytest.importorskip("my_project.recipes.causal_lm")

from my_project.recipes.causal_lm import CausalLM

SEQUENCES = 512  # of the global batch
GPUS = ((1, 1), (1, 8), (2, 8), (8, 8))  # nodes and GPUs per node
GPU_GB = (24, 40, 80)
RESERVED_GB = 2.0


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
    "13 G": Sized(width=5120, depth=41, heads=40),
    "70 G": Sized(width=8192, depth=87, heads=64),
}


def inspect(recipe: Sized, *, recomputes: bool) -> Model:
    batches = BatchesConfig(global_batch_size=SEQUENCES)
    distributed = DistributedConfig(activation_checkpointing=recomputes)
    config = Config(recipe=recipe, batches=batches, steps=1, distributed=distributed)
    return inspect_recipe(config, "bf16")


def extrapolated(recipe: Sized, *, recomputes: bool) -> Model:
    """Return the model, whose sizes are linear in its depth, from those of depth 2 and 4."""
    two, four = (inspect(replace(recipe, depth=n), recomputes=recomputes) for n in (2, 4))

    def at_depth(low: Any, high: Any) -> Any:
        if isinstance(low, Activations):
            pairs = ((name, value, getattr(high, name)) for name, value in vars(low).items())
            return Activations(**{name: at_depth(x, y) for name, x, y in pairs})
        return low + (high - low) * (recipe.depth - 2) // 2 if isinstance(low, int) else low

    fields = {name: at_depth(value, getattr(four, name)) for name, value in vars(two).items()}
    return Model(**fields)


def models_of(name: str) -> list[Model]:
    """Return the model, and with recomputed activations."""
    return [extrapolated(RECIPES[name], recomputes=on) for on in (False, True)]


def simplest(models: list[Model], cluster: planner.Cluster) -> str:
    """Return the simplest config that fits, and the largest micro-batch with it."""
    for kind in planner.KINDS:
        if (kind != "DDP" and cluster.world_size == 1) or (kind == "HSDP" and cluster.nodes == 1):
            continue
        for model, mark in zip(models, ("", " c"), strict=True):
            micro_batch, _ = planner.largest_micro_batch(kind, model, cluster, SEQUENCES)
            if micro_batch:
                config = planner.config_name(kind, cluster).removesuffix(".yaml")
                return f"`{config}` {micro_batch}{mark}"
    return "-"


def rows(name: str) -> list[str]:
    """Return the lines of the table for one model."""
    models = models_of(name)
    lines = []
    for nodes, gpus in GPUS:
        cells = [name, f"{nodes * gpus}"]
        for gpu_gb in GPU_GB:
            cluster = planner.Cluster(
                nodes=nodes, gpus_per_node=gpus, gpu_bytes=gpu_gb * planner.GB,
                reserved_bytes=RESERVED_GB * planner.GB, in_node=1, over_nodes=1,
                latency_seconds=0, samples_per_second=1,
            )  # fmt: skip
            cells.append(simplest(models, cluster))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def head() -> list[str]:
    """Return the first two lines of the table."""
    columns = ["parameters", "GPUs", *(f"{gpu_gb} GB" for gpu_gb in GPU_GB)]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_sizes_is_what_the_planner_computes(name: str):
    text = text_of("accelerate_configs/README.md", "## Sizes")
    assert "\n".join(head()) in text
    assert [line for line in text.splitlines() if line.startswith(f"| {name} |")] == rows(name)


@pytest.mark.parametrize("name", RECIPES)
def test_the_models_of_the_table_have_the_size_that_it_says(name: str):
    number, unit = name.split()
    recipe = RECIPES[name]
    with torch.device("meta"):
        model = recipe.build_model(recipe.prepare_data())
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == pytest.approx(int(number) * {"M": 1e6, "G": 1e9}[unit], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_sizes_are_linear_in_the_depth(recomputes: bool):
    recipe = RECIPES["124 M"]
    whole = vars(inspect(recipe, recomputes=recomputes))
    linear = vars(extrapolated(recipe, recomputes=recomputes))
    for name in ("activations", "sharded_activations", "in_second_block", "in_last_block"):
        of_whole, of_linear = whole.pop(name), linear.pop(name)
        assert of_linear.bytes_of(8) == pytest.approx(of_whole.bytes_of(8), rel=0.01)
    assert linear.pop("flops_per_sample") == pytest.approx(whole.pop("flops_per_sample"), rel=0.01)
    assert linear == whole


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_model_of_the_table_has_the_memory_of_its_simulated_step(tmp_path, micro_batch):
    """With recomputation, where the peak may be at the logits, in a block or at the gradients."""
    if TorchVersion(torch.__version__) < SHARDED_SINCE:
        pytest.skip(f"needs torch {SHARDED_SINCE}")
    path = tmp_path / "sized.yaml"
    path.write_text(
        "recipe: {class_path: test_sizes.Sized, init_args: {width: 2048, depth: 12, heads: 16}}\n"
        f"steps: 1\nruns_folder: {tmp_path}\n"
        "distributed: {activation_checkpointing: true}\n"
    )
    words = ["--config", str(path), "--batches.micro_batch_size", str(micro_batch)]
    words += ["--batches.global_batch_size", str(512 * micro_batch)]
    config = parse(words)
    found = simulate(config, words, str(PROJECT / "accelerate_configs/multi_node_hsdp.yaml"), 64, 8)
    cluster = planner.Cluster(
        nodes=64, gpus_per_node=8, gpu_bytes=80e9, reserved_bytes=0, in_node=1, over_nodes=1,
        latency_seconds=0, samples_per_second=1,
    )  # fmt: skip
    predicted = planner.memory_bytes("HSDP", inspect_recipe(config, "bf16"), cluster, micro_batch)
    assert predicted == pytest.approx(found.peak_bytes, rel=0.05)


if __name__ == "__main__":
    print(*head(), sep="\n")
    for name in RECIPES:
        print(*rows(name), sep="\n", flush=True)
