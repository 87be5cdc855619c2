"""A stranger's folder runs no code: what its config.yaml names is checked before any import."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ragged import Ragged
from runs import make_config, train

from my_project import evaluate, predict, search_path, trust
from my_project.config import Config, ConfigError

MINE = ["test_trust.Typed"]


@dataclass(frozen=True, kw_only=True)
class Typed(Ragged):
    """With fields whose strings jsonargparse imports."""

    function: Callable | None = None
    kind: type | None = None
    anything: Any = None
    functions: list[Callable] = field(default_factory=list)
    path: str = ""


def settings_of(**init_args: Any) -> dict[str, Any]:
    recipe = {"class_path": "test_trust.Typed", "init_args": init_args}
    return {"recipe": recipe, "batches": {"global_batch_size": 16}, "steps": 5}


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


@pytest.mark.parametrize(
    "settings",
    [
        settings_of() | {"recipe": EVIL},
        settings_of() | {"recipe": "hostile.Evil"},
        settings_of() | {"recipe": '{"class_path": "hostile.Evil"}'},
        settings_of(function="hostile.function"),
        settings_of(kind="hostile.Evil"),
        settings_of(anything=EVIL),
        settings_of(anything={"deep": [{"er": "class_path: hostile.Evil"}]}),
        settings_of(anything="&a [*a, {class_path: hostile.Evil}]"),
        settings_of(functions=["hostile.function"]),
        settings_of(function="my_project.run.subprocess.run"),
        settings_of()
        | {"recipe": {"class_path": MINE[0], "dict_kwargs": {"kind": "hostile.Evil"}}},
        settings_of() | {"optim": {"class_path": "torch.optim.SGD", "init_args": {"a": EVIL}}},
        settings_of() | {"batches": {"global_batch_size": 16, "loader": {"collate_fn": EVIL}}},
    ],
    ids=str,
)
def test_what_is_not_this_projects_is_refused_before_it_is_imported(tmp_path, marker, settings):
    path = write(tmp_path / "export", settings)
    with pytest.raises(ConfigError, match=r"export/config\.yaml names .*; if you trust it, add"):
        trust.read_config(path, MINE)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("recipe: {class_path: test_trust.Typed}\nconfig: other.yaml", "no run has: config"),
        ("recipe.class_path: hostile.Evil", "no run has: recipe.class_path"),
        ("recipe: !!python/name:hostile.Evil", "tag"),
        ("recipe: " + "[" * 100_000, "recursion"),
        ("recipe: {class_path: 'a.B; echo'}", "no path of a class"),
        ("- recipe", "holds no settings by name"),
        ("\x00", "cannot be read"),
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
    (tmp_path / "project/configs").mkdir(parents=True)
    (tmp_path / "project/configs/mine.yaml").write_text(yaml.safe_dump(stated))
    monkeypatch.chdir(tmp_path / "project")
    assert isinstance(trust.read_config(path).recipe, Typed), "configs/ names all of it"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"add --trust test_trust\.Typed"):
        trust.read_config(path)
    with pytest.raises(ConfigError, match=r"add --trust hostile\.function"):
        trust.read_config(path, MINE)
    assert trust.read_config(path, [*MINE, "hostile.function"]).recipe.path == "elsewhere.csv"


def test_the_class_of_the_optimizer_is_not_imported(tmp_path, marker):
    optim = {"class_path": "hostile.Evil", "init_args": {"betas": [0.9, 0.95]}}
    config = trust.read_config(write(tmp_path / "export", settings_of() | {"optim": optim}), MINE)
    assert config.optim.class_path == "hostile.Evil"
    config = evaluate.config_beside(tmp_path / "export", MINE)
    assert config.optim.class_path == "torch.optim.AdamW"
    assert not marker.exists()


def test_code_beside_the_weights_is_never_imported_trusted_or_not(tmp_path, marker, monkeypatch):
    run = tmp_path / "given/theirs"
    export = run / "export"
    export.mkdir(parents=True)
    (run / "run.json").write_text("{}")
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
        with pytest.raises(ConfigError, match=r"lies in .*given/theirs: code that comes with"):
            trust.read_config(path, [name])
    assert not marker.exists()

    path_before = [*sys.path]
    search_path.leave_out_weights([str(export), "--onnx"])
    assert set(path_before) - set(sys.path) == {""}
    path = write(export, settings_of(function="hostile.function"))
    with pytest.raises(ConfigError, match=r"if you trust it, add --trust hostile\.function"):
        trust.read_config(path, MINE)  # the one elsewhere; configs/ of the run is not the project's


@pytest.mark.slow
def test_commands_run_nothing_of_the_export_that_they_stand_in(tmp_path, marker):
    """One start of each: modules that shadow libraries, and a class of the export's own."""
    export = tmp_path / "export"
    for name in ("json", "yaml", "torch", "recipes", "my_recipe"):
        export.mkdir(exist_ok=True)
        write_hostile(export)
        (export / "hostile.py").replace(export / f"{name}.py")
    write(export, settings_of() | {"recipe": {"class_path": "my_recipe.Evil"}})
    (export / "data_info.json").write_text("{}")
    clean = {"PYTHONPATH": os.environ["PYTHONPATH"], "MARKER": str(marker)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", f"my_project.{command}", "."], cwd=export, text=True,
            env=dict(os.environ) | clean, stderr=subprocess.PIPE,
        )
        for command in ("predict", "evaluate")
    ]  # fmt: skip
    for process, shown in [(process, process.communicate()[1]) for process in started]:
        assert process.returncode == 2, shown
        assert "add --trust my_recipe.Evil" in shown
    assert not marker.exists(), marker.read_text()


@pytest.mark.parametrize("text", ["[1, 2]", "null", "{", "[" * 100_000])
def test_a_data_info_that_is_no_dict_is_a_sentence(tmp_path, text):
    write(tmp_path / "export", settings_of())
    (tmp_path / "export/data_info.json").write_text(text)
    with pytest.raises(ConfigError, match=r"data_info\.json"):
        predict.load(tmp_path / "export", MINE)


def test_evaluate_writes_nothing_where_a_strangers_config_says(tmp_path, monkeypatch):
    places = {"runs_folder": str(tmp_path / "target"), "stage_to": str(tmp_path / "stage")}
    run = tmp_path / "given/theirs"
    run.mkdir(parents=True)
    write(run, settings_of() | places | {"run_name": "x", "resume": "never"})
    (run / "run.json").write_text("{}")
    write(run / "export", settings_of() | places)
    for folder in (run, run / "export"):
        config = evaluate.config_beside(folder, MINE)
        assert config.folder == run
        assert config.stage_to is None
    assert not (tmp_path / "target").exists()


def test_a_run_is_compared_without_importing_the_class_it_was_of(tmp_path, marker):
    config: Config = make_config(tmp_path, Ragged(), steps=2)
    config.folder.mkdir()
    path = write(config.folder, settings_of(function="hostile.function") | {"recipe": EVIL})
    with pytest.raises(ConfigError, match=r"recipe \('hostile.Evil' there, 'Ragged' here\)"):
        train(config)
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        train(config)
    assert not marker.exists()
