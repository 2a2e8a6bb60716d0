"""Faults that audits find: each is planted in a run, whose lower bound must exceed the claim.

`pytest -m audit` runs them. Audits by gradient canaries see sums and their noise; those by rows, also per-example
gradients and their norms; those of single steps, answers to side queries. None sees noise that follows the realised
batch, or shuffled batches that are accounted for as Poisson: a contract test and a refusal do (docs/accounting.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.workers.clipping import BatchQuery, ClipRule
from dpsweep.workers.clipping.by_group import DPSGDFClipping, NaiveReweighting
from dpsweep.workers.clipping.by_norm import AutomaticClipping, FlatClipping, GlobalClipping, QuantileClipping
from dpsweep.workers.gradients.pass_results import Combination
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.sampling.samplers import PoissonSampler
from dpsweep.workers.spec import AuditSpec, Component, SamplingSpec
from dpsweep.workers.training.batch_gradients import Decision, LocalGradients
from dpsweep.workers.training.trainer import Trainer
from tests.workers.training import test_audit as of_steps
from tests.workers.training import test_one_run_audit as of_rows
from tests.workers.training.test_gradient_canaries import ROWS, audited, claimed, trainer_of, trial

pytestmark = [pytest.mark.audit, pytest.mark.long]

AUDIT = AuditSpec(2000, 0.95, "gradient", "iterates")
FULL = SamplingSpec("poisson", ROWS)
Plant = Callable[[pytest.MonkeyPatch], None]


def quieter(factor: float) -> Plant:
    drawn = SeededNoise.normal
    return lambda patch: patch.setattr(SeededNoise, "normal", lambda self, shape, std: drawn(self, shape, std) / factor)


def without_a_layer(patch: pytest.MonkeyPatch) -> None:
    drawn = SeededNoise.normal

    def only_matrices(self: SeededNoise, shape: tuple[int, ...], std: float) -> torch.Tensor:
        return drawn(self, shape, std if len(shape) < 2 else std * (0.0 if shape[0] > 100 else 1.0))

    patch.setattr(SeededNoise, "normal", only_matrices)


def rule_of(kind: type[Any], change: Callable[[ClipRule], ClipRule]) -> Plant:
    decide = kind.decide
    return lambda patch: patch.setattr(kind, "decide", lambda *given: change(decide(*given)))


def weights(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Plant:
    right = ClipRule.weights
    return lambda patch: patch.setattr(ClipRule, "weights", lambda rule, each: change(each, right(rule, each)))


def rate(factor: float) -> Plant:
    built = PoissonSampler.__init__

    def more(self: PoissonSampler, size: int, batch: int, draws: Any) -> None:
        built(self, size, min(size, int(factor * batch)), draws)

    return lambda patch: patch.setattr(PoissonSampler, "__init__", more)


def longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trainer, "may_continue", lambda self: self.step_count < 2 * self.total_steps)


def lower_schedule(patch: pytest.MonkeyPatch) -> None:
    stated = Trainer.noise_multiplier.fget  # type: ignore[attr-defined]
    patch.setattr(Trainer, "noise_multiplier", property(lambda self: 0.7 * stated(self)))


def steps_taken_again(patch: pytest.MonkeyPatch) -> None:
    """A resume that repeats a step with fresh noise, and counts it once."""
    advance = Trainer.advance

    def twice(self: Trainer, rows: Any = None) -> None:
        advance(self, rows)
        self._run.step_count -= 1
        advance(self, None)

    patch.setattr(Trainer, "advance", twice)


def without_noise_every(steps: int) -> Plant:
    added = SeededNoise.added_to_each

    def plant(patch: pytest.MonkeyPatch) -> None:
        calls = itertools.count(1)

        def sometimes(self: SeededNoise, values: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
            return added(self, values, 0.0 if next(calls) % steps == 0 else std)

        patch.setattr(SeededNoise, "added_to_each", sometimes)

    return plant


def noise_used_again(patch: pytest.MonkeyPatch) -> None:
    """A retry that draws another batch, and the noise of the step before."""
    added, states = SeededNoise.added_to_each, list[dict[str, Any]]()

    def again(self: SeededNoise, values: Mapping[str, Tensor], std: float) -> dict[str, Tensor]:
        if states:
            self.restore(states.pop())
        else:
            states.append(self.state())
        return added(self, values, std)

    patch.setattr(SeededNoise, "added_to_each", again)


def without_largest_group(rule: ClipRule) -> ClipRule:
    return replace(rule, sensitivity=sorted(rule.bounds.values())[-2])


def less(factor: float) -> Callable[[ClipRule], ClipRule]:
    return lambda rule: replace(rule, sensitivity=rule.sensitivity / factor)


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Plant
    clipping: Component = Component("flat", {"bound": 2.0})  # noqa: RUF009
    sampling: SamplingSpec = FULL
    epochs: int = 6


COUNTS = {"count_noise_multiplier": 20.0}
FAULTS = [
    Fault("noise a quarter too small", quieter(1.3)),
    Fault("noise halved", quieter(2.0)),
    Fault("no noise", quieter(1e9)),
    Fault("a layer without noise", without_a_layer),
    Fault("noise of a lower multiplier than stated", lower_schedule),
    Fault("no clipping", weights(lambda each, right: torch.ones_like(right))),
    Fault("one group is not clipped", weights(lambda each, right: torch.where(each.groups == 1, 1.0, right))),
    Fault("clipped at 1.3 times the bound", weights(lambda each, right: 1.3 * right)),
    Fault("noise scaled to two thirds of the bound", rule_of(FlatClipping, less(1.5))),
    Fault(
        "automatic clipping does not divide by the norm",
        rule_of(AutomaticClipping, lambda rule: replace(rule, weigh=lambda each: torch.ones_like(each.norms))),
        Component("automatic", {"bound": 2.0}),
    ),
    Fault("dpsgd_f: noise of a smaller bound", rule_of(DPSGDFClipping, less(1.5)), Component("dpsgd_f", COUNTS)),
    Fault("naive: noise of a smaller weight", rule_of(NaiveReweighting, less(1.5)), Component("naive", COUNTS)),
    Fault("quantile: noise of an earlier bound", rule_of(QuantileClipping, less(1.5)), Component("quantile")),
    Fault(
        "global: what is above the threshold stays",
        rule_of(GlobalClipping, lambda rule: replace(rule, weigh=lambda each: torch.full_like(each.norms, 0.1))),
        Component("global", {"bound": 2.0}),
    ),
    Fault("sample rate doubled", rate(2.0), sampling=SamplingSpec("poisson", ROWS // 4)),
    Fault("every example in every batch", rate(100.0), sampling=SamplingSpec("poisson", ROWS // 4)),
    Fault("twice as many steps", longer),
    Fault("steps taken again after a resume", steps_taken_again),
    Fault("one step in 50 without noise", without_noise_every(50), epochs=50),
    Fault("noise used again by a retry", noise_used_again, sampling=SamplingSpec("poisson", ROWS // 4)),
    Fault(
        "dpsgd_f: a group left out of the largest bound",
        rule_of(DPSGDFClipping, without_largest_group),
        Component("dpsgd_f", COUNTS),
    ),
]


def spec_of(fault: Fault) -> Any:
    mean = 2.0
    return trial(
        AUDIT,
        sigma=math.sqrt(fault.epochs) / mean if fault.sampling == FULL else 1.5,
        epochs=fault.epochs,
        clipping=fault.clipping,
        sampling=fault.sampling,
        model=Component("mlp", {"hidden": (128,)}),
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_audit_finds(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(fault)
    claim = claimed(spec)
    fault.plant(monkeypatch)
    assert audited(trainer_of(spec, tmp_path)).everyone.epsilon > claim


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_audit_accuses_no_run_without_the_fault(fault: Fault, tmp_path: Path) -> None:
    spec = spec_of(fault)
    assert audited(trainer_of(spec, tmp_path)).everyone.epsilon <= claimed(spec)


def two_layers(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A model whose first layer has by far the longest gradients."""
    first, second = nn.Linear(feature_shape[0], num_classes, bias=False), nn.Linear(num_classes, num_classes)
    with torch.no_grad():
        first.weight.copy_(torch.eye(num_classes, feature_shape[0]))
        second.weight.copy_(torch.eye(num_classes))
        second.bias.zero_()
    return nn.Sequential(first, second)


