"""Three settings of trials, and the rows of the tables that show them."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.orchestration.report.plot import style_of
from dpsweep.orchestration.store.published import (
    EstimateQuality,
    IndividualStatistics,
    PublishedAttack,
    PublishedAudit,
    PublishedEpoch,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedTrial,
    TrialState,
)

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
            epsilon, 1e-5, "pld", group_epsilons={1: epsilon, 2: 2.0 * epsilon + seed - 0.006} if private else {}
        ),
        quality=PublishedQuality(
            accuracy,
            2.0 - accuracy,
            accuracy - 0.9,
            (
                PublishedGroup("common", 90, accuracy + 0.05, 0.2, -0.01, on_training=accuracy + 0.06),
                PublishedGroup("rare", 10, accuracy - 0.2, 0.9, -0.05, on_training=accuracy - 0.1),
            ),
            on_training=accuracy + 0.02,
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


AUDIT = PublishedAudit(
    name="copy",
    kind="gradient",
    transcript="iterates",
    canaries=2000,
    confidence=0.95,
    of_canary=None,
    lower_bound=0.9,
    lower_bounds={"ranks": 0.9},
    groups={},
    guesses=0,
    correct=0,
)
