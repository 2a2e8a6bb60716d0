"""Passes over micro-batches of one shape, recorded once as CUDA graphs and replayed for later micro-batches.

A private step starts hundreds of kernels, which the host needs longer to start than the device to run. A graph starts
them in one call. A pass is recorded only if its replay has the bits of the pass as it is. So recording changes no
result, and a resumed run may be recorded at other steps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput, public_text
from dpsweep.workers.gradients.deterministic_passes import Start, same
from dpsweep.workers.gradients.factors import ExampleGradients
from dpsweep.workers.gradients.hidden_state import HiddenState
from dpsweep.workers.gradients.modes import RandomState
from dpsweep.workers.gradients.pass_results import BatchNorms, Forwarded

_BEFORE: Final = 3
"""Passes of one kind that run as they are before one is recorded; in them libraries choose and compile kernels."""
_MOST_MADE: Final = 8
"""Recordings after which none is made any more."""
_MOST_KINDS: Final = 64
"""Kinds of passes after which none is recorded any more."""


_CHANGING: Final = "parameters, buffers or modes of the model are replaced again and again"

Forward = Callable[[Tensor, Tensor], Forwarded]
"""(x, y) -> norms and gradients of a micro-batch."""

Weighted = Callable[[Mapping[str, ExampleGradients], Tensor], Mapping[str, Tensor]]
"""(gradients, weights of all examples) -> weighted sums by parameter."""

_Pool = Any
"""Memory of graphs that run one after the other, by its name in torch."""


@dataclass(frozen=True)
class Done:
    """A pass that ran as it is.

    norms: of all examples but padding. weights: of all examples, for ``sums``; None if there was no weighted sum.
    """

    norms: BatchNorms
    weights: Tensor | None
    sums: Mapping[str, Tensor]

    def equals(self, norms: BatchNorms, sums: Mapping[str, Tensor]) -> bool:
        """Return whether norms and sums of the same rows have the same bits; waits for the device."""
        expected, found = self.norms, norms.of_first(len(self.norms.losses))
        pairs = [(expected.norms, found.norms), (expected.losses, found.losses)]
        if expected.layer_norms is not None and found.layer_norms is not None:
            pairs.append((expected.layer_norms, found.layer_norms))
        pairs += [(value, sums[name]) for name, value in self.sums.items()]
        return all(same(one, other) for one, other in pairs)


class Recording:
    """A pass as two graphs: the first computes norms, the second a weighted sum from results of the first."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
        forward: Forward,
        weighted: Weighted,
        reads: object,
        pool: _Pool,
    ) -> None:
        """Record without running: zeros in place of the rows show in a comparison that something ran, or read values.

        weights: as in `Done`. reads: holds tensors outside parameters and buffers that the pass may read, which the
        model may replace. pool: recordings may share one, as all that a replay leaves to others is held.
        """
        self._x, self._y, self._reads = torch.zeros_like(x), torch.zeros_like(y), reads
        self._graph = torch.cuda.CUDAGraph()
        with _recording(self._graph, x.device, pool):
            self._norms, self._total, gradients, _ = forward(self._x, self._y)
        self._sum = None if weights is None else _RecordedSum(weights, gradients, weighted, pool)

    def norms(self, x: Tensor, y: Tensor) -> tuple[BatchNorms, Tensor]:
        """Return norms and losses of all examples, padding included, and their sum; they are copies."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        return self._norms.copied(), self._total.clone()

    def sums(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the weighted sums over the rows of the last call of `norms`; they are copies."""
        assert self._sum is not None, "it was recorded with weights"
        return self._sum.computed(weights)


