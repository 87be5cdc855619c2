"""A Slurm cluster on emulated hosts: munged and slurmctld on host 0, slurmd on each host.

For the scheduler, each host has 8 GPUs, which are empty files.
"""

import os
import shutil
import subprocess

import pytest
from hosts import Hosts

CONF = """
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={0}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={0}/state
SlurmdSpoolDir={0}/spool_%n
SlurmctldPidFile={0}/slurmctld.pid
SlurmdPidFile={0}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=2
MailProg={0}/mail
GresTypes=gpu
NodeName=host[0-{1}] CPUs=128 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=ALL MaxTime=INFINITE State=UP
"""
MAIL = """#!/bin/bash
printf '%s\\n' "$*" >> "$(dirname "$0")/mails"
"""


class SlurmCluster:
    """Starts the daemons on all hosts; Hosts ends them."""

    def __init__(self, hosts: Hosts, environment: dict[str, str], more: str = "") -> None:
        if not all(shutil.which(name, path="/usr/sbin") for name in ("munged", "slurmctld")):
            pytest.skip("needs Slurm and munge (Debian: slurm-wlm munge)")
        self.hosts = hosts
        self.folder = hosts.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(CONF.format(self.folder, hosts.count - 1) + more)
        for gpu in range(8):
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        (self.folder / "mail").write_text(MAIL)
        (self.folder / "mail").chmod(0o755)
        self.environment = environment | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        hosts.start(
            0, "/usr/sbin/munged", "--foreground", "--force",
            *(f"--{name}={self.folder}/munge.{name.split('-')[0]}"
              for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")),
        )  # fmt: skip
        hosts.wait_for((self.folder / "munge.socket").exists)
        hosts.start(0, "/usr/sbin/slurmctld", "-D", **self.environment)
        for host in range(hosts.count):
            hosts.start(host, "/usr/sbin/slurmd", "-D", "-N", f"host{host}", **self.environment)
        hosts.wait_for(lambda: self.call("sinfo", "-h", "-o", "%T").strip() == "idle")

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands on host 0; return what it prints."""
        done = subprocess.run(
            self.hosts.entering(0, *command),
            capture_output=True, text=True, check=False, cwd=self.hosts.folder,
            env=dict(os.environ) | self.environment,
        )  # fmt: skip
        return done.stdout + done.stderr

    def submit(self, *arguments: str) -> str:
        """Submit a job; return its number."""
        shown = self.call("sbatch", *arguments)
        assert "Submitted batch job" in shown, shown
        return shown.split()[-1]

    def about(self, job: str) -> dict[str, str]:
        """Return the fields that scontrol shows for a job."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        """Return what a job has printed."""
        path = self.hosts.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""
