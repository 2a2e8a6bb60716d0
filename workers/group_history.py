"""How training goes for each group of training examples, epoch by epoch: private data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.clipping import ClipRule
from workers.rates import mean_by_group
from workers.recording import Measurement


@dataclass
class GroupCourse:
    """Exact means over the training examples of a group, one per epoch; None where no gradient of it was finite.

    losses, norms: the loss, and the norm of the gradient before clipping, when norms were last taken. biases: the norm
    of what the clipping rule of the epoch's last step takes off that gradient, or adds to it (paper D, Section 4.2).
    """

    group: int
    examples: int
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    biases: list[float | None] = field(default_factory=list)


@dataclass
class GroupDepartures:
    """When the training examples of a group left: after each epoch, how many had spent the whole budget of a filter."""

    group: int
    examples: int
    left: list[int] = field(default_factory=list)


def new_courses(groups: Tensor) -> list[GroupCourse]:
    """An empty course for each group that has examples. groups: int64 [n]."""
    sizes = torch.bincount(groups.cpu()).tolist()
    return [GroupCourse(group, size) for group, size in enumerate(sizes) if size]


def note_epoch(courses: Sequence[GroupCourse], measured: Measurement, rule: ClipRule) -> None:
    """Append the means of the epoch that ended with a step under ``rule``."""
    examples = measured.examples
    finite = examples.norms.isfinite() & measured.losses.isfinite()
    losses, norms, biases = (
        _means(values, examples.groups, finite) for values in (measured.losses, examples.norms, rule.removed(examples))
    )
    for course in courses:
        course.losses.append(losses[course.group])
        course.norms.append(norms[course.group])
        course.biases.append(biases[course.group])


def new_departures(groups: Tensor) -> list[GroupDepartures]:
    """For each group that has examples, that none has left yet. groups: int64 [n]."""
    sizes = torch.bincount(groups.cpu()).tolist()
    return [GroupDepartures(group, size) for group, size in enumerate(sizes) if size]


def note_departures(departures: Sequence[GroupDepartures], left: Tensor) -> None:
    """Append the numbers of examples that have left by the end of an epoch. left: their groups, int64."""
    for each in departures:
        each.left.append(int((left == each.group).sum()))


def _means(values: Tensor, groups: Tensor, finite: Tensor) -> list[float | None]:
    """By group, the mean of the finite ones among ``values`` [n]; None for a group that has none."""
    known = finite.cpu().numpy()
    of_groups = groups.cpu().numpy()
    means = mean_by_group(values.double().cpu().numpy()[known], of_groups[known], int(of_groups.max()) + 1)
    return [None if math.isnan(mean) else mean for mean in means.tolist()]
