"""Wrapper around a clipping method of the user's own that checks its claims on every example it is given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.workers.clipping.clipping_method import (
    NORM_ERROR,
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PrivateMedian,
    PublicFacts,
    initial_bound,
    require_layer_norms,
)

_ROUNDING = 1e-6
"""Relative rounding error that the checks tolerate."""


@dataclass(frozen=True)
class OwnClipping(ClippingMethod):
    """``method`` with checks that raise InvalidInput as soon as its behaviour contradicts its claims.

    Checked on every batch, and on all examples at every refresh: Weights are finite, nonnegative and independent of the
    other examples. No example adds more than the sensitivity. Leaving out an example (three are tried) changes the
    answer by at most the query's sensitivity. A refresh changes only thresholds. Sensitivity and bounds do not depend
    on thresholds. Not checked: examples that never occur, and values that the method keeps outside its state. The
    sensitivity therefore remains a claim of the method's author, not a proof.

    Contributions between refreshes are always estimates, whatever ``method`` states, because the checks cannot prove
    that they are guarantees.
    """

    name: str = field(kw_only=True)
    method: ClippingMethod = field(kw_only=True)

    @property
    def layerwise(self) -> bool:
        return self.method.layerwise

    @property
    def refreshes(self) -> bool:
        return self.method.refreshes

    @property
    def query(self) -> BatchQuery | None:
        return self.method.query

    def start(self, bound: float, facts: PublicFacts) -> ClippingState:
        return self.method.start(bound, facts)

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        after = self.method.refresh(state, everyone)
        for public in ("bound", "ratio", "counts"):
            if not _equal(getattr(state, public), getattr(after, public)):
                raise self._wrong(
                    f"refresh() changes {public} by the norms of the training examples, which no noise hides; ask for "
                    "them by a query, or keep to thresholds"
                )
        return after

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        answer, query = self.method.answer(state, batch, facts), self.query
        if not isinstance(answer, Tensor) or not answer.isfinite().all():
            raise self._wrong("answer() must return a tensor of finite numbers")
        for left_out in _left_out_on_trial(batch) if query is not None else ():
            others = self.method.answer(state, _without(batch, left_out), facts)
            if query and not _distance(answer, others) <= query.sensitivity * (1.0 + _ROUNDING) + _ROUNDING:
                raise self._wrong(
                    f"an example moves the answer by more than the query's sensitivity {query.sensitivity}"
                )
        return answer

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        rule = self.method.decide(state, noisy_answer, facts)
        require_finite(f"clipping method {self.name!r}: its sensitivity", rule.sensitivity, above=0.0)
        if state.thresholds is not None:
            halved = replace(state, thresholds=state.thresholds / 2.0)
            other = self.method.decide(halved, noisy_answer, facts)
            if (other.sensitivity, dict(other.bounds)) != (rule.sensitivity, dict(rule.bounds)):
                raise self._wrong("sensitivity or bounds depend on thresholds, which belong to single examples")
        return replace(rule, weigh=lambda examples: self._weights(rule, examples))

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        return self.method.advance(state, noisy_answer, facts)

    def _weights(self, rule: ClipRule, examples: Examples) -> Tensor:
        """Return the weights of ``rule``, checked for examples with finite norms; all others get weight 0 later."""
        weights = rule.weigh(examples)
        shape = examples.norms.shape if not self.layerwise else require_layer_norms(examples).shape
        if not isinstance(weights, Tensor) or weights.shape != shape:
            raise self._wrong(f"weights must be a tensor of shape {tuple(shape)}: one for each example (and layer)")
        finite = examples.norms.isfinite()
        checked = weights[finite].double()
        if not ((checked >= 0.0) & checked.isfinite()).all():
            raise self._wrong("a weight is negative or not finite; weights are factors, usually in [0, 1]")
        norms = (require_layer_norms(examples) if self.layerwise else examples.norms)[finite].double()
        added = checked * norms
        added = added.norm(dim=1) if self.layerwise else added
        if not (added <= rule.sensitivity * (1.0 + NORM_ERROR)).all():
            raise self._wrong(
                f"an example adds more than the sensitivity {rule.sensitivity:g}, to which the noise is scaled; give "
                "smaller weights, or state a larger sensitivity"
            )
        middle = len(weights) // 2
        parts = [rule.weigh(_rows(examples, part)) for part in (slice(None, middle), slice(middle, None))]
        if not torch.allclose(torch.cat(parts)[finite].double(), checked, rtol=NORM_ERROR, atol=0.0):
            raise self._wrong(
                "an example's weight depends on the examples beside it, which no sensitivity covers; weigh each one by "
                "itself, and learn of the batch by a query"
            )
        return weights

    def _wrong(self, reason: str) -> InvalidInput:
        return InvalidInput(f"clipping method {self.name!r}: {reason}")


def own_clipping(name: str, method: object) -> OwnClipping:
    """Return ``method``, which the user's function ``name`` returned, wrapped in checks.

    Raises: InvalidInput when it is not a `ClippingMethod`.
    """
    if not isinstance(method, ClippingMethod):
        raise InvalidInput(
            f"clipping method {name!r} returned {type(method).__name__}, but must return a ClippingMethod "
            "(dpsweep.workers.clipping)"
        )
    return OwnClipping(method.bound, name=name, method=method)


def rehearse(method: ClippingMethod, facts: PublicFacts) -> None:
    """Run one step on synthetic norms from 1e-6 to 1e6, so that planning already finds methods that fail the checks."""
    with torch.device("cpu"):  # whatever torch's default device is
        _rehearse(method, facts)


def _rehearse(method: ClippingMethod, facts: PublicFacts) -> None:
    order = torch.randperm(facts.dataset_size, generator=torch.Generator().manual_seed(0))
    norms = torch.logspace(-6.0, 6.0, facts.dataset_size)[order]
    layers = norms[:, None].expand(-1, len(facts.layer_names)) / len(facts.layer_names) ** 0.5
    rows = torch.arange(facts.dataset_size)
    everyone = Examples(norms, rows % facts.num_groups, rows, layers if method.layerwise else None)
    bound = initial_bound(method.bound)
    state = method.start(1.0 if isinstance(bound, PrivateMedian) else bound, facts)
    state = method.refresh(state, everyone)
    batch = _rows(everyone, slice(None, facts.batch_size))
    answer = method.answer(state, batch, facts) if method.query is not None else torch.zeros(0, dtype=torch.float64)
    method.decide(state, answer, facts).weights(everyone)
    method.advance(state, answer, facts)


def _left_out_on_trial(batch: Examples) -> set[int]:
    """Return the indices of the examples left out on trial: the first, the largest and the smallest norm."""
    if not len(batch.norms):
        return set()
    return {0, int(batch.norms.argmax()), int(batch.norms.argmin())}


def _distance(answer: Tensor, other: Tensor) -> float:
    return float((answer.double() - other.double()).norm()) if answer.shape == other.shape else float("inf")


def _without(examples: Examples, row: int) -> Examples:
    kept = torch.arange(len(examples.norms), device=examples.norms.device) != row
    return _rows(examples, kept)


def _rows(examples: Examples, rows: slice | Tensor) -> Examples:
    layers = None if examples.layer_norms is None else examples.layer_norms[rows]
    return Examples(examples.norms[rows], examples.groups[rows], examples.rows[rows], layers)


def _equal(one: object, other: object) -> bool:
    match one, other:
        case Tensor(), Tensor():
            return torch.equal(one, other)
        case (Tensor(), _) | (_, Tensor()):
            return False
        case _:
            return one is other or one == other
