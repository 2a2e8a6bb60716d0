"""A checkpoint holds the key of the noise: nobody else may read it, and nothing of it stays."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import stat
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.machine.checkpoint import (
    forget_checkpoint,
    load_checkpoint,
    load_part,
    part_of_rank,
    save_checkpoint,
)
from dpsweep.workers.machine.stored_tensors import NoTensors, load_tensors


def test_only_its_owner_can_read_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "private" / "checkpoint.pt"
    save_checkpoint(str(file), "trial", {"step": 3})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_checkpoint(str(file), "trial") == {"step": 3}


def test_what_a_killed_process_left_of_it_is_forgotten_too(tmp_path: Path) -> None:
    file, others = tmp_path / "checkpoint.pt", {"summary.json", ".summary.json.1"}
    save_checkpoint(str(file), "trial", {"step": 3})
    for name in (".checkpoint.pt.4711.partial", *others):
        (tmp_path / name).write_bytes(b"rest")
    assert forget_checkpoint(str(file))
    assert not forget_checkpoint(str(file))
    assert {path.name for path in tmp_path.iterdir()} == others


def test_a_part_is_that_of_its_checkpoint_or_damaged_and_is_forgotten_with_it(tmp_path: Path) -> None:
    file, other = str(tmp_path / "checkpoint.pt"), tmp_path / "checkpoint.json"
    other.touch()
    save_checkpoint(file, "trial", {"step": 3})
    digest = save_checkpoint(part := part_of_rank(file, 3, 1), "trial", {"rows": [1]})
    assert load_part(part, "trial", digest) == {"rows": [1]}
    save_checkpoint(part, "trial", {"rows": [2]})
    with pytest.raises(DataCorruption, match=r"checkpoint\.pt-3-1 is damaged"):
        load_part(part, "trial", digest)
    with pytest.raises(DataCorruption, match=r"checkpoint\.pt-3-2 is missing"):
        load_part(part_of_rank(file, 3, 2), "trial", digest)
    (tmp_path / ".checkpoint.pt-6-1.4711.partial").write_bytes(b"rest")
    assert forget_checkpoint(file)
    assert list(tmp_path.iterdir()) == [other]


def test_one_of_another_version_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "checkpoint.pt")
    Path(uri).write_bytes(b"dpsweep-checkpoint-1\n" + b"whatever it holds")
    with pytest.raises(InvalidInput, match="of another version of dpsweep; finish the trial with that version"):
        load_checkpoint(uri, "owner")


class Harmful:
    """What runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def with_code(file: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"owner": "trial", "state": Harmful(file)}, buffer)
    return buffer.getvalue()


def compressed(file: Path) -> bytes:
    """Tensors of 4 MiB in 8 KiB."""
    buffer, packed = io.BytesIO(), io.BytesIO()
    torch.save({"owner": "trial", "state": torch.zeros(2**20)}, buffer)
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    return packed.getvalue()


class OfAnyLength:
    """What becomes as many bytes as it says when it is unpickled."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (5,)


def of_any_length(file: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"owner": "trial", "state": OfAnyLength()}, buffer)
    return buffer.getvalue()


_FIVE = b"\x80\x02c__builtin__\nbytearray\nK\x05\x85R."
"""A pickle of five bytes."""


def _archive(pickled: bytes, name: str = "data.pkl", size: int = 1) -> bytes:
    """What torch stores of so many values, with another pickle."""
    buffer, forged = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(size), buffer)
    with zipfile.ZipFile(buffer) as stored, zipfile.ZipFile(forged, "w") as archive:
        for each in stored.namelist():
            is_pickle = each.endswith("/data.pkl")
            archive.writestr(f"archive/{name}" if is_pickle else each, pickled if is_pickle else stored.read(each))
    return forged.getvalue()


def of_any_length_by_another_name(file: Path) -> bytes:
    return _archive(_FIVE, "data.PKL")


def of_any_length_before_an_archive(file: Path) -> bytes:
    older: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {}]
    return b"".join(
        [*(pickle.dumps(each, 2) for each in older), _FIVE, pickle.dumps([], 2), _archive(pickle.dumps(1, 2))]
    )


def encoded_again_and_again(file: Path) -> bytes:
    text = b"X\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R"
    return _archive(b"\x80\x02" + 3 * b"c_codecs\nencode\n" + text + 2 * b"X\x03\x00\x00\x00hex\x86R" + b".")


def by_many_names(file: Path) -> bytes:
    """One entry, whose name ends before the zero, as three tensors."""
    size = 2**18
    number = b"J" + struct.pack("<i", size)
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x03\x00\x00\x000\x00%b"
    )
    tensor += (
        b"X\x03\x00\x00\x00cpu" + number + b"tQK\x00" + number + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    return _archive(b"\x80\x02](" + tensor % b"a" + tensor % b"b" + tensor % b"c" + b"e.", size=size)


@pytest.mark.parametrize(
    "made",
    [
        with_code,
        compressed,
        of_any_length,
        of_any_length_by_another_name,
        of_any_length_before_an_archive,
        encoded_again_and_again,
        by_many_names,
        lambda file: b"no archive",
    ],
)
def test_one_from_somebody_else_runs_no_code_and_unfolds_to_nothing(
    made: Callable[[Path], bytes], tmp_path: Path
) -> None:
    """Whoever can write a file can write its checksum."""
    uri, content = tmp_path / "private" / "checkpoint.pt", made(tmp_path / "ran")
    save_checkpoint(str(uri), "trial", {})
    kind = uri.read_bytes().partition(b"\n")[0] + b"\n"
    uri.write_bytes(kind + hashlib.sha256(content).digest() + content)
    with pytest.raises(DataCorruption, match="is damaged; restore it from a backup"):
        load_checkpoint(str(uri), "trial")
    for or_older in (False, True):
        with pytest.raises(NoTensors):
            load_tensors(io.BytesIO(content), or_older)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("key", "copies"), [("", 1), ("0" * 64, 2)], ids=["plain", "encrypted"])
def test_few_copies_of_the_state_are_in_memory(
    key: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written, and with a key what it is encrypted to. Tensors themselves are not counted."""
    monkeypatch.setenv("DPSWEEP_KEY", key)
    uri, values = str(tmp_path / "private" / "checkpoint.pt"), torch.randn(2_000_000)

    def peak() -> float:
        found = tracemalloc.get_traced_memory()[1] / values.nbytes
        tracemalloc.reset_peak()
        return found

    tracemalloc.start()
    try:
        save_checkpoint(uri, "trial", {"values": values})
        assert peak() < copies + 0.5
        stored = load_checkpoint(uri, "trial")
        assert peak() < copies + 0.5
    finally:
        tracemalloc.stop()
    assert stored is not None
    assert torch.equal(stored["values"], values)
