"""CUDA graphs as a CPU can emulate them: a recording notes every operator, and a replay runs them again.

What only a GPU can show is left out: streams, memory that graphs share, and kernels that a recording refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpsweep.workers.gradients import recorded
from tests.workers.gradients.test_synchronisations import Waits


class Graph:
    """Takes the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def replay(self) -> None:
        """Compute all tensors again, each in the memory that it had in the recording."""
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, made in self.calls:
                for before, again in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                    if again.data_ptr() != before.data_ptr():  # else it is a view, or was changed in place
                        before.copy_(again)


class _Noting(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [each.detach() for each in _tensors(output)]  # whose shape nothing changes in place
        self._graph.calls.append((func, args, kwargs or {}, made))
        return output


def _tensors(output: object) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor)]


@contextmanager
def _recording(graph: Graph, device: torch.device, pool: object) -> Iterator[None]:
    with _Noting(graph):
        yield


@contextmanager
def _refusing_waits() -> Iterator[None]:
    with Waits() as waits:
        yield
    if waits.counts:
        raise RuntimeError("called a synchronizing CUDA operation")


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recordings be made and replayed on this CPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(recorded, "_recording", _recording)
    monkeypatch.setattr(recorded, "_refusing_waits", _refusing_waits)
