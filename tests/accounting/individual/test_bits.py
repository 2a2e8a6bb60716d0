"""The same bits whatever the number of BLAS threads, the block of rows and the part that an example is accounted in."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting.individual import epsilons as individual
from dpsweep.accounting.individual.epsilons import IndividualEpsilons, individual_epsilons
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, SideQuery, Trace
from tests.known import known

DELTA = 1e-5
ROWS = 333
METHOD_STEPS = [("rdp", 600), ("pld", 600), ("pld", 3)]
THREADS = 4


def _epsilons(method: str, steps: int, rows: slice = slice(None)) -> IndividualEpsilons:
    rng = np.random.default_rng(0)
    levels = np.minimum(rng.lognormal(-1.0, 0.8, (ROWS, 1)) * rng.lognormal(0.0, 0.3, (ROWS, 3)), 1.0)
    middle = steps // 2
    segments = (
        Segment(0, middle, PoissonSampling(0.05), 1.0),
        Segment(middle, steps - middle, PoissonSampling(0.02), 0.9, (SideQuery("counts", 6.0),)),
    )
    starts = [0, steps // 3, 2 * steps // 3]
    kept = levels[:: 1 if steps > 100 else 60][rows]
    return individual_epsilons(starts, kept, Trace(60_000, segments), DELTA, method)


@functools.cache
def _whole(method: str, steps: int) -> IndividualEpsilons:
    """Of all rows, in one block."""
    return _epsilons(method, steps)


def assert_equal_lower(part: IndividualEpsilons, whole: IndividualEpsilons, rows: slice) -> None:
    if whole.lower is None:
        assert part.lower is None
    else:
        np.testing.assert_array_equal(known(part.lower), whole.lower[rows])


def digest(method: str, steps: int) -> str:
    found = _whole(method, steps)
    return hashlib.sha256(found.upper.tobytes() + (b"" if found.lower is None else found.lower.tobytes())).hexdigest()


@functools.cache
def _digests_with(threads: int) -> dict[str, str]:
    """The digest by method and steps, in a process with so many threads."""
    root = Path(__file__).resolve().parents[3]
    digests = f"{{f'{{method}} {{steps}}': digest(method, steps) for method, steps in {METHOD_STEPS}}}"
    code = f"import json; from tests.accounting.individual.test_bits import digest; print(json.dumps({digests}))"
    counts = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root), **counts},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("method", "steps"), METHOD_STEPS)
def test_threads_change_no_bit(method: str, steps: int) -> None:
    """This process has as many as it was given, or as there are cores: 1 in the gate."""
    assert _digests_with(THREADS)[f"{method} {steps}"] == digest(method, steps)


@pytest.mark.long
@pytest.mark.parametrize(("method", "steps"), METHOD_STEPS[:2])
@pytest.mark.parametrize("block", [1, 7, 50])
def test_blocks_change_no_bit(method: str, steps: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = slice(0, 3 * block)
    whole = _whole(method, steps)
    monkeypatch.setattr(individual, "_ROWS", block)
    parts = _epsilons(method, steps, rows)
    np.testing.assert_array_equal(parts.upper, whole.upper[rows])
    assert_equal_lower(parts, whole, rows)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("method", "steps"), METHOD_STEPS)
def test_parts_change_no_bit(method: str, steps: int) -> None:
    whole = _whole(method, steps)
    for rows in (slice(0, 1), slice(3, 5), slice(None, None, -1)):
        part = _epsilons(method, steps, rows)
        np.testing.assert_array_equal(part.upper, whole.upper[rows])
        assert_equal_lower(part, whole, rows)
