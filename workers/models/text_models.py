"""Load models of the package transformers from folders of this machine, and refuse those that would not read texts."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.workers.machine.devices import lacks_memory
from dpsweep.workers.machine.folders import at_home
from dpsweep.workers.models.pretrained import require_finite_weights, require_package
from dpsweep.workers.own_code.own_record import model_folder

Head = Literal["classification", "regression", "linear", "causal_lm", "masked_lm"]
LoadedPart = Head | Literal["trunk"]
"""The part of a model that is loaded: the trunk with a head, or by itself, for features."""

_CLASSES: Final[Mapping[LoadedPart, str]] = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "linear": "AutoModel",
    "trunk": "AutoModel",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
}
"""The class of transformers that makes the trunk and the head of its own architecture."""
LANGUAGE: Final[tuple[Head, ...]] = ("causal_lm", "masked_lm")
"""Heads that are pretrained themselves."""
_NEW: Final[tuple[Head, ...]] = ("classification", "regression")
"""Heads of the architecture that are made anew where the folder has none for as many outputs."""
_TRUNKS: Final[tuple[LoadedPart, ...]] = ("linear", "trunk")
"""Parts that are read up to the last hidden states, without pooler and decoder."""


def load_text_model(
    path: str, head: LoadedPart, num_classes: int, dtype: torch.dtype
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return the model in a folder, or in the cache of huggingface_hub, and the parameters of its head that are random.

    A pooler that the folder lacks counts as part of the head. For head linear and a trunk by itself it is taken off, as
    is the decoder of an encoder-decoder. dtype: of its weights; buffers keep theirs, as rotary positions need single
    precision.

    Raises: InvalidInput where there is no such model, or one that lacks more than a new head, and for an
    encoder-decoder that would predict tokens. Also for weights that are not finite.
    """
    folder = _readable_folder(path)
    transformers = require_package("transformers", "hugging_face")
    _always_mask()
    with _as_one_line(path, head):
        config = _config_in(folder, path)
        _require_own_weights(folder, path, config)
    if head in LANGUAGE and config.is_encoder_decoder:  # whose decoder sees the whole text and so each token to predict
        raise InvalidInput(
            f"the model at {path!r} is an encoder-decoder ({config.model_type}), which is not taken with head {head}; "
            "give an encoder, such as BERT, or a decoder, such as GPT-2, or set head: classification, regression or "
            "linear"
        )
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True, "dtype": dtype}
    outputs = {"num_labels": num_classes} if head in _NEW else {}
    with _as_one_line(path, head):
        made = getattr(transformers, _CLASSES[head]).from_pretrained(folder, **_LOCAL, **options, **outputs)
    loaded: nn.Module = made[0]
    config = config_of(loaded)
    for part in (each for each in loaded.modules() if hasattr(each, "config")):  # the decoder of T5 has one of its own
        config_of(part).use_cache = False  # keys for later tokens; a layer computed again adds twice
    new = _require_weights(loaded, made[1], head, path)
    require_finite_weights(loaded, f"the model at {path!r}")
    if head in _TRUNKS and getattr(loaded, "pooler", None) is not None:
        setattr(loaded, "pooler", nn.Identity())  # noqa: B010  (it would train without effect: the mean is before it)
    parameters = [parameter for name, parameter in loaded.named_parameters() if name in new]
    if head in _TRUNKS and config.is_encoder_decoder:
        return getattr(loaded, "get_encoder")(), parameters  # noqa: B009
    return loaded, parameters


def _always_mask() -> None:
    """Let transformers give attention a mask for batches without padding, too.

    Otherwise the kernel, and so the rounding of a row, depends on whether any other row is padded: by 0.3 % of the
    gradient of a Llama in bfloat16. It also reads the mask from the device to see it.
    """
    masks = importlib.import_module("transformers.masking_utils")
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

    def masked(*given: Any, **named: Any) -> Tensor:
        made: Tensor = masks.sdpa_mask(*given, **named | skips)
        return made

    masks.ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", masked)


def config_of(loaded: nn.Module) -> Any:
    """Return the configuration of a model of transformers."""
    return getattr(loaded, "config")  # noqa: B009  (a Module's attribute, unknown to mypy)


