"""What a sweep publishes on two data sets that differ in one row: all that differs has noise, or is made from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import dpsweep as library
from dpsweep.orchestration.execution.completion import Times, complete_trial
from dpsweep.orchestration.pipeline import render_again
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration import own_people
from tests.orchestration.processes import dpsweep
from tests.orchestration.public_values import (
    Values,
    may_vary,
    published,
    shown_digests,
    tracked,
    unexplained,
    unhidden,
    words,
)
from tests.orchestration.sample_grids import small
from tests.workers.data_folders import make_tokenizer

INCOME = 41_000.0


def text(path: Path, **changes: Any) -> str:
    """A sweep of one private trial, at epsilon 1; noise and batches come from the operating system."""
    settings: dict[str, Any] = {
        "data": {"name": f"{own_people.__file__}:people", "path": str(path)},
        "model": "logistic",
        "sampling": {"method": "poisson", "batch_size": 20},
        "clipping": {"name": "flat", "bound": 1.0},
        "noise": "constant",
        "privacy": {"target_epsilon": 1, "delta": 1e-5},
        "epochs": 1,
        "seeds": 0,
        "noise_source": "os_entropy",
    }
    return small(**settings | changes)


def trial_on(income: float, folder: Path, **changes: Any) -> Values:
    """What one trial publishes, trained and accounted on the rows with this income."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    own_people.store(folder / "people.npy", income)
    sweep = parse_sweep(text(folder / "people.npy", **changes))
    code = permitted(sweep, folder, [own_people.__file__])
    (planned,) = plan_sweep(sweep, code).trials
    files = SweepFiles(str(folder / "out")).trial(planned.spec.key)
    run_trial(planned.spec, files.root, code=code, releases=planned.releases)
    complete_trial(planned, files, sweep, Times(0.0, 1.0))
    return published(folder / "out")


@pytest.mark.long
def test_no_candidate_for_one_income_can_be_told_from_another(tmp_path: Path) -> None:
    """An attacker who knows all other rows runs the sweep on each candidate and compares what has no noise."""

    def fingerprint(income: float) -> Values:
        return {place: value for place, value in trial_on(income, tmp_path).items() if not may_vary(place)}

    candidates = [INCOME + 1000.0 * offset for offset in range(-4, 5)]
    victim = fingerprint(INCOME)
    assert len(victim) > 100
    assert [income for income in candidates if fingerprint(income) == victim] == candidates


VARIANTS: dict[str, dict[str, Any]] = {
    "individual": {"clipping": {"name": "individual", "bound": 1.0}},
    "median": {"clipping": {"name": "flat", "bound": {"median_multiple": 1.0}}},
    "quantile": {"clipping": {"name": "quantile", "bound": 1.0}},
    "dpsgd_f": {"clipping": {"name": "dpsgd_f", "bound": 1.0}},
    "released": {"release": "private", "epochs": 2},
    "tracked": {"norms": {"exact_examples": 10, "refreshes_per_epoch": 2}, "epochs": 2},
    "attacked": {"attacks": {"loss_threshold": True}, "epochs": 2},
    "shuffled": {"sampling": {"method": "shuffle", "batch_size": 20}},
    "filter": {"clipping": {"name": "filter", "bound": 1.0}},
    "naive": {"clipping": {"name": "naive", "bound": 1.0}},
    "global_adaptive": {"clipping": {"name": "global_adaptive", "bound": 1.0}},
    "sampled": {
        "norms": {"refreshes_per_epoch": "when_sampled"},
        "release": {"name": "private", "quantiles": [0.5, 0.9]},
        "epochs": 2,
    },
    "truncated": {"sampling": {"method": "poisson", "batch_size": 20, "max_batch_size": 30}, "release": "private"},
    "fixed": {"sampling": {"method": "fixed", "batch_size": 20}, "release": "private"},
    "audited": {"audit": {"canaries": 20}, "epochs": 2},
    "without norms": {"norms": "off", "accounting": {"group_sizes": [1, 2]}},
    "every step": {
        "clipping": {"name": "dpsgd_f", "bound": 1.0},
        "norms": {"refreshes_per_epoch": "every_step"},
        "release": "private",
    },
}


