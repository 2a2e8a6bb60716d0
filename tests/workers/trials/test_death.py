"""Death within any file operation, and files that are damaged when a trial is resumed.

A resumed trial ends equal to the last bit, or it refuses in one line; it never trains anew from damage in silence.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.accounting.records.sealed import read_private_sealed, write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.machine.checkpoint import save_checkpoint
from dpsweep.workers.spec import Component, ExecutionSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials import trial_setup
from dpsweep.workers.trials.trial import run_trial
from tests.warm import FORKS
from tests.workers.devices import NAME
from tests.workers.resumption import (
    Killed,
    assert_same_trial,
    delete_unfinished,
    kill_at,
    run_with_deaths,
    stored_bytes,
)
from tests.workers.trial_specs import TUMOURS, TUMOURS_READ_ONCE, small_trial
from tests.workers.user_modules import code_of


def die_in_file_operation(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies in the file operation of that number: of a write the first half is stored, of all others
    nothing. What still runs afterwards, such as clean-up, no longer reaches a file."""
    position = itertools.count()

    def dying(operation: Callable[..., Any], last: Callable[..., Any] = lambda *_, **__: None) -> Callable[..., Any]:
        def perform(*args: Any, **kwargs: Any) -> Any:
            present = next(position)
            if present == number:
                last(*args, **kwargs)
            if present >= number:
                raise Killed
            return operation(*args, **kwargs)

        return perform

    write = os.write
    monkeypatch.setattr(os, "write", dying(write, lambda handle, data: write(handle, data[: len(data) // 2])))
    for name in ("mkdir", "fchmod", "replace", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    plain, creating = os.open, dying(os.open)

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        handle: int = (creating if flags & os.O_CREAT else plain)(path, flags, *args, **options)
        return handle

    monkeypatch.setattr(os, "open", opened)


def survives(spec: TrialSpec, root: Path, monkeypatch: pytest.MonkeyPatch, operations: int) -> bool:
    """Whether the trial ends within that many file operations; if not, it is killed."""
    with monkeypatch.context() as patched:
        die_in_file_operation(patched, operations)
        try:
            run_trial(spec, str(root), code=code_of(spec))
        except Killed:
            return False
    return True


@pytest.mark.parametrize(
    ("first", "apart"), [(4, 23), *(pytest.param(first, 9, marks=pytest.mark.long) for first in range(9))]
)
def test_death_in_any_file_operation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, apart: int
) -> None:
    """Each trial dies some operations later than the one before, until one survives; those resumed die once more."""
    spec = small_trial(
        data=TUMOURS_READ_ONCE,
        sampling=SamplingSpec("shuffle", 52),
        clipping=Component("dpsgd_f"),
        norms=NormSpec(1.0, rows_per_part=60, exact_examples=2),
    )
    run_trial(spec, str(tmp_path / "undisturbed"), code=code_of(spec))
    for operations in itertools.count(first, apart):
        resumed = tmp_path / str(operations)
        if survives(spec, resumed, monkeypatch, operations):
            break
        survives(spec, resumed, monkeypatch, random.Random(operations).randrange(40))
        run_trial(spec, str(resumed), code=code_of(spec))
        delete_unfinished(resumed)
        assert_same_trial(spec, tmp_path / "undisturbed", resumed)
    assert operations > 80


def train_telling(spec: TrialSpec, root: str, told: Connection) -> None:
    run_trial(spec, root, on_progress=lambda progress: told.send(progress.epoch))


def test_kill_9_of_a_real_process(tmp_path: Path) -> None:
    """SIGKILL wherever the process happens to be after its second epoch, then the same call again."""
    spec = small_trial(epochs=8, clipping=Component("dpsgd_f"), norms=NormSpec("every_step"))
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=train_telling, args=(spec, str(tmp_path / "resumed"), there))
    process.start()
    assert [here.recv() for _ in range(2)] == [1, 2]
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not Path(TrialFiles(str(tmp_path / "resumed")).training).exists()
    run_trial(spec, str(tmp_path / "resumed"))
    run_trial(spec, str(tmp_path / "undisturbed"))
    delete_unfinished(tmp_path / "resumed")
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


def test_death_between_checkpoint_and_progress_report(tmp_path: Path) -> None:
    """The epoch is in the checkpoint, but nobody was told: what the caller raises ends the call like a death there."""
    spec = small_trial()
    run_trial(spec, str(tmp_path / "undisturbed"))
    reported: list[int] = []

    def stop_once(progress: Progress) -> None:
        reported.append(progress.epoch)
        if len(reported) == 1:
            raise Killed

    with pytest.raises(Killed):
        run_trial(spec, str(tmp_path / "resumed"), on_progress=stop_once)
    run_trial(spec, str(tmp_path / "resumed"), on_progress=stop_once)
    assert reported == [1, 2]
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


def interrupted(root: Path, monkeypatch: pytest.MonkeyPatch, at_step: int = 7, **changes: Any) -> TrialSpec:
    spec = small_trial(norms=NormSpec("every_step"), **changes)
    with monkeypatch.context() as patched:
        kill_at(patched, iter([at_step]))
        with pytest.raises(Killed):
            run_trial(spec, str(root), code=code_of(spec))
    return spec


@pytest.mark.parametrize("each", [0.5, 2.0])
def test_epochs_that_may_have_been_shown_are_not_rounded_otherwise(
    each: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = ExecutionSpec(device=NAME, checkpoint_every_epochs=each)
    spec = interrupted(tmp_path, monkeypatch, execution=execution)
    monkeypatch.setattr(trial_setup, "rounding_of", lambda device: "torch 2.99 on another processor")
    if each <= 1.0:
        run_trial(spec, str(tmp_path))
    else:
        with pytest.raises(InvalidInput, match=r"and torch 2\.99 on another processor may round otherwise"):
            run_trial(spec, str(tmp_path))


def test_an_epoch_is_stored_before_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no checkpoint is due at its end."""
    stored, shown, save = list[int](), list[tuple[int, int]](), save_checkpoint

    def note(uri: str, owner: str, state: Any) -> bytes:
        stored.append(state["trainer"]["step_count"])
        return save(uri, owner, state)

    monkeypatch.setattr(trial_setup, "save_checkpoint", note)
    spec = small_trial(execution=ExecutionSpec(device=NAME, checkpoint_every_epochs=0.6))
    run_trial(spec, str(tmp_path), on_progress=lambda progress: shown.append((progress.step, stored[-1])))
    assert [step for step, _ in shown] == [last for _, last in shown]
    assert len(shown) == 2


def flipped(position: float) -> Callable[[bytes], bytes]:
    """Flips one bit of the byte at that fraction of a file."""

    def damage(data: bytes) -> bytes:
        place = int(position * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return damage


CHECKPOINT_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "only-its-head": lambda data: data[:10],
    "cut": lambda data: data[:-100],
    "continued": lambda data: data + b"\0",
    "first-byte": flipped(0.0),
    "digest": flipped(0.005),
    "middle": flipped(0.5),
    "last-byte": flipped(1.0),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGE.values(), ids=CHECKPOINT_DAMAGE)
def test_a_damaged_checkpoint_is_an_error_and_never_a_restart(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = interrupted(tmp_path, monkeypatch)
    checkpoint = Path(TrialFiles(str(tmp_path)).checkpoint)
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    before = stored_bytes(tmp_path)
    with pytest.raises(DataCorruption, match=r"checkpoint\.pt is damaged; restore it.*or delete") as refused:
        run_trial(spec, str(tmp_path))
    assert "\n" not in str(refused.value)
    assert stored_bytes(tmp_path) == before


@pytest.mark.long
def test_a_lost_checkpoint_costs_time_and_never_another_draw_of_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seeded trial repeats itself from its start; one with secret noise cannot, and its shards say so."""
    seeded = interrupted(tmp_path / "seeded", monkeypatch)
    secret = interrupted(tmp_path / "secret", monkeypatch, noise_source="os_entropy")
    for name in ("seeded", "secret"):
        Path(TrialFiles(str(tmp_path / name)).checkpoint).unlink()
    run_trial(seeded, str(tmp_path / "seeded"))
    run_trial(seeded, str(tmp_path / "undisturbed"))
    assert_same_trial(seeded, tmp_path / "undisturbed", tmp_path / "seeded")
    with pytest.raises(DataCorruption, match="does not repeat itself; delete the trial's folder"):
        run_trial(secret, str(tmp_path / "secret"))


def test_the_checkpoint_of_another_trial_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = interrupted(tmp_path / "one", monkeypatch)
    interrupted(tmp_path / "other", monkeypatch, seed=1)
    one, other = (TrialFiles(str(tmp_path / name)) for name in ("one", "other"))
    shutil.copy(other.checkpoint, one.checkpoint)
    with pytest.raises(InvalidInput, match=r"checkpoint\.pt belongs to a trial with other settings"):
        run_trial(spec, one.root)


SHIFTED_TUMOURS = """
from dataclasses import replace
from pathlib import Path
from dpsweep.workers.data import DataSpec, Source, load_source

def tumours() -> Source:
    shift = float(Path(__file__).with_name("shift.txt").read_text())
    source = load_source(DataSpec("breast_cancer"))
    return replace(source, train=replace(source.train, features=source.train.features + shift))
"""


def test_a_trial_does_not_go_on_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, shift = tmp_path / "source.py", tmp_path / "shift.txt"
    source.write_text(SHIFTED_TUMOURS)
    shift.write_text("0.0")
    spec = interrupted(tmp_path / "trial", monkeypatch, data=replace(TUMOURS, name=f"{source}:tumours"))
    shift.write_text("0.5")
    with pytest.raises(InvalidInput, match="other settings, releases or data"):
        run_trial(spec, str(tmp_path / "trial"), code=code_of(spec))
    shift.write_text("0.0")
    assert run_trial(spec, str(tmp_path / "trial"), code=code_of(spec)).epochs == 2


def test_an_altered_shard_is_found_by_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest says that other bytes were committed than those that the resumed run produces."""
    spec = interrupted(tmp_path, monkeypatch, at_step=3)
    manifest = f"{TrialFiles(str(tmp_path)).norms}/step=00000000/manifest.json"
    content = read_private_sealed(manifest, "") or b""
    altered = re.sub(rb'"digests": "(.)', lambda digit: b'"digests": "' + b"10"[digit[1] != b"0" :][:1], content)
    assert altered != content
    write_private_sealed(manifest, altered)
    with pytest.raises(DataCorruption, match="does not repeat itself"):
        run_trial(spec, str(tmp_path))


def test_a_folder_of_another_trial_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = interrupted(tmp_path, monkeypatch)
    with pytest.raises(InvalidInput, match="differs in delta, seed"):
        run_trial(replace(spec, seed=1, delta=1e-6), str(tmp_path))
    with pytest.raises(InvalidInput, match="other settings, releases or data"):
        run_trial(spec, str(tmp_path), releases=(GaussianRelease("count", 5.0),))
    Path(TrialFiles(str(tmp_path)).spec).write_text("{")
    with pytest.raises(DataCorruption, match=r"spec\.json is damaged"):
        run_trial(spec, str(tmp_path))


def test_the_key_of_the_noise_does_not_outlive_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_trial(noise_source="os_entropy")
    run_with_deaths(spec, tmp_path, monkeypatch, [5])
    checkpoint = Path(TrialFiles(str(tmp_path)).checkpoint)
    assert not checkpoint.exists()
    checkpoint.write_bytes(b"left behind by a process killed between its last two actions")
    run_trial(spec, str(tmp_path))
    assert not checkpoint.exists()
