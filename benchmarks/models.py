"""Private and plain steps of models that users bring: time, form of their layers, and error of their norms.

Run `python benchmarks/models.py [--json] [--device cuda]` with the extras `models` and `bench`. A private step is norms
and clipped sum; a plain one is forward and backward pass. Steps take turns in one process with one thread and are timed
in CPU seconds (on a GPU in elapsed seconds), short ones many times in a turn. The median of their ratios is printed.
Opacus is timed with hooks and with ghost clipping, if it supports the model.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from benchmarks import pretrained
from benchmarks.architectures import FTTransformer
from benchmarks.pretrained import VOCABULARY, Logits, Make
from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.machine.devices import choose_device
from dpsweep.workers.models import MODELS as REGISTERED

ROWS, CHECKED, TURNS = 32, 4, 5
SHORTEST_TURN = 0.1
"""Seconds of plain steps in a turn: a single step of 2 ms would be timed with the other methods' data in the cache."""


class Recurrent(nn.Module):
    """Classifies a sequence of vectors."""

    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.cell(x)[0][:, -1])
        return outputs


class Packed(Recurrent):
    """Classifies packed sequences of 10 to 50 vectors; a sequence ends where the first entry of a vector is 0."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] != 0).sum(1).cpu()
        last = self.cell(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
        outputs: Tensor = self.head((last[0] if isinstance(last, tuple) else last)[-1])
        return outputs


def sequences() -> Tensor:
    """Sequences of 50 vectors."""
    return torch.randn(ROWS, 50, 64)


def of_lengths() -> Tensor:
    """Sequences of random lengths, zero beyond their ends."""
    x = torch.randn(ROWS, 50, 64)
    lengths = torch.randint(10, 51, (ROWS, 1, 1))
    return torch.where(torch.arange(50)[:, None] < lengths, x, 0.0)


def adapted(config: Any) -> nn.Module:
    """BERT with the adapter ``config`` of peft, whose trainable parameters are random."""
    model = peft.get_peft_model(pretrained.bert(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.1 + 0.1
    return Logits(model)


def tokens() -> Tensor:
    """Return a batch of token sequences."""
    return torch.randint(1, VOCABULARY, (ROWS, 32))


def pictures() -> Tensor:
    """Return a batch of pictures of 32 x 32."""
    return torch.randn(ROWS, 3, 32, 32)


PROJECTIONS = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
MODELS: dict[str, tuple[Make, Callable[[], Tensor]]] = {
    "BERT": (lambda: Logits(pretrained.bert()), tokens),
    "RoBERTa": (lambda: Logits(pretrained.roberta()), tokens),
    "DistilBERT": (lambda: Logits(pretrained.distilbert()), tokens),
    "DeBERTa v3": (lambda: Logits(pretrained.deberta()), tokens),
    "T5 encoder": (pretrained.t5, tokens),
    "GPT-2": (lambda: Logits(pretrained.gpt2()), tokens),
    "OPT": (lambda: Logits(pretrained.opt()), tokens),
    "Llama": (lambda: Logits(pretrained.llama()), tokens),
    "Mistral": (lambda: Logits(pretrained.mistral()), tokens),
    "Qwen2": (lambda: Logits(pretrained.qwen()), tokens),
    "LoRA of BERT": (lambda: adapted(peft.LoraConfig(**PROJECTIONS, r=8)), tokens),
    "DoRA of BERT": (lambda: adapted(peft.LoraConfig(**PROJECTIONS, r=8, use_dora=True)), tokens),
    "IA3 of BERT": (lambda: adapted(peft.IA3Config(**PROJECTIONS, feedforward_modules=[])), tokens),
    "prompts of BERT": (
        lambda: adapted(peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=8)),
        tokens,
    ),
    "ViT of torchvision": (pretrained.vit, pictures),
    "Swin": (lambda: Logits(pretrained.swin()), pictures),
    "ConvNeXt": (pretrained.convnext, pictures),
    "MobileNetV3": (pretrained.mobilenet, pictures),
    "RNN": (lambda: Recurrent(nn.RNN(64, 64, batch_first=True)), sequences),
    "LSTM": (lambda: Recurrent(nn.LSTM(64, 64, batch_first=True)), sequences),
    "GRU": (lambda: Recurrent(nn.GRU(64, 64, batch_first=True)), sequences),
    "packed RNN": (lambda: Packed(nn.RNN(64, 64, batch_first=True)), of_lengths),
    "packed LSTM": (lambda: Packed(nn.LSTM(64, 64, batch_first=True)), of_lengths),
    "packed GRU": (lambda: Packed(nn.GRU(64, 64, batch_first=True)), of_lengths),
    "FT-transformer": (lambda: FTTransformer(20), lambda: torch.randn(8 * ROWS, 20)),  # as of a table
    "FT-transformer, 32 rows": (lambda: FTTransformer(20), lambda: torch.randn(ROWS, 20)),
    "U-Net": (lambda: REGISTERED["unet"]((3, 32, 32), 3), pictures),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 33 * 33, 3)),
        lambda: torch.randn(ROWS, 8, 16, 16),
    ),
}


def losses(output: Tensor, y: Tensor) -> Tensor:
    """Loss of each example: of its class, or the mean over pixels if there is a prediction for each pixel."""
    if output.dim() == 2:
        return functional.cross_entropy(output, y, reduction="none")
    pixels = y.view(-1, 1, 1).expand(-1, *output.shape[2:])
    return functional.cross_entropy(output, pixels, reduction="none").mean((1, 2))


def seconds(step: Callable[[], object], device: torch.device, steps: int = 1) -> float:
    """CPU seconds of a step, the mean of several; on a GPU elapsed seconds."""
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    for _ in range(steps):
        step()
    if on_gpu:
        torch.cuda.synchronize(device)
    return (clock() - started) / steps


def norm_error(model: nn.Module, engine: GradientEngine, x: Tensor, y: Tensor) -> float:
    """Largest relative error of the norms of a few examples, against autograd on each example alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = engine.norms(x, y).norms
    worst = 0.0
    for row in range(CHECKED):
        loss = losses(model(x[row : row + 1]), y[row : row + 1]).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
        worst = max(worst, float((found[row] - norm).abs() / norm))
    return worst


