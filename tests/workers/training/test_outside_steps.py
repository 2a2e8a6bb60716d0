"""Code around an engine changes nothing of its model by a batch, but through the noise of a step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dpsweep
from dpsweep.workers.training.private_training import Batch, PrivateTraining

FEATURES = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
LABELS = (FEATURES[:, 0] > 0).long()
LOSS = nn.CrossEntropyLoss()


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Tanh(), nn.Linear(4, 2))


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> PrivateTraining:
    return PrivateTraining(model, LOSS, optimizer, (FEATURES, LABELS), sampling=30, epochs=2, delta=1e-4, noise=1.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.state_dict().values()])


def differentiate(model: nn.Module, batch: Batch) -> None:
    LOSS(model(batch.features), batch.labels).backward()


@pytest.mark.parametrize("stepped_before", [False, True])
def test_the_optimizer_of_an_engine_takes_no_step_without_noise(stepped_before: bool) -> None:
    """As in a loop that was written for an optimizer that adds the noise itself."""
    model = net()
    optimizer = sgd(model)
    engine = engine_of(model, optimizer)
    batch = next(iter(engine))
    if stepped_before:
        engine.step(batch)
    before = values_of(model)
    differentiate(model, batch)
    with pytest.raises(dpsweep.InvalidInput, match=r"SGD\.step\(\) was called outside engine\.step\(batch\)"):
        optimizer.step()
    assert torch.equal(values_of(model), before)


def test_an_engine_that_is_gone_leaves_its_optimizer_free_and_others_keep_it() -> None:
    model = net()
    optimizer = sgd(model)
    first, second = engine_of(model, optimizer), engine_of(model, optimizer)
    for engine in (first, second):
        engine.step(next(iter(engine)))
    del engine, first
    gc.collect()
    with pytest.raises(dpsweep.InvalidInput, match="outside engine"):
        optimizer.step()
    del second
    gc.collect()
    optimizer.step()


def test_a_learning_rate_schedule_of_torch_goes_with_the_steps() -> None:
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in (engine := engine_of(model, optimizer)):
        engine.step(batch)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**8)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, as that of Accelerate does: it is not initialised as one of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def test_an_optimizer_within_another_one_is_guarded_too() -> None:
    model = net()
    optimizer = sgd(model)
    engine = engine_of(model, Wrapper(optimizer))
    for batch in engine:
        engine.step(batch)
    with pytest.raises(dpsweep.InvalidInput, match="outside engine"):
        optimizer.step()


def _by_another_optimizer(model: nn.Module, batch: Batch) -> None:
    differentiate(model, batch)
    sgd(model).step()


def _by_new_values(model: nn.Module, batch: Batch) -> None:
    moved = nn.utils.parameters_to_vector(model.parameters()) + float(batch.features.mean())
    nn.utils.vector_to_parameters(moved, model.parameters())


@pytest.mark.parametrize("update", [_by_another_optimizer, _by_new_values])
def test_an_update_that_may_have_seen_a_batch_is_refused_before_its_step(
    update: Callable[[nn.Module, Batch], None],
) -> None:
    model = net()
    engine = engine_of(model, sgd(model))
    engine.step(next(iter(engine)))
    update(model, Batch(0, 0, torch.arange(8), lambda rows: (FEATURES[rows], LABELS[rows])))  # of public data, say
    batch = next(iter(engine))
    update(model, batch)
    with pytest.raises(
        dpsweep.InvalidInput, match=r"parameters 0\.weight, .* were changed between the draw of a batch"
    ):
        engine.step(batch)
    assert engine.steps == 1


def test_running_statistics_that_a_pass_over_a_batch_has_changed_are_refused() -> None:
    """A call of model.train() turns on what the model was given without."""
    model = net()
    engine = engine_of(model, sgd(model))
    for batch in engine:
        engine.step(batch)
        model.eval()
        model(batch.features)
        copy.deepcopy(model).train()(batch.features)
        model.load_state_dict(model.state_dict())
        if engine.steps == 3:
            break
    model.train()
    model(FEATURES[:8])
    with pytest.raises(dpsweep.InvalidInput, match=r"buffers 1\.running_mean, .* were changed outside step\(\)"):
        engine.step(next(iter(engine)))


def test_two_engines_may_take_turns_with_one_model_while_both_have_a_batch() -> None:
    model = net()
    first, second = engine_of(model, sgd(model)), engine_of(model, sgd(model))
    for one, other in zip(first, second, strict=True):
        first.step(one)
        second.step(other)
    assert first.steps == second.steps == 8
