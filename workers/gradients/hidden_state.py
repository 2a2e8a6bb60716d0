"""The state of a model and its loss besides parameters and buffers: attributes, closures, and globals of the user's
code.

A model that stores the mean of its first batch in a Python attribute uses it for all later batches. One example moves
the gradients of all others, and no noise covers it. `HiddenState` reads such values, and restores them.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.own_code.code_digests import EMPTY, PLAIN, code_digest, content_of, is_of_a_package

_OF_TORCH: Final = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "forward"}
)
"""Attributes of modules that are compared elsewhere, or replaced while a forward pass is captured."""

_WITH_PARTS: Final = (dict, list, tuple, set, frozenset, deque)
_SAID_BY_REPR: Final = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    Enum,
    Path,
    range,
    slice,
)
_NAMESPACES: Final = frozenset({"argparse", "types"})
"""Modules of Python whose objects are looked into."""

_OF_RANKS: Final = "dpsweep.workers.trials.divided_model"
"""Module of the state with which ranks gather divided parameters; a pass leaves nothing of the examples in it."""

UNKNOWN: Final = "of a kind that is not known"
"""Fingerprint of an object that is not looked into."""

_MOST_ENTRIES: Final = 10_000
"""Largest container whose entries are looked at."""
_MOST_BYTES: Final = 2**24
"""Approximate number of bytes that are compared: every k-th value of larger tensors and arrays."""

Contents = Mapping[str, Hashable]
"""A fingerprint of each value, by its place, such as ``1.mean`` or ``1.seen[0]``."""


class HiddenState:
    """The attributes of a model's modules and of its loss, and the globals of the modules that define them.

    Followed are lists, tuples, sets, dicts, closures, and objects of the user's own classes, with `__slots__` too.
    Values in files, in extensions, in caches of functools and in other threads are not seen, nor entries beyond the
    first `_MOST_ENTRIES` of a container, but for their number. Of tensors and arrays beyond `_MOST_BYTES` some values
    are seen, and they are not restored.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        """Remember the current values, which `restore` returns to."""
        self._model, self._loss = model, loss
        self._registered = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._modules = {id(module): module for module in model.modules()}
        self._roots = {type(module).__module__ for module in model.modules()} | _homes(loss)
        self._own = {name for name in self._roots if not is_of_a_package(name)}
        self._undo = list[Callable[[], None]]()
        for _ in self._walk(partial(_remember, self._undo)):
            pass

    def restore(self) -> None:
        """Restore the state at the beginning."""
        for undo in self._undo:
            undo()

    def contents(self) -> dict[str, tuple[Hashable, ...]]:
        """Return fingerprints of all values; of several that have one name, of all of them."""
        found: dict[str, list[Hashable]] = {}
        for name, value in self._walk(_nothing):
            found.setdefault(name, []).append(value)
        return {name: tuple(values) for name, values in found.items()}

    def _walk(self, visit: Callable[[object], None]) -> Iterator[tuple[str, Hashable]]:
        """Name and fingerprint of every value. visit: called with every container, tensor and array on the way."""
        seen = dict[int, object](self._modules)
        for name, module in self._model.named_modules():
            visit(_attributes(module))
            for key, value in list(vars(module).items()):
                if key in _OF_TORCH:
                    continue
                place = f"{name}.{key}" if name else key
                if type(value) is OrderedDict and not value:  # most of what torch keeps in a module: no hooks
                    visit(value)
                    yield place, 0
                else:
                    yield from self._entries(place, value, visit, seen)
        yield from self._entries("loss", self._loss, visit, seen)
        for kind in {kind for module in self._model.modules() for kind in type(module).__mro__}:
            if kind.__module__ in self._own:
                yield from self._of_namespace(f"class {kind.__qualname__}", _class(kind), visit, seen)
        for home in sorted(self._own):
            if home in sys.modules:
                yield from self._of_namespace(home, _globals(home), visit, seen)

    def _of_namespace(
        self, name: str, namespace: _Namespace, visit: Callable[[object], None], seen: dict[int, object]
    ) -> Iterator[tuple[str, Hashable]]:
        visit(namespace)
        for key, value in namespace.values().items():
            yield from self._entries(f"{name}.{key}", value, visit, seen)

    def _entries(
        self, name: str, value: object, visit: Callable[[object], None], seen: dict[int, object]
    ) -> Iterator[tuple[str, Hashable]]:
        if isinstance(value, (*PLAIN, np.generic)):
            yield name, (type(value).__name__, repr(value))
            return
        if isinstance(value, type):
            yield name, _qualified(value)
            return
        if id(value) in self._registered or id(value) in seen:
            return
        seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, Tensor | np.ndarray):
            visit(value)
            yield name, _fingerprint(value)
            return
        yield name, self._kind(value)
        for key, part in self._parts(value, visit):
            yield from self._entries(f"{name}{key}", part, visit, seen)

    def _parts(self, value: object, visit: Callable[[object], None]) -> Iterator[tuple[str, object]]:
        """Yield the values inside ``value``, with what is added to its name."""
        if isinstance(value, dict):
            visit(value)
            yield "", len(value)
            yield from ((f"[{str(key)[:40]!r}]", each) for key, each in list(value.items())[:_MOST_ENTRIES])
        elif isinstance(value, list | tuple | deque):
            if not isinstance(value, tuple):
                visit(value)
            yield "", len(value)
            yield from ((f"[{place}]", each) for place, each in enumerate(list(value)[:_MOST_ENTRIES]))
        elif isinstance(value, set | frozenset):
            if isinstance(value, set):
                visit(value)
            yield "", (len(value), sorted(map(repr, list(value)[:_MOST_ENTRIES])))
        elif isinstance(value, partial):
            yield from ((f"({key})", each) for key, each in (("", value.func), *enumerate(value.args)))
            yield ".keywords", value.keywords
        elif isinstance(value, MethodType):
            yield ".__func__", value.__func__
            yield "", value.__self__
        elif isinstance(value, FunctionType):
            names = value.__code__.co_freevars
            for free, cell in zip(names, value.__closure__ or (), strict=True):
                visit(cell)
                yield f".{free}", content_of(cell)
            visit(vars(value))
            yield ".__defaults__", value.__defaults__
            yield ".__kwdefaults__", value.__kwdefaults__
            yield from ((f".{key}", each) for key, each in vars(value).items())
        elif self._is_followed(type(value).__module__):
            slots = _slots(value)
            visit(slots)
            yield from ((f".{key}", each) for key, each in slots.values().items())
            if hasattr(value, "__dict__"):
                visit(vars(value))
                yield from ((f".{key}", each) for key, each in list(vars(value).items()))

    def _kind(self, value: object) -> Hashable:
        """Return what is known of a value besides its parts."""
        if isinstance(value, FunctionType):
            return code_digest(value.__code__)
        if isinstance(value, BuiltinFunctionType | MethodDescriptorType | ModuleType):
            return getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__)
        if isinstance(value, _SAID_BY_REPR):
            return _qualified(type(value)), repr(value)
        seen = isinstance(value, (*_WITH_PARTS, partial, MethodType, nn.Module))
        seen = seen or type(value).__module__ == _OF_RANKS
        return _qualified(type(value)) if seen or self._is_followed(type(value).__module__) else UNKNOWN

    def _is_followed(self, home: str) -> bool:
        """Return whether objects of classes of this module are looked into: the packages that the model comes from.

        Classes that hold divided parameters are left out, as their memory is freed between passes.
        """
        if home == _OF_RANKS:
            return False
        return home in _NAMESPACES or home.partition(".")[0] in {root.partition(".")[0] for root in self._roots}


