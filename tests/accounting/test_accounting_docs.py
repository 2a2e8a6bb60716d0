"""The documentation's examples run, and its tables are complete."""

import doctest
import re
from pathlib import Path

import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.mechanism.samplings import PoissonSampling, Sampling, ShuffledSampling
from dpsweep.accounting.mechanism.schedules import SCHEDULES, make_schedule, planned_trace

PAGE = Path(__file__).parents[2] / "docs" / "accounting.md"


def table(title: str) -> list[list[str]]:
    """Rows of the first table after ``title``, as lists of cells."""
    lines = PAGE.read_text().partition(title)[2].split("\n\n")
    rows = next(block for block in lines if block.lstrip().startswith("|")).strip().splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if not row.startswith("|---")]


def test_examples_run() -> None:
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0


def test_every_accountant_is_documented() -> None:
    assert {name for row in table("## Which accountant when")[1:] for name in re.findall(r"`([^`]+)`", row[0])} == set(
        ACCOUNTANTS
    )


def test_every_schedule_is_documented() -> None:
    assert {name for row in table("## Noise schedules")[1:] for name in re.findall(r"`([^`]+)`", row[0])} == set(
        SCHEDULES
    )


@pytest.mark.parametrize(("row", "sampling"), [(1, PoissonSampling(0.01)), (2, ShuffledSampling(100))])
def test_compared_epsilons_are_what_the_accountants_say(row: int, sampling: Sampling) -> None:
    names, printed = table("(paper C, Figure 2):")[0][1:], table("(paper C, Figure 2):")[row][1:]
    trace = planned_trace(make_schedule("constant", 6.0), sampling, 400, 100, 60_000)
    for name, text in zip(names, printed, strict=True):
        if text != "refused":
            digits = len(text.partition(".")[2])
            assert round(account(trace, 1e-5, name).epsilon, digits) == float(text)
