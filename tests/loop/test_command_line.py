"""Reading settings, and the names of runs."""

import re
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest
import yaml
from my_project.config import ConfigError, each_setting
from my_project.files import read_yaml
from my_project.settings import NAME_LENGTH, OTHER_NAMES, parse

CONFIG = """
recipe: {class_path: sweep.Sweep, init_args: {width: 8}}
batches: {global_batch_size: 16, micro_batch_size: 4}
epochs: 2
optim: {lr: 1.0e-3}
"""
RECIPE = '''
from dataclasses import dataclass, field

import torch

QUIET = {"changes_curve": False}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    width: int = 64
    """Channels of the first layer."""
    rate: float = 0.5
    sizes: list[int] = field(default_factory=list)
    data_path: str = field(default="data", metadata=QUIET)
    label: str = "a"
    mix: dict[str, float] = field(default_factory=dict)

    def prepare_data(self): ...
    def build_datasets(self, data_info): ...
    def build_model(self, data_info): ...
    def loss(self, model, batch, step): ...
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "first.yaml").write_text(CONFIG)
    (tmp_path / "second.yaml").write_text("optim: {warmup_steps: 3}\n")
    (tmp_path / "sweep.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("sweep", None)
    return tmp_path


def name(*arguments: str) -> str:
    return parse(["--config", "first.yaml", *arguments]).run_name


def test_each_setting_suggested_for_a_name_of_another_program_exists():
    assert {*OTHER_NAMES.values()} <= {setting for setting, *_ in each_setting()}


def test_an_empty_config_is_refused_by_its_name(folder):
    (folder / "empty.yaml").touch()
    with pytest.raises(ConfigError, match=r"empty\.yaml is empty"):
        parse(["--config", "empty.yaml"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "optim: {lr: 1.0e-3}\nseed: 1\noptim:\n  clip_norm: 1",
            "optim is in line 1 and again in line 3",
        ),
        ("steps: 1\nsteps: 1", "steps is in line 1 and again in line 2"),
        ("optim: {lr: 1, lr: 2}", "lr is in line 1 and again in line 1"),
        ("recipe:\n  init_args:\n    mix: {a: 1}\n    mix: {b: 1}", "mix is in line 3"),
    ],
)
def test_a_repeated_key_is_refused_where_yaml_would_keep_the_last(folder, text, problem):
    (folder / "repeated.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        parse(["--config", "first.yaml", "--config", "repeated.yaml"])


def test_keys_of_other_types_and_nested_merges_are_not_repeated(folder):
    (folder / "nested.yaml").write_text(
        "recipe:\n  init_args:\n    mix:\n      small: &small {eps: 1.0, decay: 2.0}\n"
        "      large: &large\n        <<: *small\n        decay: 3.0\n"
        "optim:\n  init_args:\n    <<: *large\n    table: {1: x, '1': y}\n"
    )
    settings = read_yaml(folder / "nested.yaml")
    assert settings["optim"]["init_args"] == {"eps": 1.0, "decay": 3.0, "table": {1: "x", "1": "y"}}
    for text in ("recipe: !!set [a]", "recipe: !!map [1]", "!!map [1]", "!!map xy", "[1, 2]"):
        (folder / "odd.yaml").write_text(text)
        with pytest.raises(ConfigError):
            read_yaml(folder / "odd.yaml")


def test_keys_that_override_merged_ones_are_not_repeated(folder):
    text = (
        "recipe:\n  init_args:\n    mix: &a {a: 1.0, b: 1.0}\noptim:\n  init_args: {<<: *a, b: 2.0}"
    )
    (folder / "merged.yaml").write_text(text)
    config = parse(["--config", "first.yaml", "--config", "merged.yaml"])
    assert config.optim.init_args == {"a": 1.0, "b": 2.0}


# ---- names of runs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("", "first"),
        ("--optim.lr 3e-3", "first-lr=0.003"),
        ("--optim.lr 1e-3", "first-lr=0.001"),  # as in the file: one of a sweep
        ("--seed 0 --recipe.rate 0.5", "first-rate=0.5-seed=0"),  # as by default
        ('--optim {"lr":0.001} --recipe.init_args {"width":8}', "first-lr=0.001-width=8"),
        ("--recipe.class_path sweep.Sweep", "first-recipe.class_path=sweep.Sweep"),
        ("--recipe sweep.Sweep", "first-recipe.class_path=sweep.Sweep"),
        ("--seed 1 --optim.lr 1", "first-lr=1-seed=1"),
        ("--recipe.sizes [1,2]", "first-sizes=1,2"),
        ("--recipe.label ../a:b", "first-label=.._a_b"),
        # these continue or extend the same run
        ("--steps 500", "first"),
        ("--epochs 9", "first"),
        ("--batches.micro_batch_size 2 --batches.workers 3", "first"),
        ("--resume never --stop_after 3h --distributed.timeout_seconds 9", "first"),
        ("--recipe.data_path /elsewhere/data --runs_folder there", "first"),
        ("--config second.yaml --seed 4", "first+second-seed=4"),
        ("--run_name mine --seed 4", "mine"),
        ("--run_name run --seed 4", "run"),
        ("--recipe.label 2024-02-30", "first-label=2024-02-30"),  # no date
    ],
)
def test_a_run_is_named_after_its_config_and_what_was_typed(typed, wanted):
    assert name(*typed.split()) == wanted


def test_a_long_name_is_cut_and_still_its_own():
    one, two = (name("--recipe.label", "x" * 300 + end) for end in "ab")
    assert len(one) == len(two) == NAME_LENGTH
    assert one != two
    assert len(name("--recipe.label", "\u732b" * 80).encode()) <= NAME_LENGTH


def test_config_yaml_keeps_the_name():
    typed = ["--config", "first.yaml", "--recipe.width", "9", "--seed", "5"]
    config = parse(typed)
    assert config.folder == Path("runs/first-seed=5-width=9")
    Path("resolved.yaml").write_text(f"run_name: {config.run_name}\n{CONFIG}")
    assert parse(["--config", "resolved.yaml", "--seed", "5"]).run_name == "first-seed=5-width=9"


# ---- what is typed -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "steps", "epochs"),
    [
        ("", None, 2),
        ("--steps 4", 4, None),
        ("--config steps.yaml --epochs 3", None, 3),
        ("--steps ~", None, 2),
        ("--steps Null", None, 2),
    ],
)
def test_typed_steps_replace_the_epochs_of_the_file(typed, steps, epochs):
    Path("steps.yaml").write_text("steps: 7\n")
    config = parse(["--config", "first.yaml", *typed.split()])
    assert (config.steps, config.epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("--optim.lrr 1", "there is no setting --optim.lrr; did you mean --optim.lr?"),
        ("--lr 1", "did you mean --optim.lr?"),
        ("--optim.learning_rate 1", "did you mean --optim.lr?"),
        ("--batch_size 8", "did you mean --batches.global_batch_size?"),
        ("--evaluation.batchsize 8", "did you mean --evaluation.batch_size?"),
        ("--gradient-accumulation-steps 2", "did you mean --batches.micro_batch_size?"),
        ("--config frist.yaml", "no config file frist.yaml; did you mean first.yaml?"),
        ("--config other.yaml", "no config file other.yaml; look in ./."),
        ("--config none/x.yaml", "no config file none/x.yaml; the current folder has no config"),
        ("--config broken_link.yaml", "no config file broken_link.yaml; look in ./."),
        ("--recipe.class_path swep.Sweep", "No module named 'swep'"),
        ("--recipe.class_path sweep.Swep", "has no attribute 'Swep'; did you mean Sweep?"),
        ("--recipe.class_path time.Sweep", "module 'time' has no attribute 'Sweep'"),
        ("--recipe.class_path xml.dum.X", "has no attribute 'dum'; did you mean dom?"),
        ("--recipe.widht 3", "there is no setting recipe.widht; did you mean recipe.width?"),
        ("--config typo.yaml", "there is no setting optim.lrr; did you mean optim.lr?"),
        ("--config inside.yaml", "recipe has only class_path and init_args: move steps to the top"),
        ("--config beside.yaml", "and init_args: if width is a setting of the recipe, move it to"),
        ("--config almost.yaml", "only class_path and init_args; did you mean init_args?"),
        ("--config short.yaml", "there is no setting optim.lrr; did you mean optim.lr?"),
        ("--config flag.yaml", "recipe has only class_path and init_args: if True is a setting"),
        ("optim.lr=3e-3", "optim.lr is a setting: type it as --optim.lr."),
        # what is not a class is not called
        ("--recipe.class_path os.system", "recipe os.system: it is not a concrete class"),
        ("--recipe.class_path sweep.dataclass", "recipe sweep.dataclass: it is not a concrete"),
        ("--recipe.class_path os.path", "recipe os.path: it is not a concrete class"),
        (
            "--recipe.class_path functools.partial",
            "functools.partial: it is not a concrete class",
        ),
        (
            "--recipe.class_path broken.Sweep",
            "ZeroDivisionError: division by zero (broken.py, line 1)",
        ),
        # wrong values
        ("--optim.lr fast", "optim.lr"),
        ("--optim.lr -1", "optim.lr is -1.0, but must be at least 0"),
        ("--optim.schedule wsd", "optim.decay_steps is 0"),
        ("--epochs 0", "epochs is 0.0, but must be more than 0"),
        ("--epochs .inf", "epochs is Infinity, but must be a finite number"),
        ("--optim.lr .inf", "optim.lr is Infinity, but must be a finite number"),
        ("--optim.lr .nan", "optim.lr is NaN, but must be a finite number"),
        (f"--seed {2**64}", f"seed is {2**64}, but must be between 0 and {2**64 - 1}"),
        ("--epochs 3 --steps 5", "steps is 5 and epochs is 3.0"),
        ("--evaluation.patience 2", "evaluation.best_metric"),
        ("--run_name a/b", "run_name 'a/b'"),
        (
            "--runs_folder s3://bucket/runs",
            "runs_folder is s3://bucket/runs: give the path of a folder",
        ),
        (
            "--resume gs://b/step_00000004",
            "resume is gs://b/step_00000004: give the path of a folder",
        ),
        ('--optim.init_args {"weight_decay":0.1}', "set optim.weight_decay instead"),
        ("--optim.init_args.lr 0.1", "optim.init_args holds lr: set optim.lr instead"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_typo_gets_the_similar_name(typed, sentence):
    Path("typo.yaml").write_text("optim: {lrr: 1}\n")
    Path("inside.yaml").write_text("recipe: {class_path: sweep.Sweep, steps: 3}\n")
    Path("beside.yaml").write_text("recipe: {class_path: sweep.Sweep, init_args: {}, width: 3}\n")
    Path("almost.yaml").write_text("recipe: {class_path: sweep.Sweep, initargs: {width: 3}}\n")
    Path("short.yaml").write_text("recipe: {width: 3}\noptim: {lrr: 1}\n")
    Path("flag.yaml").write_text("recipe: {class_path: sweep.Sweep, on: 3}\n")
    Path("broken.py").write_text("1 / 0\n")
    Path("broken_link.yaml").symlink_to("gone.yaml")
    with pytest.raises(ConfigError) as refusal:
        parse(["--config", "first.yaml", *typed.split()])
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


# ---- wrong values --------------------------------------------------------------------------------
JARGON = re.compile("class '|Subtypes|Expected a|Traceback|mapping")
SETTINGS = {name: kind for name, kind, _ in each_setting() if name != "recipe"}


def refusal_of(name: str, value: object, *, typed: bool) -> str:
    """Return what is said of a value, typed or in a file; "" if it is accepted."""
    for part in reversed(name.split(".")):
        value = value if typed else {part: value}
    Path("wrong.yaml").write_text(yaml.safe_dump(value))
    words = [f"--{name}={value}"] if typed else ["--config", "wrong.yaml"]
    try:
        parse(["--config", "first.yaml", *words])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", SETTINGS)
def test_of_a_wrong_value_the_setting_is_named_and_what_it_takes(name):
    kinds = {get_origin(kind) or kind for kind in (SETTINGS[name], *get_args(SETTINGS[name]))}
    wrong = [{"a": 1}, "no such", None][dict in kinds :]
    if type(None) in kinds:
        wrong.remove(None)
        for typed in (False, True):  # of steps and epochs one is left
            said = refusal_of(name, "None", typed=typed)
            assert not said or "set exactly one of them" in said
    assert len(wrong) > 0
    for value in wrong:
        is_text = isinstance(value, str)
        if is_text and str in kinds:
            continue
        for typed in (False, True)[: 1 + is_text]:
            said = refusal_of(name, value, typed=typed)
            assert said.startswith(f"{name} is "), said
            assert "but must be" in said
            assert not JARGON.search(said), said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 1e3", "steps is 1e3, but must be a whole number or null"),
        (
            "precision: no",
            "precision is false (without quotes, YAML reads no and off as false), but must be no,",
        ),
        ("stop_after: 90", "stop_after is 90, but must be text in quotes such as 3h55m or null"),
        ("seed: null", "seed is null, but must be a whole number"),
        ("recipe: 3", "recipe is 3, but must be text in quotes such as package.module.Class"),
        ("recipe: {init_args: {width: wide}}", "recipe.width is wide, but must be a whole number"),
        # jsonargparse reads the date as text
        ("run_name: 2026-05-13\noptim: {lrr: 1}", "there is no setting optim.lrr; did you mean"),
        ("seed: 2026-05-13", 'seed is "2026-05-13", but must be a whole number'),
        ("recipe: {init_args: [8]}", "recipe.init_args is [8], but must be named settings"),
    ],
)
def test_wrong_values_in_a_file(text, said):
    Path("wrong.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(["--config", "first.yaml", "--config", "wrong.yaml"])


def test_none_is_null():
    Path("none.yaml").write_text("epochs: None\nsteps: 7\nbatches: {workers: None}\n")
    config = parse(["--config", "first.yaml", "--config", "none.yaml", "--optim.clip_norm=None"])
    assert (config.epochs, config.steps, config.batches.workers) == (None, 7, None)
    assert config.optim.clip_norm is None
    assert parse(["--config", "first.yaml", "--recipe.label", "None"]).recipe.label == "None"


def test_hyphens_in_the_names_of_options_are_underscores():
    assert parse(["--config", "first.yaml", "--run-name", "a-b", "--tf32=false"]).run_name == "a-b"
    assert parse(["--config", "first.yaml", "--recipe.data-path", "b-c"]).recipe.data_path == "b-c"


@pytest.mark.parametrize("group", ["recipe", "recipe.init-args"])
def test_hyphens_in_the_keys_of_a_dict_stay(group):
    Path("mix.yaml").write_text("recipe: {init_args: {mix: {web-edu: 0.3}}}\n")
    typed = ["--config", "first.yaml", "--config", "mix.yaml", f"--{group}.mix.web-edu", "0.5"]
    assert parse(typed).recipe.mix == {"web-edu": 0.5}
