"""JSON files with a checksum, as somebody may have altered them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records import epsilon_files, user_rows
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.sealed import read_sealed, write_private_sealed
from dpsweep.accounting.records.snapshots import Snapshot


def nested(depth: int) -> str:
    """An object with a right checksum, of which a value is this many lists in one another."""
    whole = f'{{"a": {"[" * depth}{"]" * depth}}}'
    return f'{whole[:-1]}, "sha256": "{hashlib.sha256(whole.encode()).hexdigest()}"}}'


@pytest.mark.parametrize("content", [nested(100_000), "[" * 100_000, "[", "[]", '{"a": 1}', "\ufeff{}"])
def test_what_is_no_sealed_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataCorruption, match="is damaged: it is no JSON object with a checksum; do this"):
        read_sealed(str(tmp_path / "a.json"), "do this")


@pytest.mark.parametrize(
    "more", [{}, {"record": {"part": 0, "more": 1}, "extents": "x", "digests": "zz"}, {"extents": [2**70]}]
)
def test_a_note_of_a_part_that_lacks_its_values_counts_for_none(more: dict[str, object], tmp_path: Path) -> None:
    for note, noted in ((epsilon_files._note, epsilon_files.noted_epsilons), (user_rows._note, user_rows.noted_rows)):
        write_private_sealed(note(str(tmp_path), 0), json.dumps({"inputs": "these", **more}).encode())
        assert noted(str(tmp_path), 0, "these") is None


@pytest.mark.parametrize(
    "twice", ['"epsilon": 8, "epsilon": 1', '"a": {"b": 1, "b": 2}', '"sha256": "0", "sha256": "SEAL"']
)
def test_a_name_that_is_given_twice_is_damage(twice: str, tmp_path: Path) -> None:
    """Readers differ in which value they take; Python's takes the last, which has the checksum here."""
    whole = "{" + twice.replace(', "sha256": "SEAL"', "").replace('"sha256": "0"', "") + "}"
    seal = hashlib.sha256(json.dumps(json.loads(whole), sort_keys=True).encode()).hexdigest()
    text = "{" + twice.replace("SEAL", seal) + ("" if "SEAL" in twice else f', "sha256": "{seal}"') + "}"
    (tmp_path / "a.json").write_text(text)
    assert json.loads(text)["sha256"] == seal
    with pytest.raises(DataCorruption, match="is damaged: it is no JSON object with a checksum"):
        read_sealed(str(tmp_path / "a.json"), "")


def test_a_few_lists_in_one_another_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(nested(50))
    assert json.loads(read_sealed(str(tmp_path / "a.json"), "") or b"").keys() == {"a"}


def test_what_is_nested_too_deeply_is_a_wrong_value() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed_json("[" * 100_000)
    with pytest.raises(DataCorruption):
        Snapshot.from_json(b"[" * 100_000, 0, "snapshot.json")
