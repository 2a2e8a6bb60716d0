"""Writes the runs of one MLflow experiment with few requests; a request costs as much CPU as an epoch of a small model.

The content of runs is cached, because only this process writes them. After an error, which may have come before or
after a write, the run is read again before it is next written. Several threads may write at once, each another run.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mlflow import MlflowClient
from mlflow.entities import DatasetInput, LifecycleStage, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from dpsweep.orchestration.tracking.addresses import require_location
from dpsweep.orchestration.tracking.embedded import timed
from dpsweep.orchestration.tracking.plain_comparison import COMPARED, valid_name

_SCALARS: Final = ("final/", "privacy/", "fairness/", "deviation/", "trials/", "setting/", COMPARED)
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_NO_VALUES: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True)
class Point:
    """A value of a metric series. moment: milliseconds since 1970 UTC."""

    name: str
    value: float
    step: int
    moment: int


@dataclass
class Held:
    """Cached content of a run.

    `metrics`: the last value of each metric.
    `data`: digests of the data that the run is linked to.
    `artifacts`: URI of its files.
    `points`: name and step of all recorded points of series; None until they are requested.
    `is_deleted`: whether somebody has deleted the run, as is seen when it is read again.
    """

    status: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    data: set[str]
    artifacts: str
    points: set[tuple[str, int]] | None = None
    is_deleted: bool = False


class MlflowRuns:
    """Creates and writes runs of one experiment."""

    def __init__(self, client: MlflowClient, experiment: str, tracking_uri: str) -> None:
        self._client, self._experiment, self._uri = client, experiment, tracking_uri
        self._held: dict[str, Held] = {}
        self._attached: dict[tuple[str, str], str] = {}
        self.answered = 0
        """Number of writes that MLflow has confirmed."""

    @contextmanager
    def _writing(self, run_id: str) -> Iterator[None]:
        """Count a write of the run, or forget its content if the write failed."""
        try:
            yield
        except BaseException:
            self._held.pop(run_id, None)
            raise
        self.answered += 1

    def create(self, name: str, tags: Mapping[str, str], started: float | None = None) -> str:
        """Create a run with all its tags in one request, so that a kill leaves either the complete run or none."""
        with self._writing(""):
            run = self._client.create_run(self._experiment, milliseconds(started), dict(tags), name)
        self.know(run)
        return str(run.info.run_id)

    def know(self, run: Run) -> None:
        """Cache the content of a run that was found by a search."""
        data, linked = run.data, {each.dataset.digest for each in (run.inputs.dataset_inputs if run.inputs else ())}
        points = None if data.metrics else set[tuple[str, int]]()
        self._held[run.info.run_id] = Held(
            run.info.status,
            dict(data.params),
            dict(data.tags),
            dict(data.metrics),
            linked,
            run.info.artifact_uri,
            points,
            run.info.lifecycle_stage == LifecycleStage.DELETED,
        )

    def held(self, run_id: str) -> Held:
        """Return the content of the run, from the cache or from MLflow."""
        if run_id not in self._held:
            try:
                self.know(self._client.get_run(run_id))
            except MlflowException as error:
                if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                    raise
                return Held("", {}, {}, {}, set(), "", is_deleted=True)
        return self._held[run_id]

    def write(
        self,
        run_id: str,
        params: Mapping[str, str] = _NOTHING,
        tags: Mapping[str, str] = _NOTHING,
        values: Mapping[str, float] = _NO_VALUES,
        points: Sequence[Point] = (),
        moment: float | None = None,
    ) -> None:
        """Write everything that the run does not hold yet in one request.

        `params`: those that the run holds already stay unchanged, because MLflow parameters are immutable. `values`:
        scalars, written at step 0. `moment`: time of values that are new, in seconds since 1970 UTC; by default now, as
        for those that have changed.
        """
        held, now = self.held(run_id), int(1000 * time.time())
        first = milliseconds(moment) or now
        new = {key: value for key, value in params.items() if key not in held.params}
        changed = {key: value for key, value in tags.items() if held.tags.get(key, "") != value}
        named = {valid_name(name): value for name, value in values.items()}
        scalars = [
            Metric(key, value, now if key in held.metrics else first, 0)
            for key, value in named.items()
            if held.metrics.get(key) != value
        ]
        recorded = self._points(run_id) if points else set[tuple[str, int]]()
        further = [
            Metric(valid_name(point.name), point.value, point.moment, point.step)
            for point in points
            if (valid_name(point.name), point.step) not in recorded
        ]
        if new or changed or scalars or further:
            with self._writing(run_id):
                self._client.log_batch(
                    run_id,
                    [*further, *scalars],
                    [Param(key, value) for key, value in new.items()],
                    [RunTag(key, value) for key, value in changed.items()],
                )
        held.params |= new
        held.tags |= changed
        held.metrics |= {metric.key: metric.value for metric in (*further, *scalars)}
        recorded.update((metric.key, metric.step) for metric in further)

    def _points(self, run_id: str) -> set[tuple[str, int]]:
        held = self.held(run_id)
        if held.points is None:
            series = (name for name in held.metrics if not name.startswith(_SCALARS))
            histories = (self._client.get_metric_history(run_id, name) for name in series)
            held.points = {(metric.key, metric.step) for history in histories for metric in history}
        return held.points

    def attach(self, run_id: str, texts: Mapping[str, str]) -> None:
        """Store text files with the run, by name; as `attach_files`."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                Path(folder, name).write_text(text, encoding="utf-8")
            self.attach_files(run_id, Path(folder))

    def attach_files(self, run_id: str, folder: Path) -> None:
        """Store the files below a local folder with the run; each takes one request.

        Files that this process has stored already are not sent again: an attempt that fails behind them shows no
        progress.
        """
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        digests = {(run_id, str(path.relative_to(folder))): _digest(path) for path in files}
        if digests.items() <= self._attached.items():
            return
        require_location(self.held(run_id).artifacts, run_id)
        repository = get_artifact_repository(self.held(run_id).artifacts, self._uri)  # cached: saves a request each
        with self._writing(run_id):
            timed(repository, self._uri).log_artifacts(str(folder))  # type: ignore[no-untyped-call]  # MLflow's has no types
        self._attached |= digests

    def name_data(self, run_id: str, data: Sequence[DatasetInput]) -> None:
        """Link the run to its data, unless it is linked already."""
        held = self.held(run_id)
        new = [each for each in data if each.dataset.digest not in held.data]
        if new:
            with self._writing(run_id):
                self._client.log_inputs(run_id, new)
            held.data |= {each.dataset.digest for each in new}

    def reopen(self, run_id: str) -> None:
        """Set the status of the run to RUNNING."""
        held = self.held(run_id)
        if held.status != "RUNNING":
            with self._writing(run_id):
                self._client.update_run(run_id, status="RUNNING")
            held.status = "RUNNING"

    def end(self, run_id: str, status: str, ended: float | None = None) -> None:
        """End the run with this status, unless it has it already. ended: seconds since 1970 UTC; by default now."""
        held = self.held(run_id)
        if held.status != status:
            with self._writing(run_id):
                self._client.set_terminated(run_id, status, milliseconds(ended))
            held.status = status

    def delete(self, run_id: str) -> None:
        """Delete the run."""
        with self._writing(run_id):
            self._client.delete_run(run_id)
        self._held.pop(run_id, None)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def milliseconds(seconds: float | None) -> int | None:
    """Convert seconds since 1970 to MLflow's milliseconds; None stays None."""
    return None if seconds is None else int(1000 * seconds)
