"""Code of the user's own that a test allows."""

from __future__ import annotations

from pathlib import Path

from dpsweep.workers.own_code.imports import UserCode, UserModule, is_import_path
from dpsweep.workers.spec import TrialSpec


def allowed(*locations: str | Path) -> UserCode:
    """Files by their absolute path, and modules that Python finds by itself."""
    named = map(str, locations)
    return UserCode(tuple(UserModule(name, name if name.endswith(".py") else None) for name in named))


def code_of(spec: TrialSpec) -> UserCode:
    """All code of the user's own that a trial names."""
    names = (spec.data.name, spec.model.name, spec.loss.name, spec.clipping.name)
    return allowed(*(name.rpartition(":")[0] for name in names if is_import_path(name)))
