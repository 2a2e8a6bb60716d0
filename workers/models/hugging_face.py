"""Pretrained models of the package transformers, from a folder of this machine, with a head or adapter to train."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models.pretrained import Adapter, Trainable, trained_parts
from dpsweep.workers.models.text_models import LANGUAGE, Head, config_of, load_text_model, require_reads
from dpsweep.workers.models.transformer import mean_over


def hugging_face(
    feature_shape: tuple[int, ...],
    num_classes: int,
    path: str,
    head: Head = "classification",
    adapter: Adapter | None = None,
    trainable: Trainable = "all",
    dtype: Literal["float32", "bfloat16"] = "float32",
    padding: int | None = None,
    checkpointing: bool = False,
    vocabulary: PositiveInt | None = None,
    causal: bool | None = None,
) -> nn.Module:
    """Return a pretrained model for token ids [b, t], without dropout.

    path: a folder that ``save_pretrained`` wrote, or the name of a model in the cache of huggingface_hub; nothing is
    downloaded. The weights are taken as public: they must not depend on the training data.
    head: ``classification`` and ``regression`` are the architecture's, ``linear`` one layer on the mean of the last
    hidden states. ``causal_lm`` and ``masked_lm`` predict tokens, [b, t, num_classes]. Of an encoder-decoder,
    ``linear`` reads the encoder alone; the other heads read the state at the end of a text.
    trainable: ``head`` freezes the trunk, ``bias`` all but biases and head. With an adapter, it and a new head train,
    or it alone where the head predicts tokens. A pooler that the folder lacks trains with the head.
    dtype: of the frozen trunk. Trained weights are float32.
    padding: the id of padding, which is masked.
    checkpointing: whether the activations of a layer are computed again in the backward pass. That takes less memory
    and more time; the gradients are the same.
    vocabulary: number of tokens of the tokenizer.
    causal: whether the data ask for the next token, or, if False, for hidden ones. The source `text` supplies padding,
    vocabulary and causal.

    Raises: InvalidInput where transformers, peft or the model is not on this machine, and for targets that match no
    layer. Also for tokens that the model does not know, longer texts than it reads, an encoder-decoder that would
    predict tokens, a head for another objective than that of the data, and bfloat16 weights that would train.
    """
    if len(feature_shape) != 1:
        raise InvalidInput(f"hugging_face reads token ids, not features of shape {list(feature_shape)}; use data: text")
    if dtype != "float32" and adapter is None and trainable != "head":
        raise InvalidInput(
            f"trainable: {trainable} would train weights in bfloat16; add an adapter, or set trainable: head or "
            "dtype: float32"
        )
    _require_objective(head, causal)
    loaded, new = load_text_model(path, head, num_classes, getattr(torch, dtype))
    require_reads(loaded, path, feature_shape[0], max(vocabulary or 0, num_classes if head in LANGUAGE else 0))
    if padding is not None:
        config_of(loaded).pad_token_id = padding  # by which decoders find the last token of a text
    if head != "linear" and config_of(loaded).is_encoder_decoder:
        _require_own_head(loaded, path, checkpointing)
    if checkpointing:
        _recompute_layers(loaded)
    is_kept = adapter is not None and head in LANGUAGE
    trunk = trained_parts(loaded, () if is_kept else (*_head_parameters(loaded), *new), trainable, adapter)
    model = _Reader(trunk, head, num_classes, padding)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidInput(
            f"trainable: {trainable} trains nothing of the model at {path!r}: its head {head} shares the weights of "
            "the embedding; use an adapter, trainable: bias or trainable: all"
        )
    for parameter in trained:
        parameter.data = parameter.data.float()
    return model.eval()


class _Reader(nn.Module):
    """Token ids [b, t] to outputs: [b, num_classes], or of a language model [b, t, num_classes]."""

    def __init__(self, trunk: nn.Module, head: Head, num_classes: int, padding: int | None) -> None:
        super().__init__()
        self.trunk, self.kind, self.outputs, self.padding = trunk, head, num_classes, padding
        config = config_of(trunk)
        self.ends = (config.eos_token_id, config.pad_token_id) if config.is_encoder_decoder else None
        self.head = nn.Linear(int(config.hidden_size), num_classes) if head == "linear" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the outputs. Padding is not attended to, and left out of means. Raises: InvalidInput for no tokens."""
        if tokens.is_floating_point():
            raise InvalidInput("it reads token ids, not numbers; use data: text, or another model")
        if self.head is not None:
            out: Tensor = self.head(mean_state(self.trunk, tokens, self.padding))
            return out
        read = tokens if self.ends is None else _with_one_end(tokens, _mask(tokens, self.padding), *self.ends)
        logits: Tensor = self.trunk(input_ids=read, attention_mask=_mask(read, self.padding)).logits.float()
        return logits[..., : self.outputs]


