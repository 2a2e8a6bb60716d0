"""Trials with correlated noise: the noise that the trace states, the same bits after kills, and refusals by name."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import DpsweepError, UnsupportedMechanism
from dpsweep.accounting.mechanism.noise_strategies import BandedNoise, IndependentNoise, InverseRootNoise
from dpsweep.accounting.mechanism.samplings import CyclicPoissonSampling, FixedOrderSampling
from dpsweep.accounting.mechanism.toeplitz import column_norm
from dpsweep.accounting.records.traces import read_trace
from dpsweep.workers.clipping import make_clipping
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.spec import Component, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.tasks.losses import Loss
from dpsweep.workers.training.trial_mechanism import check_spec
from dpsweep.workers.trials.trial import run_trial
from tests.workers.devices import NAME
from tests.workers.rank_runs import ended, started
from tests.workers.resumption import assert_same_trial, run_with_deaths
from tests.workers.training.test_trainer import flat_parameters, new_trainer
from tests.workers.trial_runs import TRAIN_SIZE
from tests.workers.trial_specs import TUMOURS, TUMOURS_READ_ONCE, planned_mechanism, small_trial
from tests.workers.user_modules import code_of

CYCLIC = SamplingSpec("cyclic_poisson", 15, cycle_length=3)
IN_ORDER = SamplingSpec("fixed_order", 24)
BANDED = NoiseSpec(1.0, Component("banded", {"bands": 3}))
BISR = NoiseSpec(1.0, Component("bisr", {"bands": 3}))
LAMBDA = NoiseSpec(1.0, Component("lambda_cgd", {"decay": 0.6}))


def trial(sampling: SamplingSpec, noise: NoiseSpec, **changes: Any) -> TrialSpec:
    return small_trial(
        **{"data": TUMOURS_READ_ONCE, "sampling": sampling, "noise": noise, "norms": NormSpec(), **changes}
    )


def nothing() -> Loss:
    """A loss whose gradients are 0."""
    return lambda outputs, labels: (0.0 * outputs).sum(dim=1)


@pytest.mark.parametrize(
    ("sampling", "noise"), [(CYCLIC, BANDED), (IN_ORDER, BISR), (IN_ORDER, LAMBDA)], ids=["banded", "bisr", "lambda"]
)
def test_the_model_moves_by_the_noise_of_the_trace(sampling: SamplingSpec, noise: NoiseSpec, tmp_path: Path) -> None:
    """Without gradients, the steps of SGD are those of C^-1 w, for the draws w of the trial's own source."""
    spec = trial(
        sampling,
        noise,
        data=TUMOURS,
        loss=Component(f"{__file__}:nothing"),
        optimizer=Component("sgd", {"learning_rate": 1.0}),
        noise_source="os_entropy",
    )
    trainer = new_trainer(spec, tmp_path)
    twin = make_noise_source("os_entropy", 0, torch.device("cpu")).draws_of_steps()
    twin.restore(trainer.state()["earlier noise"]["draws"])
    places = [flat_parameters(trainer)]
    while trainer.may_continue():
        trainer.step()
        places.append(flat_parameters(trainer))
    moved = -np.diff(torch.stack(places).double().cpu().numpy(), axis=0)
    steps, size = moved.shape
    assert steps == trainer.total_steps
    draws = np.stack([twin.draw(step, 0, size).numpy() for step in range(steps)])
    strategy = trainer.trace().strategy
    assert not isinstance(strategy, IndependentNoise)
    column = np.pad(strategy.column(), (0, steps))[:steps]
    inverse = np.linalg.inv(linalg.toeplitz(column, np.zeros(steps)))
    scale = spec.noise.initial_noise_multiplier * column_norm(strategy.column()) / spec.sampling.expected_size(1)
    np.testing.assert_allclose(moved, scale * inverse @ draws, atol=1e-3 * scale)


KINDS: dict[str, TrialSpec] = {
    "turns": trial(CYCLIC, BANDED, epochs=1),
    "order": trial(IN_ORDER, LAMBDA),
    "own bounds": trial(CYCLIC, BANDED, clipping=Component("quantile"), epochs=1),
    "side queries": trial(CYCLIC, BANDED, clipping=Component("dpsgd_f"), epochs=1),
    "secret": trial(IN_ORDER, BISR, noise_source="os_entropy_secure", optimizer=Component("adam_corrected")),
}


@pytest.mark.parametrize("name", [*(pytest.param(each, marks=pytest.mark.long) for each in KINDS), "turns"])
def test_a_killed_trial_goes_on_with_the_same_bits_from_every_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KINDS[name]
    monkeypatch.setattr("dpsweep.accounting.records.keystream.fresh_key", lambda: bytes(32))
    monkeypatch.setattr("dpsweep.workers.noise.chacha.fresh_key", lambda: bytes(32))
    result = run_trial(spec, str(tmp_path / "undisturbed"), code=code_of(spec))
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, list(range(1, result.steps + 1)))
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")
    stored = read_trace(str(tmp_path / "resumed" / "trace.arrow"))
    assert stored.strategy == planned_mechanism(spec, TRAIN_SIZE).strategy


