"""Audits of correlated noise by canaries among the rows, and made-up ones: `pytest -m audit` runs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting.mechanism.noise_strategies import Recurrence
from dpsweep.workers.noise.gaussian_sources import StepDraws
from dpsweep.workers.noise.step_noise import NoiseShare
from dpsweep.workers.spec import Component, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from tests.workers.training import test_gradient_canaries as of_gradients
from tests.workers.training import test_one_run_audit as of_rows

pytestmark = [pytest.mark.audit, pytest.mark.long]


def correlated(noise: Component, sampling: SamplingSpec) -> TrialSpec:
    """Canaries among the rows, whose gradients are orthogonal and of one length; an epsilon of about 1."""
    return replace(
        of_rows.spec(seed=1),
        noise=NoiseSpec(50.0, noise),
        sampling=sampling,
        epochs=100,
        norms=NormSpec(),
        optimizer=Component("sgd", {"learning_rate": 1e-3}),
    )


CORRELATED = {
    "lambda in one order": correlated(Component("lambda_cgd", {"decay": 0.5}), SamplingSpec("fixed_order", 100)),
    "bisr in one order": replace(
        correlated(Component("bisr", {"bands": 8}), SamplingSpec("fixed_order", 100)),
        noise=NoiseSpec(150.0, Component("bisr", {"bands": 8})),
        epochs=900,  # what a wrong buffer shows grows with them, at the same epsilon
        optimizer=Component("sgd", {"learning_rate": 1e-4}),
    ),
    "buffers in one order": correlated(Component("blt", {"buffers": 2}), SamplingSpec("fixed_order", 100)),
    "banded in one order": correlated(Component("banded", {"bands": 4}), SamplingSpec("fixed_order", 100)),
    "banded in turns": correlated(
        Component("banded", {"bands": 4}), SamplingSpec("cyclic_poisson", 100, cycle_length=4)
    ),
}


@pytest.mark.parametrize("name", CORRELATED)
def test_rows_accuse_no_run_of_correlated_noise(name: str, tmp_path: Path) -> None:
    spec = CORRELATED[name]
    assert of_rows.audited(spec, of_rows.trainer_of(spec, tmp_path)).everyone.epsilon <= of_rows.claimed(spec)


def take_off_all_of_the_last_draw(patch: pytest.MonkeyPatch) -> None:
    """The noise of the sum of all gradients is then that of one step."""
    made = NoiseShare.__init__

    def wrong(self: NoiseShare, recurrence: Recurrence, draws: StepDraws) -> None:
        made(self, replace(recurrence, of_draws=np.array([1.0, -1.0])), draws)

    patch.setattr(NoiseShare, "__init__", wrong)


@pytest.mark.parametrize("name", ["lambda in one order", "bisr in one order"])
def test_rows_find_a_wrong_buffer_of_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CORRELATED[name]
    claim = of_rows.claimed(spec)
    take_off_all_of_the_last_draw(monkeypatch)
    assert of_rows.audited(spec, of_rows.trainer_of(spec, tmp_path)).everyone.epsilon > claim


@pytest.mark.parametrize("planted", [False, True])
def test_made_up_canaries_find_a_wrong_buffer_too(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, sampling = NoiseSpec(30.0, Component("lambda_cgd", {"decay": 0.5})), SamplingSpec("fixed_order", "full")
    spec = of_gradients.trial(sampling=sampling, noise=noise, epochs=100)
    claim = of_gradients.claimed(spec)
    if planted:
        take_off_all_of_the_last_draw(monkeypatch)
    assert (of_gradients.audited(of_gradients.trainer_of(spec, tmp_path)).everyone.epsilon > claim) is planted
