"""The differences between whole sweeps: parameters that all settings of a sweep share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpsweep.orchestration.comparison.formats import MISSING
from dpsweep.orchestration.comparison.parameters import varying
from dpsweep.orchestration.records.published import Label

_BySweep = Mapping[str, Sequence[Mapping[str, Label]]]
"""The parameters of the settings of each sweep, by its folder."""


@dataclass(frozen=True)
class BetweenSweeps:
    """A parameter in which sweeps differ, although no setting of one sweep differs from another one of it.

    `values`: by the folder of each sweep; several where the baselines have another value than the private settings,
    none where no setting has the parameter.
    """

    name: str
    values: Mapping[str, tuple[Label, ...]]

    def cells(self) -> tuple[str, ...]:
        """Return the table cells of the parameter: its name, and its value in each sweep."""
        return (spoken(self.name), *(", ".join(map(shown, each)) or MISSING for each in self.values.values()))


def between_sweeps(kinds: Sequence[_BySweep]) -> tuple[BetweenSweeps, ...]:
    """Return the parameters in which sweeps differ, but no two settings of one kind in the same sweep.

    kinds: the settings to compare with each other: the private ones, and the baselines.
    """
    names = dict.fromkeys(name for kind in kinds for name in _names(kind))
    folders = dict.fromkeys(folder for kind in kinds for folder in kind)

    def values(name: str, folder: str) -> tuple[Label, ...]:
        found = (setting[name] for kind in kinds for setting in kind.get(folder, ()) if name in setting)
        return tuple(dict.fromkeys(found))

    return tuple(BetweenSweeps(name, {folder: values(name, folder) for folder in folders}) for name in names)


def _names(settings: _BySweep) -> list[str]:
    differ = dict.fromkeys(
        name for found in varying([each for of_sweep in settings.values() for each in of_sweep]) for name in found
    )
    within = {name for of_sweep in settings.values() for found in varying(list(of_sweep)) for name in found}
    return [name for name in differ if name not in within]


def phrase(name: str, value: Label) -> str:
    """Return a parameter as words: ``clipping bound 0.5``."""
    return f"{spoken(name)} {shown(value)}"


def spoken(name: str) -> str:
    """Return the name of a parameter as words.

    >>> spoken("clipping.params.count_memory"), spoken("data.name")
    ('clipping count memory', 'data')
    """
    return name.removesuffix(".name").replace(".params.", " ").replace("_", " ").replace(".", " ")


def shown(value: Label) -> str:
    """Return the value of a parameter as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)
