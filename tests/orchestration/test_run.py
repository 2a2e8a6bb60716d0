"""`dpsweep run` from end to end, on an embedded cluster: a small quickstart with every stage real."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.pipeline import RunRequest, render_again, run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.results import TrialResult, read_exact_statistics, read_result, read_statistics
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import key_in, small, trial_in

TRIALS = 4
MY_MODEL = """
import math
from torch import nn

def narrow(feature_shape, num_classes, width):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(feature_shape), width), nn.Tanh(), nn.Linear(width, num_classes)
    )
"""
"""The user's own model, in a module beside the sweep file."""


class Killed(Exception):
    """Stands for a death between the last epoch and the results."""


class FinishedSweep:
    """A sweep that ran once, for all tests of this module to look at."""

    def __init__(self, folder: Path) -> None:
        self.file, self.files = folder / "sweep.yaml", SweepFiles(str(folder / "out"))
        (folder / "my_model.py").write_text(MY_MODEL)
        self.file.write_text(
            small(
                model={"name": "my_model:narrow", "width": 12},
                clipping=["none", *({"name": name, "bound": 6.0} for name in ("flat", "dpsgd_f", "individual"))],
                noise="constant",
                seeds=0,
                epochs=4,
                release={"name": "private", "group_count_noise_multiplier": 5.0, "group_sum_noise_multiplier": 5.0},
                accounting={"individual": "pld", "group_sizes": [1, 2], "also": ["rdp"]},
            )
        )
        self.only_has_to_end = self._trained_to_the_last_epoch("flat")
        self.process = dpsweep("run", self.file, "--output", self.files.root, "--json")
        self.outcome: dict[str, Any] = json.loads(self.process.stdout) if self.process.stdout else {}

    @property
    def trials(self) -> dict[str, dict[str, Any]]:
        return {trial["key"]: trial for trial in self.outcome["trials"]}

    def _trained_to_the_last_epoch(self, clipping: str) -> str:
        """The key of a trial that dies between its last epoch and its results."""
        spec = parse_sweep(self.file.read_text())
        code = permitted(spec, self.file.parent)
        (planned,) = [each for each in plan_sweep(spec, code).trials if each.spec.clipping.name == clipping]

        def die(progress: Progress) -> None:
            if progress.step == progress.total_steps:
                raise Killed

        with pytest.raises(Killed):
            run_trial(
                planned.spec,
                self.files.trial(planned.key).root,
                code=code,
                releases=planned.releases,
                on_progress=die,
            )
        return planned.key


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> FinishedSweep:
    finished = FinishedSweep(tmp_path_factory.mktemp("sweep"))
    assert finished.process.returncode == 0, finished.process.stderr
    return finished


def test_every_trial_finishes_within_its_target(sweep: FinishedSweep) -> None:
    assert len(sweep.trials) == TRIALS
    assert sweep.outcome["failed"] == 0
    for key, trial in sweep.trials.items():
        assert trial["status"] == "finished", key
        if trial["labels"]["clipping"] == "non-private":
            assert (trial["private"], trial["epsilon"]) == (False, None)
        else:
            assert 4.9 < trial["epsilon"] <= 5.0
            assert trial["groups"][1]["group_size"] == 2
            pair = account(read_trace(sweep.files.trial(key).trace), 1e-5, "pld", 2)
            assert trial["groups"][1]["epsilon"] == pytest.approx(pair.epsilon, rel=1e-9)
            assert trial["groups"][1]["epsilon"] > 2.05 * trial["epsilon"], "more than twice what one costs"
            assert trial["accuracy_change"] == pytest.approx(
                trial["accuracy"] - sweep.trials[key_in(sweep.files.root, "non-private-seed0")]["accuracy"]
            )


def test_progress_is_announced_and_ray_is_quiet(sweep: FinishedSweep) -> None:
    lines = sweep.process.stderr.splitlines()
    assert len([line for line in lines if line.startswith("finished")]) == TRIALS
    others = [line for line in lines if not line.startswith(("finished", "recording in MLflow"))]  # the latter if slow
    assert others == [], sweep.process.stderr


