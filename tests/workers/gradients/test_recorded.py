"""Recorded passes give the bits of passes as they are: on a GPU by CUDA graphs, on a CPU by emulated ones."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.workers.gradients import recorded
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.gradients.modes import RandomState
from dpsweep.workers.gradients.pass_results import BatchNorms, WeightedSum
from dpsweep.workers.gradients.planners import ShapePlanner
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.reproducible import reproducible
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.workers.brute_force import per_example_loss
from tests.workers.devices import DEVICE, NAME
from tests.workers.gradients.emulated_graphs import emulate
from tests.workers.gradients.test_engine import CASES
from tests.workers.trial_specs import small_trial

on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="recordings need a GPU: pytest --device cuda")
MICRO_BATCH = 4
SIZES = (4, 7, 4, 3, 8, 6, 0, 12, 5, 4, 9, 1, 4, 10, 4, 8)
"""Of the batches of a run: full and padded micro-batches, one and several of them."""


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        emulate(monkeypatch)
    with reproducible(ExecutionSpec(device=NAME), 0):
        yield


def engine_of(model: nn.Module, **options: Any) -> GradientEngine:
    padded: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "last_micro_batch": "padded", "planner": ShapePlanner()}
    engine = GradientEngine(model, per_example_loss, launches="recorded", **padded, **options)
    if DEVICE.type == "cpu":
        engine._recordings = recorded.Recordings(model, per_example_loss)
    return engine


def never_recorded(model: nn.Module, **options: Any) -> GradientEngine:
    engine = engine_of(model, **options)
    known(engine._recordings).refused = "it is compared with one that is"
    return engine


def clip(norms: BatchNorms, rows: slice) -> Tensor:
    return (0.5 / norms.norms).clamp(max=1.0)


def by_layer(norms: BatchNorms, rows: slice) -> Tensor:
    return (0.5 / known(norms.layer_norms)).clamp(max=1.0)


def require_same_bits(found: WeightedSum, expected: WeightedSum) -> None:
    assert torch.equal(found.norms.norms, expected.norms.norms)
    torch.testing.assert_close(found.norms.losses, expected.norms.losses, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.weights, expected.weights)
    assert found.non_finite == expected.non_finite
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def descend(model: nn.Module, gradients: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.sub_(0.05 * gradients[name])


def replays(engine: GradientEngine) -> int:
    """Recordings that were found equal to the passes that they replace."""
    return len(known(engine._recordings)._checked)


@pytest.mark.thinned(8 if DEVICE.type == "cpu" else 1)
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *("linear", "linear on sequences", "linear on many positions", "conv2d padded", "conv2d of 16 channels"),
        *("weight-standardised conv2d", "embedding", "group norm", "layer norm", "self-attention", "transformer layer"),
        "lists of parameters",
    ],
)
def test_every_bit_of_a_run_is_that_of_passes_as_they_are(name: str, layerwise: bool) -> None:
    torch.manual_seed(0)
    model = CASES[name].model().to(DEVICE)
    other = copy.deepcopy(model)
    engine, plain = engine_of(model, layerwise=layerwise), never_recorded(other, layerwise=layerwise)
    x, y = (each.to(DEVICE) for each in CASES[name].inputs(max(SIZES)))
    for step, size in enumerate(SIZES):
        some = torch.randperm(len(x))[:size].to(DEVICE)
        weigh = by_layer if layerwise and step % 2 else clip
        found = engine.weighted_sum_rowwise(x[some], y[some], weigh)
        require_same_bits(found, plain.weighted_sum_rowwise(x[some], y[some], weigh))
        assert torch.equal(engine.norms(x[some], y[some]).norms, plain.norms(x[some], y[some]).norms)
        descend(model, found.gradients)
        descend(other, found.gradients)
    assert engine.not_recorded is None
    assert replays(engine) == 2 + layerwise, "without a weighted sum, and with weights of each kind"


def test_results_are_the_callers_own() -> None:
    engine = engine_of(nn.Linear(5, 3).to(DEVICE))
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    for _ in range(6):
        engine.weighted_sum_rowwise(x, y, clip)
    assert replays(engine) == 1
    first = engine.weighted_sum_rowwise(x, y, clip)
    kept = copy.deepcopy((first.norms.norms, first.gradients["weight"]))
    engine.weighted_sum_rowwise(3.0 * x, y, clip)
    assert torch.equal(first.norms.norms, kept[0])
    assert torch.equal(first.gradients["weight"], kept[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_an_example_whose_gradient_is_not_finite_is_left_out(value: float) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(DEVICE)
    engine, plain = engine_of(model), never_recorded(model)
    for step in range(12):
        x, y = torch.randn(6, 5, device=DEVICE), torch.arange(6, device=DEVICE) % 3
        if step % 3 == 2:
            x[step % 6] = value
        found, expected = (each.weighted_sum_rowwise(x, y, clip) for each in (engine, plain))
        require_same_bits(found, expected)
    assert replays(engine) == 1


def test_parameters_that_move_are_recorded_anew() -> None:
    model = nn.Linear(5, 3).to(DEVICE)
    engine, plain = engine_of(model), never_recorded(model)
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    for step in range(16):
        if step == 8:
            model.weight.data = 2.0 * model.weight.data
        require_same_bits(engine.weighted_sum_rowwise(x, y, clip), plain.weighted_sum_rowwise(x, y, clip))
    assert engine.not_recorded is None


def test_parameters_that_move_at_every_step_are_not_recorded_for_ever() -> None:
    model = nn.Linear(5, 3).to(DEVICE)
    engine = engine_of(model)
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    kept = []
    for _ in range(10):
        kept.append(model.weight.data)
        model.weight.data = model.weight.data.clone()
        for _ in range(4):
            engine.weighted_sum_rowwise(x, y, clip)
    assert "replaced again and again" in str(engine.not_recorded)


class Asking(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # the name of torch's argument
        return super().forward(input) * (2.0 if bool(input.sum() > 1e6) else 1.0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(nn.Dropout(0.5), "draws random numbers"), (Asking(5, 5), "Error in")],
    ids=["dropout", "a value on the host"],
)
def test_passes_that_cannot_be_repeated_run_as_they_are(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.Linear(5, 5), layer, nn.Linear(5, 3)).to(DEVICE)
    engine, plain = engine_of(model), never_recorded(model)
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    states = [RandomState.of(DEVICE)] * 2
    for _ in range(8):
        done = []
        for place, each in enumerate((engine, plain)):
            states[place].restore()
            done.append(each.weighted_sum_rowwise(x, y, clip))
            states[place] = RandomState.of(DEVICE)
        require_same_bits(*done)
    assert reason in str(engine.not_recorded)


@on_gpu
def test_a_trial_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that dies and goes on, whose first steps then run as they are."""
    execution = ExecutionSpec(device=NAME, micro_batch_size=16, last_micro_batch="padded", checkpoint_every_epochs=0.5)
    spec = replace(small_trial(execution=execution), epochs=6)
    run_trial(spec, str(tmp_path / "recorded"))
    monkeypatch.setattr(recorded, "_BEFORE", 10**9)
    run_trial(spec, str(tmp_path / "as it is"))
    found, expected = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("recorded", "as it is"))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_nothing_is_recorded_without_a_gpu_a_size_and_being_asked() -> None:
    reason = "recordings need a GPU, a micro-batch size, and launches='recorded'"
    model = nn.Linear(2, 1)
    assert GradientEngine(model, per_example_loss, micro_batch_size=2).not_recorded == reason
    assert GradientEngine(model, per_example_loss, launches="recorded").not_recorded == reason
    if DEVICE.type == "cpu":
        engine = GradientEngine(model, per_example_loss, micro_batch_size=2, launches="recorded")
        assert engine.not_recorded == reason


