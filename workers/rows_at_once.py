"""How many examples a norm pass takes at once: as many as are fast, and the same in a run that is resumed."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workers.gradients import RandomState, in_its_precision, modes_kept

_LEAST, _MOST, _NUMBERS = 512, 4096, 2**18
"""The fewest and the most examples of a norm pass, and what examples times features, or parameters, come to between."""
_FEWEST, _BLOCK = 16, 2**20
"""On a CPU, the fewest examples where layers are wide, and what examples times the widest layer come to at most: with
the nine places of a convolution's kernel these are the 32 MiB from which glibc takes new memory for each block."""


def rows_at_once(features: int, parameters: int, widest: int = 0) -> int:
    """Examples per norm pass. A function of sizes, so that a resumed run repeats every bit.

    More where examples have few features and the model few parameters: a pass then takes as long to start as to do.
    What layers keep of an example is at most about features times parameters. Fewer where layers are wide.
    widest: of `widest_layer`; 0 on a GPU, which is faster the more it is given.

    >>> rows_at_once(features=40, parameters=82), rows_at_once(features=784, parameters=500_000)
    (3196, 512)
    >>> rows_at_once(features=3072, parameters=270_000, widest=16_384)
    64
    """
    most = min(max(_LEAST, _NUMBERS // max(features, parameters)), _MOST)
    return min(most, max(_FEWEST, _BLOCK // widest)) if widest else most


def widest_layer(model: nn.Module, example: Tensor) -> int:
    """Size of the largest output of a module for ``example`` [1, ...], of those that run where one example alone fails.

    The model stays as it is: its modes, its buffers and torch's random numbers.
    """
    found = [0]

    def note(module: nn.Module, given: Any, gives: Any) -> None:
        if isinstance(gives, Tensor):
            found.append(gives.numel())

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
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
    return max(found)
