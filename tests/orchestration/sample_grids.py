"""A small sweep that the tests of orchestration share, how it runs here, and the keys of trials by short names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import NON_PRIVATE
from dpsweep.orchestration.sweeps.grid import drafts
from dpsweep.orchestration.sweeps.identity import labels_by_axis, short_name
from dpsweep.orchestration.sweeps.manifest import read_manifest
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.tracking.tracker import NO_TRACKING
from tests.known import known

if TYPE_CHECKING:
    from dpsweep.orchestration.pipeline import RunRequest

SMALL = """
name: small
data: {name: digits, keep: {8: 0.1}}
model: {name: mlp, hidden: [16]}
sampling: {method: poisson, batch_size: 128}
epochs: 2
clipping: [none, {name: flat, bound: 1.0}, dpsgd_f]
noise: [constant, {name: exponential, decay: 0.1}]
seeds: [0, 1]
privacy: {target_epsilon: 5, delta: 1e-5}
"""


def small(**changes: object) -> str:
    """The small sweep with top-level keys replaced."""
    return yaml.safe_dump({**yaml.safe_load(SMALL), **changes})


def tuned(**changes: object) -> str:
    """A sweep that protects the choice among the candidates of its section ``tune``."""
    usual = {
        "model": "logistic",
        "clipping": ["none", {"name": "flat", "bound": 1.0}],
        "noise": "constant",
        "noise_source": "os_entropy",
    }
    return small(**{**usual, **changes})


def in_process(text: str, folder: str | Path, tracking_uri: str | None = NO_TRACKING, **more: Any) -> RunRequest:
    """The request to run a sweep file in this process. more: other fields of the request."""
    from dpsweep.orchestration.pipeline import RunRequest  # imports MLflow, which other tests do without

    return RunRequest(parse_sweep(text), text, str(folder), IN_PROCESS, tracking_uri, **more)


def contents(folder: str | Path) -> dict[Path, bytes]:
    """All files of a folder, by their paths."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def keys_of(text: str) -> dict[str, str]:
    """The keys of a sweep's trials by their labels, such as ``flat-seed0``."""
    found = drafts(parse_sweep(text))
    by_axis = labels_by_axis(point.choice for point in found)
    keys: dict[str, str] = {}
    for point in found:
        texts = {axis: by_axis[axis][value] for axis, value in point.choice.items() if axis in by_axis}
        clipping = point.choice.get("clipping")
        first = texts.pop("clipping", short_name(clipping.name)) if clipping else NON_PRIVATE
        keys.setdefault("-".join([first, *texts.values()]), point.key)
    return keys


def key_in(folder: str | Path, name: str) -> str:
    """The key of a trial of the sweep in a folder, by its labels."""
    manifest = known(read_manifest(SweepFiles(str(folder))))
    return keys_of(manifest.text)[name]


def trial_in(folder: str | Path, name: str) -> TrialFiles:
    """The files of a trial of the sweep in a folder, by its labels."""
    return SweepFiles(str(folder)).trial(key_in(folder, name))
