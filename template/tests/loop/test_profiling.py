"""The profiler: its settings, what it writes, the table, and that it never ends a run."""

import dataclasses
import gzip
import json
import logging
import resource
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import PROJECT
from ragged import Ragged
from runs import change, make_config, train, weights
from torch.utils.data import DataLoader
from world import run_world

from my_project import launch, train_command
from my_project.command_line import check, parse
from my_project.config import (
    Config,
    ConfigError,
    ProfileConfig,
    fixed_settings,
    read_yaml,
    to_yaml,
)
from my_project.records.profiling import NEVER, Profiler
from my_project.records.trace_table import table

CONFIG = str(min((PROJECT / "configs").glob("*.yaml")))  # any; of a project its own
BASE = ["--config", CONFIG]


# ---- settings ------------------------------------------------------------------------------------
def test_steps_and_ranks_are_read_as_they_are_typed():
    profile = check([*BASE, "--profile.steps", "20:25", "--profile.ranks", "0,1"]).profile
    assert (profile.window, profile.chosen_ranks) == ((20, 25), [0, 1])
    for typed in ("[0,1]", "1,0", "0, 1", "[1, 0, 1]"):
        assert check([*BASE, f"--profile.ranks={typed}"]).profile.chosen_ranks == [0, 1]
    assert check([*BASE, "--profile.ranks", "3"]).profile.chosen_ranks == [3]
    assert check([*BASE, "--profile.steps", "20:20"]).profile.window == (20, 20), "one step"
    assert check(BASE).profile.window is None
    off = check([*BASE, "--profile.steps=20:25", "--profile.steps=null"])
    assert off.profile.window is None


@pytest.mark.parametrize("steps", ["'20:25'", '"20:25"', "20:75", "100:1200"])
def test_steps_in_a_yaml_file(tmp_path, steps):
    file = tmp_path / "profile.yaml"
    file.write_text(f"profile:\n  steps: {steps}  # {steps}\n  ranks: 0,1\n")
    config = check([*BASE, "--config", str(file)])
    first, last = config.profile.window or ()
    assert f"{first}:{last}" == steps.strip("'\"")
    assert config.profile.chosen_ranks == [0, 1]


def test_steps_that_yaml_reads_as_a_number_need_quotes(tmp_path):
    file = tmp_path / "profile.yaml"
    file.write_text("profile: {steps: 20:25}")
    with pytest.raises(
        ConfigError, match=r"^profile.steps is '1225', but must be a text in quotes"
    ):
        check([*BASE, "--config", str(file)])


@pytest.mark.parametrize("ranks", ["0,1", [0, 1], 1])
def test_config_yaml_is_read_back(tmp_path, ranks):
    profile = ProfileConfig(steps="20:25", ranks=ranks)
    config = make_config(tmp_path, profile=profile, run_name="one")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert read_yaml(file)["profile"] == dataclasses.asdict(config.profile)
    assert parse(read_yaml(file)) == config
    assert parse(["--config", str(file)]) == config


def test_a_profile_changes_neither_the_name_of_a_run_nor_what_must_stay_the_same(tmp_path):
    plain, typed = check(BASE), check([*BASE, "--profile.steps=20:25", "--profile.ranks=0,1"])
    assert typed.run_name == plain.run_name
    assert fixed_settings(typed) == fixed_settings(plain)


@pytest.mark.parametrize(
    "steps", ["25:20", "0:5", "-1:5", "20", "100", "20-25", "a:b", "1:20:25", ":5", "5:", "1.5:2"]
)
def test_steps_that_are_none_are_refused_in_one_sentence(steps):
    with pytest.raises(ConfigError) as raised:
        check([*BASE, f"--profile.steps={steps}"])
    assert str(raised.value) == (
        f"profile.steps is {steps!r}, but must be the first and the last step, such as 20:25;"
        " steps are numbered from 1."
    )


@pytest.mark.parametrize("ranks", ["-1", "x", "0;1", "", "[]", "[a]", "0,", "[0, 1.5]", "true"])
def test_ranks_that_are_none_are_refused_in_one_sentence(ranks):
    with pytest.raises(ConfigError, match=r"profile.ranks is .*, but must be ranks such as 0,1.$"):
        check([*BASE, f"--profile.ranks={ranks}"])