@pytest.mark.long
def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    trials = {name: KINDS[name] for name in ("turns", "order", "side queries")}
    ranks = started(trials, tmp_path / "together", 2)
    for name, spec in trials.items():
        run_trial(spec, str(tmp_path / "alone" / name), code=code_of(spec))
    assert ended(ranks) == [0, 0]
    for name in trials:
        models = [torch.load(tmp_path / way / name / "model.pt", weights_only=True) for way in ("alone", "together")]
        for key, values in models[0].items():
            torch.testing.assert_close(models[1][key], values, rtol=1e-5, atol=1e-5)
        traces = [read_trace(str(tmp_path / way / name / "trace.arrow")) for way in ("alone", "together")]
        assert traces[0] == traces[1]


WIDE = {
    name: trial(
        sampling,
        noise,
        model=Component("mlp", {"hidden": [2500]}),
        loss=Component(f"{__file__}:nothing"),
        norms=NormSpec("off"),
    )
    for name, sampling, noise in (("banded", CYCLIC, BANDED), ("bisr", IN_ORDER, BISR))
}


@pytest.mark.parametrize(("size", "name"), [(2, "banded"), *(pytest.param(4, e, marks=pytest.mark.long) for e in WIDE)])
def test_killed_ranks_make_the_noise_of_one_process_to_the_bit(size: int, name: str, tmp_path: Path) -> None:
    """Without gradients the model of 82,502 weights, two pieces on a CPU, moves by the noise alone."""
    spec = WIDE[name]
    run_trial(spec, str(tmp_path / "alone"), code=code_of(spec))
    for dies in (1, None):
        codes = ended(started({"together": spec}, tmp_path, size, dies=dies))
        assert (codes[1] == -signal.SIGKILL) if dies else codes == [0] * size
        parts = [each.name for each in (tmp_path / "together" / "private").glob("checkpoint.pt-*-*")]
        assert len(parts) == (size - 1 if dies and name == "banded" and NAME == "cpu" else 0)
    models = [torch.load(tmp_path / way / "model.pt", weights_only=True) for way in ("alone", "together")]
    assert all(torch.equal(models[1][key], values) for key, values in models[0].items())


def test_the_trace_of_a_trial_is_what_the_command_line_accounts_for(tmp_path: Path) -> None:
    """A shorter run, such as a stopped one, is the beginning of the same noise."""
    spec = trial(CYCLIC, BANDED)
    mechanism = planned_mechanism(spec, 90)
    assert mechanism.trace(2).strategy == mechanism.trace(1).strategy == BandedNoise(3, 12)
    assert mechanism.sampling == CyclicPoissonSampling(3, 0.5)
    assert account(mechanism.trace(1), 1e-5).epsilon < account(mechanism.trace(2), 1e-5).epsilon
    ordered = planned_mechanism(trial(IN_ORDER, BISR), 90)
    assert (ordered.sampling, ordered.strategy) == (FixedOrderSampling(4), InverseRootNoise(3, 8))
    assert ordered.trace(2).adjacency == "zero_out"


REFUSED: dict[str, tuple[TrialSpec, str]] = {
    **{
        f"batches of {method}": (
            trial(SamplingSpec(method, 24), BANDED),
            "no bound for banded noise with .* use cyclic",
        )
        for method in ("poisson", "fixed", "shuffle", "random_allocation")
    },
    "more bands than groups": (trial(SamplingSpec("cyclic_poisson", 24), BANDED), "reaches over 3 steps, but a cycle"),
    "bisr in turns": (trial(CYCLIC, BISR), "reaches over 14 steps, but a cycle has 3"),
    "side queries in one order": (
        trial(IN_ORDER, BANDED, clipping=Component("dpsgd_f")),
        "side queries beside banded noise in one fixed order",
    ),
    "thresholds": (
        trial(CYCLIC, BANDED, clipping=Component("individual")),
        "'individual' limits what single examples pay, but with cyclic Poisson batches and banded noise",
    ),
    "thresholds in one order": (
        trial(IN_ORDER, BANDED, clipping=Component("individual")),
        "'individual' limits what single examples pay, but with epochs of one order and banded noise",
    ),
    "norms": (trial(IN_ORDER, BANDED, norms=NormSpec(1.0)), "refreshes_per_epoch is 1.0, but with epochs of one order"),
    "replaced records": (trial(IN_ORDER, BANDED, adjacency="replace_one"), "no accounting under 'replace_one'"),
    "an unknown key": (trial(IN_ORDER, NoiseSpec(1.0, Component("banded", {"band": 3}))), "unknown key 'band' of"),
    "given steps": (trial(IN_ORDER, NoiseSpec(1.0, Component("banded", {"bands": 3, "steps": 9}))), "unknown key 's"),
    "a word": (trial(IN_ORDER, NoiseSpec(1.0, Component("bandd", {}))), "did you mean 'banded'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_proof_is_refused_by_name_in_plan_and_run(name: str, tmp_path: Path) -> None:
    spec, said = REFUSED[name]

    def planned() -> None:
        mechanism = planned_mechanism(spec, TRAIN_SIZE)
        check_spec(spec, mechanism, make_clipping(spec.clipping, NO_CODE), 10)

    for way in (planned, lambda: run_trial(spec, str(tmp_path), code=code_of(spec))):
        with pytest.raises(DpsweepError, match=said):
            way()


@pytest.mark.parametrize("sampling", [CYCLIC, SamplingSpec("poisson", 24)], ids=lambda sampling: sampling.method)
def test_no_filter_limits_correlated_noise(sampling: SamplingSpec) -> None:
    spec = trial(sampling, BANDED, clipping=Component("filter", {"bound": 2.0, "epsilon": 5.0}))
    with pytest.raises(UnsupportedMechanism):
        planned_mechanism(spec, TRAIN_SIZE)
