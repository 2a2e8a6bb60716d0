"""One contract for every clipping method: what it states about one example is true on real neighbouring data."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from dpsweep.accounting.mechanism.filters import RenyiFilter
from dpsweep.workers.clipping import (
    CLIPPING,
    NORM_ERROR,
    ClippingMethod,
    ClippingState,
    ClipRule,
    Examples,
    PublicFacts,
    make_clipping,
)
from dpsweep.workers.data import load_dataset
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.pass_results import BatchNorms
from dpsweep.workers.spec import Component, DataSpec
from tests.known import known
from tests.workers.brute_force import gradients_one_by_one

GROUPS = tuple("0123456789")
BATCH = 48
COMPONENTS = [
    Component("flat", {"bound": 7.0}),
    Component("per_layer", {"bound": 7.0}),
    Component("automatic", {"bound": 7.0}),
    Component("automatic", {"bound": 7.0, "stability": 0.0}),
    Component("quantile", {"bound": 7.0}),
    Component("dpsgd_f", {"bound": 7.0}),
    Component("dpsgd_f", {"bound": 7.0, "count_memory": 0.9}),
    Component("naive", {"bound": 7.0}),
    Component("individual", {"bound": 7.0}),
    Component("filter", {"bound": 7.0, "epsilon": 3.0}),
    Component("global", {"bound": 0.7, "threshold_ratio": 10.0}),
    Component("global_adaptive", {"bound": 0.7, "threshold_ratio": 10.0}),
]
PRICES = RenyiFilter(1.0, 4).prices(0.1, 1.0)
"""What a step costs under a filter; others do not ask."""
ULPS = st.integers(-300, 300).map(lambda steps: 1.0 + steps * 2.0**-24)
"""Factors within a few rounding errors of float32."""
all_methods = pytest.mark.parametrize("component", COMPONENTS, ids=lambda c: "-".join([c.name, *map(str, c.params)]))


class Batch:
    """Real digits with the exact gradient of every example under a small network."""

    def __init__(self) -> None:
        dataset = load_dataset(DataSpec("digits"))
        torch.manual_seed(0)
        head = nn.Linear(12, 10)
        self.model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), head)
        with torch.no_grad():  # norms that spread around the bounds above
            head.weight.mul_(4.0)
        self.x = dataset.prepare(dataset.train.features[:BATCH]).flatten(1)
        self.y, self.groups = dataset.train.labels[:BATCH], dataset.train.groups[:BATCH]
        engine = GradientEngine(self.model, nn.CrossEntropyLoss(reduction="none"), layerwise=True)
        self.layer_names = engine.layer_names
        self.norms: BatchNorms = engine.norms(self.x, self.y)
        gradients = gradients_one_by_one(self.model, self.x, self.y).values()
        self.gradients = torch.cat([each.flatten(1) for each in gradients], 1).double()
        self.parameters_per_layer = [sum(p.numel() for p in self.model[i].parameters()) for i in (0, 2)]

    @property
    def facts(self) -> PublicFacts:
        return PublicFacts(GROUPS, self.layer_names, dataset_size=BATCH, batch_size=32)

    def examples(self, rows: Tensor) -> Examples:
        layer_norms = known(self.norms.layer_norms)
        return Examples(self.norms.norms[rows], self.groups[rows], rows, layer_norms[rows])

    def added(self, rule: ClipRule, rows: Tensor) -> Tensor:
        """[b, parameters]: exactly what each example adds to the sum."""
        weights = rule.weights(self.examples(rows)).double()
        if weights.ndim == 2:
            weights = weights.repeat_interleave(torch.tensor(self.parameters_per_layer), dim=1)
        else:
            weights = weights[:, None]
        return weights * self.gradients[rows]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def started(method: ClippingMethod, batch: Batch) -> ClippingState:
    assert isinstance(method.bound, float)
    state = method.start(method.bound, batch.facts)
    return method.pay(method.refresh(state, batch.examples(torch.arange(BATCH))), PRICES)


SENSITIVITIES = {"quantile": 0.5, "dpsgd_f": 1.0, "naive": 1.0, "global_adaptive": 1.0}
"""How far one example moves the query of each method that has one."""
NOISE = {"quantile": 20.0, "dpsgd_f": 10.0, "naive": 10.0, "global_adaptive": 10.0}
"""Noise over that sensitivity, as it is by default."""


def noisy(component: Component, answer: Tensor, seed: int) -> Tensor:
    std = SENSITIVITIES.get(component.name, 0.0) * NOISE.get(component.name, 0.0)
    return answer + std * torch.from_numpy(np.random.default_rng(seed).normal(size=answer.shape))


@all_methods
def test_sum_of_neighbours_differs_by_at_most_the_sensitivity(component: Component, batch: Batch) -> None:
    method = make_clipping(component)
    state = started(method, batch)
    everyone = torch.arange(BATCH)
    for seed in range(5):
        answer = noisy(component, method.answer(state, batch.examples(everyone), batch.facts), seed)
        rule = method.decide(state, answer, batch.facts)
        total = batch.added(rule, everyone).sum(0)
        for left_out in everyone.tolist():
            neighbour = everyone[everyone != left_out]
            moved = (total - batch.added(rule, neighbour).sum(0)).norm()
            assert moved <= rule.sensitivity * (1.0 + 1e-5)
        state = method.advance(state, answer, batch.facts)


@all_methods
def test_answers_of_neighbours_differ_by_at_most_the_stated_sensitivity(component: Component, batch: Batch) -> None:
    method = make_clipping(component)
    state, everyone = started(method, batch), torch.arange(BATCH)
    total = method.answer(state, batch.examples(everyone), batch.facts)
    stated = SENSITIVITIES.get(component.name, 0.0)
    assert (method.query.sensitivity if method.query else 0.0) == stated
    moves = []
    for row in everyone.tolist():
        neighbour = batch.examples(everyone[everyone != row])
        moves.append(float((total - method.answer(state, neighbour, batch.facts)).norm()))
    assert max(moves) <= stated


@all_methods
def test_contributions_are_what_examples_add_over_the_sensitivity(component: Component, batch: Batch) -> None:
    method = make_clipping(component)
    state, everyone = started(method, batch), torch.arange(BATCH)
    answer = noisy(component, method.answer(state, batch.examples(everyone), batch.facts), seed=1)
    rule = method.decide(state, answer, batch.facts)
    contributions = rule.contributions(batch.examples(everyone))
    truth = batch.added(rule, everyone).norm(dim=1) / rule.sensitivity
    torch.testing.assert_close(contributions, truth, rtol=3e-5, atol=1e-6)
    assert (contributions >= truth.clamp(max=1.0)).all()
    assert contributions.max() <= 1.0
    assert contributions.max() > 0.3


@pytest.mark.thinned(3)
@all_methods
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_norm_and_no_noisy_answer_breaks_the_bound(component: Component, data: st.DataObject) -> None:
    """Zero, tiny, huge, infinite and NaN norms; noisy answers of any sign and size."""
    method = make_clipping(component)
    norm = st.one_of(
        st.sampled_from([0.0, 1e-45, 1e-38, 1e38, 3.4e38, math.inf, math.nan]), st.floats(0.0, 1e6, width=32)
    )
    layer_norms = torch.tensor(data.draw(st.lists(st.tuples(norm, norm), min_size=0, max_size=6))).reshape(-1, 2)
    norms = layer_norms.norm(dim=1)
    count = len(norms)
    examples = Examples(norms, torch.arange(count) % 10, torch.arange(count), layer_norms)
    facts = PublicFacts(GROUPS, ("a", "b"), dataset_size=max(count, 1), batch_size=8)
    assert isinstance(method.bound, float)
    state = method.pay(method.refresh(method.start(method.bound, facts), examples), PRICES)
    size = len(method.answer(state, examples, facts))
    reals = st.lists(st.floats(-1e6, 1e6), min_size=size, max_size=size)
    answer = torch.tensor(data.draw(reals), dtype=torch.float64)
    rule = method.decide(state, answer, facts)
    assert 0.0 < rule.sensitivity < math.inf
    weights = rule.weights(examples)
    assert weights.isfinite().all()
    finite = norms.isfinite()
    assert (weights[~finite] == 0.0).all()
    added = weights.double() * (layer_norms if weights.ndim == 2 else norms).double()
    added = added.norm(dim=1) if added.ndim == 2 else added
    assert (added[finite] <= rule.sensitivity * (1.0 + 1e-5)).all()
    contributions = rule.contributions(examples)
    assert ((contributions >= 0.0) & (contributions <= 1.0)).all()
    assert (contributions[~finite] == 1.0).all()
    later = method.advance(state, answer, facts)
    assert 0.0 < later.bound < math.inf


@pytest.mark.thinned(4)
@all_methods
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_contributions_bound_those_of_close_norms(component: Component, data: st.DataObject) -> None:
    """Norms of two passes differ a little; what a rule makes of any norm in between is at most the contribution."""
    method = make_clipping(component)
    near = st.sampled_from([0.0699999, 0.07, 0.7, 6.99993, 7.0, 7.00007]).map(lambda bound: bound * data.draw(ULPS))
    norm = float(np.float32(data.draw(st.one_of(near, st.floats(1e-8, 1e6)))))
    thresholds = torch.tensor([norm, 3.0], dtype=torch.float32)

    def examples(factor: float) -> Examples:
        norms = torch.tensor([norm * factor, 1.0])
        return Examples(norms, torch.arange(2), torch.arange(2), torch.stack([0.6 * norms, 0.8 * norms], 1))

    facts = PublicFacts(GROUPS, ("a", "b"), dataset_size=2, batch_size=8)
    assert isinstance(method.bound, float)
    state = method.refresh(method.start(method.bound, facts), replace(examples(1.0), norms=thresholds))
    state = replace(method.pay(state, PRICES), ratio=data.draw(st.sampled_from([0.1, 1.0, 10.0])))
    answer = noisy(component, method.answer(state, examples(1.0), facts), data.draw(st.integers(0, 99)))
    rule = method.decide(state, answer, facts)
    bound = rule.contributions(examples(1.0))[0]
    for factor in (1.0 - NORM_ERROR, 1.0 - 0.5 * NORM_ERROR, 1.0, 1.0 + 0.5 * NORM_ERROR, 1.0 + NORM_ERROR):
        close = examples(factor)
        weights = rule.weights(close).double()
        norms = known(close.norms if weights.ndim == 1 else close.layer_norms)
        added = (weights * norms.double())[0].norm()
        assert min(float(added) / rule.sensitivity, 1.0) <= float(bound), (norm, factor)


def test_below_its_bound_a_threshold_of_global_clipping_costs_what_it_enlarges() -> None:
    """With Z < C a norm at Z is enlarged to C, and one just above it is kept: close to Z both count as C."""
    method = make_clipping(Component("global_adaptive", {"bound": 2.0, "threshold_ratio": 0.5}))
    facts = PublicFacts(("a",), ("w",), 3, 8)
    rule = method.decide(method.start(2.0, facts), torch.zeros(1, dtype=torch.float64), facts)
    examples = Examples(torch.tensor([1.0 + 5e-6, 1.1, 0.25]), torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert rule.contributions(examples).tolist() == pytest.approx([1.0, 0.55, 0.25], rel=3e-5)


def test_no_clipping_keeps_every_gradient_and_has_no_finite_sensitivity() -> None:
    method = make_clipping(Component("none"))
    examples = Examples(torch.tensor([0.0, 5.0, math.inf]), torch.zeros(3, dtype=torch.int64), torch.arange(3))
    rule = method.decide(ClippingState(1.0), torch.zeros(0), PublicFacts(("a",), ("w",), 3, 1))
    assert rule.sensitivity == math.inf
    assert rule.weights(examples).tolist() == [1.0, 1.0, 0.0]
    assert rule.contributions(examples).tolist() == [1.0, 1.0, 1.0]


def test_every_method_is_under_the_contract() -> None:
    assert {component.name for component in COMPONENTS} | {"none"} == set(CLIPPING)


JUMPS = [
    (Component("global", {"bound": 2.0, "threshold_ratio": 5.0}), 10.0),
    (Component("global_adaptive", {"bound": 2.0, "threshold_ratio": 0.1}), 0.2),
    (Component("automatic", {"bound": 2.0, "stability": 0.0}), 1e-12),
]


@pytest.mark.parametrize(("component", "jump"), JUMPS, ids=[component.name for component, _ in JUMPS])
def test_contributions_cover_all_that_another_pass_may_add_next_to_a_jump(component: Component, jump: float) -> None:
    """The pass that measures and the one that is summed may see norms on different sides of it."""
    method, facts = make_clipping(component), PublicFacts(("all",), ("w",), dataset_size=9, batch_size=8)
    rule = method.decide(method.start(2.0, facts), torch.zeros(1, dtype=torch.float64), facts)
    norms = jump * (1.0 + torch.linspace(-2e-5, 2e-5, 41, dtype=torch.float64)).float()
    rows = torch.arange(len(norms))
    examples = Examples(norms, torch.zeros_like(rows), rows)
    added = rule.weights(examples).double() * norms.double() / rule.sensitivity
    recorded = rule.contributions(examples)
    assert (added.diff().abs() > 0.5).any(), "the rule jumps here"
    for norm, contribution in zip(norms, recorded, strict=True):
        near = (norms - norm).abs() <= 0.99e-5 * norm
        assert added[near].max() <= contribution * (1.0 + 1e-6)


@pytest.mark.parametrize(
    "component",
    [
        Component("automatic", {"bound": 1.0, "stability": 0.0}),
        Component("flat", {"bound": 1e-8}),
        Component("per_layer", {"bound": 1e-8}),
        Component("global", {"bound": 1e-8, "threshold_ratio": 1e-4}),
        Component("global_adaptive", {"bound": 1e-8, "threshold_ratio": 1e-4}),
    ],
    ids=lambda component: component.name,
)
def test_no_method_is_misled_by_norms_that_underflow(component: Component) -> None:
    """Most of this gradient's squares are 0 in float32: its computed norm is below a hundredth of the true one."""
    model = nn.Linear(100_000, 1, bias=False)
    x = torch.full((1, 100_000), 2.6e-23)
    x[0, 0] = 4e-23
    engine = GradientEngine(model, lambda output, y: output[:, 0] * y, layerwise=True)
    method, facts = make_clipping(component), PublicFacts(("all",), engine.layer_names, 1, 1)
    assert isinstance(method.bound, float)
    rule = method.decide(method.start(method.bound, facts), torch.zeros(1, dtype=torch.float64), facts)
    row = torch.zeros(1, dtype=torch.int64)

    def weigh(norms: BatchNorms) -> Tensor:
        weights = rule.weights(Examples(norms.norms, row, row, norms.layer_norms))
        return weights if weights.ndim == 2 else weights[:, None]

    clipped = engine.weighted_sum(x, torch.ones(1), weigh)
    assert 0.0 < clipped.norms.norms[0] < 0.01 * x.double().norm()
    assert clipped.gradients["weight"].double().norm() <= rule.sensitivity
