"""What a trial's spec is refused for before anything is written, and what may be run again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from accounting.errors import InvalidInput
from accounting.mechanism import GaussianRelease
from tests.workers.trial_specs import small_trial
from workers.augmentation import FlipAndCrop
from workers.clipping.bounds import PrivateMedian
from workers.preprocessing import DPPCA, FrozenFeatures
from workers.spec import Component, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec
from workers.trial import run_trial


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": math.nan}, "delta is None in JSON"),
        ({"delta": -1.0}, "delta is -1.0, but must be greater than 0"),
        ({"epochs": 10**12}, "epochs is 1000000000000, but must be at most"),
        ({"seed": 2**70}, "seed is .* but must be less than"),
        ({"noise": NoiseSpec(1e300)}, "noise_multiplier is 1e\\+300, but must be at most"),
        ({"noise": NoiseSpec(math.inf)}, "noise.initial_noise_multiplier is None in JSON"),
        ({"sampling": SamplingSpec("poisson", 2.5)}, "sampling.batch_size is 2.5"),  # type: ignore[arg-type]
        ({"sampling": SamplingSpec("fixed", "x")}, "sampling.batch_size is 'x'"),  # type: ignore[arg-type]
        ({"norms": NormSpec(exact_examples=1.5)}, "norms.exact_examples is 1.5"),  # type: ignore[arg-type]
        ({"norms": NormSpec(rows_per_part=0)}, "norms.rows_per_part is 0"),
        ({"execution": ExecutionSpec(threads=0)}, "execution.threads is 0"),
        ({"execution": ExecutionSpec(micro_batch_size=0)}, "micro_batch_size is 0"),
        ({"execution": ExecutionSpec(checkpoint_every_epochs=1e-310)}, "checkpoint_every_epochs is 1e-310"),
        ({"model": Component("mlp", {"hidden": object()})}, "written as JSON"),
    ],
)
def test_impossible_fields_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_trial(small_trial(**changes), str(tmp_path))
    assert not list(tmp_path.iterdir())


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
