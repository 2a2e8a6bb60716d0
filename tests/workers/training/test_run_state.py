"""Everything that a step changes is in the checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.snapshots import SnapshotWriter
from dpsweep.workers.gradients.compared_passes import LaterBatches
from dpsweep.workers.gradients.layers import Axes
from dpsweep.workers.machine.checkpoint import load_checkpoint, save_checkpoint
from dpsweep.workers.spec import Component, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.training.run_state import ModelValues, RunState, digest_of_frozen
from dpsweep.workers.training.trainer import Trainer
from tests.known import known
from tests.workers.trial_runs import made_trainer
from tests.workers.trial_specs import small_trial

SPECS = {
    "plain": small_trial(),
    "everything": small_trial(
        clipping=Component("dpsgd_f"),
        optimizer=Component("adam_corrected"),
        averaging=Component("ema"),
        sampling=SamplingSpec("shuffle", 25),
        norms=NormSpec(refreshes_per_epoch=2.0, exact_examples=5),
        epochs=3,
    ),
    "correlated noise": small_trial(
        noise=NoiseSpec(1.0, Component("banded", {"bands": 2})),
        sampling=SamplingSpec("cyclic_poisson", 15, cycle_length=2),
        norms=NormSpec(),
    ),
    "thresholds": small_trial(clipping=Component("individual"), noise_source="os_entropy"),
}


def work_out(value: Any) -> None:
    """Make a value hold whatever it works out when it is first asked for: one of two may not have been asked yet."""
    for each in type(value).__mro__:
        for name, held in vars(each).items():
            if isinstance(held, cached_property):
                getattr(value, name)


def picture(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """All that can be reached from a value, as plain values that compare bit by bit; each object but arrays once."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, int | float | str | bytes | type | ModuleType):
        return repr(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        return (str(value.dtype), array.shape, array.tobytes())
    if id(value) in seen:
        return "seen"
    seen[id(value)] = value
    match value:
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case dict():
            return {repr(key): picture(each, seen) for key, each in value.items()}
        case list() | tuple():
            return [picture(each, seen) for each in value]
        case ThreadPoolExecutor():
            return "threads"
        case SnapshotWriter():  # what it does not remember of them, it reads from the folder
            return [value.directory, sorted(value._committed)]
        case LaterBatches():
            return "counted anew"
        case Axes():  # lengths in the first passes count only until the axes are kept
            return [sorted(map(repr, value.without_batch)), value.stacks, sorted(map(repr, value.stacked.items()))]
        case FunctionType():
            return [value.__qualname__, [picture(cell.cell_contents, seen) for cell in value.__closure__ or ()]]
    work_out(value)
    return [type(value).__name__, {name: picture(each, seen) for name, each in getattr(value, "__dict__", {}).items()}]


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted(one.keys() | other.keys())
        return [found for key in keys for found in differences(one.get(key), other.get(key), f"{at}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            found for i, pair in enumerate(zip(one, other, strict=True)) for found in differences(*pair, f"{at}[{i}]")
        ]
    return [] if one == other else [at]


def attributes(trainer: Trainer) -> dict[str, Any]:
    for store in trainer.stores:  # they write beside the training
        store.wait()
    return {
        **{name: picture(value) for name, value in vars(trainer).items()},
        "torch": picture(torch.default_generator),
    }


def steps(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        assert trainer.may_continue()
        trainer.step()
        if trainer.at_epoch_end:
            trainer.end_epoch()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("taken", [2, 5])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_whatever_a_step_changes_is_in_the_checkpoint(spec: TrialSpec, taken: int, tmp_path: Path) -> None:
    """After one more step, a restored trainer and one that never stopped agree in all that can be reached from them."""
    undisturbed = made_trainer(spec, tmp_path)
    undisturbed.begin()
    steps(undisturbed, taken)
    save_checkpoint(str(tmp_path / "checkpoint"), "trial", undisturbed.state())
    steps(undisturbed, 1)
    expected = attributes(undisturbed)

    restored = made_trainer(spec, tmp_path)
    before = attributes(restored)
    stored = known(load_checkpoint(str(tmp_path / "checkpoint"), "trial"))
    restored.restore(stored)
    steps(restored, 1)
    assert differences(expected, attributes(restored)) == []
    assert differences(expected, before) != []


def test_every_attribute_with_a_state_is_a_component(tmp_path: Path) -> None:
    """Of a component that the mapping lacks, the checkpoint would keep nothing."""
    for spec in SPECS.values():
        trainer = made_trainer(spec, tmp_path)
        kept = [trainer._run, *trainer._components.values()]
        stateful = [value for value in vars(trainer).values() if hasattr(value, "restore") and hasattr(value, "state")]
        assert stateful
        unkept = [value for value in stateful if not any(value is each for each in kept)]
        assert unkept == ([trainer._exact] if trainer._exact else []), "exact norms are stored at every step"


def test_the_state_of_a_run_has_every_field(tmp_path: Path) -> None:
    trainer = made_trainer(SPECS["everything"], tmp_path)
    trainer.begin()
    steps(trainer, 5)
    state = trainer._run.state()
    assert set(state) == {each.name for each in fields(RunState)}
    again = RunState("estimate")
    again.restore(state)
    assert differences(picture(trainer._run), picture(again)) == []


def adapter_net(seed: int = 0) -> nn.Module:
    """Nine tenths of it are frozen."""
    torch.manual_seed(seed)
    frozen = nn.Linear(30, 30).requires_grad_(False)
    return nn.Sequential(frozen, nn.BatchNorm1d(30).eval(), nn.Linear(30, 1))


def test_a_checkpoint_keeps_what_trains_and_the_buffers() -> None:
    model = adapter_net()
    values, again = ModelValues(model, digest_of_frozen(model)), adapter_net()
    with torch.no_grad():
        model.get_parameter("2.weight").add_(1.0)
        model.get_buffer("1.running_mean").add_(1.0)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert values.state()["values"].keys() == trained | dict(model.named_buffers()).keys()
    ModelValues(again, digest_of_frozen(again)).restore(values.state())
    assert differences(picture(model.state_dict()), picture(again.state_dict())) == []


def test_a_model_with_other_frozen_values_does_not_go_on() -> None:
    """Its noise would be that of another model."""
    model = adapter_net()
    state = ModelValues(model, digest_of_frozen(model)).state()
    for other in (adapter_net(seed=1), adapter_net().requires_grad_(True)):
        with pytest.raises(InvalidInput, match="other names, shapes or frozen values of parameters"):
            ModelValues(other, digest_of_frozen(other)).restore(state)


def test_what_a_model_changes_in_place_is_kept_although_it_is_frozen() -> None:
    model = adapter_net()
    values = ModelValues(model, digest_of_frozen(model))
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)
    again = adapter_net()
    restored = ModelValues(again, digest_of_frozen(again))
    restored.restore(values.state())
    assert torch.equal(again.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert "0.weight" in restored.state()["values"], "and in the next one"
