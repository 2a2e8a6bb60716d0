"""Models of Hugging Face as shipped, from random configurations: norms equal those of one example at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.workers.gradients.engine import GradientEngine
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.devices import DEVICE

WHY = "needs transformers and peft: pip install 'dpsweep[models]'"

VOCABULARY, LENGTH, WIDTH = 50, 9, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "num_labels": 3,
}
FAST = {"rule", "rewrite", "parameters per row"}


def transformers() -> Any:
    """Late, because each of the processes that share the tests collects this file, and this takes seconds."""
    return pytest.importorskip("transformers", reason=WHY, exc_type=ImportError)


def peft() -> Any:
    return pytest.importorskip("peft", reason=WHY, exc_type=ImportError)


class Logits(nn.Module):
    """Returns logits of tokens, of which 0 is padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return self.model(x).logits  # type: ignore[no-any-return]
        return self.model(input_ids=x, attention_mask=(x != 0).long()).logits  # type: ignore[no-any-return]


class Encoded(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.model(x).last_hidden_state.mean(1))
        return out


def bert() -> nn.Module:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers().BertForSequenceClassification(transformers().BertConfig(**SIZES, **options))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers().GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=4, num_labels=3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers().GPT2ForSequenceClassification(config)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    return transformers().LlamaForSequenceClassification(transformers().LlamaConfig(**SIZES, num_key_value_heads=2))  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = transformers().T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return transformers().T5EncoderModel(config)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    config = transformers().ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers().ViTForImageClassification(config)  # type: ignore[no-any-return]


def opt() -> nn.Module:
    """Flattens rows and positions for its feed-forward layers, and offsets the positions that it looks up."""
    config = transformers().OPTConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        max_position_embeddings=16, word_embed_proj_dim=WIDTH, dropout=0.0, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    return transformers().OPTForSequenceClassification(config)  # type: ignore[no-any-return]


def deberta() -> nn.Module:
    """DeBERTa v3 by its options: keys of relative positions are repeated for all rows and heads."""
    config = transformers().DebertaV2Config(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, relative_attention=True,
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    return transformers().DebertaV2ForSequenceClassification(config)  # type: ignore[no-any-return]


def swin() -> nn.Module:
    """Windows of all rows on one axis, and every second time shifted."""
    config = transformers().SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3,
        drop_path_rate=0.0,
    )  # fmt: skip
    return transformers().SwinForImageClassification(config)  # type: ignore[no-any-return]


PICTURES = ("vit", "swin")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: Logits(bert()),
    "gpt2": lambda: Logits(gpt2()),
    "llama": lambda: Logits(llama()),
    "t5": lambda: Encoded(t5()),
    "vit": lambda: Logits(vit()),
    "opt": lambda: Logits(opt()),
    "deberta": lambda: Logits(deberta()),
    "swin": lambda: Logits(swin()),
}


def adapter(name: str) -> Any:
    projections = ["query", "value", "q_proj", "v_proj"]
    return {
        "lora": peft().LoraConfig(task_type="SEQ_CLS", r=4, target_modules=projections),
        "dora": peft().LoraConfig(task_type="SEQ_CLS", r=4, target_modules=projections, use_dora=True),
        "ia3": peft().IA3Config(task_type="SEQ_CLS", target_modules=projections, feedforward_modules=[]),
        "prompt": peft().PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4),
        "prefix": peft().PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4),
    }[name]


def adapted(make: Callable[[], nn.Module], name: str, trunk: torch.dtype) -> nn.Module:
    """The model with a frozen trunk and an adapter in float32, moved away from where its gradients vanish."""
    model = peft().get_peft_model(make().to(trunk), adapter(name))
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
    x = torch.randn(rows, 3, 16, 16) if name in PICTURES else torch.randint(1, VOCABULARY, (rows, LENGTH))
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
@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "prompt", "prefix"])
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
