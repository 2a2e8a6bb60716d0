"""The cells of the report's tables: each number in its row and under its heading."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from orchestration.comparison.evidence import NO_EVIDENCE
from orchestration.comparison.findings import Findings
from orchestration.comparison.settings import finished_settings
from orchestration.records.published import (
    EstimateQuality,
    IndividualStatistics,
    PublishedAttack,
    PublishedEpoch,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedTrial,
)
from orchestration.records.states import TrialState
from orchestration.report.style import style_of
from orchestration.report.tables import (
    attacks_table,
    classes_table,
    estimates_table,
    group_sizes_table,
    losses_table,
    settings_table,
    trials_table,
)
from tests.orchestration.sample_outcomes import sweep_of
from tests.orchestration.sample_sweeps import sample_sweep

Row = dict[str, str]


class Cells(HTMLParser):
    """The rows of the tables of a page, by heading."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.rows: list[list[str]] = []
        self._open = False
        self.feed(html)

    @property
    def by_name(self) -> dict[str, Row]:
        """Each row by the words of its first cell."""
        assert all(len(row) == len(self.heads) for row in self.rows)
        return {row[0]: dict(zip(self.heads, row, strict=True)) for row in self.rows}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag == "th":
            self.heads.append("")
        elif tag == "td":
            self.rows[-1].append("")
        self._open = tag in ("th", "td") or (self._open and tag in ("small", "br", "span", "svg", "circle", "path"))

    def handle_endtag(self, tag: str) -> None:
        if tag == "thead":
            self.rows = []

    def handle_data(self, data: str) -> None:
        cells = self.rows[-1] if self.rows and self.rows[-1] else self.heads
        if cells:
            cells[-1] += data


def rows(html: str) -> dict[str, Row]:
    return Cells(html).by_name


def trial(clipping: str, seed: int, accuracy: float, epsilon: float, median: float) -> PublishedTrial:
    private = clipping != "none"
    return PublishedTrial(
        key=f"{clipping}-{seed}",
        labels={"clipping": clipping, "seed": seed},
        state=TrialState.FINISHED,
        privacy=PublishedPrivacy(
            epsilon, 1e-5, "pld", group_epsilons={1: epsilon, 2: 2.0 * epsilon + seed} if private else {}
        ),
        quality=PublishedQuality(
            accuracy,
            2.0 - accuracy,
            accuracy - 0.9,
            (
                PublishedGroup("common", 90, accuracy + 0.05, 0.2, -0.01),
                PublishedGroup("rare", 10, accuracy - 0.2, 0.9, -0.05),
            ),
        ),
        individuals=IndividualStatistics(
            "raw",
            "estimate",
            mean=median + 0.25,
            median=median,
            estimates=EstimateQuality(100, 0.9 + 0.02 * seed, 0.01 + 0.01 * seed, 0.05 + 0.02 * seed),
            loss_correlation=0.5 + 0.1 * seed,
        )
        if private
        else None,
        attacks=(PublishedAttack("common", 72, 0.55 + 0.1 * seed, 0.06), PublishedAttack("rare", 20, 0.6, 0.11)),
        history=(PublishedEpoch(0, 10, 1.5), PublishedEpoch(1, 20, 1.25)) if private else (),
        started=0.0,
        ended=75.0 + 10 * seed,
    )


TRIALS = (
    trial("none", 0, 0.9, math.inf, 0.0),
    trial("flat", 0, 0.70, 3.0, 1.0),
    trial("flat", 1, 0.80, 3.2, 1.2),
    trial("dpsgd_f", 0, 0.60, 2.0, 1.6),
)
SETTINGS = finished_settings(TRIALS)
STYLE = style_of(SETTINGS)


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


def test_the_worst_seed_is_what_a_group_pays() -> None:
    found = rows(group_sizes_table(SETTINGS, STYLE))
    assert list(found) == ["flat", "dpsgd_f"], "without the baseline, which pays without bound"
    assert (found["flat"]["k = 1"], found["flat"]["k = 2"]) == ("3.20", "7.40")
    assert (found["dpsgd_f"]["k = 1"], found["dpsgd_f"]["k = 2"]) == ("2.00", "4.00")


def test_estimates_are_averaged_and_the_largest_error_is_the_largest() -> None:
    found = rows(estimates_table(SETTINGS, STYLE))
    assert list(found) == ["flat", "dpsgd_f"]
    assert list(found["flat"].values())[1:] == ["200", "0.9100", "0.0150", "0.0700"]
    assert list(found["dpsgd_f"].values())[1:] == ["100", "0.9000", "0.0100", "0.0500"]


def test_correlations_with_loss_are_averaged() -> None:
    found = rows(losses_table(SETTINGS, STYLE))
    assert {name: row["All"] for name, row in found.items()} == {"flat": "0.55", "dpsgd_f": "0.50"}


def test_attacks_show_rates_errors_over_seeds_and_examples() -> None:
    found = rows(attacks_table(SETTINGS, STYLE))
    assert found["flat"]["common"] == "60.0 ± 4.2%of 144"
    assert found["dpsgd_f"]["common"] == "55.0 ± 6.0%of 72"
    assert found["non-private"]["rare"] == "60.0 ± 11.0%of 20"


def test_nothing_known_is_no_table() -> None:
    bare = finished_settings(replace(each, individuals=None, attacks=(), privacy=None) for each in TRIALS)
    style = style_of(bare)
    for table in (group_sizes_table, estimates_table, losses_table, attacks_table):
        assert table(bare, style) == ""
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
