"""launch.py: how it handles arguments, variables, failures and outcomes."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_launch
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import ComputeEnvironment, DistributedType
from documents import HAS_LAUNCHERS, HAS_TOOLS, PROJECT
from my_project import exits, failures, provenance, run_files
from my_project.config import ConfigError
from my_project.files import TransientError, read_json, wait_until
from my_project.launching import launch, nodes, workers
from my_project.launching.attempts import Starts
from my_project.launching.summary import Ending, how_it_ended, unexplained
from my_project.process import CODE, Launcher
from my_project.run_files import Status
from runs import quick
from test_accelerate_configs import CONFIGS
from test_launch import CONFIG, steps_done, wait_for_steps
from world import free_port, run_world

WHERE = str(PROJECT / "accelerate_configs")
TRAIN = ("-m", "my_project.train", "--config", "tiny.yaml")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Change to a folder with tiny.yaml; undo changes of the environment after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Path("tiny.yaml").write_text(CONFIG)
    return tmp_path


def parsed(where: str, *flags: str) -> launch.Launch:
    return launch.parse(["--config_file", f"{WHERE}/{where}.yaml", *flags, *TRAIN])


@pytest.mark.parametrize(
    ("where", "flags", "sentence"),
    [
        ("multi_node", ["--num_machines", "3"], "16, but must be a multiple of --num_machines 3"),
        ("multi_node", ["--machine_rank", "2"], "--machine_rank is 2, but must be between 0 and 1"),
        ("multi_node", ["--min_machines", "3"], "--min_machines is 3, but must be between 1 and"),
        ("multi_gpu", ["--min_machines", "1"], "(1), which must be at least 2"),
        (
            "multi_node",
            ["--lost_node_seconds", "-1"],
            "--lost_node_seconds is -1, but must be between",
        ),
        ("multi_node", ["--lost_node_seconds", "inf"], "is inf, but must be between 5 and 86400."),
        (
            "multi_node_hsdp",
            ["--min_machines", "1", "--parallelism_config_dp_shard_size", "2"],
            "leave out the flags --parallelism_config_dp_replicate_size",
        ),
        ("cpu", ["--num_processes", "2"], "--num_processes is 2, but "),
        ("multi_node", ["--cpu"], "--num_processes is 1 with --cpu, but must be a multiple of"),
        ("cpu", ["-m", "my_project.tools.doctor"], "add -m my_project.train after the options"),
    ],
)
def test_a_wrong_launch_is_refused(where, flags, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parsed(where, *flags)


ONE = {"distributed_type": "NO", "use_cpu": True, "num_processes": 1}
TWO = ONE | {"distributed_type": "MULTI_GPU", "gpu_ids": "-1,-1", "num_processes": 2}
SHARDED = TWO | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def written(where: Any, *flags: str) -> launch.Launch:
    """Write an accelerate config, from settings or text; return the launch that it gives."""
    Path("where.yaml").write_text(where if isinstance(where, str) else yaml.safe_dump(where))
    return launch.parse(["--config_file", "where.yaml", *flags, *TRAIN])


@pytest.mark.slow
@pytest.mark.parametrize("base", [ONE, TWO, SHARDED], ids=["one", "two", "sharded"])
def test_an_accelerate_config_of_wrong_types_is_refused_with_its_name(tiny, base):
    """Give each setting values of all types: each is refused by name, or accepted."""
    written(base)
    refused: dict[str, str] = {}
    for name in (field.name for field in fields(ClusterConfig)):
        for value in (None, False, True, "auto", 2.5, -1, "", [1], {"a": 1}):
            Path("where.yaml").write_text(yaml.safe_dump(base | {name: value}))
            try:
                launch.accelerate_options(["--config_file", "where.yaml"], launch.TRAIN)
            except ConfigError as error:
                refused[name] = str(error)
    assert all(said.startswith("where.yaml: ") for said in refused.values())
    assert {*refused} >= {"num_processes", "mixed_precision", "gpu_ids", "fsdp_config", "use_cpu"}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("", "where.yaml is empty"),
        ("- a", "where.yaml holds no named settings, but a value of type list"),
        ("a: [", "where.yaml cannot be read"),
        ("num_procs: 1", "where.yaml: there is no setting num_procs"),
        (
            "mixed_precision: no",
            "mixed_precision is false (without quotes, YAML reads no and off as false), but must",
        ),
        (ONE | {"mixed_precision": "fp8"}, "mixed_precision is fp8, but must be no, bf16 or fp16"),
        (ONE | {"num_processes": "auto"}, "num_processes is auto, but must be a whole number"),
        (ONE | {"gradient_accumulation_steps": 4}, "it follows from batches.global_batch_size"),
        (ONE | {"deepspeed_config": {"zero_stage": 2}}, "deepspeed_config has no effect here"),
        (ONE | {"distributed_type": "DEEPSPEED"}, "where.yaml: this loop trains with DDP or FSDP2"),
        (SHARDED | {"fsdp_config": {"reshard_after_foward": False}}, "mean fsdp_reshard_after_for"),
        (SHARDED | {"fsdp_config": {"fsdp_version": "two"}}, "fsdp_version is two, but must be 1"),
        (
            SHARDED | {"parallelism_config": {"dp_shard_size": 2}},
            "mean parallelism_config_dp_shard",
        ),
        (ONE | {"dynamo_config": {"dynamo_backend": "inductr"}}, "dynamo_backend is inductr"),
    ],
)
def test_an_accelerate_config_is_refused_in_one_sentence(tiny, where, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        written(where)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gradient_accumulation_steps", "4"], "it follows from batches.global_batch_size"),
        (["--gradient_clipping", "1"], "set optim.clip_norm"),
        (["--zero_stage", "2"], "--zero_stage has no effect here"),
        (["--mixed_precision", "fp8"], "float32, bf16 or fp16"),
        (["--use_deepspeed"], "this loop trains with DDP or FSDP2"),
    ],
)
def test_a_flag_of_accelerate_without_effect_is_refused(tiny, flags, said):
    with pytest.raises(ConfigError, match=said):
        written(ONE, *flags)


def test_what_accelerate_config_writes_is_read(tiny):
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.FSDP,
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=2,
        downcast_bf16="no",  # type: ignore[arg-type]
        fsdp_config={"fsdp_version": 2, "fsdp_offload_params": False},
        dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
        tpu_env=[],
    )
    config.to_yaml_file("where.yaml")
    options = written(Path("where.yaml").read_text()).options
    assert (options.use_fsdp, options.dynamo_backend) == (True, "INDUCTOR")


def test_the_first_line_says_the_precision_of_the_run(tiny):
    assert "precision bf16," in launch.summary(written(ONE | {"mixed_precision": "bf16"}))
    with Path("tiny.yaml").open("a") as file:
        file.write('precision: "no"\n')
    assert "precision no," in launch.summary(written(ONE | {"mixed_precision": "bf16"}))


def test_what_the_shell_exports_of_accelerate_does_not_reach_a_process(tiny, monkeypatch, capsys):
    names = {
        "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG",
        "PARALLELISM_CONFIG_TP_SIZE", "FSDP_VERSION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    }  # fmt: skip
    for name in (*names, "ACCELERATE_USE_CPU", "ACCELERATE_LOG_LEVEL"):
        monkeypatch.setenv(name, "true")
    launch.prepare_environment()
    (environment,) = written(ONE).environments(0)
    assert not names & environment.keys()
    assert {"ACCELERATE_USE_CPU", "ACCELERATE_LOG_LEVEL"} <= environment.keys()
    (line,) = capsys.readouterr().out.splitlines()
    assert all(name in line for name in names)


def test_the_first_processes_of_a_launch_get_the_hash_of_the_imported_code(tiny, monkeypatch):
    monkeypatch.delenv(CODE, raising=False)
    monkeypatch.setattr(launch, "start_method", lambda: ("fork", ""))
    ours, given = written(ONE), []

    class Noted:
        """Notes the environments instead of starting processes."""

        def run(self, _: Any, environments: list[dict[str, str]], *__: Any) -> dict[int, int]:
            given.extend(environments)
            return {0: 0}

    launch.run_module(ours, Noted(), launch.TRAIN)  # type: ignore[arg-type]
    assert [environment[CODE] for environment in given] == [ours.code]


def test_what_a_scheduler_set_does_not_reach_torch(tiny, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK"):
        monkeypatch.setenv(name, "7")
    launch.prepare_environment()
    left = {name for name in os.environ if re.match(r".*RANK|WORLD|MASTER|PET_N", name)}
    assert not left


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_variables_are_those_of_accelerate_launch(path, tiny, monkeypatch):
    theirs: dict[str, str] = {}

    class Popen:
        """Records the variables of the process that accelerate would start."""

        returncode = 0

        def __init__(self, _: list[str], env: dict[str, str]) -> None:
            theirs.update(env)

        def wait(self) -> None: ...

    monkeypatch.setattr("torch.distributed.run.run", lambda _: theirs.update(os.environ))
    monkeypatch.setattr("subprocess.Popen", Popen)
    words = ["--config_file", str(path), "--main_process_port", str(free_port()), *TRAIN]
    monkeypatch.setattr(sys, "argv", ["accelerate launch", *words])
    accelerate_launch.main()
    ours = launch.parse(words)
    (environment, *others) = ours.environments(attempt=2)
    names = re.compile("(ACCELERATE|FSDP|PARALLELISM|OMP|KMP)_.*|CUDA_VISIBLE_DEVICES")
    for name in filter(names.fullmatch, theirs.keys() | environment.keys()):
        assert environment.get(name) == theirs.get(name), name
    assert theirs["ACCELERATE_MIXED_PRECISION"] == ours.precision
    ranks = [variables.get("RANK") for variables in (environment, *others)]
    assert ranks == ([None] if ours.world_size == 1 else [str(r) for r in range(len(ranks))])
    assert len(ranks) == ours.processes_per_node
    assert others == [] or environment["TORCHELASTIC_RESTART_COUNT"] == "2"


WRONG = ConfigError("lr is -1.")
LATE = TransientError("a node is late.")


OUTCOMES = [
    ("running", "finished", 0, None, None, 0),
    ("running", "preempted", 1, None, None, 75),
    ("running", "failed", 1, None, None, 1),
    ("", "", 1, WRONG, None, 2),
    ("finished", "finished", 0, None, None, 0),  # started again, it only shows the result
    ("running", "finished", 1, None, None, 0),  # an error after the end of the run
    ("running", "preempted", 0, None, None, 75),  # the exit code under torchrun with restarts
    ("preempted", "preempted", 1, None, None, 1),  # refused before it began
    ("running", "failed", 1, None, 5.0, 75),  # stopped in startup: the processes exit one by one
    ("preempted", "preempted", 1, LATE, 5.0, 75),
    ("preempted", "preempted", 1, LATE, math.inf, 1),  # srun stops this node after the error
    ("", "running", -9, None, None, 1),
    ("running", "running", 0, None, None, 1),  # a recipe called os._exit(0)
    ("", "", 0, None, None, 1),  # the same, before the run began
    ("", "running", 1, LATE, None, 1),
    ("finished", "finished", None, None, 5.0, 75),  # stopped before it goes on to more steps
]


@pytest.mark.parametrize(
    ("before", "after", "code", "error", "stopped", "wanted"), quick(4, OUTCOMES)
)
def test_the_exit_code_is_the_runs_outcome(
    before, after, code, error, stopped, wanted, tiny, monkeypatch
):
    """Processes end by an error or are stopped by a signal (`stopped`: seconds since 1970)."""
    path = tiny / "runs/tiny/status.json"
    path.parent.mkdir(parents=True)

    def write_status(outcome: str, launch: str = "before") -> None:
        lost = failures.record(reason="", cause="lost contact") if outcome == "failed" else None
        status = run_files.Status(outcome=outcome, failure=lost)
        path.write_text(json.dumps(status.to_json()) if outcome else "")
        path.with_name("run.json").write_text(json.dumps({"launch": launch}))

    class FakeWorkers:
        """Replaces the training processes."""

        killed = ()
        stop_signal, others = "SIGTERM" if stopped else "", None
        stop_signal_time = stopped or math.inf

        def ignore_signals(self) -> None: ...

        def run(self, function, environments: list, *_: object) -> dict[int, int]:
            write_status(after, os.environ["LAUNCH_START"] if after != before else "before")
            if error:
                with pytest.raises(SystemExit, match=str(error.exit_code)):
                    failures.exit_with_error(error)
            return {} if code is None else {0: code}

    write_status(before)
    monkeypatch.setattr(launch, "Workers", FakeWorkers)
    assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN]) == wanted
    if after == "running" != before:
        assert read_json(path)["outcome"] == "failed", "doctor and schedulers read it"


def end_processes(monkeypatch, *codes: int, outcome: str = "", killed: Any = ()) -> list[str]:
    """Replace the processes by exit codes, one for each start; return the names of the starts.

    Each start begins the run with this outcome, unless it is "". `killed` are the ranks that the
    launcher kills.
    """
    begun: list[str] = []
    left = iter(codes)

    class Fake:
        stop_signal, stop_signal_time, others = "", math.inf, None

        def __init__(self) -> None:
            self.killed = killed

        def ignore_signals(self) -> None: ...

        def run(self, *_: object) -> dict[int, int]:
            begun.append(os.environ["LAUNCH_START"])
            folder = Path("runs/tiny")
            if outcome:
                (folder / "status.json").write_text(json.dumps({"outcome": outcome}))
                (folder / "run.json").write_text(json.dumps({"launch": begun[-1]}))
            return {0: next(left)} | dict.fromkeys(self.killed, -signal.SIGKILL)

    monkeypatch.setattr(launch, "Workers", Fake)
    return begun


def test_a_full_disk_does_not_prevent_a_restart(tiny, monkeypatch):
    begun = end_processes(monkeypatch, -signal.SIGKILL, 1, outcome="running")
    opened: list[Path] = []

    def open_own(path: Path, mode: str) -> Any:
        opened.append(path)
        if len(opened) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return path.open(mode)

    monkeypatch.setattr(launch, "open_own", open_own)
    assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN]) == 1
    assert len(begun) == len(opened) == 2
    assert read_json(tiny / "runs/tiny/status.json")["outcome"] == "failed"


def test_a_start_that_never_began_is_not_a_start_of_the_older_run(tiny, monkeypatch):
    """With --resume never."""
    older = tiny / "runs/tiny/run.json"
    older.parent.mkdir(parents=True)
    older.write_text(json.dumps({"launch": "older.0"}))
    for words, events in ((["--resume", "never"], []), ([], ["start", "end"])):
        end_processes(monkeypatch, 1)
        assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN, *words]) == 1
        assert [line.event for line in run_files.lines(older.parent)] == events


def test_the_summary_names_the_option_with_which_the_same_command_starts_over(
    tiny, monkeypatch, capsys
):
    for words, said in ((["--resume", "never"], " without --resume never"), ([], "")):
        end_processes(monkeypatch, 1, outcome="running")
        (tiny / "runs/tiny/checkpoints").mkdir(parents=True, exist_ok=True)
        assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN, *words]) == 1
        assert f"then the same command{said} starts again" in capsys.readouterr().err


def test_the_summary_names_no_process_that_the_launcher_killed(tiny, monkeypatch, capsys):
    end_processes(monkeypatch, -signal.SIGSEGV, outcome="running", killed=[1])
    words = ["--config_file", f"{WHERE}/cpu.yaml", "--max_restarts", "0", *TRAIN]
    assert launch.main(words) == 1
    reason = read_json(Path("runs/tiny/status.json"))["reason"]
    assert "(rank 0 was ended by SIGSEGV): it crashed in C code" in reason
    shown = capsys.readouterr().err
    assert "rank 0 was ended by SIGSEGV" in shown
    assert "rank 1" not in shown


@pytest.mark.parametrize("cause", ["exception", "loader worker", "lost contact"])
def test_frames_in_which_the_failure_of_another_process_was_noticed_are_not_shown(
    tmp_path, capsys, cause
):
    frame = failures.Frame(file="src/own.py", line=3, function="step", code="", library=None)
    ending(tmp_path, failures.record(reason="it ended", cause=cause, frames=[frame]), {0: 1})
    assert ("src/own.py" in capsys.readouterr().err) == (cause == "exception")


def ending(folder: Path, failure: failures.Failure, codes: dict[int, int], killed: Any = ()):
    """Print the summary of a run that failed."""
    Ending(
        folder=folder,
        logs=folder,
        status=Status(outcome="failed", reason=f"rank 0: {failure.reason}"),
        is_new=True,
        is_first_node=True,
        failures=[failure],
        stop_signal="",
        stop_signal_time=math.inf,
        command="",
        codes=codes,
        killed=killed,
    ).print()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_rank_is_blamed_and_not_a_rank_that_lost_contact_with_it(
    tmp_path, capsys, signal_number
):
    """A rank that has lost contact may itself end by SIGABRT."""
    lost = failures.record(reason="lost contact", cause="lost contact")
    ending(tmp_path, lost, {1: -signal_number, 0: 1, 2: -signal.SIGKILL}, killed=[2])
    shown = capsys.readouterr().err
    is_killed = signal_number == signal.SIGKILL
    assert (", rank 1 ---" in shown) == is_killed
    assert ("rank 1 was ended by SIGKILL" in shown) == is_killed
    assert ("rank 0: lost contact" in shown) == (not is_killed)
    assert "rank 2" not in shown


def settled(
    folder: Path, outcome: str, code: int, *, start: int, stop: str = "", following: int = 0
) -> str:
    """Complete the status that start 1 of a launch on two nodes left; return the outcome.

    After the start, the nodes met for `following` more starts, none of which began.
    """
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text('{"launch": "a.1"}')
    (folder / "status.json").write_text(json.dumps({"outcome": outcome, "step": 4}))
    parts: Any = SimpleNamespace(config=SimpleNamespace(folder=folder), nodes=2, node_rank=0)
    starts = Starts(folder=folder, limit=3, launch="a", count=start)
    workers: Any = SimpleNamespace(stop_signal=stop)
    reported = [failures.record(reason="wrong", cause="exception")] * (not stop)
    last = launch.LastStart(id=starts.id, codes={0: code}, failures=reported, lost=None)
    starts.count += following
    return launch.settle_status(parts, workers, starts, last)[0].outcome


def test_nodes_that_are_stopped_before_the_loop_wait_for_no_other_status(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STATUS_SECONDS", 600.0)
    assert settled(tmp_path, "running", 1, start=1, stop="SIGTERM") == "running"


def test_what_an_earlier_start_saved_does_not_hide_the_failure_of_the_last(tmp_path):
    assert settled(tmp_path, "preempted", 1, start=1) == "preempted"
    assert settled(tmp_path, "preempted", 1, start=1, following=1) == "preempted"
    assert settled(tmp_path, "preempted", 1, start=2) == "failed"
    assert settled(tmp_path, "preempted", 1, start=2, stop="SIGTERM") == "preempted"
    assert settled(tmp_path, "finished", 1, start=2) == "finished"


@pytest.mark.parametrize(
    ("code", "cause"),
    [(3, "called os._exit"), (-signal.SIGSEGV, "crashed in C code"), (-signal.SIGKILL, "memory")],
)
def test_only_causes_that_the_exit_code_allows_are_named(code, cause):
    causes = {"called os._exit", "crashed in C code", "memory"}
    assert [one for one in causes if one in unexplained({0: code, 1: 1}, [1])] == [cause]
    aborted_too = unexplained({0: -signal.SIGABRT, 1: code}, ())
    assert ("memory" in aborted_too) == (cause == "memory"), "others may abort because of it"


def test_a_signal_without_a_name_has_its_number():
    assert how_it_ended(-9) == "was ended by SIGKILL"
    assert how_it_ended(-40) == "was ended by signal 40"


def test_the_flag_cpu_starts_one_process_without_gpus(tiny):
    for where in ("gpu", "multi_gpu"):
        parts = parsed(where, "--cpu")
        assert (parts.gpus, parts.world_size, len(parts.environments(0))) == (0, 1, 1)
        assert "rank 0 of 1," in launch.summary(parts)


def test_hyphens_in_flags_are_underscores(tiny):
    parts = parsed("multi_node_hsdp", "--parallelism-config-dp-shard-size", "2",
                   "--join-timeout-seconds", "7")  # fmt: skip
    assert parts.options.parallelism_config_dp_shard_size == 2
    assert parts.own.join_timeout_seconds == 7
    with pytest.raises(ConfigError, match="leave out the flags"):
        parsed("multi_node_hsdp", "--min-machines", "1", "--parallelism-config-dp-shard-size", "2")


def test_imports_of_a_recipe_of_any_encoding_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own = ModuleType("own")
    own.__file__ = str(tmp_path / "own.py")
    monkeypatch.setitem(sys.modules, "own", own)
    config: Any = SimpleNamespace(recipe=type("Own", (), {"__module__": "own"})())
    monkeypatch.setattr(launch, "DEFERRED", ("late_module",))
    for name in ("late_module", "lazy_module"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    launch.import_all(config)
    assert "late_module" in sys.modules, "although the recipe has no source"
    text = "# coding: latin-1\ndef method():\n    import lazy_module  # für"
    (tmp_path / "own.py").write_bytes(text.encode("latin-1"))
    launch.import_all(config)
    assert sys.modules.keys() >= {"lazy_module"}


# ---- several nodes ------------------------------------------------------------------------------
SECRET = "hf_QWERTYqwerty123"


def test_flags_win_over_the_file_and_what_follows_from_them_is_added(tiny):
    flags = ["--num_machines", "2", "--num_processes", "8", "--machine_rank", "1"]
    four = parsed("multi_node_cpu", *flags)
    assert (four.nodes, four.world_size, four.node_rank, four.processes_per_node) == (2, 8, 1, 4)
    hsdp = parsed("multi_node_hsdp", "--num_machines=4", "--num_processes=32")
    assert hsdp.options.parallelism_config_dp_replicate_size == 4
    assert hsdp.options.parallelism_config_dp_shard_size == 8


@pytest.mark.skipif(not HAS_TOOLS, reason="tools/ was deleted")
def test_a_preflight_that_fails_starts_no_training(tiny, monkeypatch):
    class Fails:
        stop_signal, others = "", None

        def run(self, function: Any, *_: object) -> dict[int, int]:
            assert function.args[0] == "my_project.tools.preflight"
            return {0: 1}

    monkeypatch.setattr(launch, "Workers", Fails)
    assert launch.main(["--config_file", f"{WHERE}/cpu.yaml", *TRAIN, "--preflight"]) == 1
    assert not list(tiny.glob("runs/tiny/logs/*"))


def test_the_launcher_tells_other_nodes_no_secret(tiny, monkeypatch):
    told = []
    monkeypatch.setattr(
        nodes.OtherNodes, "meet", lambda _, me, *__, **___: told.append(me) or 1 / 0
    )
    monkeypatch.setattr(launch, "prepare_environment", lambda: None)
    arguments = ["--config_file", f"{WHERE}/multi_node_cpu.yaml", "--num_machines", "2",
                 "--num_processes", "2", "--main_process_ip", "127.0.0.1",
                 *TRAIN, "--telemetry.trackers", f"[pwd={SECRET}]"]  # fmt: skip
    monkeypatch.setattr(launch, "Workers", SimpleNamespace)
    with pytest.raises(ZeroDivisionError):
        launch.main(arguments)
    assert SECRET not in told[0].run
    assert told[0].run.startswith("my_project.train --config tiny.yaml")
    with pytest.raises(ConfigError, match=r"hub_token holds a secret, .* HF_TOKEN") as refusal:
        launch.main([*arguments, "--recipe.init_args.hub_token", SECRET])
    assert SECRET not in str(refusal.value)


def test_the_code_of_a_node_is_the_loops_and_its_recipes(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "project/provenance.py"))
    own = ModuleType("own")
    own.__file__ = str(tmp_path / "own.py")
    monkeypatch.setitem(sys.modules, "own", own)
    recipe = type("Own", (), {"__module__": "own"})()
    digests = []
    for name in ("own.py", "project/loading/seeding.py", "project/recipes/other.py",
                 "project/tools/doctor.py", "project/._seeding.py",
                 "project/__pycache__/seeding.pyc"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        before = provenance.code_digest(recipe)
        path.write_text("x = 1")
        digests.append(provenance.code_digest(recipe) != before)
    assert digests == [True, True, False, False, False, False]
    (tmp_path / "project/lock.py").symlink_to("me@host.1234")  # an editor's lock file
    assert provenance.code_digest(recipe)
    plain, inherits = (type("Own", kinds, {"__module__": "own"})() for kinds in ((), (Launcher,)))
    digest = provenance.code_digest
    assert digest(plain) != digest(inherits), "its class is of the project"


@pytest.mark.parametrize(("method", "known"), [("fork", "1111"), ("spawn", "2222")])
def test_forked_processes_have_the_code_from_before_an_edit(tiny, monkeypatch, method, known):
    told = []
    others = SimpleNamespace(meet=lambda me, *_, **__: told.append(me.code))
    digests = iter(("1111", "2222"))
    monkeypatch.setattr(launch, "code_digest", lambda _: next(digests))
    monkeypatch.setattr(launch, "start_method", lambda: (method, ""))
    parts = parsed("multi_node", "--main_process_ip", "127.0.0.1")
    launch.meet_other_nodes(parts, others, 1.0, start="a.1")
    assert told == [known]


@pytest.mark.skipif(not HAS_LAUNCHERS, reason="the project has no launch/")
@pytest.mark.parametrize("listed", ["", "a slots=8\nb slots=4"])
def test_a_host_list_that_cannot_be_used_is_refused(tmp_path, monkeypatch, listed):
    (tmp_path / "hosts.txt").write_text(f"# the nodes\n{listed}\n")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    done = subprocess.run(
        [PROJECT / "launch/ssh.sh", tmp_path / "hosts.txt", "--config", "tiny.yaml"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2
    assert "write one node per line, such as gpu-a slots=8" in done.stderr


# An ssh: node a trains until b has ended, b ends with the codes in the file ends, one each time.
FAKE_SSH = """
if [ "$1" = b ]; then
    read -r code rest <ends
    echo "$rest" >ends
    if [ "$code" = full ]; then cd "$TMPDIR"/tmp.* && mkdir .code.1 && cd "$OLDPWD" && code=0; fi
    [ "$code" = 255 ] || { sleep 1; : >over; } >/dev/null 2>&1 &
    exit "$code"
