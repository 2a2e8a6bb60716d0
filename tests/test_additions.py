"""A part is added in as few files as docs/architecture.md says.

Each is planted in a copy of the product, by the edits that a person would make, and then used from the command line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.orchestration.invoking import printed

ROOT = Path(__file__).parents[1]
PACKAGES = ("accounting", "workers", "orchestration", "dpsweep")

WHOLE_SAMPLING = '''@final
@dataclass(frozen=True)
class WholeSampling:
    """Every example is in every batch."""

    stored_name: ClassVar[str] = "whole"
    words: ClassVar[str] = "whole batches"
    draws: ClassVar[Draws] = Draws.INDEPENDENT
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 0
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out", "replace_one")
    sample_rate: ClassVar[float] = 1.0
    steps_per_epoch: ClassVar[int] = 1

    members: int

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int) -> Self:
        return cls(dataset_size)

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        return np.array([float(group_size)]), np.zeros(1)

    def require_fits(self, dataset_size: int) -> None:
        """Accepts every size."""


'''
WHOLE_SAMPLER = '''class WholeSampler:
    """Every row is in every batch."""

    def __init__(self, dataset_size: int) -> None:
        self._rows = np.arange(dataset_size)

    def next_batch(self) -> Rows:
        return self._rows

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        return


'''
HALVED = '''"""Toy clipping: half of flat clipping."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpsweep.workers.clipping.clipping_method import (
    RISING,
    ClippingMethod,
    ClippingState,
    ClipRule,
    PublicFacts,
    clip_factor,
)


@dataclass(frozen=True)
class HalvedClipping(ClippingMethod):
    """Each gradient g becomes g * min(1, C / ||g||) / 2. Sensitivity C."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound
        return ClipRule(bound, lambda examples: clip_factor(examples.norms, bound) / 2, {"all": bound}, RISING)
'''
HALF_NOISE = '''@final
@dataclass(frozen=True)
class HalfNoise:
    """z_t = w_t - w_(t-1) / 2."""

    stored_name: ClassVar[str] = "half"
    words: ClassVar[str] = "noise that takes off half of that of the step before"

    steps: int

    def column(self) -> Array:
        return 0.5 ** np.arange(self.steps)

    def noising_column(self) -> Array:
        return np.array([1.0, -0.5])

    def memory(self) -> Memory:
        return Recurrence(self.noising_column(), np.ones(1))


'''
SLOWING = '''"""Toy clipping with state: the bound falls by 1 % at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dpsweep.workers.clipping.clipping_method import (
    RISING,
    ClippingMethod,
    ClippingState,
    ClipRule,
    PublicFacts,
    clip_factor,
)


