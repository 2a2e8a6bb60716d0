"""Keys of trials in sweeps of earlier versions, which were made from labels and so depend on the whole sweep. Pure.

Folders of such sweeps keep these names, so that they stay readable and can be continued.
"""

from __future__ import annotations

import hashlib
import re

from orchestration.records.published import NON_PRIVATE
from orchestration.sweeps.grid import Draft, Names, drafts
from orchestration.sweeps.identity import LONGEST_KEY, short_name
from orchestration.sweeps.labels import full_texts, labels_by_axis
from orchestration.sweeps.schema import SweepSpec


def names_by_labels(sweep: SweepSpec) -> Names:
    """The old key of every trial of ``sweep``, by its current key. Raises: as `grid` does."""
    found = drafts(sweep)
    by_axis = labels_by_axis((draft.choice for draft in found), full_texts)

    def old_key(draft: Draft) -> str:
        choice = draft.choice
        texts = {axis: by_axis[axis][value] for axis, value in choice.items() if axis in by_axis}
        first = NON_PRIVATE
        if "clipping" in choice:
            first = texts.pop("clipping", "") or short_name(choice["clipping"].name)
        return _cut("-".join([first, *texts.values()]))

    names: dict[str, str] = {}
    for draft in found:
        names.setdefault(draft.point.key, old_key(draft))
    return names


def _cut(whole: str) -> str:
    """A name that is valid on every file system; a long one is cut and ends in a hash."""
    key = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", whole)
    if len(key) <= LONGEST_KEY:
        return key
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return f"{key[: LONGEST_KEY - len(digest) - 1]}-{digest}"
