"""Sweeps of differentially private training, from Python.

>>> import dpsweep
>>> plan = dpsweep.plan('''
... name: tumours
... data: breast_cancer
... model: logistic
... sampling: {method: poisson, batch_size: 64}
... epochs: 2
... clipping: flat
... privacy: {target_epsilon: 3, delta: 1e-5, accountant: rdp}
... ''')
>>> [trial.key for trial in plan.trials], plan.refusals
(['flat-constant-epsilon3-seed0-b924a36f9b'], ())
>>> round(plan.trials[0].worst_case.epsilon, 1)
3.0
>>> dpsweep.open("no/such/folder")
Traceback (most recent call last):
    ...
dpsweep.accounting.errors.InvalidInput: ...no/such/folder holds no sweep; name the folder that `dpsweep run` wrote

`run` trains such a plan, and `open` reads the results of a run: see docs/python.md. Importing this package loads
neither torch, Ray nor MLflow; each is loaded when it is first needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsweep.accounting.errors import (
        DataCorruption,
        DpsweepError,
        InvalidInput,
        StorageError,
        Unreachable,
        UnsupportedMechanism,
    )
    from dpsweep.orchestration.library import StoredSweep, Trial, compare, plan, run
    from dpsweep.orchestration.library import open_sweep as open
    from dpsweep.parts import Sweep
    from dpsweep.workers.training.classifier import DPClassifier
    from dpsweep.workers.training.private_training import PrivateTraining

__all__ = [
    "DPClassifier",
    "DataCorruption",
    "DpsweepError",
    "InvalidInput",
    "PrivateTraining",
    "StorageError",
    "StoredSweep",
    "Sweep",
    "Trial",
    "Unreachable",
    "UnsupportedMechanism",
    "compare",
    "open",
    "plan",
    "run",
]

_LIBRARY = "dpsweep.orchestration.library"
_PLACES = {
    "DPClassifier": ("dpsweep.workers.training.classifier", "DPClassifier"),
    "PrivateTraining": ("dpsweep.workers.training.private_training", "PrivateTraining"),
    "StoredSweep": (_LIBRARY, "StoredSweep"),
    "Sweep": ("dpsweep.parts", "Sweep"),
    "Trial": (_LIBRARY, "Trial"),
    "compare": (_LIBRARY, "compare"),
    "open": (_LIBRARY, "open_sweep"),
    "plan": (_LIBRARY, "plan"),
    "run": (_LIBRARY, "run"),
}
"""Modules that hold exported names, and their names there; all other exports are errors."""


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used, unless libraries would load code from the working directory."""
    if name not in __all__:
        raise AttributeError(f"module 'dpsweep' has no attribute {name!r}")
    if name in _PLACES:
        from dpsweep.accounting.jobs.working_directory import require_harmless_working_directory

        require_harmless_working_directory()
    module, there = _PLACES.get(name, ("dpsweep.accounting.errors", name))
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return __all__
