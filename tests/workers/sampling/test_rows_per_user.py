"""How many users have how many rows is released with the noise that its guarantee states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from dpsweep.accounting import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.mechanism.units import EXAMPLE, User
from dpsweep.workers.sampling.rows_per_user import median_rows, release_of, released

HISTOGRAM = ((1, 300), (2, 50), (3, 40), (4, 40), (7, 90), (30_000, 60))


class Drawn:
    """Draws that are the same number of standard deviations, and remembers how many it gave."""

    def __init__(self, deviations: float) -> None:
        self.deviations, self.count = deviations, 0

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> npt.NDArray[np.float64]:
        self.count += int(np.prod(size))
        return np.full(size, loc + scale * self.deviations)


def test_every_bin_gets_noise_and_small_counts_are_left_out() -> None:
    exact = Drawn(0.0)
    assert released(HISTOGRAM, 2.0, exact) == ((1, 300), (2, 50), (3, 80), (6, 90), (12288, 60))
    assert exact.count == 15, "empty bins get noise, too"
    assert released(HISTOGRAM, 10.0, Drawn(1.5)) == ((1, 315), (2, 65), (3, 95), (6, 105), (12288, 75))
    assert released(HISTOGRAM, 18.0, Drawn(0.0)) == ((1, 300), (3, 80), (6, 90), (12288, 60))


def test_one_user_changes_one_count_by_one() -> None:
    before = dict(released(HISTOGRAM, 1.0, Drawn(0.0)))
    for rows in (1, 2, 4, 8, 9, 10_000, 10**9):
        more = dict(HISTOGRAM)
        more[rows] = more.get(rows, 0) + 1
        after = dict(released(tuple(sorted(more.items())), 1.0, Drawn(5.0)))
        assert sum(after.values()) - sum(before.values()) == 15 * 5 + 1


@pytest.mark.parametrize("rows", [1, 7])
def test_a_release_costs_a_user_the_same_however_users_are_sampled(rows: int) -> None:
    unit = User(rows)
    cost = account(Trace(10, (), (release_of(3.0, unit),), unit=unit), 1e-5).epsilon
    assert cost == pytest.approx(account(Trace(10, (), (release_of(3.0, EXAMPLE),)), 1e-5).epsilon, rel=1e-6)


def test_the_median_user() -> None:
    assert [median_rows(each) for each in (((1, 5),), ((1, 5), (2, 1), (9, 5)), ((1, 1), (9, 5)))] == [1, 2, 9]


def test_what_cannot_be_released_is_refused() -> None:
    with pytest.raises(InvalidInput, match="name no users"):
        released((), 2.0, Drawn(0.0))
    with pytest.raises(InvalidInput, match="noise multiplier of rows per user"):
        released(HISTOGRAM, 0.5, Drawn(0.0))
