"""Who can read what a sweep writes: public files as the umask says, what is exact only its owner."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsweep.orchestration.pipeline import run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.sample_grids import in_process, key_in, small, trial_in
from tests.orchestration.tracking.recordings import client_of, one, runs_of

CLIPPING = ["none", {"name": "flat", "bound": 1.0}]


@pytest.fixture(params=[0o022, 0o077], ids=["022", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def run(folder: Path, release: str) -> SweepFiles:
    text = small(clipping=CLIPPING, noise="constant", seeds=0, epochs=1, release=release)
    return run_sweep(in_process(text, folder / "out", None)).files


def mode(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


@pytest.mark.thinned(2)
def test_public_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    files = run(tmp_path, "none")
    trial = trial_in(files.root, "flat-seed0")
    for public in (files.manifest, files.results, files.report, trial.result, trial.trace, trial.model, trial.spec):
        assert mode(public) == 0o666 & ~umask, public
    for private in (files.private_report, trial.private_summary, trial.private_digests):
        assert mode(private) == 0o600, private
    assert mode(trial.private) == 0o700
    for folder in (files.root, *(trial_in(files.root, name).root for name in ("non-private-seed0", "flat-seed0"))):
        assert mode(folder) == 0o777 & ~(umask | 0o002), "the folder of a baseline too"


def test_with_exact_statistics_everything_is_the_owners(tmp_path: Path) -> None:
    files = run(tmp_path, "raw")
    database = Path(files.root, "mlflow.db")
    for sensitive in (files.report, files.results, database, trial_in(files.root, "flat-seed0").result):
        assert mode(sensitive) == 0o600, sensitive
    for folder in (files.root, files.artifacts):
        assert mode(folder) == 0o700, folder


@pytest.mark.long
def test_a_baseline_says_that_it_protects_nobody(tmp_path: Path) -> None:
    files = run(tmp_path, "none")
    baseline = trial_in(files.root, "non-private-seed0")
    assert (mode(baseline.model), mode(baseline.inputs)) == (0o600, 0o600)
    rows = {row["key"]: row for row in json.loads(Path(files.results).read_text())}
    plain, private = (key_in(files.root, name) for name in ("non-private-seed0", "flat-seed0"))
    assert (rows[plain]["kind"], rows[private]["kind"]) == ("none", "estimate")  # of seeded noise
    run_of = one(runs_of(client_of(Path(files.root))), trial_key=plain)
    assert run_of.data.tags["epsilon_kind"] == "none"
    assert run_of.data.tags["private"] == "false"
    assert "nothing protects the training data" in run_of.data.tags["mlflow.note.content"]
