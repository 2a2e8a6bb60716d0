"""Deterministic forward passes, so that two of them on different rows can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from dpsweep.workers.gradients.divided import own_part
from dpsweep.workers.gradients.hidden_state import HiddenState
from dpsweep.workers.gradients.modes import RandomState, modes_kept
from dpsweep.workers.machine.devices import lacks_memory


@dataclass(frozen=True)
class Constants:
    """Values that replace random draws.

    several: for continuous draws, with more than one along the last axis.
    single: for one, as a model may branch on whether it is below a small or above a large probability.
    event: 1.0 if events happen.
    end: chooses an integer of the smallest and the largest that an operator is given.
    """

    several: float
    single: float
    event: float
    end: Callable[[int, int], int]


LOW: Final = Constants(0.25, 2.0**-10, 0.0, min)
HIGH: Final = Constants(0.75, 1.0 - 2.0**-10, 1.0, max)

SPREAD = 0.2
"""Maximum deviation from the constant within one row."""

_CONTINUOUS = frozenset(
    {"_sample_dirichlet", "_standard_gamma", "cauchy", "exponential", "log_normal", "normal", "rand", "rand_like"}
    | {"randn", "randn_like", "uniform"}
)
_COUNTS: Mapping[str, float] = {"binomial": 1.0, "geometric": 1.0, "multinomial": 0.0, "poisson": 0.0}
_INTEGERS = ("randint", "randint_like", "random")


class ConstantDraws(TorchDispatchMode):
    """Within this context torch's random operators return constants that are the same for every row of any batch.

    constants: the values; permutations are reversals.
    replaced: whether a draw was replaced.
    missed: whether an operator drew that cannot be replaced, such as fused attention with dropout.
    own_generator: whether an operator was given a torch.Generator of the model's own.
    Higher-order operators raise RuntimeError in this context.
    """

    def __init__(self, device: torch.device, constants: Constants = LOW) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replaced = self.missed = self.own_generator = False
        self._device, self._constants = device, constants

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, to avoid the import of the compiler (torch._dynamo), which takes as long as the import of torch."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _may_draw(func):
            return func(*args, **kwargs)
        before = RandomState.of(self._device)
        if _draws_slopes(func, args):
            args = (*args[:2], *[(args[2] + args[3]) / 2.0] * 2, *args[4:])
        result = func(*args, **kwargs)
        self.own_generator |= kwargs.get("generator") is not None
        constant = self._constant(func, args, result)
        if constant is None:
            self.missed |= not before.is_current()
            return result
        self.replaced = True
        return constant

    def _constant(self, func: OpOverload, args: Any, result: Any) -> Any:
        name = _name(func)
        if _draws_slopes(func, args):
            return result
        if name in _CONTINUOUS:
            return self._continuous(result)
        if name in _COUNTS:
            return result.fill_(_COUNTS[name])
        if name == "bernoulli":
            return result.fill_(self._constants.event)
        if name in _INTEGERS:
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            low, end = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
            return result.fill_(low if end is None else self._constants.end(low, end - 1))
        if name == "randperm":
            return result.copy_(torch.arange(len(result) - 1, -1, -1, dtype=result.dtype, device=result.device))
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(result[1])
        return None

    def _continuous(self, result: Tensor) -> Tensor:
        """Constants; with two or more axes they differ along the last one, so its std is not 0."""
        if result.dim() < 2 or result.shape[-1] == 1 or not result.is_floating_point():
            return result.fill_(self._constants.single)
        places = torch.arange(result.shape[-1], device=result.device, dtype=torch.float64)
        return result.copy_((self._constants.several + SPREAD * places.cos()).expand(result.shape))


def _name(func: OpOverload) -> str:
    """Return the name of the operator, without the underscore of its in-place form."""
    return str(func.overloadpacket.__name__).removesuffix("_")


def _draws_slopes(func: OpOverload, args: Any) -> bool:
    """Return whether the operator draws between its arguments 2 and 3, in training, the slopes of nn.RReLU."""
    return _name(func) == "rrelu_with_noise" and len(args) > 4 and args[4]


def _may_draw(func: OpOverload) -> bool:
    """Return whether the operator is random; torch does not tag random_ and randint."""
    return torch.Tag.nondeterministic_seeded in func.tags or _name(func) in _INTEGERS


_RATES: Mapping[type[nn.Module], str] = {_DropoutNd: "p", nn.MultiheadAttention: "dropout", nn.RNNBase: "dropout"}


def _rates(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """(module, attribute name, rate) of every module that applies dropout."""
    return [
        (module, name, getattr(module, name))
        for module in model.modules()
        for kind, name in _RATES.items()
        if isinstance(module, kind)
    ]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout rate to 0, because fused kernels draw outside the operators that `ConstantDraws` replaces."""
    before = _rates(model)
    for module, name, _ in before:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in before:
            setattr(module, name, rate)


