"""Small models of Hugging Face and torchvision, of random weights and without dropout, for `benchmarks/models.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import transformers
from torch import Tensor, nn
from torchvision.models import VisionTransformer, mobilenet_v3_small
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

VOCABULARY = 500
Make = Callable[[], nn.Module]


class Logits(nn.Module):
    """Wraps a Hugging Face model so that it returns its logits, of tokens or of pictures."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = (self.model(x) if x.is_floating_point() else self.model(input_ids=x)).logits
        return logits


class Mean(nn.Module):
    """Classifies the mean of the states that a Hugging Face encoder returns."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.model(input_ids=x).last_hidden_state.mean(1))
        return logits


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 512, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip


def bert() -> nn.Module:
    """Return a small BERT classifier without dropout."""
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **options))
    return model


def gpt2() -> nn.Module:
    """Return a small GPT-2 classifier without dropout."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=128, n_layer=2, n_head=4, num_labels=3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2ForSequenceClassification(config)
    return model


def llama() -> nn.Module:
    """Return a small Llama classifier."""
    model: nn.Module = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))
    return model


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def opt() -> nn.Module:
    """Return a small OPT classifier."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, ffn_dim=512,
        max_position_embeddings=64, word_embed_proj_dim=128, dropout=0.0, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    model: nn.Module = transformers.OPTForSequenceClassification(config)
    return model


def deberta() -> nn.Module:
    """Return a small DeBERTa v3 classifier."""
    config = transformers.DebertaV2Config(
        **SIZES, **NO_DROPOUT, relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    model: nn.Module = transformers.DebertaV2ForSequenceClassification(config)
    return model


def roberta() -> nn.Module:
    """Return a small RoBERTa classifier; its positions begin behind that of padding."""
    config = transformers.RobertaConfig(**{**SIZES, "max_position_embeddings": 66}, **NO_DROPOUT)
    model: nn.Module = transformers.RobertaForSequenceClassification(config)
    return model


def distilbert() -> nn.Module:
    """Return a small DistilBERT classifier."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=128, n_layers=2, n_heads=4, hidden_dim=512, max_position_embeddings=64,
        num_labels=3, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.DistilBertForSequenceClassification(config)
    return model


def t5() -> nn.Module:
    """Return a small encoder of T5, of whose outputs the mean is classified."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return Mean(transformers.T5EncoderModel(config), 128)


def mistral() -> nn.Module:
    """Return a small Mistral classifier, with two heads of keys and values."""
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2)
    model: nn.Module = transformers.MistralForSequenceClassification(config)
    return model


def qwen() -> nn.Module:
    """Return a small Qwen2 classifier, with two heads of keys and values."""
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=2)
    model: nn.Module = transformers.Qwen2ForSequenceClassification(config)
    return model


def swin() -> nn.Module:
    """Return a small Swin classifier of pictures of 32 x 32."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3,
        drop_path_rate=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.SwinForImageClassification(config)
    return model


def vit() -> nn.Module:
    """Return a small ViT of torchvision, for pictures of 32 x 32."""
    model: nn.Module = VisionTransformer(32, 4, 2, 4, 128, 256, num_classes=3)
    return model


def convnext() -> nn.Module:
    """Return a small ConvNeXt."""
    stages = [CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)]
    model: nn.Module = ConvNeXt(stages, stochastic_depth_prob=0.0, num_classes=3)
    return model


def mobilenet() -> nn.Module:
    """MobileNetV3 with group normalisation."""
    model: nn.Module = mobilenet_v3_small(num_classes=3, norm_layer=partial(nn.GroupNorm, 8), dropout=0.0)
    return model
