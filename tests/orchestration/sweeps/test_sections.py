"""Which section of resources a trial has, and which lists are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

LIST = [
    {"when": {"model": ["mlp", "resnet20"], "clipping": "dpsgd_f"}, "gpus": 0.5, "labels": {"pool": "train"}},
    {"when": {"clipping": "none"}, "cpus": 4},
    {"cpus": 2, "max_concurrent": 3},
]


def test_a_trial_has_the_first_section_whose_conditions_hold() -> None:
    sweep = parse_sweep(small(resources=LIST, noise="constant", seeds=0))
    found = {point.spec.clipping.name: sweep.reserved(point.spec).amounts for point in grid(sweep)}
    assert found == {
        "none": {"CPU": 4.0},
        "flat": {"CPU": 2.0},
        "dpsgd_f": {"CPU": 1.0, "GPU": 0.5, "label pool=train": 1.0},
    }
    assert sweep.plain()["resources"][2]["max_concurrent"] == 3


def test_one_section_is_for_all() -> None:
    sweep = parse_sweep(small(resources={"cpus": 2}))
    assert {sweep.reserved(point.spec).cpus for point in grid(sweep)} == {2.0}


@pytest.mark.parametrize(
    ("given", "ranks", "bundle"),
    [
        ({}, 1, {"CPU": 1.0}),
        ({"cpus": 4, "gpus": 4}, 4, {"CPU": 1.0, "GPU": 1.0}),
        ({"gpus": 4, "ranks": 4}, 4, {"CPU": 0.25, "GPU": 1.0}),
        ({"gpus": 0.5}, 1, {"CPU": 1.0, "GPU": 0.5}),
        ({"gpus": 0.5, "ranks": 1}, 1, {"CPU": 1.0, "GPU": 0.5}),
        ({"ranks": 3}, 3, {"CPU": 0.3333}),
    ],
)
def test_each_rank_has_its_share(given: Any, ranks: int, bundle: dict[str, float]) -> None:
    (section,) = parse_sweep(small(resources=given)).resources
    assert (section.processes, section.bundle) == (ranks, bundle)


def test_on_several_nodes_each_has_what_one_rank_reserves() -> None:
    (section,) = parse_sweep(small(resources={"cpus": 8, "gpus": 4, "ranks_on": "nodes"})).resources
    assert (section.amounts, section.on_each_node, section.times) == (
        {"CPU": 8.0, "GPU": 4.0},
        {"CPU": 2.0, "GPU": 1.0},
        4,
    )
    (section,) = parse_sweep(small(resources={"cpus": 8, "gpus": 4})).resources
    assert (section.on_each_node, section.times) == (section.amounts, 1)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([{"cpus": 2}, {"cpus": 1}], "the last has none"),
        ([{"when": {"model": "mlp"}}], "the last has none"),
        ([{"when": {"model": "mlp"}, "max_concurrent": 2}, {}], "max_concurrent holds for all trials"),
        ([{"when": {"model": "mlp"}, "max_failures": 0}, {}], "max_failures holds for all trials"),
        ([{"when": {"optimizer": "sgd"}}, {}], "resources.0.when.optimizer"),
        ([{"when": {"model": []}}, {}], "resources.0.when.model"),
        ([], "resources"),
        ({"gpus": 4, "ranks": 2}, "ranks is 2 and gpus 4, but each rank has one GPU or none"),
        ({"gpus": 0.5, "ranks": 2}, "ranks is 2 and gpus 0.5, but"),
        ({"cpus": 0.01, "ranks": 200}, "0.01 CPUs are too few for 200 ranks"),
        ({"ranks": 0}, "resources.ranks"),
        ({"shard": "frozen"}, "shard is 'frozen', but one rank holds all"),
        ({"ranks": 2, "shard": "heads"}, "resources.shard: Input should be 'frozen' or 'all', but got 'heads'"),
        ({"labels": {"pool": "!train"}}, "resources.labels.pool"),
    ],
)
def test_unclear_lists_are_refused(sections: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_sweep(small(resources=sections))
    assert message in str(refused.value)


def test_a_gpu_that_no_trial_would_use_is_not_reserved() -> None:
    with pytest.raises(InvalidInput, match=r"resources\.gpus reserves GPUs, but execution\.device is 'cpu'"):
        parse_sweep(small(resources={"gpus": 1}, execution={"device": "cpu"}))
    assert parse_sweep(small(resources={"gpus": 1}, execution={"device": "cpu", "allow_cpu": True})).execution.allow_cpu