class Counting(nn.Linear):
    """Counts its passes in a buffer, which changes no result."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:  # the name of torch's argument
        self.passes.add_(1)
        return super().forward(input)


class Masking(nn.Module):
    """Keeps a mask for the last number of rows that it saw."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.full((len(x), 1), 0.5, device=x.device)
        return x * self.mask


def test_passes_that_change_state_run_as_they_are_and_count_as_often() -> None:
    model = nn.Sequential(Counting(), nn.Linear(5, 3)).to(DEVICE)
    other = copy.deepcopy(model)
    engine, plain = engine_of(model), never_recorded(other)
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    for _ in range(8):
        require_same_bits(engine.weighted_sum_rowwise(x, y, clip), plain.weighted_sum_rowwise(x, y, clip))
    assert "changes state" in str(engine.not_recorded)
    assert torch.equal(model.get_buffer("0.passes"), other.get_buffer("0.passes"))


def test_what_a_model_replaces_stays_as_it_was_recorded() -> None:
    model = nn.Sequential(Masking(), nn.Linear(5, 3)).to(DEVICE)
    engine = engine_of(model)
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    expected = engine.norms(x, y).norms
    for _ in range(6):
        engine.norms(x, y)
    assert replays(engine) == 1
    with torch.no_grad():
        model(torch.randn(9, 5, device=DEVICE))  # another mask
        filled = [torch.full((4, 1), 1e6, device=DEVICE) for _ in range(64)]  # in the memory of the first, were it free
    assert torch.equal(engine.norms(x, y).norms, expected)
    assert len(filled) == 64


