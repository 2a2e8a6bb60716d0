"""What a sweep will take: a real probe beside the real run, and the arithmetic between them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.commands.main import main
from dpsweep.orchestration.execution import prediction
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.prediction import (
    AccountingProbe,
    Capacity,
    SweepProbe,
    kind,
    norm_passes,
    predict,
    probe_sweep,
    run_kind,
    training_seconds,
)
from dpsweep.orchestration.pipeline import RunRequest, run_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.sections import ResourceSettings
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import AttackSpec, NormSpec, RmiaSpec
from dpsweep.workers.trials.probe import TrialProbe
from tests.orchestration.sample_grids import small

SWEEP = small(clipping=["none", {"name": "flat", "bound": [1.0, 2.0]}], noise="constant", seeds=[0, 1], epochs=10)
PIECES = TrialProbe(
    begin=1.0, step=0.1, refresh=2.0, evaluation=0.5, checkpoint=0.25, memory=10**9, gpu_memory=0, cores=1.0, steps=5
)


@pytest.fixture(scope="module")
def sweep() -> SweepSpec:
    return parse_sweep(SWEEP)


@pytest.fixture(scope="module")
def plan(sweep: SweepSpec) -> Plan:
    return plan_sweep(sweep)


def measured(plan: Plan, pieces: TrialProbe = PIECES) -> SweepProbe:
    """A probe in which every trial has these pieces, and nothing but these takes any time."""
    trials = {kind(planned.spec): pieces for planned in plan.trials}
    accounting = {run_kind(planned): AccountingProbe(0.0, 0.0) for planned in plan.trials}
    return SweepProbe(trials, accounting, command=0.0, worker=0.0, tracker=0.0, share=0.5, worker_share=0.25)


@pytest.mark.long
def test_the_probe_of_the_command_is_near_the_real_run(
    sweep: SweepSpec, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By CPU time of this process, which other work on the machine does not change; within a factor of three."""
    probes: list[SweepProbe] = []

    def kept(sweep: SweepSpec, plan: Plan, code: UserCode) -> SweepProbe:
        probes.append(probe_sweep(sweep, plan, code))
        return probes[0]

    monkeypatch.setattr(prediction, "probe_sweep", kept)
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    assert run_plan(monkeypatch, file, "--probe", "--cpus", 4, "--price-per-hour", 3.6, "--json") == 0
    found = json.loads(capsys.readouterr().out)["prediction"]
    assert (found["trials"], found["trials_at_once"], found["kinds"], found["gpu_hours"]) == (6, 4, 2, 0.0)
    assert found["price"] == pytest.approx(found["seconds"] / 1000.0)
    assert 1.0 < found["seconds"] < 3600.0
    (probe,) = probes
    assert len(probe.trials) == 2, "with clipping and without: neither seeds nor bounds change how long a step takes"
    predicted = sum(training_seconds(planned, replace(probe, worker=0.0)) for planned in plan.trials)
    began = time.process_time()
    outcome = run_sweep(RunRequest(sweep, SWEEP, str(tmp_path / "out"), IN_PROCESS))
    used = time.process_time() - began
    assert not outcome.record.failed
    assert predicted < used, "which is also for accounting, the report and MLflow"
    whole = predict(plan, probe, sweep.resources, Capacity(1.0)).cpu_hours * 3600.0
    assert used / 3.0 < whole < 3.0 * (used + probe.command + 2.0 * probe.worker), "with two workers and a process"


def test_a_trial_pays_for_every_piece(plan: Plan) -> None:
    often, steps, epochs = plan.trials[-1], plan.trials[-1].trace.steps, 10
    assert norm_passes(often) == pytest.approx(2.5, abs=0.1), "the first, and of ten epochs what was in no batch lately"
    planned = replace(often, point=replace(often.point, spec=replace(often.spec, norms=NormSpec(1.0))))
    assert norm_passes(planned) == epochs
    probe = replace(measured(plan), trials={kind(planned.spec): PIECES})
    expected = 1.0 + 0.1 * steps + 2.0 * epochs + 0.5 * (epochs + 1) + 0.25 * (epochs + 1)
    assert training_seconds(planned, probe) == pytest.approx(expected)
    attacked = replace(planned.spec, attacks=AttackSpec(rmia=RmiaSpec(4)))
    twice = replace(planned, point=replace(planned.point, spec=attacked))
    more = training_seconds(twice, probe) - expected
    share = (planned.dataset.train_size + planned.dataset.test_size) / 2 / planned.dataset.train_size
    assert more == pytest.approx(4 * share * 0.1 * steps)


