"""Tuning before it runs: its places, its candidates, its grid, and what it refuses."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.tune import (
    Adapted,
    Winner,
    candidates_of,
    setting_of,
)
from dpsweep.orchestration.sweeps.tuning_stages import next_candidates, tuned_stage, tuning_stage, while_tuning
from tests.known import known
from tests.orchestration.sample_grids import small

PLACES = {"clipping.bound": [0.5, 2], "optimizer.learning_rate": [0.2, 2]}
TUNE = {"parameters": PLACES, "privacy": "unaccounted"}
PUBLIC = {"data": {"name": "digits", "public_fraction": 0.2}}
DPSGD_F = {"name": "dpsgd_f", "count_memory": 0.9}


def text_of(**changes: object) -> str:
    return small(**{**PUBLIC, "clipping": ["none", "flat", DPSGD_F], "noise": "constant", "tune": TUNE, **changes})


def tuned(tune: dict[str, Any], **changes: object) -> SweepSpec:
    return parse_sweep(text_of(tune={**TUNE, **tune}, **changes))


class TestCandidates:
    def test_a_grid_is_all_combinations(self) -> None:
        sweep = tuned({})
        assert sweep.tune is not None
        assert [tuple(each.values()) for each in candidates_of(sweep.tune)] == [(0.5, 0.2), (0.5, 2), (2, 0.2), (2, 2)]

    def test_random_ones_are_within_their_ranges_and_repeatable(self) -> None:
        ranges = {"clipping.bound": {"log_uniform": [0.01, 10]}, "optimizer.learning_rate": {"uniform": [1, 3]}}
        asked = {"parameters": {**ranges, "epochs": [2, 4]}, "search": "random", "samples": 200}
        first, again, other = (known(tuned({**asked, "seeds": [seed]}).tune) for seed in (7, 7, 8))
        found = candidates_of(first)
        assert found == candidates_of(again) != candidates_of(other)
        assert all(0.01 <= each["clipping.bound"] <= 10 for each in found)
        assert 40 < sum(each["clipping.bound"] < 0.1 for each in found) < 95  # a third of the decades
        assert all(1 <= each["optimizer.learning_rate"] <= 3 for each in found)
        assert {each["epochs"] for each in found} == {2, 4}


class TestOptuna:
    RANGES: ClassVar = {"clipping.bound": {"log_uniform": [0.01, 10]}, "optimizer.learning_rate": [0.5, 1, 2]}

    def searched(self, **changes: Any) -> SweepSpec:
        return tuned({"parameters": self.RANGES, "search": "optuna", "samples": 24, **changes})

    def proposed(self, sweep: SweepSpec, best: dict[str, float]) -> tuple[Adapted, dict[str, list[float]]]:
        """All rounds of a search in which the score falls with the distance of the bound from the best of a setting;
        with the bounds that each setting tried."""
        assert sweep.tune is not None
        adapted, rounds = Adapted(candidates=candidates_of(sweep.tune)), 0
        while True:
            places = {name: adapted.proposed.get(name, range(len(adapted.candidates))) for name in best}
            bounds = {name: [adapted.candidates[each]["clipping.bound"] for each in places[name]] for name in best}
            scores = {
                name: {each: -abs(math.log(adapted.candidates[each]["clipping.bound"] / best[name])) for each in found}
                for name, found in places.items()
            }
            further = next_candidates(sweep.tune, adapted, scores)
            if further is None:
                assert rounds == 3
                return adapted, bounds
            adapted, rounds = further, rounds + 1

    def test_half_are_drawn_alike_and_the_others_follow_the_scores_of_each_setting(self) -> None:
        adapted, bounds = self.proposed(self.searched(), {"a": 0.05, "b": 5.0})
        assert bounds["a"][:12] == bounds["b"][:12], "drawn alike"
        assert {name: len(found) for name, found in bounds.items()} == {"a": 24, "b": 24}
        later = {name: np.median(np.log(found[12:])) for name, found in bounds.items()}
        assert abs(later["a"] - math.log(0.05)) < 1.0 < abs(later["a"] - math.log(5.0))
        assert abs(later["b"] - math.log(5.0)) < 1.0 < abs(later["b"] - math.log(0.05))
        assert all(each["optimizer.learning_rate"] in (0.5, 1, 2) for each in adapted.candidates)
        assert all(0.01 <= bound <= 10 for found in bounds.values() for bound in found)

    def test_equal_scores_give_equal_proposals(self) -> None:
        one, again, other = (self.proposed(self.searched(seeds=[seed]), {"a": 0.05})[1] for seed in (7, 7, 8))
        assert one == again != other

    def test_each_setting_trains_what_was_proposed_for_it(self) -> None:
        text = text_of(tune={**TUNE, "parameters": self.RANGES, "search": "optuna", "samples": 4})
        first = grid(while_tuning(parse_sweep(text)))
        flat, *_ = {point.setting for point in first if point.labels["clipping"] == "flat"}
        candidates = ({"clipping.bound": 1.0 + place, "optimizer.learning_rate": 1} for place in range(4))
        names: dict[str, tuple[int, ...]] = {point.setting: (0, 1) for point in first}
        names[flat] = (0, 1, 3)
        adapted = Adapted(candidates=tuple(candidates), proposed=names)
        stage = parse_sweep(tuning_stage(parse_sweep(text), text, adapted))
        assert stage.adapted == adapted
        points = grid(stage)
        assert [point.candidate for point in points if point.setting == flat] == [0, 1, 3]
        assert {point.candidate for point in points if point.is_private and point.setting != flat} == {0, 1}
        assert {point.baseline for point in points} - {None} <= {point.key for point in points}

    def test_without_the_package_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InvalidInput, match=r"pip install 'dpsweep\[optuna\]', or use search: random"):
            plan_sweep(self.searched())


class TestStages:
    def test_every_setting_tries_every_candidate_with_seeds_of_its_own(self) -> None:
        sweep = parse_sweep(text_of())
        stage = parse_sweep(tuning_stage(sweep, text_of()))
        assert stage == while_tuning(sweep)
        points = grid(stage)
        assert len({point.setting for point in points}) == 3
        assert {point.spec.seed for point in points} == {1_000_000}
        private = [point for point in points if point.is_private]
        assert [(p.spec.clipping.params["bound"], p.spec.optimizer.params["learning_rate"]) for p in private[:4]] == [
            *((0.5, 0.2), (0.5, 2), (2, 0.2), (2, 2))
        ]
        assert [point.labels["candidate"] for point in private[:4]] == [0, 1, 2, 3]
        assert private[-1].spec.clipping.params == {"bound": 2, "count_memory": 0.9}
        baselines = {point.key: point for point in points if not point.is_private}
        assert len(baselines) == 2, "a baseline has no clipping bound to tune"
        for point in private:
            assert baselines[point.baseline or ""].spec.optimizer == point.spec.optimizer

    def test_then_each_setting_has_its_winner_and_labels_stay(self) -> None:
        text = text_of()
        tuning, plain = grid(while_tuning(parse_sweep(text))), grid(parse_sweep(text_of(tune=None)))
        settings = list(dict.fromkeys(point.setting for point in tuning))
        winners = {
            setting: Winner(
                values={"clipping.bound": 0.5 + place, "optimizer.learning_rate": 2}, score=0.9, candidates=4
            )
            for place, setting in enumerate(settings)
        }
        after = parse_sweep(tuned_stage(text, winners))
        assert after.tune == parse_sweep(text).tune
        points = grid(after)
        assert [point.labels for point in points] == [point.labels for point in plain]
        bounds = {(point.labels["clipping"], point.spec.clipping.params.get("bound")) for point in points}
        assert bounds == {("non-private", None), ("flat", 1.5), ("dpsgd_f", 2.5)}
        assert {point.spec.optimizer.params["learning_rate"] for point in points} == {2}
        with pytest.raises(InvalidInput, match="a setting that was not tuned"):
            grid(parse_sweep(tuned_stage(text_of(clipping=["none", "flat", "automatic"]), winners)))

    def test_a_text_in_braces_is_written_anew(self) -> None:
        text = f"{{{', '.join(f'{key}: {value}' for key, value in BRACES.items())}}}"
        sweep = parse_sweep(text)
        assert sweep.tune is not None
        assert (
            parse_sweep(tuned_stage(text, {"x": Winner(values={"clipping.bound": 1}, score=1.0, candidates=1)})).adapted
            is not None
        )

    def test_a_setting_is_all_but_seeds(self) -> None:
        points = grid(while_tuning(tuned({"seeds": [5, 6]}, data={**PUBLIC["data"], "split_seed": [0, 1]})))
        by_setting: dict[str, set[tuple[int, int]]] = {}
        for point in points:
            by_setting.setdefault(point.setting, set()).add((point.spec.data.split_seed, point.spec.seed))
        assert len(by_setting) == 3 * 2
        assert all({seed for _, seed in found} == {5, 6} for found in by_setting.values())
        assert all(len({split for split, _ in found}) == 1 for found in by_setting.values())

    def test_public_data_stand_in_for_the_private_ones(self) -> None:
        sweep = tuned({"privacy": "public", "data": "breast_cancer"}, data="digits")
        stage, plain = grid(while_tuning(sweep)), grid(parse_sweep(text_of(tune=None, data="digits")))
        assert {point.spec.data.name for point in stage} == {"breast_cancer"}
        assert sweep.tune is not None
        settings = {setting_of(point.spec, point.target_epsilon, "auto", sweep.tune) for point in plain}
        assert {point.setting for point in stage} == settings

    @pytest.mark.parametrize(
        "tune",
        [{}, {"seeds": [5, 6]}, {"privacy": "public", "data": "breast_cancer"}, {"samples": 3, "search": "random"}],
        ids=["unaccounted", "seeds", "public", "random"],
    )
    def test_what_is_written_of_a_tuning_is_what_is_planned(self, tune: dict[str, Any]) -> None:
        others = {"release": "private", "accounting": {"also": ["rdp"], "group_sizes": [1, 4], "cpus": 0.5}}
        text = text_of(tune={**TUNE, **tune}, attacks={"loss_threshold": True}, **others)
        assert parse_sweep(tuning_stage(parse_sweep(text), text)) == while_tuning(parse_sweep(text))

    def test_a_plan_shows_the_tuning(self) -> None:
        plan = plan_sweep(parse_sweep(text_of()))
        assert plan.refusals == ()
        assert len(plan.trials) == 2 + 8
        assert "these are the trials of the tuning, 10 in all" in plan.notes[-1]
        assert "every setting (3) is trained with each of the sweep's seeds (2)" in plan.notes[-1]

    def test_a_plan_of_which_every_trial_is_refused_counts_none(self) -> None:
        missing = {"name": "csv", "path": "/missing.csv", "label": "y", "public_fraction": 0.2}
        plan = plan_sweep(parse_sweep(text_of(data=missing)))
        assert plan.trials == ()
        assert len(plan.refusals) == 10
        assert not any("in all" in warning for warning in plan.warnings)


BRACES = {
    "name": "braces",
    "data": "{name: digits, public_fraction: 0.2}",
    "model": "logistic",
    "sampling": "{method: poisson, batch_size: 64}",
    "epochs": "1",
    "clipping": "flat",
    "privacy": "{target_epsilon: 3, delta: 1e-5}",
    "tune": "{parameters: {clipping.bound: [1, 2]}, privacy: unaccounted}",
}


def test_what_dpsweep_writes_belongs_to_tune() -> None:
    with pytest.raises(InvalidInput, match="adapted belongs to a section tune"):
        parse_sweep(text_of(tune=None, adapted={"candidates": []}))


@pytest.mark.parametrize(
    ("tune", "changes", "message"),
    [
        ({"parameters": {"clipping.bund": [1]}}, {}, "no clipping of the sweep takes 'bund'"),
        ({"parameters": {"cliping.bound": [1]}}, {}, "unknown place 'cliping.bound'; did you mean 'clipping'"),
        ({"parameters": {"sampling.method": ["fixed"]}}, {}, "unknown place 'sampling.method'"),
        ({"parameters": {"sampling.batch_size": ["x"]}}, {}, "sampling.batch_size needs a list of whole numbers"),
        ({"parameters": {"epochs": [0]}}, {}, "epochs needs a list of whole numbers of at least 1"),
        ({}, {"adapted": {"candidates": [{"x.y": 1}]}}, "adapted has other parameters than tune"),
        ({"parameters": {"clipping.bound": {"log_uniform": [0, 1]}}, "search": "random", "samples": 2}, {}, "above 0"),
        ({"parameters": {"clipping.bound": {"uniform": [1, 2]}}}, {}, "no ranges, as for clipping.bound"),
        ({"parameters": {"clipping.bound": []}}, {}, "expected a list of values"),
        ({"search": "random"}, {}, "needs samples"),
        ({"search": "optuna"}, {}, "search optuna needs samples"),
        ({"samples": 3}, {}, "no samples"),
        ({"privacy": "public"}, {}, "belong together"),
        ({"data": "digits"}, {}, "belong together"),
        (
            {"privacy": "public", "data": {"name": "digits", "split_seed": 7}},
            {"data": ["breast_cancer", {"name": "digits", "keep": {"8": 0.1}}]},
            "tune.data is digits, whose records the sweep protects",
        ),
        ({"privacy": "private_selection"}, {}, "private_selection needs trials"),
        ({"trials": 3}, {}, "trials is of privacy private_selection"),
        ({"privacy": "private_selection", "trials": 1.0}, {}, "greater than 1"),
        (
            {"privacy": "private_selection", "trials": 3, "search": "optuna", "samples": 4},
            {"noise_source": "os_entropy"},
            "candidates that do not follow results; use search: grid",
        ),
        ({"seeds": [1]}, {}, "1 is a seed of the sweep too"),
        ({}, {"data": "digits"}, "never by the test data that are reported"),
        ({}, {"scheduler": {"name": "asha"}}, "but asha stops some; use fifo"),
        ({}, {"seeds": [0], "epochs": [1], "zip": ["seeds", "epochs"]}, "zip cannot pair seeds"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tune: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        tuned(tune, **changes)
