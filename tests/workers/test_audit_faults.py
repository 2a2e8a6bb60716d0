"""Faults that an audit by gradient canaries finds: each is planted in a run, whose lower bound must exceed the claim.

`pytest -m audit` runs them. Not found, because the score takes every step at its stated noise and looks at sums alone:
one step in 50 without noise, and noise that is drawn once and used again. Not looked at: per-example gradients and
their norms, answers to side queries, and group counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.workers.clipping import ClipRule
from dpsweep.workers.clipping.automatic import AutomaticClipping
from dpsweep.workers.clipping.dpsgd_f import DPSGDFClipping
from dpsweep.workers.clipping.flat import FlatClipping
from dpsweep.workers.clipping.global_ import GlobalClipping
from dpsweep.workers.clipping.naive import NaiveReweighting
from dpsweep.workers.clipping.quantile import QuantileClipping
from dpsweep.workers.noise import SeededNoise
from dpsweep.workers.sampling import PoissonSampler
from dpsweep.workers.spec import AuditSpec, Component, SamplingSpec
from dpsweep.workers.training import Trainer
from tests.workers.test_gradient_canaries import ROWS, audited, claimed, trainer_of, trial

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


def less(factor: float) -> Callable[[ClipRule], ClipRule]:
    return lambda rule: replace(rule, sensitivity=rule.sensitivity / factor)


@dataclass(frozen=True)
class Fault:
    name: str
    plant: Plant
    clipping: Component = Component("flat", {"bound": 2.0})  # noqa: RUF009
    sampling: SamplingSpec = FULL


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
]


def spec_of(fault: Fault) -> Any:
    mean = 2.0
    return trial(
        AUDIT,
        sigma=math.sqrt(6) / mean if fault.sampling == FULL else 1.5,
        clipping=fault.clipping,
        sampling=fault.sampling,
        model=Component("mlp", {"hidden": (128,)}),
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_audit_finds(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(fault)
    claim = claimed(spec)
    fault.plant(monkeypatch)
    assert audited(spec, trainer_of(spec, tmp_path)).everyone.epsilon > claim


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_audit_accuses_no_run_without_the_fault(fault: Fault, tmp_path: Path) -> None:
    spec = spec_of(fault)
    assert audited(spec, trainer_of(spec, tmp_path)).everyone.epsilon <= claimed(spec)