def test_a_trial_that_only_has_to_end_adds_no_line_to_json(sweep: FinishedSweep) -> None:
    """Tune prints one about a trial that reports nothing."""
    assert json.loads(sweep.process.stdout)["sweep"] == "small"
    assert sweep.trials[sweep.only_has_to_end]["status"] == "finished"


def test_each_private_trial_has_trace_shards_epsilons_and_result(sweep: FinishedSweep) -> None:
    for key in sweep.trials:
        files = sweep.files.trial(key)
        result, trace = read_result(files.result), read_trace(files.trace)
        assert isinstance(result, TrialResult)
        assert trace.steps == result.training.steps
        if not result.spec.is_private:
            assert result.individuals is None
            continue
        shards, epsilons = NormShards(files.norms), read_epsilons(files.epsilons)
        assert shards.examples == len(epsilons.upper) == trace.dataset_size
        assert (epsilons.kind == "output_specific") == (result.spec.clipping.name == "individual")
        assert (np.minimum(epsilons.upper, result.worst_case.epsilon) > 0.0).all()
        assert [estimate.accountant for estimate in result.others] == ["rdp"]


def test_only_released_statistics_leave_the_private_folder(sweep: FinishedSweep) -> None:
    files = trial_in(sweep.files.root, "flat-seed0")
    exact, result = known(read_exact_statistics(files.private_summary, "")), read_result(files.result)
    assert isinstance(result, TrialResult)
    assert result.individuals is not None
    assert (exact.disclosure, result.individuals.disclosure) == ("raw", "private")
    assert exact.mean is not None
    assert result.individuals.mean is not None
    assert result.individuals.mean != exact.mean < result.worst_case.epsilon
    assert abs(result.individuals.mean - exact.mean) < _tolerance(exact.mean, result)
    assert result.individuals == read_statistics(files.released, "")
    released = {release.name for release in read_trace(files.trace).releases}
    assert "histogram of epsilons" in released


def _tolerance(mean: float, result: TrialResult) -> float:
    """How far the released mean is from the exact one, except with probability 6e-12.

    Sum (in units of the worst case) and count each have noise of std 5 sqrt(10 groups); neither is further away than 7
    of them, except with probability 2.6e-12 each.
    """
    far, size = 7.0 * 5.0 * 10**0.5, result.training.train_size
    return (far * result.worst_case.epsilon + far * mean) / (size - far)


def _stored_numbers(files: TrialFiles) -> list[str]:
    """Numbers that only exact per-example data can produce, as they would be printed."""
    exact = known(read_exact_statistics(files.private_summary, ""))
    epsilons = read_epsilons(files.epsilons)
    return [repr(exact.mean), *(repr(group.mean) for group in exact.groups), *map(repr, epsilons.upper[:50].tolist())]


def test_nothing_private_reaches_mlflow_the_report_or_the_table(sweep: FinishedSweep) -> None:
    root = Path(sweep.files.root)
    worst = {repr(trial["epsilon"]) for trial in sweep.trials.values()}
    numbers = [
        number
        for key, trial in sweep.trials.items()
        if trial["private"]
        for number in _stored_numbers(sweep.files.trial(key))
        if number not in worst
    ]
    assert len(numbers) > 100
    shown = [root / "mlflow.db", root / "report.html", root / "results.json", *root.rglob("mlflow-artifacts/**/*")]
    shown += [root / "trials" / key / "result.json" for key in sweep.trials]
    for path in filter(Path.is_file, shown):
        content = path.read_bytes()
        assert not [number for number in numbers if number.encode() in content], path
    assert not list(root.rglob("mlflow-artifacts/**/*.arrow"))
    private = [sweep.files.trial(key) for key, trial in sweep.trials.items() if trial["private"]]
    public = {Path(path).read_bytes() for files in private for path in (files.model, files.inputs)}
    assert {path.read_bytes() for path in root.rglob("mlflow-artifacts/**/*.pt")} <= public


