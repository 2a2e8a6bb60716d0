"""The objects that train: built from the names in a specification, or given by a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from dpsweep.workers.clipping import ClippingMethod, make_clipping
from dpsweep.workers.data import Dataset
from dpsweep.workers.models import build_model
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.tasks.losses import Loss, build_loss
from dpsweep.workers.training.optimizers import Optimizer, Parameters, make_optimizer
from dpsweep.workers.training.run_state import digest_of_frozen


@dataclass(frozen=True)
class Parts:
    """A clipping method, and what is trained under it.

    optimizer: makes one for parameters on their device. digest: of the frozen values of the model.
    """

    clipping: ClippingMethod
    model: Callable[[], nn.Module]
    loss: Callable[[], Loss]
    optimizer: Callable[[Parameters], Optimizer]
    digest: Callable[[nn.Module], str] = digest_of_frozen


def parts_of(spec: TrialSpec, dataset: Dataset, code: UserCode) -> Parts:
    """Return the parts that ``spec`` names; all but the clipping method are made on demand."""
    return Parts(
        make_clipping(spec.clipping, code),
        partial(build_model, spec.model, dataset, spec.seed, code),
        partial(build_loss, spec.loss, code, dataset.task, dataset.num_classes),
        partial(make_optimizer, spec.optimizer),
    )
