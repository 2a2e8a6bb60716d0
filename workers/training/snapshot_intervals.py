"""The contribution of each training example to the steps from one snapshot of norms up to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from dpsweep.workers.clipping import ClipRule, Examples
from dpsweep.workers.gradients.pass_results import BatchNorms

_LARGEST_RATE: Final = 600.0
"""Largest `generator_rate`, so that exponentials stay finite in double precision."""


def generator_rate(order: float, noise_multiplier: float) -> float:
    """Return the rate r of the generator exp(r c^2) of mean contributions: order (order - 1) / (2 sigma^2), up to 600.

    exp(r c^2) is the moment of that order of the Gaussian's privacy loss at contribution c.
    """
    if noise_multiplier == 0.0:
        return _LARGEST_RATE
    return min(order * (order - 1.0) / 2.0 / noise_multiplier**2, _LARGEST_RATE)


@dataclass(frozen=True)
class Renewal:
    """New norms and losses of the examples at positions ``rows`` [b], each measured after so many ``steps`` [b].

    Steps belong to an interval. An example may occur several times, in the order of its steps.
    """

    steps: Tensor
    rows: Tensor
    norms: BatchNorms

    @staticmethod
    def at(steps: int, rows: Tensor, norms: BatchNorms) -> Renewal:
        """Return all measured after the same number of steps."""
        return Renewal(torch.full(rows.shape, float(steps), dtype=torch.float64, device=rows.device), rows, norms)

    @staticmethod
    def joined(parts: Sequence[Renewal]) -> Renewal:
        """Return all parts as one."""
        norms = BatchNorms.joined([each.norms for each in parts])
        return Renewal(torch.cat([each.steps for each in parts]), torch.cat([each.rows for each in parts]), norms)

    def sorted_by_row(self) -> Renewal:
        """Return the same entries, grouped by row and in the order of their steps."""
        order, norms = torch.argsort(self.rows, stable=True), self.norms
        steps, rows, of_rows, losses = (
            each.index_select(0, order) for each in (self.steps, self.rows, norms.norms, norms.losses)
        )
        layers = None if norms.layer_norms is None else norms.layer_norms.index_select(0, order)
        return Renewal(steps, rows, BatchNorms(of_rows, layers, losses))

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "rows": self.rows, "norms": vars(self.norms)}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> Renewal:
        """Return the renewal of a `state`."""
        return Renewal(state["steps"], state["rows"], BatchNorms(**state["norms"]))


@dataclass(frozen=True)
class _Newest:
    """The newest of several entries of each of the examples at positions ``rows`` [b]: entry ``entries`` [b].

    Found without waiting for the device. A row may occur several times, each time with the same entry.
    """

    rows: Tensor
    entries: Tensor

    @staticmethod
    def in_order(rows: Tensor, examples: int) -> _Newest:
        """Return those at positions ``rows`` [b] among so many examples, where later ones are newer."""
        places = torch.arange(len(rows), device=rows.device)
        last = torch.zeros(examples, dtype=places.dtype, device=rows.device).scatter_reduce_(0, rows, places, "amax")
        return _Newest(rows, last.index_select(0, rows))

    def of(self, entries: Tensor, others: Tensor) -> Tensor:
        """Return [n, ...]: the newest of the ``entries`` [b, ...], or else the value of ``others`` [n, ...]."""
        return others.index_copy(0, self.rows, entries.index_select(0, self.entries).to(others.dtype))


@dataclass(frozen=True)
class Measurement:
    """Norms of some examples, and their losses [n]."""

    examples: Examples
    losses: Tensor

    def renewed(self, norms: BatchNorms, newest: _Newest) -> Measurement:
        """With the ``newest`` of the ``norms`` and losses, where there are any."""
        known = self.examples
        layers = known.layer_norms
        if layers is not None and norms.layer_norms is not None:
            layers = newest.of(norms.layer_norms, layers)
        examples = replace(known, norms=newest.of(norms.norms, known.norms), layer_norms=layers)
        return Measurement(examples, newest.of(norms.losses, self.losses))

    def state(self) -> dict[str, Any]:
        """Return norms and losses; `MeasurementOf` knows whose they are."""
        return vars(BatchNorms(self.examples.norms, self.examples.layer_norms, self.losses))


MeasurementOf = Callable[[BatchNorms], Measurement]
"""Makes the measurement of a recorder's examples from their norms and losses, which is what a checkpoint stores."""


