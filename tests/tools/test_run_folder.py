"""docs/run-folder.md, which describes what the tools read, and its format number."""

import json
import re
import subprocess
import sys

import pytest
from documents import PROJECT
from my_project.run_files import RUN_FORMAT
from my_project.tools import reader
from my_project.tools.doctor import diagnose
from ragged import Ragged
from runs import change, make_config, records, train


def test_every_file_and_field_of_a_run_folder_is_described(tmp_path):
    described = (PROJECT / "docs/run-folder.md").read_text(encoding="utf-8")
    config = make_config(
        tmp_path, steps=4, evaluation__best_metric="validation/accuracy",
        checkpoints__every_steps=2, evaluation__every_steps=2, profile__steps="2:3",
        optim__ema_decay=0.9, telemetry__trackers=["tensorboard"],
    )  # fmt: skip
    assert train(change(config, stop_after="0s")) == 75
    assert train(config) == 0
    recipe = Ragged(fault="raise", fault_at=1, fault_on_rank=0)
    with pytest.raises(ValueError, match="told to fail"):
        train(change(config, run_name="failed", recipe=recipe))
    named = set(re.findall(r"`([^`]+)`", described))
    contents = [json.loads(path.read_text()) for path in tmp_path.glob("*/*.json")]
    contents += [json.loads(path.read_text()) for path in tmp_path.glob("*/errors/*.json")]
    contents += records(config, "kind")
    assert {one["format"] for one in contents if "format" in one} == {RUN_FORMAT}
    assert f'"format": {RUN_FORMAT}' in described
    for content in contents:
        fields = {name for name in content if "/" not in name}  # results
        assert fields - named == set()
        assert {content["kind"]} <= named if "kind" in content else True
    assert {*contents[0].get("numerics", {})} <= named
    tops = {path.name for path in config.folder.iterdir()} | {"errors", "logs"}
    for name in tops:
        assert re.search(rf"`{re.escape(name[:20])}", described), name


def test_tools_import_no_torch_and_refuse_other_folders_and_formats(
    tmp_path,
):
    config = make_config(tmp_path, steps=2)
    assert train(config) == 0
    path = config.folder / "run.json"
    about = json.loads(path.read_text())
    assert reader.read_run(config.folder).problems == []
    path.write_text(json.dumps(about | {"format": RUN_FORMAT + 1}))
    for command, path in (
        ("runs", tmp_path),
        ("doctor --json", config.folder),
        ("report", config.folder),
    ):
        words = [sys.executable, "-X", "importtime", "-m", "my_project", *command.split()]
        done = subprocess.run([*words, path], capture_output=True, text=True, check=True)
        assert not re.findall(r"\| +(torch|accelerate)$", done.stderr, re.M)
        shown = (config.folder / "report.html").read_text() if command == "report" else done.stdout
        assert "finished" in shown
        assert "the run folder has format" in " ".join(f"{shown} {done.stderr}".split())
        if command == "doctor --json":
            found = json.loads(done.stdout)
            assert found == diagnose(config.folder) | {"happened": found["happened"]}
        refused = subprocess.run([*words, tmp_path / "nowhere"], capture_output=True, check=False)
        assert refused.returncode == 2