@on_gpu
def test_labels_on_the_host_are_not_recorded() -> None:
    model = nn.Linear(5, 3).to(DEVICE)
    engine = GradientEngine(
        model, lambda output, y: per_example_loss(output, y.to(output.device)), micro_batch_size=4, launches="recorded"
    )
    for step in range(6):
        y = torch.full((4,), step % 3)
        found = engine.weighted_sum_rowwise(torch.ones(4, 5, device=DEVICE), y, clip)
        losses = torch.log_softmax(model(torch.ones(1, 5, device=DEVICE)), 1)[0, step % 3].neg()
        torch.testing.assert_close(found.norms.losses, losses.detach().expand(4))
    assert replays(engine) == 0


def recording() -> GradientEngine:
    """Return an engine that has a recording."""
    engine = engine_of(nn.Linear(5, 3).to(DEVICE))
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    for _ in range(6):
        engine.weighted_sum_rowwise(x, y, clip)
    assert replays(engine) == 1
    return engine


def test_recordings_go_with_their_engine() -> None:
    """They hold memory of the device, which the next trial of the process needs before garbage is collected."""
    engine = recording()
    kept = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert kept() is None
    finally:
        gc.enable()


def test_recordings_of_an_engine_share_memory_until_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, record = list[Any](), recorded._recording

    def noted(graph: Any, device: torch.device, pool: Any) -> Any:
        pools.append(pool)
        return record(graph, device, pool)

    monkeypatch.setattr(recorded, "_recording", noted)
    engine = engine_of(nn.Linear(5, 3).to(DEVICE))
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    for _ in range(2):
        for _ in range(6):
            engine.norms(x, y)
            engine.weighted_sum_rowwise(x, y, clip)
        assert replays(engine) == 2
        known(engine._recordings).forget()
    assert pools == [pools[0]] * 3 + [pools[3]] * 3
    assert pools[0] != pools[3]


class Synchronising(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # the name of torch's argument
        torch.cuda.synchronize()  # torch does not count it among the operations that wait
        return super().forward(input)


@on_gpu
def test_a_recording_that_cuda_refuses_leaves_no_trace_in_the_process() -> None:
    engine = engine_of(nn.Sequential(Synchronising(5, 5), nn.Linear(5, 3)).to(DEVICE))
    x, y = torch.randn(4, 5, device=DEVICE), torch.arange(4, device=DEVICE) % 3
    for _ in range(6):
        engine.weighted_sum_rowwise(x, y, clip)
    assert engine.not_recorded is not None
    torch.cuda.empty_cache()
    assert bool(torch.randn(3, device=DEVICE).isfinite().all())
    assert torch.cuda.current_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
    recording()
