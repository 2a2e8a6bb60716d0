"""Gradient canaries: directions, batches and contributions as the claim has them, and what they prove."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsweep.accounting import InvalidInput, PoissonSampling, Segment, Trace, account
from dpsweep.accounting.audits import StatedRun
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.clipping import Examples, PublicFacts, make_clipping
from dpsweep.workers.data.base import Dataset, make_split
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.sampling.users import population_of
from dpsweep.workers.spec import (
    AuditSpec,
    Component,
    DataSpec,
    ExecutionSpec,
    NoiseSpec,
    NormSpec,
    SamplingSpec,
    TrialSpec,
    UserSpec,
)
from dpsweep.workers.training.gradient_canaries import Directions, GradientCanaries, longest
from dpsweep.workers.training.one_run_audit import audit_gradient_scores
from dpsweep.workers.training.trainer import Trainer
from tests.known import known
from tests.orchestration.sample_grids import small
from tests.workers.devices import DEVICE, NAME
from tests.workers.trial_runs import made_trainer
from tests.workers.trial_specs import planned_mechanism

ROWS, CANARIES = 100, 600
AUDIT = AuditSpec(CANARIES, 0.95, "gradient", "iterates")
LAST = replace(AUDIT, transcript="last_model")


def trial(audit: AuditSpec = AUDIT, method: str = "poisson", sigma: float = 2.0, **changes: Any) -> TrialSpec:
    settings = {
        "key": "audit",
        "data": DataSpec("audit"),
        "model": Component("mlp", {"hidden": (32,)}),
        "sampling": SamplingSpec(method, 20),
        "clipping": Component("flat", {"bound": 2.0}),
        "noise": NoiseSpec(sigma),
        "epochs": 6,
        "delta": 1e-5,
        "seed": 0,
        "optimizer": Component("sgd", {"learning_rate": 0.1}),
        "norms": NormSpec("off"),
        "execution": ExecutionSpec(device=NAME),
        "audit": audit,
    }
    return TrialSpec(**{**settings, **changes})


def data() -> Dataset:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(ROWS, 20)).astype(np.float32)
    users = np.arange(ROWS) // 2
    split = make_split(features, (features[:, 0] > 0).astype(np.int64), np.arange(ROWS) % 2, user_ids=users)
    return Dataset("audit", split, replace(split, user_ids=None), None, ("even", "odd"), ("a", "b"))


def trainer_of(spec: TrialSpec, root: Path, noise: type[SeededNoise] = SeededNoise) -> Trainer:
    return made_trainer(spec, root, data(), noise(spec.seed, DEVICE))


def canaries_of(trainer: Trainer) -> GradientCanaries:
    return known(trainer.gradient_canaries)


def audited(trainer: Trainer) -> AuditResult:
    trainer.begin()
    while trainer.may_continue():
        trainer.step()
    return known(trainer.audited())


def claimed(spec: TrialSpec) -> float:
    return account(planned_mechanism(spec, population_of(spec, data())).trace(spec.epochs), spec.delta).epsilon


def test_directions_are_orthonormal_and_one_each() -> None:
    shapes = {"a": torch.Size([7, 3]), "b": torch.Size([12])}
    directions = Directions(shapes, 30, 5)
    like = {name: torch.zeros(shape) for name, shape in shapes.items()}
    every = [directions.along(directions.combined(weights, like)) for weights in np.eye(30)]
    np.testing.assert_allclose(every, np.eye(30), atol=1e-6)
    assert not np.array_equal(directions._places, Directions(shapes, 30, 6)._places)
    with pytest.raises(InvalidInput, match=r"audit\.canaries is 34, but the model has 33 trainable parameters"):
        Directions(shapes, 34, 5)


@pytest.mark.parametrize("name", ["flat", "automatic", "quantile", "dpsgd_f", "naive", "global", "global_adaptive"])
def test_a_canary_adds_the_most_that_the_rule_lets_through(name: str) -> None:
    method, facts = make_clipping(Component(name, {"bound": 3.0})), PublicFacts(("a", "b"), ("layer",), 100, 20)
    state = method.start(3.0, facts)
    nobody = Examples(torch.rand(8), torch.arange(8) % 2, torch.arange(8))
    rule = method.decide(state, method.answer(state, nobody, facts), facts)
    assert rule.sensitivity * 0.998 < longest(rule, 2) <= rule.sensitivity * (1 + 1e-6)


@pytest.mark.parametrize(
    "method", ["poisson", pytest.param("fixed", marks=pytest.mark.long), "shuffle", "random_allocation"]
)
def test_canaries_join_batches_as_examples_do(method: str, tmp_path: Path) -> None:
    """Poisson and fixed: at the rate of the examples, in any number of batches. Others: once an epoch, in any batch."""
    canaries = canaries_of(trainer_of(trial(method=method), tmp_path))
    steps, epochs = 5, 60
    joined = np.array([canaries._batches.next()[:CANARIES] for _ in range(epochs * steps)])
    by_epoch = joined.reshape(epochs, steps, CANARIES)
    if method in ("shuffle", "random_allocation"):
        assert (by_epoch.sum(1) == 1).all()
        assert (by_epoch.sum(0) > 0).all()
    else:
        assert abs(joined.mean() - 0.2) < 4 * math.sqrt(0.2 * 0.8 / joined.size)
        assert np.var(by_epoch.sum(1)) == pytest.approx(5 * 0.2 * 0.8, rel=0.05)


def test_the_sum_grows_by_the_canaries_in_the_batch_that_take_part(tmp_path: Path) -> None:
    trainer = trainer_of(trial(), tmp_path)
    trainer.begin()
    trainer.step()
    canaries, zeros = canaries_of(trainer), {name: torch.zeros_like(p) for name, p in trainer._parameters.items()}
    added = canaries.directions.along(canaries.with_canaries(zeros, trainer._rule, 2))
    expected = np.zeros(canaries.directions.count)
    expected[: len(canaries.included)] = 2.0 * canaries._drawn * canaries.included
    np.testing.assert_allclose(added, expected, atol=1e-5)
    assert not expected[CANARIES:].any(), "references and witnesses take no part"
    assert 0 < np.count_nonzero(added > 1.0) < canaries._drawn[:CANARIES].sum()


BANDED = {"noise": NoiseSpec(2.0, Component("banded", {"bands": 3}))}
RESUMED: dict[str, dict[str, Any]] = {
    "poisson": {},
    "shuffle": {"method": "shuffle"},
    "random allocation": {"method": "random_allocation"},
    "turns": {**BANDED, "sampling": SamplingSpec("cyclic_poisson", 20, cycle_length=3)},
    "one order": {**BANDED, "method": "fixed_order"},
    "last model": {"audit": LAST, "optimizer": Component("adam"), "averaging": Component("ema")},
}


@pytest.mark.parametrize(
    "kind", [pytest.param("shuffle", marks=pytest.mark.long), *sorted(RESUMED.keys() - {"shuffle"})]
)
def test_a_resumed_audit_is_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole, first, second = (trainer_of(trial(**RESUMED[kind]), tmp_path / name) for name in ("a", "b", "c"))
    for each in (whole, first):
        each.begin()
    for step in range(14):
        whole.step()
        if step < 7:
            first.step()
    second.restore(first.state())
    for _ in range(7):
        second.step()
    np.testing.assert_array_equal(canaries_of(second).scores, canaries_of(whole).scores)
    np.testing.assert_array_equal(canaries_of(second).included, canaries_of(whole).included)
    for one, other in zip(whole._model.parameters(), second._model.parameters(), strict=True):
        assert torch.equal(one, other)


class WeakNoise(SeededNoise):
    """What a trainer with a bug would draw."""

    def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        return super().normal(shape, std) / 2.0


@pytest.mark.parametrize(("method", "seed"), [("poisson", 0), pytest.param("shuffle", 1, marks=pytest.mark.long)])
def test_the_iterates_prove_most_of_the_claim_and_that_noise_is_missing(method: str, seed: int, tmp_path: Path) -> None:
    spec = trial(method=method, seed=seed)
    right, wrong = (audited(trainer_of(spec, tmp_path / kind.__name__, kind)) for kind in (SeededNoise, WeakNoise))
    assert {test.name for test in right.tests} == {"ranks", "gdp", "f_dp", "steinke"}
    assert 0.5 * claimed(spec) < right.everyone.epsilon <= claimed(spec)
    assert wrong.everyone.epsilon > claimed(spec)
    assert right.everyone.epsilon == max(test.lower_bound for test in right.tests)


FILTER = {"bound": 2.0, "epsilon": 3.0}
KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "fixed": (0.4, {"method": "fixed"}),
    "replaced": (0.4, {"method": "shuffle", "adjacency": "replace_one"}),
    "shuffle": (0.4, {"method": "shuffle"}),
    "random allocation": (0.4, {"method": "random_allocation"}),
    "dpsgd_f": (0.4, {"clipping": Component("dpsgd_f", {"count_noise_multiplier": 20.0})}),
    "individual": (0.4, {"clipping": Component("individual", {"bound": 2.0}), "norms": NormSpec(1.0)}),
    "filter": (0.4, {"clipping": Component("filter", FILTER), "norms": NormSpec(1.0), "sigma": 1.2}),
    "turns": (0.4, {"sampling": SamplingSpec("cyclic_poisson", 20, cycle_length=3)}),
    "one order": (0.4, {"method": "fixed_order"}),
    "banded in turns": (0.4, RESUMED["turns"]),
    "banded in one order": (0.4, RESUMED["one order"]),
    "buffers in one order": (0.4, {"noise": NoiseSpec(2.0, Component("blt", {"buffers": 2})), "method": "fixed_order"}),
    "rows of users": (0.4, {"users": UserSpec("els", 2)}),
    "users": (0.4, {"users": UserSpec("uls", 2), "sampling": SamplingSpec("poisson", 10)}),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_audited_and_none_is_accused(kind: str, tmp_path: Path) -> None:
    """Bounds are at least the share of the claim beside each kind. One in twenty may accuse a run, and so not both."""
    least, changes = KINDS[kind]
    specs = [trial(seed=seed, **changes) for seed in range(2)]
    found = [audited(trainer_of(spec, tmp_path / str(spec.seed))).everyone.epsilon / claimed(spec) for spec in specs]
    assert least < min(found) <= 1.0


@pytest.mark.parametrize("audit", [AUDIT, LAST], ids=["iterates", "last model"])
def test_a_canary_spends_the_budget_of_a_filter_on_all_steps(audit: AuditSpec, tmp_path: Path) -> None:
    spec = trial(audit, sigma=1.2, clipping=Component("filter", FILTER), norms=NormSpec(1.0))
    trainer = trainer_of(spec, tmp_path)
    result = audited(trainer)
    found = result.everyone.epsilon
    canaries, limit = canaries_of(trainer), known(trainer.trace().filter)
    assert canaries.full_steps == canaries.steps == trainer.step_count
    assert canaries._clipping is not None
    assert 0.999 * limit.budget < float(known(canaries._clipping.spent)[0]) <= limit.budget
    stated = canaries.stated(trainer.trace(), spec.delta).trace
    assert stated.segments[0].noise_multiplier == pytest.approx(1.2 * 2.0 / canaries._length, rel=1e-6)
    assert result.of_canary == account(stated, spec.delta).epsilon
    assert 0.2 * claimed(spec) < found <= result.of_canary < claimed(spec)


@pytest.mark.parametrize(("seed", "least"), [(0, 0.3), pytest.param(1, 0.2, marks=pytest.mark.long)])
def test_the_last_model_proves_less_and_that_noise_is_missing(seed: int, least: float, tmp_path: Path) -> None:
    spec = trial(LAST, seed=seed)
    right, wrong = (audited(trainer_of(spec, tmp_path / kind.__name__, kind)) for kind in (SeededNoise, WeakNoise))
    assert {test.name for test in right.tests} == {"ranks", "gdp", "f_dp", "steinke"}
    assert least * claimed(spec) < right.everyone.epsilon <= claimed(spec)
    assert wrong.everyone.epsilon > 1.5 * right.everyone.epsilon
    counted = {test.canaries for test in right.tests if test.name != "ranks"}
    assert counted == {CANARIES * 9 // 10}, "a tenth chooses and does not count"


OPTIMIZED: dict[str, dict[str, Any]] = {
    "flat": {"optimizer": Component("sgd", {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01})},
    "dpsgd_f": {"clipping": Component("dpsgd_f", {"count_noise_multiplier": 20.0})},
    "adam": {"optimizer": Component("adam")},
    "banded": RESUMED["turns"],
}


@pytest.mark.parametrize("kind", OPTIMIZED)
def test_a_score_of_the_last_model_depends_on_no_other_coin(kind: str, tmp_path: Path) -> None:
    """Nor does the model, which does not move along the directions."""
    spec = trial(LAST, **OPTIMIZED[kind])
    runs = [trainer_of(spec, tmp_path / name) for name in "ab"]
    start = {name: each.detach().clone() for name, each in runs[0]._parameters.items()}
    canaries_of(runs[1]).included[::2] ^= True
    for each in runs:
        each.begin()
        for _ in range(10):
            each.step()
    scores = [canaries_of(each).scores for each in runs]
    np.testing.assert_allclose(scores[0][1::2], scores[1][1::2], rtol=1e-3, atol=1e-3 * scores[0].std())
    assert np.median(np.abs(scores[0] - scores[1])[::2]) > 0.05 * scores[0].std()
    for name, value in runs[0]._parameters.items():
        torch.testing.assert_close(value, runs[1]._parameters[name], rtol=1e-3, atol=1e-4)
    if kind != "adam":  # which moves each parameter of the model by its own history
        moved = {name: each.detach() - start[name] for name, each in runs[0]._parameters.items()}
        far = torch.cat([each.flatten() for each in moved.values()]).norm().item()
        assert np.abs(canaries_of(runs[0]).directions.along(moved)).max() < 1e-2 * far


def test_a_score_of_the_last_model_is_what_a_canary_added_and_noise(tmp_path: Path) -> None:
    spec = trial(LAST, sigma=1e-6)
    trainer, added = trainer_of(spec, tmp_path), np.zeros(CANARIES)
    trainer.begin()
    for _ in range(10):
        trainer.step()
        added += canaries_of(trainer)._drawn * canaries_of(trainer).included
    np.testing.assert_allclose(canaries_of(trainer).scores, 0.1 / 20 * 2.0 * added, atol=1e-5)
    assert 0 < np.count_nonzero(added) < CANARIES


def scores_of_poisson(
    sigma: float, rate: float, steps: int, audit: AuditSpec, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of canaries, drawn from the mechanism of the claim itself: evidence, also of four references each, or the
    sum of what a last model has moved by.
    """
    count = audit.canaries if audit.transcript == "last_model" else 5 * audit.canaries
    included, scores = np.zeros(count, np.bool_), np.zeros(count)
    included[: audit.canaries] = generator.random(audit.canaries) < 0.5
    for _ in range(steps):
        seen = included * (generator.random(count) < rate) + sigma * generator.normal(size=count)
        if audit.transcript == "last_model":
            scores += seen
        else:
            scores += np.logaddexp(math.log1p(-rate), math.log(rate) + (seen - 0.5) / sigma**2)
    return scores, included


