"""A wrong run or launch is refused with one sentence, before anything is written."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.utils import DynamoBackend
from my_project import sharding
from my_project.accelerator import check_launch, ddp_options, numerics
from my_project.config import Config, ConfigError
from my_project.loading.layout import batch_layout
from my_project.run_folder import refuse_other_settings
from runs import change, make_config, train
from world import TESTS, run_world

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}  # by accelerate
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.mark.parametrize(
    ("size", "processes", "sentence"),
    [
        (4, 5, "4 micro-batches of at most 4 samples, fewer than 5 processes: start at most 4, or"),
        (4, 17, "4 micro-batches of at most 4 samples, fewer than 17 processes: start at most 4."),
        (1, 17, "16 micro-batches of at most 1 sample, fewer than 17 processes: start at most 16."),
        (32, 2, "1 micro-batch of at most 32 samples, fewer than 2 processes: start at most 1, or"),
        (0, 17, "16 gives 16 samples, fewer than 17 processes: start at most 16."),
    ],
)
def test_more_processes_than_parts_of_a_batch_are_refused(size, processes, sentence):
    with pytest.raises(ConfigError) as refusal:
        batch_layout(change(make_config(TESTS).batches, micro_batch_size=size), processes)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 16, 20])
@pytest.mark.parametrize("total", [1, 7, 12, 16])
def test_any_number_of_processes_divides_a_global_batch(total, size):
    """Each sample once; every rank has equally many passes, and what it repeats is its own."""
    batches = change(make_config(TESTS).batches, global_batch_size=total, micro_batch_size=size)
    divisions = set()
    for processes in range(1, total + 1):
        try:
            layout = batch_layout(batches, processes)
        except ConfigError:
            assert processes > -(-total // size)
            continue
        counted, passes = [], 0
        for rank in range(processes):
            own = [number for number, _ in layout.passes(rank)]
            repeated = [is_repeat for _, is_repeat in layout.passes(rank)]
            passes += sum(repeated)
            assert not repeated[0]
            assert {m for m, is_again in zip(own, repeated, strict=True) if is_again} <= {rank}
            counted += [m for m, is_again in zip(own, repeated, strict=True) if not is_again]
        assert sorted(counted) == [*range(layout.micro_batches)]
        parts = [layout.positions(m) for m in range(layout.micro_batches)]
        assert [p for part in parts for p in part] == [*range(total)]
        assert max(map(len, parts)) == layout.micro_batch_size <= (size or total)
        assert min(map(len, parts)) >= 1
        idle = f"idle {passes / (processes * layout.accumulation):.0%}"
        assert (idle in str(layout)) == bool(passes)
        assert layout.is_uneven == bool(passes or len({*map(len, parts)}) > 1)
        divisions.add(tuple(parts))
    assert len(divisions) == (1 if size else total), "the config's, whatever the processes"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe__samples": 15}, "fewer than one global batch of 16"),
        ({"optim__init_args": {"momentun": 0.9}}, "momentun"),
        # its state is in no checkpoint; gradients of sums overflow
        ({"distributed__ddp": {"comm_hook": "power_sgd"}}, "but must be no or bf16"),
        ({"distributed__ddp": {"comm_hook": "fp16"}}, "but must be no or bf16"),
        ({"precision": "fp16"}, "fp16, which needs a GPU"),
        ({"distributed__ddp": {"static_grahp": True}}, "of DDP; did you mean static_graph?"),
        ({"distributed__ddp": {"bucket_cap_mb": "big"}}, "ddp.bucket_cap_mb is big, but must be a"),
    ],
)
def test_an_impossible_run_is_refused(tmp_path, settings, sentence):
    config = make_config(tmp_path, steps=1, **settings)
    with pytest.raises(ConfigError) as refusal:
        train(config)
    assert sentence in str(refusal.value)
    left = [path.name for path in config.folder.glob("*")]
    assert {*left} <= {".lock"}, "refused before anything is written or started"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        # each of the tasks would train alone
        ({"SLURM_STEP_NUM_TASKS": "2"}, "each would train alone"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "each would train alone"),
        # as of a job array that sets it: the run would train and write nothing
        ({"RANK": "3"}, "RANK is 3, but WORLD_SIZE is 1"),
        (LAUNCHED | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "set fsdp_version: 2"),
        (LAUNCHED | {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED is set"),
        (LAUNCHED | {"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision is fp8"),
        (LAUNCHED | MESH | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "all other sizes 1"),
        # exported in the shell
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "ACCELERATE_USE_FSDP is set"),
        (MESH, "ACCELERATE_USE_PARALLELISM_CONFIG is set"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM is set"),
    ],
)
def test_a_wrong_launch_is_refused(tmp_path, monkeypatch, environment, sentence):
    config = make_config(tmp_path)
    check_launch(config)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=sentence):
        train(config)
    assert not list(tmp_path.iterdir())


def test_a_gpu_config_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"asks for 1 GPU\(s\), but torch finds 0"):
        check_launch(make_config(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1,-1")
    check_launch(make_config(tmp_path))


@pytest.mark.parametrize("hook", [{}, {"comm_hook": "no"}, {"comm_hook": False}])
def test_no_hook_is_one_value_however_yaml_reads_it(tmp_path, monkeypatch, hook):
    """Or a later start would warn that the hook has changed."""
    monkeypatch.setattr(sharding, "kind", lambda _: "none")
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    accelerator: Any = SimpleNamespace(num_processes=2, mixed_precision="no", state=state)
    run: Any = SimpleNamespace(config=make_config(tmp_path, distributed__ddp=hook), total_steps=1)
    assert numerics(accelerator, run)["comm_hook"] == "no"


def test_a_static_graph_is_refused_where_steps_accumulate(tmp_path, monkeypatch):
    config = make_config(tmp_path, distributed__ddp={"static_graph": True, "comm_hook": False})
    ddp_options(config)  # without a process group there is no DDP; YAML reads no as False
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="static_graph is true, but a step accumulates 2"):
        ddp_options(config)
    ddp_options(change(config, batches__micro_batch_size=8))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    ddp_options(config)


def train_blindly(config: Config) -> int:
    """Train with an Accelerator that is told to look for GPUs, of which there are none."""
    import my_project.accelerator

    my_project.accelerator.use_cpu = lambda: False
    return train(config)


def test_processes_that_do_not_see_each_other_end_at_once(tmp_path):
    """Without the choice of the CPU, accelerate would make two runs that think they are alone."""
    pytest.importorskip("accelerate", minversion="1.13")  # before it, they find each other
    with pytest.raises(RuntimeError, match="started 2 processes, but rank 0 sees 1"):
        run_world(2, train_blindly, make_config(tmp_path))


def test_a_switch_of_a_check_is_off_warn_or_end(tmp_path):
    config = change(make_config(tmp_path), checks__ranks="off", checks__data=False)
    assert (config.checks.ranks, config.checks.data) == ("off", False)
    for level in ("maybe", "none", True):
        with pytest.raises(ConfigError, match=r"checks\.code is .*off, warn or end"):
            change(config, checks__code=level)


def test_a_saved_setting_no_class_reads_is_refused_only_if_it_was_used(
    tmp_path,
):
    """Its room was deleted. run.json says which settings change the curve and are no defaults."""
    config = make_config(tmp_path, steps=2, optim__ema_decay=0.9)
    assert train(config) == 0
    path, about = config.folder / "config.yaml", config.folder / "run.json"
    saved, begun = yaml.safe_load(path.read_text()), json.loads(about.read_text())
    used = begun["fixed_settings"]
    assert {"optim.ema_decay", "optim.lr", "batches.global_batch_size", "recipe"} <= {*used}
    free_or_default = {"optim.schedule", "seed", "steps", "telemetry.every_steps"}
    assert not free_or_default & {*used}

    saved["gone"] = {"every": 3, "deep": {"decay": 0.9}}
    saved["optim"]["gone"] = 1
    path.write_text(yaml.safe_dump(saved))
    refuse_other_settings(config)
    assert train(change(config, steps=3)) == 0
    assert "gone" not in path.read_text()

    for name, in_use in (("gone", "gone.deep.decay"), ("optim.gone", "optim.gone")):
        path.write_text(yaml.safe_dump(saved))
        about.write_text(json.dumps(begun | {"fixed_settings": [*used, in_use]}))
        refused = rf"different settings: {name} \([^;]* there, None here\)\. "
        with pytest.raises(ConfigError, match=refused):
            refuse_other_settings(config)
    about.unlink()
    with pytest.raises(ConfigError, match=r"different settings: gone .*; optim\.gone \(1 there"):
        refuse_other_settings(config)
