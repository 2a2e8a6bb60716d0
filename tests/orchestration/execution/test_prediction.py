"""What the steps of a sweep will take: seconds per step times steps, by a real probe and by its arithmetic."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution import prediction
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.prediction import predict_costs
from dpsweep.orchestration.pipeline import RunRequest, run_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.trials.probe import TrialProbe
from tests.orchestration.own_models import FAILING_MODEL, SECRET
from tests.orchestration.processes import Command
from tests.orchestration.sample_grids import small

SWEEP = small(clipping=["none", {"name": "flat", "bound": [1.0, 2.0]}], noise="constant", seeds=[0, 1], epochs=10)


def test_every_step_of_every_trial_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = parse_sweep(SWEEP)
    plan, probed = plan_sweep(sweep), []

    def pieces(spec: object, *others: object) -> TrialProbe:
        probed.append(spec)
        return TrialProbe(0.1 * len(probed), memory=10**9 * len(probed), gpu_memory=0, steps=5)

    monkeypatch.setattr(prediction, "probe_trial", pieces)
    found = predict_costs(sweep, plan, NO_CODE, price_per_hour=3.6)
    assert len(probed) == found.kinds == 2, "neither seeds nor bounds change how long a step takes"
    steps = [trial.trace.steps for trial in plan.trials]
    assert found.seconds == pytest.approx(0.1 * sum(steps[:2]) + 0.2 * sum(steps[2:]))
    assert (found.memory, found.trials, found.steps) == (2 * 10**9, 6, 10)
    assert found.price == pytest.approx(found.seconds / 1000.0)


@pytest.mark.long
def test_the_probe_of_the_command_is_near_the_real_run(tmp_path: Path, command: Command) -> None:
    """By CPU time of this process, which other work on the machine does not change."""
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    found = json.loads(command("plan", file, "--probe", "--price-per-hour", 3.6, "--json").out)["prediction"]
    assert (found["trials"], found["kinds"]) == (6, 2)
    began = time.process_time()
    outcome = run_sweep(RunRequest(parse_sweep(SWEEP), SWEEP, str(tmp_path / "out"), IN_PROCESS))
    used = time.process_time() - began
    assert not outcome.record.failed
    assert used / 50.0 < found["seconds"] < used, "which is also for norms, evaluation, accounting and reports"


def test_a_price_without_a_probe_is_refused(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(small(clipping="flat", noise="constant", seeds=[0, 1]))
    code, _, said = command("plan", file, "--price-per-hour", 1)
    assert (code, "add --probe" in said) == (2, True)


def test_an_error_of_a_trial_shows_its_place_and_not_the_data(tmp_path: Path) -> None:
    (tmp_path / "broken_in_probe.py").write_text(FAILING_MODEL)
    sweep = parse_sweep(small(clipping="flat", noise="constant", seeds=0, model="broken_in_probe:broken"))
    code = permitted(sweep, tmp_path)
    with pytest.raises(InvalidInput, match="fails within a few steps: RuntimeError") as failure:
        predict_costs(sweep, plan_sweep(sweep, code), code)
    assert SECRET not in str(failure.value)