def poisson(sigma: float, steps: int, rate: float = 0.2) -> StatedRun:
    trace = Trace(1000, (Segment(0, steps, PoissonSampling(rate), sigma),))
    return StatedRun(trace, trace, 1e-5)


@pytest.mark.parametrize("runs", [1, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 20), pytest.param(0.6, 5, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("audit", "rate"), [(AUDIT, 0.2), pytest.param(LAST, 1.0, marks=pytest.mark.long)], ids=["iterates", "last model"]
)
def test_a_known_mechanism_is_never_above_its_claim(
    audit: AuditSpec, rate: float, sigma: float, steps: int, runs: int
) -> None:
    """No more alarms than 5 %, by any test: of Poisson batches, whose trade-off function is not that of a Gaussian, and
    of full ones, of which the last model shows all.
    """
    sigma = sigma * 4.0 if rate == 1.0 else sigma
    run, audit = poisson(sigma, steps, rate), replace(audit, canaries=400)
    claim = account(run.trace, 1e-5).epsilon
    generator, bounds, alarms = np.random.default_rng(1), [], 0
    for seed in range(runs):
        scores, included = scores_of_poisson(sigma, rate, steps, audit, generator)
        found = audit_gradient_scores(scores, included, audit, run, seed)
        bounds.append(found.everyone.epsilon)
        alarms += max(test.lower_bound for test in found.tests) > claim
    assert alarms <= 0.05 * runs
    assert np.mean(bounds) > 0.2 * claim


@pytest.mark.long
def test_scores_that_know_nothing_prove_nothing_and_those_that_know_all_prove_much() -> None:
    generator = np.random.default_rng(0)
    included = np.arange(5 * CANARIES) < CANARIES
    included[:CANARIES] = generator.random(CANARIES) < 0.5

    def bound(scores: np.ndarray) -> float:
        return audit_gradient_scores(scores, included, AUDIT, poisson(1.0, 20), 0).everyone.epsilon

    assert bound(generator.normal(size=len(included))) < 0.5
    assert bound(np.where(included, 9.0, -9.0)) > 4.0
    assert not math.isnan(bound(np.full(len(included), np.nan)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"sampling": {"method": "poisson", "batch_size": 128, "max_batch_size": 200}},
            "sampling.max_batch_size is 200: canaries would not displace",
        ),
        ({"clipping": "per_layer"}, "clipping 'per_layer' is by layer"),
    ],
)
def test_what_has_no_proof_is_refused_by_the_plan(changes: dict[str, object], reason: str) -> None:
    audit = {"canaries": 200, "kind": "gradient", "transcript": "iterates"}
    plan = plan_sweep(
        parse_sweep(small(**{"clipping": "flat", "noise": "constant", "seeds": 0, "audit": audit, **changes}))
    )
    assert not [each for each in plan.trials if each.spec.is_private]
    assert f"audit.kind is gradient, but {reason}" in plan.reasons()[0]


