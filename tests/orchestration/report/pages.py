"""What the report's tests read off a page."""

from __future__ import annotations

import functools
from html.parser import HTMLParser

import plotly.graph_objects as go

from dpsweep.orchestration.report.catalogue import drawn_figures
from dpsweep.orchestration.report.page import render
from dpsweep.orchestration.store.published import PublishedSweep
from dpsweep.orchestration.store.release_modes import Disclosure
from tests.orchestration.sample_sweeps import sample_sweep


@functools.cache
def rendered(disclosure: Disclosure) -> str:
    """The page of the sample sweep, drawn once for all tests that read it."""
    return render(sample_sweep(disclosure))


def figures(data: PublishedSweep) -> dict[str, go.Figure]:
    """The figures of a report; plotly refuses what plotly.js does not know."""
    return {drawn.name: go.Figure(drawn.figure.data, drawn.figure.layout) for drawn in drawn_figures(data)}


class Page(HTMLParser):
    """The words of a page outside scripts and styles, and the addresses it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.plots: list[str] = []
        self._skipping = False
        self.feed(html)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipping = tag in ("script", "style")
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action") and value]
        self.plots += [value for name, value in attrs if name == "data-figure" and value]

    def handle_endtag(self, tag: str) -> None:
        self._skipping = False

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.words.append(data)
