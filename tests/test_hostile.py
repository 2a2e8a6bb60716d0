"""A fixed few of the hostile inputs that `python -m tests.hostile` makes in numbers, and what those have found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import strategies as st

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import read_result
from tests.hostile import of_objects as objects
from tests.hostile import of_traces as traces
from tests.hostile.__main__ import main
from tests.hostile.attempts import OF_ROOT, Template, chosen_cells, every_cell, pairs
from tests.hostile.floor import delta_of_gaussian
from tests.hostile.of_folders import COMMANDS, FORGED, KINDS, ROLES, World, role_of
from tests.hostile.of_objects import OBJECTS
from tests.hostile.of_traces import TRACE_FILES
from tests.hostile.table import TARGETS
from tests.hostile.target import Target, fed, limited
from tests.orchestration.sample_results import stored_sample

FEW = 60


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_hostile_input_is_refused_or_means_what_it_says(target: Target, tmp_path: Path) -> None:
    tally = fed(target, FEW, 0, tmp_path)
    assert tally.findings == {}
    assert tally.inputs == FEW
    assert tally.accepted > 0
    assert tally.refused > 0


FOUND: dict[str, tuple[Target, object, str]] = {
    "a release that is a number": (TRACE_FILES, traces.Forged(5, 0.875, "replace", 0), "no trace of this version"),
    "an unknown release": (TRACE_FILES, traces.Forged(5, 0.375, "replace", 0), "no trace of this version"),
    "an unknown sampling": (TRACE_FILES, traces.Forged(1, 0.17, "replace", ""), "no trace of this version"),
    "no size": (TRACE_FILES, traces.Forged(5, 0.0, "delete", 0), "no trace of this version"),
    "noise below 0": (TRACE_FILES, traces.Forged(3, 0.125, "replace", -1.0), "no possible run: .*noise"),
    "ids that are missing": (OBJECTS, objects.ForgedBatch(0, 0, "example_id", [None]), "or lack values"),
    "contributions that are missing": (OBJECTS, objects.ForgedBatch(0, 0, "contribution", [None]), "or lack values"),
}
"""What earlier runs have found: input that ended in a traceback, and what is said of it now."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    target, hostile, message = FOUND[name]
    with pytest.raises(DataCorruption, match=message):
        target.feed(hostile, tmp_path)


def test_the_harness_finds_tracebacks_wrong_answers_and_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(number: int, folder: Path) -> None:
        if number > 900:
            raise KeyError(number)
        if number < 100:
            raise InvalidInput(f"{number} is less than 100")
        if 300 < number < 400:
            with limited(0.0001):
                while True:
                    pass

    tally = fed(Target("numbers", st.integers(0, 1000), read), 400, 0, tmp_path)
    assert len(tally.findings) >= 1
    assert any(place.startswith(("KeyError", "Hang")) for place in tally.findings)
    assert "given_input=" in next(iter(tally.findings.values()))


def test_equal_seeds_feed_equal_inputs(tmp_path: Path) -> None:
    seen: list[list[int]] = [[], []]
    for inputs in seen:

        def read(number: int, folder: Path, kept: list[int] = inputs) -> None:
            kept.append(number)

        fed(Target("numbers", st.integers(), read), 50, 3, tmp_path)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 50


def test_the_floor_is_the_known_delta_of_a_gaussian() -> None:
    """mu-GDP at sigma 1: delta(1) = Phi(-1/2) - e Phi(-3/2); sampling at rate q shrinks it."""
    assert delta_of_gaussian(1.0, 1.0, 1.0) == pytest.approx(0.12693673750664397, rel=1e-9)
    assert 0.0 < delta_of_gaussian(0.1, 1.0, 0.1) < 0.1 * delta_of_gaussian(0.1, 1.0, 1.0) * 3.0
    assert delta_of_gaussian(1.0, 0.0, 0.5) == 0.5


def test_the_command_says_how_many_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "traces", "--inputs", "30"]) == 0
    assert "traces                30" in capsys.readouterr().out


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two small sweeps, in one of which something may be planted, and what lies outside."""
    found = World(tmp_path)
    for folder in (found.planted, found.other):
        stored_sample(folder)
    (found.outside / "folder").mkdir(parents=True)
    for name in ("file.json", "twin.json"):
        (found.outside / name).write_text("{}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_everything_can_be_planted_and_a_touch_is_seen(kind: str, world: World) -> None:
    if kind in OF_ROOT and os.geteuid() != 0:
        pytest.skip("only root can plant it")
    trial = Path(SweepFiles(str(world.planted)).trial(os.listdir(world.planted / "trials")[0]).result)
    before = world.untouched()
    for place in (world.planted / "sweep.json", world.planted / "results.json", world.planted / "new", trial):
        KINDS[kind](place, world)
    assert world.untouched() == before
    (world.outside / "file.json").write_text("[]")
    assert world.untouched() != before


def test_what_is_forged_has_a_right_checksum(world: World) -> None:
    trials = world.planted / "trials"
    result = next(trials / name / "result.json" for name in sorted(os.listdir(trials)) if "flat" in name)
    KINDS["forged claim"](result, world)
    found = read_result(str(result))
    assert found is not None
    assert found.worst_case.epsilon == FORGED
    KINDS["forged names"](result, world)
    assert "../../other/" in result.read_text()


def test_a_quarter_of_all_attempts_holds_every_pair_and_every_role(world: World, tmp_path: Path) -> None:
    every = every_cell(Template(tmp_path), list(COMMANDS), list(KINDS))
    chosen = chosen_cells(every, 0)
    assert chosen == chosen_cells(every, 0)
    assert len(chosen) == len({*chosen}) < len(every) // 3
    assert pairs(chosen) == pairs(every)
    first = chosen[: len(chosen) // 2]
    assert pairs(first) == pairs(every), "a beginning holds every pair"
    met, all_roles = ({(command, kind, role_of(place)) for command, kind, place in cells} for cells in (chosen, every))
    assert met == all_roles
    assert {role for *_, role in all_roles} == {*ROLES}


@pytest.mark.long
def test_whole_attacks_harm_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--attacks"]) == 0, capsys.readouterr().out


@pytest.mark.long
def test_what_is_planted_in_a_folder_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """A few of all attempts; the gate tries the kinds in tests/accounting/records/test_local_files.py."""
    assert main(["--folders", "--cells", "60"]) == 0, capsys.readouterr().out


@pytest.mark.long
def test_a_link_swapped_in_while_a_command_works_leads_it_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--races", "6"]) == 0, capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_link_that_another_user_swaps_in_leads_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in the place of temporary files, in a folder in which both can write."""
    assert main(["--races", "4", "--second-user"]) == 0, capsys.readouterr().out
