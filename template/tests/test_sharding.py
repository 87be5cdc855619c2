"""FSDP2 and HSDP. Delete this file together with sharding.py (AGENTS.md)."""

import pytest
from runs import make_config

from my_project.accelerator import check_launch
from my_project.config import ConfigError


def test_sizes_of_hsdp_that_do_not_make_the_world_are_refused(tmp_path, monkeypatch):
    """Accelerate ignores misspelled keys of parallelism_config, so a size stays 1."""
    config = make_config(tmp_path)
    monkeypatch.setattr("my_project.accelerator.use_cpu", lambda: False)
    for name, value in {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "16",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    check_launch(config)
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"sizes 2 \(dp_replicate\) and 1 \(dp_shard\).* 16"):
        check_launch(config)
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 \(dp_replicate\) and 4 \(dp_shard\)"):
        check_launch(config)