def text_trunk(path: str) -> nn.Module:
    """Return the trunk of a pretrained model, frozen, without dropout, in single precision.

    path: as of `hugging_face`. Raises: InvalidInput where transformers is absent, or such a model on this machine.
    """
    loaded, _ = load_text_model(path, "trunk", 0, torch.float32)
    return loaded.eval().requires_grad_(False)


def mean_state(trunk: nn.Module, tokens: Tensor, padding: int | None) -> Tensor:
    """Return the mean [b, width] of the last hidden states of token ids [b, t]; padding does not count."""
    mask = _mask(tokens, padding)
    return mean_over(trunk(input_ids=tokens, attention_mask=mask).last_hidden_state.float(), mask)


def _mask(tokens: Tensor, padding: int | None) -> Tensor:
    return torch.ones_like(tokens) if padding is None else (tokens != padding).long()


def _with_one_end(tokens: Tensor, mask: Tensor, end: int, padding: int) -> Tensor:
    """Return tokens [b, t] in which the last one of each text is the end of a text, and no other.

    The head of an encoder-decoder reads the state there. It fails where texts of a batch have different numbers of
    ends, as where one is written in a text, or the tokenizer adds none.
    """
    last = (mask * torch.arange(tokens.shape[1], device=tokens.device)).amax(1, keepdim=True)
    return tokens.masked_fill(tokens == end, padding).scatter(1, last, end)


def _require_objective(head: Head, causal: bool | None) -> None:
    """Raises: InvalidInput for a head that does not predict the tokens that are the labels of the data."""
    asked = "causal_lm" if causal else "masked_lm"
    if causal is not None and head != asked:
        raise InvalidInput(
            f"head {head} does not predict the tokens of objective {asked} of the data; set head: {asked}, or "
            f"objective: {head if head in LANGUAGE else 'label'}"
        )


def _require_own_head(loaded: nn.Module, path: str, checkpointing: bool) -> None:
    """Raises: InvalidInput for an encoder-decoder whose own head cannot be used as its configuration or the user asks.

    The decoder of T5 passes on a state that layers change, so that a layer computed again finds another one.
    """
    if checkpointing:
        raise InvalidInput(
            f"the model at {path!r} is an encoder-decoder, whose layers cannot be computed again under its own head; "
            "leave out checkpointing, or set head: linear"
        )
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if not isinstance(getattr(config_of(loaded), name, None), int):
            raise InvalidInput(
                f"the configuration of the encoder-decoder at {path!r} names no {name}; give the config.json that was "
                "saved with the weights, or set head: linear"
            )


def _head_parameters(loaded: nn.Module) -> list[nn.Parameter]:
    """Return the parameters outside the trunk; there are none if a head shares the weights of the embedding."""
    trunk = set(getattr(loaded, "base_model", loaded).parameters())
    return [parameter for parameter in loaded.parameters() if parameter not in trunk]


def _recompute_layers(model: nn.Module) -> None:
    """Let each layer of the trunk keep its inputs alone; transformers itself does so in training mode alone."""
    kind = importlib.import_module("transformers.modeling_layers").GradientCheckpointingLayer
    for layer in (each for each in model.modules() if isinstance(each, kind)):
        layer.forward = functools.partial(_recomputed, layer)


def _recomputed(layer: nn.Module, *inputs: Any, **named: Any) -> Any:
    run = functools.partial(type(layer).forward, layer)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **named)
