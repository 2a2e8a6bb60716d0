"""Private selection before it runs: what is drawn, and what is refused because no proof covers it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dpsweep.accounting import RandomTrials
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.grid import grid, settings_of
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.tune import Winner
from dpsweep.orchestration.sweeps.tuning_stages import draw_runs, selection_stage, tuned_stage
from tests.orchestration.sample_grids import small

TUNE = {
    "parameters": {"optimizer.learning_rate": [0.1, 1, 10]},
    "privacy": "private_selection",
    "trials": 3,
    "shape": 0,
}
SELECTED = {
    "data": {"name": "digits", "public_fraction": 0.2},
    "noise_source": "os_entropy",
    "noise": "constant",
    "clipping": ["none", "flat"],
    "tune": TUNE,
}


def sweep_of(**changes: object) -> SweepSpec:
    return parse_sweep(small(**{**SELECTED, **changes}))


def test_numbers_follow_the_law_and_candidates_are_uniform() -> None:
    law, settings = RandomTrials(5.0), [str(place) for place in range(4000)]
    drawn = draw_runs(settings, law, 4)
    numbers = [len(drawn[setting]) for setting in settings]
    assert sum(numbers) / len(numbers) == pytest.approx(5.0, abs=5 * 20**0.5 / len(numbers) ** 0.5)
    assert numbers.count(1) / len(numbers) == pytest.approx(0.2, abs=0.04), "geometric"
    runs = [run for setting in settings for run in drawn[setting]]
    assert len({run.seed for run in runs}) == len(runs)
    counts = Counter(run.candidate for run in runs)
    assert set(counts) == {0, 1, 2, 3}
    assert all(abs(count / len(runs) - 0.25) < 0.02 for count in counts.values())


def test_every_seed_of_every_setting_is_selected_by_itself() -> None:
    sweep = sweep_of()
    assert sweep.tune is not None
    settings = settings_of(sweep, sweep.tune)
    assert len(settings) == 2 * 2
    drawn = draw_runs(settings, RandomTrials(3.0, 0.0), 3)
    stage = parse_sweep(selection_stage(sweep, small(**SELECTED), drawn))
    points = grid(stage)
    assert Counter(point.setting for point in points) == {name: len(runs) for name, runs in drawn.items()}
    for point in points:
        run = drawn[point.setting][point.candidate or 0]
        assert point.spec.seed == run.seed
        assert point.spec.optimizer.params["learning_rate"] == [0.1, 1, 10][run.candidate]
        assert point.spec.selection == (RandomTrials(3.0, 0.0) if point.is_private else None)
    winners = {
        name: Winner(values={"optimizer.learning_rate": 1}, score=0.5, candidates=3, seed=place)
        for place, name in enumerate(settings)
    }
    best = grid(parse_sweep(tuned_stage(small(**SELECTED), winners)))
    assert [point.labels["seed"] for point in best] == [0, 1, 0, 1]
    assert {point.spec.seed for point in best} == set(range(4))
    by_key = {point.key: point for point in best}
    for point in best:
        if point.is_private:
            assert by_key[point.baseline or ""].labels["seed"] == point.labels["seed"]
    unlike = next(point for point in points)
    assert unlike.key.startswith("non-private-seed")


@pytest.mark.parametrize(
    ("tune", "changes", "message"),
    [
        ({}, {"data": "digits"}, "never by the test data"),
        ({}, {"noise_source": "seeded"}, "noise_source seeded lets whoever knows a seed subtract the noise"),
        ({}, {"release": {"name": "private", "noise_multiplier": 30}}, "release private shows statistics"),
        ({}, {"audit": {"canaries": 10}}, "attacks and audits examine single runs"),
        ({}, {"attacks": {"loss_threshold": True}}, "attacks and audits examine single runs"),
        (
            {},
            {"privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "budget": {"epsilon": 2}}},
            "a budget ends runs at different steps",
        ),
        ({}, {"accounting": {"also": ["gdp"]}}, "the accountant gdp covers no selection; choose auto, pld, rdp"),
        ({}, {"noise": {"name": "validation", "factor": 0.7, "period": 1}}, "a validation schedule follows results"),
        ({"parameters": {"epochs": [1, 2]}}, {}, "candidates of another epochs cost differently"),
        ({"parameters": {"sampling.batch_size": [64]}}, {}, "candidates of another sampling.batch_size cost"),
        ({}, {"scheduler": {"name": "asha"}}, "asha stops some"),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(tune: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        sweep_of(tune={**TUNE, **tune}, **changes)
