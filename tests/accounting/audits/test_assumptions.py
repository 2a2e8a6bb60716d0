"""Every test of an audit says what it assumes, in the words of docs/accounting.md."""

from __future__ import annotations

import re
from pathlib import Path

from dpsweep.accounting.audits import ASSUMPTIONS, assumed_by_best
from dpsweep.workers.training.one_run_audit import SHARES

PAGE = Path(__file__).parents[3] / "docs" / "accounting.md"


def test_the_table_of_the_page_says_what_is_assumed() -> None:
    table = PAGE.read_text().split("| test | assumes |\n|---|---|\n")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \|$", table, re.MULTILINE) == [*ASSUMPTIONS.items()]
    assert [*ASSUMPTIONS] == [*SHARES]


def test_a_test_of_another_version_is_told_as_one() -> None:
    assert assumed_by_best({"ranks": 1.0, "later": 2.0}) == "later assumes what this version does not know"
    assert assumed_by_best({}).startswith("no known test assumes")
