"""FSDP2 and HSDP through the real loop on CPU processes, and the memory of a sharded start."""

import argparse
import atexit
import io
import json
import os
import signal
import sys
import warnings
import weakref
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from my_project import accelerator as accelerators
from my_project import commands, contract, evaluate, optim, parallel
from my_project.config import Config
from my_project.files import wait_until
from my_project.manifest import read_manifest
from my_project.run_files import checkpoints
from ragged import Deep
from runs import assert_same_weights, change, make_config, records, status, train
from test_launch import launch
from test_stopping import wait_for_records
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from world import World, run_world


def ask_for_fsdp(replicas: int = 1) -> None:
    """Set what `accelerate launch` sets for an accelerate config with fsdp_config."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_RESHARD_AFTER_FORWARD="true",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", ACCELERATE_MIXED_PRECISION="no",
        FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
    )  # fmt: skip
    if replicas > 1:
        os.environ.update(
            ACCELERATE_USE_PARALLELISM_CONFIG="true",
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE=str(replicas),
            PARALLELISM_CONFIG_DP_SHARD_SIZE=str(int(os.environ["WORLD_SIZE"]) // replicas),
        )


def train_sharded(config: Config, replicas: int = 1) -> int:
    """Train; a warning of a library is an error, since nobody could act on it."""
    ask_for_fsdp(replicas)
    with warnings.catch_warnings():
        for kind in (UserWarning, FutureWarning, RuntimeWarning):  # others are not shown
            warnings.simplefilter("error", kind)
        return train(config)


def references_to_groups_at_the_exit(config: Config) -> list[int]:
    """Train, call what runs at the exit, and count who still holds each process group."""
    groups, destroy = [], torch.distributed.destroy_process_group

    def note_and_destroy() -> None:
        groups.extend(torch.distributed.distributed_c10d._world.pg_map)
        destroy()

    torch.distributed.destroy_process_group = note_and_destroy
    train_sharded(config)
    atexit._run_exitfuncs()

    def held() -> list[int]:
        by_list_name_and_call = 3
        return [sys.getrefcount(group) - by_list_name_and_call for group in groups]

    wait_until(lambda: not any(held()), 60)  # gloo's threads let go a little later
    return held()


def test_nothing_holds_a_process_group_when_the_interpreter_ends(tmp_path):
    """A thread of gloo that then asks for the GIL would abort the process."""
    config = make_config(tmp_path, Deep(), steps=2)
    for left in run_world(2, references_to_groups_at_the_exit, config):
        assert left
        assert set(left) == {0}


def deep(folder: Path, **settings: Any) -> Config:
    """Ragged batches, accumulation, clipping that binds, EMA, evaluations and best/."""
    return make_config(
        folder,
        Deep(dtype="float64", draws=True),
        **{
            "batches__micro_batch_size": 2,
            "optim__ema_decay": 0.9,
            "optim__schedule": "constant",
            "optim__clip_norm": 8.0,
            "evaluation__every_steps": 5,
            "evaluation__best_metric": "validation/auroc",
        }
        | settings,
    )


def assert_same_run(ours: Config, theirs: Config) -> None:
    for name in ("loss", "gradient_norm"):
        curves = [
            torch.tensor([r[name] for r in records(c)], dtype=torch.float64) for c in (ours, theirs)
        ]
        torch.testing.assert_close(*curves, rtol=1e-9, atol=1e-9)
    found = [records(config, "validation/auroc")[-1] for config in (ours, theirs)]
    for name in ("validation/auroc", "validation/accuracy"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-6)
    for part in ("export", "best"):
        assert_same_weights(ours, theirs, 1e-9, part)


def shards_of(config: Config, step: int) -> int:
    folder = config.folder / f"checkpoints/step_{step:08d}"
    return len(list(folder.glob("model.rank_*.safetensors")))


def evaluate_sharded(folder: Path) -> str:
    """Evaluate as the command does under an accelerate config with FSDP; return what it prints."""
    ask_for_fsdp()
    real = evaluate.evaluate

    def check_sharded(accelerator: Any, config: Config, model: nn.Module, *rest: Any) -> Any:
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return real(accelerator, config, model, *rest)

    evaluate.evaluate = check_sharded
    printed = sys.stdout = io.StringIO()
    arguments = argparse.Namespace(folder=str(folder), trust=["ragged.Deep"], json=True)
    assert commands.print_evaluation(arguments) == 0
    return printed.getvalue()


@dataclass(frozen=True, kw_only=True)
class Apart(Deep):
    """Names a single layer beside the blocks, as an embedding would be."""

    def model_blocks(self, model: Any) -> list[nn.Module]:
        return [model.frozen, *model.blocks]


@pytest.mark.slow
def test_fsdp_and_hsdp_train_like_ddp_and_resume_on_any_number(tmp_path):
    ddp = deep(tmp_path, run_name="ddp")
    run_world(4, train, ddp)
    norms = [record["gradient_norm"] for record in records(ddp)]
    assert min(norms) < 8.0 < max(norms), "clipping must bind in some steps and not in others"
    for name, replicas, first, then in (
        ("fsdp", 1, 4, (3, train_sharded)),
        ("hsdp", 2, 4, (3, train)),
        ("back", 1, 3, (4, train_sharded)),
    ):
        ours = change(ddp, run_name=name, steps=5)
        if name == "fsdp":
            ours = change(ours, recipe=Apart(dtype="float64", draws=True))
        run_world(first, train_sharded, ours, replicas)
        assert shards_of(ours, 5) == first // replicas
        saved = read_manifest(ours.folder / "checkpoints/step_00000005")["state"]
        assert saved["numerics"]["sharding"] == ("HSDP" if replicas > 1 else "FSDP2")
        processes, resume = then
        run_world(processes, resume, change(ours, steps=10))
        assert_same_run(ours, ddp)
    wanted = status(ddp)["result"]
    for folder in (checkpoints(ours.folder)[-1], ddp.folder):
        found = json.loads(run_world(2, evaluate_sharded, folder)[0])
        for name in ("validation/auroc", "validation/accuracy"):
            assert found[name] == pytest.approx(wanted[name], abs=1e-6)


@pytest.mark.slow
def test_sgd_trains_sharded_also_from_a_checkpoint_of_its_fused_kernel(tmp_path):
    """Of fused kernels, DTensor knows those of Adam and AdamW."""
    sgd = {"optim__class_path": "torch.optim.SGD", "optim__init_args": {"momentum": 0.9}}
    ddp = deep(tmp_path, run_name="ddp", **sgd)
    run_world(2, train, ddp)
    ours = change(ddp, run_name="ours", steps=5)
    run_world(2, train, ours)
    run_world(2, train_sharded, change(ours, steps=10))
    assert_same_run(ours, ddp)


@pytest.mark.slow
def test_preempted_then_killed_then_resumed_under_ddp(tmp_path):
    ours = deep(tmp_path, run_name="ours", steps=100_000, checkpoints__every_steps=5)
    with closing(World(2, train_sharded, ours)) as world:
        wait_for_records(ours, 3)
        os.kill(world.workers[1].pid, signal.SIGTERM)
        assert world.results(60) == [75, 75]
    left = status(ours)
    assert left["outcome"] == "preempted"
    assert shards_of(ours, left["step"]) == 2
    with closing(World(2, train_sharded, ours)):
        wait_for_records(ours, left["step"] + 12)
    ours = change(ours, steps=records(ours)[-1]["step"] + 5)
    ddp = change(ours, run_name="ddp")
    for config in (ours, ddp):
        assert run_world(2, train, config) == [0, 0]
    assert_same_run(ours, ddp)


@dataclass(frozen=True, kw_only=True)
class Exact(Deep):
    """A mean loss of 3, from numbers that bf16 cannot hold."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        assert batch["y"].dtype == torch.float32
        loss_sum, _ = super().loss(model, batch, step)
        assert loss_sum.dtype == torch.float32
        return loss_sum * 0 + 771.0, torch.tensor(257.0)


