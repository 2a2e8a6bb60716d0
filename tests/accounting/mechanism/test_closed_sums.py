"""Samplings and noise strategies are closed sums: no function of `accounting` takes an unknown one for a usual one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from dpsweep import accounting
from dpsweep.accounting import (
    ACCOUNTANTS,
    SAMPLINGS,
    DataCorruption,
    EpsilonBudget,
    PoissonSampling,
    RandomAllocationSampling,
    RhoBudget,
    Segment,
    Trace,
    UnsupportedMechanism,
    make_schedule,
    planned_trace,
    read_trace,
    write_trace,
)
from dpsweep.accounting.accountants.paper_only import algorithm_2
from dpsweep.accounting.mechanism.noise_strategies import NoiseStrategy
from dpsweep.accounting.mechanism.samplings import Array, Draws, draws_by_epoch
from dpsweep.accounting.pld.groups import delta_pld
from tests.accounting.accountants.test_truncated import COSTS, DELTA, SOLVERS

BUDGET = EpsilonBudget(1.0, DELTA)


@dataclass(frozen=True)
class WeeklySampling:
    """Poisson batches, but for everything that decides which theorems apply."""

    stored_name: ClassVar[str] = "weekly"
    words: ClassVar[str] = "weekly batches"
    adjacencies: ClassVar[tuple[str, ...]] = ("add_remove", "zero_out")
    draws: ClassVar[Any] = Draws.INDEPENDENT
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 0

    sample_rate: float = 0.1
    steps_per_epoch: ClassVar[int] = 10

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        return PoissonSampling(self.sample_rate).members_drawn(group_size)

    def require_fits(self, dataset_size: int) -> None:
        """Accepts every size."""


@dataclass(frozen=True)
class WayOfItsOwn(WeeklySampling):
    draws: ClassVar[Any] = "weekly"


@dataclass(frozen=True)
class UnknownNoise:
    stored_name: ClassVar[str] = "unknown"
    words: ClassVar[str] = "unknown noise"


def planted(part: Any, field: str, value: object) -> Any:
    """``part`` with a value that its own checks would refuse."""
    changed = copy.copy(part)
    object.__setattr__(changed, field, value)
    return changed


def with_sampling(trace: Trace, sampling: object) -> Trace:
    segments = tuple(planted(segment, "sampling", sampling) for segment in trace.segments)
    changed: Trace = planted(trace, "segments", segments)
    return changed


PLANTS: dict[str, Callable[[Trace], Trace]] = {
    "a sampling that is not registered": lambda trace: with_sampling(trace, WeeklySampling()),
    "a sampling that draws in a way of its own": lambda trace: with_sampling(trace, WayOfItsOwn()),
    "a noise strategy": lambda trace: cast(Trace, planted(trace, "strategy", UnknownNoise())),
}

OTHERS: dict[str, Callable[[Callable[[float], Trace], Path], object]] = {
    "RhoBudget": lambda of, _: RhoBudget(1.0).cost(of(1.0)),
    "calibrate_decay": lambda of, _: accounting.calibrate_decay("time", 1.0, 3, BUDGET, lambda *_: of(1.0)),
    "count_within_budget": lambda of, _: accounting.count_within_budget(lambda _: of(1.0), BUDGET, 3),
    "length_within_budget": lambda of, _: accounting.length_within_budget(lambda _: of(1.0), BUDGET, 3),
    "write_trace": lambda of, folder: write_trace(str(folder / "trace.arrow"), of(1.0)),
}
"""Functions that take a trace, beside those that say what it costs."""

WITHOUT_TRACE = {"SAMPLINGS", "SCHEDULES", "make_schedule", "parse_schedule", "planned_trace", "read_trace"}


def test_every_public_function_is_tried() -> None:
    functions = {name for name in accounting.__all__ if not isinstance(getattr(accounting, name), type)}
    assert functions - {"Release"} <= {*COSTS, *SOLVERS, *OTHERS, *WITHOUT_TRACE}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_unknown_is_refused_by_name(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLINGS, "own", WayOfItsOwn)

    def trace_of(noise_multiplier: float) -> Trace:
        return PLANTS[plant](Trace(100, (Segment(0, 3, PoissonSampling(0.1), noise_multiplier),)))

    calls: dict[str, Callable[[], object]] = {
        **{name: partial(cost, trace_of(2.0)) for name, cost in COSTS.items()},
        **{name: partial(solve, trace_of) for name, solve in SOLVERS.items()},
        **{name: partial(call, trace_of, tmp_path) for name, call in OTHERS.items()},
        **{f"accountant {name}": partial(ask, trace_of(2.0), DELTA, 1) for name, ask in ACCOUNTANTS.items()},
        **{f"{name} of a group": partial(ask, trace_of(2.0), DELTA, 2) for name, ask in ACCOUNTANTS.items()},
        **{f"{name} without noise": partial(ask, trace_of(0.0), DELTA, 1) for name, ask in ACCOUNTANTS.items()},
        "algorithm_2": partial(algorithm_2, [0], [[1.0]], trace_of(2.0), DELTA),
    }
    for name, call in calls.items():
        with pytest.raises(UnsupportedMechanism, match="no accountant knows the"):
            pytest.fail(f"{name} says {call()}")
    assert not list(tmp_path.iterdir())


def test_an_unknown_sampling_is_not_planned_nor_taken_for_steps() -> None:
    for unknown in (WeeklySampling(), WayOfItsOwn()):
        with pytest.raises(UnsupportedMechanism, match="no accountant knows the sampling W"):
            planned_trace(make_schedule("constant", 1.0), unknown, 1, 10, 100)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedMechanism, match=r"use PoissonSampling, FixedBatchSampling, .* or Truncated"):
            draws_by_epoch(unknown)  # type: ignore[arg-type]


@dataclass(frozen=True)
class NewBlocks(WeeklySampling):
    """One step of every ten, as randomly allocated batches; its rate may be wrong."""

    words: ClassVar[str] = "new blocks"
    draws: ClassVar[Any] = Draws.ALLOCATED
    steps_per_round: ClassVar[int] = 10
    sample_rate: float = 1.0

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        return RandomAllocationSampling(10).members_drawn(group_size)


def answer(call: Callable[[], object]) -> object:
    """What a call returns, or the text of its refusal, without the name of the sampling."""
    try:
        return call()
    except UnsupportedMechanism as error:
        return str(error).replace("new blocks", "randomly allocated batches")


def test_a_new_sampling_costs_by_the_way_it_draws_and_not_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLINGS, "own", NewBlocks)
    own, known = (
        Trace(100, (Segment(0, 20, cast(Any, sampling), 2.0),))
        for sampling in (NewBlocks(), RandomAllocationSampling(10))
    )
    for name, ask in ACCOUNTANTS.items():
        for size in (1, 2):
            found = answer(partial(ask, own, DELTA, size))
            assert found == answer(partial(ask, known, DELTA, size)), f"{name}, groups of {size}"
    rows = [accounting.individual_epsilons([0], [[0.5], [1.0]], each, DELTA).upper.tolist() for each in (own, known)]
    assert rows[0] == rows[1]
    assert delta_pld(own, 1.0) == delta_pld(known, 1.0)


@pytest.mark.parametrize("draws", [Draws.EPOCH, Draws.ALLOCATED])
def test_rounds_of_several_steps_that_leave_examples_out_are_refused(
    draws: Draws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAMPLINGS, "own", NewBlocks)
    monkeypatch.setattr(NewBlocks, "draws", draws)
    rare = with_sampling(Trace(100, (Segment(0, 20, PoissonSampling(0.1), 2.0),)), NewBlocks(0.1))
    for ask in ACCOUNTANTS.values():
        with pytest.raises(
            UnsupportedMechanism, match=r"leave no example out of a round, but their sample rate is 0\.1"
        ):
            ask(rare, DELTA, 1)


def test_a_file_that_names_an_unknown_sampling_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLINGS, "weekly", WeeklySampling)
    path = str(tmp_path / "trace.arrow")
    write_trace(path, Trace(100, (Segment(0, 3, WeeklySampling(), 2.0),)))  # type: ignore[arg-type]
    monkeypatch.delitem(SAMPLINGS, "weekly")
    with pytest.raises(DataCorruption, match="holds no trace of this version"):
        read_trace(path)


def test_a_trace_has_a_noise_strategy() -> None:
    with pytest.raises(
        UnsupportedMechanism, match="no accountant knows the noise strategy int; valid: independent, banded"
    ):
        Trace(100, strategy=3)  # type: ignore[arg-type]
    assert isinstance(Trace(100).strategy, NoiseStrategy)
