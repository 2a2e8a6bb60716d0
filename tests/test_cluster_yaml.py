"""The files of Ray's cluster launcher, as Ray itself reads them: valid, without work on the head, without secrets."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray.scripts.scripts
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]


AWS, GOOGLE, HOSTS = "cluster.yaml", "deploy/cluster-gcp.yaml", "deploy/cluster-hosts.yaml"
CLOUDS = pytest.mark.parametrize("name", [AWS, GOOGLE])
ALL = pytest.mark.parametrize("name", [AWS, GOOGLE, HOSTS])


def read(name: str) -> dict[str, Any]:
    configured: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return configured


@ALL
def test_ray_accepts_the_file(name: str) -> None:
    """What `ray up` does before it talks to the provider: fill in defaults, then check against Ray's own schema."""
    prepared = prepare_config(read(name))
    validate_config(prepared)
    workers = [each for kind, each in prepared["available_node_types"].items() if kind != prepared["head_node_type"]]
    assert all(each["max_workers"] <= prepared["max_workers"] for each in workers)


@CLOUDS
def test_the_head_takes_no_work_and_workers_come_and_go(name: str) -> None:
    cluster = read(name)
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"] == {"CPU": 0}
    for kind in ("gpu_worker", "cpu_worker"):
        assert (types[kind]["min_workers"], types[kind]["max_workers"] > 0) == (0, True)
    assert types["cpu_worker"]["resources"]["accounting"] > 0, "where a sweep may keep its accounting"
    assert len({types[kind]["labels"]["dpsweep"] for kind in ("gpu_worker", "cpu_worker")}) == 2


def test_a_host_of_ones_own_says_what_it_is_for() -> None:
    """The options of `ray start` are Ray's own, with what the shell makes of them where there is no GPU."""
    start = read(HOSTS)["worker_start_ray_commands"][-1]
    script = start.replace("ray start", "printf '%s\\n'").replace("nvidia-smi", "false")
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, env={"RAY_HEAD_IP": "h", **os.environ}
    )
    parsed = ray.scripts.scripts.start.make_context("start", done.stdout.split())
    assert parsed.params["labels"] == "dpsweep=account"
    assert json.loads(parsed.params["resources"])["accounting"] >= 1
    assert "--num-cpus=0" in read(HOSTS)["head_start_ray_commands"][-1]


@ALL
def test_every_node_checks_the_token(name: str) -> None:
    cluster = read(name)
    assert any("RAY_AUTH_MODE=token" in option for option in cluster["docker"]["run_options"])
    assert any(target.endswith(".ray/auth_token") for target in cluster["file_mounts"])


@ALL
def test_it_mounts_what_is_in_the_repository(name: str) -> None:
    """Setup commands name files that are mounted from here."""
    cluster = read(name)
    mounts = {target: source for target, source in cluster["file_mounts"].items() if "/dpsweep/" in target}
    assert all((ROOT / source).exists() and target.endswith(f"/{source}") for target, source in mounts.items())
    named = [
        word.strip("'").partition("[")[0].removeprefix("/home/ray/dpsweep").lstrip("/")
        for command in cluster["setup_commands"]
        for word in command.split()
        if word.strip("'").startswith("/home/ray/dpsweep")
    ]
    assert "" in named, "the package itself is installed"
    files = [name for name in named if name]
    assert files
    assert {f"/home/ray/dpsweep/{name}" for name in files} <= mounts.keys()
    assert all((ROOT / name).is_file() for name in files)


@ALL
def test_neither_data_nor_secrets_travel_with_the_code(name: str) -> None:
    """Folders are mounted by name, and hold code alone: the working directory may hold anything."""
    cluster = read(name)
    sources = {source for target, source in cluster["file_mounts"].items() if "/dpsweep" in target}
    packages = {"accounting", "workers", "orchestration", "dpsweep", "sweeps"}
    assert sources - packages == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert {"**/runs", "**/private", "**/.env*", "**/*.pem", "**/*.csv"} <= set(cluster["rsync_exclude"])


@pytest.mark.parametrize("node", ["head", "gpu_worker", "cpu_worker"])
def test_disks_are_encrypted_and_credentials_need_a_session(node: str) -> None:
    config = read(AWS)["available_node_types"][node]["node_config"]
    assert all(disk["Ebs"]["Encrypted"] for disk in config["BlockDeviceMappings"])
    assert config["MetadataOptions"]["HttpTokens"] == "required"


@ALL
def test_it_says_that_traffic_is_not_encrypted(name: str) -> None:
    assert "RAY_USE_TLS=1" in (ROOT / name).read_text()
