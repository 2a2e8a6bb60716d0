"""Which MLflow stores this user has named for which sweep.

``status.json`` tells where a sweep was recorded. In a folder from somebody else that may be any address, to which
MLflow's client would send this user's login, or any database that this user can change. A store is therefore taken from
there only if the same user has recorded the same sweep in it before, from the same folder.
"""

from __future__ import annotations

from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.remembered import is_noted, note


def note_given(store: str, sweep_id: str, files: SweepFiles) -> None:
    """Note that this user records the sweep in a store, named without its password."""
    note(_fact(store, sweep_id, files))


def is_given(store: str, sweep_id: str, files: SweepFiles) -> bool:
    """Return whether this user has recorded the sweep, or its candidates, in this store before."""
    return any(is_noted(_fact(store, sweep_id, each)) for each in (files, SweepFiles(files.tuning)))


def _fact(store: str, sweep_id: str, files: SweepFiles) -> str:
    return repr(("store", store, sweep_id, files.root))
