"""Ends MLflow runs that a killed driver, or one that MLflow did not answer, left RUNNING."""

from __future__ import annotations

import os

from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.store.layout import SweepFiles, require_safe_tracking
from dpsweep.orchestration.store.status_snapshot import SweepSnapshot
from dpsweep.orchestration.tracking.addresses import MASK, masked
from dpsweep.orchestration.tracking.given_stores import is_given_store


def end_abandoned(files: SweepFiles, snapshot: SweepSnapshot) -> str:
    """End the runs of a sweep whose driver is gone, if MLflow shows them as running; the sweep can go on all the same.

    Only a store that this user has named is asked: the snapshot may be somebody else's, and to whom it leads would get
    this user's login of MLflow. Returns a sentence if MLflow could not be asked, else "".
    """
    if snapshot.recording is None or not snapshot.recording.store or not snapshot.may_run_in_mlflow():
        return ""
    store = snapshot.recording.store
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = given if masked(given) == store else store
    if uri.startswith("sqlite:") and not os.path.exists(uri.removeprefix("sqlite:///")):
        return ""  # on another machine; it is closed by whoever asks there
    own = next((each for each in (files, files.of_tuning) if uri == f"sqlite:///{each.database}"), None)
    if (
        own is None
        and uri != given
        and (MASK in uri or not is_given_store(snapshot.recording, snapshot.sweep_id, files))
    ):
        return f"MLflow at {store} may show the sweep as running; set MLFLOW_TRACKING_URI to its address, and ask again"
    try:
        if own is not None:
            require_safe_tracking(own)
        from dpsweep.orchestration.tracking.mlflow import end_running

        end_running(uri, snapshot.sweep_id, snapshot.recording.experiment)
    except DpsweepError as error:
        return f"MLflow may show the sweep as running: {error}"
    return ""
