"""The manifests in deploy/ are what the KubeRay operator and Ray accept, and fit the image and each other.

The operator's definitions are a megabyte each and not kept here. The tests that need them read the folder named by
KUBERAY_CRDS, ``helm-chart/kuberay-operator/crds`` of ray-project/kuberay v1.7.0, and are skipped without it.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import ray.scripts.scripts
import typer
import yaml
from jsonschema import Draft202012Validator, ValidationError

from orchestration.commands.main import app

ROOT = Path(__file__).parents[1]
CRDS = os.environ.get("KUBERAY_CRDS")
with_definitions = pytest.mark.skipif(CRDS is None, reason="KUBERAY_CRDS does not name the operator's definitions")
DEFINITIONS = {"RayJob": "ray.io_rayjobs.yaml", "RayCluster": "ray.io_rayclusters.yaml"}
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def manifest(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / f"{kind.lower()}.yaml").read_text())
    return found


def groups() -> list[dict[str, Any]]:
    spec = manifest("RayCluster")["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@functools.cache
def definition(kind: str) -> Draft202012Validator:
    """The operator's schema of a kind. As the API server when it validates strictly, it refuses unknown fields."""
    text = (Path(CRDS or "") / DEFINITIONS[kind]).read_text()
    versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = (each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1")
    return Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return list(map(_strict, schema))
    if not isinstance(schema, dict):
        return schema
    found = {name: _strict(part) for name, part in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if closed and not schema.keys() & {"additionalProperties", "x-kubernetes-preserve-unknown-fields"}:
        found["additionalProperties"] = False
    return found


@with_definitions
@pytest.mark.parametrize("kind", DEFINITIONS)
def test_the_operator_knows_every_field_and_accepts_its_value(kind: str) -> None:
    definition(kind).validate(manifest(kind))


MISTAKES: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "misspelt field": (("shutdownAfterJobFinish",), True),
    "text for a number": (("backoffLimit",), "3"),
    "unknown mode": (("rayClusterSpec", "authOptions", "mode"), "tokens"),
    "inside a list": (("rayClusterSpec", "workerGroupSpecs", 0, "maxReplica"), 4),
    "inside a pod": (("rayClusterSpec", "headGroupSpec", "template", "spec", "container"), []),
}


@with_definitions
@pytest.mark.parametrize(("place", "value"), MISTAKES.values(), ids=MISTAKES.keys())
def test_the_definitions_would_catch_a_mistake(place: tuple[str | int, ...], value: Any) -> None:
    wrong = copy.deepcopy(manifest("RayJob"))
    target: Any = wrong["spec"]
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    with pytest.raises(ValidationError):
        definition("RayJob").validate(wrong)


def test_ray_start_knows_its_parameters() -> None:
    known = {name.removeprefix("--") for option in ray.scripts.scripts.start.params for name in option.opts}
    assert {name for group in groups() for name in group["rayStartParams"]} <= known


def test_both_run_the_same_cluster_with_a_token() -> None:
    spec = manifest("RayCluster")["spec"]
    assert manifest("RayJob")["spec"]["rayClusterSpec"] == spec
    assert spec["authOptions"] == {"mode": "token", "secretName": "dpsweep-token"}


def test_a_job_is_tried_again_ends_and_gives_its_cluster_back() -> None:
    spec = manifest("RayJob")["spec"]
    assert (spec["submissionMode"], spec["shutdownAfterJobFinishes"]) == ("K8sJobMode", True)
    assert min(spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) > 0


def test_the_head_takes_no_work_and_workers_come_and_go() -> None:
    head, *workers = groups()
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert [(worker["groupName"], worker["minReplicas"]) for worker in workers] == [("gpu", 0), ("cpu", 0)]
    limits = [worker["template"]["spec"]["containers"][0]["resources"]["limits"] for worker in workers]
    assert [limit.get("nvidia.com/gpu") for limit in limits] == ["1", None]


def test_every_node_has_the_image_and_the_shared_folder_and_no_root() -> None:
    claim = yaml.safe_load((ROOT / "deploy" / "storage.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups():
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "REGISTRY/dpsweep:0.1.0"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert pod["securityContext"]["runAsNonRoot"]
        (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
        assert (mount["name"], volume["persistentVolumeClaim"]["claimName"]) == (
            volume["name"],
            claim["metadata"]["name"],
        )


def test_the_entry_point_is_a_command_on_what_the_image_holds() -> None:
    program, name, sweep, *options = manifest("RayJob")["spec"]["entrypoint"].split()
    assert (program, name) == ("dpsweep", "run")
    typer.main.get_command(app).commands[name].make_context(name, [sweep, *options])  # type: ignore[attr-defined]
    assert (ROOT / sweep.removeprefix("/home/ray/dpsweep/")).is_file()
    assert options[-1].startswith(groups()[0]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"])


def test_the_image_has_the_code_the_pins_and_their_ray() -> None:
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for word in line.split()[1:-1]]
    packages = {"accounting", "workers", "orchestration", "dpsweep", "sweeps"}
    assert set(copied) == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in copied)
    (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"FROM rayproject/ray:{pinned}-py311-gpu" in DOCKERFILE
    assert manifest("RayCluster")["spec"]["rayVersion"] == pinned
