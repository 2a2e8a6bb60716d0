"""A plan recommends a way to protect users, by rows per user that are declared or were released with noise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dpsweep.accounting import account
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.commands.plan_notes import release_lines, rows_source, ways_lines
from dpsweep.orchestration.comparison.power import design, lines
from dpsweep.orchestration.sweeps.people import Way, _best, comparisons
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.workers.spec import UserSampling
from tests.known import known
from tests.orchestration.invoking import invoked
from tests.orchestration.sample_people import data_of, sweep_of_people, write_people

COUNTS = {1: 30, 2: 40}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_people(tmp_path_factory.mktemp("people") / "people.csv")


def planned(table: Path, **privacy: object) -> tuple[SweepSpec, Plan]:
    sweep = parse_sweep(sweep_of_people(table, **{"noise_multiplier": None, "target_epsilon": 4, **privacy}))
    return sweep, plan_sweep(sweep)


def test_ways_are_compared_at_equal_compute_by_calibrated_runs(table: Path) -> None:
    sweep, plan = planned(table, rows_per_user={"users": COUNTS})
    (found,) = comparisons(sweep, plan.trials)
    assert (found.users, found.rows, found.steps, found.parameters) == (70, 8, plan.trials[0].trace.steps, 6)
    assert [(way.sampling, way.most) for way in found.ways] == [
        *(("els", 1), ("uls", 1), ("els", 2), ("uls", 2)),
    ]
    by_way = {(way.sampling, way.most): way for way in found.ways}
    assert by_way["els", 1].used == pytest.approx(70 / 110)
    assert [by_way["uls", most].members for most in (1, 2)] == [8.0, 4.0]
    assert by_way["els", 1].noise_multiplier == by_way["uls", 1].noise_multiplier
    for (_, most), way in by_way.items():
        assert way.noise == pytest.approx(way.noise_multiplier / way.members)
        shorter = (30 + 40 * most) / 70 if way.sampling == "uls" else 1.0
        assert way.unrelated == pytest.approx(way.noise / shorter**0.5)
    assert found.els == by_way["els", 2], "els keeps the median number of rows"


def way(sampling: UserSampling, most: int, noise: float, unrelated: float) -> Way:
    return Way(sampling, most, 1.0, 1.0, 1.0, noise, unrelated)


def test_the_verdict_holds_however_alike_the_rows_of_a_user_are() -> None:
    ways = [way("els", 1, 1.0, 1.0), way("uls", 1, 1.0, 1.0), way("els", 4, 2.0, 2.0)]
    assert _best([*ways, way("uls", 4, 5.0, 2.5)], 4)[0] == "els"
    assert _best([*ways, way("uls", 4, 3.0, 1.5)], 4)[0] == "unknown"
    surely = [*ways, way("uls", 4, 1.5, 0.8), way("uls", 8, 1.9, 0.7), way("uls", 16, 2.1, 0.6)]
    verdict, els, uls = _best(surely, 4)
    assert (verdict, els and els.most, uls and uls.most) == ("uls", 4, 8), "16 rows have more noise if they are alike"
    assert _best(ways, 4) == ("unreachable", None, None)


def test_a_released_distribution_is_paid_for_by_every_private_trial(table: Path) -> None:
    both = {"user_sampling": ["els", "uls"], "noise_multiplier": 8, "target_epsilon": None}
    _, free = planned(table, **both)
    _, paid = planned(table, rows_per_user={"users": COUNTS, "noise_multiplier": 2}, **both)
    for one, other in zip(free.trials, paid.trials, strict=True):
        assert one.key != other.key
        assert other.worst_case.epsilon > 1.5 * one.worst_case.epsilon
    els, uls = (trial.trace for trial in paid.trials)
    alone = [replace(trace, segments=()) for trace in (els, uls)]
    assert account(alone[0], 1e-4).epsilon == pytest.approx(account(alone[1], 1e-4).epsilon, rel=1e-6)


@pytest.mark.long
def test_plan_says_where_the_numbers_come_from_and_releases_them_on_request(table: Path, tmp_path: Path) -> None:
    def output(text: str, *options: str) -> str:
        (tmp_path / "sweep.yaml").write_text(text)
        return invoked("plan", tmp_path / "sweep.yaml", *options).output

    undeclared = output(sweep_of_people(table))
    assert "which is private. Declare privacy.rows_per_user" in undeclared
    shown = output(sweep_of_people(table), "--release-rows-per-user", "1")
    assert re.search(r"alone it costs ε \d\.\d+ per user at δ = 0\.0001", shown)
    section = yaml.safe_load(shown[shown.index("  rows_per_user:") :])
    declared = sweep_of_people(table, noise_multiplier=None, target_epsilon=6, **section)
    found = output(declared)
    assert "released with noise multiplier 1, which every ε includes" in found
    assert re.search(r"recommended: .*max_records_per_user: \d", found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unit": "example", "user_sampling": None, "max_records_per_user": None}, "unit is example"),
        ({"rows_per_user": {"users": {}}}, "rows_per_user.users"),
        ({"adjacency": "fixed_graph"}, "fixed_graph takes them as known"),
        (
            {"unit": "example", "user_sampling": None, "max_records_per_user": None, "rows_per_user": None}
            | {"adjacency": "fixed_graph"},
            "adjacency is fixed_graph, which is of users",
        ),
        ({"rows_per_user": {"users": {0: 4}}}, "rows_per_user.users"),
        ({"rows_per_user": {"users": COUNTS, "noise_multiplier": 0.5}}, "noise_multiplier"),
    ],
)
def test_what_is_no_distribution_is_refused(table: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        parse_sweep(sweep_of_people(table, **{"rows_per_user": {"users": COUNTS}, **changes}))


@pytest.mark.parametrize("first", [20, 24])
def test_people_of_the_training_table_in_the_test_table_are_found(table: Path, tmp_path: Path, first: int) -> None:
    tested = write_people(tmp_path / "tested.csv", first=first, seed=1)
    data = data_of(table, test_path=str(tested))
    plan = plan_sweep(parse_sweep(sweep_of_people(data)))
    rows = sweep_of_people(data, unit="example", user_sampling=None, max_records_per_user=None)
    by_rows = plan_sweep(parse_sweep(rows))
    (trial,) = by_rows.trials
    said = [each for each in by_rows.warnings if "own rows of the test data, too" in each]
    assert trial.dataset.test_users == 24
    of_one_row = "every ε is that of one row, and a user with several pays more"
    assert any(of_one_row in each for each in by_rows.warnings)
    assert not any(of_one_row in each for each in plan.warnings)
    if first == 24:
        assert plan.trials
        assert not said
        return
    (refused,) = plan.refusals
    assert "people of the training data own rows of the test data, too" in refused.reason
    assert "4 people own rows of both" in (refused.hidden or "")
    assert len(said) == 1
    for public in (refused.reason, *said, repr(trial.dataset)):
        assert not re.search(r"\b4\b", public), "how many they are is private"


def test_owners_that_are_known_need_no_declaration(tmp_path: Path) -> None:
    """The plan counts the rows that stay, for every cap, and the baseline trains on rows of several owners, too."""
    draw = np.random.default_rng(0)
    people = draw.integers(0, 90, (60, 2))
    lines = [f"{a:.3f},{a > 0},p{one},p{other}" for a, (one, other) in zip(draw.normal(size=60), people, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,label,one,other", *lines]) + "\n")
    columns: dict[str, object] = {"label": "label", "user": ["one", "other"]}
    data = {"name": "csv", "path": str(tmp_path / "rows.csv"), **columns}
    calibrated: dict[str, Any] = {"max_records_per_user": [1, 2], "noise_multiplier": None, "target_epsilon": 4}
    content = yaml.safe_load(sweep_of_people(data, adjacency="fixed_graph", **calibrated))
    sweep = parse_sweep(yaml.safe_dump({**content, "clipping": ["none", "flat"]}))
    plan = plan_sweep(sweep)
    assert not plan.refusals
    private = [trial for trial in plan.trials if trial.spec.is_private]
    assert (len(private), {trial.trace.adjacency for trial in private}) == (2, {"fixed_graph"})
    (found,) = comparisons(sweep, plan.trials)
    kept = dict(private[0].dataset.rows_kept or ())
    assert [trial.trace.dataset_size for trial in private] == [kept[1], kept[2]]
    assert [(way.sampling, way.most, way.used) for way in found.ways] == [
        ("els", most, rows / private[0].dataset.train_size) for most, rows in sorted(kept.items())
    ]
    said = " ".join(ways_lines(found, rows_source(sweep)))
    assert re.search(r"els at ε 4 per user.*known under fixed_graph recommended: .* els, max_rec\w+: \d", said)
    with pytest.raises(InvalidInput, match="takes the rows per user as known"):
        list(release_lines(sweep, plan, 1.0))
    unknown = plan_sweep(parse_sweep(sweep_of_people(data, **calibrated)))
    assert "Set privacy.adjacency: fixed_graph" in unknown.reasons()[0]


def test_a_refused_plan_with_known_owners_does_not_call_them_private(table: Path, tmp_path: Path) -> None:
    for adjacency, says_private in (("add_remove", True), ("fixed_graph", False)):
        text = sweep_of_people(table, adjacency=adjacency, user_sampling="els")
        (tmp_path / "refused.yaml").write_text(text.replace("poisson", "shuffle"))
        done = invoked("plan", tmp_path / "refused.yaml")
        assert done.exit_code == 2
        assert ("which is private. Declare privacy.rows_per_user" in " ".join(done.stdout.split())) == says_private


def test_a_plan_counts_users_where_they_are_known(table: Path) -> None:
    sweep = parse_sweep(sweep_of_people(table, max_records_per_user=[1, 2]))
    plan = plan_sweep(sweep)
    found = known(design(sweep, plan.trials))
    assert (found.unit, found.examples) == ("users", plan.trials[0].dataset.test_users)
    assert found.examples < plan.trials[0].dataset.test_size
    assert "test users" in " ".join(lines(found, 1))


@pytest.mark.parametrize("noise", [{"noise_multiplier": 1}, {"noise_multiplier": None, "target_epsilon": 4}])
def test_users_and_correlated_noise_are_refused_in_words(table: Path, noise: dict[str, object]) -> None:
    """The trace raises the reason within `dataclasses.replace`, and nothing of it quotes the data."""
    content = yaml.safe_load(sweep_of_people(table, **noise))
    plan = plan_sweep(parse_sweep(yaml.safe_dump({**content, "noise": {"name": "banded", "bands": 3}})))
    (refused,) = plan.refusals
    assert refused.reason.startswith("no epsilon per user is proven here with correlated noise; use poisson")
    assert refused.hidden is None