@dataclass(frozen=True)
class _Namespace:
    """Attributes that can be set back. values: returns them by name. write, remove: change one of them."""

    values: Callable[[], dict[str, object]]
    write: Callable[[str, object], None]
    remove: Callable[[str], None]


def _attributes(module: nn.Module) -> _Namespace:
    """Return the attributes of a registered module."""
    found = vars(module)

    def values() -> dict[str, object]:
        return {key: value for key, value in found.items() if key not in _OF_TORCH}

    return _Namespace(values, found.__setitem__, found.__delitem__)


def _slots(owner: object) -> _Namespace:
    """Return the attributes of an object that its classes have named in `__slots__`."""
    names = [
        name
        for kind in type(owner).__mro__
        if "__slots__" in vars(kind)  # not the attributes of classes in C, which may be read-only
        for name, slot in vars(kind).items()
        if isinstance(slot, MemberDescriptorType)
    ]

    def values() -> dict[str, object]:
        return {name: getattr(owner, name) for name in names if hasattr(owner, name)}

    return _Namespace(values, partial(object.__setattr__, owner), partial(object.__delattr__, owner))


def _class(kind: type) -> _Namespace:
    """Return the data attributes of a class."""
    return _Namespace(lambda: _data(vars(kind)), partial(setattr, kind), partial(delattr, kind))


def _globals(home: str) -> _Namespace:
    """Return the data among the globals of a module."""
    found = vars(sys.modules[home])
    return _Namespace(lambda: _data(found), found.__setitem__, found.__delitem__)


def _data(found: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in list(found.items()) if _is_data(value) and not key.startswith("__")}


