"""Small, real trials that the tests of training share."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import nn

from dpsweep.accounting.calibration.planned_runs import TrialMechanism
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.data import Source, load_source
from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.training.trial_mechanism import mechanism_of
from tests.workers.devices import NAME

TUMOURS = DataSpec("breast_cancer", keep={"malignant": 40, "benign": 60}, public_fraction=0.1)
"""A hundred real tumours, a tenth of them public."""


@functools.cache
def tumours() -> Source:
    return load_source(DataSpec("breast_cancer"))


TUMOURS_READ_ONCE = replace(TUMOURS, name="tests.workers.trial_specs:tumours")
"""The same as a user's own source, which reads its file once, for tests that train very often."""


def small_trial(**changes: Any) -> TrialSpec:
    """Logistic regression on a few tumours: two short epochs."""
    spec = TrialSpec(
        key="trial",
        data=TUMOURS,
        model=Component("logistic"),
        sampling=SamplingSpec("poisson", 24),
        clipping=Component("flat", {"bound": 1.0}),
        noise=NoiseSpec(1.0),
        epochs=2,
        delta=1e-5,
        seed=0,
        min_group_size=1,
        optimizer=Component("sgd", {"learning_rate": 0.5, "momentum": 0.9}),
        norms=NormSpec(refreshes_per_epoch=2.0, rows_per_part=60),
        execution=ExecutionSpec(device=NAME, checkpoint_every_epochs=0.5),
    )
    return replace(spec, **changes)


def planned_mechanism(spec: TrialSpec, size: int) -> TrialMechanism:
    """The mechanism of a trial without code of a user's own, on a population of this size."""
    return mechanism_of(spec, make_clipping(spec.clipping), size)


def clipping_by(name: str) -> Component:
    """A clipping method with what it must be told: a filter's budget, which runs out within a few epochs."""
    return Component(name, {"bound": 2.0, "epsilon": 5.0} if name == "filter" else {})


def dropout_net(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's own model whose forward pass draws random numbers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(feature_shape[0], 8), nn.Dropout(0.5), nn.Linear(8, num_classes))


DROPOUT_NET = Component(f"{__file__}:dropout_net")


def frozen_trunk(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A user's own model of which a small part trains."""
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(feature_shape[0], 1000), nn.ReLU(), nn.Linear(1000, 20))
    return nn.Sequential(trunk.requires_grad_(False), nn.Linear(20, num_classes))


FROZEN_TRUNK = Component(f"{__file__}:frozen_trunk")
