"""Small, real trials that the tests of training share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.spec import Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec

DIGITS = DataSpec("digits", keep={str(digit): 10 for digit in range(10)}, public_fraction=0.1)
"""A hundred handwritten digits less a public tenth."""


def small_trial(**changes: Any) -> TrialSpec:
    """Logistic regression on a few digits: three short epochs."""
    spec = TrialSpec(
        key="trial",
        data=DIGITS,
        model=Component("logistic"),
        sampling=SamplingSpec("poisson", 24),
        clipping=Component("flat", {"bound": 1.0}),
        noise=NoiseSpec(1.0),
        epochs=3,
        delta=1e-5,
        seed=0,
        optimizer=Component("sgd", {"learning_rate": 0.5, "momentum": 0.9}),
        norms=NormSpec(refreshes_per_epoch=2.0, rows_per_part=40),
        execution=ExecutionSpec(device="cpu", checkpoint_every_epochs=0.5),
    )
    return replace(spec, **changes)