@pytest.mark.slow
def test_bf16_follows_the_curve_of_ddp_and_rounds_no_sum(tmp_path):
    ddp = make_config(tmp_path, Deep(), run_name="ddp", precision="bf16")
    run_world(2, train, ddp)
    fsdp = change(ddp, run_name="fsdp")
    run_world(2, train_sharded, fsdp)
    ours, theirs = records(fsdp), records(ddp)
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=0.03)
    assert [r["loss"] for r in ours] != [r["loss"] for r in theirs], "weights are in bf16"
    exact = change(ddp, recipe=Exact(), run_name="exact", steps=2)
    run_world(2, train_sharded, exact)
    assert [r["loss"] for r in records(exact)] == [3.0, 3.0]


# ---- the accelerate configs, through both launchers ----------------------------------------------
SETTINGS = """--recipe.class_path ragged.Deep --recipe.init_args.dtype float64 --steps 6
--batches.micro_batch_size 2 --optim.lr 0.05 --optim.ema_decay 0.9 --optim.clip_norm 8.0
--evaluation.every_steps 3 --evaluation.best_metric validation/auroc --telemetry.every_steps 1"""
HSDP = "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_fsdp_config_for_one_machine_trains_like_ddp(tmp_path):
    """Those for several machines are tried on two hosts; of a shipped file, the counts change.

    Both launchers set the same variables, see test_launch_node.py; ours imports torch once.
    """
    for where in ("cpu_2_processes", "fsdp2", "cpu_fsdp2", "cpu_hsdp"):
        is_theirs = where == "cpu_fsdp2"
        launcher = "accelerate.commands.launch" if is_theirs else "my_project.launch"
        processes = 2 if is_theirs else 4
        hides = ",".join(["-1"] * processes)
        flags = f"--num_processes {processes} --mixed_precision no --gpu_ids={hides}".split()
        flags += HSDP.split() if "hsdp" in where else []
        words = [*SETTINGS.split(), "--run_name", where]
        with launch(tmp_path, *words, flags=tuple(flags), launcher=launcher, where=where) as run:
            shown, _ = run.communicate(timeout=600)
        assert run.returncode == 0, shown
        ours, ddp = (make_config(tmp_path / "runs", run_name=n) for n in (where, "cpu_2_processes"))
        if "2_processes" not in where:
            said = shown + "".join(p.read_text() for p in ours.folder.glob("logs/*/*/*.log"))
            assert "Warning" not in said, "of Python, which nobody could act on"
            assert shards_of(ours, 6) == (2 if "hsdp" in where else processes)
        assert_same_run(ours, ddp)


