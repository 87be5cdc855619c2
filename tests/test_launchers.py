"""The launchers of a generated project, on two hosts: ssh over real sshd, and what pods run."""

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import CONFIG, NEEDS_HOSTS, PATIENCE, PLAIN, PROJECT, STOPS_AT, Hosts, ip, kill
from slurm_cluster import SlurmCluster
from test_manifests import manifests, values

pytestmark = NEEDS_HOSTS
ENVIRONMENT = PLAIN | {"WHERE": "multi_node_cpu"}
SSHD = """
HostKey {0}/host_key
AuthorizedKeysFile {0}/key.pub
PidFile none
StrictModes no
SetEnv PYTHONPATH={1} OMP_NUM_THREADS=1
"""
SSH = "ssh -F none -i {0}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q"


# ---- ssh -----------------------------------------------------------------------------------------
@pytest.fixture
def ssh(hosts):
    """Start an sshd on both hosts; return functions that start ssh.sh on host 0 and await its end.

    Then nothing runs on the hosts besides the sshds.
    """
    if not shutil.which("sshd", path="/usr/sbin"):
        pytest.skip("needs sshd (Debian: openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", hosts.folder / name], check=True
        )
    config = hosts.folder / "sshd_config"
    config.write_text(SSHD.format(hosts.folder, ENVIRONMENT["PYTHONPATH"]))
    for host in (0, 1):
        hosts.start(host, "/usr/sbin/sshd", "-D", "-e", "-f", str(config))
    time.sleep(1)
    daemons = set(hosts.pids())
    (hosts.folder / "hosts.txt").write_text("host0 slots=2\nhost1 slots=2\n")

    def start(*arguments: str, **more: str) -> subprocess.Popen:
        return hosts.start(
            0, "launch/ssh.sh", "hosts.txt", "--config", "tiny.yaml", *arguments,
            SSH=SSH.format(hosts.folder), **ENVIRONMENT | more,
        )  # fmt: skip

    def wait_for_its_end() -> None:
        hosts.wait_for(lambda: not any(map(cmdline, set(hosts.pids()) - daemons)), 120)

    return start, wait_for_its_end


FAILS = ("--recipe.fault", "raise", "--recipe.fault_at", "100", "--recipe.fault_on_rank", "3")


def test_ssh_stops_all_nodes_and_the_same_line_finishes_the_run(hosts, ssh):
    start, wait_for_its_end = ssh
    first = start(*STOPS_AT)
    hosts.wait_for(lambda: hosts.steps() >= 5)
    script = next(p for p in hosts.pids(0) if b"launch/ssh.sh" in cmdline(p))
    os.kill(script, signal.SIGINT)
    assert first.wait(300 * PATIENCE) == 75, hosts.output(0)
    assert hosts.status()["outcome"] == "preempted"
    wait_for_its_end()

    second = start(*STOPS_AT)
    before = hosts.steps()
    hosts.wait_for(lambda: hosts.steps() >= before + 5)
    lines = {pid: cmdline(pid) for pid in hosts.pids(0)}
    kill(p for p, line in lines.items() if b"launch/ssh.sh" in line or line.startswith(b"ssh "))
    second.wait(60 * PATIENCE)
    wait_for_its_end()
    assert hosts.status()["outcome"] == "preempted"

    total = hosts.status()["step"] + 5
    third = start("--steps", str(total))
    assert third.wait(300 * PATIENCE) == 0, hosts.output(0)
    wait_for_its_end()
    assert hosts.status()["outcome"] == "finished"
    shown = hosts.output(0)
    for rank, ranks in enumerate(("0 to 1", "2 to 3")):
        line = f"host{rank}: node {rank} of 2 (host{rank}, veth0): ranks {ranks} of 4, main node"
        assert f"{line} host0:29500, precision no, run folder runs/tiny" in shown
    logs = hosts.run_folder / "logs"
    for node in ("node_0", "node_1"):
        assert len(list(logs.glob(f"{node}/*/rank_*.log"))) == 6


