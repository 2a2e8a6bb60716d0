"""Refuse to go on with results of the user's own code or weights as they were, beside results of the present ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.store.attempts import AttemptLog
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, UserModule
from dpsweep.workers.own_code.own_record import changed_code, has_changed, names_weights, own_locations


@dataclass(frozen=True)
class OtherCode:
    """A trial that began with other code. `files`: the files of it that have changed since.

    `has_shown`: whether it has a result, or has shown something, so that training it again would cost privacy again.
    """

    point: GridPoint
    files: tuple[str, ...]
    has_shown: bool


def begun_with_other_code(
    files: SweepFiles, points: Iterable[GridPoint], code: UserCode, anew: Collection[str] = ()
) -> tuple[OtherCode, ...]:
    """Return the trials in a folder that began with other code than ``code``, except those called ``anew``."""
    found = []
    for point in points:
        trial = files.trial(point.key)
        is_compared = names_weights(point.spec) or any(map(code.named, own_locations(point.spec)))
        if point.key in anew or not is_compared or not exists(trial.spec):
            continue
        changed = changed_code(trial, point.spec, code)
        if changed:
            has_shown = exists(trial.training) or exists(trial.result) or _has_shown(files, point)
            found.append(OtherCode(point, changed, has_shown))
    return tuple(found)


def _has_shown(files: SweepFiles, point: GridPoint) -> bool:
    log = AttemptLog(files, [point.key])
    log.take_up(point.key, continues=True)
    return log.has_released(point.key)


ANEW: Final = "train them anew with --retry all, which costs privacy again, "
"""The advice on trials of other code; see `refuse`."""


def refuse(found: Iterable[OtherCode], files: SweepFiles, anew: str = "") -> None:
    """Raise InvalidInput, naming the files that have changed, if one of these trials has shown something.

    `anew`: how to train them again, for the message; left out where that does not help.
    """
    shown = [each for each in found if each.has_shown]
    if not shown:
        return
    changed = sorted({name for each in shown for name in each.files})
    point = shown[0].point
    # the key of a candidate of a private selection tells that it was drawn
    where = "the folder code of each" if point.spec.selection is not None else files.trial(point.key).code
    helps = all(each.point.is_asked and each.point.spec.selection is None for each in shown)
    raise InvalidInput(
        f"{has_changed(changed)} since {count_of(len(shown), 'trial')} in {files.root} began, and results of both "
        f"do not compare; restore what {where} holds, {anew if helps else ''}or choose another folder with --output"
    )


_LOADS: Final = "their models load by the code that each keeps in its folder code, while "


@dataclass(frozen=True)
class OwnFiles:
    """The user's own files as they are now, beside the code that trials keep.

    `compared`: the files. `changed`: keys of the trials that began with other code, by the file. `unseen`: paths in
    which no file was found.
    """

    compared: tuple[str, ...]
    changed: Mapping[str, tuple[str, ...]]
    unseen: tuple[str, ...]

    def changes(self) -> tuple[str, ...]:
        """Return one sentence for each file that has changed."""
        return tuple(
            f"{has_changed([file])} since {count_of(len(keys), 'trial')} began; "
            f"{_LOADS if file in self.compared else ''}run, --retry and model() refuse it: restore it, or choose "
            "another --output"
            for file, keys in self.changed.items()
        )


def own_files(
    files: SweepFiles, record: SweepRecord, given: UserCode = NO_CODE, keys: Collection[str] = ()
) -> OwnFiles:
    """Compare the user's own files with the code that trials keep; nothing of either is executed.

    `given`: modules in place of those that the sweep was last run with. `keys`: of the trials to compare; by default
    all.
    """
    were = (UserModule(str(location), str(place) or None) for location, place in record.manifest.code.items())
    points = [point for point in record.points if not keys or point.key in keys]
    named = dict.fromkeys(location for point in points for location in own_locations(point.spec))
    known = {module.location: module.as_it_is() for module in (*were, *given.modules) if module.location in named}
    found = {location: module for location, module in known.items() if module.files}
    paths = {file.place: file.path or file.place for module in found.values() for file in module.files}
    changed: dict[str, tuple[str, ...]] = {}
    for other in begun_with_other_code(files, points, UserCode(tuple(found.values()))):
        for place in other.files:
            file = paths.get(place, place)
            changed[file] = (*changed.get(file, ()), other.point.key)
    unseen = (known[name].source or name if name in known else name for name in named if name not in found)
    return OwnFiles(tuple(paths.values()), changed, tuple(unseen))
