"""The manifests in deploy/ are what Kubernetes, the KubeRay operator and Ray accept, and fit the images and each other.

The operator's definitions are in `tests.kuberay`, those of Kubernetes in the package kubernetes-validate.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import ray.scripts.scripts
import typer
import yaml
from jsonschema import Draft202012Validator, ValidationError

from dpsweep.orchestration.commands.main import app
from dpsweep.orchestration.execution.nodes import TRAINING_LABEL
from tests.kuberay import KINDS, schema

ROOT = Path(__file__).parents[1]
KUBERNETES = "1.33"
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
    return Draft202012Validator(_strict(schema(kind)))


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_knows_every_field_and_accepts_its_value(kind: str) -> None:
    definition(kind).validate(manifest(kind))


MISTAKES: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "misspelt field": (("shutdownAfterJobFinish",), True),
    "text for a number": (("backoffLimit",), "3"),
    "unknown mode": (("rayClusterSpec", "authOptions", "mode"), "tokens"),
    "inside a list": (("rayClusterSpec", "workerGroupSpecs", 0, "maxReplica"), 4),
    "inside a pod": (("rayClusterSpec", "headGroupSpec", "template", "spec", "container"), []),
}


@pytest.mark.parametrize(("place", "value"), MISTAKES.values(), ids=MISTAKES.keys())
def test_the_definitions_would_catch_a_mistake(place: tuple[str | int, ...], value: Any) -> None:
    wrong = copy.deepcopy(manifest("RayJob"))
    target: Any = wrong["spec"]
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    with pytest.raises(ValidationError):
        definition("RayJob").validate(wrong)


def pods() -> dict[str, Any]:
    """Every pod that the manifests describe, by a name."""
    submitter = manifest("RayJob")["spec"]["submitterPodTemplate"]
    names = ["head", *(group["groupName"] for group in groups()[1:])]
    return {"submitter": submitter, **dict(zip(names, (group["template"] for group in groups()), strict=True))}


@pytest.mark.parametrize("name", ["storage", "networkpolicy"])
def test_kubernetes_knows_every_field(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(
        yaml.safe_load((ROOT / "deploy" / f"{name}.yaml").read_text()), KUBERNETES, strict=True
    )


@pytest.mark.parametrize("name", ["submitter", "head", "gpu", "cpu"])
def test_kubernetes_knows_every_field_of_a_pod(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pods()[name]["spec"]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    wrong = copy.deepcopy(pod)
    wrong["spec"]["containers"][0]["securityContexts"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["submitter", "head", "gpu", "cpu"])
def test_pods_pass_pod_security_restricted(name: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, the profile restricted."""
    pod = pods()[name]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all({"persistentVolumeClaim", "emptyDir"} & volume.keys() for volume in pod.get("volumes", ()))
    for container in pod["containers"]:
        assert_restricted(container["securityContext"])
        assert not any("hostPort" in port for port in container.get("ports", ()))
    assert_restricted(manifest("RayCluster")["spec"]["autoscalerOptions"]["securityContext"])


def assert_restricted(context: dict[str, Any]) -> None:
    assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_namespace_of_its_own_is_closed_but_to_those_that_must_come_in() -> None:
    policy = yaml.safe_load((ROOT / "deploy" / "networkpolicy.yaml").read_text())["spec"]
    nodes = {"matchLabels": {"ray.io/is-ray-node": "yes"}}  # KubeRay's label of every node
    assert (policy["podSelector"], policy["policyTypes"]) == (nodes, ["Ingress", "Egress"])
    assert {"from": [{"podSelector": nodes}]} in policy["ingress"]
    others = [rule for rule in policy["ingress"] if rule["from"] != [{"podSelector": nodes}]]
    assert all(rule["ports"] for rule in others), "no stranger reaches every port"
    submitter = manifest("RayJob")["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    assert any({"podSelector": {"matchLabels": submitter}} in rule["from"] for rule in others)


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_what_is_commented_out_is_accepted_too(name: str) -> None:
    """Redis behind the head, queues of Kueue, priority classes."""
    text = (ROOT / "deploy" / f"{name}.yaml").read_text()
    option = r"^( *)# ((?:labels|gcsFaultToleranceOptions|priorityClassName|  redis\w+):)"
    taken, count = re.subn(option, r"\1\2", text, flags=re.M)
    assert count == 7
    kind = {"raycluster": "RayCluster", "rayjob": "RayJob"}[name]
    found = yaml.safe_load(taken)
    definition(kind).validate(found)
    assert "kueue.x-k8s.io/queue-name" in found["metadata"]["labels"]
    spec = found["spec"] if kind == "RayCluster" else found["spec"]["rayClusterSpec"]
    assert spec["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "dpsweep-redis"
    assert spec["headGroupSpec"]["template"]["spec"]["priorityClassName"] == "dpsweep"


def test_gpu_nodes_have_the_label_that_other_work_keeps_off() -> None:
    name, value = TRAINING_LABEL
    assert [group["labels"][name] == value for group in groups()[1:]] == [True, False]


def test_only_the_driver_has_the_password_of_mlflow() -> None:
    for name, pod in pods().items():
        (container,) = pod["spec"]["containers"]
        secrets = {each["secretRef"]["name"] for each in container.get("envFrom", ())}
        assert ("dpsweep-mlflow" in secrets) == (name == "head"), name


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


def test_every_node_has_its_image_and_the_shared_folder() -> None:
    claim = yaml.safe_load((ROOT / "deploy" / "storage.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["storageClassName"], "the default class is rarely one that several nodes can write"
    for group in groups():
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert container["image"] == f"REGISTRY/dpsweep:0.1.0-{'gpu' if has_gpu else 'cpu'}"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert "ephemeral-storage" in container["resources"]["limits"]
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
    assert f"FROM rayproject/ray:{pinned}-py311-${{KIND}}" in DOCKERFILE
    assert manifest("RayCluster")["spec"]["rayVersion"] == pinned