fi
until [ -e over ]; do
    code=0
    read -r -t 0.1 || code=$?
    [ "$code" -gt 128 ] || exit 75 # end of file
done
"""


@pytest.mark.skipif(not HAS_LAUNCHERS, reason="the project has no launch/")
@pytest.mark.parametrize(
    ("ends", "min_machines", "code"),
    [("2", "", 2), ("2", "1", 2), ("255 2", "1", 0), ("75", "1", 0), ("full", "", 1)],
)
def test_node_0_decides_how_a_run_ends_that_goes_on_without_a_node(
    tmp_path, monkeypatch, ends, min_machines, code
):
    (tmp_path / "launch").symlink_to(PROJECT / "launch")
    for name, text in {
        "hosts.txt": "a slots=1\nb slots=1\n",
        "ssh": FAKE_SSH,
        "ends": f"{ends}\n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.3\n")
    (tmp_path / "sleep").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("SSH", f"bash {tmp_path / 'ssh'}")
    monkeypatch.setenv("MIN_MACHINES", min_machines)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run([tmp_path / "launch/ssh.sh", "hosts.txt"], check=False, timeout=60)
    assert done.returncode == code


# ---- restarts in place ---------------------------------------------------------------------------
KILLED, CRASHED = -signal.SIGKILL, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("ends", "refusals"),
    [
        # three restarts without a new step; a new step in between allows three more
        ([(5, "lost contact", KILLED)] * 4, ["", "", "", "3 restarts without a new step"]),
        ([(step, "lost contact", KILLED) for step in range(5)], [""] * 5),
        ([(5, "exception", 1)], ["the error would repeat"]),
        ([(5, "setting", 2)], ["the error would repeat"]),
        ([(5, "stalled", 1)], ["the error would repeat"]),
        ([(None, "", 3)], ["the error would repeat"]),  # os._exit
        ([(5, "device error", 1), (6, "lost contact", CRASHED)], ["", ""]),
    ],
)
def test_what_is_started_again(tmp_path, ends, refusals):
    restarts = Starts(folder=tmp_path, limit=3)
    for (step, cause, code), refusal in zip(ends, refusals, strict=True):
        failure = replace(failures.record(reason="x", cause=cause), step=step)
        assert restarts.refusal({1: code}, [failure] if cause else []) == refusal


def test_the_others_are_ended_at_once_but_a_save_is_waited_for(tmp_path):
    restarts = Starts(folder=tmp_path, limit=3)
    assert restarts.may_kill({0: None, 1: KILLED}, 0.0)
    assert not Starts(folder=tmp_path, limit=0).may_kill({0: None, 1: KILLED}, 0.0)
    assert not restarts.may_kill({0: None, 1: 1}, 0.0), "rank 1 may not have failed first"
    (tmp_path / "checkpoints/.step_00000004.partial").mkdir(parents=True)
    assert not restarts.may_kill({0: None, 1: None}, -math.inf), "none has failed"
    assert not restarts.may_kill({0: None, 1: KILLED}, 0.0)
    assert restarts.may_kill({0: KILLED, 1: None}, 0.0), "rank 0, which writes it, is gone"
    assert restarts.may_kill({0: None, 1: KILLED}, 100.0)
    assert not Starts(folder=tmp_path, limit=0).may_kill({0: None, 1: KILLED}, 9.0)


# ---- for real ------------------------------------------------------------------------------------
def launched_in_fork(
    folder: Path, processes: int, *words: str, flags: Any = (), **variables: str
) -> tuple[int, str]:
    """Launch in a process that has imported torch; return the exit code and what was shown."""
    (folder / "tiny.yaml").write_text(CONFIG)
    where = "cpu" if processes == 1 else "cpu_2_processes"
    arguments = ["--config_file", f"{WHERE}/{where}.yaml", *flags, *TRAIN, *words]
    (code,) = run_world(1, launch_here, folder, arguments, variables, seconds=600)
    return code, (folder / "shown").read_text()


def launch_here(folder: Path, arguments: list[str], variables: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path.insert(0, str(folder))
    with open("shown", "w") as shown:
        for descriptor in (1, 2):
            os.dup2(shown.fileno(), descriptor)
    sys.stdout = sys.__stdout__
    exits.run(launch.main, arguments)


@pytest.mark.slow
def test_killed_processes_are_started_again_in_place_and_give_the_same_weights(tmp_path):
    """Rank 1 gets SIGKILL, then rank 0; another run trains without a kill."""
    long = ("--steps", "40", "--telemetry.every_steps", "1", "--checkpoints.every_steps", "5")
    slow = ("--recipe.init_args.seconds", "0.05", "--recipe.init_args.dropout", "0.2")
    whole = launched_in_fork(tmp_path, 2, *long, *slow, "--run_name", "whole")
    assert whole[0] == 0, whole
    with test_launch.launch(tmp_path, *long, *slow, launcher="my_project.launch") as run:
        for victim in (1, 0):
            wait_for_steps(tmp_path, steps_done(tmp_path) + 12)
            os.kill(test_launch.workers(run.pid)[victim], signal.SIGKILL)
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    for restart, victim in ((1, 1), (2, 0)):  # the other rank may have lost contact and ended too
        again = f"all processes start again, restart {restart}"
        assert re.search(rf"rank {victim} was ended by SIGKILL[^\n]*: {again}", shown)
    assert shown.count("2 processes on CPU") == 3
    first, _, second, _, third, last = run_files.lines(tmp_path / "runs/tiny")
    assert [start.id.rpartition(".")[2] for start in (first, second, third)] == ["0", "1", "2"]
    causes = [end and end.cause for _, end in run_files.each_start(tmp_path / "runs/tiny")]
    assert causes == ["SIGKILL", "SIGKILL", ""]
    assert (last.outcome, last.step) == ("finished", 40)
    calendar = read_json(tmp_path / "runs/tiny/status.json")["goodput"]["calendar"]
    assert calendar["seconds"] == pytest.approx(last.time - first.time, abs=0.1)
    assert sum(calendar.values()) - calendar["seconds"] == pytest.approx(1, abs=0.01)
    assert 0 < calendar["lost"] < calendar["kept"] < 0.9
    assert "since the first launch" in shown
    ours, theirs = (p.read_bytes() for p in tmp_path.glob("runs/*/export/model.safetensors"))
    assert ours == theirs


def test_a_stop_signal_while_the_launcher_imports_is_a_preemption(tmp_path):
    (tmp_path / "slow_import.py").write_text("import os\nos.kill(os.getpid(), 15)\n")
    code, shown = launched_in_fork(tmp_path, 1, "--recipe", "slow_import.Recipe")
    assert code == 75, shown
    assert "SIGTERM: stopped while no process was running" in shown


NO_FORK = """
import os
from ragged import Ragged
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
"""


def test_a_process_that_cannot_be_started_now_may_be_started_later(tmp_path):
    (tmp_path / "no_fork.py").write_text(NO_FORK)
    code, shown = launched_in_fork(tmp_path, 1, "--recipe", "no_fork.Ragged")
    assert code == 1, shown
    assert "error: a process could not be started: [Errno 11]" in shown


def test_a_thread_that_ends_while_threads_are_listed_is_not_named(monkeypatch):
    real = Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "comm":
            raise FileNotFoundError(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert workers.threads() == []


def test_what_a_fork_does_not_survive_is_spawned(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert workers.start_method()[0] == "spawn"


THREAD = """
import threading, time
from ragged import Ragged
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.mark.slow
def test_where_an_import_starts_a_thread_the_processes_are_spawned(tmp_path):
    (tmp_path / "threaded.py").write_text(THREAD)
    words = ("--recipe", "threaded.Ragged")
    with test_launch.launch(tmp_path, *words, launcher="my_project.launch", where="cpu") as run:
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    assert "each process imports torch itself: an import has started threads" in shown