def test_ranks_and_steps_that_a_run_does_not_have_are_refused():
    profile = ProfileConfig(steps="20:25", ranks="0,2")
    profile.check(world_size=3, total_steps=25)
    with pytest.raises(ConfigError, match=r"profile.ranks is '0,2', but the run has 2 process"):
        profile.check(world_size=2)
    with pytest.raises(ConfigError, match=r"profile.steps is 20:25, but the run has 24 steps"):
        profile.check(world_size=3, total_steps=24)
    ProfileConfig(ranks="7").check(world_size=1, total_steps=1)  # nothing is profiled


def test_a_rank_that_the_launch_does_not_have_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.chdir(PROJECT)
    words = [CONFIG, "--where", "cpu", "--profile.ranks=0,1"]
    with pytest.raises(ConfigError, match="the run has 1 process"):
        train_command.main([*words, "--profile.steps=1:2"])


def test_a_dry_run_has_two_steps_and_profiles_none(monkeypatch, tmp_path):
    started: list[Any] = []
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(launch, "start", lambda found, **_: started.append(found) or 1)
    words = [CONFIG, "--where", "cpu", f"--runs_folder={tmp_path}"]
    assert train_command.main([*words, "--profile.steps=20:25", "--dry-run"]) == 1
    assert started[0].config.steps == 2
    assert started[0].config.profile.window is None


# ---- recording -----------------------------------------------------------------------------------
def profiler_of(folder: Path, rank: int = 0, **profile: Any) -> Profiler:
    config = make_config(folder, profile=ProfileConfig(**{"steps": "4:6"} | profile))
    run: Any = SimpleNamespace(folder=folder / "run", config=config)
    return Profiler(run, rank, torch.device("cpu"))


class Loop:
    """A small loop as that of train.py, of two micro-batches per step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batches = iter(DataLoader(torch.ones(1000, 8), batch_size=2))  # type: ignore[arg-type]

    def train(self, profiler: Profiler, last: int, first: int = 1, fail_in: int = 0) -> None:
        try:
            profiler.start(first - 1)
            for step in range(first, last + 1):
                for _ in range(2):
                    self.model(next(self.batches)).sum().backward()
                if step == fail_in:
                    raise ZeroDivisionError
                self.optimizer.step()
                self.optimizer.zero_grad()
                profiler.step_ended(step)
        except ZeroDivisionError:
            pass
        finally:
            profiler.stop()


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("profile/*"))


def steps_in(path: Path) -> list[str]:
    """Return the ranges of steps in a trace; read as Perfetto and chrome://tracing do."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    ranges = [e for e in events if e.get("ph") == "X" and e["name"].startswith("ProfilerStep#")]
    assert all(e["ts"] + e["dur"] <= then["ts"] for e, then in pairwise(ranges))
    assert {"aten::addmm", "Optimizer.step#AdamW.step"} <= {event["name"] for event in events}
    return [event["name"].removeprefix("ProfilerStep#") for event in ranges]


STEM = "rank_00000_steps_4_6"


def test_exactly_the_steps_of_the_window_are_recorded_by_their_numbers(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Loop().train(profiler_of(tmp_path), 10)
    assert written(tmp_path) == [f"{STEM}.json.gz", f"{STEM}.txt"]
    assert steps_in(tmp_path / f"run/profile/{STEM}.json.gz") == ["4", "5", "6"]
    lines = (tmp_path / f"run/profile/{STEM}.txt").read_text().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("rank 0 of 1, steps 4 to 6: ")
    where = [line.split("  ")[1] for line in lines[3:8]]
    assert where == ["data wait", "forward", "backward", "optimizer", "other"]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[3:8]]
    assert sum(shares) == pytest.approx(100, abs=0.3), "rounded"
    assert any(line.startswith("  aten::addmm ") and line.endswith("  2") for line in lines)
    assert "record steps 4 to 6 of rank 0 into" in caplog.messages[0]
    assert caplog.messages[1].splitlines()[0].endswith(f"profile/{STEM}.json.gz")
    assert caplog.messages[1].splitlines()[1:] == lines[:8]
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("steps", ["1:1", "1:3", "2:3", "10:10"])
def test_a_window_may_begin_with_the_first_step_and_end_with_the_last(tmp_path, steps):
    Loop().train(profiler_of(tmp_path, steps=steps), 10)
    first, last = map(int, steps.split(":"))
    (path,) = tmp_path.glob("run/profile/*.json.gz")
    assert path.name == f"rank_00000_steps_{first}_{last}.json.gz"
    assert steps_in(path) == [str(step) for step in range(first, last + 1)]


