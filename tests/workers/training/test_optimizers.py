"""One contract for every optimiser, and what sets each of them apart."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.spec import Component
from dpsweep.workers.training.optimizers import (
    AVERAGES,
    LEARNING_RATE_SCHEDULES,
    OPTIMIZERS,
    Optimizer,
    make_average,
    make_learning_rate_schedule,
    make_optimizer,
)

COMPONENTS = [
    Component("sgd", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    Component("adam", {"learning_rate": 0.1}),
    Component("adamw", {"learning_rate": 0.1}),
    Component("adam_corrected", {"learning_rate": 0.1}),
]
every_optimizer = pytest.mark.parametrize("component", COMPONENTS, ids=lambda c: c.name)


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"weight": nn.Parameter(torch.randn(3, 2)), "bias": nn.Parameter(torch.randn(3))}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(3, 2, generator=generator), "bias": torch.randn(3, generator=generator)}


def run(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.step(gradients(step), factor=1.0 / (1 + step), noise_std=0.05)


def assert_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    for name in left:
        assert torch.equal(left[name], right[name]), name


@every_optimizer
@pytest.mark.parametrize("size", [5, 8 * 1024 + 3])
def test_parts_of_parameters_move_as_in_the_whole(component: Component, size: int) -> None:
    """To the bit, wherever ranks divide them; the state has the shapes of the parameters, under their names."""
    torch.manual_seed(0)
    start, steps = torch.randn(size), torch.randn(4, size)
    places = [slice(0, size), slice(0, size // 3), slice(size // 3, size // 3), slice(size // 3, size)]
    found = []
    for place in places:
        parameter = nn.Parameter(start[place].clone())
        optimizer = make_optimizer(component, {"weight": parameter})
        for step in steps:
            optimizer.step({"weight": step[place].clone()}, factor=0.9, noise_std=0.05)
        tensors = [each for each in pytree.tree_leaves(optimizer.state()) if isinstance(each, Tensor) and each.dim()]
        assert [each.shape for each in tensors] == [parameter.shape] * len(tensors)
        found.append([parameter.detach(), *tensors])
    whole, *parts = found
    for expected, *divided in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(divided), expected)


def test_every_optimizer_is_under_the_contract() -> None:
    assert {component.name for component in COMPONENTS} == set(OPTIMIZERS)


@every_optimizer
def test_a_restored_optimizer_repeats_every_bit(component: Component) -> None:
    undisturbed, interrupted = parameters(), parameters()
    run(make_optimizer(component, undisturbed), range(8))
    before = make_optimizer(component, interrupted)
    run(before, range(3))
    after = make_optimizer(component, interrupted)
    after.restore(before.state())
    run(after, range(3, 8))
    assert_equal(undisturbed, interrupted)


@every_optimizer
def test_a_step_goes_down_and_a_factor_of_zero_stays(component: Component) -> None:
    moved = parameters()
    before = {name: value.detach().clone() for name, value in moved.items()}
    optimizer = make_optimizer(component, moved)
    optimizer.step({name: torch.ones_like(value) for name, value in moved.items()}, factor=0.0, noise_std=0.0)
    assert_equal(before, moved)
    optimizer.step({name: torch.ones_like(value) for name, value in moved.items()}, factor=1.0, noise_std=0.0)
    assert all((moved[name] < before[name] + 1e-3).all() for name in moved)


@pytest.mark.parametrize(
    ("component", "theirs"),
    [
        (Component("sgd", {"learning_rate": 0.1, "weight_decay": 0.1}), (torch.optim.SGD, {"weight_decay": 0.1})),
        (
            Component("sgd", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
            (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ),
        (Component("sgd", {"learning_rate": 0.1, "momentum": 0.5}), (torch.optim.SGD, {"momentum": 0.5})),
        (Component("adam", {"learning_rate": 0.1, "weight_decay": 0.1}), (torch.optim.Adam, {"weight_decay": 0.1})),
        (Component("adamw", {"learning_rate": 0.1, "beta1": 0.8}), (torch.optim.AdamW, {"betas": (0.8, 0.999)})),
    ],
)
def test_steps_are_bit_for_bit_those_of_torch(
    component: Component, theirs: tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]
) -> None:
    ours, expected = parameters(), parameters()
    run(make_optimizer(component, ours), range(6))
    kind, params = theirs
    reference = kind(expected.values(), lr=0.1, **params)
    for step in range(6):
        reference.param_groups[0]["lr"] = 0.1 / (1 + step)
        for name, gradient in gradients(step).items():
            expected[name].grad = gradient
        reference.step()
    assert_equal(ours, expected)


def test_sgd_is_the_textbook_step() -> None:
    moved = parameters()
    before = moved["bias"].detach().clone()
    make_optimizer(Component("sgd", {"learning_rate": 0.5}), moved).step(gradients(0), factor=0.1, noise_std=1.0)
    torch.testing.assert_close(moved["bias"].detach(), before - 0.05 * gradients(0)["bias"])


def test_corrected_adam_without_noise_is_adamw() -> None:
    ours, theirs = parameters(), parameters()
    shared = {"learning_rate": 0.01, "weight_decay": 0.1}
    corrected = make_optimizer(Component("adam_corrected", {**shared, "floor": 1e-12}), ours)
    reference = make_optimizer(Component("adamw", {**shared, "epsilon": 0.0}), theirs)
    for step in range(10):
        corrected.step(gradients(step), factor=1.0, noise_std=0.0)
        reference.step(gradients(step), factor=1.0, noise_std=0.0)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def test_corrected_adam_takes_the_step_of_the_noiseless_gradient() -> None:
    """With a constant gradient Adam moves by its learning rate; noise shortens the steps of plain Adam only."""
    generator = torch.Generator().manual_seed(0)
    size, signal, std = 20_000, 0.5, 0.5
    speed: dict[str, float] = {}
    for name, params in (("adam", {}), ("adam_corrected", {"floor": 0.1})):
        moved = {"weight": nn.Parameter(torch.zeros(size))}
        optimizer = make_optimizer(Component(name, {"learning_rate": 0.01, **params}), moved)
        halfway = torch.zeros(size)
        for step in range(600):
            if step == 300:
                halfway = moved["weight"].detach().clone()
            noise = std * torch.randn(size, generator=generator)
            optimizer.step({"weight": signal + noise}, factor=1.0, noise_std=std)
        speed[name] = float((halfway - moved["weight"].detach()).mean()) / (300 * 0.01)
    assert speed["adam"] == pytest.approx(signal / math.hypot(signal, std), rel=0.03)
    assert speed["adam_corrected"] == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (Component("sdg", {"learning_rate": 0.1}), "did you mean 'sgd'"),
        (Component("sgd", {"learning_rate": 0.1, "momentun": 0.9}), "did you mean 'momentum'"),
        (Component("sgd"), "needs learning_rate"),
        (Component("sgd", {"learning_rate": math.nan}), "learning_rate is nan"),
        (Component("sgd", {"learning_rate": 0.1, "nesterov": True}), "nesterov is true, but momentum is 0"),
        (Component("sgd", {"learning_rate": 0.1, "nesterov": "yes"}), "nesterov is 'yes', but must be true or false"),
        (Component("adam_corrected", {"floor": 0.0}), "floor is 0"),
    ],
)
def test_impossible_settings_are_refused_in_words(component: Component, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_optimizer(component, parameters())


def numbers(factory: Callable[..., object]) -> list[str]:
    """The numeric parameters of an optimiser, a schedule or an average that a user can set."""
    found = inspect.signature(factory).parameters.values()
    return [p.name for p in found if p.annotation == "float"]


def made_schedule(component: Component, parameters: Mapping[str, nn.Parameter]) -> object:
    return make_learning_rate_schedule(component, total_steps=100, steps_per_epoch=10)


NUMBERS = [
    *((make_optimizer, name, key) for name, factory in OPTIMIZERS.items() for key in numbers(factory)),
    *((made_schedule, name, key) for name, factory in LEARNING_RATE_SCHEDULES.items() for key in numbers(factory)),
    *((make_average, name, key) for name, factory in AVERAGES.items() for key in numbers(factory)),
]
NEEDED = {
    "sgd": {"learning_rate": 0.1},
    "linear": {"end": 0.5, "epochs": 1.0},
    "step": {"factor": 0.5, "period_epochs": 1.0},
}


@pytest.mark.parametrize(("make", "name", "key"), NUMBERS, ids=lambda part: part if isinstance(part, str) else "")
def test_every_number_is_checked(make: Callable[..., object], name: str, key: str) -> None:
    never = ["nine", "0.5", True, None, [0.5], math.nan, math.inf, -0.1]
    if key in ("momentum", "beta1", "beta2", "decay"):
        never += [1.0, 1.5, 5]
    if key in ("floor", "factor", "period_epochs", "epochs"):
        never += [0, 0.0]
    for value in never:
        with pytest.raises(InvalidInput, match=rf"{re.escape(repr(name))}: {key}\b.* is") as caught:
            make(Component(name, {**NEEDED.get(name, {}), key: value}), parameters())
        assert f"is {value}, " in str(caught.value) or f"is {value!r}, " in str(caught.value)


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (Component("constant"), [1.0, 1.0, 1.0]),
        (Component("constant", {"warmup_epochs": 2.0}), [0.05, 1.0, 1.0]),
        (Component("cosine"), [1.0, 0.5, 0.5 * (1.0 + math.cos(math.pi * 0.99))]),
        (Component("cosine", {"end": 0.1}), [1.0, 0.55, 0.1 + 0.45 * (1.0 + math.cos(math.pi * 0.99))]),
        (Component("linear", {"end": 0.2, "epochs": 10}), [1.0, 0.6, 0.2 + 0.8 * 0.01]),
        (Component("linear", {"end": 0.2, "epochs": 4}), [1.0, 0.2, 0.2]),
        (Component("step", {"factor": 0.5, "period_epochs": 2}), [1.0, 0.5**2, 0.5**4]),
        (Component("inverse_sqrt_steps"), [0.1, 0.1, 0.1]),
    ],
    ids=lambda value: value.name if isinstance(value, Component) else "",
)
def test_learning_rate_schedules(component: Component, expected: list[float]) -> None:
    factor = make_learning_rate_schedule(component, total_steps=100, steps_per_epoch=10)
    assert [factor(step) for step in (0, 50, 99)] == pytest.approx(expected)
    assert component.name in LEARNING_RATE_SCHEDULES


def test_average_follows_the_parameters_and_restores() -> None:
    moving = parameters()
    average = make_average(Component("ema", {"decay": 0.9}), moving)
    start = average.values["bias"].clone()
    with torch.no_grad():
        moving["bias"].add_(1.0)
    average.update(moving)
    torch.testing.assert_close(average.values["bias"], start + 0.9)  # the first decay is 1 / 10
    other = make_average(Component("ema", {"decay": 0.9}), moving)
    other.restore(average.state())
    average.update(moving)
    other.update(moving)
    assert_equal(average.values, other.values)
    with pytest.raises(InvalidInput, match="less than 1"):
        make_average(Component("ema", {"decay": 1.0}), moving)
