"""Models and data whose steps `benchmarks.training` measures, with random inputs in the shape of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.steps import Training
from dpsweep.workers.models import build_for_shape
from dpsweep.workers.spec import Component

Data = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""(number of examples, generator) -> inputs and targets."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch sizes.

    data: makes a batch.
    paper_batch: of the papers.
    batch, quick_batch: of one measured step.
    training: micro-batch, loss and precision of every method.
    """

    build: Callable[[], nn.Module]
    data: Data
    paper_batch: int
    batch: int
    quick_batch: int
    training: Training

    def examples(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the same ``batch`` examples at each call, on the device."""
        x, y = self.data(batch, torch.Generator().manual_seed(0))
        return x.to(device), y.to(device)


# -- inputs ------------------------------------------------------------------------------------------------------------


def vectors(shape: tuple[int, ...], classes: int) -> Data:
    """Standard normal inputs of a shape, of random classes."""

    def data(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, *shape, generator=generator)
        return x, torch.randint(classes, (batch,), generator=generator)

    return data


def texts(length: int, vocabulary: int, classes: int) -> Data:
    """Return random tokens, of random classes."""

    def data(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, vocabulary, (batch, length), generator=generator)
        return x, torch.randint(classes, (batch,), generator=generator)

    return data


def continued(length: int, vocabulary: int) -> Data:
    """Return random tokens; each is to be predicted from the ones before it."""

    def data(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, vocabulary, (batch, length + 1), generator=generator)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    return data


def mean_over_tokens(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of each example's own tokens."""
    return functional.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


# -- models ------------------------------------------------------------------------------------------------------------


def of_shape(
    name: str,
    shape: tuple[int, ...],
    sizes: tuple[int, int, int],
    training: Training,
    classes: int = 10,
) -> Workload:
    """Return a bundled model. sizes: batch of the papers, of a measured step, and of a quick one."""

    def build() -> nn.Module:
        return build_for_shape(Component(name), shape, classes, seed=0)

    return Workload(build, vectors(shape, classes), *sizes, training)


def vit(patches: int, width: int, layers: int, heads: int, side: int) -> nn.Module:
    """Return a ViT of torchvision with ten classes."""
    from torchvision.models import VisionTransformer  # late: importing it takes seconds

    torch.manual_seed(0)
    model: nn.Module = VisionTransformer(side, patches, layers, heads, width, 4 * width, num_classes=10)
    for name, parameter in model.named_parameters():
        if name.startswith("heads."):  # zeros would leave no gradient in the layers before
            nn.init.normal_(parameter, std=0.02)
    return model


def bert(**sizes: int) -> nn.Module:
    """Return a BERT classifier without dropout, of the base size unless told."""
    from transformers import BertConfig, BertForSequenceClassification

    from benchmarks.pretrained import NO_DROPOUT, Logits

    torch.manual_seed(0)
    return Logits(BertForSequenceClassification(BertConfig(**sizes, **NO_DROPOUT, num_labels=3)))


def gpt2_lora(**sizes: int) -> nn.Module:
    """GPT-2 with LoRA of rank 8 in its attention, without dropout, of the small size unless told."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks.pretrained import Logits

    torch.manual_seed(0)
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    model = Logits(peft.get_peft_model(GPT2LMHeadModel(config), lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would leave no gradient for lora_A
            nn.init.normal_(parameter, std=0.02)
    return model


def wrn(training: Training, *sizes: int) -> Workload:
    """WRN-16-4 on pictures of 32 x 32."""
    paper, batch, quick = sizes
    return of_shape("wrn16_4", (3, 32, 32), (paper, batch, quick), training)


WORKLOADS: Mapping[str, Workload] = {
    "logistic": of_shape("logistic", (40,), (256, 256, 256), Training(256), classes=2),
    "mlp_1000": of_shape("pca_mlp", (60,), (600, 600, 600), Training(600)),
    "cnn": of_shape("cnn_dpsgdf", (1, 28, 28), (256, 256, 256), Training(256)),
    "resnet20_gn": of_shape("resnet20_gn", (3, 32, 32), (1024, 1024, 64), Training(128)),
    "wrn16_4": wrn(Training(32), 4096, 128, 16),
    "transformer": of_shape("transformer", (3, 32, 32), (256, 256, 128), Training(256)),
}
"""What `benchmarks/training.py` measures unless told otherwise: models whose steps a CPU takes in a second."""

HALF = torch.bfloat16
LARGE: Mapping[str, Workload] = {
    "vit_b16_bf16": Workload(
        partial(vit, 16, 768, 12, 12, 224), vectors((3, 224, 224), 10), 1024, 64, 64, Training(64, autocast=HALF)
    ),
    "bert_base_bf16": Workload(bert, texts(128, 30522, 3), 1024, 64, 64, Training(64, autocast=HALF)),
    "gpt2_lora_bf16": Workload(
        gpt2_lora, continued(256, 50257), 512, 16, 16, Training(16, mean_over_tokens, autocast=HALF)
    ),
    "wrn16_4_bf16": wrn(Training(512, autocast=HALF), 4096, 512, 512),
    "wrn16_4_float32": wrn(Training(512), 4096, 512, 512),
    "bert_base_float32": Workload(bert, texts(128, 30522, 3), 1024, 32, 32, Training(32)),
}
"""The models of the goals on a GPU, in the order in which they are measured there."""

_TINY_BERT = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
_TINY_GPT2 = {"vocab_size": 100, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
TINY: Mapping[str, Workload] = {
    "wrn16_4_bf16": of_shape("cnn_dpsgdf", (1, 28, 28), (4, 4, 4), Training(4, autocast=HALF)),
    "wrn16_4_float32": of_shape("cnn_dpsgdf", (1, 28, 28), (4, 4, 4), Training(4)),
    "vit_b16_bf16": Workload(partial(vit, 4, 32, 1, 2, 8), vectors((3, 8, 8), 10), 4, 4, 4, Training(4, autocast=HALF)),
    "bert_base_bf16": Workload(partial(bert, **_TINY_BERT), texts(8, 100, 3), 4, 4, 4, Training(4, autocast=HALF)),
    "gpt2_lora_bf16": Workload(
        partial(gpt2_lora, **_TINY_GPT2), continued(8, 100), 4, 4, 4, Training(4, mean_over_tokens, autocast=HALF)
    ),
}
"""Tiny models under the same names, for a dry run on a CPU; their figures mean nothing."""
