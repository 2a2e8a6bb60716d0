"""Tables are computed once in a process, while they fit into the bytes that it keeps of them."""

from __future__ import annotations

import numpy as np
import pytest

from dpsweep.accounting.individual import exact_composition, individual_epsilons
from dpsweep.accounting.individual.contour import Contour, MomentTable, moment_table
from dpsweep.accounting.individual.contributions import Array, StepLaw
from dpsweep.accounting.individual.table_cache import kept
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.pld import Direction


def test_the_least_recently_used_go_when_there_are_too_many_bytes() -> None:
    computed: list[int] = []

    @kept(3 * 80)
    def table(value: int) -> Array:
        computed.append(value)
        return np.full(10, float(value))

    for value in (1, 2, 3, 1, 4, 1, 2):
        np.testing.assert_array_equal(table(value), np.full(10, float(value)))
    assert computed == [1, 2, 3, 4, 2]
    assert not table(1).flags.writeable


def test_one_table_is_kept_whatever_its_size() -> None:
    computed: list[int] = []

    @kept(8)
    def table(value: int) -> Array:
        computed.append(value)
        return np.zeros(1000)

    assert table(1) is table(1)
    table(2)
    table(1)
    assert computed == [1, 2, 1]


def test_a_second_part_computes_no_table_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions so different that they need more than 64 contours."""
    computed: list[tuple[Contour, Direction]] = []

    def counted(law: StepLaw, precisions: Array, contour: Contour, direction: Direction) -> MomentTable:
        computed.append((contour, direction))
        return moment_table(law, precisions, contour, direction)

    monkeypatch.setattr(exact_composition, "moment_table", counted)
    trace = Trace(60_000, (Segment(0, 2000, PoissonSampling(0.013), 0.9),))
    values = np.geomspace(1e-3, 1.0, 150)[:, None]
    first = individual_epsilons([0], values, trace, 1e-5, "pld")
    assert len(computed) > 64
    computed.clear()
    second = individual_epsilons([0], values, trace, 1e-5, "pld")
    assert computed == []
    np.testing.assert_array_equal(first.upper, second.upper)
