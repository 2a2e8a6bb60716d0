"""Families of transformers, small and of random weights, and adapters of peft on one of them.

transformers and peft are imported when a model is made: they take seconds, and the gate reads the table alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.models.brought import Brought, Data
from tests.models.of_torchvision import NO_BATCH, in_groups

CLASSES, VOCABULARY, WIDTH = 4, 50, 16
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "num_labels": CLASSES,
    **TOKENS,
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 24,
    "n_inner": 24,
    "num_labels": CLASSES,
    **TOKENS,
}
PICTURES = {"image_size": 32, "patch_size": 8}
SEEING = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": CLASSES,
    **PICTURES,
}
BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}


class Logits(nn.Module):
    """Returns the logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


class Mean(nn.Module):
    """Classifies the mean of the last hidden states."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.model(x).last_hidden_state.mean(1))
        return logits


def shipped(name: str, task: str, **sizes: object) -> Any:
    """The class ``name + task`` of transformers from a random configuration."""
    import transformers

    return getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**sizes))


def of_text(name: str, **sizes: object) -> nn.Module:
    return Logits(shipped(name, "ForSequenceClassification", **{**SIZES, **sizes}))


def of_gpt(name: str, **sizes: object) -> nn.Module:
    return Logits(shipped(name, "ForSequenceClassification", **{**GPT, **sizes}))


def of_picture(name: str, **sizes: object) -> nn.Module:
    return Logits(shipped(name, "ForImageClassification", **{**SEEING, **sizes}))


def hidden(name: str, **sizes: object) -> nn.Module:
    return Mean(shipped(name, "Model", **{**SIZES, **sizes}), WIDTH)


def t5(task: str = "EncoderModel") -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return Mean(shipped("T5", task, vocab_size=VOCABULARY, **sizes), WIDTH)


def bart() -> nn.Module:
    parts = {f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in BART.items()}
    return hidden("Bart", d_model=WIDTH, **parts)


def xlnet() -> nn.Module:
    sizes = {"d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 24, "num_labels": CLASSES}
    return Logits(shipped("XLNet", "ForSequenceClassification", vocab_size=VOCABULARY, **sizes))


def adapted(how: str, **options: object) -> nn.Module:
    """A BERT with an adapter, as users of peft write it."""
    import peft

    bert = shipped("Bert", "ForSequenceClassification", **SIZES)
    return Logits(peft.get_peft_model(bert, getattr(peft, f"{how}Config")(task_type="SEQ_CLS", **options)))


def biases() -> nn.Module:
    """BitFit: biases and the classifier train, all else is frozen."""
    model = of_text("Bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or "classifier" in name)
    return model


def last_layer(**options: object) -> nn.Module:
    """A trunk in evaluation mode, of which the classifier alone trains."""
    model = shipped("Bert", "ForSequenceClassification", **{**SIZES, **options}).requires_grad_(False)
    model.classifier.requires_grad_(True)
    return Logits(model)


def swin() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    return Logits(shipped("Swin", "ForImageClassification", num_labels=CLASSES, **sizes))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return of_picture("ResNet", **sizes)


PROJECTIONS = {"target_modules": ["query", "value"]}
Make = Callable[[], nn.Module]

READERS: Mapping[str, Make] = {
    "BERT": partial(of_text, "Bert"),
    "BERT, last layer alone": last_layer,
    "BERT, biases alone": biases,
    "RoBERTa": partial(of_text, "Roberta"),
    "XLM-RoBERTa": partial(of_text, "XLMRoberta"),
    "CamemBERT": partial(of_text, "Camembert"),
    "DistilBERT": partial(of_text, "DistilBert", dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24),
    "ALBERT": partial(of_text, "Albert", embedding_size=8),
    "ELECTRA": partial(of_text, "Electra", embedding_size=8),
    "DeBERTa": partial(of_text, "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DeBERTa v3": partial(
        of_text, "DebertaV2", relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["c2p", "p2c"],
    ),
    "MPNet": partial(of_text, "MPNet"),
    "ERNIE": partial(of_text, "Ernie"),
    "RoFormer": partial(of_text, "RoFormer"),
    "MobileBERT": partial(of_text, "MobileBert", embedding_size=16, intra_bottleneck_size=16),
    "SqueezeBERT": partial(of_text, "SqueezeBert", embedding_size=WIDTH),
    "ConvBERT": partial(of_text, "ConvBert", embedding_size=WIDTH, head_ratio=1),
    "FNet": partial(of_text, "FNet"),
    "XLNet": xlnet,
    "Nystromformer": partial(of_text, "Nystromformer", segment_means_seq_len=12, num_landmarks=4),
    "ModernBERT": partial(of_text, "ModernBert", cls_token_id=1, sep_token_id=2),
    "T5 encoder": t5,
    "BART": bart,
    "GPT-2": partial(of_gpt, "GPT2"),
    "GPT-Neo": partial(of_text, "GPTNeo", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]),
    "GPT-J": partial(of_gpt, "GPTJ", rotary_dim=4),
    "GPT-NeoX": partial(of_text, "GPTNeoX"),
    "OPT": partial(of_text, "OPT", ffn_dim=24, word_embed_proj_dim=WIDTH),
    "BLOOM": partial(of_text, "Bloom", n_layer=2, n_head=2),
    "Falcon": partial(of_text, "Falcon"),
    "Llama": partial(of_text, "Llama", num_key_value_heads=1),
    "Mistral": partial(of_text, "Mistral", num_key_value_heads=1),
    "Qwen2": partial(of_text, "Qwen2", num_key_value_heads=1),
    "Qwen3": partial(of_text, "Qwen3", num_key_value_heads=1, head_dim=8),
    "Gemma": partial(of_text, "Gemma", num_key_value_heads=1, head_dim=8),
    "Gemma 2": partial(of_text, "Gemma2", num_key_value_heads=1, head_dim=8),
    "Phi": partial(of_text, "Phi"),
    "Phi-3": partial(of_text, "Phi3", num_key_value_heads=1),
    "StableLM": partial(of_text, "StableLm", num_key_value_heads=1),
    "Mixtral": partial(of_text, "Mixtral", num_key_value_heads=1, num_local_experts=2),
    "Mamba": partial(hidden, "Mamba", state_size=4),
}  # fmt: skip
SEERS: Mapping[str, Make] = {
    "ViT": partial(of_picture, "ViT"),
    "DeiT": partial(of_picture, "DeiT"),
    "BEiT": partial(of_picture, "Beit"),
    "DINOv2": partial(of_picture, "Dinov2", mlp_ratio=1),
    "Swin": swin,
    "ConvNeXT": partial(of_picture, "ConvNext", patch_size=4, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]),
    "ResNet": resnet,
    "ResNet, group norm": lambda: in_groups(resnet()),
    "PoolFormer": partial(
        of_picture, "PoolFormer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], drop_path_rate=0.0
    ),
    "SegFormer": partial(
        of_picture, "Segformer", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2], mlp_ratios=[1, 1, 1, 1], sr_ratios=[4, 2, 1, 1],
    ),
}  # fmt: skip
ADAPTERS: Mapping[str, Make] = {
    "LoRA": partial(adapted, "Lora", r=2, **PROJECTIONS),
    "rank-stabilised LoRA": partial(adapted, "Lora", r=2, use_rslora=True, **PROJECTIONS),
    "DoRA": partial(adapted, "Lora", r=2, use_dora=True, **PROJECTIONS),
    "AdaLoRA": partial(adapted, "AdaLora", init_r=2, target_r=1, total_step=100, **PROJECTIONS),
    "LoHa": partial(adapted, "LoHa", r=2, **PROJECTIONS),
    "LoKr": partial(adapted, "LoKr", r=2, **PROJECTIONS),
    "VeRA": partial(adapted, "Vera", r=4, **PROJECTIONS),
    "OFT": partial(adapted, "OFT", oft_block_size=4, **PROJECTIONS),
    "IA3": partial(adapted, "IA3"),
    "layer norms": partial(adapted, "LNTuning", target_modules=["LayerNorm"]),
    "prompt tuning": partial(adapted, "PromptTuning", num_virtual_tokens=2),
    "prefix tuning": partial(adapted, "PrefixTuning", num_virtual_tokens=2),
    "P-tuning": partial(adapted, "PromptEncoder", num_virtual_tokens=2, encoder_hidden_size=WIDTH),
}

PER_EXAMPLE = frozenset({"Mamba", "Mixtral", "OFT"})
"""Models with layers that run once per example."""
WHY: Mapping[str, str] = {
    "XLNet": "do not change the loss",
    "DINOv2": "do not change the loss",
    "PoolFormer": "do not change the loss",
    "Nystromformer": r"depend on others of their batch, from module '.*attention\.self' \(Nystromformer",
    "ResNet": NO_BATCH,
}
"""Why models are refused as shipped."""


def _brought(name: str, make: Make, data: Data) -> Brought:
    if name in WHY:
        return Brought(make, data, "refused", WHY[name])
    return Brought(make, data, "generic path" if name in PER_EXAMPLE else "trains")


TRANSFORMERS: Mapping[str, Brought] = {
    **{f"{name} of transformers": _brought(name, make, "tokens") for name, make in READERS.items()},
    **{f"{name} of transformers": _brought(name, make, "pictures") for name, make in SEERS.items()},
    **{f"{name} of BERT": _brought(name, make, "tokens") for name, make in ADAPTERS.items()},
}
