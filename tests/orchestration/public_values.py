"""Everything that a sweep or trial publishes, as single values by place: for tests of what may depend on one row."""

from __future__ import annotations

import contextlib
import hashlib
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
    r"accurac(y|ies)|loss|parity|odds|_gap|worst_group|opportunity|calibration_error|confusion",
    r"/(precision|selection_rate|(true|false)_positive_rate(_difference)?)(/|$)|^comparison\.json/(warnings/|settings/[0-9]+/useless)",
    r"/(bounds/|sensitivity$|initial_bound$|clipping_bound)",
    r"/digests/(model\.pt|training\.json|released\.json)$",
    r"(result|released)\.json/sha256$",
    r"/released\.json/|/individuals/",
    r"groups_digest|dpsweep\.digest|groups\.json/data/",
)
"""Places of the model, of what test data say of it, and of what was released with noise."""
_RUN = (
    r"/(started|ended|seconds|created|sweep_id)$|wall_seconds|(sweep|status)\.json/sha256$",
    r"^status\.json/(elapsed|steps_per_second|.*heartbeat|recording/(page|per_second))$",
    r"^digests\.json/(comparison\.json|report\.html|results\.json|sha256)$|/MLmodel$",
    r"time|/timestamp|/date$|/pid$|trial_id|uuid|dpsweep\.log/",
    r"/mlflow\.parentRunId$|/dpsweep\.sweep$",
    r"peak_(bytes|memory)|utili[sz]ation|device\.json(/sha256)?$",
    r"^attempts/[^/]+/\d+\.json/(release|sha256)$",
    r"^tune/.*(pkl|storage|tuner|runner_data|_session|basic-variant).*",
)
"""Places of what tells runs apart: times, memory, processes and random identities."""
_FROM_MODEL, _OF_RUN = re.compile("|".join(_MODEL)), re.compile("|".join(_RUN))
_COARSE = re.compile(
    r"accurac(y|ies)|parity|odds|opportunity|confusion|_gap|worst_group|bound|sensitivity|mean|median|quantiles|"
    r"standard_error|"
    r"calibration_error|/(precision|selection_rate|(true|false)_positive_rate(_difference)?)(/|$)|^comparison\.json/(warnings/|settings/[0-9]+/useless)"
)
"""Shares of few test examples, and noisy values that were cut off at an end: some agree by chance.

Of a release, for one: 7 % of the draws count less than one example of a group of 30, and state the same error.
"""
_IDENTITY = re.compile(r"[0-9a-f]{32}|\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


def may_vary(place: str) -> bool:
    """Whether two runs on the same data may differ there."""
    return bool(_FROM_MODEL.search(place) or _OF_RUN.search(place))


def unexplained(runs: list[Values]) -> list[str]:
    """Places that differ between runs though neither noise nor time gets there."""
    places = sorted({place for run in runs for place in run})
    return [place for place in places if len({run.get(place) for run in runs}) > 1 and not may_vary(place)]


def unhidden(draws: list[Values], neighbour: Values) -> list[str]:
    """Places of noisy values that are the same in all ``draws`` on one data set, and others on its neighbour."""
    constant = [place for place, value in draws[0].items() if all(draw.get(place) == value for draw in draws)]
    return [
        place
        for place in constant
        if neighbour.get(place) != draws[0][place] and not (_OF_RUN.search(place) or _COARSE.search(place))
    ]


def is_public(path: Path) -> bool:
    """Whether users other than the owner may read the file."""
    return stat.S_IMODE(path.stat().st_mode) & 0o044 != 0 and stat.S_IMODE(path.parent.stat().st_mode) & 0o011 != 0


def words(page: str) -> str:
    """The text of a page without scripts, styles and tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", " ", Path(page).read_text(), flags=re.DOTALL))


def published(root: Path) -> Values:
    """Every value in the public files below ``root``, but for what pages and stores of MLflow hold."""
    found: Values = {}
    for path in filter(is_public, _files(root)):
        place = _IDENTITY.sub("ID", str(path.relative_to(root)))
        found |= {f"{place}/{name}" if name else place: value for name, value in _content(path)}
    return found


def shown_digests(root: Path) -> list[str]:
    """Private files below ``root`` whose sha256 some public file holds."""
    files = _files(root)
    public = b"\n".join(path.read_bytes() for path in files if is_public(path))
    private = [path for path in files if not is_public(path)]
    return [str(path) for path in private if hashlib.sha256(path.read_bytes()).hexdigest().encode() in public]


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


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _content(path: Path) -> Iterator[tuple[str, str]]:
    match path.suffix:
        case ".json":
            text = path.read_bytes()
            yield from _flat(json.loads(text) if text[:1] in (b"{", b"[") else text.hex())
        case ".pt":
            state = torch.load(path, weights_only=True)
            plain = {name: part.tolist() if isinstance(part, torch.Tensor) else part for name, part in state.items()}
            yield from _flat(plain)
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
        with contextlib.suppress(json.JSONDecodeError):  # a token of a tokenizer is no JSON
            value = json.loads(value)
    elif isinstance(value, str) and re.fullmatch("8005[0-9a-f]+", value):
        loaded = pickle.loads(bytes.fromhex(value))
        value = asdict(loaded) if is_dataclass(loaded) and not isinstance(loaded, type) else value
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{place}/{name}" if place else str(name))
    elif isinstance(value, list | tuple):
        yield f"{place}/length", str(len(value))
        for index, item in enumerate(value):
            yield from _flat(item, f"{place}/{index}")
    else:
        yield place, repr(value)
