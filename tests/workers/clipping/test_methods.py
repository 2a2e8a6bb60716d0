"""What each clipping method does with the norms it meets, and which settings it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.clipping import (
    ClippingState,
    Examples,
    PrivateMedian,
    PublicFacts,
    make_clipping,
)
from dpsweep.workers.spec import Component
from tests.known import known
from tests.workers.clipping.test_clipping import noisy

GROUP_SETTING = PublicFacts(("common", "rare", "absent"), ("w",), dataset_size=100, batch_size=50)


def test_dpsgd_f_gives_clipped_groups_the_larger_bound() -> None:
    method = make_clipping(Component("dpsgd_f", {"bound": 2.0}))
    counts = torch.tensor([10.0, 8.0, 0.0, 30.0, 2.0, 0.0], dtype=torch.float64)
    rule = method.decide(method.start(2.0, GROUP_SETTING), counts, GROUP_SETTING)
    overall = 18.0 / (40.0 + 10.0 + 1.0)  # the absent group's size is clamped at 1
    assert rule.bounds["common"] == pytest.approx(2.0 * (1.0 + (10.0 / 40.0) / overall))
    assert rule.bounds["rare"] == pytest.approx(2.0 * (1.0 + (8.0 / 10.0) / overall))
    assert rule.bounds["absent"] == pytest.approx(2.0)
    assert rule.sensitivity == pytest.approx(max(rule.bounds.values()))


def test_dpsgd_f_scales_noise_to_groups_that_the_batch_lacks() -> None:
    """Over the groups present, the scale of the noise would tell which they are."""
    method = make_clipping(Component("dpsgd_f"))
    noise_only = torch.tensor([0.0, 0.0, 5.0, 20.0, 20.0, 0.0], dtype=torch.float64)
    rule = method.decide(method.start(1.0, GROUP_SETTING), noise_only, GROUP_SETTING)
    assert rule.sensitivity == rule.bounds["absent"] > rule.bounds["common"]


def test_naive_reweighting_is_inverse_to_group_size() -> None:
    method = make_clipping(Component("naive", {"bound": 2.0}))
    counts = torch.tensor([40.0, 10.0, 10.0], dtype=torch.float64)
    rule = method.decide(method.start(2.0, GROUP_SETTING), counts, GROUP_SETTING)
    examples = Examples(torch.tensor([1.0, 1.0, 8.0]), torch.tensor([0, 1, 2]), torch.arange(3))
    assert rule.weights(examples).tolist() == pytest.approx([0.5, 2.0, 2.0 * 2.0 / 8.0])
    assert rule.sensitivity == pytest.approx(4.0)


def test_individual_clipping_holds_examples_to_their_last_measured_norm() -> None:
    method = make_clipping(Component("individual", {"bound": 2.0}))
    rows, groups = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    facts = PublicFacts(("all",), ("w",), dataset_size=3, batch_size=2)
    state = method.refresh(method.start(2.0, facts), Examples(torch.tensor([0.5, 1.0, 9.0]), groups, rows))
    rule = method.decide(state, torch.zeros(0), facts)
    grown = Examples(torch.tensor([5.0, 0.1, 9.0]), groups, rows)
    assert (rule.weights(grown) * grown.norms).tolist() == pytest.approx([0.5, 0.1, 2.0])
    assert method.keeps_to_contributions
    lost = Examples(torch.tensor([math.inf, math.nan, 0.5]), groups, rows)
    thresholds = known(method.refresh(state, lost).thresholds)
    assert thresholds.tolist() == [2.0, 2.0, 0.5], "a norm that is not finite says nothing about later ones"


def adapt(component: Component, steps: int, norms_at: Tensor) -> ClippingState:
    """Run only the adaptation of a method on fresh draws from the given norms."""
    method, facts = make_clipping(component), PublicFacts(("all",), ("w",), dataset_size=4000, batch_size=400)
    assert isinstance(method.bound, float)
    state = method.start(method.bound, facts)
    rng = np.random.default_rng(0)
    for step in range(steps):
        rows = torch.from_numpy(rng.choice(len(norms_at), 400, replace=False))
        answer = method.answer(state, Examples(norms_at[rows], torch.zeros_like(rows), rows), facts)
        state = method.advance(state, noisy(component, answer, step), facts)
    return state


_norms: Tensor = torch.from_numpy(np.random.default_rng(1).lognormal(mean=1.0, size=4000)).float()


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_quantile_clipping_finds_the_quantile(quantile: float) -> None:
    state = adapt(Component("quantile", {"bound": 0.1, "quantile": quantile, "learning_rate": 0.1}), 200, _norms)
    assert float((_norms <= state.bound).float().mean()) == pytest.approx(quantile, abs=0.04)


@pytest.mark.parametrize("name", ["quantile", "global_adaptive"])
def test_adaptation_stays_where_arithmetic_is_safe(name: str) -> None:
    state = adapt(Component(name, {"learning_rate": 1e6}), 20, _norms)
    assert 1e-8 <= state.bound <= 1e8
    assert 1e-4 <= state.ratio <= 1e8


def test_global_adaptive_clipping_leaves_the_stated_fraction_above_the_threshold() -> None:
    state = adapt(Component("global_adaptive", {"threshold_ratio": 500.0, "learning_rate": 0.1}), 300, _norms)
    assert float((_norms > state.bound * state.ratio).float().mean()) == pytest.approx(0.1, abs=0.04)


def test_private_median_is_close_and_accounted() -> None:
    median = PrivateMedian(median_multiple=0.5, noise_multiplier=20.0)
    stds: list[float] = []
    rng = np.random.default_rng(0)

    def draw(std: float) -> float:
        stds.append(std)
        return float(rng.normal(scale=std))

    assert median.find(_norms, draw) == pytest.approx(0.5 * float(_norms.median()), rel=0.08)
    precision = sum((std / 0.5) ** -2 for std in stds)  # each round has sensitivity 1/2
    assert precision**-0.5 == pytest.approx(20.0)
    assert PrivateMedian(median_multiple=1e-30).find(_norms, draw) == 1e-8, "no bound is smaller"
    component = Component("flat", {"bound": {"median_multiple": 0.5}})
    assert make_clipping(component).releases == (median.release,)
    assert make_clipping(Component("flat")).releases == ()


def surplus(norms: Tensor) -> float:
    """What the only round of a private median releases, but for its noise: where noise turns its answer around."""
    median = PrivateMedian(median_multiple=1.0, smallest=1.0, largest=4.0, rounds=1)  # asks about 2
    grid = np.arange(-60.0, 60.0, 0.25) + 0.125
    lower = [median.find(norms, lambda std, noise=noise: noise) < 2.0 for noise in grid.tolist()]  # type: ignore[misc]
    return -float(grid[lower.index(True)] - 0.125)


def test_median_rounds_of_neighbours_move_by_one_half() -> None:
    norms = _norms[:50]
    total = surplus(norms)
    assert total == float((norms <= 2.0).sum()) - 25.0
    for row in range(5):
        assert abs(total - surplus(norms[torch.arange(50) != row])) == 0.5


@pytest.mark.parametrize(
    ("component", "std"),
    [
        (Component("quantile", {"count_noise_multiplier": 20.0}), 10.0),
        (Component("dpsgd_f", {"count_noise_multiplier": 8.0}), 8.0),
        (Component("naive", {"count_noise_multiplier": 8.0}), 8.0),
        (Component("global_adaptive", {"count_noise_multiplier": 6.0}), 6.0),
    ],
    ids=lambda value: value.name if isinstance(value, Component) else "",
)
def test_queries_get_the_noise_that_is_accounted_for(component: Component, std: float) -> None:
    """Noise std is the multiplier times the sensitivity: 1/2 for the quantile's query, 1 for counts."""
    method = make_clipping(component)
    (query,) = method.side_queries
    assert known(method.query).noise_std == std
    assert query.noise_multiplier == component.params["count_noise_multiplier"]


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (Component("flatt"), "did you mean 'flat'"),
        (Component("flat", {"bond": 1.0}), "did you mean 'bound'"),
        (Component("flat", {"bound": 0.0}), "at least 1e-08"),
        (Component("flat", {"bound": 1e-50}), "at least 1e-08"),
        (Component("flat", {"bound": {"median_multiple": 1.0, "rounds": 2.5}}), "whole number"),
        (Component("flat", {"bound": {"median_multiple": 1.0, "smallest": 0.0}}), "at least 1e-08"),
        (
            Component("global", {"threshold_ratio": 1e-30}),
            "clipping method 'global': threshold_ratio .* at least 0.0001",
        ),
        (Component("flat", {"bound": math.nan}), "finite"),
        (Component("flat", {"bound": {"median_multipel": 1.0}}), "did you mean 'median_multiple'"),
        (Component("quantile", {"quantile": 1.5}), "at most 1"),
        (Component("dpsgd_f", {"count_noise_multiplier": 0.0}), "greater than 0"),
    ],
)
def test_impossible_settings_are_refused_in_words(component: Component, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_clipping(component)


def test_counts_are_remembered_with_the_weight_of_the_past() -> None:
    method, facts = make_clipping(Component("naive", {"count_memory": 0.9})), PublicFacts(("a", "b"), ("w",), 10, 5)
    state = method.advance(method.start(1.0, facts), torch.tensor([10.0, 2.0]), facts)
    later = known(method.advance(state, torch.tensor([20.0, 2.0]), facts).counts)
    assert later.tolist() == pytest.approx([11.0, 2.0])
