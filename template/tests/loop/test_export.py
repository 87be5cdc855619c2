"""Promise 7: what is saved, loads, whatever wrapped the model, without accelerate."""

import json
import os
import subprocess
import sys

import pytest
import torch
from ragged import Ragged
from runs import change, make_config, train, weights
from world import TESTS, run_world

from my_project.config import Config


def train_compiled(config: Config) -> int:
    """Train through torch.compile, as accelerate's dynamo settings ask for it."""
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "AOT_EAGER"  # the whole path but no C++ compiler
    return train(config)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """The export of a run of 2 processes."""
    config = make_config(tmp_path_factory.mktemp("runs"), Ragged(dropout=0.1), steps=3)
    run_world(2, train, config)
    return config.folder / "export"


def test_exports_have_the_plain_keys_whatever_wrapped_the_model(tmp_path, export):
    plain = Ragged().build_model({"features": 6})
    for name, function in {"plain": train, "compiled": train_compiled}.items():
        config = make_config(tmp_path, Ragged(dropout=0.1), steps=3, run_name=name)
        run_world(1, function, config)
        found = weights(config.folder / "export")
        assert found.keys() == plain.state_dict().keys() == weights(export).keys()
        plain.load_state_dict(found, strict=True)
        for key, value in found.items():  # the same run, whatever wrapped it
            torch.testing.assert_close(value, weights(export)[key], rtol=1e-4, atol=1e-5)


def run_predict(*arguments: str) -> subprocess.CompletedProcess:
    """Run predict where accelerate, the network and the training data cannot be had."""
    code = (
        "import runpy, socket, sys\n"
        "for name in ('accelerate', 'datasets', 'tensorboard'): sys.modules[name] = None\n"
        "def refuse(*a, **k): raise OSError('no network')\n"
        "socket.socket.connect = refuse\n"
        "from ragged import Ragged\n"
        "def gone(self, data_info=None, /): raise AssertionError('needs no training data')\n"
        "def prepare(self): gone(self)\n"
        "Ragged.build_datasets, Ragged.prepare_data = gone, prepare\n"
        "sys.argv = ['predict', *sys.argv[1:]]\n"
        "runpy.run_module('my_project.predict', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "--trust", "ragged.Ragged", *arguments],
        capture_output=True, text=True, check=False, cwd=TESTS,
    )  # fmt: skip


def test_predict_answers_without_accelerate_data_or_network(export):
    answer = run_predict(str(export), "0.5")
    assert answer.returncode == 0, answer.stderr
    model = Ragged().build_model({"features": 6}).eval()
    model.load_state_dict(weights(export))
    assert float(answer.stdout) == pytest.approx(model(torch.full((1, 1, 6), 0.5)).item(), abs=1e-6)


def test_predict_refuses_a_wrong_folder_and_weights_that_do_not_fit(tmp_path, export):
    wrong = run_predict(str(tmp_path), "1")
    assert wrong.returncode == 2
    assert "config.yaml" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_onnx_gives_the_same_answer(export):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    done = run_predict(str(export), "--onnx")
    assert done.returncode == 0, done.stderr
    x = torch.randn(5, 9, 6)  # another batch size than that of the trace
    model = Ragged().build_model({"features": 6}).eval()
    model.load_state_dict(weights(export))
    session = runtime.InferenceSession(export / "model.onnx")
    (answer,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.tensor(answer), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_the_average_of_the_weights_is_what_is_exported(tmp_path):
    base = make_config(tmp_path, steps=3)
    averaged = change(base, run_name="averaged", optim__ema_decay=0.5)
    start = change(base, run_name="start", optim__ema_decay=1.0)
    for config in (base, averaged, start):
        run_world(1, train, config)
    steps = {}
    for n in (1, 2):
        config = change(base, run_name=f"s{n}", checkpoints__every_steps=n, checkpoints__keep=9)
        run_world(1, train, config)
        steps[n] = weights(config.folder / "checkpoints" / f"step_{n:08d}")
    for key, value in weights(averaged.folder / "export").items():
        initial = weights(start.folder / "export")[key]
        last = weights(base.folder / "export")[key]
        average = initial / 8 + steps[1][key] / 8 + steps[2][key] / 4 + last / 2
        torch.testing.assert_close(value, average)


def test_best_is_exported_and_training_stops_when_it_gets_no_better(tmp_path):
    config = make_config(
        tmp_path,
        steps=40,
        evaluation__every_steps=2,
        evaluation__best_metric="validation/accuracy",
        evaluation__patience=3,
        optim__lr=1e-9,  # nothing changes, so nothing gets better
    )
    run_world(2, train, config)
    status = json.loads((config.folder / "status.json").read_text())
    assert (status["outcome"], status["step"]) == ("finished", 8)
    assert (config.folder / "best" / "model.safetensors").is_file()
