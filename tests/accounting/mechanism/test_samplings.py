"""One contract for every sampling, and what a new one takes: a class and its line in the registry."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from dpsweep.accounting import (
    SAMPLINGS,
    FixedBatchSampling,
    InvalidInput,
    PoissonSampling,
    Sampling,
    Segment,
    ShuffledSampling,
    Trace,
    UnsupportedMechanism,
    account,
    individual_epsilons,
    make_schedule,
    read_trace,
    write_trace,
)
from dpsweep.accounting.mechanism.samplings import Adjacency, Array, Draws
from dpsweep.accounting.pld import epsilon_of_examples, group_law
from dpsweep.orchestration.commands.run_flags import RunFlags
from dpsweep.workers.sampling.samplers import SAMPLERS, planned_sampling
from dpsweep.workers.spec import SamplingSpec

every_sampling = pytest.mark.parametrize("name", SAMPLINGS)


def trace_of(sampling: Sampling, adjacency: Adjacency | None = None) -> Trace:
    return Trace(100, (Segment(0, 30, sampling, 2.0),), adjacency=adjacency or sampling.adjacencies[0])


@every_sampling
def test_steps_per_epoch_are_the_batches_that_hold_the_data_once(name: str) -> None:
    draw = random.Random(0)
    for _ in range(3000):
        size = draw.randint(1, 10 ** draw.randint(1, 11))
        batch = draw.choice([1, size, draw.randint(1, size), max(1, size // draw.randint(1, 999))])
        if batch / size >= 1e-12:
            assert SAMPLINGS[name].of_sizes(size, batch).steps_per_epoch == -(-size // batch)


@every_sampling
@pytest.mark.parametrize("batch", [0, 101, 1.5])
def test_sizes_that_no_batch_can_have_are_refused(name: str, batch: float) -> None:
    with pytest.raises(InvalidInput, match=f"batch_size is {batch}, but"):
        SAMPLINGS[name].of_sizes(100, batch)  # type: ignore[arg-type]


@every_sampling
def test_accounted_for_under_its_own_adjacencies_only(name: str) -> None:
    sampling = SAMPLINGS[name].of_sizes(100, 10)
    for adjacency in sampling.adjacencies:
        assert account(trace_of(sampling, adjacency), 1e-5).epsilon < math.inf
    for other in {"add_remove", "zero_out", "replace_one"} - set(sampling.adjacencies):
        with pytest.raises(UnsupportedMechanism, match=f"{sampling.words} .* no accounting under '{other}'"):
            trace_of(sampling, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "law"),
    [
        (PoissonSampling(0.3), stats.binom(4, 0.3)),
        (FixedBatchSampling(20, 6), stats.hypergeom(20, 4, 6)),
        (ShuffledSampling(3), stats.binom(4, 1.0)),
    ],
)
def test_members_drawn(sampling: Sampling, law: stats.rv_discrete) -> None:
    mixture = group_law(sampling, 4)
    np.testing.assert_allclose(mixture.probabilities, law.pmf(mixture.sensitivities), rtol=1e-12)
    assert sum(mixture.probabilities) == pytest.approx(1.0)


def test_every_sampling_has_a_sampler_and_a_name_of_its_own_in_files() -> None:
    assert list(SAMPLERS) == list(SAMPLINGS)
    assert len({kind.stored_name for kind in SAMPLINGS.values()}) == len(SAMPLINGS)


def test_a_trial_names_a_registered_sampling() -> None:
    spec = TypeAdapter(SamplingSpec)
    for name in SAMPLINGS:
        assert spec.validate_python({"method": name, "batch_size": 5}) == SamplingSpec(name, 5)
    with pytest.raises(ValidationError, match=r"'poisson', 'fixed', .* 'cyclic_poisson' or 'fixed_order'"):
        spec.validate_python({"method": "stratified", "batch_size": 5})


@dataclass(frozen=True)
class SkippedSampling:
    """A coin decides whether a step has a batch at all; if so, it is a fixed one of ``batch_size``."""

    stored_name: ClassVar[str] = "skipped"
    words: ClassVar[str] = "skipped batches"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove",)
    draws: ClassVar[Draws] = Draws.SUBSET
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 1

    dataset_size: int
    batch_size: int
    held: float

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int) -> Self:
        return cls(dataset_size, batch_size, 0.5)

    @property
    def sample_rate(self) -> float:
        return self.held * self.batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(1.0 / self.sample_rate)

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        counts, weights = FixedBatchSampling(self.dataset_size, self.batch_size).members_drawn(group_size)
        chances = np.exp(weights) / np.exp(weights).sum() * self.held
        chances[0] += 1.0 - self.held
        return counts, np.log(chances)

    def require_fits(self, dataset_size: int) -> None:
        FixedBatchSampling(self.dataset_size, self.batch_size).require_fits(dataset_size)


class TestANewSampling:
    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(SAMPLINGS, "skipped", SkippedSampling)

    def test_is_planned_by_trials_and_by_the_command_line(self) -> None:
        assert planned_sampling(SamplingSpec("skipped", 10), 100) == SkippedSampling(100, 10, 0.5)
        flags = RunFlags(sampling="skipped", dataset_size=100, batch_size=10, epochs=2)
        assert flags.trace(make_schedule("constant", 2.0)) == Trace(
            100, (Segment(0, 40, SkippedSampling(100, 10, 0.5), 2.0),)
        )
        with pytest.raises(InvalidInput, match=r"unknown sampling .*stratified.* skipped"):
            RunFlags(sampling="stratified").mechanism()

    def test_is_stored(self, tmp_path: Path) -> None:
        mine = trace_of(SkippedSampling(100, 10, 0.25))
        write_trace(str(tmp_path / "mine.arrow"), mine)
        assert read_trace(str(tmp_path / "mine.arrow")) == mine

    @pytest.mark.parametrize("accountant", ["rdp", "pld"])
    def test_is_accounted_for(self, accountant: str) -> None:
        """An example is drawn with probability q and displaces another: Poisson batches of twice the sensitivity."""
        mine = trace_of(SkippedSampling(100, 10, 0.5))
        same = Trace(100, (Segment(0, 30, PoissonSampling(0.05), 1.0),))
        assert account(mine, 1e-5, accountant).epsilon == pytest.approx(
            account(same, 1e-5, accountant).epsilon, rel=1e-3
        )
        alone = individual_epsilons([0], [[1.0]], mine, 1e-5, accountant)
        assert alone.upper[0] == pytest.approx(account(same, 1e-5, accountant).epsilon, rel=1e-2)

    def test_its_groups_are_accounted_for(self) -> None:
        mine, always = trace_of(SkippedSampling(100, 10, 0.5)), trace_of(FixedBatchSampling(100, 10))
        group = account(mine, 1e-5, "pld", 3).epsilon
        assert account(mine, 1e-5, "pld").epsilon < group < account(always, 1e-5, "pld", 3).epsilon
        given = epsilon_of_examples(mine, [0], [[1.0]] * 3, 1e-5).upper
        assert given == pytest.approx(group, rel=1e-2)


def test_an_epoch_has_no_more_batches_than_examples() -> None:
    ShuffledSampling(5).require_fits(5)
    with pytest.raises(InvalidInput, match="an epoch over 5 examples has at most as many batches"):
        ShuffledSampling(6).require_fits(5)
