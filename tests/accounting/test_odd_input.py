"""Whatever a public function is given: a number with the right bound, or one clear error; no traceback, no warning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpsweep.accounting import pld
from dpsweep.accounting.accountants import joint_cost
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.methods import rho_to_epsilon, total_rdp, total_rho
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.accountants.paper_only import algorithm_2, strong_composition
from dpsweep.accounting.calibration import budgets
from dpsweep.accounting.calibration import parameter_search as calibration
from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.accounting.individual import epsilons
from dpsweep.accounting.jobs import release
from dpsweep.accounting.mechanism import schedules
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon

ODD: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, 0, -1, -0.5, 1e-320, 1e300, 10**400, 2**60, True, np.True_, None, "7", 1j, b"1"),
    *([], (), [1.0], np.array([]), np.array(2.0), np.float32(0.25), np.float64(3.0), np.int64(3), np.float16(0.5)),
    *(1.5, 800, 1e-12, 1 - 1e-16),
)

Draw = Callable[[st.SearchStrategy[Any]], Any]


def _one_of(draw: Draw, *good: Any) -> Any:
    """Mostly one of ``good``; now and then anything."""
    return draw(st.sampled_from(good if draw(st.integers(0, 5)) else ODD))


def _sampling(draw: Draw, size: Any) -> Any:
    made: tuple[Callable[[], Any], ...] = (
        lambda: PoissonSampling(_one_of(draw, 0.01, 0.5, 1.0, 1e-9, np.float32(0.1), 1 - 1e-12)),
        lambda: FixedBatchSampling(size, _one_of(draw, 1, 5, np.int64(10), 10.0)),
        lambda: ShuffledSampling(_one_of(draw, 1, np.int32(3), 10.0)),
    )
    return draw(st.sampled_from(made))()


def _noise(draw: Draw) -> Any:
    return _one_of(draw, 1.0, 0.3, 50.0, 1e-6, 1e9, np.float64(2.0), 0.0, 7)


def _trace(draw: Draw) -> Trace:
    size = _one_of(draw, 100, 10**6, np.int64(50), 20.0)
    sampling = _sampling(draw, size)
    queries = draw(st.sampled_from(((), [])))
    if draw(st.booleans()):
        queries = [SideQuery("counts", _noise(draw))]
    segments = [Segment(0, _one_of(draw, 1, 10, 1000, np.int64(7), 10**9, 3.0), sampling, _noise(draw), queries)]
    releases: list[Any] = []
    if draw(st.integers(0, 2)) == 0:
        releases.append(PureRelease("pure", _one_of(draw, 0.5, 1000.0, 1e12, 1e-9, np.float32(30.0))))
        releases.append(GaussianRelease("gaussian", _noise(draw)))
    adjacency = "zero_out" if isinstance(sampling, ShuffledSampling) else "add_remove"
    return Trace(size, segments[: draw(st.integers(0, 3))], releases, adjacency)  # type: ignore[arg-type]


def _delta(draw: Draw) -> Any:
    return _one_of(draw, 1e-5, 1e-300, 0.5, np.float32(1e-6), 0.999999, 1e-240)


def _size(draw: Draw) -> Any:
    return _one_of(draw, 1, 2, np.int64(2), 5.0)


def _snapshots(draw: Draw) -> tuple[Any, Any]:
    rows = draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 1e-300, 1e-9)), min_size=1, max_size=3))
    return [_one_of(draw, 0)], _one_of(draw, [[c] for c in rows], np.array(rows, np.float32)[:, None], [[True]], [[9]])


def _released(draw: Draw) -> Any:
    spec = release.ReleaseSpec(
        _one_of(draw, 5, 5.0), _noise(draw), _noise(draw), _noise(draw), _one_of(draw, (), [0.5]), 3
    )
    rng = np.random.default_rng(0)
    values, labels = _one_of(draw, [1.0, math.inf], np.array([1, 2])), _one_of(draw, [0, 1], np.array([1.0, 0.0]))
    bound = _one_of(draw, 5.0, 1e-9)
    return release.release_statistics(values, labels, _one_of(draw, 2, 2.0), bound, spec, rng).mean_epsilon


def _solved(draw: Draw) -> Any:
    budget = budgets.RhoBudget(_one_of(draw, 1.0, 0.2), _size(draw))
    schedule = schedules.make_schedule("constant", _noise(draw))
    sampling = ShuffledSampling(1)
    calibration.count_within_budget(
        lambda epochs: schedules.planned_trace(schedule, sampling, epochs, 1, 100), budget, _one_of(draw, 50)
    )
    return calibration.calibrate_decay(
        _one_of(draw, "time"),
        _one_of(draw, 10.0),
        _one_of(draw, 5, 3.0),
        budget,
        lambda schedule, epochs: schedules.planned_trace(schedule, sampling, epochs, 1, 100),
    )


def _mixture(draw: Draw) -> Any:
    sampling = _sampling(draw, 100)
    pld.group_law(sampling, _size(draw))
    pld.examples_law(sampling, _one_of(draw, [1.0, 0.5], np.array([0.1])), _one_of(draw, 0.05))
    made = pld.SensitivityMixture(_one_of(draw, (0.0, 1.0)), _one_of(draw, [0.5, 0.5]), _one_of(draw, 0.0))
    return pld.discretise(
        made.scaled(_one_of(draw, 2.0)), _one_of(draw, 0.1), pld.Direction.REMOVE, "upper"
    ).infinity_mass


PUBLIC: dict[str, Callable[[Draw], Any]] = {
    "account": lambda d: account(_trace(d), _delta(d), _one_of(d, *ACCOUNTANTS), _size(d)).epsilon,
    "individual_epsilons": lambda d: epsilons.individual_epsilons(
        *_snapshots(d), _trace(d), _delta(d), _one_of(d, "rdp", "rdp-classic", "pld")
    ),
    "epsilon_of_examples": lambda d: pld.epsilon_of_examples(_trace(d), *_snapshots(d), _delta(d), 1e-2),
    "epsilon_of_examples_together": lambda d: joint_cost.epsilon_of_examples_together(
        [(_trace(d), *_snapshots(d)), (_trace(d), *_snapshots(d))], _delta(d)
    ),
    "group_epsilons": lambda d: pld.group_epsilons(_trace(d), _delta(d), [_size(d)], _one_of(d, 1e-2))[0],
    "delta_pld": lambda d: pld.delta_pld(_trace(d), _one_of(d, 1.0, 500, 1e5, 0, 1e-9), _size(d), 1e-2),
    "linear_growth": lambda d: pld.linear_growth(_trace(d), _delta(d), _size(d)),
    "vadhan_epsilon": lambda d: pld.vadhan_epsilon(_trace(d), _delta(d), _size(d)),
    "total_rho": lambda d: total_rho(_trace(d), _size(d)),
    "total_rdp": lambda d: total_rdp(_trace(d), _size(d)),
    "rho_to_epsilon": lambda d: rho_to_epsilon(_one_of(d, 0.5, 0.0), _delta(d)),
    "strong_composition": lambda d: strong_composition(_one_of(d, [0.1], np.array([1e3])), _one_of(d, [3]), _delta(d)),
    "algorithm_2": lambda d: algorithm_2(*_snapshots(d), _trace(d), _delta(d), _one_of(d, 0.01)),
    "release": _released,
    "calibration": _solved,
    "mixtures": _mixture,
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", PUBLIC)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_number_or_one_clear_error(name: str, data: st.DataObject) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = PUBLIC[name](data.draw)
        except DpsweepError:
            return
    if hasattr(found, "upper"):
        lower = np.zeros(()) if found.lower is None else np.asarray(found.lower)
        assert np.all(lower <= np.asarray(found.upper))
        found = lower
    assert np.all(np.asarray(found) >= 0.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("contributions", [0.5, None, [True], [-1.0], [math.nan, 0.5], [1e308, 1e308, 1e-320]])
def test_contributions_of_a_group_that_are_none_are_refused(contributions: Any) -> None:
    with pytest.raises(InvalidInput, match=r"contribution"):
        pld.examples_law(PoissonSampling(0.1), contributions, 0.05)


def test_the_smallest_contribution_beside_the_largest_is_rounded_up() -> None:
    assert pld.examples_law(PoissonSampling(0.1), [1.0, math.ulp(0.0)], 0.05).sensitivities[-1] >= 1.0


@pytest.mark.parametrize(("epsilon", "size"), [(1000.0, 1), (1.0, 800), (1e12, 1)])
@pytest.mark.parametrize("accountant", ["gdp", "rdp", "zcdp", "strong"])
def test_pure_releases_of_any_size_cost_what_they_cost(accountant: str, epsilon: float, size: int) -> None:
    found = account(Trace(1000, releases=(PureRelease("x", epsilon),)), 1e-5, accountant, size)
    exact = size * epsilon + math.log1p(-1e-5 * (1 + math.exp(-min(size * epsilon, 700))))
    assert exact * (1 - 1e-12) <= found.epsilon <= size * epsilon * (1 + 1e-9)


@pytest.mark.parametrize("accountant", ["auto", "pld"])
def test_a_pure_release_that_protects_nobody_is_composed(accountant: str) -> None:
    assert account(Trace(10, releases=(PureRelease("x", 1e3),)), 1e-5, accountant).epsilon <= 1e3


def _gaussian_delta(mean: float, epsilon: float) -> Any:
    """delta of N(mean, 1) against N(0, 1), with 80 digits (Balle and Wang 2018, Theorem 8)."""
    m, e = mpmath.mpf(mean), mpmath.mpf(epsilon)
    return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("sigma", [1e9, 1e7, 1e3, 1.0, 1e-2, 1e-5, 1e-6])
def test_one_gaussian_release_with_more_digits(sigma: float) -> None:
    trace = Trace(10, releases=(GaussianRelease("x", sigma),))
    with mpmath.workdps(80):
        for delta in (1e-12, 1e-5, 0.3):
            upper = pld.epsilon_pld(trace, delta).upper
            assert _gaussian_delta(1 / sigma, upper) <= delta
        for epsilon in (0.0, 0.5 / sigma**2, 1 / sigma, 3 / sigma, 500.0):
            bounds = pld.delta_pld(trace, epsilon)
            assert bounds.lower <= _gaussian_delta(1 / sigma, epsilon) <= bounds.upper


@pytest.mark.parametrize("mean", [1e6, 3e8, 1e12])
@pytest.mark.parametrize("delta", [1e-200, 1e-5, 0.9])
def test_a_gaussian_whose_epsilon_has_more_digits_than_a_float(mean: float, delta: float) -> None:
    """A million full batches at noise multiplier 1e-6 shift the mean by 1e9; epsilon is half the square of that."""
    upper, lower = gaussian_epsilon(mean, delta)
    with mpmath.workdps(80):
        assert _gaussian_delta(mean, upper) <= delta
        assert lower == 0.0 or _gaussian_delta(mean, lower) >= delta
        above, below = gaussian_delta(mean, lower or upper)
        assert below <= _gaussian_delta(mean, lower or upper) <= above


def test_lists_are_arrays_and_numbers_of_numpy_are_numbers() -> None:
    trace = Trace(100, (Segment(0, 10, PoissonSampling(0.1), 1.0),))
    rows: Any = [[0.5], [1]]
    listed = epsilons.individual_epsilons([0], rows, trace, np.float64(1e-5))
    arrays = epsilons.individual_epsilons(np.array([0]), np.array([[0.5], [1.0]]), trace, 1e-5)
    np.testing.assert_array_equal(listed.upper, arrays.upper)
    sizes: list[Any] = [np.array([1, 2]), [1.0, 2.0]]
    assert pld.group_epsilons(trace, 1e-5, sizes[0]) == pld.group_epsilons(trace, 1e-5, sizes[1])
    with pytest.raises(InvalidInput, match=r"group_size is 2000000.*at most 1000000"):
        account(trace, 1e-5, group_size=2_000_000)