@dataclass(frozen=True)
class EndedInterval:
    """An interval without further steps, as a snapshot stores it.

    start, measured, rate, steps: as in `SnapshotInterval`. moments [n] float64: of all steps.
    """

    start: int
    measured: Measurement
    rate: float
    steps: int
    moments: Tensor

    @property
    def contributions(self) -> Tensor:
        """[n] in [0, 1]: the stored contribution of each example; needs at least one step."""
        mean = self.moments.clamp(0.0, self.steps) / self.steps
        return (torch.log1p(mean * math.expm1(self.rate)) / self.rate).sqrt().clamp(max=1.0)

    def state(self) -> dict[str, Any]:
        return {**vars(self), "measured": self.measured.state()}

    @staticmethod
    def restored(state: Mapping[str, Any], measurement: MeasurementOf) -> EndedInterval:
        """Return the interval of a `state`."""
        return EndedInterval(**{**state, "measured": measurement(BatchNorms(**state["measured"]))})


@dataclass
class SnapshotInterval:
    """The steps from one snapshot up to the next, and the contribution c / S of each example to them.

    The clipping rule may change at every step, and a norm when its example is in a batch. One contribution is stored
    for all steps of the interval: the generalised mean of c / S over the steps, with the generator exp(rate (c / S)^2)
    of `generator_rate`. Let no example displace another, and all steps have the noise of the rate. Then at whole orders
    up to that of the rate, the interval's steps cost at most as much Renyi privacy as equally many steps with this
    mean. The reason: A_alpha - 1 of a sampled Gaussian (`dpsweep.accounting.numerics.renyi`) is a sum of terms w (exp(k
    c^2) - 1) with w >= 0 and k <= rate. It is concave in the generator, and so is its logarithm. At higher orders, with
    noise that changes within the interval, or with (1 + c)^2 in place of c^2 where examples displace others, the mean
    may cost less than the steps: what rests on it is an estimate. A root mean square would under-estimate the cost of
    most examples, and the maximum would grossly over-estimate it. With one step, or one rule and one norm, the mean is
    exact.

    Between two measurements of an example under one rule, the generator is taken to change linearly from step to step.
    Norms mostly fall, so the first of both would over-estimate, and the second under-estimate. Therefore the interval
    ``before`` is stored only when this one ends. Changes by a norm at steps of still earlier ones are counted there.

    measured: norms as known at step ``start``. latest: norms as known now, except for ``renewals``, which are applied
    together when the rule changes and at the end. moments [n] float64: sum over the first ``counted`` [n] of ``steps``
    steps of exp(rate (c / S)^2) - 1, divided by its value at c = S. added [n] float64: what each step adds to them
    under ``rule`` and the latest norms; while both are unchanged, a step needs no computation. since [n] float64: the
    step of the latest norm; ruled_since: the first step under ``rule``. Both count from the interval's first step, and
    are negative before it.
    """

    start: int
    measured: Measurement
    latest: Measurement
    rate: float
    moments: Tensor
    counted: Tensor
    added: Tensor
    since: Tensor
    ruled_since: int = 0
    steps: int = 0
    rule: ClipRule | None = None
    renewals: list[Renewal] = field(default_factory=list)
    before: EndedInterval | None = None

    @staticmethod
    def from_step(start: int, measured: Measurement, rate: float) -> SnapshotInterval:
        """Return an interval whose norms are all measured at its first step."""
        zeros = _repeated(0.0, measured.losses)
        return SnapshotInterval(start, measured, measured, rate, zeros, zeros, zeros, zeros)

    def continued(self, start: int, rate: float) -> SnapshotInterval:
        """Return the interval after this one, with the norms that are known; the one ``before`` is settled."""
        *_, ended = self.settled()
        after = SnapshotInterval.from_step(start, self.latest, rate)
        after.before, after.since, after.ruled_since = ended, self.since - self.steps, self.ruled_since - self.steps
        if self.rule is not None:
            after.rule = self.rule
            after.added = after._added(self.rule, self.latest.examples)
        return after

    def ended(self) -> EndedInterval:
        """Return the steps so far, with all that is measured."""
        self.take_up_renewals()
        return EndedInterval(self.start, self.measured, self.rate, self.steps, self._total())

    def settled(self) -> Sequence[EndedInterval]:
        """Return the interval ``before``, if there is one, and this one, as they are stored if no step follows.

        The moments of the first beyond 0 and its number of steps are passed on.
        """
        ended = self.ended()
        if self.before is None:
            return (ended,)
        beyond = self.before.moments - self.before.moments.clamp(0.0, self.before.steps)
        return self.before, replace(ended, moments=ended.moments + beyond)

    def extend(self, rule: ClipRule) -> None:
        """Add one step, taken under ``rule``."""
        if rule is not self.rule:
            if self.steps - self.ruled_since > 1:
                self.take_up_renewals()
            else:  # no two norms have a step under the last rule between them
                self._take_up_norms()
            self.moments = self._total()
            self.counted = _repeated(self.steps, self.counted)
            self.added = self._added(rule, self.latest.examples)
            self.rule, self.ruled_since = rule, self.steps
        self.steps += 1

    def renew(self, rows: Tensor, norms: BatchNorms) -> None:
        """Replace the norms and losses of the examples at the positions ``rows`` from the next step on."""
        self.renewals.append(Renewal.at(self.steps, rows, norms))

    def as_old_as(self, steps: float) -> Tensor:
        """Return positions of the examples whose latest norm is at least that many steps old."""
        self.take_up_renewals()
        return torch.nonzero(self.steps - self.since >= steps)[:, 0]

    def take_up_renewals(self) -> None:
        """Apply all renewals to `latest` and `moments`.

        Call it only at steps that are the same in interrupted and uninterrupted runs, so that both round alike.
        """
        every = self._taken_renewals()
        if every is None:
            return
        every = every.sorted_by_row()
        rows, steps, added = every.rows, every.steps, self._added_by(every)
        again = torch.cat([torch.zeros_like(rows[:1], dtype=torch.bool), rows[1:] == rows[:-1]])
        added_before, counted_before, since_before = (
            each.index_select(0, rows) for each in (self.added, self.counted, self.since)
        )
        before = torch.where(again, added.roll(1), added_before)
        counted = torch.where(again, steps.roll(1), counted_before)
        since = torch.where(again, steps.roll(1), since_before).clamp(min=self.ruled_since)
        # the sum over the steps u = since .. steps - 1 of (u - since) / (steps - since) (added - before), and up to -1
        changed = (steps - since - 1.0).clamp(min=0.0) / 2.0 * (added - before)
        earlier = changed * _pairs(-since) / _pairs(steps - since).clamp(min=1.0)
        held = (steps - counted) * before
        self.moments = self.moments.index_put((rows,), held + changed - earlier, accumulate=True)
        if self.before is not None:
            moments = self.before.moments.index_put((rows,), earlier, accumulate=True)
            self.before = replace(self.before, moments=moments)
        newest = _Newest.in_order(rows, len(self.moments))
        self.counted, self.since = newest.of(steps, self.counted), newest.of(steps, self.since)
        self.added = newest.of(added, self.added)
        self.latest = self.latest.renewed(every.norms, newest)

    def _take_up_norms(self) -> None:
        """Apply all renewals to `latest` alone, before `added` is computed from it under another rule."""
        every = self._taken_renewals()
        if every is None:
            return
        newest = _Newest.in_order(every.rows, len(self.moments))
        self.since = newest.of(every.steps, self.since)
        self.latest = self.latest.renewed(every.norms, newest)

    def _taken_renewals(self) -> Renewal | None:
        """Return all renewals as one, which are then no longer waiting; None if they are of no example."""
        every, self.renewals = Renewal.joined(self.renewals) if self.renewals else None, []
        return None if every is None or len(every.rows) == 0 else every

    def _total(self) -> Tensor:
        """[n]: the moments of all steps."""
        return torch.addcmul(self.moments, self.steps - self.counted, self.added)

    def _added_by(self, renewal: Renewal) -> Tensor:
        """Return the moments [b] of a step under the rule with these norms; zeros before the first rule."""
        if self.rule is None:
            return torch.zeros_like(renewal.steps)
        known, rows, norms = self.latest.examples, renewal.rows, renewal.norms
        groups, places = known.groups.index_select(0, rows), known.rows.index_select(0, rows)
        return self._added(self.rule, Examples(norms.norms, groups, places, norms.layer_norms))

    def _added(self, rule: ClipRule, examples: Examples) -> Tensor:
        return rule.contributions(examples).square_().mul_(self.rate).expm1_().div_(math.expm1(self.rate))

    @staticmethod
    def restored(state: Mapping[str, Any], measurement: MeasurementOf) -> SnapshotInterval:
        """Return the interval of a `state`, whose tensors are on the device; its rule is not part of it."""
        measured = measurement(BatchNorms(**state["measured"]))
        latest, before = state["latest"], state["before"]
        return SnapshotInterval(
            measured=measured,
            latest=measured if latest is None else measurement(BatchNorms(**latest)),
            renewals=[Renewal.restored(each) for each in state["renewals"]],
            before=None if before is None else EndedInterval.restored(before, measurement),
            **{name: state[name] for name in _AS_THEY_ARE},
        )

    def state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "measured": self.measured.state(),
            "latest": None if self.latest is self.measured else self.latest.state(),
            "renewals": [Renewal.joined(self.renewals).state()] if self.renewals else [],
            "before": None if self.before is None else self.before.state(),
        }


_AS_THEY_ARE: Final = ("start", "rate", "ruled_since", "steps", "moments", "counted", "added", "since")
"""Fields of a `SnapshotInterval` that a checkpoint stores as they are."""


def _repeated(value: float, like: Tensor) -> Tensor:
    """``value`` in float64 for each of the entries [n] of ``like``; memory and checkpoint hold it once."""
    return torch.full((1,), value, dtype=torch.float64, device=like.device).expand(len(like))


def _pairs(steps: Tensor) -> Tensor:
    """Return the number of pairs of that many steps; 0 for fewer than two."""
    return steps.clamp(min=0.0) * (steps - 1.0).clamp(min=0.0) / 2.0