class _RecordedSum:
    """A weighted sum of gradients that another graph computes. pool: of both, so that they share memory."""

    def __init__(
        self, weights: Tensor, gradients: Mapping[str, ExampleGradients], weighted: Weighted, pool: _Pool
    ) -> None:
        self._weights, self._gradients, self._graph = torch.zeros_like(weights), gradients, torch.cuda.CUDAGraph()
        with _recording(self._graph, weights.device, pool):
            sums = weighted(gradients, self._weights)
            self._flat = torch.cat([each.reshape(-1) for each in sums.values()])
        self._shapes = {name: each.shape for name, each in sums.items()}

    def computed(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the sums as views of one copy, which is one operation for all of them."""
        self._weights.copy_(weights)
        self._graph.replay()
        parts = self._flat.clone().split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


class Recordings:
    """The recordings of an engine, by kinds of passes: all that must be equal for a recording to be replayed.

    refused: why nothing is recorded any more, or None.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._model, self._loss = model, loss
        self.refused: str | None = None
        self._seen, self._made = Counter[Hashable](), 0
        self._recorded, self._checked = dict[Hashable, Recording](), set[Hashable]()
        self._pool: _Pool = None

    @property
    def hold_memory(self) -> bool:
        """Return whether there is a recording."""
        return bool(self._recorded)

    def ready(self, kind: Hashable) -> Recording | None:
        """Return the recording of a kind of pass, or None if the pass is to run as it is."""
        return self._recorded[kind] if kind in self._checked else None

    def check_again(self) -> None:
        """Let the next pass of each kind run as it is, and be compared with its recording."""
        self._checked.clear()

    def release(self) -> None:
        """Drop all recordings, and make no further one."""
        self._refuse("recordings held memory that passes need")
        torch.cuda.empty_cache()

    def forget(self) -> None:
        """Drop all recordings, and with the last one their memory."""
        self._seen.clear()
        self._recorded.clear()
        self._checked.clear()
        self._pool = None

    def compare(self, kind: Hashable, x: Tensor, y: Tensor, forward: Forward, weighted: Weighted, done: Done) -> None:
        """Compare a pass that ran as it is with its recording, which is made now if it is time."""
        if self.refused is not None or kind in self._checked:
            return
        self._seen[kind] += 1
        if len(self._seen) > _MOST_KINDS:
            self._refuse(_CHANGING)
        if self._seen[kind] <= _BEFORE:
            return
        try:
            if kind not in self._recorded:
                self._recorded[kind] = self._new(x, y, forward, weighted, done.weights)
            recording = self._recorded[kind]
            norms, total = recording.norms(x, y)
            if not bool(total.isfinite()):  # then norms were computed again, and a later pass is compared
                return
            if done.equals(norms, {} if done.weights is None else recording.sums(done.weights)):
                self._checked.add(kind)
            else:
                self._refuse("a replayed pass has other bits than the pass itself")
        except Exception as error:  # whatever a recording meets, the pass itself has run
            self._refuse(public_text(error))

    def _new(self, x: Tensor, y: Tensor, forward: Forward, weighted: Weighted, weights: Tensor | None) -> Recording:
        """Record a pass. Raises: any error if it cannot be recorded, most of them before anything is."""
        if self._made == _MOST_MADE:
            raise InvalidInput(_CHANGING)
        self._made += 1
        reads = HiddenState(self._model, self._loss)
        with _refusing_changes(self._model, reads), _refusing_draws(x.device), _refusing_waits():
            gradients = forward(x, y).gradients
            if weights is not None:
                weighted(gradients, weights)
            del gradients
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return Recording(x, y, weights, forward, weighted, reads, self._pool)

    def _refuse(self, reason: str) -> None:
        self.forget()
        self.refused = reason


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Raise RuntimeError for operations that wait for the device; one that fails in a recording leaves damage."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: _Pool) -> Iterator[None]:
    """Record what is started within this context as a graph. pool: of its memory.

    Models may ask whether they are recorded, to take a way that never waits for the device, such as a mask in place of
    none. The answer is no: a pass is recorded as it has just run, without waiting.
    """
    told, before = torch.cuda.is_current_stream_capturing, torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        try:
            with torch.cuda.graph(graph, pool, _stream(device), "thread_local"), _refusing_waits():
                torch.cuda.is_current_stream_capturing = bool
                try:
                    yield
                finally:
                    torch.cuda.is_current_stream_capturing = told
        except BaseException:
            torch.cuda.set_stream(before)  # torch 2.11 leaves that of the recording in place
            _undo(device, pool)
            raise


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings on a device: only on one stream do graphs share the memory of a pool."""
    return torch.cuda.Stream(device)


def _undo(device: torch.device, pool: _Pool) -> None:
    """Undo what the beginning of a recording leaves in torch 2.11 if CUDA refuses its end.

    Until then the process frees no memory of the device, and random draws on it fail.
    """
    with suppress(RuntimeError):  # where the recording has ended
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _refusing_changes(model: nn.Module, reads: HiddenState) -> Iterator[None]:
    """Restore buffers and other state of the model, and raise InvalidInput if a pass changed any."""
    start, contents = Start(model), reads.contents()
    buffers = start.buffers()
    try:
        yield
    finally:
        now = start.buffers()
        kept = start.is_current() and reads.contents() == contents
        reads.restore()
        start.restore()
    if not kept or not all(same(value, now[name]) for name, value in buffers.items()):
        raise InvalidInput("the pass changes state of the model, or draws numbers of Python or numpy")


@contextmanager
def _refusing_draws(device: torch.device) -> Iterator[None]:
    """Restore the generators, and raise InvalidInput if random numbers were drawn."""
    before = RandomState.of(device)
    with RandomState.preserved(device):
        yield
        drawn = not before.is_current()
    if drawn:
        raise InvalidInput("the pass draws random numbers")
