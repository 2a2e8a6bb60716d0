"""docs/results.md has every name in an output folder and in MLflow, and is what docs/results.py writes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from tests.orchestration.sample_sweeps import sample_sweep
from tests.orchestration.tracking.recordings import client_of, opened, record, runs_of, tracked

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "results.md").read_text()
NAMES = [name for line in PAGE.splitlines() for name in re.findall(r"`([^`]+)`", line)]


def test_the_page_is_up_to_date() -> None:
    """Else run: python docs/results.py"""
    assert runpy.run_path(str(ROOT / "docs" / "results.py"))["results"]() == PAGE


def test_everything_that_mlflow_shows_of_a_sweep_is_on_the_page(tmp_path: Path) -> None:
    """A word in capitals stands for any text."""
    tracker, sweep = opened(tmp_path), sample_sweep("raw")
    record(tracker, [tracked(trial) for trial in sweep.trials], sweep)
    shown = {name for run in runs_of(client_of(tmp_path)) for name in (*run.data.metrics, *run.data.tags)}
    shown = {name for name in shown if not name.startswith("mlflow.")}
    named = [re.sub(r"[A-Z]+(?![a-z])", ".+", re.escape(name)) for name in NAMES if re.search("[a-z]{4}", name)]
    known = re.compile("|".join(named))
    assert len(shown) > 60
    assert sorted(name for name in shown if not known.fullmatch(name)) == []
