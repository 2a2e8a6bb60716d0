"""Ask nodes of the cluster a question before a sweep starts, and wait for their answers: no check passes by silence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import LocalRayletDiedError, NodeDiedError, RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.execution.nodes import alive_nodes
from dpsweep.orchestration.sweeps.fields import LEAST_QUANTITY

if TYPE_CHECKING:
    from dpsweep.orchestration.execution.backend import Warn

_LOOK: Final = 1.0
"""Seconds between two looks at what has answered."""
_QUIET: Final = 15.0
"""Seconds of waiting that are not worth a word: an idle node starts a process in less."""
_HELD: Final = 10.0
"""Seconds that all of a node's GPUs are in use before they count as held by other work."""
_LONGEST: Final = 900.0
"""Seconds after which a node that lives, is free and does not answer is refused."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Question(Generic[Answer]):
    """A question that each node answers. `about`: completes "waiting for nodes to tell ..." in messages.

    `needs_gpu`: whether the process must see a GPU of its node; it reserves as little of it as Ray can count.
    """

    about: str
    ask: Callable[..., Answer]
    arguments: tuple[object, ...] = ()
    needs_gpu: bool = False

    def sent_to(self, node: Mapping[str, Any]) -> Any:
        """Return the reference of a task that answers on this node."""
        task = ray.remote(num_cpus=0, num_gpus=LEAST_QUANTITY if self.needs_gpu else 0, max_retries=2)(self.ask)
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return task.options(scheduling_strategy=there).remote(*self.arguments)


def answers(
    question: Question[Answer], nodes: Sequence[Mapping[str, Any]], warn: Warn
) -> list[tuple[Mapping[str, Any], Answer]]:
    """Return the nodes, as of `ray.nodes`, with their answers, however long a busy node takes to start a process.

    A node that was lost meanwhile is left out. So is one whose GPUs are all held by other work, with a warning, where
    the question needs one: it cannot answer before they are free. Raises: InvalidInput, naming nodes, where the process
    fails, and where a node is free and lives, but has not answered after a quarter of an hour.
    """
    asked = _Asked(question, nodes)
    began, told = time.monotonic(), False
    while asked.is_open():
        waited = time.monotonic() - began
        if waited > _LONGEST:
            raise InvalidInput(
                f"{asked.open_nodes()} took no process within {_LONGEST:g} s to tell {question.about}; look at it with "
                "`ray status`, or take it out of the cluster"
            )
        if waited > _QUIET and not told:
            told = True
            warn(f"waiting for {asked.open_nodes()} to tell {question.about}; a busy node is slow to start a process")
        asked.look()
    if asked.held:
        warn(
            f"all GPUs of {_named(asked.held)} are held by other work, so that {question.about} is checked only by "
            "each trial that starts there"
        )
    return asked.answered


class _Asked(Generic[Answer]):
    """Nodes that were asked or are still to be asked."""

    def __init__(self, question: Question[Answer], nodes: Sequence[Mapping[str, Any]]) -> None:
        self._question = question
        self._open = {str(node["NodeID"]): node for node in nodes}
        self._tasks: dict[str, Any] = {}
        self._full_since: dict[str, float] = {}
        self.held: list[Mapping[str, Any]] = []
        self.answered: list[tuple[Mapping[str, Any], Answer]] = []

    def is_open(self) -> bool:
        """Return whether an answer is still to come."""
        return bool(self._open)

    def open_nodes(self) -> str:
        """Return the nodes that have not answered, in words."""
        return _named(self._open.values())

    def look(self) -> None:
        """Ask who can be asked, and take the answers that have come; returns after about `_LOOK` seconds."""
        full = self._full() if self._question.needs_gpu else frozenset()
        for name, node in self._open.items():
            if name not in self._tasks and name not in full:  # a task that waits would make an autoscaler start nodes
                self._tasks[name] = self._question.sent_to(node)
        self._drop_held(full)
        waiting = {task: name for name, task in self._tasks.items() if name in self._open}
        if not waiting:
            time.sleep(_LOOK if self._open else 0.0)
            return
        ended, unended = ray.wait([*waiting], num_returns=len(waiting), timeout=_LOOK)
        for task in ended:
            self._take(waiting[task], task)
        if unended:
            there = {node["NodeID"] for node in alive_nodes()}
            self._open = {name: node for name, node in self._open.items() if name in there}

    def _take(self, name: str, task: Any) -> None:
        node = self._open.pop(name)
        try:
            self.answered.append((node, ray.get(task)))
        except (NodeDiedError, LocalRayletDiedError, TaskUnschedulableError):
            return
        except RayError as error:
            if any(each["NodeID"] == name for each in alive_nodes()):
                cause = error.cause if isinstance(error, RayTaskError) else error
                words = " ".join(str(cause).split())[:300]
                raise InvalidInput(
                    f"{_named([node])} cannot tell {self._question.about} ({type(cause).__name__}: {words}); mend it, "
                    "or take it out of the cluster"
                ) from error

    def _full(self) -> frozenset[str]:
        """Return the open nodes that have no GPU left; nodes unknown to Ray in this respect are left out."""
        left: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        return frozenset(name for name in self._open if name in left and left[name].get("GPU", 0.0) < LEAST_QUANTITY)

    def _drop_held(self, full: frozenset[str]) -> None:
        """Give up the nodes that have been full for long. Their tasks are not cancelled; see `is_beyond_autoscaler`."""
        now = time.monotonic()
        self._full_since = {name: self._full_since.get(name, now) for name in full}
        for name, since in self._full_since.items():
            if now - since >= _HELD:
                self.held.append(self._open.pop(name))


def named(node: Mapping[str, Any]) -> str:
    """Return a node of `ray.nodes`, in words."""
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _named(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return the nodes in words, the first three by name."""
    words = [named(node) for node in nodes]
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more
