"""Whatever makes a run not private is named by every output that shows its epsilon, which is then an estimate."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

import dpsweep
from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.mechanism.reasons import REASONS, Reason
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.orchestration.commands.printed_tables import print_outcome
from dpsweep.orchestration.comparison.best import best
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import findings
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.record import claimed
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.pipeline import RunRequest, run_sweep
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedPrivacy, PublishedTrial, TrialState
from dpsweep.orchestration.store.results import read_result, write_result
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import reasons_of
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.orchestration.invoking import printed
from tests.orchestration.sample_grids import in_process, key_in, small
from tests.orchestration.sample_sweeps import sample_sweep
from tests.orchestration.tracking.recordings import client_of, one, runs_of

TEXT = small(
    clipping={"name": "flat", "bound": 1.0},
    noise="constant",
    seeds=0,
    optimizer={"name": "adam", "learning_rate": 0.02},  # so that `best` finds the trial of use, whatever the noise
    release="raw",
    noise_source="os_entropy",
    norms={"refreshes_per_epoch": "every_step"},
    accounting={"group_sizes": [1, 2]},
)
EVERY = tuple(REASONS)


def request(folder: Path) -> RunRequest:
    return in_process(TEXT, folder, None)


def kinds(found: Any) -> set[str]:
    """All values of a field that ends in ``kind``, however deep."""
    if isinstance(found, list):
        return set().union(*map(kinds, found))
    if not isinstance(found, dict):
        return set()
    own = {value for name, value in found.items() if name.endswith("kind") and isinstance(value, str)}
    return own.union(*map(kinds, found.values()))


def give_every_reason(files: SweepFiles, key: str) -> None:
    """Rewrite the stored result and the record of its release as those of a trial that all reasons weaken."""
    result = read_result(files.trial(key).result)
    assert result is not None
    write_result(files.trial(key).result, claimed(result, EVERY))
    record = f"{files.attempts(key)}/000001.json"
    values = json.loads(read_sealed(record, "") or b"")
    write_sealed(record, json.dumps({**values, "reasons": EVERY}).encode())


def another(files: SweepFiles, folder: Path) -> str:
    """A copy of the sweep that counts as another one."""
    shutil.copytree(files.root, folder)
    manifest = str(folder / "sweep.json")
    values = json.loads(read_sealed(manifest, "") or b"")
    write_sealed(manifest, json.dumps({**values, "sweep_id": "another"}).encode())
    return str(folder)


def of_mlflow(files: SweepFiles, key: str) -> dict[str, dict[str, str]]:
    """The tags of MLflow's run of the trial, of the sweep, and of the registered model."""
    client = client_of(Path(files.root))
    trial, sweep = one(runs_of(client), trial_key=key), one(runs_of(client), kind="sweep")
    (version,) = client.search_model_versions("name = 'digits'")
    (model,) = client.search_logged_models([sweep.info.experiment_id])
    return {"trial": trial.data.tags, "sweep": sweep.data.tags, "registered": version.tags, "model": model.tags}


