"""A wrong setting gets one sentence, before torch is asked for anything."""

import pytest
from my_project.command_line import parse, parse_command_line
from my_project.config import Config, ConfigError
from my_project.devices import check_launch
from my_project.loading.layout import batch_layout
from runs import change, make_config, train
from world import TESTS, run_world

MINIMAL = """
recipe: {class_path: ragged.Ragged, init_args: {samples: 40}}
batches: {global_batch_size: 16, micro_batch_size: 4}
steps: 5
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "my_experiment.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--optim.lr", "fast"], "optim.lr"),
        (["--optim.schedule", "wsd"], "optim.decay_steps is 0"),
        (["--epochs", "3", "--steps", "5"], "steps is 5 and epochs is 3.0"),
        (["--evaluation.patience", "2"], "evaluation.best_metric"),
        (["--run_name", "a/b"], "run_name 'a/b'"),
        (["--optim.init_args", "{weight_decay: 0.1}"], "set optim.weight_decay instead"),
        (["--optim.init_args.lr", "0.1"], "optim.init_args holds lr: set optim.lr instead"),
        (["--optim.lr", "-1"], "optim.lr is -1.0, but must be at least 0"),
    ],
)
def test_a_mistake_is_named_in_one_sentence(config_file, arguments, sentence):
    with pytest.raises(ConfigError) as refusal:
        parse(["--config", str(config_file), *arguments])
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_batch_that_does_not_split_is_refused_with_the_arithmetic():
    batches = make_config(TESTS).batches
    assert batch_layout(batches, 2).accumulation == 2
    for micro_batch_size, processes in ((4, 3), (5, 1), (0, 32)):
        with pytest.raises(ConfigError, match=r"does not split|16 / \(5 x 1\)"):
            batch_layout(change(batches, micro_batch_size=micro_batch_size), processes)


@pytest.mark.parametrize(
    ("given", "processes", "micro", "accumulation"),
    [(4, 2, 4, 2), (4, 4, 4, 1), (4, 8, 2, 1), (4, 16, 1, 1), (0, 2, 8, 1), (32, 2, 8, 1)],
)
def test_a_rank_takes_at_most_its_part_of_the_global_batch(given, processes, micro, accumulation):
    """So one config starts on any number of processes that divides the global batch."""
    layout = batch_layout(change(make_config(TESTS).batches, micro_batch_size=given), processes)
    assert (layout.micro_batch_size, layout.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recipe__samples": 15}, "fewer than one global batch of 16"),
        ({"optim__init_args": {"momentun": 0.9}}, "momentun"),
    ],
)
def test_an_impossible_run_is_refused(tmp_path, settings, sentence):
    config = make_config(tmp_path, steps=1, **settings)
    with pytest.raises(ConfigError) as refusal:
        train(config)
    assert sentence in str(refusal.value)
    left = [path.name for path in config.folder.glob("*")]
    assert {*left} <= {".lock"}, "refused before anything is written or started"


def test_tasks_that_nobody_gave_a_rank_are_refused(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    check_launch(config)
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            with pytest.raises(ConfigError, match="each would train alone"):
                check_launch(config)


def test_a_gpu_config_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"asks for 1 GPU\(s\), but torch finds 0"):
        check_launch(make_config(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1,-1")
    check_launch(make_config(tmp_path))


def test_fsdp_1_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConfigError, match="set fsdp_version: 2"):
        check_launch(make_config(tmp_path))


def test_a_communication_hook_whose_state_no_checkpoint_holds_is_refused(tmp_path):
    config = make_config(tmp_path, distributed__ddp={"comm_hook": "power_sgd"})
    with pytest.raises(ConfigError, match="comm_hook is 'power_sgd', but must be no, fp16 or bf16"):
        train(config)


def train_blindly(config: Config) -> int:
    """Train with an Accelerator that is told to look for GPUs, of which there are none."""
    import my_project.devices

    my_project.devices.use_cpu = lambda: False
    return train(config)


def test_a_rank_beyond_the_world_size_is_refused(tmp_path, monkeypatch):
    """As of a job array that sets RANK: the run would train and write nothing."""
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK is 3, but WORLD_SIZE is 1"):
        train(make_config(tmp_path))
    assert not list(tmp_path.iterdir())


def test_processes_that_do_not_see_each_other_end_at_once(tmp_path):
    """Without the choice of the CPU, accelerate would make two runs that think they are alone."""
    pytest.importorskip("accelerate", minversion="1.13")  # before it, they find each other
    with pytest.raises(RuntimeError, match="started 2 processes, but rank 0 sees 1"):
        run_world(2, train_blindly, make_config(tmp_path))


def test_restarted_in_place_a_run_that_began_anew_is_continued(config_file, monkeypatch):
    command = ["train", "--config", str(config_file), "--resume", "never"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("gc.disable", lambda: None)  # for the whole process
    assert parse_command_line("").resume == "never"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert parse_command_line("").resume == "auto"