@pytest.mark.thinned(18)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_what_does_not_vary_with_the_noise_does_not_vary_with_a_row(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The rows of the neighbours: another income, and one whose gradient is not finite."""
    draws = [trial_on(INCOME, tmp_path, **changes) for _ in range(3)]
    assert len(draws[0]) > 100
    for income in (190_000.0, 1e40):
        neighbour = trial_on(income, tmp_path, **changes)
        assert unexplained([*draws, neighbour]) == []
        assert unhidden(draws, neighbour) == []


def test_the_private_report_alone_tells_of_texts_that_are_cut_or_have_no_token(tmp_path: Path) -> None:
    """With as many tokens as are taken, or with more of them, all that is public is the same but for the times."""
    path, told = tmp_path / "texts.csv", "120 training texts were cut at 4 tokens; 3 have no token"
    (tmp_path / "test.csv").write_text("body,mood\n" + "the cat sat on the mat,pos\nred sky,neg\n" * 20)
    tokenizer = str(make_tokenizer(tmp_path / "t.json"))
    data: dict[str, Any] = {"name": "text", "path": str(path), "text": "body", "tokenizer": tokenizer}
    data |= {"label": "mood", "classes": ["neg", "pos"], "test_path": str(tmp_path / "test.csv"), "max_length": 4}
    model = {"name": "transformer", "width": 8, "depth": 1, "heads": 2}
    sweep = text(path, data=data, model=model, noise_source="seeded")
    found: list[tuple[object, Values, str]] = []
    for more in ("", " the mat"):
        path.write_text("body,mood\n" + f"the cat sat on{more},pos\nred sky,neg\na dog,pos\n" * 39 + '" ",neg\n' * 3)
        out = tmp_path / f"out{len(found)}"
        planned = library.plan(sweep)
        library.run(sweep, output=str(out), address="in-process", tracking_uri="none")
        files = SweepFiles(str(out))
        for page in (files.report, files.results):
            assert "no token" not in Path(page).read_text()
        found.append((planned, published(out), words(files.private_report)))
    (plan, values, before), (plan_cut, values_cut, after) = found
    assert (plan, "no token" in repr(plan)) == (plan_cut, False)
    different = unhidden([values], values_cut)
    assert [place for place in different if not place.endswith("/result.json/sha256")] == []  # which has the times
    assert f"0 of {told}" in before
    assert f"39 of {told}" in after


def sweep_on(income: float, folder: Path) -> Values:
    """What a whole sweep publishes: its files, Tune's, and MLflow's store."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    own_people.store(folder / "people.npy", income)
    (folder / "sweep.yaml").write_text(text(folder / "people.npy"))
    options = ("--output", out, "--allow-code", own_people.__file__, "--json")
    done = dpsweep("run", folder / "sweep.yaml", *options)
    assert done.returncode == 0, done.stderr
    return published(out) | tracked(out / "mlflow.db")


@pytest.mark.long
def test_a_sweep_publishes_nothing_of_a_row_that_noise_does_not_hide(tmp_path: Path) -> None:
    first, neighbour = sweep_on(INCOME, tmp_path), sweep_on(190_000.0, tmp_path)
    assert len([place for place in first if place.startswith(("mlflow/", "tune/"))]) > 100
    assert unexplained([first, neighbour]) == []
    assert shown_digests(tmp_path / "out") == []
    files = SweepFiles(str(tmp_path / "out"))
    render_again(files.root)
    shown = rows(files)
    for folder in [*Path(files.root).rglob("private")]:
        shutil.rmtree(folder)
    render_again(files.root)
    assert rows(files) == shown, "the results are made of public files"


def rows(files: SweepFiles) -> list[dict[str, Any]]:
    """The rows of results.json but for comparisons of settings, which rest on the predictions of test examples."""
    found: list[dict[str, Any]] = json.loads(Path(files.results).read_text())
    assert len(found) == 1
    return [row | {"setting": None} for row in found]