def outputs(folder: Path, files: SweepFiles, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What every command, file and name of the library shows of the sweep in a folder, as text."""
    capsys.readouterr()
    print_outcome(run_sweep(request(folder / "out")))
    found = {"run": capsys.readouterr().out}
    key, root = key_in(files.root, "flat-seed0"), files.root
    trial, owner = files.trial(key).root, ("--example-id", "0")
    found["account"] = printed("account", root, "--address", IN_PROCESS, "--group-sizes", "2", "--json")
    found["results.json"] = Path(files.results).read_text()
    found["result.json"] = (read_sealed(files.trial(key).result, "") or b"").decode()
    found["comparison.json"] = Path(files.comparison).read_text()
    found["report.html"] = Path(files.report).read_text()
    found["private/report.html"] = Path(files.private_report).read_text()
    found["status"], found["status --json"] = printed("status", root), printed("status", root, "--json")
    found["best"] = printed("best", root, "--register", "digits")
    found["best --json"] = printed("best", root, "--json")
    found["owner-report"] = printed("owner-report", trial, *owner, "--html", str(folder / "owner.html"))
    found["owner.html"] = (folder / "owner.html").read_text()
    found["owner-report --json"] = printed("owner-report", trial, *owner, "--json")
    found["epsilon"] = printed("epsilon", "--trial", trial, "--delta", "1e-5", "--risk")
    found["epsilon --json"] = printed("epsilon", "--trial", trial, "--delta", "1e-5", "--individual", "rdp", "--json")
    for suffix in (".csv", ".parquet"):
        printed("export", root, "--to", str(folder / f"table{suffix}"))
    found["export .csv"] = json.dumps(next(csv.DictReader((folder / "table.csv").open()))["reasons"])
    found["export .parquet"] = json.dumps(parquet.read_table(folder / "table.parquet")["reasons"].to_pylist())
    others = (root, another(files, folder / "other"), "--html", str(folder / "compared.html"))
    found["compare"], found["compare --json"] = printed("compare", *others), printed("compare", *others, "--json")
    found["compared.html"] = (folder / "compared.html").read_text()
    found |= {f"MLflow: {name}": json.dumps(tags) for name, tags in of_mlflow(files, key).items()}
    sweep = dpsweep.open(root)
    result = sweep.trials[key].result
    assert result is not None
    claims = (result.worst_case, *result.groups, *result.risks, result.individuals, sweep.trials[key].epsilons())
    for place, claim in enumerate((*claims, sweep.best())):
        assert claim is not None
        found[f"Python: {place}"] = json.dumps({"kind": claim.kind, "reasons": claim.reasons})
    found["Python: results"] = json.dumps(sweep.results(all_columns=True)["reasons"].tolist())
    return found


def test_every_output_names_every_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = run_sweep(request(tmp_path / "out")).files
    key = key_in(files.root, "flat-seed0")
    before = Path(files.results).read_text()
    assert {*kinds(json.loads(before))} == {"guarantee"}
    assert not [reason for reason in EVERY if reason in before]
    give_every_reason(files, key)
    for name, text in outputs(tmp_path, files, capsys).items():
        assert [reason for reason in EVERY if reason not in text] == [], name
        if text.startswith(("{", "[{")):
            assert "guarantee" not in kinds(json.loads(text)), name


TABLE = {"name": "csv", "label": "kind", "features": ["size"], "classes": ["a", "b"], "ranges": {"size": [0, 1]}}
RUN = Trace(1000, (Segment(0, 20, PoissonSampling(0.05), 1.0),))


def of_plan(folder: Path, data: Mapping[str, Any] | None = None, **changes: object) -> tuple[Reason, ...]:
    """The reasons in the plan of a private trial on a table."""
    rows = "".join(f"{place / 100},{'ab'[place % 2]},{'xy'[place % 3 > 0]}\n" for place in range(100))
    (folder / "table.csv").write_text(f"size,kind,side\n{rows}")
    (folder / "mine.py").write_text(
        "from dpsweep.workers.clipping.by_norm import FlatClipping\ndef clip():\n    return FlatClipping(1.0)\n"
    )
    declared = {**TABLE, "path": str(folder / "table.csv"), **(data or {})}
    kept = {name: value for name, value in declared.items() if value is not None}
    text = small(**{
        "data": kept, "model": "logistic", "clipping": "flat", "noise": "constant", "seeds": 0,
        "sampling": {"method": "poisson", "batch_size": 10}, "noise_source": "os_entropy", "epochs": 1,
        **changes,
    })  # fmt: skip
    sweep = parse_sweep(text)
    plan = plan_sweep(sweep, permitted(sweep, folder, ()))
    assert not plan.refusals, plan.refusals
    cost = plan.trials[0].worst_case
    assert cost.kind == ("estimate" if cost.reasons else "guarantee")
    return cost.reasons


def of_ledger(**changes: Any) -> tuple[Reason, ...]:
    """The reasons of the composed epsilon of two trials, of the second one with these changes."""
    trials = []
    for key, own in (("a", {}), ("b", changes)):
        own = {"trace": RUN, "seed": None, "reasons": (), **own}
        attempt = Attempt(key, 1, 1e-5, own["trace"], own["seed"], True, reasons=own["reasons"])
        privacy = PublishedPrivacy(1.0, 1e-5, "pld")
        trials.append(PublishedTrial(key, {}, TrialState.FINISHED, privacy=privacy, attempts=(attempt,)))
    found = composed(trials[1:] * 2 if changes.get("seed") else trials)
    assert found is not None
    return found.reasons


def of_tuning(candidates: bool) -> tuple[Reason, ...]:
    """The reasons of a trial that an unaccounted tuning chose, alone or with the candidates of the tuning."""
    tune = {"parameters": {"clipping.bound": [0.5, 1.0]}, "privacy": "unaccounted"}
    sweep = parse_sweep(small(data={"name": "digits", "public_fraction": 0.1}, tune=tune, clipping="flat"))
    spec = plan_sweep(sweep).trials[0].spec
    reasons = reasons_of(sweep, replace(spec, noise_source="os_entropy"), ())
    privacy = PublishedPrivacy(1.0, 1e-5, "pld", "estimate", reasons=reasons)
    attempt = Attempt("a", 1, 1e-5, RUN, None, True, reasons=reasons)
    others = (Attempt("c", 1, 1e-5, RUN, None, True),) if candidates else ()
    trial = PublishedTrial("a", {}, TrialState.FINISHED, privacy=privacy, attempts=(attempt,), candidates=others)
    found = composed([trial])
    assert found is not None
    return found.reasons


def of_choice() -> tuple[Reason, ...]:
    """The reasons of a choice by a metric of training examples."""
    data = sample_sweep(disclosure="raw")
    return best(findings(data, NO_EVIDENCE), at_least={"clipping_bias_gap": 100.0}).reasons


ASHA = {"name": "asha", "metric": "test_accuracy", "accept_unaccounted_selection": True}
CAUSES: dict[Reason, Callable[[Path], tuple[Reason, ...]]] = {
    "known_seed": lambda folder: of_plan(folder, noise_source="seeded"),
    "ranges_from_rows": lambda folder: of_plan(folder, {"ranges": None}),
    "classes_from_rows": lambda folder: of_plan(folder, {"classes": None}),
    "groups_from_rows": lambda folder: of_plan(folder, {"group": "side"}),
    "not_confirmed": lambda folder: of_plan(folder, drafted=True),
    "own_clipping": lambda folder: of_plan(folder, clipping="mine:clip"),
    "unaccounted_tuning": lambda folder: of_tuning(candidates=True),
    "candidates_not_counted": lambda folder: of_tuning(candidates=False)[-1:],
    "unaccounted_scheduler": lambda folder: of_plan(folder, scheduler=ASHA),
    "chosen_by_private_results": lambda folder: of_choice(),
    "noise_followed_results": lambda folder: account(replace(RUN, noise_follows_results=True), 1e-5).reasons,
    "end_followed_results": lambda folder: account(replace(RUN, ended_by_results=True), 1e-5).reasons,
    "repeated_seed": lambda folder: of_ledger(seed=7)[-1:],
    "norms_estimated": lambda folder: replace(RUN, contributions="estimate").individual_reasons,
    "accountant_not_proven": lambda folder: account(RUN, 1e-5, "dp-accounting-rdp").reasons,
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("reason", EVERY)
def test_each_reason_has_its_cause_and_no_other_comes_with_it(reason: Reason, tmp_path: Path) -> None:
    assert CAUSES[reason](tmp_path) == (reason,)


def test_the_page_that_says_which_epsilon_to_quote_says_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text()
    assert [reason for reason, words in REASONS.items() if f"| `{reason}` | {words} |" not in page] == []


def test_what_is_declared_and_secret_is_a_guarantee(tmp_path: Path) -> None:
    assert of_plan(tmp_path, {"group": "side", "groups": ["x", "y"]}) == ()
    assert of_ledger() == ()
    assert of_ledger(reasons=("own_clipping",)) == ("own_clipping",)


def test_a_plan_tells_reasons(tmp_path: Path) -> None:
    of_plan(tmp_path)
    file = tmp_path / "sweep.yaml"
    data = {**TABLE, "path": str(tmp_path / "table.csv"), "classes": None}
    kept = {name: value for name, value in data.items() if value is not None}
    sampling = {"method": "poisson", "batch_size": 10}
    file.write_text(small(data=kept, model="logistic", sampling=sampling, clipping="flat", noise="constant", seeds=0))
    assert "no guarantee (classes_from_rows)" in printed("plan", str(file))
    (row,) = json.loads(printed("plan", str(file), "--json"))["trials"]
    assert (row["kind"], row["reasons"]) == ("estimate", ["known_seed", "classes_from_rows"])
