"""Adapters of peft on a BERT of random weights, as users write them, which the tests of plans name by import path."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen trunk with an adapter, its classifier and the adapter in single precision."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int, adapter: str, trunk: str = "float32") -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=24, num_labels=num_classes,
        )  # fmt: skip
        bert = transformers.BertForSequenceClassification(config).to(getattr(torch, trunk))
        self.model = peft.get_peft_model(bert, _adapter(adapter))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=x).logits
        return logits


def _adapter(name: str) -> Any:
    projections = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
    return {
        "lora": peft.LoraConfig(**projections, r=4),
        "dora": peft.LoraConfig(**projections, r=4, use_dora=True),
        "ia3": peft.IA3Config(task_type="SEQ_CLS"),
        "prompt": peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4),
        "oft": peft.OFTConfig(**projections, oft_block_size=4),
    }[name]