@torch.no_grad()
def draws(model: nn.Module, loss: object, device: torch.device, run: Callable[[], object]) -> bool:
    """Return whether ``run``, a forward pass of model and loss, draws random numbers.

    If so, results differ from pass to pass. The model, its hidden state, modes and all random states are restored.
    """
    if any(module.training and rate > 0.0 for module, _, rate in _rates(model)):
        return True
    start, constants, hidden = Start(model), ConstantDraws(device), HiddenState(model, loss)
    with RandomState.preserved(device), modes_kept(model):
        before = RandomState.of(device)
        try:
            with constants:
                run()
        except RuntimeError as error:  # higher-order operators fail in a dispatch mode; genuine errors occur again
            if lacks_memory(error):
                raise
            torch.compiler.reset()  # torch 2.11 would cache the failure
            run()
        drawn = constants.replaced or not before.is_current()
    start.restore()
    hidden.restore()
    return drawn


@dataclass(frozen=True)
class Fingerprint:
    """A parameter's version and a copy of it; of a frozen one, which may be large, the digits of its sum and norm."""

    version: int
    content: Tensor | str

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Fingerprint:
        """Return the current one."""
        value = own_part(parameter)
        return cls(parameter._version, value.clone() if parameter.requires_grad else _sums(value))

    def is_of(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is still the same."""
        if parameter._version != self.version:
            return False
        if isinstance(self.content, str):
            return self.content == _sums(own_part(parameter))
        return same(self.content, own_part(parameter))


def _sums(value: Tensor) -> str:
    value = value if value.is_floating_point() else value.double()
    sums = value.sum(dtype=torch.float64), torch.linalg.vector_norm(value, dtype=torch.float64)
    return " ".join(repr(float(each)) for each in sums)


class Start:
    """State that is restored before every compared pass: the model's buffers, and Python's and numpy's generators."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._names = {id(value): name for name, value in model.named_buffers()}
        self._buffers = [
            (module, name, value, value.clone())
            for module in model.modules()
            for name, value in module._buffers.items()
            if value is not None
        ]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002, models may draw from it

    def restore(self) -> None:
        for module, name, value, content in self._buffers:
            module._buffers[name] = value
            if not same(value, content):
                value.copy_(content)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def is_current(self) -> bool:
        """Return whether neither Python nor numpy has drawn a number since."""
        numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
        kept = self._numpy["state"]
        same = numpy["pos"] == kept["pos"] and np.array_equal(numpy["key"], kept["key"])
        return same and random.getstate() == self._python

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return of every parameter, by name, for `changed_since`."""
        return {name: Fingerprint.of(parameter) for name, parameter in self._parameters.items()}

    def changed_since(self, fingerprints: Mapping[str, Fingerprint]) -> list[str]:
        """Return the names of the parameters that have changed since, be it through `data`."""
        return [name for name, value in self._parameters.items() if not fingerprints[name].is_of(value)]

    def buffers(self) -> dict[str, Tensor | None]:
        """Return copies of the current buffers, by name in the model."""
        present = {self._names[id(value)]: module._buffers.get(name) for module, name, value, _ in self._buffers}
        return {name: None if value is None else value.clone() for name, value in present.items()}


def same(left: Tensor | None, right: Tensor | None) -> bool:
    """Return whether two tensors are equal, or both are missing; NaN equals NaN."""
    if left is None or right is None:
        return left is right
    if (left.shape, left.dtype, left.layout) != (right.shape, right.dtype, right.layout):
        return False
    left, right = _dense(left), _dense(right)
    return torch.equal(left, right) or torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