# ---- the start -----------------------------------------------------------------------------------
class Bytes(TorchDispatchMode):
    """Count the bytes of the tensors that live outside of the meta device, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.note, result)
        return result

    def note(self, tensor: Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if storage.device.type != "meta" and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, key, None)
            self.peak = max(self.peak, sum(self.sizes.values()))


CALLS: Counter[str] = Counter()


@dataclass(frozen=True, kw_only=True)
class Counted(Deep):
    """Counts the calls of build_model."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        CALLS["build_model"] += 1
        return super().build_model(data_info)


@dataclass(frozen=True, kw_only=True)
class Pretrained(Counted):
    """Reads a model with tied weights by transformers."""

    folder: str = ""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        from transformers import AutoModelForMaskedLM

        CALLS["build_model"] += 1
        return AutoModelForMaskedLM.from_pretrained(self.folder)


@dataclass(frozen=True, kw_only=True)
class Recurrent(Counted):
    """Has a layer that holds weak references to its weights."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        model: Any = super().build_model(data_info)
        model.recurrent = nn.LSTM(6, 8)
        return model


@dataclass(frozen=True, kw_only=True)
class Unsendable(Counted):
    """Holds a function that pickle cannot name, and a buffer that nothing seeds."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        model: Any = super().build_model(data_info)
        model.scaled = lambda x: x
        rank = float(os.environ.get("RANK", "0"))
        model.register_buffer("of_rank_0", torch.tensor(rank))
        return model


@dataclass(frozen=True, kw_only=True)
class Unreadable(Counted):
    """Holds an object of a module that only build_model makes importable, as remote code is."""

    def build_model(self, data_info: dict[str, Any]) -> nn.Module:
        model: Any = super().build_model(data_info)
        sys.modules.setdefault("of_build_model", ModuleType("of_build_model"))
        kind = type("Held", (), {"__module__": "of_build_model"})
        setattr(sys.modules["of_build_model"], "Held", kind)  # noqa: B010
        model.held = kind()
        rank = float(os.environ.get("RANK", "0"))
        model.register_buffer("of_rank_0", torch.tensor(rank))
        return model