def _require_own_weights(folder: Path, path: str, config: Any) -> None:
    """Raises: InvalidInput where the files of a folder name weights that lie elsewhere, or are pickled."""
    named = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    for index in folder.glob("*.safetensors.index.json"):
        named += _listed_in(index)
    for name in named:
        if not isinstance(name, str) or "/" in name or not name.endswith((".safetensors", ".safetensors.index.json")):
            raise InvalidInput(
                f"the model at {path!r} takes weights from {name!r}, which is no file *.safetensors in its folder; "
                "give one that save_pretrained of transformers wrote"
            )


def _listed_in(index: Path) -> Collection[object]:
    """Return the files that an index of weights names. Raises: InvalidInput where it names none."""
    read: object = None
    with contextlib.suppress(ValueError):
        read = parsed_json(index.read_bytes())
    match read:
        case {"weight_map": {**files}} if files:
            return files.values()
    raise InvalidInput(f"{index} names no file of weights in its weight_map; fetch the model again")


def _config_in(folder: Path, path: str) -> Any:
    """Return the configuration of a model. Raises: InvalidInput for more layers than any model has.

    Transformers makes each of them before it looks for weights, and so would fill the memory.
    """
    config = require_package("transformers", "hugging_face").AutoConfig.from_pretrained(folder, **_LOCAL)
    parts = [config.to_dict()]
    for part in parts:
        parts += (each for each in part.values() if isinstance(each, dict))
        for key, value in part.items():
            if str(key).endswith(("layers", "n_layer")) and isinstance(value, int) and value > _MOST_LAYERS:
                raise InvalidInput(
                    f"the configuration of the model at {path!r} has {key} {value:,}, but at most {_MOST_LAYERS:,} "
                    "layers are made; give the config.json that was saved with the weights"
                )
    return config


def most_tokens(path: str) -> int | None:
    """Return the most tokens of a text that the model at ``path`` reads, without its weights; None for no bound.

    Raises: InvalidInput where transformers is absent, or such a model on this machine.
    """
    folder = _readable_folder(path)
    transformers = require_package("transformers", "hugging_face")
    with _as_one_line(path, "trunk"), torch.device("meta"):
        return _places(transformers.AutoModel.from_config(_config_in(folder, path)))


def has_other_tokenizer(path: str, tokenizer: str) -> bool:
    """Return whether the folder of a model has a tokenizer.json that makes other tokens than the file ``tokenizer``."""
    folder = model_folder(path)
    own = None if folder is None else folder / "tokenizer.json"
    return own is not None and own.is_file() and _making(own) != _making(at_home(tokenizer))


def _making(file: Path) -> object:
    """Return the part of the file by which tokens are made: all but lengths, which the data set."""
    content = file.read_bytes()
    try:
        read = parsed_json(content)
    except ValueError:
        return content
    lengths = ("truncation", "padding")
    return {key: value for key, value in read.items() if key not in lengths} if isinstance(read, dict) else content


def require_reads(loaded: nn.Module, path: str, length: int, vocabulary: int) -> None:
    """Raises: InvalidInput for texts of more tokens than the model has positions, or of tokens that it does not embed.

    vocabulary: number of tokens; 0 where it is not known.
    """
    known = getattr(config_of(loaded), "vocab_size", None)
    if not isinstance(known, int):
        raise InvalidInput(
            f"the model at {path!r} ({config_of(loaded).model_type}) has no vocabulary of its own, and reads no tokens "
            "alone; give a model of texts, and pictures to model: vision"
        )
    if known < vocabulary:
        raise InvalidInput(
            f"the model at {path!r} knows {known} tokens, the tokenizer {vocabulary}; use its own tokenizer.json"
        )
    places = _places(loaded)
    if places is not None and places < length:
        raise InvalidInput(
            f"the model at {path!r} was made for texts of {places} tokens, not {length}; set max_length of the data to "
            f"at most {places}"
        )


def _places(loaded: nn.Module) -> int | None:
    """Return the number of positions. Models such as RoBERTa count them from the id after padding on."""
    places = getattr(config_of(loaded), "max_position_embeddings", None)
    if not places or places < 0:
        return None
    learned = [each for name, each in loaded.named_modules() if name.endswith("position_embeddings")]
    unused = [getattr(each, "padding_idx", None) for each in learned]
    return int(places) - max((index + 1 for index in unused if index is not None), default=0)


_MOST_LAYERS: Final = 10_000
_LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}


