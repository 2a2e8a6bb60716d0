"""A sweep written in Python, with names that an editor completes: parts.pyi has every key and every parameter.

>>> from dpsweep.parts import Clipping, Model, Sweep
>>> sweep = Sweep(
...     name="tumours",
...     data="breast_cancer",
...     model=Model.mlp(hidden=[16]),
...     sampling={"method": "poisson", "batch_size": 64},
...     epochs=2,
...     clipping=["none", Clipping.flat(bound=[0.5, 1.0])],
...     privacy={"target_epsilon": 3, "delta": 1e-5},
... )
>>> print(sweep.to_yaml().partition("sampling")[0])
name: tumours
data: breast_cancer
model:
  name: mlp
  hidden:
  - 16
<BLANKLINE>
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import nearest


class Components:
    """The components that a key of a sweep takes: each is a function of its parameters, such as ``Clipping.flat``.

    A component of the user's own is given as ``module.py:name`` or as the object itself.
    """

    def __init__(self, key: str) -> None:
        self._key: Final = key

    def __getattr__(self, name: str) -> Callable[..., str | Mapping[str, Any]]:
        called = name[:-1] if keyword.iskeyword(name[:-1]) else name
        if called.startswith("__") or called not in self._names():
            raise AttributeError(f"no component {called!r} for {self._key}; {nearest(called, self._names())}")

        def part(**parameters: Any) -> str | Mapping[str, Any]:
            return {"name": called, **parameters} if parameters else called

        return part

    def __dir__(self) -> list[str]:
        return [f"{name}_" if keyword.iskeyword(name) else name for name in self._names()]

    def _names(self) -> list[str]:
        from dpsweep.orchestration.sweeps.components import COMPONENTS  # late: it imports torch

        return list(COMPONENTS[self._key])


Data: Final = Components("data")
Model: Final = Components("model")
Preprocessing: Final = Components("preprocessing")
Loss: Final = Components("loss")
Optimizer: Final = Components("optimizer")
LearningRateSchedule: Final = Components("learning_rate_schedule")
Augmentation: Final = Components("augmentation")
Averaging: Final = Components("averaging")
Clipping: Final = Components("clipping")
Noise: Final = Components("noise")
Release: Final = Components("release")


class Sweep(Mapping[str, Any]):
    """A sweep as a mapping, for `dpsweep.plan` and `dpsweep.run`, with the keys of a sweep file as arguments.

    Raises: InvalidInput for a key that a sweep file does not have. Values are checked when the sweep is planned.
    """

    def __init__(self, **keys: Any) -> None:
        from dpsweep.orchestration.sweeps.schema import SweepSpec

        for key in keys:
            if key not in SweepSpec.model_fields:
                raise InvalidInput(f"unknown key {key!r}; {nearest(key, SweepSpec.model_fields)}")
        self._keys: Final = keys

    def __getitem__(self, key: str) -> Any:
        return self._keys[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Sweep {self._keys.get('name')!r} of {', '.join(key for key in self._keys if key != 'name')}>"

    def to_yaml(self) -> str:
        """Return the sweep as the text of a sweep file.

        Raises: InvalidInput, naming the object, for functions, classes and data in memory, which a file cannot hold.
        """
        from dpsweep.orchestration.sweeps.python_objects import as_text

        return as_text(self._keys)
