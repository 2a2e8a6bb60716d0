"""Single examples over the whole range of what a trace may be: what they cost to account for, and how tightly."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.individual import exact_composition, individual_epsilons
from dpsweep.accounting.individual.contributions import RecordedContributions
from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.numerics.renyi import sampled_gaussian_rdp
from dpsweep.accounting.pld import PairBounds
from tests.known import known

MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from tests.accounting.work import counted
segments, delta = json.loads(sys.argv[1])
parts, step = [], 0
for rate, sigma, steps in segments:
    parts.append(Segment(step, steps, PoissonSampling(rate), sigma))
    step += steps
rows = np.random.default_rng(0).uniform(0.05, 1.0, (4, min(step, 4)))
with counted() as work:
    found = individual_epsilons(range(len(rows.T)), rows, Trace(50_000, tuple(parts)), delta, "pld")
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(json.dumps([found.upper.tolist(), found.lower.tolist(), work.points, work.terms, peak]))
"""


@pytest.mark.long
def test_large_data_of_few_steps_are_tight_without_a_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve snapshots of 240 steps; examples of a data set of ten million take no composition each."""
    monkeypatch.setattr(exact_composition, "_alone", None)
    trace = Trace(10**7, (Segment(0, 240, PoissonSampling(0.01), 1.2),))
    rows = np.random.default_rng(0).beta(1.0, 1.5, (2000, 1)) * np.linspace(1.2, 0.6, 12)
    found = individual_epsilons(range(0, 240, 20), np.minimum(rows, 1.0), trace, 1e-8, "pld")
    assert np.all(found.upper - known(found.lower) <= np.maximum(0.01 * found.upper, 0.01))


@pytest.mark.parametrize(("examples", "refined"), [(100_000, True), (100_001, False)])
def test_after_two_epochs_examples_are_accounted_alone_where_there_are_few(
    examples: int, refined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way the upper bound is above the exact epsilon of a run at this contribution, and the lower one below."""
    alone, tried = exact_composition._alone, list[int]()

    def counted(contributions: RecordedContributions, delta: float) -> PairBounds:
        tried.append(1)
        return alone(contributions, delta)

    monkeypatch.setattr(exact_composition, "_alone", counted)
    trace, rows = Trace(examples, (Segment(0, 20, PoissonSampling(0.1), 1.0),)), np.array([[0.5], [0.7], [1.0]])
    found = individual_epsilons([0], rows, trace, 1e-6, "pld")
    assert bool(tried) == refined
    for row, contribution in enumerate(rows[:, 0]):
        alike = Trace(examples, (Segment(0, 20, PoissonSampling(0.1), 1.0 / contribution),))
        exact = account(alike, 1e-6, "pld")
        assert known(found.lower)[row] <= exact.epsilon
        assert found.upper[row] >= (exact.lower_epsilon or 0.0)
        assert not refined or found.upper[row] <= 1.01 * exact.epsilon


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("segments", "delta"),
    [
        pytest.param([[8e-6, 16_083.0, 77], [0.026, 8e-6, 10**8], [1.3e-5, 5e-6, 9513]], 9e-92, id="hardly any noise"),
        pytest.param([[1e-12, 1.6e-4, 12_465]], 6e-85, id="hardly any noise, and hardly any draws"),
        pytest.param([[2e-6, 0.054, 95_050], [3e-6, 0.101, 1000], [5e-6, 0.03, 1000]], 1e-59, id="little noise"),
        pytest.param([[1e-12, 3.5, 12], [0.117, 3.3e7, 2], [0.013, 5e5, 2]], 1e-70, id="much noise"),
        pytest.param([[0.0028, 71.0, 3], [0.0031, 85.0, 3]], 5e-17, id="a tiny delta"),
        pytest.param([[2.3e-4, 2.5, 103], [2.2e-3, 0.51, 14], [2.8e-4, 0.6, 2]], 1e-6, id="few draws"),
    ],
)
def test_a_few_rows_of_any_trace_are_answered_in_a_gibibyte_by_few_terms(
    segments: list[list[float]], delta: float
) -> None:
    command = [sys.executable, "-W", "error", "-c", MEASURE, json.dumps([segments, delta])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    upper, lower, points, terms, kibibytes = json.loads(done.stdout)
    assert len(upper) == 4
    assert all(0.0 <= below <= above < np.inf for below, above in zip(lower, upper, strict=True))
    assert points < 1e7
    assert terms < 3e9
    assert kibibytes < 1 << 20


@pytest.mark.parametrize(("method", "rate"), [("rdp", 0.011), ("pld", 0.012)])
def test_a_few_rows_need_few_nodes(method: str, rate: float) -> None:
    """Of 256 nodes two rows of two snapshots reach six, and need two neighbours on either side of each."""
    trace = Trace(50_000, (Segment(0, 2000, PoissonSampling(rate), 1.0),))
    rows = np.array([[0.5, 0.6], [1.0, 0.6]])
    sampled_gaussian_rdp.cache_clear()
    few = individual_epsilons([0, 1000], rows, trace, 1e-6, method)
    assert sampled_gaussian_rdp.cache_info().misses < 30
    many = np.vstack([rows, np.random.default_rng(0).random((300, 2))])
    among_others = individual_epsilons([0, 1000], many, trace, 1e-6, method)
    assert sampled_gaussian_rdp.cache_info().misses > 200
    np.testing.assert_array_equal(few.upper, among_others.upper[:2])
    assert few.lower is among_others.lower is None or np.array_equal(known(few.lower), known(among_others.lower)[:2])


@pytest.mark.parametrize("contribution", [1.0, 0.3])
@pytest.mark.parametrize(
    ("rate", "sigma", "steps"),
    [(0.1, 0.7, 9), (0.001, 0.6, 2), (0.001, 0.6, 50), (0.001, 0.6, 200), (0.004, 0.8, 250), (0.01, 1.0, 20)],
)
def test_an_example_that_hardly_any_batch_draws_is_bracketed_within_a_hundredth(
    rate: float, sigma: float, steps: int, contribution: float
) -> None:
    """Against the certified bounds of a lattice at the noise that the contribution stands for."""
    trace = Trace(50_000, (Segment(0, steps, PoissonSampling(rate), sigma),), (GaussianRelease("mean", 200.0),))
    found = individual_epsilons([0], [[contribution]], trace, 1e-5, "pld")
    same = Trace(50_000, (Segment(0, steps, PoissonSampling(rate), sigma / contribution),), trace.releases)
    exact = account(same, 1e-5, "pld")
    assert exact.lower_epsilon is not None
    assert 0.99 * exact.lower_epsilon <= known(found.lower)[0] <= exact.epsilon * (1 + 1e-9)
    assert exact.lower_epsilon * (1 - 1e-9) <= found.upper[0] <= 1.01 * exact.epsilon


def test_examples_that_cost_next_to_nothing_take_no_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bounds are far apart relative to each other, but by less than 0.01. On lattices each took 0.2 s."""
    monkeypatch.setattr(exact_composition, "_alone", lambda *_: pytest.fail("an example was accounted on a lattice"))
    trace = Trace(65_536, (Segment(0, 1000, PoissonSampling(0.01), 1.2),))
    rows = np.random.default_rng(0).uniform(1e-4, 2e-3, (300, 1))
    found = individual_epsilons([0], rows, trace, 1e-8, "pld")
    assert (known(found.lower) <= found.upper).all()
    assert (found.upper - known(found.lower)).max() < 0.01
    assert (found.upper - known(found.lower) > 0.01 * found.upper).any()


def test_a_small_contribution_is_tight_after_any_number_of_steps() -> None:
    """Its spectrum falls at frequencies twice those of the longest damped contour."""
    rate, sigma, steps = 0.0005, 0.6, 1001
    trace = Trace(50_000, (Segment(0, steps, PoissonSampling(rate), sigma),))
    found = individual_epsilons([0], [[0.3]], trace, 1e-5, "pld")
    exact = account(Trace(50_000, (Segment(0, steps, PoissonSampling(rate), 2.0),)), 1e-5, "pld")
    assert exact.epsilon * (1 - 1e-3) <= found.upper[0] <= 1.01 * exact.epsilon
    assert known(found.lower)[0] >= 0.99 * exact.epsilon


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"), [(0.123, 2.75e8, 270_866, 1.7e-205), (0.0044, 2.41e6, 41_838, 2.6e-97)]
)
def test_many_steps_of_much_noise_cost_no_more_than_one_gaussian(
    rate: float, sigma: float, steps: int, delta: float
) -> None:
    """Their losses are too small for contours and for Renyi's bound, which says 0.05 and more."""
    trace = Trace(50_000, (Segment(0, steps, PoissonSampling(rate), sigma),), (PureRelease("choice", 1e-4),))
    found = individual_epsilons([0], [[1.0], [0.5]], trace, delta, "pld")
    for contribution, upper, lower in zip((1.0, 0.5), found.upper, known(found.lower), strict=True):
        mean = contribution * np.sqrt(steps) / sigma
        assert lower <= upper <= 1e-4 + 1.05 * gaussian_epsilon(mean, delta)[0]
        assert upper > 1e-4


def test_rows_of_few_ordinary_steps_get_all_the_nodes_that_they_need() -> None:
    trace = Trace(3145, (Segment(0, 69, FixedBatchSampling(3145, 4), 3.76),))
    found = individual_epsilons([0], [[1.0], [0.7]], trace, 1e-5, "pld")
    assert np.all(found.upper <= 1.01 * known(found.lower))
