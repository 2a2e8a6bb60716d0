"""The order in which sweeps that share a running cluster begin their trials.

Ray places trials; it knows no priorities. Every driver therefore posts what its trials wait for on a board, in the
key-value store of the cluster's head. It begins no trial that would take what a sweep before it waits for. A trial that
runs is never ended. Sweeps of higher priority come first. At the same priority, sweeps that wait for a GPU come before
sweeps that need none, because only a GPU node can serve them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Final

import ray
from pydantic import TypeAdapter, ValidationError
from ray.exceptions import RayError
from ray.experimental import internal_kv

from dpsweep.orchestration.execution.nodes import alive_nodes, amounts_of, missing_resources, quantities
from dpsweep.orchestration.store.limits import Turn
from dpsweep.orchestration.sweeps.sections import ResourceSettings

_BOARD: Final = b"dpsweep-turns"
"""Namespace of the board in the key-value store."""
_FRESH: Final = 60.0
"""Seconds after which an entry that was not renewed belongs to a driver that was killed."""
_LOOK: Final = 1.0
"""Seconds between two looks at the board."""

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class Entry:
    """The notice of one driver.

    `waiting`: reservations of its trials that wait for resources which some node has; empty while its own limits keep
    them.
    `wants`: whether any of its trials is yet to begin.
    `running`: its trials that train.
    `renewed`: seconds since 1970 UTC, by the clock of its driver.
    """

    sweep: str
    turn: Turn
    waiting: tuple[dict[str, float], ...] = ()
    wants: bool = False
    running: int = 0
    renewed: float = 0.0


_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class Turns:
    """The board, as the driver of one sweep sees it. `renew` may be called from another thread than the rest.

    A head that does not answer holds nobody up: the last view of the board remains.
    """

    def __init__(self, sweep: str, turn: Turn) -> None:
        self._own, self._others = Entry(sweep, turn), tuple[Entry, ...]()
        self._seen: dict[bytes, tuple[float, float]] = {}
        self._free: Amounts = {}
        self._looked = self._posted = -_LOOK

    def trains(self, running: int, waiting: Sequence[ResourceSettings]) -> None:
        """Post that ``running`` trials of this sweep train, and the reservations of those that do not yet."""
        if time.monotonic() >= self._posted + _LOOK:
            self._posted = time.monotonic()
            nodes = [amounts_of(node) for node in alive_nodes()]
            kinds = {id(each): each for each in waiting}.values()  # thousands of trials have few sections of a sweep
            self._post([each.amounts for each in kinds if not missing_resources(nodes, each.on_each_node)], running)

    def renew(self) -> None:
        """Post the last state again, as that of a driver that lives."""
        self._put(self._own)

    def _post(self, waiting: Sequence[Amounts], running: int) -> None:
        distinct = {tuple(sorted(each.items())): dict(each) for each in waiting}
        is_held = not self._has_room(running)
        shown = () if is_held else tuple(distinct.values())
        self._own = replace(self._own, waiting=shown, wants=bool(waiting), running=running)
        self._put(self._own)

    def _put(self, entry: Entry) -> None:
        with _unanswered_is_ignored():
            content = json.dumps(asdict(replace(entry, renewed=time.time())))
            internal_kv._internal_kv_put(self._key, content, namespace=_BOARD)

    def may_begin(self, needs: Amounts, running: int, keeps_off_gpus: bool) -> bool:
        """Return whether a trial that reserves ``needs`` may be begun now, while ``running`` trials of this sweep
        train.
        """
        self._look()
        return self._has_room(running) and not any(
            waits_before(other, self._own, needs, self._free, keeps_off_gpus) for other in self._others
        )

    def fits(self, needs: Amounts) -> int:
        """Return how many trials that reserve ``needs`` fit into what is free in the whole cluster, as far as is
        known.
        """
        self._look()
        counts = [self._free.get(name, 0.0) / amount for name, amount in quantities(needs).items()]
        return int(min(counts, default=0.0) + 1e-9)

    def leave(self) -> None:
        """Remove the entry of this sweep."""
        with _unanswered_is_ignored():
            internal_kv._internal_kv_del(self._key, namespace=_BOARD)

    @property
    def _key(self) -> bytes:
        return self._own.sweep.encode()

    def _has_room(self, running: int) -> bool:
        """Return whether the owner's limit allows another trial; of several sweeps that want one, the first may
        begin it.
        """
        own, most = self._own, self._own.turn.most
        if most is None:
            return True
        same = [other for other in self._others if other.turn.owner == own.turn.owner]
        first = all(_place(own) < _place(other) for other in same if other.wants and other.turn.most is not None)
        return first and running + sum(other.running for other in same) < most

    def _look(self) -> None:
        if time.monotonic() < self._looked + _LOOK:
            return
        self._looked = time.monotonic()
        with _unanswered_is_ignored():
            keys = [key for key in internal_kv._internal_kv_list(b"", namespace=_BOARD) if key != self._key]
            found = [(key, _read(internal_kv._internal_kv_get(key, namespace=_BOARD))) for key in keys]
            self._others = tuple(each for key, each in found if each is not None and self._is_fresh(key, each))
            self._seen = {key: self._seen[key] for key in keys if key in self._seen}
            self._free = ray.available_resources()  # type: ignore[no-untyped-call]

    def _is_fresh(self, key: bytes, entry: Entry) -> bool:
        """Return whether the entry was renewed lately, as this driver has seen; clocks matter at the first look
        alone.
        """
        now = time.monotonic()
        before, since = self._seen.get(key, (entry.renewed, now - abs(time.time() - entry.renewed)))
        self._seen[key] = entry.renewed, since if before == entry.renewed else now
        return now - self._seen[key][1] < _FRESH


def waits_before(other: Entry, own: Entry, needs: Amounts, free: Amounts, keeps_off_gpus: bool) -> bool:
    """Return whether ``other`` waits for something that a trial of ``own`` would take, and comes first.

    `free`: of the whole cluster. A sweep that waits for something else, such as a GPU where the trial takes none, holds
    nobody up. `keeps_off_gpus`: whether the trial runs on nodes without GPUs only.

    >>> cpu, gpu, full = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.0, "GPU": 1.0}
    >>> high, low = Entry("high", Turn("ann", 5), (cpu,)), Entry("low", Turn("bob", 0), (cpu,))
    >>> waits_before(high, low, cpu, full, False), waits_before(low, high, cpu, full, False)
    (True, False)
    >>> waits_before(high, low, cpu, {"CPU": 2.0}, False)
    False
    >>> with_gpu = Entry("gpu", Turn("cid", 0), (gpu,))
    >>> waits_before(with_gpu, low, cpu, full, False), waits_before(with_gpu, low, cpu, full, True)
    (True, False)
    >>> waits_before(with_gpu, low, cpu, {"CPU": 0.0, "GPU": 0.0}, False)
    False
    """
    takes = quantities(needs)
    for wanted in map(quantities, other.waiting):
        comes_first = other.turn.priority > own.turn.priority or (
            other.turn.priority == own.turn.priority and "GPU" in wanted and "GPU" not in takes
        )
        lacks_other = any(free.get(name, 0.0) < amount for name, amount in wanted.items() if name not in takes)
        competes = any(free.get(name, 0.0) - takes[name] < amount for name, amount in wanted.items() if name in takes)
        if comes_first and competes and not lacks_other and not (keeps_off_gpus and "GPU" in wanted):
            return True
    return False


def _place(entry: Entry) -> tuple[int, float, str]:
    return (-entry.turn.priority, entry.turn.submitted, entry.sweep)


def _read(content: bytes | None) -> Entry | None:
    try:
        return None if content is None else _ENTRY.validate_json(content)
    except ValidationError:  # of another version of dpsweep
        return None


@contextmanager
def _unanswered_is_ignored() -> Iterator[None]:
    try:
        yield
    except (RayError, ConnectionError, RuntimeError, ValueError):  # Ray raises each of them while its head is away
        return
