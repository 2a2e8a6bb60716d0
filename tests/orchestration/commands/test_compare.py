"""`dpsweep compare`: settings of several sweeps by their parameters, with the numbers of their own reports."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

import dpsweep
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.metric_types import MetricTable
from dpsweep.orchestration.comparison.metrics import columns
from dpsweep.orchestration.comparison.parameters import flattened
from dpsweep.orchestration.comparison.settings import setting_name
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.invoking import invoked, printed
from tests.orchestration.sample_grids import key_in
from tests.orchestration.sample_results import EXACT, stored_sample


def as_json(*folders: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed("compare", *folders, "--json"))
    return found


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A sweep of one epsilon, so that none of its labels names it."""
    return Path(stored_sample(tmp_path / "one").root)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A sweep with a second epsilon and other execution: its labels differ, one setting is the same."""
    changes: dict[str, Any] = {
        "privacy": {"target_epsilon": [5, 8], "delta": 1e-5},
        "execution": {"threads": 2},
        "name": "other",
    }
    return Path(stored_sample(tmp_path / "other", **changes).root)


def test_python_shows_little_and_has_the_table(one: Path, other: Path) -> None:
    sweep = dpsweep.open(one)
    found = dpsweep.compare(sweep, other)
    settings = ["non-private", "non-private", *(["flat · constant · epsilon 5"] * 2), "flat · constant · epsilon 8"]
    assert found.table()["Setting"].tolist() == settings
    assert "<td>flat · constant · epsilon 8</td>" in found._repr_html_()
    finished = sweep.trials[key_in(one, "flat-seed0")]
    shown = (repr(sweep), repr(finished), repr(found), repr(sweep.best()))
    assert max(map(len, shown)) < 250, shown
    assert repr(finished).endswith(": finished, ε 3.000 (estimate)>")
    assert finished.history["epoch"].tolist() == [0, 1]
    assert {"noise_multiplier", "test_accuracy", "epsilon"} <= set(finished.history)
    few = sweep.results()
    assert {"key", "labels.clipping", "status", "epsilon", "kind", "accuracy", "worst_group_accuracy"} <= set(few)
    assert len(few.columns) <= 14 < len(sweep.results(all_columns=True).columns)
    assert f"<td>{finished.key}</td>" in sweep._repr_html_()
    assert "<td>1</td>" in finished._repr_html_(), "its last epoch"
    assert "no guarantee (known_seed)" in sweep.best()._repr_html_()
    figure = sweep.plot("group-accuracy")
    assert (figure.layout.title.text, figure.layout.showlegend) == ("Accuracy on test data", True)
    assert {trace.showlegend for trace in figure.data if trace.name} == {True}
    with pytest.raises(InvalidInput, match=r"the report has no figure 'accuracies'; it has: .*group-accuracy"):
        sweep.plot("accuracies")


def test_settings_are_matched_by_their_parameters_not_their_labels(one: Path, other: Path) -> None:
    settings = as_json(one, other)["settings"]
    found = {each["name"]: [line["trials"] for line in each["sweeps"]] for each in settings}
    assert found == {
        "non-private": [[key_in(one, "non-private-seed0")]] * 2,
        "flat · constant · epsilon 5": [[key_in(one, "flat-seed0")], [key_in(other, "flat-epsilon5-seed0")]],
        "flat · constant · epsilon 8": [[key_in(other, "flat-epsilon8-seed0")]],
    }


def test_the_same_label_with_other_parameters_is_another_setting(one: Path, tmp_path: Path) -> None:
    changed = stored_sample(tmp_path / "changed", clipping=["none", {"name": "flat", "bound": 0.5}])
    settings = as_json(one, Path(changed.root))["settings"]
    assert [(each["name"], len(each["sweeps"])) for each in settings] == [
        ("non-private", 2),
        ("flat (bound 1) · constant", 1),
        ("flat (bound 0.5) · constant", 1),
    ]


def test_numbers_are_those_of_the_reports(one: Path, other: Path) -> None:
    (line, _) = as_json(one, other)["settings"][1]["sweeps"]
    assert line["seeds"] == [0]
    trials = stored_record(SweepFiles(str(one))).data().trials
    expected = columns(MetricTable.SETTINGS, "worst_group_accuracy", trials)
    assert line["metrics"].keys() == {metric.name for metric in expected}
    assert (line["metrics"]["accuracy"]["mean"], line["metrics"]["accuracy"]["count"]) == (0.7, 1)
    page = render(stored_record(SweepFiles(str(one))).data())
    for name in ("epsilon", "accuracy", "accuracy_change"):
        assert f'<td class="n">{line["metrics"][name]["shown"]}</td>' in page
    assert line["metrics"]["worst_group_accuracy"]["shown"] == "b: 60.0%"
    shown = printed("compare", one, other)
    assert "70.0%" in shown
    assert "other" in shown
    assert "All 3 private trials together cost ε = " in shown, "both sweeps trained on the same records"


def test_results_of_a_sweep_may_have_decided_that_another_private_one_was_run(one: Path, tmp_path: Path) -> None:
    bounds = [{"name": "flat", "bound": bound} for bound in (0.25, 0.5)]
    two = Path(stored_sample(tmp_path / "two", clipping=["none", *bounds]).root)
    baseline = Path(stored_sample(tmp_path / "baseline", clipping=["none"]).root)
    for other, is_private in ((baseline, False), (one, True)):
        composed = as_json(two, other)["composed"]
        assert composed["trials"] == 2 + is_private
        assert ("end_followed_results" in composed["reasons"]) == is_private


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "digits"}, "not the same data, so numbers of one sweep do not compare with those of another: small"),
        ({"privacy": {"target_epsilon": 5, "delta": 1e-6}}, "not the same δ, "),
    ],
)
def test_other_data_and_another_delta_are_said(one: Path, tmp_path: Path, changes: Any, message: str) -> None:
    other = Path(stored_sample(tmp_path / "other", **changes).root)
    found = as_json(one, other)
    research, sentence = found["differences"]
    assert research.startswith("no guarantee (known_seed): "), "the default of noise_source"
    assert sentence.startswith(message)
    assert str(other) in sentence
    assert (found["composed"] is None) == ("data" in changes), "other records are not charged for"
    assert sentence in printed("compare", one, other)
    invoked("compare", one, other, "--html", tmp_path / "a.html")
    assert message in (tmp_path / "a.html").read_text()


def test_data_of_unknown_size_are_not_called_different(one: Path, other: Path) -> None:
    for result in (other / "trials").glob("*/result.json"):
        result.unlink()
    found = as_json(one, other)
    assert not [said for said in found["differences"] if "not the same data" in said or "the same adjacency" in said]
    assert f"{other} has no finished trial" in found["differences"]
    assert found["composed"] is not None, "all private trials read the same records"


def test_a_default_written_out_is_the_same_setting(one: Path, tmp_path: Path) -> None:
    clipping = ["none", {"name": "flat", "bound": 1.0}, {"name": "flat", "bound": 0.5}]
    written = stored_sample(tmp_path / "written", clipping=clipping)
    settings = as_json(one, Path(written.root))["settings"]
    assert [(each["name"], len(each["sweeps"])) for each in settings] == [
        ("non-private", 2),
        ("flat (bound 1) · constant", 2),
        ("flat (bound 0.5) · constant", 1),
    ]


def test_settings_are_called_as_the_report_of_a_sweep_of_them_all_calls_them(tmp_path: Path) -> None:
    """By every part of a setting: component, schedule, sampling, target, optimizer. Splits are runs of one setting."""
    changes: dict[str, Any] = {
        "clipping": ["none", {"name": "flat", "bound": [0.5, 2]}],
        "noise": ["constant", {"name": "exponential", "decay": 0.01}],
        "sampling": [{"method": "poisson", "batch_size": size} for size in (32, 64)],
        "data": [{"name": "breast_cancer", "split_seed": seed} for seed in (0, 1)],
        "optimizer": {"name": "sgd", "learning_rate": [0.1, 1]},
    }
    whole = stored_sample(tmp_path / "whole", **changes)
    few = {**changes, "clipping": ["flat"], "noise": "constant", "epochs": 3, "name": "few"}
    names = {
        each["name"]
        for each in as_json(Path(whole.root), Path(stored_sample(tmp_path / "few", **few).root))["settings"]
    }
    said = {setting_name(trial) for trial in stored_record(whole).data().trials}
    assert len(said) == 20
    assert said == {name.replace(" · epochs 2", "") for name in names if "epochs 3" not in name}
    assert (
        "flat (bound 1) · constant · optimizer sgd (learning rate 1) · sampling poisson (batch size 64) · epochs 3"
        in names
    )


def test_the_page_is_escaped_and_private_where_numbers_are_exact(one: Path, tmp_path: Path) -> None:
    raw = stored_sample(tmp_path / "raw", individuals=EXACT, release="raw", name="raw")
    for name, folders in (("open", (one, raw.root)), ("closed", (one, stored_sample(tmp_path / "<b>").root))):
        assert invoked("compare", *folders, "--html", tmp_path / f"{name}.html").exit_code == 0
    modes = [stat.S_IMODE((tmp_path / f"{name}.html").stat().st_mode) for name in ("open", "closed")]
    assert modes[0] == 0o600
    assert modes[1] != 0o600
    opened, closed = ((tmp_path / f"{name}.html").read_text() for name in ("open", "closed"))
    assert ("Sensitive." in opened, "Sensitive." in closed) == (True, False)
    assert "1.10" in opened, "the exact median of the sweep that shows it"
    assert 'name="viewport" content="width=device-width' in closed, "readable on a phone"
    assert "&lt;b&gt;" in closed
    assert "<b>" not in closed


def test_one_sweep_alone_and_copies_of_one_are_refused(one: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="needs two sweeps or more"):
        printed("compare", one, one)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "sweep.json").write_bytes((one / "sweep.json").read_bytes())
    with pytest.raises(InvalidInput, match="hold the same sweep"):
        printed("compare", one, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="holds no sweep"):
        printed("compare", one, tmp_path)


@pytest.fixture
def unlike(tmp_path: Path) -> Path:
    """A sweep whose settings all differ from those of `one` in data, length and sampling; it has another metric."""
    changes: dict[str, Any] = {
        "data": {"name": "digits", "keep": {"8": 20}},
        "epochs": 7,
        "sampling": {"method": "poisson", "batch_size": 32},
        "compare": {"worst_group": "balanced_accuracy"},
        "name": "unlike",
    }
    return Path(stored_sample(tmp_path / "unlike", **changes).root)


def test_in_what_whole_sweeps_differ_is_a_table_and_in_no_name(one: Path, unlike: Path, tmp_path: Path) -> None:
    found = as_json(one, unlike)
    assert found["between_sweeps"]["epochs"][str(unlike)] == [7]
    assert found["between_sweeps"]["data.keep.8"] == {str(one): [0.1], str(unlike): [20]}
    assert all("epochs 7" in each["name"] for each in found["settings"] if str(unlike) in str(each["sweeps"]))
    lines = printed("compare", one, unlike, "--html", tmp_path / "a.html").splitlines()
    assert [next(line for line in lines if line.startswith("epochs")).split()[part] for part in (0, 2)] == [
        "epochs",
        "7",
    ]
    flat = [line for line in lines if line.startswith("flat")]
    assert [line.split()[:4] for line in flat] == [["flat", "·", "constant", name] for name in ("small", "unlike")]
    page = (tmp_path / "a.html").read_text()
    assert "What differs between the sweeps" in page
    assert '<td class="">flat · constant</td>' in page


def test_settings_that_only_whole_sweeps_tell_apart_stand_beside_each_other(tmp_path: Path) -> None:
    """As the winners of a tuning and their candidates, whose stage releases nothing."""
    clipping = ["none", {"name": "flat", "bound": [0.5, 1]}]
    folders = [
        Path(stored_sample(tmp_path / name, name=name, release=name, clipping=clipping).root)
        for name in ("none", "private")
    ]
    lines = [line.split()[:6] for line in printed("compare", *folders).splitlines() if line.startswith("flat")]
    assert [(line[2], line[5]) for line in lines] == [
        ("0.5)", "none"),
        ("0.5)", "private"),
        ("1)", "none"),
        ("1)", "private"),
    ]


def test_names_in_other_alphabets_are_shown_as_they_are() -> None:
    assert flattened({"data": {"groups": ["für", "男"]}}) == {"data.groups": '["für", "男"]'}


def test_the_metric_of_groups_that_a_sweep_chose_is_shown_beside_the_common_one(one: Path, unlike: Path) -> None:
    metrics = {
        line["sweep"]: line["metrics"].keys() for each in as_json(one, unlike)["settings"] for line in each["sweeps"]
    }
    assert "worst_group_accuracy" in metrics[str(one)] & metrics[str(unlike)]
    assert "worst_group_balanced_accuracy" in metrics[str(unlike)] - metrics[str(one)]
    assert "Worst balanced accuracy" in printed("compare", one, unlike)


def test_sweeps_of_one_name_are_told_apart_by_their_folders(one: Path, tmp_path: Path) -> None:
    again = Path(stored_sample(tmp_path / "again", epochs=7).root)
    shown = " ".join(printed("compare", one, again).split())
    assert str(one) in shown
    assert str(again) in shown


def test_changes_against_a_baseline_that_learnt_nothing_are_shown_nowhere(tmp_path: Path) -> None:
    sweep = {
        "data": "breast_cancer",
        "model": "logistic",
        "sampling": {"method": "poisson", "batch_size": 64},
        "epochs": 1,
        "clipping": ["none", "flat"],
        "privacy": {"noise_multiplier": 2, "delta": 1e-5, "accountant": "rdp"},
    }
    folders, told = (
        [tmp_path / "one", tmp_path / "other"],
        "nothing shows that the baseline beats a constant prediction; the cost of privacy",
    )
    for folder, rate in zip(folders, (1e-6, 2e-6), strict=True):
        changed = tmp_path / f"{folder.name}.yaml"
        changed.write_text(
            json.dumps({**sweep, "name": folder.name, "optimizer": {"name": "sgd", "learning_rate": rate}})
        )
        arguments = ["run", changed, "--output", folder, "--address", "in-process", "--tracking-uri", "none"]
        done = invoked(*arguments)
        assert done.exit_code == 0, done.output
        (private,) = [line for line in done.output.splitlines() if line.startswith(" flat")]
        accuracy, change = private.split()[3:5]
        assert accuracy.endswith("%"), private
        assert change == "–", private
    found = as_json(*folders)
    assert [told in each for each in found["differences"]].count(True) == 2
    lines = [line["metrics"] for each in found["settings"] for line in each["sweeps"]]
    assert len(lines) == 4
    assert {each["accuracy_change"]["shown"] for each in lines} == {"–"}
