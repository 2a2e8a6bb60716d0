"""One self-contained HTML page that tells what a sweep found."""

from __future__ import annotations

from orchestration.published import (
    GroupEpsilon,
    Histogram,
    IndividualStatistics,
    ReportData,
    ReportEpoch,
    ReportGroup,
    ReportPrivacy,
    ReportQuality,
    ReportTrial,
)

__all__ = [
    "GroupEpsilon",
    "Histogram",
    "IndividualStatistics",
    "ReportData",
    "ReportEpoch",
    "ReportGroup",
    "ReportPrivacy",
    "ReportQuality",
    "ReportTrial",
    "render",
]


def render(data: ReportData) -> str:
    """The page as one HTML document, without any reference to the network."""
    raise NotImplementedError
