"""A result whose seal is right and whose numbers are forged is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dpsweep
from dpsweep import orchestration
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.mechanism.reasons import Reason, weakened
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison import claims
from dpsweep.orchestration.pipeline import RunRequest, render_again, run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import write_result
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.invoking import printed
from tests.orchestration.sample_grids import in_process, key_in, small, trial_in
from tests.orchestration.sample_results import stopped_of

TEXT = small(
    clipping=["none", {"name": "flat", "bound": 1.0}],
    noise="constant",
    seeds=0,
    release="private",
    accounting={"also": ["rdp"], "group_sizes": [1, 4]},
)


def request(folder: Path) -> RunRequest:
    return in_process(TEXT, folder)


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
    "lower bound that is no number": (
        lambda result: result["worst_case"].update(lower_epsilon="NaN"),
        r"claims epsilon 4\.99\d*, and that it is at least nan",
    ),
    "other": (lambda result: result["others"][0].update(epsilon=0.5), r"epsilon by rdp 0\.5"),
    "group of one": (lambda result: result["groups"][0].update(epsilon="NaN"), "epsilon of groups of 1 nan"),
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
    "unit": (
        lambda result: result["worst_case"].update(unit="user"),
        r"claims epsilon per user, but its trace costs that per example",
    ),
    "unit of a risk": (lambda result: forged_risk(result, 0, unit="user"), r"attacks on user .* on example under"),
    "unit of the specification": (
        lambda result: result["spec"].update(users={"sampling": "els", "max_records": 2}),
        "its trace protects example of 1 row, but its spec user of 2",
    ),
    "statistics": (lambda result: result["individuals"].update(release_epsilon=0.01), r"statistics cost 0\.01"),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_claim_below_its_trace_is_refused(folder: Path, forgery: str) -> None:
    change, message = FORGERIES[forgery]
    page = (folder / "report.html").read_bytes()
    forge(trial_in(folder, "flat-seed0").result, change)
    with pytest.raises(DataCorruption, match=message):
        render_again(str(folder))
    assert (folder / "report.html").read_bytes() == page, "no report is written of it"


HIDDEN = {
    "a reason of the trial": lambda result: weaken(result, "known_seed"),
    "the kind of the trial": lambda result: result["worst_case"].update(kind="guarantee", reasons=[]),
    "a reason of the statistics": lambda result: result["individuals"].update(reasons=["norms_estimated"]),
}


def weaken(result: dict[str, Any], reason: str) -> None:
    """Take a reason from everything that a result claims, and its kind with it."""
    for claim in (result, result["worst_case"], *result["others"], *result["groups"], *result["risks"]):
        claim["reasons"] = [each for each in claim["reasons"] if each != reason]
        if "kind" in claim and not claim["reasons"]:
            claim["kind"] = "guarantee"


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_result_that_hides_why_it_guarantees_nothing_is_refused(folder: Path, hidden: str) -> None:
    forge(trial_in(folder, "flat-seed0").result, HIDDEN[hidden])
    with pytest.raises(DataCorruption, match="guarantees without saying why they are none: known_seed"):
        render_again(str(folder))


def test_a_record_of_attempts_that_hides_a_reason_is_refused(folder: Path) -> None:
    record = f"{SweepFiles(str(folder)).attempts(key_in(folder, 'flat-seed0'))}/000001.json"
    forge(record, lambda attempt: attempt.update(reasons=[]))
    with pytest.raises(DataCorruption, match="does not say why they guarantee nothing: known_seed"):
        render_again(str(folder))


_OWNER = ("--example-id", "0")
GATES: dict[str, Callable[[Path, Path], object]] = {
    "verify": lambda folder, other: printed("verify", folder),
    "report": lambda folder, other: printed("report", folder),
    "best": lambda folder, other: printed("best", folder),
    "best --json": lambda folder, other: printed("best", folder, "--json"),
    "best --register": lambda folder, other: printed("best", folder, "--register", "model"),
    "export": lambda folder, other: printed("export", folder, "--to", folder.parent / "table.csv"),
    "compare": lambda folder, other: printed("compare", other, folder),
    "account": lambda folder, other: printed("account", folder, "--address", "in-process"),
    "owner-report": lambda folder, other: printed("owner-report", trial_in(folder, "flat-seed0").root, *_OWNER),
    "--from": lambda folder, other: run_sweep(replace(request(folder.parent / "new"), sources=(str(folder),))),
    "run, and MLflow": lambda folder, other: run_sweep(replace(request(folder), tracking_uri=None)),
    "dpsweep.open": lambda folder, other: dpsweep.open(folder),
}
"""Everything that shows, exports, compares, registers, records or returns what a stored result claims."""


UNCHECKED = {
    "store/results.py": "defines how results are read",
    "comparison/stored.py": "reads a sweep for the gate",
    "comparison/claims.py": "is the gate",
    "comparison/inventory.py": "counts trials",
    "commands/cluster_jobs.py": "compares the code of trials, and passes no epsilon on",
    "commands/audit.py": "passes the sweep to `execution/audit_copies.py`, which compares all claims first",
    "commands/owner_report.py": "asks `founded_result` first, and then reads the epsilons of examples beside it",
    "commands/upkeep_commands.py": "verifies, or names what is to be deleted",
    "commands/stored_trial.py": "computes every epsilon from the trace; reads why they are estimates",
    "execution/upkeep.py": "verifies, deletes, forgets, or retries",
    "execution/coordinator.py": "compares all claims itself before MLflow is opened",
    "execution/reaccounting.py": "compares all claims itself before it accounts",
    "execution/reuse.py": "compares the claims of each trial before it is copied",
    "pipeline/run.py": "compares the code of candidates, and passes no epsilon on",
    "pipeline/record_again.py": "compares all claims itself before it writes",
    "report/writing.py": "compares all claims itself before it writes",
}
"""Modules that may read results without `checked_record` and `founded_result`, and why nothing is passed on there."""


def test_nothing_else_reads_results_past_the_gate() -> None:
    root = Path(orchestration.__file__).parent
    reading = re.compile(r"\b(stored_record|owned_record|read_result|read_result_of)\b")
    found = {file.relative_to(root).as_posix() for file in root.rglob("*.py") if reading.search(file.read_text())}
    assert found == {*UNCHECKED}


@pytest.mark.parametrize("gate", GATES)
def test_nothing_passes_on_a_claim_below_its_trace(folder: Path, finished: str, gate: str) -> None:
    forge(trial_in(folder, "flat-seed0").result, FORGERIES["epsilon"][0])
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(DataCorruption, match=r"claims epsilon 0\.5, but its trace costs 4\.99"):
        GATES[gate](folder, Path(finished))
    written = [each.name for each in folder.parent.rglob("*") if each not in before]
    assert not {"table.csv", "results.json", "mlruns"}.intersection(written), written


@pytest.mark.parametrize("reasons", [(), ("end_followed_results",)])
def test_a_stopped_trial_that_claims_a_guarantee_is_refused(tmp_path: Path, reasons: tuple[Reason, ...]) -> None:
    point = grid(parse_sweep(small(clipping="flat", noise="constant", seeds=0, noise_source="os_entropy")))[0]
    stopped, files = stopped_of(point), TrialFiles(str(tmp_path))
    trace = replace(stopped.trace, ended_by_results=True)
    cost = weakened(replace(account(trace, 1e-5, "rdp"), kind="guarantee", reasons=()), reasons)
    write_result(files.result, replace(stopped, trace=trace, worst_case=cost, others=(), groups=(), risks=()))
    if reasons:
        assert claims.founded_result(files) is not None
    else:
        with pytest.raises(DataCorruption, match="claims that epsilon is a guarantee, but by rdp it is an estimate"):
            claims.founded_result(files)


def test_status_says_that_it_checks_nothing(folder: Path) -> None:
    forge(trial_in(folder, "flat-seed0").result, FORGERIES["epsilon"][0])
    shown = printed("status", folder)
    assert "0.5" not in shown.split()
    assert "were not checked" in " ".join(shown.split())
    assert json.loads(printed("status", folder, "--json"))["checked"] is False
    assert "ε" not in printed("list", folder)


def test_what_dpsweep_account_has_stored_is_checked_too(folder: Path) -> None:
    printed("account", folder, "--address", "in-process")
    stored = next(folder.rglob("account.json"))
    forge(str(stored), lambda account: account.update(epsilon=0.5))
    with pytest.raises(DataCorruption, match=r"account delta=1e-05,rdp claims epsilon 0\.5 of 1 record"):
        render_again(str(folder))


def test_a_claim_that_was_checked_is_checked_again_with_another_specification(folder: Path) -> None:
    dpsweep.open(folder)
    forge(trial_in(folder, "flat-seed0").result, FORGERIES["unit of the specification"][0])
    with pytest.raises(DataCorruption, match="but its spec user of 2"):
        dpsweep.open(folder)


def test_a_claim_that_was_checked_is_not_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dpsweep.open(folder)
    computed = list[object]()
    monkeypatch.setattr(claims, "_cost", lambda *given: computed.append(given))
    dpsweep.open(folder)
    assert computed == []


def test_a_baseline_that_claims_privacy_is_refused(folder: Path) -> None:
    forge(
        trial_in(folder, "non-private-seed0").result,
        lambda result: result["worst_case"].update(epsilon=1.0),
    )
    with pytest.raises(DataCorruption, match="but its trace costs inf"):
        render_again(str(folder))


def test_what_renyi_divergences_do_not_cover_is_borne_out_by_another_accountant(tmp_path: Path) -> None:
    """Every reader asked for Renyi DP of what each start of a trial has released, and failed at random allocation."""
    allocated = {"method": "random_allocation", "batch_size": 256}
    privacy = {"noise_multiplier": 2.0, "delta": 1e-5}
    text = small(sampling=allocated, clipping="flat", noise="constant", seeds=0, epochs=1, privacy=privacy)
    run_sweep(in_process(text, tmp_path / "out"))
    printed("verify", tmp_path / "out")
    forge(
        f"{SweepFiles(str(tmp_path / 'out')).attempts(key_in(tmp_path / 'out', 'flat-seed0'))}/000001.json",
        lambda attempt: attempt["trace"]["segments"][0].update(noise_multiplier=50.0),
    )
    with pytest.raises(DataCorruption, match="record of its attempts claims epsilon 0"):
        render_again(str(tmp_path / "out"))


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
