"""Number of examples in one pass that measures norms or evaluates, chosen for speed; a resumed run uses the same."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.workers.gradients.checks import in_its_precision
from dpsweep.workers.gradients.hidden_state import HiddenState
from dpsweep.workers.gradients.modes import RandomState, modes_kept

_MIN_EXAMPLES, _MAX_EXAMPLES, _TARGET_VALUES = 512, 4096, 2**18
"""Smallest and largest pass in examples; between them, examples x max(features, parameters) is the third."""
_MIN_WIDE_EXAMPLES, _MAX_WIDE_VALUES = 16, 2**20
"""On a CPU with wide layers: minimum of examples, and maximum of examples x size of the widest layer's output.

Times 9 for a convolution's 3 x 3 kernel, this is about 32 MiB of float32; glibc maps larger blocks anew each time.
"""


def rows_at_once(model: nn.Module, example: Tensor) -> int:
    """Return examples per pass of a model on examples like this one [1, ...], on their device."""
    parameters = sum(each.numel() for each in model.parameters())
    widest = widest_layer(model, example) if example.device.type == "cpu" else 0
    return rows_of_size(example.numel(), parameters, widest)


def rows_of_size(features: int, parameters: int, widest: int = 0) -> int:
    """Return examples per pass. Depends on sizes only, so that a resumed run is bit-identical.

    Larger if examples have few features and the model few parameters, because starting a pass then takes as long as its
    computation. Smaller if layers are wide. widest: from `widest_layer`, or 0 on a GPU, where more examples are faster.

    >>> rows_of_size(features=40, parameters=82), rows_of_size(features=784, parameters=500_000)
    (3196, 512)
    >>> rows_of_size(features=3072, parameters=270_000, widest=16_384)
    64
    """
    most = min(max(_MIN_EXAMPLES, _TARGET_VALUES // max(features, parameters)), _MAX_EXAMPLES)
    return min(most, max(_MIN_WIDE_EXAMPLES, _MAX_WIDE_VALUES // widest)) if widest else most


def widest_layer(model: nn.Module, example: Tensor) -> int:
    """Return the number of values in the largest module output for ``example`` [1, ...].

    If the model fails on one example, only the modules that ran before the failure count. Modes, buffers, other state
    and torch's random states are unchanged.
    """
    found = [0]

    def note(module: nn.Module, given: Any, gives: Any) -> None:
        if isinstance(gives, Tensor):
            found.append(gives.numel())

    buffers, hidden = {name: buffer.clone() for name, buffer in model.named_buffers()}, HiddenState(model, None)
    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with (
            torch.no_grad(),
            RandomState.preserved(example.device),
            modes_kept(model),
            in_its_precision(model, example.device),
            contextlib.suppress(Exception),
        ):
            functional_call(model.eval(), buffers, example)
    finally:
        for handle in handles:
            handle.remove()
        hidden.restore()
    return max(found)
