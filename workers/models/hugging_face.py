"""Pretrained models of the package transformers, from a folder of this machine, with a head or adapter to train."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.models.pretrained import Adapter, Trainable, require_package, trained_parts
from dpsweep.workers.own_code.own_record import model_folder

Head = Literal["classification", "regression", "linear", "causal_lm", "masked_lm"]


_CLASSES: Final[Mapping[Head, str]] = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "linear": "AutoModel",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
}
"""The class of transformers that makes the trunk and the head of its own architecture."""
_LANGUAGE: Final[tuple[Head, ...]] = ("causal_lm", "masked_lm")
"""Heads that are pretrained themselves."""


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
) -> nn.Module:
    """Return a pretrained model for token ids [b, t], without dropout.

    path: a folder that ``save_pretrained`` wrote, or the name of a model in the cache of huggingface_hub; nothing is
    downloaded. The weights are taken as public: they must not depend on the training data. head: ``classification`` and
    ``regression`` are the architecture's, ``linear`` one layer on the mean of the last hidden states. ``causal_lm`` and
    ``masked_lm`` predict tokens, [b, t, num_classes]. trainable: ``head`` freezes the trunk, ``bias`` all but biases
    and head. With an adapter, it and a new head train, or it alone where the head predicts tokens. dtype: of the frozen
    trunk. Trained weights are float32. padding: the id of padding, which is masked. checkpointing: whether the
    activations of a layer are computed again in the backward pass. That takes less memory and more time; the gradients
    are the same.

    Raises: InvalidInput where transformers, peft or the model is not on this machine, and for targets that match no
    layer. Also for a vocabulary below ``num_classes`` tokens, longer texts than the model reads, and bfloat16 weights
    that would train.
    """
    if len(feature_shape) != 1:
        raise InvalidInput(f"hugging_face reads token ids, not features of shape {list(feature_shape)}; use data: text")
    if dtype != "float32" and adapter is None and trainable == "all":
        raise InvalidInput("weights in bfloat16 would be trained; add an adapter, or trainable: head")
    loaded = _load(path, head, num_classes).to(getattr(torch, dtype))
    _require_places(loaded, path, feature_shape[0])
    if padding is not None:
        getattr(loaded, "config").pad_token_id = padding  # noqa: B009  (by which decoders find the last token of a text)
    if checkpointing:
        _recompute_layers(loaded)
    is_kept = adapter is not None and head in _LANGUAGE
    trunk = trained_parts(loaded, () if is_kept else _head_parameters(loaded), trainable, adapter)
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
        width = int(getattr(trunk, "config").hidden_size)  # noqa: B009  (a Module's attribute, unknown to mypy)
        self.head = nn.Linear(width, num_classes) if head == "linear" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens: ids [b, t]; padding ids are not attended to, and left out of means."""
        if self.head is not None:
            out: Tensor = self.head(mean_state(self.trunk, tokens, self.padding))
            return out
        logits: Tensor = self.trunk(input_ids=tokens, attention_mask=_mask(tokens, self.padding)).logits.float()
        return logits[..., : self.outputs]


def text_trunk(path: str) -> nn.Module:
    """Return the trunk of a pretrained model, frozen, without dropout, in single precision.

    path: as of `hugging_face`. Raises: InvalidInput where transformers is absent, or such a model on this machine.
    """
    return _load(path, "linear", 0).float().eval().requires_grad_(False)


def mean_state(trunk: nn.Module, tokens: Tensor, padding: int | None) -> Tensor:
    """Return the mean [b, width] of the last hidden states of token ids [b, t]; padding does not count."""
    mask = _mask(tokens, padding)
    weights = mask.unsqueeze(-1).float()
    states = trunk(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
    return torch.as_tensor((states * weights).sum(1) / weights.sum(1).clamp_min(1.0))


def _mask(tokens: Tensor, padding: int | None) -> Tensor:
    return torch.ones_like(tokens) if padding is None else (tokens != padding).long()


def _load(path: str, head: Head, num_classes: int) -> nn.Module:
    transformers = require_package("transformers", "hugging_face")
    folder = model_folder(path)  # else transformers would ask the hub for adapters, whatever it is told
    if folder is None:
        raise InvalidInput(
            f"there is no model at {path!r} on this machine, neither a folder nor in the cache of huggingface_hub; "
            "fetch one: hf download NAME --local-dir FOLDER, and give that folder"
        )
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise InvalidInput(
            f"the weights at {path!r} are pickled in pytorch_model.bin, which could run code; give a folder with "
            "model.safetensors, as save_pretrained of transformers writes"
        )
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    if head in ("classification", "regression"):
        options["num_labels"] = num_classes
    unreadable = require_package("safetensors", "hugging_face").SafetensorError
    try:
        with _quiet(transformers.utils.logging):
            made = getattr(transformers, _CLASSES[head]).from_pretrained(folder, **options, output_loading_info=True)
    except (OSError, ValueError, KeyError, unreadable) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput(
            f"transformers makes no model for head {head} of {path!r} ({reason}); give a folder that its "
            "save_pretrained wrote, or fetch one: hf download NAME --local-dir FOLDER"
        ) from error
    loaded: nn.Module = made[0]
    getattr(loaded, "config").use_cache = False  # noqa: B009  (keys for later tokens; a layer computed again adds twice)
    _require_weights(loaded, made[1]["missing_keys"], head, path)
    if head == "linear" and getattr(loaded, "pooler", None) is not None:
        setattr(loaded, "pooler", None)  # noqa: B010  (it would train without effect, as the mean is taken before it)
    vocabulary = int(getattr(loaded, "config").vocab_size)  # noqa: B009
    if head in _LANGUAGE and vocabulary < num_classes:
        raise InvalidInput(
            f"the model at {path!r} knows {vocabulary} tokens, the tokenizer {num_classes}; use its own tokenizer.json"
        )
    return loaded


def _require_places(loaded: nn.Module, path: str, length: int) -> None:
    """Raises: InvalidInput for texts that are longer than the positions that the model was made for."""
    places = getattr(getattr(loaded, "config"), "max_position_embeddings", None)  # noqa: B009
    if places and 0 < places < length:
        raise InvalidInput(
            f"the model at {path!r} was made for texts of {places} tokens, not {length}; set max_length of the data"
        )


def _require_weights(loaded: nn.Module, missing: Iterable[str], head: Head, path: str) -> None:
    """Raises: InvalidInput where the folder lacks weights that would then be random, other than a new head's."""
    base = f"{getattr(loaded, 'base_model_prefix', '')}."
    is_new = {"classification": _is_outside(base), "regression": _is_outside(base), "linear": _is_pooler}
    lacking = sorted(name for name in missing if not is_new.get(head, _is_tied)(name))
    if lacking:
        raise InvalidInput(
            f"the model at {path!r} lacks {len(lacking)} tensors that head {head} needs, as {lacking[0]}; they would "
            "be random. Give a model that was trained for this, or another head"
        )


def _is_outside(base: str) -> Callable[[str], bool]:
    return lambda name: not name.startswith(base) or _is_pooler(name)


def _is_pooler(name: str) -> bool:
    return "pooler." in name


def _is_tied(name: str) -> bool:
    return name.endswith(("decoder.bias", "decoder.weight", "lm_head.weight"))


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


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep transformers from drawing bars and listing new weights, which every trial would print."""
    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()
