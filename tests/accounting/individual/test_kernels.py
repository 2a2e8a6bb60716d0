"""Compiled loops do what the same lines do in Python, wherever their machine code may be stored."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dpsweep.accounting.individual import inversion, kernels, rdp, spectrum_kernels, spreading
from dpsweep.accounting.individual.epsilons import individual_epsilons
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, SideQuery, Trace
from tests.known import known

ROOT = Path(__file__).resolve().parents[3]
USED_IN = {
    spreading: ("split_steps", "mark_nodes", "sums"),
    rdp: ("best_orders",),
    inversion: ("reach", "certified_bounds"),
    kernels: ("_sums", "_least"),
    spectrum_kernels: ("_terms", "_curve", "_height", "_estimate", "_search", "_aliasing"),
}
ROWS = np.array([[0.4, 0.9, 0.0], [1.0, 0.2, 0.7], [0.05, 1e-3, 0.0]])
TRACES = {
    "two rates": Trace(
        60_000,
        (
            Segment(0, 300, PoissonSampling(0.05), 1.0, (SideQuery("counts", 6.0),)),
            Segment(300, 300, PoissonSampling(0.01), 0.9),
        ),
        (PureRelease("size", 0.01), GaussianRelease("histogram", 20.0)),
    ),
    "steep": Trace(60_000, (Segment(0, 900, PoissonSampling(0.003), 0.09),)),
    "slow": Trace(60_000, (Segment(0, 30, PoissonSampling(0.001), 0.6),)),
    "full batches": Trace(60_000, (Segment(0, 900, PoissonSampling(1.0), 30.0),)),
}

MODULE = """
import numpy as np
from numba import float64
from dpsweep.accounting.machine_code import kernel

@kernel(float64[::1], float64[::1])
def squares(values, found):
    for i in range(len(values)):
        found[i] = values[i] * values[i]