@dataclass(frozen=True)
class SlowingClipping(ClippingMethod):
    """Each gradient g becomes g * min(1, b / ||g||) for the bound b = C slowed. Sensitivity b."""

    def decide(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClipRule:
        bound = state.bound * state.slowed
        return ClipRule(bound, lambda examples: clip_factor(examples.norms, bound), {"all": bound}, RISING)

    def advance(self, state: ClippingState, noisy_answer: Tensor, facts: PublicFacts) -> ClippingState:
        return replace(state, slowed=0.99 * state.slowed)
'''
GREETING = '''"""`dpsweep greet`: a toy."""

from __future__ import annotations

import typer


def greet() -> None:
    """Greet."""
    typer.echo("good morning")
'''
NOTING = '''"""A toy: notes the keys of trials in a file of the working directory."""

from __future__ import annotations

from pathlib import Path

from dpsweep.orchestration.store.published import PublishedTrial
from dpsweep.orchestration.tracking.tracker import NoTracker


class NotingTracker(NoTracker):
    """Notes the key of every trial."""

    def log_trial(self, trial: PublishedTrial) -> str:
        """Note the trial."""
        with Path("noted.txt").open("a") as noted:
            noted.write(f"{trial.key}\\n")
        return ""
'''
OPENED = """        if uri == "notes":
            return NotingTracker()
"""
TOY_METRIC = '    Metric("toy_delta", "privacy/toy_delta", "Toy", delta, NUMBER, "A toy.", frozenset(MetricTable)),\n'


@dataclass(frozen=True)
class Addition:
    """before: by file and a text that it holds once, what is inserted in front of that. made: new files."""

    before: Mapping[str, Mapping[str, str]]
    made: Mapping[str, str]

    @property
    def files(self) -> int:
        return len({*self.before, *self.made})

    def plant(self, root: Path) -> None:
        for name, insertions in self.before.items():
            text = (root / name).read_text()
            for place, inserted in insertions.items():
                assert text.count(place) == 1, f"{name} holds {place!r} {text.count(place)} times"
                text = text.replace(place, inserted + place)
            (root / name).write_text(text)
        for name, text in self.made.items():
            (root / name).write_text(text)


ADDITIONS: Mapping[str, Addition] = {
    "sampling": Addition(
        {
            "accounting/mechanism/samplings.py": {
                "SAMPLINGS: Mapping[str, type[SizedSampling]]": WHOLE_SAMPLING,
                '    "shuffle": ShuffledSampling,\n': '    "whole": WholeSampling,\n',
            },
            "workers/sampling/samplers.py": {
                "SAMPLERS: Final[": WHOLE_SAMPLER,
                '    "shuffle": lambda spec': '    "whole": lambda spec, size, draws: WholeSampler(size),\n',
            },
        },
        {},
    ),
    "noise strategy": Addition(
        {
            "accounting/mechanism/noise_strategies.py": {
                "CorrelatedNoise = ": HALF_NOISE,
                "BandedNoise | InverseRootNoise | LambdaNoise | ": "HalfNoise | ",
                "    LambdaNoise.stored_name: LambdaNoise,\n": "    HalfNoise.stored_name: HalfNoise,\n",
            },
        },
        {},
    ),
    "clipping method": Addition(
        {
            "workers/clipping/__init__.py": {
                '    "quantile": QuantileClipping,\n': '    "halved": HalvedClipping,\n',
                "from dpsweep.workers.clipping.own import": (
                    "from dpsweep.workers.clipping.halved import HalvedClipping\n"
                ),
            }
        },
        {"workers/clipping/halved.py": HALVED},
    ),
    "clipping method with state": Addition(
        {
            "workers/clipping/__init__.py": {
                '    "individual": IndividualClipping,\n': '    "slowing": SlowingClipping,\n',
                "from dpsweep.workers.own_code.imports import": (
                    "from dpsweep.workers.clipping.slowing import SlowingClipping\n"
                ),
            },
            "workers/clipping/clipping_method.py": {
                "    granted: Tensor | None = None\n": "    slowed: float = 1.0\n",
            },
        },
        {"workers/clipping/slowing.py": SLOWING},
    ),
    "metric": Addition(
        {
            "orchestration/comparison/metrics.py": {
                '    Metric("delta", "privacy/delta", "δ", delta, NUMBER),\n': TOY_METRIC,
            }
        },
        {},
    ),
    "tracker": Addition(
        {
            "orchestration/tracking/opening.py": {
                "        return MlflowTracker(uri, ": OPENED,
                "from dpsweep.orchestration.tracking.tracker import NO_TRACKING": (
                    "from dpsweep.orchestration.tracking.noting import NotingTracker\n"
                ),
            }
        },
        {"orchestration/tracking/noting.py": NOTING},
    ),
    "command": Addition(
        {
            "orchestration/commands/main.py": {
                '    (_RESULTS, dashboard.dashboard, "dashboard runs"),\n': (
                    '    (_RESULTS, greeting.greet, "greet"),\n'
                ),
                "    init,\n": "    greeting,\n",
            }
        },
        {"orchestration/commands/greeting.py": GREETING},
    ),
}

SWEEP = """
name: toys
data: {name: digits}
model: {name: logistic}
epochs: 2
sampling: {method: whole, batch_size: 64}
clipping: {name: halved, bound: 1.0}
noise: {name: constant, noise_multiplier: 5.0}
privacy: {delta: 1.0e-5}
seeds: [0]
"""

RESUMED = """
import shutil
from pathlib import Path

import torch

from dpsweep.workers.spec import Component, DataSpec, NoiseSpec, SamplingSpec, TrialSpec
from dpsweep.workers.trials.trial import run_trial


def copy_once(progress):
    if not Path("second").exists():
        shutil.copytree("first", "second")


spec = TrialSpec(
    key="a", data=DataSpec("digits"), model=Component("logistic"), sampling=SamplingSpec("fixed_order", 64),
    clipping=Component("slowing"), noise=NoiseSpec(1.0, Component("half")), epochs=3, delta=1e-5, seed=0,
)
run_trial(spec, "first", on_progress=copy_once)
run_trial(spec, "second")
first, second = (torch.load(f"{folder}/model.pt", weights_only=True) for folder in ("first", "second"))
assert all(torch.equal(value, second[name]) for name, value in first.items())
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for addition in ADDITIONS.values():
        addition.plant(root)
    return root


def dpsweep(root: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-P", "-m", "dpsweep", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_touches_few_files() -> None:
    assert {name: addition.files for name, addition in ADDITIONS.items()} == {
        "sampling": 2,
        "noise strategy": 1,
        "clipping method": 2,
        "clipping method with state": 3,
        "metric": 1,
        "tracker": 2,
        "command": 2,
    }


def test_a_toy_sampling_is_accounted_and_a_toy_command_runs(copy: Path, tmp_path: Path) -> None:
    sizes = ("--dataset-size", "100", "--batch-size", "100", "--epochs", "3", "--noise-multiplier", "5")
    shared = ("epsilon", *sizes, "--delta", "1e-5", "--json")
    ordered = ("--sampling", "fixed_order", "--noise-strategy")
    for toy, known, why in (
        (("--sampling", "whole"), ("--sampling", "poisson"), "every example is in every batch of both"),
        ((*ordered, "half"), (*ordered, "lambda_cgd:decay=0.5"), "both take off half of the noise of the step before"),
    ):
        answers = [json.loads(found) for found in (dpsweep(copy, tmp_path, *shared, *toy), printed(*shared, *known))]
        assert answers[0]["epsilon"] == answers[1]["epsilon"], why
    assert dpsweep(copy, tmp_path, "greet") == "good morning\n"


@pytest.mark.long
def test_what_a_toy_strategy_and_a_toy_clipping_method_keep_is_in_the_checkpoint(copy: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-P", "-c", RESUMED]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)


@pytest.mark.long
def test_a_sweep_trains_with_the_toys_and_shows_the_metric(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "toys.yaml").write_text(SWEEP)
    dpsweep(copy, tmp_path, "run", "toys.yaml", "--output", "run", "--tracking-uri", "notes", "--address", "in-process")
    dpsweep(copy, tmp_path, "export", "run", "--to", "trials.csv")
    assert "toy_delta" in (tmp_path / "trials.csv").read_text()
    assert "Toy" in (tmp_path / "run" / "report.html").read_text()
    assert len(set((tmp_path / "noted.txt").read_text().splitlines())) == 1
