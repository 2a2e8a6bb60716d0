"""Exact statistics of each group of training examples after each epoch. Private data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpsweep.workers.clipping import ClipRule
from dpsweep.workers.evaluation.rates import mean_by_group
from dpsweep.workers.training.counters import GroupCourse, GroupDepartures
from dpsweep.workers.training.snapshot_intervals import Measurement


def new_courses(groups: Tensor) -> list[GroupCourse]:
    """Return an empty course for each group that has examples. groups: int64 [n]."""
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
    """Return empty departures for each group that has examples. groups: int64 [n]."""
    sizes = torch.bincount(groups.cpu()).tolist()
    return [GroupDepartures(group, size) for group, size in enumerate(sizes) if size]


def note_departures(departures: Sequence[GroupDepartures], left: Tensor) -> None:
    """Append, for each group, how many examples have left by the end of an epoch. left: int64, their groups."""
    for each in departures:
        each.left.append(int((left == each.group).sum()))


def _means(values: Tensor, groups: Tensor, finite: Tensor) -> list[float | None]:
    """Return the mean by group of the ``values`` [n] where ``finite`` [n] is true; None for a group without such
    values.
    """
    known = finite.cpu().numpy()
    of_groups = groups.cpu().numpy()
    means = mean_by_group(values.double().cpu().numpy()[known], of_groups[known], int(of_groups.max()) + 1)
    return [None if math.isnan(mean) else mean for mean in means.tolist()]