def test_more_cpus_take_less_time_and_the_same_work(plan: Plan) -> None:
    one, three = (predict(plan, measured(plan), [ResourceSettings()], Capacity(cpus, 0.0, 2.0)) for cpus in (1.0, 3.0))
    assert (one.trials, one.trials_at_once, three.trials_at_once) == (6, 1, 3)
    assert one.seconds == pytest.approx(3.0 * three.seconds)
    assert one.cpu_hours == pytest.approx(three.cpu_hours)
    assert one.price == pytest.approx(2.0 * one.seconds / 3600.0)
    assert one.beside_others == pytest.approx(4.0 * one.seconds), "all of it is the workers'"


def test_what_trials_reserve_bounds_how_many_run(plan: Plan) -> None:
    halves = ResourceSettings(gpus=0.5)
    found = predict(plan, measured(plan), [halves], Capacity(16.0, 1.0))
    assert found.trials_at_once == 2
    assert found.gpu_hours == pytest.approx(0.5 * sum(training_seconds(t, measured(plan)) for t in plan.trials) / 3600)
    assert predict(plan, measured(plan), [ResourceSettings(max_concurrent=3)], Capacity(16.0)).trials_at_once == 3
    with pytest.raises(InvalidInput, match=r"reserves 1 CPUs and 0\.5 GPUs, but there are 16 and 0"):
        predict(plan, measured(plan), [halves], Capacity(16.0))


def test_a_price_and_gpu_hours_follow_from_what_each_kind_of_trial_reserves(plan: Plan) -> None:
    sections = [ResourceSettings(when={"clipping": ("flat",)}, gpus=2.0), ResourceSettings()]
    found = predict(plan, measured(plan), sections, Capacity(16.0, 2.0, price_per_hour=7.2))
    private = [planned for planned in plan.trials if planned.spec.is_private]
    each = training_seconds(private[0], measured(plan))
    assert len(private) == 4
    assert found.gpu_hours == pytest.approx(2.0 * 4 * each / 3600.0)
    assert found.running == pytest.approx(4 * each), "they take turns on both GPUs, baselines train beside them"
    assert found.trials_at_once == 3
    assert found.price == pytest.approx(7.2 * found.seconds / 3600.0)


def test_work_that_the_cpus_cannot_do_meanwhile_takes_longer(plan: Plan) -> None:
    """Two threads of each trial on the CPU that it reserves."""
    busy = predict(plan, measured(plan, replace(PIECES, cores=2.0)), [ResourceSettings()], Capacity(2.0))
    light = predict(plan, measured(plan), [ResourceSettings()], Capacity(2.0))
    assert busy.seconds == pytest.approx(2.0 * light.seconds)


def run_plan(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dpsweep", "plan", *map(str, arguments)])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as prepare_environment would set it for good
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_price_without_a_probe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(small(clipping="flat", noise="constant", seeds=[0, 1]))
    assert run_plan(monkeypatch, file, "--price-per-hour", 1) == 2
    assert "add --probe" in capsys.readouterr().err


BROKEN = """
import math
from torch import nn

class Broken(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 8:  # all is well in the steps that the planner tries
            raise RuntimeError("row 17 has HIV")
        return super().forward(x)

def broken(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Broken(math.prod(feature_shape), num_classes))
"""


def test_an_error_of_a_trial_shows_its_place_and_not_the_data(tmp_path: Path) -> None:
    (tmp_path / "broken_in_probe.py").write_text(BROKEN)
    sweep = parse_sweep(small(clipping="flat", noise="constant", seeds=0, model="broken_in_probe:broken"))
    code = permitted(sweep, tmp_path)
    with pytest.raises(InvalidInput, match="fails within a few steps: RuntimeError") as failure:
        probe_sweep(sweep, plan_sweep(sweep, code), code)
    assert "HIV" not in str(failure.value)