def test_the_manifest_says_what_ran_and_where(sweep: FinishedSweep) -> None:
    manifest = json.loads(Path(sweep.files.manifest).read_text())
    assert manifest["sweep"]["seeds"] == [0]
    assert manifest["text"] == sweep.file.read_text()
    assert {"python", "torch", "ray", "mlflow"} <= manifest["versions"].keys()
    assert manifest["hardware"]["cpus"] >= 1


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flipped(content: bytes) -> bytes:
    """One bit of a digit where there is one, so that text stays text and JSON stays JSON, with another number in it.

    The last digits of a number may be those of the same double.
    """
    digits = [place for place, byte in enumerate(content) if byte in b"0123456789"] or [len(content) // 2]
    flips = (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in digits[len(digits) // 2 :])
    return next(flipped for flipped in flips if not _says(flipped, content))


def _says(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def copied(sweep: FinishedSweep, folder: Path) -> SweepFiles:
    """The sweep without its MLflow store."""
    ignored = shutil.ignore_patterns("mlflow*", "tune", ".lock")
    return SweepFiles(shutil.copytree(sweep.files.root, folder / "copy", ignore=ignored).as_posix())


@pytest.mark.long
def test_report_notices_damage_to_every_file_of_a_trial(sweep: FinishedSweep, tmp_path: Path) -> None:
    files = copied(sweep, tmp_path)
    root = Path(trial_in(files.root, "individual-seed0").root)
    everything = [path for path in root.rglob("*") if path.is_file()]
    assert len(everything) > 10
    for path in [*everything, Path(files.manifest)]:
        intact = path.read_bytes()
        for damage in (_cut, _flipped):
            path.write_bytes(damage(intact))
            with pytest.raises(DataCorruption) as caught:
                render_again(files.root)
            (line,) = str(caught.value).splitlines()
            assert str(path) in line
            assert re.search("restore|delete", line)
        path.write_bytes(intact)
    render_again(files.root)


@pytest.mark.long
def test_report_notices_every_missing_file_of_a_trial(sweep: FinishedSweep, tmp_path: Path) -> None:
    """Except those that are left out on purpose: all norms, or all that is private; attacks and outcomes."""
    files = copied(sweep, tmp_path)
    trial = trial_in(files.root, "individual-seed0")
    root = Path(trial.root)
    for path in [path for path in root.rglob("*") if path.is_file() and str(path) != trial.result]:
        aside = path.rename(tmp_path / "aside")
        if str(path) in (trial.attacks, trial.membership, trial.outcomes):
            render_again(files.root)
        else:
            with pytest.raises(DataCorruption) as caught:
                render_again(files.root)
            (line,) = str(caught.value).splitlines()
            assert str(path) in line or trial.norms in line or trial.epsilons in line, line
            assert "missing" in line or "snapshots end" in line, line
            is_accounted = str(path).startswith((trial.epsilons, trial.private_summary))
            assert ("accounts the trial again" in line) == is_accounted, line
        aside.rename(path)
    for folder in (trial.norms, trial.private):
        shutil.rmtree(folder)
        render_again(files.root)


def test_resume_notices_damage_to_what_it_uses_and_uses_nothing_else(sweep: FinishedSweep, tmp_path: Path) -> None:
    files = copied(sweep, tmp_path)
    trial = trial_in(files.root, "individual-seed0")
    used = (Path(trial.result), Path(trial.private_summary), Path(trial.trace))
    for path in Path(trial.root).rglob("*"):
        if path.is_file() and path not in used:
            path.unlink()
    text = sweep.file.read_text()
    spec = parse_sweep(text)
    request = RunRequest(spec, text, files.root, code=permitted(spec, sweep.file.parent))

    def refusal() -> str:
        with pytest.raises(DataCorruption) as caught:
            run_sweep(request)
        (line,) = str(caught.value).splitlines()
        return line

    kept = {path: path.read_bytes() for path in used}
    record = run_sweep(request).record
    assert [record.status(point.key).state for point in record.points] == [TrialState.FINISHED] * TRIALS
    assert {path: path.read_bytes() for path in used} == kept
    for path in used[1:]:
        path.write_bytes(_flipped(kept[path]))
        assert refusal().startswith(f"{path} is damaged"), path
        path.write_bytes(kept[path])
    used[2].unlink()
    assert refusal().startswith(f"{used[2]} is missing; restore it")
