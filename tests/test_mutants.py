"""The table of mutants fits the code: none has rotted since it was written."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import running
from tests.mutants.mutant import Bug, Mutant
from tests.mutants.running import ROOT, run_tests, try_mutant
from tests.mutants.table import MUTANTS

FEWEST = {"accounting": 50, "workers": 40, "orchestration": 30}


def test_the_code_holds_the_text_of_every_mutant_once() -> None:
    for mutant in MUTANTS:
        mutant.planted((ROOT / mutant.file).read_text(encoding="utf-8"))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_each_mutant_is_code_and_names_tests_that_exist(mutant: Mutant) -> None:
    planted = mutant.planted((ROOT / mutant.file).read_text(encoding="utf-8"))
    compile(planted, mutant.file, "exec")
    assert mutant.bug.new != mutant.bug.old
    assert mutant.tests
    for test in mutant.tests:
        file, *names = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE) for name in names), test


def test_there_are_enough_of_them_and_no_two_alike() -> None:
    counts = Counter(mutant.package for mutant in MUTANTS)
    assert {package: counts[package] >= fewest for package, fewest in FEWEST.items()} == dict.fromkeys(FEWEST, True)
    assert len(MUTANTS) >= 120
    assert len({(mutant.file, mutant.bug.old, mutant.bug.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_no_mutant_that_weakens_privacy_is_allowed_to_survive() -> None:
    assert not [mutant for mutant in MUTANTS if mutant.bug.privacy and mutant.bug.survives]


def test_the_harness_tells_killed_from_survived_and_restores_the_file(tmp_path: Path) -> None:
    """On a checkout of one module and one test."""
    (tmp_path / "module.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    (tmp_path / "test_module.py").write_text(
        "import module\n\n\ndef test_it() -> None:\n    assert module.double(2) == 4\n"
    )
    verdicts = {
        (old, new): try_mutant(tmp_path, Mutant("module.py", Bug(old, new, "double"), ("test_module.py",))).verdict
        for old, new in (("2 * x", "3 * x"), ("2 * x", "x * 2"), ("2 * x", "x + 2"), ("4 * x", "x"))
    }
    assert list(verdicts.values()) == ["killed", "survived", "survived", "broken"]
    assert (tmp_path / "module.py").read_text() == "def double(x: int) -> int:\n    return 2 * x\n"


def test_tests_that_are_slow_without_a_mutant_do_not_count_as_killing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine they may take longer than the limit."""
    (tmp_path / "module.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    (tmp_path / "test_module.py").write_text(
        "import time\n\nimport module\n\n\ndef test_it() -> None:\n    time.sleep(1.0)\n    module.double(2)\n"
    )
    without = run_tests(tmp_path, ["test_module.py"])
    assert without.status == 0
    monkeypatch.setattr(running, "LIMIT_S", 0)
    mutant = Mutant("module.py", Bug("2 * x", "3 * x", "double"), ("test_module.py",))
    slow = {"test_module.py": {test: seconds + 30.0 for test, seconds in without.seconds.items()}}
    assert try_mutant(tmp_path, mutant, slow).verdict == "survived"
    assert try_mutant(tmp_path, mutant).said == "no end after 0 s"