def test_of_users_a_sweep_audits_gradients_and_no_rows() -> None:
    settings = {
        "clipping": "flat",
        "noise": "constant",
        "privacy": {"target_epsilon": 5, "delta": 1e-5, "unit": "user", "user_sampling": "uls"}
        | {"max_records_per_user": 2},
    }
    gradients = known(parse_sweep(small(**settings, audit={"canaries": 200, "kind": "gradient"})).audit)
    assert gradients.kind == "gradient"
    with pytest.raises(InvalidInput, match=r"which does not cover audit of rows \(.*give kind: gradient"):
        parse_sweep(small(**settings, audit={"canaries": 200}))


def test_rows_are_not_scored_by_the_iterates() -> None:
    with pytest.raises(InvalidInput, match=r"audit\.transcript is iterates, but audit\.kind is rows"):
        AuditSpec(200, transcript="iterates")


def test_baselines_of_a_sweep_have_no_gradient_canaries() -> None:
    audit = {"canaries": 200, "kind": "gradient"}
    trials = plan_sweep(parse_sweep(small(clipping="flat", noise="constant", seeds=0, audit=audit))).trials
    assert [(each.spec.is_private, each.spec.audit is not None) for each in trials].count((True, True)) == 1
    assert not any(each.spec.audit for each in trials if not each.spec.is_private)
