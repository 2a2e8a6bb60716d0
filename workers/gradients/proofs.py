"""Which models have been shown to treat the rows of whole batches independently, in this process.

At the size of a whole batch that depends on model and shapes alone, and takes as long as several epochs of a very short
training. It is therefore shown once for all trials that a worker process trains. Nothing of it is stored: a file could
be forged, or belong to other code.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from workers.gradients.hidden_state import HiddenState, is_installed
from workers.gradients.modes import modes_of

_LARGEST: Final[dict[str, int]] = {}
"""Number of examples in the largest batch for which it was shown, by digest."""


def is_proven(digest: str, examples: int) -> bool:
    """Whether it was shown for a batch of at least this many examples."""
    return _LARGEST.get(digest, 0) >= examples


def note_proven(digest: str, examples: int) -> None:
    """Note that it was shown for a batch of this many examples."""
    _LARGEST[digest] = max(examples, _LARGEST.get(digest, 0))


def digest_of(model: nn.Module, loss: object, x: Tensor, y: Tensor, *others: object) -> str:
    """A sha256 of everything but the values of parameters, buffers and rows that decides how rows are treated.

    The structure of the model: classes, shapes, modes and every other attribute. The code: of all functions and classes
    of modules that are not installed packages, as it is loaded, and the versions of Python, torch and numpy. The shapes
    of single rows. others: settings of the engine.
    """
    digest = hashlib.sha256()

    def add(part: object) -> None:
        digest.update(repr(part).encode())

    add((platform.python_version(), torch.__version__, np.__version__, torch.get_num_threads(), others))
    add([(x.device.type, each.dtype, tuple(each.shape[1:])) for each in (x, y)])
    add([(name, type(module).__module__, type(module).__qualname__) for name, module in model.named_modules()])
    add([(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()])
    add([(name, buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()])
    add(sorted(modes_of(model).items()))
    add(sorted(HiddenState(model, loss).contents().items()))
    for module in _own_modules():
        add((module.__name__, sorted(_codes_of(module))))
    return digest.hexdigest()


def _own_modules() -> list[ModuleType]:
    """Loaded modules that are not part of Python or of an installed package, by name."""
    own = [module for name, module in list(sys.modules.items()) if not is_installed(name)]
    return sorted(own, key=lambda module: module.__name__)


def _codes_of(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Names and digests of the functions that a module or its classes define."""
    for name, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for key, member in vars(value).items():
                member = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(member, FunctionType):
                    yield f"{name}.{key}", code_digest(member.__code__)
        elif isinstance(value, FunctionType):
            yield name, code_digest(value.__code__)


@lru_cache(maxsize=2**15)
def code_digest(code: CodeType) -> str:
    """A sha256 of what a function does, wherever it is written."""
    constants = [code_digest(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    parts = (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
