"""A stranger's folder runs no code: what its config.yaml names is checked before any import."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from my_project import commands, weights
from my_project.config import Config, ConfigError, OptimConfig
from my_project.safety import search_path, trust
from ragged import Ragged
from runs import make_config, train

MINE = ["test_trust.Typed"]


@dataclass(frozen=True, kw_only=True)
class Group:
    anything: Any = None
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Typed(Ragged):
    """With fields whose strings jsonargparse imports."""

    group: Group = field(default_factory=Group)
    groups: list[Group] = field(default_factory=list)
    named: dict[str, Group] = field(default_factory=dict)
    function: Callable | None = None
    kind: type | None = None
    anything: Any = None
    functions: list[Callable] = field(default_factory=list)
    path: str = ""


def settings_of(**init_args: Any) -> dict[str, Any]:
    recipe = {"class_path": "test_trust.Typed", "init_args": init_args}
    return {"recipe": recipe, "batches": {"global_batch_size": 16}, "steps": 5}


def make_project_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a folder be the project which the package lies in; return its configs/."""
    (folder / "configs").mkdir(parents=True)
    monkeypatch.setattr(trust, "__file__", str(folder / "src/my_project/safety/trust.py"))
    return folder / "configs"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Return the file that the module `hostile`, which can be found, writes when it is imported."""
    monkeypatch.setenv("MARKER", str(tmp_path / "imported"))
    (tmp_path / "elsewhere").mkdir()
    write_hostile(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    yield tmp_path / "imported"
    sys.modules.pop("hostile", None)


def write_hostile(folder: Path) -> None:
    (folder / "hostile.py").write_text(
        "import os\nwith open(os.environ['MARKER'], 'a') as file: file.write(__file__)\n"
        "class Evil: pass\ndef function(): pass\n"
    )


def write(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder / "config.yaml"


EVIL = {"class_path": "hostile.Evil"}
WRITE = {"class_path": "my_project.files.write_atomically", "init_args": {"path": "x", "text": ""}}
TYPED = "recipe: {class_path: test_trust.Typed}"
DECOYS = {f"k{i}": "{b: {c: d, e: f}, g: h}" for i in range(30)}


@pytest.mark.parametrize(
    "settings",
    [
        settings_of() | {"recipe": EVIL},
        settings_of(function="hostile.function"),
        settings_of(anything=EVIL),
        settings_of(anything={"deep": [{"er": EVIL}]}),
        settings_of(functions=["hostile.function"]),
        settings_of(function="my_project.run_folder.subprocess.run"),
        settings_of(anything=WRITE),
        settings_of(anything={"class_path": "my_project.process.CopiedStream"}),
        # a dataclass of another package, which a module of this package imports
        settings_of(anything={"class_path": "my_project.accelerator.InitProcessGroupKwargs"}),
        settings_of(group={"anything": WRITE}),
        settings_of(groups=[{"anything": EVIL}]),
        settings_of(named={"x": {"anything": EVIL}}),
        settings_of() | {"recipe": WRITE},
        settings_of(anything=DECOYS | {"z": EVIL}),
        settings_of(**{"anything.class_path": "hostile.Evil"}),
        settings_of(group="FILE"),
        # strings that PyYAML refuses, and jsonargparse's loader reads
        settings_of(anything="{class_path: hostile.Evil, init_args: {x: 2001-13-45}}"),
        settings_of(anything="{class_path:\thostile.Evil}"),
        settings_of(anything="{class_path: hostile.Evil, init_args: {x: a?b, y: http://a}}"),
    ],
    ids=str,
)
def test_what_is_not_this_projects_is_refused_before_it_is_imported(tmp_path, marker, settings):
    file = str(write(tmp_path / "elsewhere", {"anything": EVIL}))
    path = write(tmp_path / "export", json.loads(json.dumps(settings).replace("FILE", file)))
    with pytest.raises(ConfigError, match=r"export/config\.yaml names .*\. If you trust it, add"):
        trust.read_config(path, MINE)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{TYPED}\nconfig: other.yaml", "global_batch_size"),
        (f"{TYPED}\nbatches: other.yaml", "global_batch_size"),
        (
            "recipe: {class_path: test_trust.Typed, init_args: {x.class_path: hostile.Evil}}",
            "no setting recipe.x.class_path",
        ),
        ("recipe: !!python/name:hostile.Evil", "tag"),
        (f"{TYPED}\nseed: {{class_path: hostile.Evil}}", "seed"),
        (f"{TYPED}\nprecision: hostile.Evil", "precision"),
        (f"{TYPED}\nbatches: {{global_batch_size: 16, workers: other.yaml}}", "batches.workers"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_is_no_plain_config_is_a_sentence(tmp_path, marker, text, sentence):
    write(tmp_path / "other", {"recipe": EVIL})
    path = write(tmp_path / "export", {})
    path.write_text(text.replace("other.yaml", str(tmp_path / "other/config.yaml")))
    with pytest.raises(ConfigError, match=sentence):
        trust.read_config(path, MINE)
    assert not marker.exists()


def test_own_classes_those_of_configs_and_trusted_ones_are_imported(tmp_path, marker, monkeypatch):
    own = write(tmp_path / "own", settings_of(kind="my_project.config.Config"))
    assert trust.read_config(own, MINE).recipe.kind is Config
    stated = settings_of(function="hostile.function", path="elsewhere.csv")
    path = write(tmp_path / "export", stated)
    (tmp_path / "standing_in/configs").mkdir(parents=True)
    (tmp_path / "standing_in/configs/mine.yaml").write_text(yaml.safe_dump(stated))
    monkeypatch.chdir(tmp_path / "standing_in")
    with pytest.raises(ConfigError, match=r"add --trust test_trust\.Typed"):
        trust.read_config(path)
    with pytest.raises(ConfigError, match=r"add --trust hostile\.function"):
        trust.read_config(path, MINE)
    assert trust.read_config(path, [*MINE, "hostile.function"])
    configs = make_project_of(tmp_path / "project", monkeypatch)
    (configs / "mine.yaml").write_text(yaml.safe_dump(stated))
    assert isinstance(trust.read_config(path).recipe, Typed), "configs/ names all of it"
    with pytest.raises(ConfigError, match=r"add --trust"):  # a stranger's own configs/
        trust.read_config(path, given=tmp_path / "project")


def test_only_what_is_needed_of_a_config_is_used(tmp_path, marker):
    """Else a group may be a file that nobody has checked, or be imported under Any."""
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"global_batch_size": 2, "loader": EVIL}))
    other = str(tmp_path / "other.yaml")
    hostile = {
        "optim": {"class_path": "hostile.Evil", "init_args": {"betas": EVIL}},
        "batches": {"global_batch_size": 16, "loader": {"x": EVIL}},
        "telemetry": other,
        "checkpoints": EVIL,
        "config": other,
        "seed": 7,
        "precision": "bf16",
    }
    typed = settings_of(
        group={"number": 3, "anything": {"a": [1, "b"]}}, groups=[{"number": 4}],
        named={"x": {"number": 5}}, anything=[{"x": "class_path: hostile.Evil"}],
    )  # fmt: skip
    path = write(tmp_path / "export", typed | hostile)
    for config in (trust.read_config(path, MINE), weights.config_beside(path.parent, MINE)):
        assert (config.seed, config.precision) == (7, "bf16")
        assert (config.batches.global_batch_size, config.batches.loader) == (16, {})
        assert config.optim == OptimConfig()
        recipe = config.recipe
        assert recipe.group == Group(number=3, anything={"a": [1, "b"]})
        assert (recipe.groups, recipe.named) == ([Group(number=4)], {"x": Group(number=5)})
        assert recipe.anything == [{"x": "class_path: hostile.Evil"}], "a text, not a class"
    assert not marker.exists()


def test_code_beside_the_weights_is_never_imported_trusted_or_not(tmp_path, marker, monkeypatch):
    run = tmp_path / "given/theirs"
    export = run / "export"
    export.mkdir(parents=True)
    write(run, {})
    write_hostile(run)
    (run / "configs").mkdir()
    (run / "configs/theirs.yaml").write_text("class_path: hostile.Evil")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("given.theirs.hostile.Evil", "hostile.Evil"):
        monkeypatch.chdir(run if name == "hostile.Evil" else tmp_path)
        monkeypatch.syspath_prepend("")
        path = write(export, settings_of() | {"recipe": {"class_path": name}})
        with pytest.raises(ConfigError, match=r"is in .*given/theirs: code beside weights"):
            trust.read_config(path, [name])
        path = write(export, settings_of(anything={"class_path": name}))
        with pytest.raises(ConfigError, match=r"is in .*given/theirs: code beside weights"):
            trust.read_config(path, [*MINE, name])
    assert not marker.exists()

    path_before = [*sys.path]
    search_path.leave_out_untrusted("evaluate", [str(export), "input"])
    assert set(path_before) - set(sys.path) == {""}
    path = write(export, settings_of(function="hostile.function"))
    with pytest.raises(ConfigError, match=r"If you trust it, add --trust hostile\.function"):
        trust.read_config(path, MINE)  # the one elsewhere; configs/ of the run is not the project's


def test_a_project_with_a_config_of_its_own_is_not_a_run_folder(tmp_path, monkeypatch):
    export = write(tmp_path / "export", settings_of()).parent
    write(tmp_path, {})
    assert search_path.run_folder(str(export)) == str(tmp_path)
    monkeypatch.setattr(search_path, "__file__", str(tmp_path / "src/p/search_path.py"))
    assert search_path.run_folder(str(export)) == str(export)


@pytest.mark.parametrize("name", ["/etc.A", "**.A", "a.[", "..A"])
def test_a_class_path_that_python_cannot_import_is_refused(tmp_path, name):
    path = write(tmp_path / "export", settings_of() | {"recipe": {"class_path": name}})
    with pytest.raises(ConfigError, match=r"export/config\.yaml"):
        trust.read_config(path, [])


def test_an_import_that_raises_any_error_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unfinished.py").write_text("class Recipe(")
    path = write(tmp_path / "export", settings_of() | {"recipe": {"class_path": "unfinished.A"}})
    with pytest.raises(ConfigError, match=r"unfinished\.A, which cannot .* \(SyntaxError: "):
        trust.read_config(path, ["unfinished.A"])


@pytest.mark.parametrize(
    ("command", "standing_in", "stays"),
    [
        *(
            (name, "project", True)
            for name in ("train", "launch", "planner", "evaluate", "predict")
        ),
        *((name, "project", False) for name in ("runs", "report", "doctor", "", "--help", "runz")),
        *((name, "elsewhere", False) for name in ("evaluate", "predict", "export", "doctor")),
        ("train", "elsewhere", True),
    ],
)
def test_the_current_folder_is_on_the_path_for_the_users_own_code_alone(
    command, standing_in, stays, tmp_path, monkeypatch
):
    here = tmp_path / standing_in
    installed = here / ".venv/lib"
    (here / "runs/one/export").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "prefix", str(here / ".venv"))
    monkeypatch.setattr(search_path, "__file__", str(tmp_path / "project/src/p/search_path.py"))
    monkeypatch.setattr(sys, "path", ["", str(here), "/other", str(installed)])
    search_path.leave_out_untrusted(command, ["runs/one/export", "--json"])
    assert sys.path == ["", str(here)] * stays + ["/other", str(installed)]
    if command == "evaluate":
        search_path.leave_out_untrusted(command, [".", "--trust", "a.B"])
        assert sys.path == ["/other", str(installed)]  # the weights, and the environment in them


def test_configs_beside_a_strangers_export_are_not_the_projects(tmp_path, monkeypatch):
    """Also where the folder that was given is no run, and only holds the export."""
    given = tmp_path / "given"
    (make_project_of(given, monkeypatch) / "theirs.yaml").write_text("a: test_trust.Typed")
    write(given / "export", settings_of())
    (given / "export/data_info.json").write_text("{}")
    monkeypatch.chdir(given)
    with pytest.raises(ConfigError, match=r"add --trust test_trust\.Typed"):
        commands.print_evaluation(argparse.Namespace(folder=".", trust=[], json=False))
    for words in ([".", "input"], ["."]):
        with pytest.raises(ConfigError, match=r"add --trust test_trust\.Typed"):
            commands.print_prediction(commands.parse_predict(words))


def test_a_run_that_is_not_writable_is_evaluated_in_the_users_own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    write(tmp_path / "export", settings_of())
    folder = Path(weights.config_beside(tmp_path / "export", MINE).runs_folder)
    assert folder == tmp_path / f"{trust.PACKAGE}-{os.getuid()}"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        weights.config_beside(tmp_path / "export", MINE)


@pytest.mark.slow
def test_commands_run_nothing_of_the_export_that_they_stand_in(tmp_path, marker):
    """By python -m and by the console script, where PYTHONPATH names the current folder too."""
    export = write(tmp_path / "export", settings_of()).parent
    write(export, settings_of() | {"recipe": {"class_path": "my_recipe.Evil"}})
    (export / "data_info.json").write_text("{}")
    write_hostile(export)
    for name in ("json", "yaml", "torch", "recipes", "socket", "signal", "argparse", "my_recipe"):
        shutil.copy(export / "hostile.py", export / f"{name}.py")
    clean = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}", "MARKER": str(marker)}
    script = "from my_project.__main__ import main; main()"
    (export / "status.json").write_text("{}")
    commands = {("-m", "my_project", name): 0 for name in ("runs", "report", "doctor", "--help")}
    commands |= {("-m", "my_project", "predict"): 2, ("-P", "-c", script, "evaluate"): 2}
    for words, code in commands.items():
        folder = {"runs": [".."], "--help": []}.get(words[-1], ["."])
        done = subprocess.run(
            [sys.executable, *words, *folder], cwd=export, text=True, check=False,
            env=dict(os.environ) | clean, capture_output=True,
        )  # fmt: skip
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert ("add --trust my_recipe.Evil" in done.stderr) == (code == 2)
    assert not marker.exists(), marker.read_text()


def test_evaluate_writes_nothing_where_a_strangers_config_says(tmp_path, monkeypatch):
    places = {"runs_folder": str(tmp_path / "target")}
    run = tmp_path / "given/theirs"
    run.mkdir(parents=True)
    write(run, settings_of() | places | {"run_name": "x", "resume": "never"})
    (run / "run.json").write_text("{}")
    write(run / "export", settings_of() | places)
    for folder in (run, run / "export"):
        config = weights.config_beside(folder, MINE)
        assert config.folder == run
    assert not (tmp_path / "target").exists()


def test_a_run_is_compared_without_importing_the_class_it_was_of(tmp_path, marker):
    config: Config = make_config(tmp_path, Ragged(), steps=2)
    (config.folder / "export").mkdir(parents=True)
    write(config.folder, settings_of(function="hostile.function") | {"recipe": EVIL})
    with pytest.raises(ConfigError, match=r"recipe \('hostile.Evil' there, 'Ragged' here\)"):
        train(config)
    assert not marker.exists()
