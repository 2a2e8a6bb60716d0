"""Everything that a sweep or trial publishes, as single values by place: for tests of what may depend on one row."""

from __future__ import annotations

import json
import pickle
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import mlflow
import pyarrow as pa
import torch

Values = dict[str, str]

_MODEL = (
    r"/model\.pt/",
    r"(^|/)(test|evaluation|public)/",
    r"accuracy|loss|parity|odds|_gap|worst_group",
    r"/(bounds/|sensitivity$|initial_bound$|clipping_bound)",
    r"/digests/(model\.pt|training\.json|released\.json)$",
    r"(result|released)\.json/sha256$",
    r"/released\.json/|/individuals/",
    r"groups_digest|groups\.json/data/",
)
"""Places of the model, of what test data say of it, and of what was released with noise."""
_RUN = (
    r"/(started|ended|seconds|created|sweep_id)$|wall_seconds|sweep\.json/sha256$",
    r"time|/timestamp|/date$|/pid$|trial_id|uuid|dpsweep\.log/",
    r"/mlflow\.parentRunId$|/dpsweep\.sweep$",
    r"^tune/.*(pkl|storage|tuner|runner_data|_session|basic-variant).*",
)
"""Places of what tells runs apart: times, processes and random identities."""
_MAY_VARY = re.compile("|".join((*_MODEL, *_RUN)))
_COARSE = re.compile(r"accuracy|parity|odds|_gap|worst_group|bound|sensitivity|mean|median|quantiles")
"""Shares of few test examples, and noisy values that were cut off at an end: some agree by chance."""
_IDENTITY = re.compile(r"[0-9a-f]{32}|\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


def may_vary(place: str) -> bool:
    """Whether two runs on the same data may differ there."""
    return _MAY_VARY.search(place) is not None


def dependent(draws: list[Values], neighbour: Values) -> list[str]:
    """Places that show more of the rows than the noise hides, given ``draws`` on one data set and one on a neighbour.

    What does not vary with the noise must not vary with the row, and nothing may vary but where noise or time gets.
    """
    first = draws[0]
    places = sorted({*neighbour, *(place for draw in draws for place in draw)})
    constant = [place for place in places if all(draw.get(place) == first.get(place) for draw in draws)]
    return [
        place
        for place in places
        if neighbour.get(place) != first.get(place)
        and (not may_vary(place) or (place in constant and _COARSE.search(place) is None))
    ] + [place for place in places if place not in constant and not may_vary(place)]


def published(root: Path) -> Values:
    """Every value in the files below ``root`` that others may read, but for pages and stores of MLflow."""
    found: Values = {}
    for path in sorted(root.rglob("*")):
        readable = path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o044
        if readable and all(stat.S_IMODE(folder.stat().st_mode) & 0o011 for folder in _between(root, path)):
            place = _IDENTITY.sub("ID", str(path.relative_to(root)))
            found |= {f"{place}/{name}" if name else place: value for name, value in _content(path)}
    return found


def tracked(store: Path) -> Values:
    """Every parameter, tag, metric and data set of the runs in an embedded MLflow store."""
    client = mlflow.MlflowClient(f"sqlite:///{store}")
    found: Values = {}
    for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
        series = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        content = {
            "params": run.data.params,
            "tags": run.data.tags,
            "metrics": {name: [(each.step, each.value) for each in history] for name, history in series.items()},
            "datasets": [dict(item.dataset) for item in run.inputs.dataset_inputs] if run.inputs else [],
            "status": run.info.status,
        }
        found |= {f"mlflow/{run.info.run_name}/{place}": value for place, value in _flat(content)}
    return found


def _between(root: Path, path: Path) -> Iterator[Path]:
    """The folders from ``path`` up to ``root``, which is left out."""
    return (folder for folder in path.parents if folder != root and folder.is_relative_to(root))


def _content(path: Path) -> Iterator[tuple[str, str]]:
    match path.suffix:
        case ".json":
            yield from _flat(json.loads(path.read_text()))
        case ".pt":
            state = torch.load(path, weights_only=True)
            yield from _flat({name: value.tolist() for name, value in state.items()})
        case ".arrow":
            table = pa.ipc.open_file(path).read_all()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            yield from _flat({"rows": table.to_pylist(), "metadata": metadata})
        case ".log":
            yield from _flat(path.read_text().splitlines())
        case ".html" | ".db":
            yield "", "present"
        case _:
            yield "", path.read_bytes().hex()


def _flat(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Single values by place; JSON within text and pickled dataclasses, as Tune writes them, are taken apart."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, str) and value[:1] in ("{", "["):
        value = json.loads(value)
    elif isinstance(value, str) and re.fullmatch("8005[0-9a-f]+", value):
        loaded = pickle.loads(bytes.fromhex(value))
        value = asdict(loaded) if is_dataclass(loaded) else value
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{place}/{name}" if place else str(name))
    elif isinstance(value, list | tuple):
        yield f"{place}/length", str(len(value))
        for index, item in enumerate(value):
            yield from _flat(item, f"{place}/{index}")
    else:
        yield place, repr(value)