def test_only_the_chosen_ranks_record(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for rank in range(3):
        Loop().train(profiler_of(tmp_path, rank, ranks="1,2"), 10)
    assert written(tmp_path) == [
        f"rank_0000{rank}_steps_4_6.{ending}" for rank in (1, 2) for ending in ("json.gz", "txt")
    ]
    assert len(caplog.messages) == 1, "of rank 0, what will be recorded"
    assert "of rank 1, 2 into" in caplog.messages[0]


def test_without_a_window_a_step_costs_one_comparison(tmp_path, monkeypatch):
    for profiler in (profiler_of(tmp_path, steps=None), profiler_of(tmp_path, rank=1)):
        monkeypatch.setattr(profiler, "_act", None)  # not called
        Loop().train(profiler, 10)
        assert profiler.next == NEVER
    assert written(tmp_path) == []


def test_a_run_that_continues_in_the_window_records_what_is_left(tmp_path):
    Loop().train(profiler_of(tmp_path), 10, first=6)
    assert written(tmp_path) == ["rank_00000_steps_6_6.json.gz", "rank_00000_steps_6_6.txt"]


def test_a_run_that_continues_after_the_window_says_so(tmp_path, caplog):
    for rank in (0, 1):
        Loop().train(profiler_of(tmp_path, rank, ranks="0,1"), 10, first=7)
    assert caplog.messages == [
        "profile.steps is 4:6, but the run continues after step 6: nothing is profiled"
    ]
    assert written(tmp_path) == []


def test_a_profile_that_is_there_is_kept_and_the_next_has_a_number(tmp_path):
    Loop().train(profiler_of(tmp_path), 10)
    first = (tmp_path / f"run/profile/{STEM}.json.gz").read_bytes()
    (tmp_path / f"run/profile/{STEM}-2.txt").write_text("of a profile whose trace was moved away")
    (tmp_path / f"run/profile/.{STEM}.json").write_text("{")  # of a start that was killed
    Loop().train(profiler_of(tmp_path), 10)
    assert written(tmp_path) == sorted(
        [f"{STEM}{number}.{end}" for number in ("", "-3") for end in ("json.gz", "txt")]
        + [f"{STEM}-2.txt"]
    )
    assert (tmp_path / f"run/profile/{STEM}.json.gz").read_bytes() == first


def test_a_run_that_fails_in_the_window_leaves_what_was_recorded(tmp_path):
    Loop().train(profiler_of(tmp_path), 10, fail_in=6)
    name = "rank_00000_steps_4_5"
    assert written(tmp_path) == [f"{name}.json.gz", f"{name}.txt"]
    text = (tmp_path / f"run/profile/{name}.txt").read_text()
    assert text.startswith("rank 0 of 1, steps 4 to 5: ")
    Loop().train(profiler_of(tmp_path / "first"), 10, fail_in=4)
    (path,) = tmp_path.glob("first/run/profile/*.txt")
    assert path.read_text().startswith("rank 0 of 1, steps 4 to 4 (not ended): ")
    Loop().train(profiler_of(tmp_path / "warm_up"), 10, fail_in=3)
    assert written(tmp_path / "warm_up") == []
    Loop().train(profiler_of(tmp_path / "again"), 10)
    assert len(written(tmp_path / "again")) == 2, "torch.profiler was left in order"


def test_beside_another_profiler_there_is_one_warning_and_the_other_is_whole(tmp_path, caplog):
    cpu = [torch.profiler.ProfilerActivity.CPU]
    other = torch.profiler.profile(activities=cpu, acc_events=True)  # else torch 2.10 warns
    with other:
        Loop().train(profiler_of(tmp_path), 10)
    assert caplog.messages == [
        "the profile of rank 0 is left out: another profiler is active in this process"
    ]
    assert sum(event.key == "aten::addmm" and event.count for event in other.key_averages()) == 20
    assert written(tmp_path) == []


def profile_with_little_room(folder: Path) -> list[str]:
    """Profile where a file can have 20 kB; return the warnings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    Loop().train(profiler_of(folder), 10)
    return warnings


def test_a_full_disk_is_one_warning_and_leaves_no_partial_file(tmp_path):
    ((warning,),) = run_world(1, profile_with_little_room, tmp_path)
    assert warning.startswith(f"the profile of rank 0 cannot be written to {tmp_path}/run/profile:")
    assert warning.endswith("is the disk full?")
    assert written(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "run").write_text("")
    Loop().train(profiler_of(tmp_path), 10)
    assert len(caplog.messages) == 1
    assert "cannot be written to" in caplog.messages[0]


# ---- the table -----------------------------------------------------------------------------------
def event(name: str, start: float, end: float, kind: str = "cpu_op", thread: int = 1, **details):
    details = {name.replace("_", " "): value for name, value in details.items()}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": thread,
            "pid": 7, "args": details}  # fmt: skip


ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def step_of(number: int, start: float) -> list[dict]:
    """Return the host's events of a step of 1000 us with two micro-batches."""
    at = [
        event(f"ProfilerStep#{number}", 0, 1000, "user_annotation"),
        event("aten::zeros", 10, 40),
        event(LOADER, 50, 150, "user_annotation"),  # other: 50
        event("aten::stack", 60, 90),
        event("DistributedDataParallel.forward", 160, 250, "user_annotation"),
        event("aten::addmm", 170, 240),
        event(ENGINE, 300, 350, "cpu_op", 2),  # forward: 150
        event("aten::mm", 310, 340, "cpu_op", 2),
        event(LOADER, 400, 500, "user_annotation"),  # backward: 100
        event("DistributedDataParallel.forward", 510, 560, "user_annotation"),
        event(ENGINE, 600, 700, "cpu_op", 2),  # forward: 100
        event("gloo:all_reduce", 650, 790, "user_annotation", 3),
        event("aten::_foreach_norm", 800, 850),  # backward: 110, all-reduce: 90
        event("Optimizer.step#AdamW.step", 860, 950, "user_annotation"),  # optimizer: 200
    ]
    return [one | {"ts": one["ts"] + start} for one in at]


def test_the_hosts_time_is_divided_by_what_its_main_thread_does():
    events = step_of(20, 0) + step_of(21, 1000) + step_of(22, 2000)[:5]
    lines = table({"traceEvents": events}, 21)
    assert lines[0] == "1.00 ms per step"
    found = {line[:20].strip(): line.split()[-2:] for line in lines[3:10]}
    assert found == {
        "data wait": ["0.200", "20.0%"],
        "forward": ["0.250", "25.0%"],
        "backward": ["0.210", "21.0%"],
        "all-reduce": ["0.090", "9.0%"],
        "optimizer": ["0.200", "20.0%"],
        "other": ["0.050", "5.0%"],
        "": [],
    }
    operators = [line.split() for line in lines[11:]]
    assert operators[0] == [LOADER[:55] + "...", "0.170", "17.0%", "2"], "less what is in it"
    assert ["aten::mm", "0.030", "3.0%", "1"] in operators
    assert [ENGINE.split(maxsplit=1)[0], "AddmmBackward0", "0.120", "12.0%", "2"] in operators
    assert not [line for line in lines if "gloo" in line or "ProfilerStep" in line]


def test_an_evaluation_in_the_window_is_not_counted_to_forward_or_data():
    events = [
        *step_of(20, 0),
        event("ProfilerStep#21", 1000, 3000, "user_annotation"),
        event("evaluation or save", 1000, 2000, "user_annotation"),
        *(one | {"ts": one["ts"] + 1000} for one in step_of(21, 0)[2:6]),
        *step_of(21, 2000)[1:],
    ]
    lines = table({"traceEvents": events}, 21)
    found = {line[:20].strip(): line.split()[-2] for line in lines[3:10]}
    assert found["evaluation or save"] == "0.500"
    assert (found["data wait"], found["forward"]) == ("0.200", "0.250")


def test_the_gpus_time_is_divided_by_what_launched_its_kernels():
    host = step_of(20, 0) + step_of(21, 1000)
    names = [(one["name"], one["ts"]) for one in host]
    for number, one in enumerate(host):
        one["args"]["External id"] = number

    def kernel(name: str, launch: float, start: float, end: float, kind: str = "kernel") -> list:
        operator = names.index(next(pair for pair in reversed(names) if pair[1] <= launch))
        correlation = int(10 * launch)
        on_gpu = {"pid": 0, "tid": 7, "cat": kind}
        runtime = event("cudaLaunchKernel", launch, launch + 5, "cuda_runtime")
        runtime["args"] = {"correlation": correlation}
        at = event(name, start, end) | on_gpu
        at["args"] = {"correlation": correlation, "External id": operator}
        return [runtime, at]

    device = [
        *kernel("Memcpy HtoD", 150, 100, 200, "gpu_memcpy"),  # copies: 100
        *kernel("ampere_sgemm", 175, 200, 500),  # forward, launched by aten::addmm
        *kernel("ampere_sgemm_wgrad", 315, 500, 900),  # backward
        *kernel("ncclDevKernel_AllReduce", 650, 800, 1000),  # 100 of it alone
        *kernel("fused_adam", 870, 1000, 1100),  # optimizer
        *kernel("fused_adam", 1870, 1900, 2100),  # it ends after the host's part of the step
        *kernel("of the step after", 2500, 2600, 2700),
    ]
    lines = table({"traceEvents": host + device}, 21)
    assert lines[0] == "1.05 ms per step"
    found = {line[:20].strip(): line.split()[-4:] for line in lines[3:12]}
    assert found["forward"] == ["0.150", "14.3%", "0.250", "25.0%"]
    assert found["backward"] == ["0.200", "19.0%", "0.210", "21.0%"]
    assert found["all-reduce"] == ["0.050", "4.8%", "0.090", "9.0%"]
    assert found["optimizer"] == ["0.150", "14.3%", "0.200", "20.0%"]
    assert found["copies"] == ["0.050", "4.8%", "0.000", "0.0%"]
    assert found["idle"] == ["0.450", "42.9%", "0.000", "0.0%"]
    operators = [line.split() for line in lines[13:]]
    assert operators[0] == ["aten::mm", "0.200", "19.0%", "0.5"]
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


# ---- in a run ------------------------------------------------------------------------------------
def test_a_run_profiles_two_ranks_and_trains_as_without(tmp_path):
    settings = {"steps": 6, "evaluation__every_steps": 4, "run_name": "plain"}
    plain = make_config(tmp_path, **settings)
    profiled = change(plain, run_name="profiled", profile__steps="3:5", profile__ranks="0,1")
    for config in (plain, profiled):
        assert run_world(2, train, config) == [0, 0]
    assert not (plain.folder / "profile").exists()
    names = sorted(path.name for path in (profiled.folder / "profile").iterdir())
    assert names == [
        f"rank_0000{rank}_steps_3_5.{ending}" for rank in (0, 1) for ending in ("json.gz", "txt")
    ]
    for rank in (0, 1):
        path = profiled.folder / f"profile/rank_0000{rank}_steps_3_5.json.gz"
        assert steps_in(path) == ["3", "4", "5"]
        lines = path.with_name(f"rank_0000{rank}_steps_3_5.txt").read_text().splitlines()
        assert lines[0].startswith(f"rank {rank} of 2, steps 3 to 5: ")
        text = "\n".join(lines)
        for name in ("data wait", "forward", "backward", "optimizer", "evaluation or save"):
            assert f"\n  {name}  " in text
    ours, theirs = (weights(config.folder / "export") for config in (profiled, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_refuses_what_it_does_not_have_before_it_begins(tmp_path):
    config: Config = make_config(tmp_path, profile=ProfileConfig(steps="9:11"))
    with pytest.raises(ConfigError, match=r"profile.steps is 9:11, but the run has 10 steps"):
        train(config)
    with pytest.raises(ConfigError, match=r"profile.ranks is '1', but the run has 1 process"):
        train(change(config, profile__steps="9:10", profile__ranks="1"))
    assert not config.folder.exists()


def test_a_run_that_fails_in_the_window_fails_as_without_and_keeps_the_profile(tmp_path):
    recipe = Ragged(fault="raise", fault_at=4, fault_on_rank=0)
    config = make_config(tmp_path, recipe, profile=ProfileConfig(steps="3:8"))
    with pytest.raises(ValueError, match="told to fail"):
        train(config)
    names = sorted(path.name for path in (config.folder / "profile").iterdir())
    assert names == ["rank_00000_steps_3_4.json.gz", "rank_00000_steps_3_4.txt"]
