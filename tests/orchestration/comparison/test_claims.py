"""A result whose seal is right and whose numbers are forged is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accounting.errors import DataCorruption
from accounting.records.sealed import read_sealed, write_sealed
from orchestration.execution.environment import IN_PROCESS
from orchestration.pipeline import RunRequest, render_again, run_sweep
from orchestration.records.layout import SweepFiles
from orchestration.sweeps.schema import parse_sweep
from orchestration.tracking.no_tracking import NO_TRACKING
from tests.orchestration.sample_grids import key_in, small, trial_in

TEXT = small(
    clipping=["none", {"name": "flat", "bound": 1.0}],
    noise="constant",
    seeds=0,
    release="private",
    accounting={"also": ["rdp"], "group_sizes": [1, 4]},
)


def request(folder: Path) -> RunRequest:
    return RunRequest(parse_sweep(TEXT), TEXT, str(folder), IN_PROCESS, NO_TRACKING)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_sweep(request(tmp_path_factory.mktemp("sweep") / "out")).files.root


@pytest.fixture
def folder(finished: str, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def forge(uri: str, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(read_sealed(uri, "") or b"")
    change(values)
    write_sealed(uri, json.dumps(values).encode())


def forged_risk(result: dict[str, Any], place: int, **changes: object) -> None:
    """Changes a bound on attacks: those of one record come first, then those of groups of 4."""
    result["risks"][place].update(changes)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "epsilon": (
        lambda result: result["worst_case"].update(epsilon=0.5),
        r"claims epsilon 0\.5, but its trace costs 4\.99",
    ),
    "delta": (lambda result: result["worst_case"].update(delta=0.1), r"at delta 0\.1 .* the trial's delta is 1e-05"),
    "other": (lambda result: result["others"][0].update(epsilon=0.5), r"epsilon by rdp 0\.5"),
    "group": (lambda result: result["groups"][1].update(epsilon=0.5), r"epsilon of groups of 4 0\.5"),
    "epoch": (lambda result: result.update(epsilons=[0.01, result["epsilons"][1]]), r"0\.01 after epoch 0"),
    "advantage": (lambda result: forged_risk(result, 0, advantage=[0.0, 0.01]), r"advantage 0\.01 of attacks on one"),
    "advantage that is no number": (
        lambda result: forged_risk(result, 0, advantage=["NaN", "NaN"]),
        r"advantage nan of attacks on one",
    ),
    "true positive rate": (
        lambda result: forged_risk(result, 0, true_positive_rates=[[0.0, 1.0], [0.0, 0.011], [0.0, 1.0]]),
        r"tpr_at_fpr_1pct 0\.011 of attacks on one record",
    ),
    "advantage of a group": (
        lambda result: forged_risk(result, 1, advantage=result["risks"][0]["advantage"]),
        r"advantage 0\.\d+ of attacks on groups of 4, but its trace allows",
    ),
    "a true positive rate less": (
        lambda result: forged_risk(result, 0, true_positive_rates=result["risks"][0]["true_positive_rates"][1:]),
        r"2 true positive rates instead of 3",
    ),
    "one record as a group": (
        lambda result: forged_risk(result, 0, group_size=16, unit="group of 16"),
        r"attacks on groups of 16, of which it claims no epsilon",
    ),
    "unit of a risk": (lambda result: forged_risk(result, 0, unit="user"), r"attacks on user .* on example under"),
    "statistics": (lambda result: result["individuals"].update(release_epsilon=0.01), r"statistics cost 0\.01"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_claim_below_its_trace_is_refused(folder: Path, forgery: str) -> None:
    change, message = FORGERIES[forgery]
    page = (folder / "report.html").read_bytes()
    forge(trial_in(folder, "flat-seed0").result, change)
    with pytest.raises(DataCorruption, match=message):
        render_again(str(folder))
    assert (folder / "report.html").read_bytes() == page, "no report is written of it"


def test_a_baseline_that_claims_privacy_is_refused(folder: Path) -> None:
    forge(
        trial_in(folder, "non-private-seed0").result,
        lambda result: result["worst_case"].update(epsilon=1.0),
    )
    with pytest.raises(DataCorruption, match="but its trace costs inf"):
        render_again(str(folder))


def test_a_record_of_attempts_that_says_less_is_refused(folder: Path) -> None:
    record = f"{SweepFiles(str(folder)).attempts(key_in(folder, 'flat-seed0'))}/000001.json"
    forge(record, lambda attempt: attempt["trace"]["segments"][0].update(noise_multiplier=50.0))
    with pytest.raises(DataCorruption, match="record of its attempts claims epsilon 0"):
        render_again(str(folder))


def test_what_was_not_forged_is_accepted_and_resumed(folder: Path) -> None:
    render_again(str(folder))
    baseline = trial_in(folder, "non-private-seed0").result
    forge(baseline, lambda result: result["worst_case"].update(kind="guarantee"))  # as earlier versions wrote it
    render_again(str(folder))
    forge(trial_in(folder, "flat-seed0").result, FORGERIES["epsilon"][0])
    with pytest.raises(DataCorruption, match=r"claims epsilon 0\.5"):
        run_sweep(request(folder))
