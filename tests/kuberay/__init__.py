"""The definitions of KubeRay's resources, version 1.7.0, without their descriptions and compressed.

They are ``helm-chart/kuberay-operator/crds`` of github.com/ray-project/kuberay at v1.7.0 (Apache License 2.0).
``python -m tests.kuberay FOLDER`` writes them again from such a folder.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, Final

import yaml

KINDS: Final = {"RayCluster": "rayclusters", "RayJob": "rayjobs"}
_HERE = Path(__file__).parent


def schema(kind: str) -> dict[str, Any]:
    """The OpenAPI schema of a kind."""
    found: dict[str, Any] = json.loads(lzma.decompress((_HERE / f"{KINDS[kind]}.json.xz").read_bytes()))
    return found


def write(folder: Path) -> None:
    """Write the compressed schemas from the operator's definitions."""
    for name in KINDS.values():
        definition = yaml.load((folder / f"ray.io_{name}.yaml").read_text(), Loader=yaml.CSafeLoader)
        (found,) = (each["schema"] for each in definition["spec"]["versions"] if each["name"] == "v1")
        content = json.dumps(_undescribed(found["openAPIV3Schema"]), separators=(",", ":"), sort_keys=True)
        (_HERE / f"{name}.json.xz").write_bytes(lzma.compress(content.encode(), preset=9 | lzma.PRESET_EXTREME))


def _undescribed(part: Any) -> Any:
    """A part of a schema without texts for readers; a property may itself be called description."""
    if isinstance(part, list):
        return [_undescribed(each) for each in part]
    if not isinstance(part, dict):
        return part
    kept = {name: each for name, each in part.items() if not (name == "description" and isinstance(each, str))}
    return {name: _undescribed(each) for name, each in kept.items()}