def test_ssh_passes_any_text_on_and_ends_all_when_one_process_fails(hosts, ssh):
    name = 'it\'s "50 %" of $HOME; \\ `id` *'
    start, wait_for_its_end = ssh
    running = start("--run_name", name, *STOPS_AT, *FAILS)
    assert running.wait(300 * PATIENCE) == 1
    wait_for_its_end()
    reason = json.loads((hosts.folder / "runs" / name / "status.json").read_text())["reason"]
    assert reason.startswith("rank 3 on host1, step 100: ValueError")


def test_ssh_starts_a_killed_launcher_again_which_joins_the_others(hosts, ssh):
    start, wait_for_its_end = ssh
    running = start("--steps", "500", MIN_MACHINES="1")
    hosts.wait_for(lambda: hosts.steps() >= 10)
    launcher = next(p for p in hosts.pids(1) if b"python -m my_project.launch" in cmdline(p))
    os.kill(launcher, signal.SIGKILL)
    for nodes in ("1 of 2", "2 of 2"):
        hosts.wait_for(lambda nodes=nodes: hosts.status()["nodes"] == nodes, 60)
    assert running.wait(300 * PATIENCE) == 0, hosts.output(0)
    wait_for_its_end()
    hosts.assert_finished_with_the_right_weights(500)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


# ---- Slurm ---------------------------------------------------------------------------------------
BEFORE_THE_END = round(120 * PATIENCE)  # seconds that a run may take to save and end


@pytest.fixture
def slurm(hosts):
    return SlurmCluster(hosts, ENVIRONMENT | {"PROCESSES_PER_NODE": "2"})


def submit(slurm, *arguments: str, options: tuple[str, ...] = ()) -> str:
    return slurm.submit(
        *options, "--gpus-per-node=0", "--cpus-per-task=2", "--time=60",
        f"--signal=USR1@{BEFORE_THE_END}",
        "launch/slurm.sbatch", "--config", "tiny.yaml", *arguments,
    )  # fmt: skip


def ended(slurm, job: str, state: str) -> bool:
    """Return whether a job has reached a state; fail if it has reached another final state."""
    now = slurm.about(job)["JobState"]
    last = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"}
    assert now == state or now not in last, f"{now}\n{slurm.output(job)}"
    return now == state


