"""UTKFace: faces with age, gender and race in their file names; two tasks, and groups by any of the three.

Used by Yu et al. (2023).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from dpsweep.accounting.errors import InvalidInput, PrivateDetail
from dpsweep.accounting.registry import lookup
from dpsweep.workers.data.base import Indices, Source, make_split, repeated
from dpsweep.workers.data.images import IMAGENET_SCALING, SideLength, read_images
from dpsweep.workers.data.source_files import locate
from dpsweep.workers.data.tabular import choose_groups, intersected, intersected_indices

_NAME = re.compile(r"(?P<age>\d+)_(?P<gender>[01])_(?P<race>[0-4])_.*\.jpe?g$", re.IGNORECASE)
RACES = ("White", "Black", "Asian", "Indian", "Other")
_RACE_CODES = {race: code for code, race in enumerate(RACES)}


_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "race": RACES,
    "age": ("30 or older", "under 30"),
    "gender": ("male", "female"),
}
_TASKS: Final = {name: _ATTRIBUTES[name] for name in ("age", "gender")}
"""Class names by task."""


def utkface(
    root: str | None = None,
    task: str = "gender",
    size: SideLength = 64,
    labels: Literal["balanced", "all"] = "balanced",
    races: Sequence[str] = RACES,
    group: str | Sequence[str] = "race",
) -> Source:
    """Return faces (.jpg, .jpeg, any case) below the folder ``UTKFace``, resized to size x size.

    `task`: gender, or age (under 30).
    `labels`: ``balanced`` leaves out random faces so that each race has equally many of both classes, as in Yu et al.
    (2023); ``all`` keeps all.
    `races`: those to keep, in this order; that paper uses all but Other, and groups by race.
    `group`: race, gender or age; or several, such as ["race", "gender"], whose intersections are the groups.
    Example ids follow the sorted file names.

    Raises: InvalidInput for unknown tasks or races, and when no faces are found or some are there twice.
    """
    classes = lookup(_TASKS, task, "UTKFace task")
    if not races:
        raise InvalidInput(f"races is empty, but must name at least one of {', '.join(RACES)}")
    values = choose_groups("utkface", group, {**_ATTRIBUTES, "race": tuple(races)})
    folder = locate("utkface", ("UTKFace", "utkface"), root)
    pictures = (file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
    files = sorted(pictures, key=lambda file: file.relative_to(folder).as_posix())
    if repeat := repeated([file.name for file in files]):
        raise InvalidInput(
            f"data source 'utkface': {folder} holds a picture more than once; keep one of each, "
            "as whoever is there twice is protected half as well"
        ) from PrivateDetail(repeat)
    group_of = {lookup(_RACE_CODES, race, "race"): group for group, race in enumerate(races)}
    parsed = [_values(file.name) for file in files]
    faces = {place: each for place, each in enumerate(parsed) if each is not None and each["race"] in group_of}
    if not faces:
        raise InvalidInput(
            f"data source 'utkface': {folder} holds no pictures named age_gender_race_*.jpg of races {', '.join(races)}"
        )
    found = {name: np.array([face[name] for face in faces.values()], dtype=np.int64) for name in _ATTRIBUTES}
    select = lookup(_SELECTIONS, labels, "UTKFace labels")
    kept = select(found[task], np.array([group_of[race] for race in found["race"].tolist()], dtype=np.int64))
    if not len(kept):
        raise InvalidInput(f"data source 'utkface': no race has faces {' and '.join(classes)}; set labels: all")
    notes = ("pictures without age, gender and race in their names are left out",) if None in parsed else ()
    ids = np.array([*faces], dtype=np.int64)[kept]
    features = read_images([files[place] for place in ids], size)
    shown = {name: [_ATTRIBUTES[name][index] for index in found[name][kept]] for name in values}
    split = make_split(features, found[task][kept], intersected_indices(pa.table(shown), values), example_ids=ids)
    return Source("utkface", split, None, intersected(values), classes, IMAGENET_SCALING, notes)


def _values(name: str) -> Mapping[str, int] | None:
    """Return the index into each of `_ATTRIBUTES` of a file ``age_gender_race_*.jpg``; None for another name."""
    match = _NAME.match(name)
    if match is None:
        return None
    return {"race": int(match["race"]), "age": int(int(match["age"]) < 30), "gender": int(match["gender"])}


def _balanced(targets: Indices, groups: Indices) -> Indices:
    """Sorted indices of equally many faces of both classes per race; surplus faces are left out at random."""
    kept = []
    for group in np.unique(groups):
        members = [np.flatnonzero((groups == group) & (targets == target)) for target in (0, 1)]
        count = min(len(part) for part in members)
        generator = np.random.default_rng((0, int(group)))
        kept += [generator.permutation(part)[:count] for part in members]
    return np.sort(np.concatenate(kept))


_SELECTIONS: Final[Mapping[str, Callable[[Indices, Indices], Indices]]] = {
    "all": lambda targets, _: np.arange(len(targets)),
    "balanced": _balanced,
}
