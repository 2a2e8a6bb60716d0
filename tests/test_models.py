"""Models that people bring: what is planned trains, and what cannot is refused by cause, with a cure that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.__main__ import main
from tests.models.brought import Brought
from tests.models.layers import through
from tests.models.running import Tried, tried
from tests.models.table import FAMILIES, TABLE

IN_THE_GATE = frozenset(
    {
        *("lazy layers", "double precision", "bfloat16", "complex parameter", "squeeze of every axis"),
        *("two heads, own loss", "two heads, built-in loss", "experts, each on its rows", "spectral norm"),
        *("trimmed to the batch", "a part that is not used"),
    }
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_THE_GATE else pytest.mark.long) for name in TABLE]
)
def test_plan_and_run_agree_as_the_table_says(name: str, tmp_path: Path) -> None:
    assert tried(name, TABLE[name], str(tmp_path)).wrong(TABLE[name]) == ""


def test_the_table_has_a_cure_of_each_refusal_that_trains() -> None:
    assert len(TABLE) >= 100
    assert sum(map(len, FAMILIES.values())) == len(TABLE), "a name stands for one model"
    assert set(TABLE) >= IN_THE_GATE
    cures = {name: each.cure for name, each in TABLE.items() if each.cure}
    assert len(cures) > 30
    assert [name for name, cure in cures.items() if TABLE[cure].verdict == "refused"] == []
    assert [name for name, each in TABLE.items() if each.verdict == "refused" and not each.why] == []


def test_the_command_prints_a_verdict_and_fails_where_the_table_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", "logistic regression"]) == 0
    assert "plan and run agree on 1 of 1 models: 1 trains" in capsys.readouterr().out
    assert main(["--only", "no such model"]) == 1
    wrong = Brought(TABLE["logistic regression"].make, "vectors", "refused", "nothing")
    monkeypatch.setitem(FAMILIES["by hand"], "logistic regression", wrong)
    assert main(["--only", "logistic regression"]) == 1
    assert "WRONG: the plan says trains, the table refused" in capsys.readouterr().out


def test_a_disagreement_is_told_before_all_else() -> None:
    brought = Brought(through, "vectors")
    assert Tried("trains", "", "RuntimeError").wrong(brought).startswith("plan and run disagree: the plan says trains")
    assert Tried("refused", "why", "").wrong(brought).endswith("the plan says refused, the run trains")
    assert Tried("trains", "", "").wrong(brought) == ""
