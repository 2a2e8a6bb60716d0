"""Plans try data, preprocessing, model, loss and augmentation together, as a worker would combine them."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from dpsweep.orchestration.commands.printed_tables import plan_lines
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.orchestration.sample_grids import small
from tests.workers.data_folders import make_texts, make_tokenizer

DIGITS = {"name": "digits"}
TOKENS = {"name": "own_models:tokens"}
TRANSFORMER = {"name": "transformer", "vocabulary": 50, "width": 8, "depth": 1, "heads": 2}
ONE_BY_ONE = {"method": "poisson", "batch_size": 1}
PCA = {"name": "dp_pca", "dimensions": 5, "noise_multiplier": 8.0}


def planned(**changes: object) -> Plan:
    few = {"clipping": "flat", "noise": "constant", "seeds": 0}
    privacy = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}
    batch = {"method": "poisson", "batch_size": 16}
    sweep = parse_sweep(small(**{"data": DIGITS, "sampling": batch, "privacy": privacy, **few, **changes}))
    return plan_sweep(sweep, permitted(sweep, Path(__file__).parents[1]))


def reason(**changes: object) -> str:
    """Why every trial is refused, which is one line."""
    plan = planned(**changes)
    assert not plan.trials
    (line,) = plan.reasons()
    assert "\n" not in line
    return line


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"data": TOKENS, "model": TRANSFORMER},
        {"data": TOKENS, "model": "own_models:Embedded"},
        {"data": TOKENS, "preprocessing": PCA},
        {"preprocessing": PCA, "model": "pca_mlp"},
        {"model": "own_models:FromZero"},
        {"loss": "own_models:smoothed"},
        {"loss": {"name": "own_models:smoothed", "smoothing": 0.2}},
        {"model": {"name": "wrn16_4"}, "augmentation": {"name": "flip_and_crop", "multiplicity": 16}},
        {
            "data": {"name": "own_models:tokens", "examples": 2, "test_fraction": 0.5},
            "model": TRANSFORMER,
            "sampling": ONE_BY_ONE,
        },
    ],
)
def test_what_can_run_is_planned(changes: dict[str, object]) -> None:
    assert planned(**changes).refusals == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preprocessing": {**PCA, "dimensions": 0}}, "dimensions of dp_pca is 0, but must be at least 1"),
        ({"preprocessing": {**PCA, "noise_multiplier": 0}}, "noise_multiplier of dp_pca is 0"),
        ({"preprocessing": {"name": "robust_ranges", "columns": -1, "noise_multiplier": 8}}, "columns .* is -1"),
        (
            {"learning_rate_schedule": {"name": "constant", "warmup_epochs": 50}},
            r"warmup_epochs is 50, but epochs is \d+;",
        ),
        ({"optimizer": {"name": "sgd", "learning_rate": 0}}, "learning_rate is 0, but must be"),
        ({"model": {"name": "mlp", "hidden": [10**10]}}, "does not fit in the memory of this machine"),
    ],
)
def test_values_of_a_component_are_refused_once(changes: dict[str, object], said: str) -> None:
    line = reason(**changes)
    assert len(re.findall(said, line)) == 1


def test_a_plan_says_which_parameters_train_and_what_runs_once_per_example() -> None:
    """What a user froze is no warning; a slow layer is one."""
    assert planned().warnings == planned().notes == ()
    half = planned(model="own_models:FrozenTrunk")
    ((frozen,), line) = half.notes, plan_lines(half)[-1]
    assert half.warnings == ()
    assert frozen == line == ("model 'own_models:FrozenTrunk' trains 90 of its 610 parameters: head.weight, head.bias")
    (slow,) = planned(model="own_models:Slow").warnings
    assert slow.startswith("model 'own_models:Slow' runs cell (LSTM) once per example, as its rule does not ")


def test_a_plan_refuses_ranks_that_would_divide_what_they_cannot() -> None:
    divided = {"ranks": 2, "shard": "frozen"}
    line = reason(resources=divided)
    assert "of which the model has none; leave shard out, or freeze the layers" in line
    assert planned(model="own_models:FrozenBlocks", resources=divided).refusals == ()
    whole = {"model": {"name": "mlp", "hidden": [8, 8]}, "resources": {**divided, "shard": "all"}}
    assert planned(**whole).refusals == ()
    line = reason(**whole, averaging="ema")
    assert "averaging 'ema' evaluates a copy of the model, and with resources.shard: all no rank has all" in line
    assert planned(model="own_models:Peeking").refusals == ()
    line = reason(model="own_models:Peeking", resources=divided)
    assert "model 'own_models:Peeking': it reads parameters of the layer blocks.0 without calling it" in line


def test_a_sweep_may_name_parameters_that_need_no_gradient() -> None:
    plan = planned(model="own_models:Unused", without_gradient=["pooler.*"])
    assert plan.refusals == ()
    (allowed,) = plan.warnings
    assert allowed.endswith("gives pooler.weight, pooler.bias no gradient, as without_gradient allows")


def test_names_that_fit_nothing_are_told() -> None:
    resources = [{"when": {"model": "mpl"}, "cpus": 2}, {"when": {"model": "mlp"}}, {}]
    plan = planned(model=["mlp", "logistic"], without_gradient=["*.bias", "pooler.*"], resources=resources)
    told = [each for each in plan.warnings if "mpl" in each or "pooler" in each]
    assert told == [
        "resources: no trial has model: mpl, for which a section of its own stands; the next that fits counts",
        "model 'mlp' has no trainable parameter called pooler.*, as without_gradient has",
        "model 'logistic' has no trainable parameter called pooler.*, as without_gradient has",
    ]


COMBINATIONS = {
    "a loss that mixes rows": (
        {"loss": "own_models:coupled"},
        r"gradients of .* are not those of each example alone",
    ),
    "what is no loss": (
        {"loss": "own_models:no_loss"},
        r"loss 'own_models:no_loss' returned str, but must return a function of logits",
    ),
    "an unknown parameter of a loss": (
        {"loss": {"name": "own_models:smoothed", "smoothness": 0.1}},
        r"unknown key 'smoothness' of loss 'own_models:smoothed'",
    ),
    "a layer that is not used": (
        {"model": "own_models:Unused"},
        r"model 'own_models:Unused': its parameters pooler.weight, pooler.bias do not change the loss: noise alone",
    ),
    "a frozen adapter": (
        {"model": {"name": "own_models:FrozenTrunk", "adapter": "lora_A"}},
        r"its adapters adapter.lora_A.weight, .* are all frozen, so that only head.weight, head.bias would train",
    ),
    "tokens without an embedding": ({"data": TOKENS}, r"model 'mlp' cannot .*torch.int64.*embeds them"),
    "loss of two classes": ({"loss": "binary_logistic"}, r"loss 'binary_logistic': .*there are 10; use cross_entropy"),
    "augmented rows": (
        {"preprocessing": PCA, "augmentation": "flip_and_crop"},
        r"augmentation 'flip_and_crop': .*needs images",
    ),
    "augmented table": ({"data": "breast_cancer", "augmentation": "flip_and_crop"}, r"needs images"),
    "padding": ({"augmentation": {"name": "flip_and_crop", "padding": 8}}, r"padding of flip_and_crop is 8, but must"),
    "rows that are mixed": ({"model": "own_models:Mixing"}, r"treat the rows of a batch independently"),
    "float pictures": (
        {
            "data": {"name": "own_models:pictures", "whole": False},
            "preprocessing": {"name": "frozen_features", "network": "resnet18"},
        },
        r"needs pictures of bytes \(torch.uint8\), but those of 'pictures' are torch.float32",
    ),
    "tuple": ({"model": "own_models:Pair"}, r"forward returns a tuple, but must return a tensor of logits"),
    "AttributeError": ({"model": "own_models:NoAttribute"}, r"AttributeError in forward"),
    "detached logits": ({"model": "own_models:Detached"}, r"do not depend on a trainable parameter"),
    "whole logits": ({"model": "own_models:Whole"}, r"logits of torch.int64, but they must be floating-point"),
    "logits that are no numbers": (
        {"model": "own_models:NoNumbers"},
        r"losses of the first 3 rows are all NaN or infinite at the initial weights, .*; look for NaN",
    ),
    "numbers for a reader of tokens": (
        {"model": {"name": "hugging_face", "path": "bert"}},
        r"model hugging_face reads token ids, but .* holds numbers; use data: text, or another model",
    ),
    "one row": (
        {"model": "own_models:OneRow"},
        r"for 3 rows it returns the shape \(1, 10\), but must return \(3, 10\)",
    ),
    "no device": ({"model": "own_models:Elsewhere"}, r"(Runtime|NotImplemented)Error in "),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("changes", "expected"), COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_what_would_fail_in_a_worker_is_refused(changes: dict[str, object], expected: str) -> None:
    line = reason(**changes)
    assert re.search(expected, line), line
    if str(changes.get("model")).startswith("own_models"):
        assert line.startswith(f"model {changes['model']!r}"), line


def test_weights_are_tried(tmp_path: Path) -> None:
    text, other, numbers = (str(tmp_path / name) for name in ("text.pt", "other.pt", "numbers.pt"))
    Path(text).write_text("hello world")
    torch.save(nn.Linear(2, 2).state_dict(), other)
    torch.save({"weight": [1, 2]}, numbers)
    pictures = {"name": "own_models:pictures"}
    cases = {
        "/etc/passwd": "/etc/passwd cannot be loaded; save a state dict",
        text: "cannot be loaded",
        numbers: "holds a list under 'weight', but must hold named tensors alone",
        other: "other.pt",
    }
    for weights, expected in cases.items():
        assert expected in reason(data=pictures, model={"name": "resnet20_gn", "initial_weights": weights})
        frozen = {"name": "frozen_features", "network": "resnet18", "weights": weights}
        assert expected in reason(data=pictures, preprocessing=frozen)
    torch.save(torchvision.models.resnet18().state_dict(), other)
    frozen = {"name": "frozen_features", "network": "resnet18", "weights": other}
    assert planned(data=pictures, preprocessing=frozen).refusals == (), "a file that was mended is read again"
    assert "does not hold the weights of torchvision's resnet50" in reason(
        data=pictures, preprocessing={**frozen, "network": "resnet50"}
    )
    torch.save({name: each / 0 for name, each in torchvision.models.resnet18().state_dict().items()}, numbers)
    not_finite = reason(data=pictures, preprocessing={**frozen, "weights": numbers})
    assert re.search("frozen_features.*numbers.pt has NaN or infinite numbers in .* first conv1.weight", not_finite)
    augmented = reason(data=pictures, preprocessing=frozen, augmentation="flip_and_crop")
    assert "flip_and_crop needs images" in augmented


def test_a_plan_leaves_no_trace_of_a_rehearsal(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    frozen = {"name": "frozen_features", "network": "resnet18", "cache": str(tmp_path / "cache")}
    assert planned(data={"name": "own_models:pictures"}, preprocessing=frozen).refusals == ()
    assert torch.equal(before, torch.get_rng_state())
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_the_combination_of_many_trials_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(model="own_models:Linear")
    imported: Any = sys.modules["own_models"].Linear
    built: list[tuple[int, ...]] = []
    initial = imported.__init__

    def counting(self: object, feature_shape: tuple[int, ...], num_classes: int) -> None:
        built.append(feature_shape)
        initial(self, feature_shape, num_classes)

    monkeypatch.setattr(imported, "__init__", counting)
    for model, kept in (("Linear", True), ("Mixing", False)):
        plan = planned(model=f"own_models:{model}", seeds=[0, 1, 2], clipping=["none", "flat", "per_layer"])
        assert len(plan.trials if kept else plan.refusals) == 9
    assert built == [(1, 8, 8)] * 2


LANGUAGE_MODEL = {"name": "language_model", "width": 8, "depth": 1, "heads": 2}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, object]:
    path, tokenizer = make_texts(tmp_path / "texts.csv"), make_tokenizer(tmp_path / "tokenizer.json")
    return {"name": "text", "path": str(path), "text": "body", "tokenizer": str(tokenizer), "max_length": 8}


def test_a_model_may_not_read_the_token_that_it_predicts(texts: dict[str, object]) -> None:
    data = {**texts, "objective": "causal_lm"}
    assert planned(data=data, model=LANGUAGE_MODEL, loss="causal_lm").refusals == ()
    line = reason(data=data, model={**LANGUAGE_MODEL, "causal": False}, loss="causal_lm")
    assert "model 'language_model': its logit at a position changes with later tokens" in line
    masked = planned(data={**texts, "objective": "masked_lm"}, model=LANGUAGE_MODEL, loss="masked_lm")
    assert masked.refusals == ()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LANGUAGE_MODEL, "model language_model does not predict the labels of the data; use model transformer"),
        *(
            ({"name": "hugging_face", "path": "no_folder", "head": head}, f"head {head} does not .*: classification")
            for head in ("causal_lm", "masked_lm")
        ),
    ],
)
def test_a_model_of_tokens_does_not_predict_labels(
    texts: dict[str, object], model: dict[str, object], expected: str
) -> None:
    assert re.search(expected, reason(data={**texts, "label": "mood"}, model=model))


def test_a_model_that_embeds_tokens_is_not_told_to() -> None:
    few = reason(data=TOKENS, model={**TRANSFORMER, "vocabulary": 2})
    assert "cannot take features" in few
    assert "embeds them" not in few
    assert "whole numbers need a model that embeds them" in reason(data=TOKENS, model="mlp")


def test_a_pass_that_fills_the_memory_is_called_so() -> None:
    line = reason(model="own_models:Huge")
    assert "model 'own_models:Huge' does not fit in the memory of this machine (RuntimeError in forward" in line
    assert "cannot take features" not in line


with_adapters = pytest.mark.skipif(
    not all(map(find_spec, ("peft", "transformers"))),
    reason="needs transformers and peft: pip install 'dpsweep[models]'",
)
"""Without an import, which takes seconds in every process that collects tests."""

HALF = {"execution": {"autocast": True}}


def adapted(adapter: str, **params: object) -> dict[str, object]:
    return {"data": TOKENS, "model": {"name": "own_adapters:Adapted", "adapter": adapter, **params}}


@with_adapters
@pytest.mark.thinned(2)
@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "prompt"])
def test_adapters_on_a_trunk_in_half_precision_are_planned(adapter: str) -> None:
    plan = planned(**adapted(adapter, trunk="bfloat16"), **HALF)
    assert plan.refusals == ()
    (trains,) = plan.notes
    assert plan.warnings == ()
    assert "modules_to_save.default.bias" in trains
    assert "more" not in trains, "all that train are named"


@with_adapters
def test_layers_of_one_kind_are_named_once() -> None:
    (trains,) = planned(**adapted("lora")).notes
    assert "model.base_model.model.bert.encoder.layer.*.attention.self.query.lora_A.default.weight (2)" in trains


@with_adapters
def test_a_trunk_in_half_precision_without_autocast_is_refused() -> None:
    line = reason(**adapted("lora", trunk="bfloat16"))
    assert "its frozen parameters are torch.bfloat16" in line
    assert "set execution.autocast: true" in line


@with_adapters
def test_what_runs_once_per_example_is_said_with_reason_and_cost() -> None:
    (slow,) = planned(**adapted("oft")).warnings
    assert "attention.self.query.oft_R.default (2)" in slow
    assert "as what reads its parameters could not be told apart by rows (NotCovered in " in slow
    assert "memory for 96 gradients of each example" in slow
