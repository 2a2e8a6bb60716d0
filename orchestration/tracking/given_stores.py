"""The MLflow stores that this user has named, by sweep.

``status.json`` tells where a sweep was recorded. In a folder from somebody else that may be any address, to which
MLflow's client would send this user's login, or any database that this user can change. A store is therefore taken from
there only if the same user has recorded the same sweep in it before, from the same folder. So is the experiment.
"""

from __future__ import annotations

import os

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.remembered import is_noted, remember
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.orchestration.store.status_snapshot import read_snapshot
from dpsweep.orchestration.tracking.addresses import MASK, VARIABLE, experiment_name, masked
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.tracker import NO_TRACKING


def note_given(recording: RecordingStatus, sweep_id: str, files: SweepFiles) -> None:
    """Note that this user records the sweep in a store, named without its password, and in an experiment there."""
    remember(_fact(recording, sweep_id, files))


def is_given_store(recording: RecordingStatus, sweep_id: str, files: SweepFiles) -> bool:
    """Return whether this user has recorded the sweep, or its candidates, in this store and experiment before."""
    return any(is_noted(_fact(recording, sweep_id, each)) for each in (files, files.of_tuning))


def given_store(files: SweepFiles, given: str | None) -> str:
    """Return the tracking URI: as given, that of the environment, that of the driver, or the sweep's own store.

    Raises: InvalidInput for 'none', and for a driver that recorded elsewhere than this user has before.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI")
    if uri == NO_TRACKING:
        raise InvalidInput(
            "models are registered, and sweeps recorded, in MLflow; give the --tracking-uri of one in place of 'none'"
        )
    if uri:
        return uri
    snapshot, own = read_snapshot(files.status), embedded_tracking_uri(files.local_folder)
    if snapshot is None or snapshot.recording is None or snapshot.recording.store in ("", own):
        return own
    store = snapshot.recording.store
    if MASK in store:
        raise InvalidInput(
            f"the sweep was recorded in {store}, whose password is not stored; give it as --tracking-uri, or in "
            "MLFLOW_TRACKING_URI"
        )
    if not is_given_store(snapshot.recording, snapshot.sweep_id, files):
        raise InvalidInput(
            f"{files.status} says that the sweep was recorded in {store}, where you have not recorded it from this "
            f"folder; if you want to, give it as --tracking-uri. The sweep's own store is {own}"
        )
    return store


def given_experiment(uri: str, files: SweepFiles) -> str:
    """Return the name of a sweep's experiment in a store: by the environment, else the one that it was recorded in.

    Raises: InvalidInput if only ``status.json`` names it.
    """
    snapshot, usual = read_snapshot(files.status), experiment_name()
    recording = snapshot.recording if snapshot else None
    if snapshot is None or recording is None or os.environ.get(VARIABLE) or recording.store != masked(uri):
        return usual
    is_own = uri == f"sqlite:///{files.database}"
    if recording.experiment in ("", usual) or is_own or is_given_store(recording, snapshot.sweep_id, files):
        return recording.experiment or usual
    raise InvalidInput(
        f"{files.status} says that the sweep was recorded in MLflow's experiment {recording.experiment!r}, where you "
        f"have not recorded it from this folder; set {VARIABLE} to that name, or to another, such as {usual}"
    )


def _fact(recording: RecordingStatus, sweep_id: str, files: SweepFiles) -> str:
    return repr(("store", recording.store, recording.experiment, sweep_id, files.root))
