"""A trial that is killed and resumed ends with the weights, shards and epsilons of an undisturbed one."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trial_specs import DROPOUT_NET, TUMOURS, small_trial

from accounting.accountants import account
from accounting.errors import DataCorruption, InvalidInput
from accounting.layout import TrialFiles
from accounting.mechanism import GaussianRelease
from accounting.schedules import SCHEDULES as SCHEDULES_BY_NAME
from accounting.schedules import make_schedule
from accounting.shards import read_trace
from workers.clipping import CLIPPING
from workers.sampling import SAMPLERS
from workers.spec import Component, NoiseSpec, NormSpec, TrialSpec
from workers.training import Trainer
from workers.trial import run_trial

SCHEDULES = [
    Component("constant"),
    Component("exponential", {"decay": 0.1}),
    Component("validation", {"factor": 0.8, "period": 1}),
]
COMBINATIONS = [
    (clipping, schedule, sampling)
    for clipping, schedule, sampling in itertools.product(CLIPPING, SCHEDULES, SAMPLERS)
    if clipping != "none" or schedule.name == "constant"
]


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, steps: Iterator[int]) -> None:
    """The process dies after the update of the given step, before anything about it is stored."""
    original, next_step = Trainer.step, next(steps)

    def step(self: Trainer) -> None:
        nonlocal next_step
        original(self)
        if self.step_count == next_step:
            next_step = next(steps, -1)
            raise Killed

    monkeypatch.setattr(Trainer, "step", step)


def run_with_deaths(spec: TrialSpec, root: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    with monkeypatch.context() as patched:
        kill_at(patched, iter(steps))
        for _ in steps:
            with pytest.raises(Killed):
                run_trial(spec, str(root))
        run_trial(spec, str(root))


def stored_bytes(root: Path) -> dict[str, str]:
    """Digest of every file of a finished trial."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_same_trial(spec: TrialSpec, undisturbed: Path, resumed: Path) -> None:
    left, right = TrialFiles(str(undisturbed)), TrialFiles(str(resumed))
    before, after = torch.load(left.model, weights_only=True), torch.load(right.model, weights_only=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert stored_bytes(undisturbed) == stored_bytes(resumed)
    if spec.is_private:
        epsilons = [account(read_trace(files.trace), spec.delta, "rdp").epsilon for files in (left, right)]
        assert epsilons[0] == epsilons[1] < float("inf")


@pytest.mark.parametrize(
    ("clipping", "schedule", "sampling"), COMBINATIONS, ids=lambda value: getattr(value, "name", value)
)
def test_every_combination_resumes_bit_for_bit(
    clipping: str, schedule: Component, sampling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_trial(clipping=Component(clipping), noise=NoiseSpec(float(clipping != "none"), schedule))
    spec = replace(spec, sampling=replace(spec.sampling, method=sampling))
    run_trial(spec, str(tmp_path / "undisturbed"))
    rng = random.Random(f"{clipping} {schedule.name} {sampling}")
    steps = sorted(rng.sample(range(1, 8), 2))
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, steps)
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


OTHER_SCHEDULES = [
    Component("time", {"decay": 0.1}),
    Component("step", {"factor": 0.8, "period": 1, "hold_before": 1}),
    Component("polynomial", {"end_noise_multiplier": 0.5, "period": 3, "power": 2.0}),
    Component("cosine", {"end_noise_multiplier": 0.5, "period": 2, "hold_after": 1}),
    Component("linear", {"end_noise_multiplier": 0.5, "period": 2, "hold_before": 1}),
]


@pytest.mark.parametrize("schedule", OTHER_SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_other_schedule_resumes_bit_for_bit(
    schedule: Component, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule is a function of the epoch alone: what could differ is the epoch, not the combination."""
    spec = small_trial(noise=NoiseSpec(1.0, schedule), epochs=3)
    result = run_trial(spec, str(tmp_path / "undisturbed"))
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, [2, 5, 8])
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")
    planned = make_schedule(schedule.name, 1.0, **schedule.params)
    used = [record.noise_multiplier for record in result.history]
    assert used == [planned.noise_multiplier(epoch) for epoch in range(3)]
    assert len(set(used)) > 1


def test_all_schedules_are_resumed() -> None:
    assert {schedule.name for schedule in (*SCHEDULES, *OTHER_SCHEDULES)} == set(SCHEDULES_BY_NAME)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": Component("adam_corrected", {"learning_rate": 0.01}), "averaging": Component("ema")},
        {"optimizer": Component("adamw"), "learning_rate_schedule": Component("cosine")},
        {"clipping": Component("flat", {"bound": {"median_multiple": 1.0}})},
        {"preprocessing": Component("dp_pca", {"dimensions": 8})},
        {"norms": NormSpec("every_step", exact_examples=5)},
        {"model": DROPOUT_NET},
        {"data": replace(TUMOURS, public_fraction=0.0), "model": Component("mlp", {"hidden": [8]})},
    ],
    ids=["adam-average", "adamw-cosine", "private-median", "dp-pca", "exact", "dropout", "no-public-data"],
)
def test_every_kind_of_state_resumes_bit_for_bit(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_trial(**changes)
    run_trial(spec, str(tmp_path / "undisturbed"))
    run_with_deaths(spec, tmp_path / "resumed", monkeypatch, [1, 3, 4, 8])
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


@pytest.mark.parametrize("noise_source", ["os_entropy", "os_entropy_secure"])
def test_replayed_steps_repeat_secret_noise(noise_source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs differ, but a resumed run rewrites the very shards it had written: unequal bytes would be an error."""
    spec = small_trial(noise_source=noise_source, norms=NormSpec("every_step"))
    run_with_deaths(spec, tmp_path / "one", monkeypatch, [1, 3, 7])
    run_with_deaths(spec, tmp_path / "two", monkeypatch, [3])
    one, two = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("one", "two"))
    assert not all(torch.equal(one[name], two[name]) for name in one)


def test_an_exception_of_the_caller_leaves_a_trial_that_resumes(tmp_path: Path) -> None:
    spec = small_trial()
    run_trial(spec, str(tmp_path / "undisturbed"))
    reported: list[int] = []

    def stop_once(progress: object) -> None:
        reported.append(progress.epoch)  # type: ignore[attr-defined]
        if len(reported) == 1:
            raise Killed

    with pytest.raises(Killed):
        run_trial(spec, str(tmp_path / "resumed"), on_progress=stop_once)
    run_trial(spec, str(tmp_path / "resumed"), on_progress=stop_once)
    assert reported == [1, 2]
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


WORKER = """
import sys
from workers.spec import TrialSpec
from workers.trial import run_trial
run_trial(TrialSpec.from_json(sys.argv[1]), sys.argv[2], on_progress=lambda p: print(p.epoch, flush=True))
"""


def test_kill_9_of_a_real_process(tmp_path: Path) -> None:
    """SIGKILL wherever the process happens to be after its second epoch, then the same call again."""
    spec = small_trial(epochs=8, clipping=Component("dpsgd_f"), norms=NormSpec("every_step"))
    command = [sys.executable, "-c", WORKER, spec.to_json(), str(tmp_path / "resumed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"1\n", b"2\n"]
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not Path(TrialFiles(str(tmp_path / "resumed")).training).exists()
    run_trial(spec, str(tmp_path / "resumed"))
    run_trial(spec, str(tmp_path / "undisturbed"))
    assert_same_trial(spec, tmp_path / "undisturbed", tmp_path / "resumed")


def interrupted(root: Path, monkeypatch: pytest.MonkeyPatch, at_step: int = 7) -> TrialSpec:
    spec = small_trial(norms=NormSpec("every_step"))
    with monkeypatch.context() as patched:
        kill_at(patched, iter([at_step]))
        with pytest.raises(Killed):
            run_trial(spec, str(root))
    return spec


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:10], lambda data: b"", None])
def test_a_damaged_checkpoint_is_an_error_and_never_a_restart(
    damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = interrupted(tmp_path, monkeypatch)
    checkpoint = Path(TrialFiles(str(tmp_path)).checkpoint)
    data = bytearray(checkpoint.read_bytes())
    if callable(damage):
        checkpoint.write_bytes(damage(bytes(data)))
    else:
        data[len(data) // 2] ^= 1
        checkpoint.write_bytes(bytes(data))
    with pytest.raises(DataCorruption, match=r"checkpoint\.pt is damaged"):
        run_trial(spec, str(tmp_path))


def test_an_altered_shard_is_found_by_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest says that other bytes were committed than those that the resumed run produces."""
    spec = interrupted(tmp_path, monkeypatch, at_step=3)
    manifest = Path(TrialFiles(str(tmp_path)).norms) / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"sha256":"', '"sha256":"0'))
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


def test_a_finished_trial_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_trial(data=replace(TUMOURS, public_fraction=0.0))
    result = run_trial(spec, str(tmp_path))
    before = stored_bytes(tmp_path)
    monkeypatch.delattr(Trainer, "step")
    assert run_trial(spec, str(tmp_path)) == result
    assert stored_bytes(tmp_path) == before


def test_the_key_of_the_noise_does_not_outlive_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_trial(noise_source="os_entropy")
    run_with_deaths(spec, tmp_path, monkeypatch, [5])
    checkpoint = Path(TrialFiles(str(tmp_path)).checkpoint)
    assert not checkpoint.exists()
    checkpoint.write_bytes(b"left behind by a process killed between its last two actions")
    run_trial(spec, str(tmp_path))
    assert not checkpoint.exists()
