"""One contract for every noise schedule, then each schedule against its formula."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.samplings import PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.schedules import (
    SCHEDULES,
    NoiseSchedule,
    make_schedule,
    parse_schedule,
    planned_trace,
    split_schedule,
    with_initial,
)
from dpsweep.accounting.mechanism.trace import SideQuery

EXAMPLES = {
    "constant": {},
    "time": {"decay": 0.05},
    "exponential": {"decay": 0.01},
    "step": {"factor": 0.6, "period": 10},
    "polynomial": {"power": 3.0, "end_noise_multiplier": 2.0, "period": 100},
    "linear": {"end_noise_multiplier": 2.0, "period": 50},
    "cosine": {"end_noise_multiplier": 2.0, "period": 50},
    "validation": {"factor": 0.7, "period": 5, "threshold": 0.01, "window": 3},
}
BAD_VALUES = (math.nan, math.inf, -1.0)


def example(name: str, sigma: float = 10.0, **changes: Any) -> NoiseSchedule:
    return make_schedule(name, sigma, **(EXAMPLES[name] | changes))


def test_every_schedule_has_an_example() -> None:
    assert set(EXAMPLES) == set(SCHEDULES)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("sigma", [10.0, 1e-300])
def test_its_runs_are_the_noise_of_every_epoch(name: str, sigma: float) -> None:
    schedule, accuracies = example(name, sigma, hold_before=3), [0.1 * (epoch % 7) for epoch in range(90)]
    every = [schedule.noise_multiplier(epoch, accuracies[:epoch]) for epoch in range(90)]
    assert [level for level, count in schedule.runs(90, accuracies) for _ in range(count)] == every
    assert list(schedule.runs(0)) == []


@pytest.mark.parametrize("name", EXAMPLES)
class TestContract:
    def test_starts_at_the_initial_value_and_never_rises(self, name: str) -> None:
        levels = [example(name).noise_multiplier(epoch) for epoch in range(200)]
        assert levels[0] == 10.0
        assert all(later <= earlier for earlier, later in itertools.pairwise(levels))
        assert all(level > 0.0 for level in levels)

    def test_is_a_pure_function_of_the_epoch(self, name: str) -> None:
        schedule = example(name)
        forwards = [schedule.noise_multiplier(epoch) for epoch in range(60)]
        backwards = [schedule.noise_multiplier(epoch) for epoch in reversed(range(60))]
        assert forwards == backwards[::-1]

    def test_holds_before_and_after_the_window(self, name: str) -> None:
        schedule, free = example(name, hold_before=7, hold_after=40), example(name)
        assert {schedule.noise_multiplier(epoch) for epoch in range(8)} == {10.0}
        assert [schedule.noise_multiplier(e) for e in range(7, 41)] == [free.noise_multiplier(e) for e in range(34)]
        assert {schedule.noise_multiplier(epoch) for epoch in range(40, 90)} == {free.noise_multiplier(33)}

    def test_refuses_impossible_parameters(self, name: str) -> None:
        for bad in BAD_VALUES:
            with pytest.raises(InvalidInput, match="initial_noise_multiplier"):
                example(name, sigma=bad)
            for key, value in EXAMPLES[name].items():
                if not (key == "threshold" and bad == -1.0):
                    with pytest.raises(InvalidInput, match=key):
                        example(name, **{key: bad if isinstance(value, float) else 0})

    def test_refuses_windows_that_end_before_they_start(self, name: str) -> None:
        with pytest.raises(InvalidInput, match="hold_after"):
            example(name, hold_before=5, hold_after=4)
        with pytest.raises(InvalidInput, match="whole"):
            example(name, hold_before=1.5)

    def test_refuses_negative_epochs(self, name: str) -> None:
        with pytest.raises(InvalidInput, match="epoch"):
            example(name).noise_multiplier(-1)

    def test_round_trips_through_text(self, name: str) -> None:
        listed = ",".join(f"{key}={value!r}" for key, value in EXAMPLES[name].items())
        assert parse_schedule(f"{name}:{listed}", 10.0) == example(name)

    def test_with_initial_changes_only_the_first_value(self, name: str) -> None:
        assert with_initial(example(name), 4.0) == example(name, sigma=4.0)


@pytest.mark.parametrize(
    ("name", "epoch", "expected"),
    [
        ("constant", 90, 10.0),
        ("time", 20, 10.0 / (1.0 + 0.05 * 20)),
        ("exponential", 20, 10.0 * math.exp(-0.2)),
        ("step", 29, 10.0 * 0.6**2),
        ("polynomial", 30, 8.0 * 0.7**3 + 2.0),
        ("polynomial", 100, 2.0),
        ("polynomial", 150, 2.0),
        ("linear", 25, 6.0),
        ("cosine", 25, 6.0),
        ("cosine", 10, 6.0 + 4.0 * math.cos(math.pi / 5)),
    ],
)
def test_formula(name: str, epoch: int, expected: float) -> None:
    assert example(name).noise_multiplier(epoch) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", ["time", "exponential"])
def test_every_changes_the_noise_in_steps(name: str) -> None:
    stepped, smooth = example(name, every=5), example(name)
    assert [stepped.noise_multiplier(e) for e in range(20)] == [smooth.noise_multiplier(e // 5) for e in range(20)]


class TestValidation:
    schedule = make_schedule("validation", 10.0, factor=0.5, period=4, threshold=0.1, window=2)

    @pytest.mark.parametrize(
        ("accuracies", "level"),
        [
            pytest.param([0.0, 0.0, 0.0], 10.0, id="before the first check"),
            pytest.param([0.0, 0.0, 0.5, 0.5], 10.0, id="it improves"),
            pytest.param([0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.7, 0.7], 10.0, id="it improves again"),
            pytest.param([0.0, 0.0, 0.5, 0.5, 0.9, 0.9, 0.55, 0.55], 5.0, id="the mean of the window stalls"),
            pytest.param([0.0, 0.0, 0.5, math.nan], 5.0, id="an evaluation that failed is a stall"),
        ],
    )
    def test_noise_falls_where_accuracy_stalls(self, accuracies: list[float], level: float) -> None:
        assert self.schedule.noise_multiplier(len(accuracies), accuracies) == level

    def test_an_improvement_of_exactly_the_threshold_is_a_stall(self) -> None:
        exact = make_schedule("validation", 10.0, factor=0.5, period=1, threshold=0.25)
        assert exact.noise_multiplier(1, [0.25]) == 5.0
        assert exact.noise_multiplier(1, [0.2500001]) == 10.0

    @given(st.lists(st.floats(0.0, 1.0), max_size=40))
    def test_the_plan_without_history_is_the_lowest_noise(self, accuracies: list[float]) -> None:
        for epoch in range(len(accuracies) + 1):
            planned, actual = self.schedule.noise_multiplier(epoch), self.schedule.noise_multiplier(epoch, accuracies)
            assert planned <= actual

    def test_does_not_look_into_the_future(self) -> None:
        history = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7]
        assert self.schedule.noise_multiplier(5, history) == self.schedule.noise_multiplier(5, history[:5])

    def test_whole_numbers_may_be_written_as_decimals(self) -> None:
        written = make_schedule("validation", 10.0, factor=0.5, period=4.0, threshold=0.1, window=2.0, hold_before=1.0)
        history = [0.9, 0.0, 0.0, 0.5, 0.5, 0.6]
        assert written.noise_multiplier(9, history) == self.schedule.noise_multiplier(8, history[1:])

    def test_refuses_a_window_longer_than_the_period(self) -> None:
        with pytest.raises(InvalidInput, match="window"):
            make_schedule("validation", 1.0, factor=0.5, period=2, window=3)


class TestText:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("exponental:decay=0.1", "did you mean 'exponential'"),
            ("time:decai=0.1", "did you mean 'decay'"),
            ("time", "needs decay"),
        ],
    )
    def test_mistakes_are_named(self, text: str, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            parse_schedule(text, 1.0)

    def test_says_whose_parameter_is_impossible(self) -> None:
        with pytest.raises(InvalidInput, match=r"^noise schedule 'time': decay is 'fast', but must be a number$"):
            make_schedule("time", 1.0, decay="fast")

    @pytest.mark.parametrize("text", ["time:decay", "time:decay=1,decay=2", "time:decay=fast"])
    def test_refuses_malformed_parameters(self, text: str) -> None:
        with pytest.raises(InvalidInput, match="schedule parameter"):
            split_schedule(text)


class TestPlannedTrace:
    def test_an_epoch_is_one_segment_and_equal_neighbours_merge(self) -> None:
        trace = planned_trace(example("step"), PoissonSampling(0.1), 25, 10, 1000)
        assert [(s.start_step, s.steps) for s in trace.segments] == [(0, 100), (100, 100), (200, 50)]
        assert [s.noise_multiplier for s in trace.segments] == [10.0, 6.0, 10.0 * 0.6**2]
        assert trace.adjacency == "add_remove"

    def test_side_queries_join_every_segment(self) -> None:
        side = (SideQuery("counts", 5.0),)
        trace = planned_trace(example("time"), ShuffledSampling(4), 3, 4, 100, side)
        assert all(segment.side_queries == side for segment in trace.segments)
        assert trace.adjacency == "zero_out"
        assert trace.steps == 12

    def test_noise_that_has_vanished_is_no_noise(self) -> None:
        trace = planned_trace(example("exponential", decay=100.0), PoissonSampling(0.1), 5, 10, 1000)
        assert trace.segments[-1].noise_multiplier == 0.0
        assert not trace.is_private

    def test_refuses_another_number_of_shuffled_batches(self) -> None:
        with pytest.raises(InvalidInput, match="steps_per_epoch"):
            planned_trace(example("constant"), ShuffledSampling(4), 3, 5, 100)
