"""A checkpoint holds the key of the noise: nobody else may read it, and nothing of it stays."""

from __future__ import annotations

import stat
import tracemalloc
from pathlib import Path

import pytest
import torch

from accounting.errors import InvalidInput
from workers.checkpoint import forget_checkpoint, load_checkpoint, save_checkpoint


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


def test_one_of_another_version_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "checkpoint.pt")
    Path(uri).write_bytes(b"dpsweep-checkpoint-1\n" + b"whatever it holds")
    with pytest.raises(InvalidInput, match="of another version of dpsweep; finish the trial with that version"):
        load_checkpoint(uri, "owner")


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