def start_each(configs: list[Config], replicas: int) -> list[dict[str, Any]]:
    """Build, shard and fill the model of each config; return what there is then, by config."""
    ask_for_fsdp(replicas)
    with accelerators.start_accelerator(configs[0]) as accelerator:
        return [start_one(accelerator, config) for config in configs]


def start_one(accelerator: Any, config: Config) -> dict[str, Any]:
    CALLS.clear()
    accelerators.set_numerics(config)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    with Bytes() as counted:
        model, of_rank_0 = parallel.build_model(accelerator, config, INFO)
        optimizer = optim.build_optimizer(config.optim, config.recipe, model)
        fused = optimizer.defaults["fused"]
        call, _ = parallel.prepare(accelerator, config, model, optimizer, of_rank_0)
        peak = counted.peak
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {
        "peak": peak,
        "fused": fused,
        "calls": CALLS["build_model"],
        "left": len(of_rank_0 or ()),
        "held": sorted(names.get(id(p), "a stranger") for p in parameters),
        "sharded": {type(p) for p in model.parameters()} == {DTensor},
        "weights": {
            name: p.full_tensor().detach().clone().numpy()  # type: ignore[attr-defined]
            for name, p in model.named_parameters(remove_duplicate=False)
        },
        "buffers": {name: b.clone().numpy() for name, b in model.named_buffers()},
    }
    if isinstance(config.recipe, Pretrained):
        tokens = torch.arange(6)[None]
        loss = call(lambda model: model(input_ids=tokens, labels=tokens).loss)
        loss.backward()
        found["loss"] = loss.item()
    return found


INFO = {"features": 6}
WIDE = 64
START: dict[str, Any] = {
    "deep": Counted(width=WIDE, blocks=8),
    "recurrent": Recurrent(width=WIDE, blocks=8),
    "unsendable": Unsendable(width=WIDE, blocks=8),
    "unreadable": Unreadable(width=WIDE, blocks=8),
}


def bert(folder: Path) -> dict[str, Any]:
    if not find_spec("transformers"):  # a project has the libraries of its recipe only
        return {}
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = BertConfig(vocab_size=11, num_hidden_layers=2, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)
    return {"pretrained": Pretrained(folder=str(folder))}


def assert_equal_tensors(ours: dict[str, Any], theirs: Any) -> None:
    expected = dict(theirs)
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(value), expected[name].detach()), name


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sharded_start_has_the_same_weights_and_no_rank_holds_them_all(tmp_path, replicas):
    recipes = START | bert(tmp_path / "bert")
    configs = [make_config(tmp_path, recipe, run_name=name) for name, recipe in recipes.items()]
    by_rank = run_world(4, start_each, configs, replicas)
    for i, config in enumerate(configs):
        name = config.run_name
        accelerators.set_numerics(config)
        plain = contract.build_model(config, INFO)
        trained = sorted(name for name, p in plain.named_parameters() if p.requires_grad)
        whole_bytes = sum(p.nbytes for p in plain.parameters())
        # A shard and one block; gloo's threads may not have freed two more of the 8 blocks yet.
        # A rank that builds the whole model holds all of it beside its shard.
        most = whole_bytes * (replicas / 4 + 3 / 8)
        for rank, found in enumerate(result[i] for result in by_rank):
            assert found["held"] == trained, "each trained parameter once"
            assert found["sharded"]
            assert found["fused"]
            assert found["left"] == 0, "rank 0 keeps no weights"
            assert_equal_tensors(found["buffers"], plain.named_buffers())
            named = plain.named_parameters(remove_duplicate=False)
            assert_equal_tensors(found["weights"], named)
            assert found["calls"] == (rank == 0 or name in ("unsendable", "unreadable"))
            is_whole = rank == 0 or name in ("pretrained", "unsendable", "unreadable")
            assert is_whole or found["peak"] <= most
        if isinstance(config.recipe, Pretrained):
            tokens = torch.arange(6)[None]
            loss = plain.eval()(input_ids=tokens, labels=tokens).loss.item()
            assert by_rank[0][i]["loss"] == pytest.approx(loss, rel=1e-5)
