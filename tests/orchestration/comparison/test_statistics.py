"""Statistics over seeds, against their definitions."""

from __future__ import annotations

import math

import pytest

from dpsweep.orchestration.comparison.statistics import pearson


def test_pearson_is_the_covariance_over_both_deviations() -> None:
    one, other = [1.0, 2.0, 4.0, 9.0], [3.0, 1.0, 0.0, 5.0]
    centred = [[value - sum(side) / 4 for value in side] for side in (one, other)]
    product = sum(a * b for a, b in zip(*centred, strict=True))
    expected = product / math.sqrt(sum(a * a for a in centred[0]) * sum(b * b for b in centred[1]))
    assert pearson(one, other) == pytest.approx(expected, rel=1e-12)
