"""Reading settings, and the names of runs: before the recipe, and so torch, is imported."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from my_project.command_line import NAME_LENGTH, check, parse, split
from my_project.config import ConfigError, to_dict

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
    return check(["--config", "first.yaml", *arguments]).run_name


# ---- names of runs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("", "first"),
        ("--seed 3", "first-seed=3"),
        ("--optim.lr 3e-3", "first-lr=0.003"),
        ("--optim.lr=0.003", "first-lr=0.003"),
        ("--optim.lr 1e-3", "first"),  # as in the file
        ("--seed 0 --recipe.rate 0.5", "first"),  # as by default
        ("--recipe.width 8", "first"),
        ("--recipe.init_args.width 9", "first-width=9"),
        ("--seed 1 --optim.lr 1", "first-lr=1-seed=1"),
        ("--optim.lr 1 --seed 1", "first-lr=1-seed=1"),
        ("--seed 1 --seed 2", "first-seed=2"),
        ("--recipe.sizes [1,2]", "first-sizes=1,2"),
        ("--optim.init_args.betas [0.9,0.95]", "first-betas=0.9,0.95"),
        ("--optim.init_args {betas:[0.9,0.95]}", "first"),  # not YAML: a key betas:[...]
        ("--recipe.label ../a:b", "first-label=.._a_b"),
        ("--optim.clip_norm null", "first-clip_norm=null"),
        ("--optim.class_path torch.optim.SGD", "first-class_path=torch.optim.SGD"),
        # these continue or extend the same run
        ("--steps 500", "first"),
        ("--epochs 9", "first"),
        ("--batches.micro_batch_size 2 --batches.workers 3", "first"),
        ("--resume never --stop_after 3h --distributed.timeout_seconds 9", "first"),
        ("--recipe.data_path /elsewhere/data --runs_folder there", "first"),
        ("--config second.yaml --seed 4", "first+second-seed=4"),
        ("--run_name mine --seed 4", "mine"),
    ],
)
def test_a_run_is_named_after_its_config_and_what_was_typed(typed, wanted):
    if ":[" in typed:
        with pytest.raises(ConfigError):
            name(*typed.split())
    else:
        assert name(*typed.split()) == wanted


def test_a_long_name_is_cut_and_still_its_own():
    one, two = (name("--recipe.label", "x" * 300 + end) for end in "ab")
    assert len(one) == len(two) == NAME_LENGTH
    assert one != two
    assert one == name("--recipe.label", "x" * 300 + "a")
    assert one[:-9] == two[:-9] == ("first-label=" + "x" * 300)[: NAME_LENGTH - 9]


def test_every_way_in_gives_the_same_name_and_config_yaml_keeps_it():
    typed = ["--config", "first.yaml", "--recipe.width", "9", "--seed", "5"]
    config = parse(typed)
    assert config.folder == check(typed).folder == Path("runs/first-seed=5-width=9")
    Path("resolved.yaml").write_text(f"run_name: {config.run_name}\n{CONFIG}")
    assert check(["--config", "resolved.yaml", "--seed", "5"]).run_name == "first-seed=5-width=9"
    assert "sweep" in sys.modules


def test_a_recipe_may_be_typed_as_a_whole():
    for whole in ("sweep.Sweep", "{class_path: sweep.Sweep, init_args: {width: 7}}"):
        config = parse(["--config", "first.yaml", "--recipe", whole])
        width = 8 if whole == "sweep.Sweep" else 7
        assert dataclasses.asdict(config.recipe)["width"] == width
        assert config.run_name == ("first" if width == 8 else "first-width=7")


def test_a_file_that_is_not_complete_names_the_run_after_what_is_typed_only():
    Path("part.yaml").write_text("recipe: {class_path: sweep.Sweep}\noptim: {lr: 0.5}\n")
    typed = ("--batches.global_batch_size", "4", "--steps", "2", "--seed", "3")
    assert check(["--config", "part.yaml", *typed]).run_name == "part-global_batch_size=4-seed=3"


def test_fields_that_are_inherited_are_known_too():
    Path("child.py").write_text(
        "from sweep import Sweep\n\nclass Child(Sweep):\n    depth: int = 3\n    lr: float = 1.0\n"
    )
    own = ("--recipe.class_path", "child.Child", "--recipe.data_path", "/moved")
    same = ("--recipe.rate", "0.5", "--recipe.depth", "3")
    assert name(*own, *same) == "first-recipe=child.Child"
    both = name(*own, "--optim.lr", "0.5", "--recipe.rate", "0.25")
    assert both == "first-optim.lr=0.5-rate=0.25-recipe=child.Child", "the recipe has an lr as well"


def test_a_secret_does_not_reach_the_name():
    with pytest.raises(ConfigError, match="hub_token holds a secret"):
        name("--recipe.init_args", '{"hub_token": "hf_QWERTYqwerty123"}')


# ---- what is typed -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "steps", "epochs"),
    [
        ("", None, 2),
        ("--steps 4", 4, None),
        ("--epochs 5", None, 5),
        ("--epochs null --steps 4", 4, None),
        ("--config steps.yaml", 7, None),
        ("--config steps.yaml --epochs 3", None, 3),
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
        ("--optim.l 1", "there is no setting --optim.l; did you mean --optim.lr?"),  # no prefixes
        ("--sed 1", "did you mean --seed?"),
        ("--xyz 1", "there is no setting --xyz; python -m "),
        ("--seed", "--seed has no value"),
        ("3", "'3' is not an option"),
        ("--config frist.yaml", "no config file frist.yaml; did you mean first.yaml?"),
        (
            "--config wrong.yaml",
            "wrong.yaml: there is no setting optim.lrr; did you mean optim.lr",
        ),
        ("--recipe.class_path swep.Sweep", "there is no module swep"),
        ("--recipe.class_path sweep.Swep", "sweep has no class Swep; did you mean Sweep?"),
        ("--recipe.class_path my_project.recipes.lmm.Lm", "there is no module"),
        ("--recipe.widht 3", "'widht' is not accepted; did you mean width?"),
        ("--recipe.width wide", "width"),
        ("--seed x", "seed is 'x', but must be a whole number."),
        ("--steps 1x", "steps is '1x', but must be a whole number or null."),
        (
            "--batches.seed_samples no_",
            "batches.seed_samples is 'no_', but must be true or false or auto.",
        ),
        ("--optim.schedule cosin", "linear, cosine, wsd; did you mean cosine?"),
        ("--recipe.width big", "recipe.width is 'big', but must be a whole number."),
        ("--lr 1", "there is no setting --lr; did you mean --optim.lr?"),
        ("--config first", "no config file first; did you mean configs/first.yaml?"),
        ("--config keys.yaml", "recipe has a key class_pth; did you mean class_path?"),
        ("--recipe.class_path broken.Recipe", "No module named 'not_there' (broken.py, line 1)"),
    ],
)
def test_a_typo_gets_one_sentence_with_the_similar_name(typed, sentence):
    Path("wrong.yaml").write_text("optim: {lrr: 1}\n")
    Path("keys.yaml").write_text("recipe: {class_pth: sweep.Sweep}\n")
    Path("broken.py").write_text("import not_there\n\nclass Recipe: ...\n")
    Path("configs").mkdir()
    Path("configs/first.yaml").touch()
    with pytest.raises(ConfigError) as refusal:
        parse(["--config", "first.yaml", *typed.split()])
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_removed_setting_is_refused_with_what_replaces_it():
    Path("old.yaml").write_text("stage_to: null\n")
    sources = {
        "--stage_to": ["--config", "first.yaml", "--stage_to", "/disk"],
        "stage_to": {**to_dict(parse(["--config", "first.yaml"])), "stage_to": None},
        "old.yaml: ": ["--config", "first.yaml", "--config", "old.yaml"],
    }
    for name, source in sources.items():
        with pytest.raises(ConfigError) as refusal:
            parse(source)
        sentence = str(refusal.value)
        assert name in sentence
        assert "stage_to any more: copy the data to a disk of each node" in sentence
        assert refusal.value.exit_code == 2


def test_hyphens_in_the_names_of_options_are_underscores():
    assert parse(["--config", "first.yaml", "--run-name", "a-b", "--tf32=false"]).run_name == "a-b"
    assert split(["--a-b.c-d=e-f"]).options == (("a_b.c_d", "e-f"),)


def test_help_lists_the_fields_of_the_recipe_where_a_config_is_given():
    def shown(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "my_project", "train",
             *arguments, "--help"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip

    alone = shown()
    assert "--optim.lr" in alone.stdout
    assert "\n  --where NAME " in alone.stdout, "its own options, as they stand in the docstring"
    assert "The highest learning rate of the schedule" in alone.stdout
    assert " torch\n" not in alone.stderr
    both = shown("first.yaml")
    assert "--recipe.width" in both.stdout
    assert "Channels of the first layer" in both.stdout
    assert "prepare_data" not in both.stdout
