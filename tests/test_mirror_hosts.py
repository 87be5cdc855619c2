"""Hosts without a shared folder: one is lost with its disk, and a new host continues the run."""

import re
import sys
from pathlib import Path

import pytest
from hosts import ADDRESSES, CONFIG, NEEDS_HOSTS, PATIENCE, PLAIN, PROJECT, Hosts, steps

pytestmark = NEEDS_HOSTS
STEPS = 120
ENVIRONMENT = PLAIN | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(hosts: Hosts, host: int, config_file: str) -> None:
    """Start the launcher on a host with its own disk at runs/; hosts 1 and 2 are node 1."""
    disk = hosts.folder / f"disk{host}"
    disk.mkdir()
    hosts.start(
        host, sys.executable, "-m", "my_project.launch",
        "--config_file", f"accelerate_configs/{config_file}.yaml",
        "--num_machines", "2", "--num_processes", "2", "--machine_rank", str(min(host, 1)),
        "--main_process_ip", ADDRESSES[0], "--main_process_port", "29500",
        "--min_machines", "1", "--lost_node_seconds", "6",
        "--join_timeout_seconds", str(20 * PATIENCE),
        "-m", "my_project.train", "--config", "tiny.yaml",
        disk=(disk, hosts.folder / "runs"), **ENVIRONMENT,
    )  # fmt: skip


@pytest.mark.parametrize("config_file", ["cpu_2_processes", "cpu_fsdp2"])
def test_a_host_and_its_disk_are_lost_and_the_run_ends_on_a_new_one(tmp_path: Path, config_file):
    with Hosts(tmp_path, 3) as hosts:
        config = CONFIG.replace("steps: 400", f"steps: {STEPS}").replace(
            "seconds: 0.05", "seconds: 0.2"
        )
        mirror = f"mirror: 'file://{tmp_path}/mirror'"
        (tmp_path / "tiny.yaml").write_text(
            re.sub(
                r"checkpoints: \{every_steps: 20\}",
                f"checkpoints: {{every_steps: 10, {mirror}}}",
                config,
            )
        )
        (tmp_path / "accelerate_configs").symlink_to(PROJECT / "accelerate_configs")
        (tmp_path / "runs").mkdir()
        hosts.run_folder = tmp_path / "disk0/tiny"
        for host in (0, 1):
            launch(hosts, host, config_file)
        hosts.wait_for(lambda: hosts.steps() >= 25)
        assert not steps(tmp_path / "disk1/tiny"), "the disks are not shared"
        hosts.lose(1)
        hosts.wait_for(lambda: hosts.status()["nodes"] == "1 of 2")
        launch(hosts, 2, config_file)
        kept = [hosts.commands[0], hosts.commands[2]]
        for command in kept:
            assert command.wait(300 * PATIENCE) == 0, hosts.outputs()
        assert hosts.status()["nodes"] == "2 of 2", hosts.outputs()
        assert list((tmp_path / "disk2/tiny/checkpoints").iterdir()), "it has fetched one"
        (tmp_path / "runs").rmdir()
        (tmp_path / "runs").symlink_to("disk0")
        hosts.assert_finished_with_the_right_weights(STEPS)
