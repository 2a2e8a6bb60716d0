"""The cells of the report's tables: each number in its row and under its heading."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import Findings, findings
from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.orchestration.report.plot import style_of
from dpsweep.orchestration.report.prose import cautions
from dpsweep.orchestration.report.tables import (
    classes_table,
    group_sizes_table,
    settings_table,
    trials_table,
)
from dpsweep.orchestration.store.published import (
    PublishedPrivacy,
    PublishedSweep,
    TrialState,
)
from tests.orchestration.report.sample_settings import SETTINGS, STYLE, TRIALS, rows
from tests.orchestration.sample_outcomes import sweep_of
from tests.orchestration.sample_sweeps import sample_sweep


def test_every_setting_shows_its_own_means_over_seeds() -> None:
    found = rows(settings_table(Findings(SETTINGS, NO_EVIDENCE), STYLE))
    assert list(found) == ["non-private", "flatPareto front", "dpsgd_fPareto front"]
    assert (
        found["flatPareto front"].items()
        >= {
            "Setting": "flatPareto front",
            "Seeds": "2",
            "Worst-case ε": "3.10",
            "Median εᵢ": "1.10",
            "Test accuracy": "75.0 ± 7.1%",
            "Change, points": "−15.0 ± 7.1",
            "Worst-served group": "rare 55.0 ± 7.1%",
            "Unequal cost, points": "4.0",
        }.items()
    )
    other = found["dpsgd_fPareto front"]
    assert (other["Seeds"], other["Test accuracy"], other["Worst-case ε"]) == ("1", "60.0%", "2.00")
    assert (other["Median εᵢ"], other["Worst-served group"]) == ("1.60", "rare 40.0%")
    baseline = found["non-private"]
    assert (baseline["Worst-case ε"], baseline["Test accuracy"]) == ("∞", "90.0%")


def test_every_trial_shows_its_own_numbers_under_their_headings() -> None:
    failed = replace(TRIALS[3], key="lost", labels={"clipping": "lost"}, state=TrialState.FAILED, error="<lost>")
    failed = replace(failed, quality=None, privacy=None, individuals=None, history=(), started=None)
    estimated = replace(TRIALS[1], privacy=PublishedPrivacy(3.0, 1e-5, "rdp", "estimate", "zero_out"))
    found = rows(trials_table([estimated, TRIALS[2], failed], "worst_group_accuracy"))
    heads = (
        "Status", "Accountant", "Worst-case ε", "Initial σ", "Test accuracy", "Loss", "Worst-served group", "Time",
        "Remarks",
    )  # fmt: skip
    shown = {name: [row[head] for head in heads] for name, row in found.items()}
    assert shown == {
        "flat · seed 0flat-0": ["finished", "rdpestimate, zero_out", "3.00", "1.500", "70.0%", "1.30", "50.0%",
                                "1 min 15 s", ""],
        "flat · seed 1flat-1": ["finished", "pldguarantee, add_remove", "3.20", "1.500", "80.0%", "1.20", "60.0%",
                                "1 min 25 s", ""],
        "lostlost": ["failed", "–", "–", "–", "–", "–", "–", "–", "<lost>"],
    }  # fmt: skip


def test_reasons_and_shared_notes_are_among_the_cautions_and_not_told_again_in_each_row() -> None:
    privacy = PublishedPrivacy(3.0, 1e-5, "pld", "estimate", "add_remove", reasons=("known_seed",))
    lost = "12 of 20 rows are left out"
    noted = replace(TRIALS[1], privacy=privacy, notes=(lost, *in_words(("known_seed",)), "tuned"))
    trials = (noted, replace(TRIALS[2], notes=(lost,)), replace(TRIALS[3], quality=None, notes=()))
    first, *others = rows(trials_table(trials, "worst_group_accuracy")).values()
    assert (first["Accountant"], first["Remarks"]) == ("pldestimate, add_remove: known_seed", "tuned")
    assert [row["Remarks"] for row in others] == ["", ""]
    data = PublishedSweep("half", trials, 1e-5)
    assert cautions(data, findings(data, NO_EVIDENCE)).count(lost) == 1


def test_the_worst_seed_is_what_a_group_pays() -> None:
    found = rows(group_sizes_table(SETTINGS, STYLE))
    assert list(found) == ["flat", "dpsgd_f"], "without the baseline, which pays without bound"
    assert (found["flat"]["k = 1"], found["flat"]["k = 2"]) == ("3.20", "7.40")
    assert (found["dpsgd_f"]["k = 1"], found["dpsgd_f"]["k = 2"]) == ("2.00", "4.00")


def test_groups_whose_epsilon_is_weaker_than_that_of_one_record_say_so() -> None:
    """As under a filter, which limits single records alone."""
    cost = PublishedPrivacy(4.0, 1e-5, "filter", group_epsilons={1: 4.0, 2: 9.0}, group_kinds={2: "estimate"})
    trials = [each if each.is_baseline else replace(each, privacy=cost) for each in TRIALS]
    found = rows(group_sizes_table(finished_settings(trials), STYLE))
    assert (found["flat"]["k = 1"], found["flat"]["k = 2"]) == ("4.00", "9.00estimate")


def test_nothing_known_is_no_table() -> None:
    bare = finished_settings(replace(each, individuals=None, attacks=(), privacy=None) for each in TRIALS)
    style = style_of(bare)
    assert group_sizes_table(bare, style) == ""
    assert trials_table((), "worst_group_accuracy") == "<p>None.</p>"


def test_failed_trials_are_in_no_average() -> None:
    lost = replace(TRIALS[2], state=TrialState.FAILED)
    (setting,) = finished_settings((TRIALS[1], lost))
    assert [each.key for each in setting.trials] == ["flat-0"]


def test_every_class_shows_what_it_is_taken_for_summed_over_seeds() -> None:
    data, _ = sweep_of({"none": (0.9, 0.8), "flat": (0.8, 0.6)}, seeds=2)
    settings = finished_settings(data)
    html = classes_table(settings, style_of(settings))
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html)[1:]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    flat = [cell for cell in cells if "flat" in cell[1]]
    of_flat = [trial.quality.counts for trial in data if trial.labels["clipping"] == "flat" and trial.quality]
    matrix = np.sum([counts.matrix for counts in of_flat if counts], axis=0)
    for label, found in enumerate(flat):
        assert [int(each) for each in found[3:]] == matrix[label].astype(int).tolist()
        assert found[2] == f"{100 * matrix[label][label] / matrix[label].sum():.1f}%"
    assert classes_table(finished_settings(sample_sweep().trials), style_of(settings)) == "", "no counts"
    declared = [replace(trial, params={"spec.data.params.classes": '["ham", "<spam>"]'}) for trial in data]
    named = classes_table(finished_settings(declared), style_of(settings))
    assert named == html.replace("as 0", "as ham").replace("as 1", "as &lt;spam&gt;").replace(
        '<td class="">0</td>', '<td class="">ham</td>'
    ).replace('<td class="">1</td>', '<td class="">&lt;spam&gt;</td>')
