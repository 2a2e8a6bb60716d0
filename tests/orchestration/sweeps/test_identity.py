"""What makes two trials the same, and what they are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps import grid as grids
from dpsweep.orchestration.sweeps.grid import GridPoint, Past, grid
from dpsweep.orchestration.sweeps.identity import content
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

ONE = {"clipping": ["none", "flat"], "noise": "constant", "seeds": 0}


def points(**changes: object) -> dict[str, GridPoint]:
    return {point.key: point for point in grid(parse_sweep(small(**{**ONE, **changes})))}


GROWTHS: dict[str, dict[str, Any]] = {
    "a second epsilon": {"privacy": {"target_epsilon": [5, 8], "delta": 1e-5}},
    "a seed": {"seeds": [0, 1]},
    "a model": {"model": [{"name": "mlp", "hidden": [16]}, "logistic"]},
    "a clipping method of the same name": {"clipping": ["none", "flat", {"name": "flat", "bound": 2.0}]},
    "a schedule": {"noise": ["constant", {"name": "exponential", "decay": 0.1}]},
    "a sampling": {"sampling": [{"method": kind, "batch_size": 128} for kind in ("poisson", "fixed")]},
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_sweep_that_grows_renames_no_trial(growth: str) -> None:
    before, after = points(), points(**GROWTHS[growth])
    assert before.keys() < after.keys()
    for key, point in before.items():
        assert replace(after[key], labels=point.labels) == point, "only what tells it from others may change"


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"noise_source": "os_entropy"}, "noise_source"),
        ({"release": "private"}, "release"),
        ({"baseline": {"optimizer": {"name": "sgd", "learning_rate": 9.0}}}, "optimizer"),
        ({"reference": True}, "reference"),
    ],
)
def test_no_trial_of_another_version_of_the_file_counts_as_one_more_seed(changes: dict[str, Any], label: str) -> None:
    found = grid(parse_sweep(small(**{**ONE, **changes})), Past(earlier=(parse_sweep(small(**ONE)),)))
    assert len({str(sorted(point.labels.items())) for point in found}) == len(found)
    assert len({point.labels[label] for point in found}) == 2


NOT_OF_A_TRIAL: dict[str, dict[str, Any]] = {
    "name": {"name": "another"},
    "resources": {"resources": {"cpus": 2, "max_concurrent": 1}},
    "accounting": {"accounting": {"individual": "pld", "group_sizes": [1, 4], "also": ["rdp"]}},
    "scheduler": {"scheduler": {"name": "asha", "accept_unaccounted_selection": True}},
    "a mode that releases nothing": {"release": "raw"},
    "speed": {"execution": {"threads": 2, "micro_batch_size": 8, "device": "cpu", "deterministic": False}},
    "defaults written out": {"loss": "cross_entropy", "norms": {"refreshes_per_epoch": "auto"}, "min_group_size": 10},
    "a whole number as a real one": {"privacy": {"target_epsilon": 5.0, "delta": 1e-5}, "epochs": 2},
}


@pytest.mark.parametrize("change", NOT_OF_A_TRIAL)
def test_what_does_not_define_a_trial_renames_none(change: str) -> None:
    assert points(**NOT_OF_A_TRIAL[change]).keys() == points().keys()


OF_A_TRIAL: dict[str, dict[str, Any]] = {
    "data": {"data": {"name": "digits", "keep": {8: 0.2}}},
    "model": {"model": {"name": "mlp", "hidden": [17]}},
    "sampling": {"sampling": {"method": "poisson", "batch_size": 127}},
    "epochs": {"epochs": 3},
    "optimizer": {"optimizer": {"name": "sgd", "learning_rate": 0.2}},
    "delta": {"privacy": {"target_epsilon": 5, "delta": 2e-5}},
    "norms": {"norms": {"refreshes_per_epoch": 2}},
    "attacks": {"attacks": {"loss_threshold": True}},
    "noise source": {"noise_source": "os_entropy"},
    "precision": {"execution": {"autocast": True}},
}


@pytest.mark.parametrize("change", OF_A_TRIAL)
def test_what_defines_a_trial_gives_it_another_key(change: str) -> None:
    assert not points(**OF_A_TRIAL[change]).keys() & points().keys()


def test_what_concerns_private_trials_alone_keeps_their_baseline() -> None:
    for change in (
        {"release": "private"},
        {"privacy": {"target_epsilon": 5, "delta": 1e-5, "accountant": "rdp"}},
        {"privacy": {"noise_multiplier": 5, "delta": 1e-5}},
    ):
        same = points(**change).keys() & points().keys()
        assert [key.rpartition("-")[0] for key in same] == ["non-private-seed0"]


def test_trials_that_are_the_same_run_once_and_the_plan_says_so() -> None:
    twice = {"seeds": [0, 0], "clipping": ["none", "flat", {"name": "flat"}]}
    assert points(**twice) == points()
    assert any("clipping, seeds twice" in each or "seeds, clipping twice" in each for each in warnings(**twice))
    assert not any("twice" in each for each in warnings())


def warnings(**changes: object) -> tuple[str, ...]:
    return plan_sweep(parse_sweep(small(**{**ONE, "model": "logistic", **changes}))).warnings


def test_baselines_with_an_optimizer_of_their_own_run_once_for_all() -> None:
    rates = [{"name": "sgd", "learning_rate": rate} for rate in (0.1, 0.2)]
    found = points(optimizer=rates, baseline={"optimizer": "adam"})
    (baseline,) = [point for point in found.values() if not point.is_private]
    private = [point for point in found.values() if point.is_private]
    assert "optimizer" not in baseline.labels
    assert [point.labels["optimizer"] for point in private] == ["sgd (learning rate 0.1)", "sgd (learning rate 0.2)"]
    assert {point.baseline for point in private} == {baseline.key}


LABELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "folders, by the ends of their paths": (
        {"model": [{"name": "hugging_face", "path": f"/data/{'deep/' * 40}{name}/v1"} for name in ("tiny", "small")]},
        ["hugging_face (path tiny/v1)", "hugging_face (path small/v1)"],
    ),
    "nested parameters": (
        {
            "model": [
                {"name": "hugging_face", "path": "models/tiny", "adapter": {"name": "lora", "rank": rank}}
                for rank in (4, 8)
            ]
        },
        ["hugging_face (adapter rank 4)", "hugging_face (adapter rank 8)"],
    ),
    "batches": (
        {"sampling": {"method": "poisson", "batch_size": [64, 128]}},
        ["poisson (batch size 64)", "poisson (batch size 128)"],
    ),
    "data": (
        {"data": {"name": "digits", "keep": {8: [0.1, 0.5]}}},
        ["digits (keep 8: 0.1)", "digits (keep 8: 0.5)"],
    ),
    "lists": ({"model": {"name": "mlp", "hidden": [[16], [8, 4]]}}, ["mlp (hidden [16])", "mlp (hidden [8, 4])"]),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_read_as_words(case: str) -> None:
    changes, expected = LABELS[case]
    (axis,) = changes
    assert [point.labels[axis] for point in points(clipping="flat", **changes).values()] == expected


def test_long_labels_are_cut_and_stay_unique() -> None:
    paths = [f"/{'a' * 300}{middle}{'b' * 300}" for middle in "xyz"]
    found = points(clipping="flat", model=[{"name": "hugging_face", "path": path} for path in paths])
    labels = [str(point.labels["model"]) for point in found.values()]
    assert len(set(labels)) == 3
    assert max(map(len, labels)) < 130


def test_two_trials_with_one_key_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "trial_key", lambda words, canonical: words[0])
    with pytest.raises(InvalidInput, match="two different trials are both called non-private"):
        points(seeds=[0, 1])


def test_contents_do_not_change_between_versions() -> None:
    """Of these, folders are made: another text would train finished trials again."""
    (baseline, private) = points().values()
    assert private.content == content(private.spec, 5.0)
    assert private.content == (
        '{"clipping":{"name":"flat"},"data":{"keep":{"8":0.1},"name":"digits"},"delta":1e-05,"epochs":2,'
        '"model":{"name":"mlp","params":{"hidden":[16]}},"noise":{},"norms":{"refreshes_per_epoch":"auto"},'
        '"sampling":{"batch_size":128,"method":"poisson"},"seed":0,"target_epsilon":5}'
    )
    assert (baseline.key, private.key) == ("non-private-seed0-f9ed683cfa", "flat-constant-epsilon5-seed0-f882a8b3fb")


def test_a_default_that_has_changed_renames_no_trial() -> None:
    """Norms once per epoch were the default of folders that are still there."""
    (baseline, private) = points(norms={"refreshes_per_epoch": 1}).values()
    assert private.content == (
        '{"clipping":{"name":"flat"},"data":{"keep":{"8":0.1},"name":"digits"},"delta":1e-05,"epochs":2,'
        '"model":{"name":"mlp","params":{"hidden":[16]}},"noise":{},"sampling":{"batch_size":128,"method":"poisson"},'
        '"seed":0,"target_epsilon":5}'
    )
    assert (baseline.key, private.key) == ("non-private-seed0-c9245839a9", "flat-constant-epsilon5-seed0-642c8bc171")
