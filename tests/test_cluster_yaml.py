"""cluster.yaml, as Ray itself reads it: valid, without work on the head, growing from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cluster() -> dict[str, Any]:
    configured: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return configured


def test_ray_accepts_the_file(cluster: dict[str, Any]) -> None:
    """What `ray up` does before it talks to AWS: fill in defaults, then check against Ray's own schema."""
    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["available_node_types"]["gpu_worker"]["max_workers"] <= prepared["max_workers"]


def test_the_schema_would_catch_a_mistake(cluster: dict[str, Any]) -> None:
    cluster["max_worker"] = cluster.pop("max_workers")
    with pytest.raises(ValidationError, match="max_worker"):
        validate_config(prepare_config(cluster))


def test_the_head_takes_no_work_and_workers_come_and_go(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"] == {"CPU": 0}
    worker = types["gpu_worker"]
    assert (worker["min_workers"], worker["max_workers"] > 0) == (0, True)
    assert not {"CPU", "GPU"} & worker["resources"].keys(), "read off the instance type, so that changing it is enough"


def test_every_node_checks_the_token(cluster: dict[str, Any]) -> None:
    assert any("RAY_AUTH_MODE=token" in option for option in cluster["docker"]["run_options"])
    assert any(target.endswith(".ray/auth_token") for target in cluster["file_mounts"])


def test_it_mounts_what_is_in_the_repository(cluster: dict[str, Any]) -> None:
    """Setup commands name files that are mounted from here."""
    mounts = {target: source for target, source in cluster["file_mounts"].items() if "/dpsweep/" in target}
    assert all((ROOT / source).exists() and target.endswith(f"/{source}") for target, source in mounts.items())
    named = [
        word.removeprefix("/home/ray/dpsweep/")
        for command in cluster["setup_commands"]
        for word in command.split()
        if word.startswith("/home/ray/dpsweep/")
    ]
    assert named
    assert {f"/home/ray/dpsweep/{name}" for name in named} <= mounts.keys()
    assert all((ROOT / name).is_file() for name in named)


def test_neither_data_nor_secrets_travel_with_the_code(cluster: dict[str, Any]) -> None:
    """Folders are mounted by name, and hold code alone: the working directory may hold anything."""
    sources = {source for target, source in cluster["file_mounts"].items() if "/dpsweep" in target}
    packages = {"accounting", "workers", "orchestration", "dpsweep", "sweeps"}
    assert sources - packages == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert {"**/runs", "**/private", "**/.env*", "**/*.pem", "**/*.csv"} <= set(cluster["rsync_exclude"])


@pytest.mark.parametrize("node", ["head", "gpu_worker"])
def test_disks_are_encrypted_and_credentials_need_a_session(cluster: dict[str, Any], node: str) -> None:
    config = cluster["available_node_types"][node]["node_config"]
    assert all(disk["Ebs"]["Encrypted"] for disk in config["BlockDeviceMappings"])
    assert config["MetadataOptions"]["HttpTokens"] == "required"


def test_it_says_that_traffic_is_not_encrypted() -> None:
    assert "RAY_USE_TLS=1" in (ROOT / "cluster.yaml").read_text()