def test_slurm_queues_a_stopped_job_again_until_it_has_the_right_weights(hosts, slurm):
    """By scancel, and by the time limit; also if sbatch gives the job no environment."""
    exported = ",".join(("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "WHERE", "PROCESSES_PER_NODE"))
    script = hosts.folder / "launch/slurm.sbatch"
    # what an owner does if the cluster has --export=NONE: they set the environment in the script
    script.write_text(
        script.read_text().replace(
            "unset SLURM_EXPORT_ENV\n",
            "unset SLURM_EXPORT_ENV\n"
            + "".join(f"export {n}={slurm.environment[n]!r}\n" for n in exported.split(",")),
        )
    )
    slow = ("--recipe.seconds", "0.2")  # 200 steps are longer than 30 s
    options = ("--export=NONE", "--ntasks-per-node=2", "--cpus-per-task=2", "--nodes=2")
    job = submit(slurm, "--steps", "220", "--resume", "never", *slow, options=options)
    hosts.wait_for(lambda: hosts.steps() >= 10)
    slurm.call("scancel", "--signal=USR1", job)
    hosts.wait_for(lambda: "requeueing job" in slurm.output(job))
    assert hosts.status()["reason"].startswith("SIGUSR1")
    stopped = hosts.steps()
    hosts.wait_for(lambda: hosts.steps() > stopped)
    # Slurm looks every 30 s for jobs near their limit
    slurm.call("scontrol", "update", f"JobId={job}", f"EndTime=now+{BEFORE_THE_END}")
    hosts.wait_for(lambda: slurm.output(job).count("requeueing job") == 2)
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    hosts.wait_for(lambda: ended(slurm, job, "COMPLETED"))
    shown = slurm.output(job)
    assert shown.count(f"requeueing job {job}") == int(slurm.about(job)["Restarts"]) == 2
    assert shown.count("starts the run again: the newest checkpoint is at step ") == 2
    assert shown.count("node 0 of 2 (host0, veth0)") == 3
    hosts.assert_finished_with_the_right_weights(220)


def test_slurm_requeues_a_failed_job_that_gains_never_a_wrong_setting(hosts, slurm):
    """A process that is killed is started again in place; an exception ends the job."""
    assert "error: this is not a Slurm job" in slurm.call("bash", "launch/slurm.sbatch")
    job = submit(slurm, *STOPS_AT, *FAILS, "--checkpoints.every_steps", "2")
    hosts.wait_for(lambda: hosts.steps() >= 3)
    os.kill(hosts.workers(1)[0], signal.SIGKILL)
    wrong = submit(slurm, "--optim.lr", "-1", "--run_name", "wrong")
    hosts.wait_for(lambda: ended(slurm, job, "FAILED"))
    assert hosts.status()["reason"].startswith("rank 3 on host1, step 100: ValueError")
    shown = slurm.output(job)
    # rank 3 may also have lost contact and ended before its launcher looks
    again = r"rank 2 was ended by SIGKILL[^\n]*: all processes start again, restart 1\b"
    assert re.search(again, shown), shown
    assert "host1 does not start its processes again: the error would repeat" in shown
    first, second = shown.split(f"requeueing job {job}\n")
    newest = "the newest checkpoint is at step 100"
    assert f"starts the run again: {newest}" in first
    assert (
        f"does not start the run again: {newest}; 1 launch(es) in a row wrote no newer one"
        in second
    )
    assert f"job {job} is not requeued: exit code 1" in second
    assert slurm.about(job)["Restarts"] == "1"
    hosts.wait_for(lambda: ended(slurm, wrong, "FAILED"))
    assert f"job {wrong} is not requeued: exit code 2" in slurm.output(wrong)
    assert slurm.about(wrong)["Restarts"] == "0"


def test_slurm_ends_a_job_of_which_three_in_a_row_have_gained_nothing(hosts, slurm):
    hangs = ("--recipe.fault", "hang", "--recipe.fault_in", "prepare_data")
    job = submit(slurm, *STOPS_AT, *hangs, "--recipe.fault_on_rank", "0")
    for start in (1, 2, 3):
        begun = "node 0 of 2 (host0, veth0)"
        hosts.wait_for(lambda n=start, begun=begun: slurm.output(job).count(begun) == n)
        hosts.wait_for(lambda: hosts.workers(0) and hosts.workers(1))
        slurm.call("scancel", "--signal=USR1", job)
        hosts.wait_for(lambda start=start: slurm.output(job).count("stopped before") == start)
    hosts.wait_for(lambda: ended(slurm, job, "FAILED"))
    shown = slurm.output(job)
    assert "there is no checkpoint; 3 launch(es) in a row wrote no newer one" in shown
    assert f"job {job} is not requeued: exit code 1" in shown
    assert shown.count(f"requeueing job {job}") == int(slurm.about(job)["Restarts"]) == 2


# ---- Slurm: all that can be uncommented or typed ------------------------------------------------
SBATCH = (PROJECT / "launch/slurm.sbatch").read_text()
OPTIONAL = re.compile(
    r"(?m)^# (#SBATCH|module|eval|source|export|container|inside|set --|values|disk|srun)(.*)$"
)
# A launcher that notes its arguments. At its first run, a task of an array is killed, and the last
# task is preempted.
LAUNCHER = """
echo "launched ${SLURM_ARRAY_TASK_ID:-} $*" >> "$NOTES"
[ -z "${SLURM_RESTART_COUNT:-}" ] || exit 0
case ${SLURM_ARRAY_TASK_ID:-} in 1) kill -9 $$ ;; 2) exit 75 ;; esac
"""
STANDS_FOR = {
    "python": LAUNCHER,
    "rsync": 'echo "rsync $*" >> "$NOTES"',
    "module": 'echo "module $*" >> "$NOTES"',
    "conda": """echo 'conda() { echo "conda $* $NEVER_SET" >> "$NOTES"; }'""",
    "apptainer": """
echo "apptainer $*" >> "$NOTES"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
""",
    # pyxis adds options to srun; their effect is not tested
    "srun": """
for word; do
    shift
    case $word in --container-*) echo "$word" >> "$NOTES" ;; *) set -- "$@" "$word" ;; esac
done
exec /usr/bin/srun "$@"
""",
}


@pytest.fixture
def noting(hosts):
    """A cluster on which stubs of python, rsync, modules and pyxis note their arguments."""
    stubs = hosts.folder / "stubs"
    stubs.mkdir()
    for name, script in STANDS_FOR.items():
        (stubs / name).write_text(f"#!/bin/bash\n{script}\n")
        (stubs / name).chmod(0o755)
    activate = hosts.folder / ".venv/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text('echo "activated $NEVER_SET" >> "$NOTES"\n')
    notes = {"NOTES": str(hosts.folder / "notes"), "PATH": f"{stubs}:{os.environ['PATH']}"}
    return SlurmCluster(hosts, notes)


def run_to_its_end(slurm, *arguments: str) -> tuple[str, list[str]]:
    """Submit a job and wait until it has left the queue; return its number and the notes."""
    job = slurm.submit(*arguments, "--config", "tiny.yaml")
    slurm.hosts.wait_for(lambda: not slurm.call("squeue", "-h", "-j", job))
    path = slurm.hosts.folder / "notes"
    return job, path.read_text().splitlines() if path.exists() else []


def test_slurm_takes_every_commented_line_and_requeues_one_task_alone(noting, monkeypatch):
    assert len(OPTIONAL.findall(SBATCH)) == 17
    folder = noting.hosts.folder
    (folder / "tiny.yaml").write_text(CONFIG.replace("run_name: tiny", ""))
    script = folder / "launch/slurm.sbatch"
    for line in OPTIONAL.finditer(SBATCH):
        script.write_text(SBATCH.replace(line[0], line[0][2:]))
        told = noting.call("sbatch", "--test-only", "launch/slurm.sbatch", "--config", "tiny.yaml")
        assert "to start at" in told, (line[0], told)
    script.write_text(OPTIONAL.sub(r"\1\2", SBATCH))
    job, notes = run_to_its_end(noting, "launch/slurm.sbatch")

    launched = [line.split() for line in notes if line.startswith("launched")]
    tasks = [line[1] for line in launched]
    disk = f"/tmp/data-{getpass.getuser()}"
    assert notes.count(f"rsync -a --delete data/ {disk}/") == len(launched), "one on each node"
    assert sorted(tasks) == ["0"] * 2 + ["1"] * 4 + ["2"] * 4, "two nodes; two are tried again"
    for line in launched:
        assert line[line.index("--num_processes") + 1] == "16"
        assert "accelerate_configs/multi_node.yaml" in line
        added = ("--seed", line[1], "--optim.lr", ("1e-3", "3e-3", "1e-2")[int(line[1])])
        added += ("--recipe.data_path", disk)
        assert tuple(line[-8:]) == ("--config", "tiny.yaml", *added)
    monkeypatch.chdir(folder)
    from my_project.settings import parse

    # the recipe of the tests has no data_path
    names = {parse(line[line.index("my_project.train") + 1 : -2]).run_name for line in launched}
    assert names == {"tiny-lr=0.001-seed=0", "tiny-lr=0.003-seed=1", "tiny-lr=0.01-seed=2"}
    ports = {(line[1], line[line.index("--main_process_port") + 1]) for line in launched}
    assert len({port for _, port in ports}) == len(ports) == 3
    assert {
        "module load cuda",
        "conda activate my_project ",
        "activated ",
        "--container-image=registry.example.com#my-project:latest",
        f"--container-mounts={folder}:/workspace,/data:/data,/tmp:/tmp",
        "--container-workdir=/workspace",
    } <= set(notes)
    for task in (1, 2):
        shown = (folder / f"slurm-{job}_{task}.out").read_text()
        assert f"requeueing job {job}_{task}\n" in shown
    assert [line for line in notes if line.startswith("apptainer exec --nv")]
    mails = (folder / "slurm/mails").read_text()
    assert "Requeued" in mails
    assert mails.count("Ended") == 1
    assert mails.count("me@example.com") == len(mails.splitlines())


def test_slurm_sbatch_starts_one_process_per_gpu_of_the_job(noting):
    cases = {
        ("--nodes=2", "--gpus-per-node=4"): ("multi_node", "2", "8"),
        ("--nodes=1",): ("multi_gpu", "1", "8"),
        ("--nodes=1", "--gpus-per-node=1"): ("gpu", "1", "1"),
    }
    for options, (where, nodes, processes) in cases.items():
        _, notes = run_to_its_end(noting, *options, "launch/slurm.sbatch")
        wanted = f"accelerate_configs/{where}.yaml --num_machines {nodes} --num_processes"
        assert f"{wanted} {processes} " in notes[-1]
    job, _ = run_to_its_end(noting, "--gpus-per-node=0", "launch/slurm.sbatch")
    assert "error: the job has no GPUs: give sbatch --gpus-per-node=8" in noting.output(job)
    assert noting.about(job)["ExitCode"] == "2:0"


def test_slurm_goes_on_without_a_node_that_it_has_lost(hosts):
    """The scheduler notices it too, and ends srun; without --no-kill it would end the job."""
    more = {"PROCESSES_PER_NODE": "2", "MIN_MACHINES": "1", "WHERE": "multi_node_cpu"}
    slurm = SlurmCluster(hosts, ENVIRONMENT | more, f"SlurmdTimeout={round(20 * PATIENCE)}\n")
    job = slurm.submit(
        "--no-kill", "--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", "launch/slurm.sbatch",
        "--config", "tiny.yaml", "--steps", "400",
    )  # fmt: skip
    hosts.wait_for(lambda: hosts.steps() >= 10)
    hosts.lose(1)
    hosts.wait_for(lambda: slurm.about(job)["JobState"] not in ("RUNNING", "COMPLETING"), 300)
    print(slurm.output(job), slurm.about(job))
    assert slurm.about(job)["JobState"] == "COMPLETED", slurm.output(job)
    assert hosts.status()["nodes"] == "1 of 2"
    hosts.assert_finished_with_the_right_weights(400)


def test_slurm_has_a_spare_take_the_place_of_a_node_that_is_lost(three_hosts):
    hosts = three_hosts
    more = {"PROCESSES_PER_NODE": "1", "MIN_MACHINES": "2", "SPARES": "1"}
    timeout = f"SlurmdTimeout={round(20 * PATIENCE)}\n"
    slurm = SlurmCluster(hosts, ENVIRONMENT | more, timeout)
    job = submit(slurm, "--steps", "400", options=("--no-kill", "--nodes=3"))
    hosts.wait_for(lambda: hosts.steps() >= 10)
    assert not hosts.workers(2), "the spare waits"
    hosts.lose(1)
    hosts.wait_for(lambda: ended(slurm, job, "COMPLETED"))
    assert slurm.about(job)["ExitCode"] == "0:0", slurm.output(job)
    lines = map(json.loads, (hosts.run_folder / "starts.jsonl").read_text().splitlines())
    assert [one["nodes"] for one in lines if one["event"] == "start"] == [2, 2]
    assert "the run goes on with host2: 2 of 2 nodes" in slurm.output(job)
    hosts.assert_finished_with_the_right_weights(400)


# Instead of the launcher: node 0 blames hosts, and all nodes end the first start with a code.
BLAMING = """
[ -n "${SLURM_RESTART_COUNT:-}" ] && exit 0
[ "$SLURM_NODEID" = 0 ] && printf "$BLAMES" > "$BLAMED_NODES"
exit "$CODE"
"""


@pytest.mark.parametrize(
    ("blames", "options", "code", "nodes", "excluded", "told"),
    [
        ("host1.cluster\\n", (), "75", "host[0,2]", "host1", "left out of the next start: host1"),
        ("host1\\n", (), "1", "host[0,2]", "host1", "left out of the next start: host1"),
        ("host0\\nhost1\\n", (), "75", "host[0-1]", "(null)", "more than half of the nodes"),
        ("other\\n", (), "75", "host[0-1]", "(null)", "requeueing"),
        ("host1\\n", ("--exclude=host2",), "75", "host[0-1]", "host2", "1 usable nodes, too few"),
    ],
)
def test_slurm_leaves_a_node_that_is_blamed_out_of_the_next_start(
    three_hosts, blames, options, code, nodes, excluded, told
):
    hosts = three_hosts
    stub = hosts.folder / "stubs/python"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/bash\n{BLAMING}")
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    slurm = SlurmCluster(hosts, {"PATH": path, "BLAMES": blames, "CODE": code})
    job = slurm.submit(
        *options, "--nodes=2", "--gpus-per-node=2", "launch/slurm.sbatch", "--config", "tiny.yaml"
    )
    hosts.wait_for(lambda: ended(slurm, job, "COMPLETED"))
    about = slurm.about(job)
    assert told in slurm.output(job)
    assert (about["NodeList"], about["ExcNodeList"], about["Restarts"]) == (nodes, excluded, "1")
    assert not list(hosts.folder.glob(".blamed*"))


def test_slurm_leaves_out_the_node_whose_gpu_has_failed(three_hosts):
    """By the real launcher, after its restarts in place."""
    hosts = three_hosts
    slurm = SlurmCluster(hosts, ENVIRONMENT | {"PROCESSES_PER_NODE": "1"})
    fails = ("--recipe.fault", "device_error", "--recipe.fault_at", "30")
    more = ("--checkpoints.every_steps", "10", "--recipe.seconds", "0")
    job = submit(slurm, *STOPS_AT, *fails, *more, options=("--nodes=2",))
    left_out = "left out of the next start: host1"
    hosts.wait_for(lambda: left_out in slurm.output(job))
    hosts.wait_for(lambda: slurm.about(job)["NodeList"] == "host[0,2]")
    assert slurm.about(job)["ExcNodeList"] == "host1"
    slurm.call("scancel", job)


# ---- Kubernetes ----------------------------------------------------------------------------------
POD = manifests("kubernetes.yaml")["Job"]["spec"]["template"]["spec"]["containers"][0]
TRAIN_JOB = manifests("kubeflow.yaml")["TrainJob"]["spec"]["trainer"]
OF_KUBEFLOW = {
    "PET_NODE_RANK": "{rank}", "PET_MASTER_ADDR": "tiny-node-0-0.tiny", "PET_MASTER_PORT": "29400",
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8",
}  # fmt: skip
PODS = (
    (POD, {"JOB_COMPLETION_INDEX": "{rank}"}, "--stop_after 0s", 75),
    (TRAIN_JOB, OF_KUBEFLOW, "", 0),
)


def test_what_the_pods_run_trains_on_two_hosts(hosts):
    """With each container's command and the environment of its pods, including wrong ranks.

    The pods of the Job are told to stop, and those of the TrainJob go on with the run.
    """
    (hosts.folder / "hosts").write_text(
        "127.0.0.1 localhost\n10.77.0.1 host0 tiny-0.training tiny-node-0-0.tiny\n10.77.0.2 host1\n"
    )
    (hosts.folder / "configs").mkdir()
    (hosts.folder / "configs/image_classification.yaml").write_text(CONFIG)
    for container, of_pod, more, code in PODS:
        assert "/storage/runs" in container["args"][0]
        script = container["args"][0].replace("/storage/runs", "runs").rstrip()
        script += f" --steps 20 {more}"
        given = values(container) | {"RUN": "tiny"}
        sizes = {"NODES": "2", "GPUS": "8", "WHERE": "multi_node", "MIN_MACHINES": ""}
        assert given == sizes | {"RUN": "tiny"}
        hosts.commands.clear()
        for host in (0, 1):
            hosts.start(
                host, *container["command"], script,
                **given | ENVIRONMENT | {"GPUS": "2"},
                **{name: value.format(rank=host) for name, value in of_pod.items()},
                **{"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "1"},
            )  # fmt: skip
        assert hosts.wait(300) == [code] * 2, hosts.output(0) + hosts.output(1)
    for host in (0, 1):
        assert hosts.output(host).count(f"node {host} of 2 (host{host}, veth0)") == len(PODS)
    hosts.assert_finished_with_the_right_weights(20)


def test_pods_go_on_without_one_that_is_evicted_and_take_the_new_one(hosts):
    """With the Job's command and MIN_MACHINES: pod 1, then pod 0, are lost and replaced."""
    (hosts.folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 tiny-0.training\n")
    (hosts.folder / "configs").mkdir()
    (hosts.folder / "configs/image_classification.yaml").write_text(CONFIG)
    script = POD["args"][0].replace("/storage/runs", "runs").rstrip() + " --steps 600"

    def start(host: int) -> None:
        given = values(POD) | ENVIRONMENT | {"RUN": "tiny", "GPUS": "1", "MIN_MACHINES": "1"}
        given |= {"JOB_COMPLETION_INDEX": str(host)}
        hosts.start(host, *POD["command"], script, **given)

    for host in (0, 1):
        start(host)
    pods = {0: hosts.commands[0], 1: hosts.commands[1]}
    for pod in (1, 0):
        before = hosts.steps()
        hosts.wait_for(lambda before=before: hosts.steps() >= before + 30)
        os.kill(pods[pod].pid, signal.SIGTERM)
        assert pods[pod].wait(60 * PATIENCE) == 75
        if pod:
            hosts.wait_for(lambda: hosts.status()["nodes"] == "1 of 2", 60)
        start(pod)
        pods[pod] = hosts.commands[-1]
        hosts.wait_for(lambda: "{nodes} {outcome}".format(**hosts.status()) == "2 of 2 running", 60)
    assert hosts.wait(300)[2:] == [0, 0], hosts.outputs()
    hosts.assert_finished_with_the_right_weights(600)


# ---- preflight, and what the nodes find when they meet -------------------------------------------
JOIN = 10 * PATIENCE  # seconds for the nodes to find each other


def check(hosts: Hosts, host: int, *flags: str, module: str = "tools.preflight", **more) -> None:
    hosts.start(
        host, sys.executable, "-m", "my_project.launch",
        "--config_file", "accelerate_configs/multi_node_cpu.yaml", "--machine_rank", str(host),
        "--main_process_ip", "host0", "--join_timeout_seconds", f"{JOIN:g}", *flags,
        "-m", f"my_project.{module}", "--config", "tiny.yaml", "--steps", "20",
        **ENVIRONMENT | more,
    )  # fmt: skip


def test_preflight_passes_on_two_hosts_and_then_the_run_starts(hosts):
    for host in (0, 1):
        check(hosts, host, "--preflight", module="train")
    assert hosts.wait(300) == [0, 0], hosts.output(0) + hosts.output(1)
    shown = hosts.output(0)
    for word in ("host0", "host1", "0 to 1", "2 to 3", "GB/s"):
        assert word in shown.split("preflight passed")[0]
    assert "all-reduce of 16 MB over all nodes" in shown
    assert "pairs of nodes: 1, the slowest" in shown
    assert hosts.status()["outcome"] == "finished"


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        ("rank", ["node 1 of 2 did not connect",
                  "host0 must be an address of node 0, which is host1"]),
        ("interface", ["host0 (veth0 10.77.0.1) cannot reach host1 (inner0 10.99.0.1)"] * 2),
        ("cable", [f"node 1 of 2 did not connect to host0 within {JOIN:g} s; connected: 0 (host0)",
                   f"node 0 did not answer at host0:29500 within {JOIN:g} s"]),
    ],
)  # fmt: skip
def test_a_wrong_launch_ends_in_time_and_names_its_cause(hosts, fault, sentences):
    started = time.monotonic()
    for host in (0, 1):
        flags = ("--machine_rank", "0") if fault == "rank" else ()
        environment = {}
        if fault == "interface" and host == 1:
            for command in (
                "link add inner0 type veth peer name inner1", "addr add 10.99.0.1/24 dev inner0",
                "link set inner0 up", "link set inner1 up",
            ):  # fmt: skip
                ip("-n", hosts.namespaces[1], *command.split())
            environment["GLOO_SOCKET_IFNAME"] = "inner0"
        check(hosts, host, *flags, **environment)
    if fault == "cable":
        hosts.cable(1, "down")
    assert hosts.wait(300) == [1, 1], "another try may find the nodes"
    assert time.monotonic() - started < 120 * PATIENCE
    for host, sentence in enumerate(sentences):
        assert sentence in hosts.output(host)
        assert hosts.output(host).count("error:") == 1
        assert "Traceback" not in hosts.output(host)
