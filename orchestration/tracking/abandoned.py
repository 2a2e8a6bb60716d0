"""Ends MLflow runs that a killed driver, or one that MLflow did not answer, left RUNNING."""

from __future__ import annotations

import os
from pathlib import Path

from accounting.errors import DpsweepError
from orchestration.comparison.plain_text import MASK, masked
from orchestration.records.status_snapshot import SweepSnapshot


def end_abandoned(snapshot: SweepSnapshot) -> str:
    """End the runs of a sweep whose driver is gone, if MLflow shows them as running; the sweep can go on all the same.

    Returns a sentence if MLflow could not be asked, else "".
    """
    if snapshot.recording is None or not snapshot.recording.store or not snapshot.may_run_in_mlflow():
        return ""
    store = snapshot.recording.store
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    uri = given if MASK in store and masked(given, given) == store else store
    if uri.startswith("sqlite:") and not Path(uri.removeprefix("sqlite:///")).exists():
        return ""  # on another machine; it is closed by whoever asks there
    if MASK in uri:
        return f"MLflow at {store} may show the sweep as running; set MLFLOW_TRACKING_URI to its address, and ask again"
    from orchestration.tracking.mlflow import end_running

    try:
        end_running(uri, snapshot.sweep_id)
    except DpsweepError as error:
        return f"MLflow may show the sweep as running: {error}"
    return ""