def ghost_of_opacus(make: Make, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return a step of Opacus with ghost clipping. Raises whatever Opacus refuses the model with."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    torch.manual_seed(0)
    inner = make().train().to(x.device)
    model = GradSampleModuleFastGradientClipping(
        inner, loss_reduction="sum", strict=True, max_grad_norm=1.0, use_ghost_clipping=True
    )

    def step() -> None:
        model.zero_grad()
        model.enable_hooks()
        each = losses(model(x), y)
        each.sum().backward(retain_graph=True)
        weights = model.get_clipping_coef().detach()
        model.zero_grad()
        model.disable_hooks()
        (each * weights).sum().backward()

    step()
    return step


def hooks_of_opacus(make: Make, x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return a step of Opacus with per-example gradients by hooks. Raises whatever Opacus refuses the model with."""
    from opacus.grad_sample import GradSampleModule

    torch.manual_seed(0)
    model = GradSampleModule(make().train().to(x.device), loss_reduction="sum", strict=True)

    def step() -> None:
        model.zero_grad()
        losses(model(x), y).sum().backward()
        squares = [p.grad_sample.flatten(1).square().sum(1) for p in model.parameters() if p.requires_grad]
        weights = (1.0 / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.tensordot(weights, parameter.grad_sample, 1)

    step()
    return step


def measured(name: str, device: torch.device) -> dict[str, object]:
    """Return the result row of one model."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x = make().train().to(device), inputs().to(device)
    y = torch.arange(len(x), device=device) % 3
    engine = GradientEngine(model, losses)
    error = norm_error(model, engine, x, y)

    def plain() -> None:
        model.zero_grad()
        losses(model(x), y).sum().backward()

    def private() -> None:
        engine.weighted_sum_rowwise(x, y, lambda norms, rows: (1.0 / norms.norms).clamp(max=1.0))

    methods: dict[str, Callable[[], object]] = {"dpsweep": private}
    refused: dict[str, str] = {}
    for peer, step_of in (("opacus", hooks_of_opacus), ("ghost", ghost_of_opacus)):
        try:
            methods[peer] = step_of(make, x, y)
        except Exception as reason:  # of any kind, as models differ in what Opacus refuses
            refused[peer] = f"{type(reason).__name__}: {str(reason).strip()[:200]}"
    for step in (plain, *methods.values()):
        step()
    ratios: dict[str, list[float]] = {method: [] for method in methods}
    plain_seconds, steps = [], max(1, int(SHORTEST_TURN / seconds(plain, device)))
    for _ in range(TURNS):
        plain_seconds.append(seconds(plain, device, steps))
        for method, step in methods.items():
            ratios[method].append(seconds(step, device, steps) / plain_seconds[-1])
    return {
        "model": name,
        "plain_ms": round(1e3 * statistics.median(plain_seconds), 2),
        **{method: round(statistics.median(found), 2) for method, found in ratios.items()},
        **refused,
        "norm_error": float(f"{error:.1e}"),
        "forms": dict(Counter(engine.forms.values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object per model")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options = parser.parse_args()
    try:
        device = choose_device(options.device)
    except InvalidInput as error:
        parser.error(f"--device: {error}")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name in options.model or MODELS:
        row = measured(name, device)
        print(
            json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True
        )


if __name__ == "__main__":
    main()
