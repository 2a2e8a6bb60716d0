"""What a trial's spec is refused for before anything is written, and what may be run again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.workers.clipping.clipping_method import PrivateMedian
from dpsweep.workers.spec import BudgetSpec, Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec
from dpsweep.workers.training.augmentation import FlipAndCrop
from dpsweep.workers.training.frozen_features import FrozenFeatures
from dpsweep.workers.training.preprocessing import DPPCA
from dpsweep.workers.trials.trial import run_trial
from tests.workers.trial_specs import small_trial


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": DataSpec("digits", keep={"8": math.nan})}, "data.keep.8.* is None, but"),
        ({"noise": NoiseSpec(1e300)}, "noise_multiplier is 1e\\+300, but must be at most"),
        ({"sampling": SamplingSpec("poisson", 2.5)}, "sampling.batch_size is 2.5"),  # type: ignore[arg-type]
        ({"sampling": SamplingSpec("fixed", "x")}, "sampling.batch_size is 'x'"),  # type: ignore[arg-type]
        ({"norms": NormSpec(exact_examples=1.5)}, "norms.exact_examples is 1.5"),  # type: ignore[arg-type]
        ({"model": Component("mlp", {"hidden": object()})}, "written as JSON"),
    ],
)
def test_impossible_fields_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_trial(small_trial(**changes), str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: small_trial(delta=math.nan), "^delta is nan, but must be a finite number"),
        (lambda: small_trial(delta=-1.0), "^delta is -1.0, but must be greater than 0"),
        (lambda: small_trial(epochs=10**12), "^epochs is 1000000000000.*, but must be at most 10000000"),
        (lambda: small_trial(epochs=0), "^epochs is 0.*, but must be at least 1"),
        (lambda: small_trial(epochs=True), "^epochs is True, but must be a number"),
        (lambda: small_trial(seed=2**70), "^seed is .* but must be less than"),
        (lambda: small_trial(seed=2**63), "^seed is .* but must be less than"),
        (
            lambda: small_trial(noise_source="os_entropi"),
            "unknown noise source 'os_entropi'; did you mean",
        ),
        (lambda: NoiseSpec(math.inf), "noise.initial_noise_multiplier is inf, but must be a finite number"),
        (lambda: NoiseSpec(-1.0), "noise.initial_noise_multiplier is -1.0, but must be at least 0"),
        (lambda: SamplingSpec("poisson", 0), "sampling.batch_size is 0, but must be at least 1"),
        (lambda: DataSpec("digits", test_fraction=1.0), "data.test_fraction is 1.0, but must be less than 1"),
        (lambda: DataSpec("digits", test_fraction=0.0), "data.test_fraction is 0.0, but must be greater than 0"),
        (lambda: DataSpec("digits", public_fraction=1.0), "data.public_fraction is 1.0, but must be less than 1"),
        (lambda: DataSpec("digits", split_seed=-1), "data.split_seed is -1, but must be at least 0"),
        (lambda: BudgetSpec(rho=0.0), "budget.rho is 0.0, but must be greater than 0"),
        (lambda: BudgetSpec(), "rho None and epsilon None; give exactly one"),
        (lambda: BudgetSpec(rho=1.0, epsilon=1.0), "rho 1.0 and epsilon 1.0; give exactly one"),
        (lambda: NormSpec(rows_per_part=0), "norms.rows_per_part is 0, but must be at least 1"),
        (lambda: NormSpec(refreshes_per_epoch=0.0), "norms.refreshes_per_epoch is 0.0, but must be greater than 0"),
        (lambda: NormSpec(exact_examples=-1), "norms.exact_examples is -1, but must be at least 0"),
        (lambda: ExecutionSpec(threads=0), "execution.threads is 0, but must be at least 1"),
        (lambda: ExecutionSpec(micro_batch_size=0), "execution.micro_batch_size is 0, but must be at least 1"),
        (lambda: ExecutionSpec(checkpoint_every_epochs=1e-310), "execution.checkpoint_every_epochs is 1e-310"),
        (lambda: ExecutionSpec(deterministic=False, checkpoint_every_epochs=2), "set checkpoint_every_epochs to at m"),
    ],
)
def test_a_section_out_of_bounds_is_never_built(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()


def test_a_word_in_place_of_a_number_has_no_bounds() -> None:
    assert NormSpec("every_step").refreshes_per_epoch == "every_step"
    assert ExecutionSpec(micro_batch_size=None).micro_batch_size is None


def test_a_seed_is_known_only_where_random_choices_follow_it() -> None:
    sources = ("seeded", "os_entropy", "os_entropy_secure")
    assert [small_trial(noise_source=source, seed=3).known_seed for source in sources] == [3, None, None]


def test_parameters_in_a_tuple_are_those_in_a_list(tmp_path: Path) -> None:
    """JSON knows lists only."""
    spec = small_trial(model=Component("mlp", {"hidden": (4,)}), epochs=1)
    assert run_trial(spec, str(tmp_path)) == run_trial(spec, str(tmp_path))


def test_a_finished_trial_refuses_other_releases(tmp_path: Path) -> None:
    """Its trace says what it cost, and would not count them."""
    releases = (GaussianRelease("statistics", 9.0),)
    first = run_trial(small_trial(epochs=1), str(tmp_path), releases=releases)
    assert run_trial(small_trial(epochs=1), str(tmp_path), releases=releases) == first
    for others in ((GaussianRelease("statistics", 3.0),), (*releases, *releases)):
        with pytest.raises(InvalidInput, match="a finished trial with the releases"):
            run_trial(small_trial(epochs=1), str(tmp_path), releases=others)


@pytest.mark.parametrize(
    ("component", "field"),
    [
        (DPPCA(dimensions=5.0), "dimensions"),  # type: ignore[arg-type]
        (FlipAndCrop(multiplicity=2.0, padding=1.0), "multiplicity"),  # type: ignore[arg-type]
        (FlipAndCrop(multiplicity=2.0, padding=1.0), "padding"),  # type: ignore[arg-type]
        (FrozenFeatures(size=32.0), "size"),  # type: ignore[arg-type]
        (PrivateMedian(1.0, rounds=9.0), "rounds"),  # type: ignore[arg-type]
    ],
)
def test_whole_numbers_written_as_floats_count_as_such(component: object, field: str) -> None:
    assert type(getattr(component, field)) is int