def norms_without_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    joined = Combination.of_squares

    def fewer(self: Combination, squares: Mapping[str, Tensor], losses: Tensor) -> Any:
        first = next(iter(squares))
        return joined(self, {name: each for name, each in squares.items() if name != first}, losses)

    patch.setattr(Combination, "of_squares", fewer)


def every_rank_takes_the_whole_batch(patch: pytest.MonkeyPatch) -> None:
    """As if eight ranks had all rows each, and rank 0 added their sums."""
    one = LocalGradients.weighted_sum_rowwise

    def all_of_them(self: LocalGradients, rows: Tensor, decision: Decision) -> Any:
        found = one(self, rows, decision)
        return replace(found, gradients={name: 8.0 * each for name, each in found.gradients.items()})

    patch.setattr(LocalGradients, "weighted_sum_rowwise", all_of_them)


OF_ROWS = {"a clip that misses a layer": norms_without_the_first_layer, "ranks": every_rank_takes_the_whole_batch}


@pytest.mark.parametrize("fault", OF_ROWS)
def test_an_audit_of_rows_finds(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = replace(of_rows.spec(), model=Component(f"{__file__}:two_layers"))
    claim = of_rows.claimed(right)
    assert of_rows.audited(right, of_rows.trainer_of(right, tmp_path / "right")).everyone.epsilon <= claim
    OF_ROWS[fault](monkeypatch)
    assert of_rows.audited(right, of_rows.trainer_of(right, tmp_path / "wrong")).everyone.epsilon > claim


def test_an_audit_of_single_steps_finds_a_side_query_with_too_little_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = of_steps.Audit(of_steps.DPSGD_F)
    claim, stated = of_steps.claimed(audit.trace()), BatchQuery.noise_std.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(BatchQuery, "noise_std", property(lambda query: stated(query) / 2.0))
    assert audit.delta(tmp_path) > claim