def require_no_traces(kept: Sequence[str]) -> None:
    """Raise InvalidInput naming the values ``kept`` of examples that have passed, unless there are none."""
    if kept:
        raise InvalidInput(
            f"model or loss keep {', '.join(kept)} of the examples that pass, neither parameter nor buffer, beyond the "
            "pass: no noise would cover it, and later examples may be computed with it. Compute such values within an "
            "example, or fix them"
        )


def changed(before: Contents, after: Contents) -> set[str]:
    """Return the names of values that differ, are new, or are gone."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _nothing(visited: object) -> None:
    return None


def _remember(undo: list[Callable[[], None]], value: object) -> None:
    """Add to ``undo`` what sets the visited value back."""
    if isinstance(value, dict):
        undo.append(partial(_reset_dict, value, dict(value)))
    elif isinstance(value, list | deque):
        undo.append(partial(_reset_sequence, value, list(value)))
    elif isinstance(value, set):
        undo.append(partial(_reset_set, value, set(value)))
    elif isinstance(value, CellType):
        undo.append(partial(_reset_cell, value, content_of(value)))
    elif isinstance(value, np.ndarray):
        if value.nbytes <= _MOST_BYTES:
            undo.append(partial(_reset_array, value, value.copy()))
    elif isinstance(value, Tensor):
        if _is_plain(value) and value.nbytes <= _MOST_BYTES:
            undo.append(partial(_reset_tensor, value, value.detach().clone()))
    elif isinstance(value, _Namespace):
        undo.append(partial(_reset_namespace, value, value.values()))


def _reset_dict(value: dict[Any, Any], content: dict[Any, Any]) -> None:
    if len(value) != len(content) or any(value.get(key, value) is not each for key, each in content.items()):
        value.clear()
        value.update(content)


def _reset_sequence(value: list[Any] | deque[Any], content: list[Any]) -> None:
    if len(value) != len(content) or any(now is not then for now, then in zip(value, content, strict=True)):
        value.clear()
        value.extend(content)


def _reset_set(value: set[Any], content: set[Any]) -> None:
    if value != content:
        value.clear()
        value.update(content)


def _reset_cell(value: CellType, content: object) -> None:
    if content is not EMPTY and content is not content_of(value):
        value.cell_contents = content


def _reset_array(value: np.ndarray[Any, Any], content: np.ndarray[Any, Any]) -> None:
    if value.flags.writeable and _fingerprint(value) != _fingerprint(content):
        value[...] = content


@torch.no_grad()
def _reset_tensor(value: Tensor, content: Tensor) -> None:
    if _fingerprint(value) != _fingerprint(content):
        value.data.copy_(content)


def _reset_namespace(value: _Namespace, content: Mapping[str, object]) -> None:
    now = value.values()
    for key, each in content.items():
        if now.get(key, value) is not each:
            value.write(key, each)
    for key in now.keys() - content.keys():
        value.remove(key)


def _is_data(value: object) -> bool:
    return isinstance(value, (*PLAIN, np.generic, np.ndarray, Tensor, dict, list, tuple, set, deque))


def _is_plain(value: Tensor) -> bool:
    """Return whether the content can be read and written: not that of a lazy parameter, nor of a subclass of Tensor."""
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        return False
    exotic = value.is_quantized or value.is_meta or is_functorch_wrapped_tensor(value)
    return value.layout is torch.strided and not exotic


def _fingerprint(value: Tensor | np.ndarray[Any, Any]) -> Hashable:
    """Return the shape, type and a digest of the content; of large values, of some."""
    if isinstance(value, Tensor):
        if not _is_plain(value):
            return type(value).__name__, id(value), value._version
        flat = value.detach().reshape(-1)
        some = flat[:: 1 + flat.nbytes // _MOST_BYTES].cpu().contiguous()
        content = some.view(torch.uint8).numpy() if some.numel() else np.zeros(0, np.uint8)
        return tuple(value.shape), str(value.dtype), hashlib.blake2b(content.tobytes()).hexdigest()
    if value.dtype.hasobject:
        return value.shape, str(value.dtype), repr(value)
    every = value.reshape(-1)[:: 1 + value.nbytes // _MOST_BYTES]
    return value.shape, str(value.dtype), hashlib.blake2b(np.ascontiguousarray(every).tobytes()).hexdigest()


def _homes(loss: object) -> set[str]:
    """Return the modules that define a loss: a function, a method, a partial, or an object that is called."""
    if isinstance(loss, partial):
        return _homes(loss.func)
    if isinstance(loss, MethodType):
        return {type(loss.__self__).__module__, loss.__func__.__module__}
    return {loss.__module__ if isinstance(loss, FunctionType) else type(loss).__module__}
