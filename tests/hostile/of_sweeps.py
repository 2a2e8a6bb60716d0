"""Sweep files: damaged, forged and nonsensical ones are refused, or mean what they say."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from hypothesis import strategies as st

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.text import read_text
from tests.hostile.floor import assert_pays_for_a_step
from tests.hostile.odd import Edit, edited, edits, odd_values, places_in
from tests.hostile.target import Target

SWEEPS: tuple[dict[str, Any], ...] = (
    {
        "name": "small",
        "data": {"name": "digits", "keep": {8: 0.1}},
        "model": "logistic",
        "sampling": {"method": "poisson", "batch_size": 128},
        "epochs": 1,
        "clipping": ["none", {"name": "flat", "bound": 1.0}],
        "noise": ["constant", {"name": "exponential", "decay": 0.1}],
        "seeds": 0,
        "privacy": {"target_epsilon": 5, "delta": 1e-5},
    },
    {
        "name": "wide",
        "data": {"name": "digits", "public_fraction": 0.1, "test_fraction": 0.3, "split_seed": 3},
        "model": {"name": "mlp", "hidden": [16]},
        "preprocessing": {"name": "standardize", "noise_multiplier": 20.0, "bound": 30.0},
        "loss": "cross_entropy",
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "learning_rate_schedule": "cosine",
        "averaging": {"name": "ema", "decay": 0.9},
        "sampling": {"method": "shuffle", "batch_size": 64},
        "epochs": [1, 2],
        "clipping": {"name": "quantile", "bound": 1.0},
        "seeds": [1, 2],
        "privacy": {"noise_multiplier": [1.0, 2.0], "delta": 1e-6, "accountant": "pld", "adjacency": "zero_out"},
        "norms": {"refreshes_per_epoch": 1, "exact_examples": 5},
        "attacks": {"loss_threshold": True},
        "min_group_size": 5,
        "noise_source": "os_entropy",
        "accounting": {"individual": "pld", "also": ["rdp"], "group_sizes": [1, 4]},
        "release": {"name": "private", "noise_multiplier": 30.0},
        "scheduler": {"name": "fifo"},
        "resources": {"cpus": 1, "max_failures": 1},
        "execution": {"micro_batch_size": 32, "threads": 1},
    },
)
_PLANNED_EVERY = 40
"""One in so many accepted files is planned too, which reads data and calibrates noise."""
_MOST_TRIALS = 8


_SNIPPETS = (
    *("&a [*a]", "*a", "<<: *a", "!!python/object/apply:os.system ['id']", "!!binary x", "? [1]: 2", "!<tag:x> y"),
    *("%YAML 9.9\n", "0o7", "1_000", "2001-01-01"),
)


@dataclass(frozen=True)
class Text:
    """A sweep file with its text changed."""

    sweep: int
    changes: list[Edit]


@dataclass(frozen=True)
class Values:
    """A sweep file with values replaced, taken out, repeated or given odd keys. places: shares of all values."""

    sweep: int
    changes: list[tuple[float, Literal["replace", "delete", "rename", "list"], Any]]


def inputs() -> st.SearchStrategy[Text | Values | str]:
    sweeps, places = st.integers(0, len(SWEEPS) - 1), st.floats(0.0, 1.0, exclude_max=True)
    what = st.sampled_from(("replace", "replace", "delete", "rename", "list"))
    changes = st.lists(st.tuples(places, what, odd_values()), min_size=1, max_size=3)
    snippets = st.sampled_from(
        [*_SNIPPETS, "{", "[", "- ", "name: x\n", "\t", "'", '"', "|", ">", "---", "..."],
    )
    texts = st.lists(st.one_of(snippets, st.text(max_size=8)), max_size=12).map("".join)
    return st.one_of(st.builds(Text, sweeps, edits()), st.builds(Values, sweeps, changes), texts)


def feed(given: Text | Values | str, folder: Path) -> None:
    file = folder / "sweep.yaml"
    content = _content(given)
    file.write_bytes(content)
    sweep = parse_sweep(read_text(file), str(file))
    assert 0.0 < sweep.privacy.delta < 1.0
    asked = [*(sweep.privacy.target_epsilon or ()), *(sweep.privacy.noise_multiplier or ())]
    assert all(math.isfinite(number) and number >= 0.0 for number in asked)
    trials = grid(sweep)
    if len(trials) <= _MOST_TRIALS and sum(content) % _PLANNED_EVERY == 0:
        assert_plan_keeps_its_word(sweep)


def assert_plan_keeps_its_word(sweep: SweepSpec) -> None:
    """What can be planned costs at most what was asked for, and no less than what another accountant finds."""
    try:
        planned = plan_sweep(sweep, None).trials
    except InvalidInput:
        return
    targets = sweep.privacy.target_epsilon or (math.inf,)
    for trial in planned:
        if trial.trace.is_private:
            claim = trial.worst_case
            assert claim.epsilon <= max(targets) * (1.0 + 1e-9)
            assert_pays_for_a_step(trial.trace, claim.epsilon, claim.delta)
            least = account(trial.trace, claim.delta, "pld").lower_epsilon
            assert least is None or claim.epsilon >= least * (1.0 - 1e-6)


def _content(given: Text | Values | str) -> bytes:
    if isinstance(given, str):
        return given.encode(errors="surrogatepass")
    if isinstance(given, Text):
        return edited(yaml.safe_dump(SWEEPS[given.sweep]).encode(), given.changes)
    sweep = copy.deepcopy(SWEEPS[given.sweep])
    for place, what, value in given.changes:
        places = list(places_in(sweep))
        if not places:
            break
        holder, key = places[int(place * len(places))]
        match what:
            case "replace":
                holder[key] = value
            case "delete":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[f"{key}{str(value)[:3]}"] = holder.pop(key)
            case _:
                holder[key] = [holder[key], copy.deepcopy(value)]
    return yaml.safe_dump(sweep, allow_unicode=True).encode(errors="surrogatepass")


SWEEP_FILES = Target("sweep files", inputs(), feed)
