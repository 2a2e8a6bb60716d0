"""Plans of adapters by peft as they are built, whose first gradients may be 0: what trains, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.orchestration.sweeps.test_plan_combinations import TOKENS, planned, reason

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("peft", "transformers"))),
    reason="needs transformers and peft: pip install 'dpsweep[models]'",
)
"""Without an import, which takes seconds in every process that collects tests."""

HALF = {"execution": {"autocast": True}}


def adapted(adapter: str, **params: object) -> dict[str, object]:
    return {"data": TOKENS, "model": {"name": "own_adapters:Adapted", "adapter": adapter, **params}}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "prompt"])
def test_adapters_on_a_trunk_in_half_precision_are_planned(adapter: str) -> None:
    plan = planned(**adapted(adapter, trunk="bfloat16"), **HALF)
    assert plan.refusals == ()
    (trains,) = plan.warnings
    assert "modules_to_save.default.bias" in trains
    assert "more" not in trains, "all that train are named"


def test_layers_of_one_kind_are_named_once() -> None:
    (trains,) = planned(**adapted("lora")).warnings
    assert "model.base_model.model.bert.encoder.layer.*.attention.self.query.lora_A.default.weight (2)" in trains


def test_a_trunk_in_half_precision_without_autocast_is_refused() -> None:
    line = reason(**adapted("lora", trunk="bfloat16"))
    assert "its frozen parameters are torch.bfloat16" in line
    assert "set execution.autocast: true" in line


def test_what_runs_once_per_example_is_said_with_reason_and_cost() -> None:
    _, slow = planned(**adapted("oft")).warnings
    assert "attention.self.query.oft_R.default (2)" in slow
    assert "as what reads its parameters could not be told apart by rows (NotCovered in " in slow
    assert "memory for 96 gradients of each example" in slow
