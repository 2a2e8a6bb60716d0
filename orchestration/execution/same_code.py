"""Refuse to go on with results of the user's own code as it was, beside results of the code as it is now."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from accounting.errors import InvalidInput
from accounting.records import exists
from orchestration.records.attempts import AttemptLog
from orchestration.records.layout import SweepFiles
from orchestration.sweeps.grid import GridPoint
from workers.imports import UserCode
from workers.own_record import changed_code, has_changed, own_locations


@dataclass(frozen=True)
class OtherCode:
    """A trial that began with other code. files: the files of it that have changed since.

    has_shown: whether it has a result, or has shown something, so that training it anew would cost privacy again.
    """

    point: GridPoint
    files: tuple[str, ...]
    has_shown: bool


def begun_with_other_code(
    files: SweepFiles, points: Iterable[GridPoint], code: UserCode, anew: Collection[str] = ()
) -> tuple[OtherCode, ...]:
    """The trials in a folder that began with other code than ``code``, except those called ``anew``."""
    found = []
    for point in points:
        trial = files.trial(point.key)
        if point.key in anew or not any(map(code.named, own_locations(point.spec))) or not exists(trial.spec):
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


def refuse(found: Iterable[OtherCode], files: SweepFiles, anew: str = "") -> None:
    """Raises: InvalidInput, naming the files that have changed, if one of these trials has shown something.

    anew: how to train them anew, for the message; left out where that does not help.
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
        f"{has_changed(changed)} since {len(shown)} trials in {files.root} were trained, and results of both "
        f"do not compare; restore what {where} holds, {anew if helps else ''}or choose another folder with --output"
    )
