"""A model in double precision, in which gradients are compared where rounding matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


@contextmanager
def double_precision(model: nn.Module) -> Iterator[None]:
    """Within this context parameters and buffers are in double precision; then the original tensors are restored."""
    usual = torch.get_default_dtype()
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None
    ]
    try:
        for parameter, value in parameters:
            parameter.data = value.double() if value.is_floating_point() else value
        for module, name, value in buffers:
            module._buffers[name] = value.double() if value.is_floating_point() else value.clone()
        torch.set_default_dtype(torch.float64)
        with _DoubleForSingle():
            yield
    finally:
        torch.set_default_dtype(usual)
        for parameter, value in parameters:
            parameter.data = value
        for module, name, value in buffers:
            module._buffers[name] = value


class _DoubleForSingle(TorchFunctionMode):
    """Within this context code that asks for single precision gets double precision.

    That holds for code that activation checkpointing runs again in a backward pass, too: it must be as it was.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args, kwargs = pytree.tree_map(_doubled, (args, kwargs or {}))
        if func is torch.autograd.grad and _is_of_one_number(*args, **kwargs):
            return self._differentiate(*args, **kwargs)
        return func(*args, **kwargs)

    def _differentiate(self, outputs: Sequence[Tensor], inputs: Sequence[Any], allow_unused: bool, **_: Any) -> Any:
        """Do as torch.autograd.grad, which would leave this mode for the time of the backward pass."""
        with self:
            ones = tuple(map(torch.ones_like, outputs))
            return _engine_run_backward(outputs, ones, False, False, inputs, allow_unused, accumulate_grad=False)


def _is_of_one_number(outputs: Sequence[Any], inputs: Sequence[Any], **options: Any) -> bool:
    """Return whether this is a plain call of torch.autograd.grad, as for the sum of losses."""
    asked = {name for name, value in options.items() if value not in (None, False)}
    numbers = all(isinstance(each, Tensor) and each.numel() == 1 for each in outputs)
    return numbers and asked <= {"allow_unused", "only_inputs"}


def _doubled(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