# A recipe that opens a file when it is imported, when it is created, and when a method imports a
# module, which also replaces a signal handler; its dataset reads all three files slowly.
SHARING = """
import os, tempfile, time
from dataclasses import dataclass, field
from typing import Any
from ragged import Ragged, Samples

IMPORTED = tempfile.TemporaryFile(buffering=0)
IMPORTED.write(bytes(range(70)))

class Read(Samples):
    files = ()
    def __getitem__(self, index):
        for file in self.files:
            file.seek(index)
            time.sleep(0.001)
            assert file.read(1) == bytes([index])
        return super().__getitem__(index)

@dataclass(frozen=True, kw_only=True)
class Sharing(Ragged):
    made: Any = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "made", open("numbers", "rb", buffering=0))

    def build_datasets(self, data_info):
        import lazy
        data = Read(self.samples, 6, self.dtype, 1, 0.0)
        data.files = IMPORTED, self.made, lazy.FILE
        return data, {}
"""
LAZY = """
import signal
FILE = open("others", "rb", buffering=0)
signal.signal(signal.SIGTERM, lambda *_: None)
"""


@pytest.mark.slow
def test_files_that_a_recipe_has_opened_are_opened_again_in_each_process(tmp_path):
    (tmp_path / "sharing.py").write_text(SHARING)
    (tmp_path / "lazy.py").write_text(LAZY)
    for name in ("numbers", "others"):
        (tmp_path / name).write_bytes(bytes(range(70)))
    words = ("--recipe", "sharing.Sharing", "--steps", "300")
    with test_launch.launch(tmp_path, *words, launcher="my_project.launch") as run:
        wait_until(lambda: steps_done(tmp_path) >= 4 or run.poll() is not None, 200)
        os.kill(run.pid, signal.SIGTERM)
        shown, _ = run.communicate(timeout=600)
    assert run.returncode == 75, "the handler of an import has replaced the launcher's"
    (line,) = re.findall("each process imports torch itself: .*", shown)
    for path in ("numbers", "others", "(deleted)"):
        assert path in line
