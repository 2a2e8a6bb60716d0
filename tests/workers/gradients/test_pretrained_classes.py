"""Models of Hugging Face as shipped, from random configurations: norms equal those of one example at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.workers.gradients.engine import GradientEngine
from tests.models.of_transformers import CLASSES, GPT, SEEING, SIZES, VOCABULARY, WIDTH, Mean, shipped
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("peft", "transformers"))),
    reason="needs transformers and peft: pip install 'dpsweep[models]'",
)
LENGTH = 9
FAST = {"rule", "rewrite", "parameters per row"}
TEXT, PICTURE = "ForSequenceClassification", "ForImageClassification"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Logits(nn.Module):
    """Returns logits of tokens, of which 0 is padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return self.model(x).logits  # type: ignore[no-any-return]
        return self.model(input_ids=x, attention_mask=(x != 0).long()).logits  # type: ignore[no-any-return]


def bert() -> Any:
    return shipped("Bert", TEXT, **SIZES, **NO_DROPOUT)


def llama() -> Any:
    return shipped("Llama", TEXT, **SIZES, num_key_value_heads=1)


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return shipped("T5", "EncoderModel", vocab_size=VOCABULARY, dropout_rate=0.0, **sizes)


def opt() -> Any:
    """Flattens rows and positions for its feed-forward layers, and offsets the positions that it looks up."""
    return shipped("OPT", TEXT, **SIZES, ffn_dim=24, word_embed_proj_dim=WIDTH, dropout=0.0)


def deberta() -> Any:
    """DeBERTa v3 by its options: keys of relative positions are repeated for all rows and heads."""
    options = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    return shipped("DebertaV2", TEXT, **SIZES, **NO_DROPOUT, **options, share_att_key=True, pos_att_type=["c2p", "p2c"])


def swin() -> Any:
    """Windows of all rows on one axis, and every second time shifted."""
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
    return shipped("Swin", PICTURE, num_labels=CLASSES, drop_path_rate=0.0, **sizes)


PICTURES = ("vit", "swin")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: Logits(bert()),
    "gpt2": lambda: Logits(shipped("GPT2", TEXT, **GPT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "llama": lambda: Logits(llama()),
    "t5": lambda: Mean(t5(), WIDTH),
    "vit": lambda: Logits(shipped("ViT", PICTURE, **SEEING, **NO_DROPOUT)),
    "opt": lambda: Logits(opt()),
    "deberta": lambda: Logits(deberta()),
    "swin": lambda: Logits(swin()),
}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "ia3": ("IA3Config", {"feedforward_modules": []}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
}


def adapted(make: Callable[[], nn.Module], name: str, trunk: torch.dtype) -> nn.Module:
    """The model with a frozen trunk and an adapter in float32, moved away from where its gradients vanish."""
    import peft

    kind, options = ADAPTERS[name]
    if "num_virtual_tokens" not in options:
        options = {**options, "target_modules": ["query", "value", "q_proj", "v_proj"]}
    model = peft.get_peft_model(make().to(trunk), getattr(peft, kind)(task_type="SEQ_CLS", **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.2 + 0.2
    return Logits(model)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def batch(name: str, rows: int = 6) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, 32, 32) if name in PICTURES else torch.randint(1, VOCABULARY, (rows, LENGTH))
    if name in ("bert", "gpt2", "llama", "opt", "deberta"):
        x[::2, -2:] = 0  # padding
    return x, torch.arange(rows) % 3


@pytest.mark.thinned(4)
@pytest.mark.parametrize("micro_batch_size", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_as_shipped_take_the_fast_path(name: str, micro_batch_size: int | None) -> None:
    model = MODELS[name]().train()
    engine = GradientEngine(model, per_example_loss, micro_batch_size=micro_batch_size)
    for rows in (6, LENGTH):  # as many rows as positions
        x, y = batch(name, rows)
        expected = gradients_one_by_one(model, x, y)
        got = engine.weighted_sum(x, y, lambda norms: torch.ones_like(norms.norms))
        torch.testing.assert_close(got.norms.norms, norms_of(expected), rtol=1e-5, atol=0)
        for parameter, gradient in got.gradients.items():
            torch.testing.assert_close(gradient, expected[parameter].sum(0), rtol=1e-3, atol=1e-5)
    assert set(engine.forms.values()) <= FAST


@pytest.mark.thinned(6)
@pytest.mark.parametrize("trunk", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("make", [bert, llama], ids=["bert", "llama"])
def test_adapters_of_a_frozen_trunk_take_the_fast_path(
    make: Callable[[], nn.Module], name: str, trunk: torch.dtype
) -> None:
    model, (x, y) = adapted(make, name, trunk), batch("bert")
    half = trunk == torch.bfloat16
    engine = GradientEngine(model, per_example_loss, autocast=trunk if half else None)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
        expected = norms_of(gradients_one_by_one(model, x, y))
    torch.testing.assert_close(engine.norms(x, y).norms, expected, rtol=1e-2 if half else 1e-5, atol=0)
    assert set(engine.forms.values()) <= FAST