found = np.empty(4)
squares(np.arange(4.0), found)
print(found.tolist(), len(squares.stats.cache_path or ""))
"""


def python_of(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The function that was compiled."""
    return cast(Callable[..., Any], cast(Any, compiled).py_func)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["rdp", "pld"])
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_python_finds_what_compiled_code_finds(trace: Trace, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code checks no index: Python does."""
    compiled = individual_epsilons([0, 10, 20], ROWS, trace, 1e-6, method)
    for module, names in USED_IN.items():
        for name in names:
            monkeypatch.setattr(module, name, python_of(getattr(module, name)))
    with np.errstate(all="ignore"):
        plain = individual_epsilons([0, 10, 20], ROWS, trace, 1e-6, method)
    np.testing.assert_allclose(plain.upper, compiled.upper, rtol=1e-9)
    if compiled.lower is not None:
        np.testing.assert_allclose(known(plain.lower), compiled.lower, rtol=1e-9, atol=1e-12)


def _started(folder: Path, home: Path) -> subprocess.Popen[str]:
    names = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, "-c", "import squaring"], env=environment, stdout=subprocess.PIPE, text=True
    )


def _answers(folder: Path, home: Path, processes: int = 1, before: str = "") -> list[str]:
    """What processes that start at once print. before: what each runs first."""
    (folder / "squaring.py").write_text(before + MODULE)
    started = [_started(folder, home) for _ in range(processes)]
    answers = [process.communicate(timeout=240)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return answers


def _stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("squaring.*") if path.suffix in (".nbi", ".nbc")]


@pytest.mark.long
def test_processes_that_compile_at_once_store_the_same_code(tmp_path: Path) -> None:
    package, home = tmp_path / "package", tmp_path / "home"
    package.mkdir()
    answers = _answers(package, home, processes=2)
    assert {answer.partition("]")[0] for answer in answers} == {"[0.0, 1.0, 4.0, 9.0"}
    assert sorted(path.suffix for path in _stored(home)) == [".nbc", ".nbi"]
    assert _answers(package, home) == answers[:1]
    assert _stored(package) == [], "pip would leave them behind"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("place", ["a file", "writable by all"])
def test_code_is_stored_nowhere_where_the_cache_folder_is_unusable(place: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    if place == "a file":
        home.write_text("not a folder")
    else:
        assert not _answers(tmp_path, home)[0].endswith(" 0")
        for folder in (home / ".cache" / "dpsweep" / "machine-code").iterdir():
            folder.chmod(0o777)
    (answer,) = _answers(tmp_path, home)
    assert answer == "[0.0, 1.0, 4.0, 9.0] 0"


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_stored_code_that_a_power_cut_left_empty_is_stored_anew(suffix: str, tmp_path: Path) -> None:
    stored = _answers(tmp_path, tmp_path / "home")
    (cut_off,) = (path for path in _stored(tmp_path / "home") if path.suffix == suffix)
    cut_off.write_bytes(b"")
    assert _answers(tmp_path, tmp_path / "home") == ["[0.0, 1.0, 4.0, 9.0] 0"]
    assert _answers(tmp_path, tmp_path / "home") == stored
    assert cut_off.stat().st_size > 0


def test_code_is_not_stored_where_there_is_no_room(tmp_path: Path) -> None:
    no_room = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
    assert _answers(tmp_path, tmp_path / "home", before=no_room) == ["[0.0, 1.0, 4.0, 9.0] 0"]


def test_exponentials_and_turns_are_those_of_numpy_to_the_last_bits() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-708.0, 709.0, 3000), rng.uniform(-1.0, 1.0, 3000), [-708.0, 0.0, 709.0]])
    found, cosines, sines = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    spectrum_kernels._exponentials(x, found)
    np.testing.assert_allclose(found, np.exp(x), rtol=4e-16)
    for reach in (1.0, 100.0, 1e6):
        y = np.append(rng.uniform(-reach, reach, len(x) - 1), reach)
        spectrum_kernels._turns(y, cosines, sines)
        np.testing.assert_allclose(cosines, np.cos(y), rtol=0.0, atol=3e-16)
        np.testing.assert_allclose(sines, np.sin(y), rtol=0.0, atol=3e-16)


def test_exponentials_and_turns_of_what_they_are_not_made_for_certify_nothing() -> None:
    x = np.array([-709.0, -np.inf, 710.0, np.inf, np.nan])
    found, cosines, sines = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    spectrum_kernels._exponentials(x, found)
    np.testing.assert_array_equal(found, [0.0, 0.0, np.inf, np.inf, np.nan])
    spectrum_kernels._turns(np.array([1.1e6, -1.1e6, np.inf, -np.inf, np.nan]), cosines, sines)
    assert np.isnan([cosines, sines]).all()


@pytest.mark.parametrize("largest", [1e-9, 0.3, 1.0, 3.0])
def test_the_error_of_terms_is_that_of_the_best_cut_and_hardly_above_it(largest: float) -> None:
    """exp(K) changes by a factor of at most exp(slack), in each of eight pieces; what lies beyond a cut is dropped."""
    rng = np.random.default_rng(0)
    points, pieces = 32, 8
    cuts = np.array([[12.0, 20.0, 28.0, 32.0], [1e-2, 5e-3, 3e-3, 2e-3]])
    for _ in range(50):
        real, slack = rng.uniform(-12.0, 0.0, points), rng.uniform(0.0, largest, pieces)
        decay = np.cumsum(rng.uniform(0.0, 8.0, 4))
        factors = rng.normal(size=(3, points))
        factors[2] = np.hypot(factors[0], factors[1])
        row = np.concatenate([real, rng.uniform(-9.0, 9.0, points), slack, decay])
        moduli, cosines, sines, terms = (np.empty(size) for size in (points, points, points, 2 * points))
        kept, error = spectrum_kernels._terms(row, factors, cuts, moduli, cosines, sines, terms)
        spent = np.cumsum(factors[2] * np.exp(real) * np.repeat(np.expm1(slack), points // pieces))
        errors = spent[cuts[0].astype(int) - 1] + np.exp(real[0] - decay) * cuts[1]
        assert errors.min() * (1.0 - 1e-12) <= errors[cuts[0] == kept][0] * (1.0 - 1e-12) <= error
        assert error <= errors.min() * (1.0 + 0.2 * min(largest, 1.0))