def _readable_folder(path: str) -> Path:
    folder = model_folder(path)  # else transformers would ask the hub for adapters, whatever it is told
    if folder is None:
        named = at_home(path).absolute()
        raise InvalidInput(
            f"there is no model at {path!r} on this machine, neither the folder {named} "
            "nor in the cache of huggingface_hub; fetch one: hf download NAME --local-dir FOLDER, and give that folder"
        )
    if (folder / "adapter_config.json").exists():
        raise InvalidInput(
            f"{path!r} holds an adapter of peft, and transformers would read the model that adapter_config.json names; "
            "merge both by merge_and_unload of peft, and give the folder that save_pretrained then writes"
        )
    if any(each.exists() and not (each.is_file() or each.is_dir()) for each in folder.iterdir()):
        raise InvalidInput(f"{path!r} holds a pipe, a socket or a device; give a folder of files")
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        raise InvalidInput(
            f"the weights at {path!r} are pickled in pytorch_model.bin, which could run code; give a folder with "
            "model.safetensors, as save_pretrained of transformers writes"
        )
    return folder


@contextlib.contextmanager
def _as_one_line(path: str, head: LoadedPart) -> Iterator[None]:
    """Turn errors of transformers into InvalidInput, and keep it from printing."""
    transformers = require_package("transformers", "hugging_face")
    try:
        with _quiet(transformers.utils.logging), _offline():
            yield
    except InvalidInput:
        raise
    except Exception as error:  # transformers raises almost anything for a configuration that it did not write
        if lacks_memory(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "contains custom code" in reason:
            raise InvalidInput(
                f"the model at {path!r} needs code of its folder, which is not run; give a model whose architecture "
                "transformers has"
            ) from error
        if reason.startswith("Unrecognized configuration class"):
            raise InvalidInput(
                f"transformers has no {_spoken(head).removeprefix('the ')} for the architecture of the model at "
                f"{path!r}; give another model{', or set another head, such as linear' * (head not in _TRUNKS)}"
            ) from error
        raise InvalidInput(
            f"transformers makes no model for {_spoken(head)} of {path!r} ({reason}); give a folder that its "
            "save_pretrained wrote, or fetch one: hf download NAME --local-dir FOLDER"
        ) from error


def _spoken(head: LoadedPart) -> str:
    """Return what is loaded as an error calls it: whoever asks for features has named no head."""
    return "the trunk" if head == "trunk" else f"head {head}"


def _require_weights(loaded: nn.Module, info: Mapping[str, Any], head: LoadedPart, path: str) -> Collection[str]:
    """Return the names of tensors that are random, as the head is new.

    Transformers does not count a tensor as missing that is tied to one that was read. A new bias of zeros beside the
    trunk changes nothing. For head linear, and without a head, all is the trunk.

    Raises: InvalidInput where the folder lacks others, or has them in another shape.
    """
    base = f"{getattr(loaded, 'base_model_prefix', '')}."
    shapes = {name: (stored, needed) for name, stored, needed in info["mismatched_keys"]}
    missing, tensors = {*info["missing_keys"], *shapes}, loaded.state_dict()
    new = {name for name in missing if _is_new(name, head, base)}
    lacking = sorted(
        name
        for name in missing - new
        if name in shapes
        or head in _TRUNKS
        or name.startswith(base)
        or not name.endswith("bias")
        or tensors[name].any()
    )
    if lacking and lacking[0] in shapes:
        stored, needed = (" x ".join(map(str, shape)) for shape in shapes[lacking[0]])
        raise InvalidInput(
            f"the model at {path!r} has {lacking[0]} of {stored} numbers, where its configuration and {_spoken(head)} "
            f"need {needed}; give the config.json that was saved with the weights"
        )
    if lacking:
        raise InvalidInput(
            f"the model at {path!r} lacks {count_of(len(lacking), 'tensor')} that {_spoken(head)} needs, as "
            f"{lacking[0]}, which would be random. Give a model that was trained for this"
            f"{', or another head' * (head not in _TRUNKS)}"
        )
    return new


def _is_new(name: str, head: LoadedPart, base: str) -> bool:
    """Return whether a tensor belongs to a head that trains. A pooler is of no other use."""
    if "pooler." in name:
        return head in _TRUNKS or head in _NEW
    return head in _NEW and not name.startswith(base)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep huggingface_hub from asking its server: a configuration may name a trunk or code that lies there."""
    constants = require_package("huggingface_hub.constants", "hugging_face")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


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
