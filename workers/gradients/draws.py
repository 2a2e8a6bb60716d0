"""Passes without chance, so that two of them on different rows can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from workers.gradients.randomness import RandomState

CONSTANTS: Mapping[str, float] = {
    "bernoulli": 1.0,
    "cauchy": 0.5,
    "exponential": 0.5,
    "geometric": 1.0,
    "log_normal": 0.5,
    "multinomial": 0.0,
    "normal": 0.5,
    "poisson": 0.0,
    "rand": 0.5,
    "rand_like": 0.5,
    "randn": 0.5,
    "randn_like": 0.5,
    "uniform": 0.5,
}
"""What is drawn instead, by operator. Integers get their lowest value, permutations reverse."""

_INTEGERS = ("randint", "randint_like", "random")


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context torch's random operators return constants, the same for every row of any batch.

    missed: whether an operator without such a constant has drawn, as fused attention with dropout does.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed = False
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags and "random" not in func.__name__:
            return func(*args, **(kwargs or {}))
        before = RandomState.of(self._device)
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in CONSTANTS:
            return result.fill_(CONSTANTS[name])
        if name in _INTEGERS:
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            return result.fill_(given.get("low", given.get("from", 0)))
        if name == "randperm":
            return result.copy_(torch.arange(len(result) - 1, -1, -1, dtype=result.dtype, device=result.device))
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(result[1])
        self.missed |= not before.is_current()
        return result


_RATES: Mapping[type[nn.Module], str] = {_DropoutNd: "p", nn.MultiheadAttention: "dropout", nn.RNNBase: "dropout"}


def _rates(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Modules with dropout, the name of its rate, and the rate."""
    return [
        (module, name, getattr(module, name))
        for module in model.modules()
        for kind, name in _RATES.items()
        if isinstance(module, kind)
    ]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Rates of dropout are 0: fused kernels draw where `ConstantDraws` cannot see it."""
    before = _rates(model)
    for module, name, _ in before:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in before:
            setattr(module, name, rate)


@torch.no_grad()
def draws(model: nn.Module, device: torch.device, run: Callable[[], object]) -> bool:
    """Whether ``run``, a forward pass of the model, draws random numbers of torch, numpy or Python.

    Then no two passes agree. The model and all random states are left as they were.
    """
    if any(module.training and rate > 0.0 for module, _, rate in _rates(model)):
        return True
    start = Start(model)
    with RandomState.preserved(device):
        before = RandomState.of(device)
        run()
        drawn = not (before.is_current() and start.is_current())
    start.restore()
    return drawn


class Start:
    """Buffers of a model, and the states of Python's and numpy's generators: what every compared pass starts from."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(value): name for name, value in model.named_buffers()}
        self._buffers = [
            (module, name, value, value.clone())
            for module in model.modules()
            for name, value in module._buffers.items()
            if value is not None
        ]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002, what models draw from

    def restore(self) -> None:
        for module, name, value, content in self._buffers:
            module._buffers[name] = value
            value.copy_(content)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def is_current(self) -> bool:
        """Whether neither Python nor numpy has drawn a number."""
        numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        kept = self._numpy["state"]
        same = numpy["pos"] == kept["pos"] and np.array_equal(numpy["key"], kept["key"])
        return same and random.getstate() == self._python

    def buffers(self) -> dict[str, Tensor | None]:
        """Copies of the present ones, by name in the model."""
        present = {self._names[id(value)]: module._buffers.get(name) for module, name, value, _ in self._buffers}
        return {name: None if value is None else value.clone() for name, value in present.items()}
