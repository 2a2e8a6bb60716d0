"""Opens the tracker of an address."""

from __future__ import annotations

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.store.layout import SweepFiles, require_safe_tracking
from dpsweep.orchestration.tracking.tracker import NO_TRACKING, NoTracker, Tracker, TrackingUnavailable


def open_tracker(uri: str, files: SweepFiles, experiment: str | None = None) -> Tracker:
    """Return the tracker of an MLflow store, or one that records nothing for `NO_TRACKING`.

    experiment: by default `experiment_name`. Raises: InvalidInput if the store cannot be opened; UnsafeFile for a link
    in the place of the embedded one.
    """
    from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri  # late: both load MLflow
    from dpsweep.orchestration.tracking.mlflow import MlflowTracker

    if uri == embedded_tracking_uri(files.local_folder):
        require_safe_tracking(files)
    try:
        if uri == NO_TRACKING:
            return NoTracker()
        return MlflowTracker(uri, experiment=experiment, artifact_root=files.artifacts)
    except TrackingUnavailable as error:
        raise InvalidInput(f"{error}; nothing was started") from error
