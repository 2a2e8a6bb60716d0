"""Clipping methods of the user's own: what they state is checked on all that they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.trace import SideQuery
from dpsweep.workers.clipping import (
    BatchQuery,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
    make_clipping,
    rehearse,
)
from dpsweep.workers.clipping.by_example import IndividualClipping
from dpsweep.workers.clipping.by_norm import FlatClipping, PerLayerClipping, QuantileClipping
from dpsweep.workers.clipping.clipping_method import clip_factor
from dpsweep.workers.spec import Component
from tests.workers.trial_runs import norms_of, train
from tests.workers.trial_specs import small_trial
from tests.workers.user_modules import allowed

HERE = allowed(__file__)
SETTING = PublicFacts(("a", "b"), ("first", "last"), dataset_size=40, batch_size=10)
Weigh = Callable[[Examples], Tensor]


@dataclass(frozen=True)
class Weighted(ClippingMethod):
    """Flat clipping with other weights and another sensitivity."""

    weigh: Weigh = lambda examples: clip_factor(examples.norms, 1.0)
    sensitivity: float = 1.0

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        return ClipRule(self.sensitivity, self.weigh)


@dataclass(frozen=True)
class Peeking(FlatClipping):
    """Takes its bound from the norms of the training examples."""

    def refresh(self, state: ClippingState, everyone: Examples) -> ClippingState:
        return replace(state, bound=float(everyone.norms.median()))


@dataclass(frozen=True)
class Largest(IndividualClipping):
    """Scales the noise to the largest threshold of the training examples."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        assert state.thresholds is not None
        return replace(super().decide(state, noisy_answer, facts), sensitivity=float(state.thresholds.max()) + 1e-9)


@dataclass(frozen=True)
class Counting(FlatClipping):
    """Asks for the sum of all norms, as if that were a count."""

    @property
    def query(self) -> BatchQuery:
        return BatchQuery("sum of norms", sensitivity=1.0, noise_multiplier=5.0)

    def answer(self, state: ClippingState, batch: Examples, facts: PublicFacts) -> Tensor:
        return batch.norms.sum(dtype=torch.float64)[None]


WRONG: dict[str, tuple[ClippingMethod, str]] = {
    "too long": (Weighted(sensitivity=0.5), "an example adds more than the sensitivity 0.5, to which the noise"),
    "not clipped": (Weighted(weigh=lambda examples: torch.ones_like(examples.norms)), "adds more than the sensitivity"),
    "no noise": (Weighted(sensitivity=0.0), "its sensitivity is 0.0, but must be greater than 0"),
    "no bound": (Weighted(sensitivity=float("inf")), "its sensitivity is inf, but must be a finite number"),
    "negative": (Weighted(weigh=lambda examples: -clip_factor(examples.norms, 1.0)), "a weight is negative"),
    "not a number": (Weighted(weigh=lambda examples: 0.0 * examples.norms / 0.0), "or not finite"),
    "one weight": (Weighted(weigh=lambda examples: torch.ones(1)), r"weights must be a tensor of shape \(40,\)"),
    "by the batch": (
        Weighted(weigh=lambda examples: (1.0 / examples.norms.max()).expand(len(examples.norms))),
        "an example's weight depends on the examples beside it",
    ),
    "by the data": (Peeking(), r"refresh\(\) changes bound by the norms of the training examples"),
    "by thresholds": (Largest(), "sensitivity or bounds depend on thresholds"),
    "query": (Counting(), "an example moves the answer by more than the query's sensitivity 1.0"),
}


def own(kind: str) -> ClippingMethod:
    """What a user's file would define: one wrong method, or a right one."""
    right: dict[str, ClippingMethod] = {
        "flat": FlatClipping(),
        "individual": IndividualClipping(),
        "per_layer": PerLayerClipping(),
        "quantile": QuantileClipping(),
        "median": FlatClipping(bound={"median_multiple": 1.0}),
    }
    return right[kind] if kind in right else WRONG[kind][0]


def text(kind: str) -> str:
    return f"clipping by {kind}"


def component(kind: str) -> Component:
    return Component(f"{__file__}:own", {"kind": kind})


@pytest.mark.parametrize("kind", WRONG)
def test_a_rehearsal_finds_what_contradicts_the_statement(kind: str) -> None:
    with pytest.raises(InvalidInput, match=WRONG[kind][1]) as raised:
        rehearse(make_clipping(component(kind), HERE), SETTING)
    assert str(raised.value).startswith(f"clipping method '{__file__}:own': ")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["flat", "individual", "per_layer", "quantile", "median"])
def test_right_methods_pass_and_train_as_the_registered_ones(tmp_path: Path, kind: str) -> None:
    rehearse(make_clipping(component(kind), HERE), SETTING)
    name, params = ("flat", {"bound": {"median_multiple": 1.0}}) if kind == "median" else (kind, {})
    ours, our_trace, our_files = train(small_trial(epochs=1, clipping=component(kind)), tmp_path / "own", code=HERE)
    theirs, trace, files = train(small_trial(epochs=1, clipping=Component(name, params)), tmp_path / "registered")
    assert ours.evaluation == theirs.evaluation
    assert Path(our_files.model).read_bytes() == Path(files.model).read_bytes()
    assert our_trace == replace(trace, contributions="estimate"), "no check proves what is between refreshes"
    assert (norms_of(our_files).contributions == norms_of(files).contributions).all()
    assert [note for note in ours.notes if note not in theirs.notes] == [
        f"clipping by {__file__}:own, the user's own: every epsilon rests on the sensitivity that it states, which was "
        "checked on the examples of this run, but is not proved"
    ]


def test_what_it_asks_is_accounted_for() -> None:
    quantile, median = (make_clipping(component(kind), HERE) for kind in ("quantile", "median"))
    assert quantile.side_queries == make_clipping(Component("quantile")).side_queries
    assert isinstance(quantile.side_queries[0], SideQuery)
    assert median.releases == make_clipping(Component("flat", {"bound": {"median_multiple": 1.0}})).releases


@pytest.mark.parametrize("kind", ["too long", "by the data"])
def test_training_stops_at_the_first_violation(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InvalidInput, match=WRONG[kind][1]):
        train(small_trial(epochs=1, clipping=component(kind)), tmp_path, code=HERE)
    assert not (tmp_path / "model.pt").exists()


def test_what_is_no_clipping_method_is_refused() -> None:
    wrong = Component(f"{__file__}:text", {"kind": "flat"})
    with pytest.raises(InvalidInput, match="returned str, but must return a ClippingMethod"):
        make_clipping(wrong, HERE)
    with pytest.raises(InvalidInput, match="not among the code that may be run"):
        make_clipping(component("flat"))
    with pytest.raises(InvalidInput, match="unknown key 'kin'"):
        make_clipping(Component(f"{__file__}:own", {"kin": "flat"}), HERE)
