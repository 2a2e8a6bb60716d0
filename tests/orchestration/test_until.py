"""`dpsweep run --until told-apart`: seeds are added until verdicts are reached, and the level allows for looking."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.pipeline import NoDisplay, RunRequest, run, run_sweep
from dpsweep.orchestration.store.limits import Spent
from dpsweep.workers.own_code.imports import UserCode
from tests.known import known
from tests.orchestration.sample_grids import in_process

TEXT = """
name: until
data: {name: digits, keep: {8: 0.1}}
model: logistic
clipping: [flat, individual]
privacy: {target_epsilon: 3, delta: 1.0e-5}
sampling: {method: poisson, batch_size: 256}
epochs: 1
seeds: [7]
"""


def request(folder: Path, most: int, text: str = TEXT) -> RunRequest:
    return in_process(text, folder, most_seeds=most)


def test_the_errors_of_all_looks_add_up_to_less_than_one_in_twenty() -> None:
    levels = [Findings((), NO_EVIDENCE, looks=look).level for look in range(1, 2000)]
    assert sum(1.0 - level for level in levels) < 0.05
    assert sum(1.0 - level for level in levels) > 0.0499
    assert all(one < other for one, other in itertools.pairwise(levels))
    assert Findings((), NO_EVIDENCE).level == 0.95


def test_too_few_seeds_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--max-seeds is 1, and the sweep starts with 2 seeds; raise it"):
        run_sweep(request(tmp_path / "sweep", 1))
    assert not list(tmp_path.iterdir())


def test_all_looks_have_one_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected, looks = [], []

    @contextlib.contextmanager
    def connect(address: str, code: UserCode) -> Iterator[UserCode]:
        connected.append(address)
        yield code

    def look(asked: RunRequest, display: object) -> SimpleNamespace:
        with asked.connect(asked.address, asked.code):
            looks.append((len(asked.sweep.seeds), asked.spent.trials))
        record = SimpleNamespace(failed=False, manifest=SimpleNamespace(text=asked.text))
        adds_trials, spent = len(looks) < 3, Spent(trials=len(looks))
        return SimpleNamespace(stopped=None, record=record, recording=None, spent=spent, adds_trials=adds_trials)

    monkeypatch.setattr(run, "run_sweep", look)
    asked = replace(request(tmp_path / "sweep", 5), connect=connect)
    run.run_until_told_apart(asked, 5, NoDisplay())
    assert looks == [(2, 0), (3, 1), (5, 2)], "with what those before have spent of the limits"
    assert len(connected) == 1


@pytest.mark.long
def test_seeds_are_added_and_counted_and_a_second_run_goes_on(tmp_path: Path) -> None:
    """Two methods that hardly differ: two seeds, then three, and no more than asked."""
    first = run_sweep(request(tmp_path / "sweep", 2)).record
    assert (first.sweep.seeds, first.sweep.compare.looks) == ((7, 0), 1)
    together = known(composed(first.data().trials))
    assert "end_followed_results" in together.reasons
    second = run_sweep(request(tmp_path / "sweep", 3)).record
    if len(second.sweep.seeds) == 3:
        assert (second.sweep.seeds, second.sweep.compare.looks) == ((7, 0, 1), 2)
        assert second.data().looks == 2
        assert len([trial for trial in second.data().trials if not trial.is_baseline]) == 6
        assert "read 2 times" in Path(tmp_path / "sweep" / "report.html").read_text()
