"""Models of transformers in folders: what trains, what is masked, and what a folder lacks; with random weights."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.gradients.engine import GradientEngine
from dpsweep.workers.models import build_for_shape
from dpsweep.workers.spec import Component, DataSpec
from tests.workers.brute_force import gradients_one_by_one, norms_of, per_example_loss
from tests.workers.data_folders import make_texts, make_tokenizer
from tests.workers.trial_runs import train
from tests.workers.trial_specs import small_trial

pytestmark = pytest.mark.skipif(not all(map(find_spec, ("peft", "transformers"))), reason="needs transformers and peft")
"""Without an import, which takes seconds in every process that collects tests."""

LENGTH, VOCABULARY, PADDING = 8, 16, 0
LORA = {"method": "lora", "targets": ["query", "value"], "r": 2}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
BART = {
    f"{part}_{key}": size
    for part in ("encoder", "decoder")
    for key, size in {"layers": 1, "attention_heads": 2, "ffn_dim": 12}.items()
}
SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A BERT without a head, others with one, a GPT-2, a Llama, and folders that do not fit."""
    import transformers
    from safetensors import torch as stored

    root = tmp_path_factory.mktemp("models")
    bert = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SMALL)
    gpt2 = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: dict[str, Any] = {
            "bert": transformers.BertModel(bert),
            "masked": transformers.BertForMaskedLM(bert),
            "gpt2": transformers.GPT2LMHeadModel(gpt2),
            "llama": transformers.LlamaModel(transformers.LlamaConfig(vocab_size=VOCABULARY, **SMALL)),
            "tied": transformers.LlamaModel(
                transformers.LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **SMALL)
            ),
            "no pooler": transformers.BertModel(bert, add_pooling_layer=False),
            "five classes": transformers.BertForSequenceClassification(
                transformers.BertConfig(**{**bert.to_dict(), "num_labels": 5})
            ),
            "roberta": transformers.RobertaModel(
                transformers.RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH + 1, **SMALL)
            ),
            "t5": transformers.T5Model(
                transformers.T5Config(
                    vocab_size=VOCABULARY,
                    d_model=8,
                    d_kv=4,
                    d_ff=12,
                    num_layers=1,
                    num_heads=2,
                    decoder_start_token_id=PADDING,
                )
            ),
            "no end": transformers.T5Model(
                transformers.T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
            ),
            "bart": transformers.BartModel(
                transformers.BartConfig(
                    vocab_size=VOCABULARY, max_position_embeddings=LENGTH, d_model=8, **BART, **SPECIAL
                )
            ),
        }
        made["short"] = transformers.BertModel(
            transformers.BertConfig(**{**bert.to_dict(), "max_position_embeddings": 4})
        )
        made["vit"] = transformers.ViTModel(transformers.ViTConfig(**SMALL))
    for name, model in made.items():
        model.save_pretrained(root / name)
    for name in ("pickled", "damaged", "no object", "of the hub", "parts elsewhere", "pipe"):
        shutil.copytree(root / "bert", root / name)
    shutil.copytree(root / "masked", root / "other sizes")
    sizes = json.loads((root / "other sizes" / "config.json").read_text())
    (root / "other sizes" / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 10}))
    shutil.copytree(root / "bert", root / "adapter")
    (root / "adapter" / "adapter_config.json").write_text("{}")
    (root / "pickled" / "model.safetensors").rename(root / "pickled" / "pytorch_model.bin")
    (root / "damaged" / "model.safetensors").write_bytes(b"no weights" * 10)
    (root / "no object" / "config.json").write_text("null")
    other = {"model_type": "detr", "backbone": "someone/else", "use_timm_backbone": False}
    (root / "of the hub" / "config.json").write_text(json.dumps(other))
    (root / "parts elsewhere" / "model.safetensors").unlink()
    weights = {"metadata": {}, "weight_map": {"pooler.dense.bias": "../bert/model.safetensors"}}
    (root / "parts elsewhere" / "model.safetensors.index.json").write_text(json.dumps(weights))
    for name, index in (("no parts", {"weight_map": {}}), ("a list of parts", []), ("parts of parts", "{")):
        shutil.copytree(root / "bert", root / name)
        text = index if isinstance(index, str) else json.dumps(index)
        (root / name / "model.safetensors.index.json").write_text(text)
    shutil.copytree(root / "bert", root / "a billion layers")
    layers = {**json.loads((root / "bert" / "config.json").read_text()), "num_hidden_layers": 10**9}
    (root / "a billion layers" / "config.json").write_text(json.dumps(layers))
    shutil.copytree(root / "bert", root / "no bias")
    weights_of_bert = stored.load_file(root / "bert" / "model.safetensors")
    del weights_of_bert["encoder.layer.0.output.dense.bias"]
    stored.save_file(weights_of_bert, root / "no bias" / "model.safetensors", {"format": "pt"})
    for name, number in (("NaN", torch.nan), ("infinite", torch.inf)):
        with torch.no_grad():
            made["bert"].get_input_embeddings().weight[-1, 0] = number  # of a rare token
        made["bert"].save_pretrained(root / name)
    shutil.copytree(root / "bert", root / "own code")
    own = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"},
    }
    (root / "own code" / "config.json").write_text(json.dumps(own))
    (root / "own code" / "own.py").write_text("raise RuntimeError('it was run')")
    (root / "pipe" / "config.json").unlink()
    os.mkfifo(root / "pipe" / "config.json")
    return {each.name: str(each) for each in root.iterdir()}


def model_of(path: str, outputs: int = 3, **params: Any) -> nn.Module:
    return build_for_shape(
        Component("hugging_face", {"path": path, "padding": PADDING, **params}), (LENGTH,), outputs, 0
    )


def trained(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


TRAINED: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a layer of one's own": ({"head": "linear", "trainable": "head"}, ("head.",)),
    "the architecture's head": ({"trainable": "head"}, ("trunk.classifier.",)),
    "an adapter and the head": ({"adapter": LORA}, ("lora_", "classifier.")),
    "an adapter of a trunk in half precision": (
        {"head": "linear", "adapter": {**LORA, "method": "dora"}, "dtype": "bfloat16"}, ("lora_", "head."),
    ),
    "factors": ({"head": "linear", "adapter": {"method": "ia3", "targets": ["query"]}}, ("ia3_", "head.")),
    "biases": ({"head": "linear", "trainable": "bias"}, ("bias", "head.")),
    "a pooler that the folder lacks": (
        {"name": "no pooler", "trainable": "head"}, ("trunk.classifier.", "trunk.bert.pooler."),
    ),
    "such a pooler beside an adapter": (
        {"name": "no pooler", "adapter": LORA, "dtype": "bfloat16"}, ("lora_", "classifier.", "pooler."),
    ),
    "a head for another number of classes": (
        {"name": "five classes", "trainable": "head"}, ("trunk.classifier.",),
    ),
    "an adapter of a base whose head is the embedding": (
        {"name": "tied", "head": "causal_lm", "adapter": {"method": "lora", "targets": ["q_proj"]}}, ("lora_",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINED)
def test_what_trains_is_what_was_asked_for_and_has_single_precision(folders: Mapping[str, str], case: str) -> None:
    params, expected = TRAINED[case]
    own = {key: value for key, value in params.items() if key != "name"}
    model = model_of(folders[params.get("name", "bert")], **own)
    found = trained(model)
    assert found
    assert [name for name in found if not any(part in name for part in expected)] == []
    assert all(any(part in name for name in found) for part in expected)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    assert not any(module.training for module in model.modules()), "dropout would be another noise"


def test_all_of_it_trains_otherwise(folders: Mapping[str, str]) -> None:
    model = model_of(folders["bert"], head="regression", outputs=1)
    assert trained(model) == {name for name, _ in model.named_parameters()}


def test_a_trunk_that_cannot_do_without_a_pooler_has_one_that_does_nothing(tmp_path: Path) -> None:
    import transformers

    config = transformers.SqueezeBertConfig(vocab_size=VOCABULARY, embedding_size=8, **SMALL)
    transformers.SqueezeBertModel(config).save_pretrained(tmp_path)
    model = model_of(str(tmp_path), head="linear")
    assert model(torch.full((2, LENGTH), 3)).shape == (2, 3)
    assert [name for name in trained(model) if "pooler" in name] == []


@pytest.mark.parametrize("head", ["classification", "linear"])
def test_padding_changes_nothing(folders: Mapping[str, str], head: str) -> None:
    model = model_of(folders["bert"], head=head)
    texts = torch.tensor([[3, 4, 5, 0, 0, 0, 0, 0]])
    assert torch.allclose(model(texts), model(texts[:, :3]), atol=1e-6)


@pytest.mark.parametrize(("name", "head"), [("masked", "masked_lm"), ("gpt2", "causal_lm")])
def test_language_models_predict_the_tokens_of_the_tokenizer(folders: Mapping[str, str], name: str, head: str) -> None:
    outputs = VOCABULARY - 2
    model = model_of(folders[name], outputs, head=head)
    texts = torch.randint(1, outputs, (2, LENGTH))
    own = getattr(model, "trunk")(input_ids=texts).logits  # noqa: B009
    assert model(texts).tolist() == own[..., :outputs].tolist()


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "no such folder": ("nowhere", {}, "there is no model at 'nowhere' on this machine, .* hf download NAME"),
    "an adapter without its model": ("adapter", {}, r"holds an adapter of peft, .* merge both by merge_and_unload"),
    "not a model for texts": ("vit", {}, "no head classification for the architecture of .*vit'; give another model"),
    "pickled weights": ("pickled", {}, "pickled in pytorch_model.bin, which could run code; give a folder"),
    "a configuration of nothing": ("no object", {}, "makes no model for head classification .*NoneType"),
    "a trunk that lies in the hub": ("of the hub", {}, "makes no model for head classification .*offline"),
    "weights in another folder": (
        "parts elsewhere", {}, r"takes weights from '../bert/model.safetensors', which is no file .* in its folder",
    ),
    "an index of no weights": ("no parts", {}, r"index.json names no file of weights in its weight_map; fetch"),
    "an index that is a list": ("a list of parts", {}, r"index.json names no file of weights in its weight_map; fetch"),
    "an index that is cut off": ("parts of parts", {}, r"index.json names no file of weights in its weight_map; fetch"),
    "layers that would fill the memory": (
        "a billion layers", {}, r"has num_hidden_layers 1,000,000,000, but at most 10,000 layers are made; give the",
    ),
    "a bias of the trunk that is not there": (
        "no bias", {"head": "linear"}, "lacks 1 tensor that head linear needs, as encoder.layer.0.output.dense.bias",
    ),
    "NaN in the row of a token": ("NaN", {}, "NaN or infinite numbers in 1 tensor, first .*word_embeddings"),
    "an infinite number": ("infinite", {"trainable": "head"}, "NaN or infinite numbers in 1 .*word_embeddings"),
    "code in the folder": ("own code", {}, "needs code of its folder, which is not run; give a model whose"),
    "a pipe": ("pipe", {}, "holds a pipe, a socket or a device; give a folder of files"),
    "damaged weights": ("damaged", {}, "makes no model for head classification .*header"),
    "longer texts": ("short", {}, "was made for texts of 4 tokens, not 8; set max_length"),
    "a head of the embedding's weights": (
        "gpt2", {"head": "causal_lm", "trainable": "head"}, "trains nothing .* shares the weights of the embedding",
    ),
    "a base whose head is no embedding": (
        "llama", {"head": "causal_lm"}, "lacks 1 tensor that head causal_lm needs, as lm_head.weight",
    ),
    "another shape of a trunk": (
        "other sizes", {"head": "masked_lm"}, "has bert.*dense.bias of 12 numbers, .* head masked_lm need 10; give",
    ),
    "positions behind that of padding": (
        "roberta", {}, "was made for texts of 7 tokens, not 8; set max_length of the data to at most 7",
    ),
    "an encoder-decoder for next tokens": (
        "bart", {"head": "causal_lm"}, r"encoder-decoder \(bart\), which is not taken with head causal_lm; give",
    ),
    "layers of one that are computed again": ("t5", {"checkpointing": True}, "leave out checkpointing, or set head"),
    "one without a token to start from": ("no end", {}, "names no decoder_start_token_id; give the config.json"),
    "one for hidden tokens": ("t5", {"head": "masked_lm"}, r"encoder-decoder \(t5\), .* with head masked_lm; give"),
    "a tokenizer with more tokens than a trunk": ("bert", {"vocabulary": 20}, "knows 16 tokens, the tokenizer 20"),
    "hidden tokens for a decoder": (
        "gpt2", {"head": "causal_lm", "causal": False}, "of objective masked_lm of the data; set head: masked_lm",
    ),
    "next tokens for an encoder": (
        "masked", {"head": "masked_lm", "causal": True}, "of objective causal_lm of the data; set head: causal_lm",
    ),
    "a head of classes for next tokens": (
        "gpt2", {"causal": True}, "head classification does not predict the tokens of objective causal_lm .* set head",
    ),
    "a head that the architecture lacks": (
        "gpt2", {"head": "masked_lm"}, "no head masked_lm for the architecture of .*gpt2'; give another model, or set",
    ),
    "a model of pictures": ("vit", {"head": "linear"}, r"\(vit\) has no vocabulary .*; give a model of texts"),
    "no head in the folder": ("bert", {"head": "masked_lm"}, "lacks .* that head masked_lm needs"),
    "a tokenizer with more tokens": ("gpt2", {"head": "causal_lm", "outputs": 20}, "knows 16 tokens, the tokenizer 20"),
    "no such layer": ("bert", {"adapter": {**LORA, "targets": ["nope"]}}, "match no layer .* key, .*query, .*value"),
    "one target that matches no layer, beside another": (
        "bert", {"adapter": {**LORA, "targets": ["query", "keys"]}}, "targets keys match no layer .* key, .*query",
    ),
    "a layer that no adapter has": (
        "bert", {"adapter": {**LORA, "targets": ["query", "LayerNorm"]}},
        "LayerNorm match layers of the classes LayerNorm, Linear, not all of which lora can adapt; its layers end in",
    ),
    "a layer that factors do not adapt": (
        "t5", {"adapter": {"method": "ia3", "targets": ["embed_tokens"]}}, "classes Embedding, not all of which ia3",
    ),
    "biases of a model without any": ("llama", {"head": "linear", "trainable": "bias"}, "finds no bias before"),
    "no such layer of GPT-2": ("gpt2", {"adapter": LORA}, "match no layer .* c_attn, c_fc, c_proj, score"),
    "an unknown key": (
        "bert", {"adapter": {**LORA, "lora_alpha": 4}}, "unknown key 'lora_alpha' of adapter; did you mean 'alpha'",
    ),
    "factors with a rank": ("bert", {"adapter": {**LORA, "method": "ia3"}}, "ia3 has no r; leave it out"),
    "no targets": ("bert", {"adapter": {**LORA, "targets": []}}, "targets names no layer; name some, or leave it out"),
    "a rank above that of a layer": (
        "bert", {"adapter": {**LORA, "r": 10**12}}, "layer .*query is a matrix of 8 x 8; set r to at most 8",
    ),
    "such a rank without targets": (
        "gpt2", {"adapter": {"method": "dora", "r": 9}}, "layer .*c_attn is a matrix of 8 x 24; set r to at most 8",
    ),
    "a rank of 0": ("bert", {"adapter": {**LORA, "r": 0}}, "adapter.r is 0: Input should be greater than 0"),
    "an unknown adapter": ("bert", {"adapter": {**LORA, "method": "x"}}, "adapter.method is 'x'"),
    "half precision that would be trained": ("bert", {"dtype": "bfloat16"}, "add an adapter, or set trainable: head"),
    "biases in half precision": (
        "bert", {"dtype": "bfloat16", "trainable": "bias"}, "trainable: bias would train weights in bfloat16; add",
    ),
    "two ways to say what trains": ("bert", {"adapter": LORA, "trainable": "bias"}, "both say what is trained"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_or_a_setting_that_does_not_fit_is_one_line(
    folders: Mapping[str, str], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found on this machine: no host is asked for anything."""
    name, params, message = REFUSED[case]
    asked = []

    def lookup(host: object, *_: object, **__: object) -> list[object]:
        asked.append(host)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(InvalidInput, match=message):
        model_of(folders.get(name, name), **params)
    assert asked == []


def test_a_decoder_classifies_by_the_last_token_of_the_text(folders: Mapping[str, str]) -> None:
    """Its configuration knows no padding, as that of GPT-2, or another than the tokenizer."""
    model = model_of(folders["gpt2"])
    texts = torch.tensor([[3, 4, 5, 0, 0, 0, 0, 0], [6, 7, 1, 2, 3, 4, 5, 6]])
    assert torch.allclose(model(texts)[:1], model(texts[:1, :3]), atol=1e-6)


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("head", ["linear", "classification"])
@pytest.mark.parametrize(
    "params",
    [{}, {"adapter": {"method": "lora", "r": 2}}],
    ids=["all", "an adapter"],
)
def test_an_encoder_decoder_has_the_gradients_of_single_texts(
    folders: Mapping[str, str], name: str, head: str, params: dict[str, Any]
) -> None:
    """Texts end in the token 1 of T5 or 2 of BART; others have further ends, or none, or no token at all."""
    model = model_of(folders[name], head=head, **params)
    assert any("decoder" in each for each, _ in model.named_parameters()) == (head == "classification")
    texts = torch.tensor([[3, 4, 2, 0, 0, 0, 0, 0], [3, 1, 2, 5, 2, 1, 6, 7], [4, 5, 6, 7, 8, 9, 3, 1], 8 * [0]])
    labels = torch.tensor([0, 1, 2, 0])
    summed = GradientEngine(model, per_example_loss).weighted_sum(texts, labels, lambda norms: 1.0 / norms.norms)
    alone = gradients_one_by_one(model, texts, labels)
    norms = norms_of(alone)
    torch.testing.assert_close(summed.norms.norms, norms, rtol=1e-4, atol=0.0)
    for key, each in summed.gradients.items():
        assert torch.allclose(each, torch.einsum("b...,b->...", alone[key], 1.0 / norms), atol=1e-5), key


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_keeps_no_keys_for_later_tokens(
    folders: Mapping[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder of T5 has a configuration of its own."""
    from transformers import cache_utils

    made: list[object] = []
    monkeypatch.setattr(cache_utils.DynamicCache, "__init__", lambda self, *_, **__: made.append(self))
    assert model_of(folders[name])(torch.full((2, 8), 3)).shape == (2, 3)
    assert made == []


def test_the_padding_of_a_text_changes_nothing_for_an_encoder_decoder(folders: Mapping[str, str]) -> None:
    texts = torch.tensor([[3, 4, 5, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8, 9, 2]])
    for head in ("linear", "classification"):
        model = model_of(folders["bart"], head=head)
        assert torch.allclose(model(texts)[:1], model(texts[:1, :4]), atol=1e-6)


def test_an_adapter_without_targets_has_those_of_the_architecture(
    folders: Mapping[str, str], recwarn: pytest.WarningsRecorder
) -> None:
    model = model_of(folders["gpt2"], head="linear", adapter={"method": "lora"})
    assert {name.split(".")[-4] for name in trained(model) if "lora_" in name} == {"c_attn"}
    assert list(recwarn) == []


@pytest.mark.parametrize(
    ("name", "method"), [("bert", "dora"), ("no pooler", "lora"), ("gpt2", "lora"), ("bart", "ia3")]
)
def test_the_folder_of_an_adapter_has_the_head_that_was_trained(
    folders: Mapping[str, str], name: str, method: str, tmp_path: Path
) -> None:
    """Whoever loads it onto the pretrained model, whose new head is random, or merges both, predicts the same."""
    import peft
    import transformers

    model = model_of(folders[name], adapter={"method": method})
    trunk: Any = getattr(model, "trunk")  # noqa: B009
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    trunk.save_pretrained(tmp_path)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(folders[name], num_labels=3)
    base.config.pad_token_id = PADDING
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    texts = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 2]])
    expected = model(texts)
    for each in (loaded, trunk.merge_and_unload()):
        torch.testing.assert_close(each(input_ids=texts).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_positions_of_a_trunk_in_half_precision_are_not_rounded(folders: Mapping[str, str]) -> None:
    frozen: dict[str, Any] = {"head": "linear", "trainable": "head"}
    half, single = (model_of(folders["llama"], dtype=dtype, **frozen) for dtype in ("bfloat16", "float32"))
    rotary = dict(single.named_buffers())
    assert rotary
    for name, each in half.named_buffers():
        assert torch.equal(each, rotary[name])


def test_a_new_head_and_pooler_follow_the_seed(folders: Mapping[str, str]) -> None:
    def made(name: str, seed: int) -> list[list[float]]:
        model = build_for_shape(Component("hugging_face", {"path": folders[name]}), (LENGTH,), 3, seed)
        new = [each for part, each in model.named_parameters() if "classifier.w" in part or "pooler.dense.w" in part]
        assert [tuple(each.shape) for each in new] == [(8, 8), (3, 8)]
        return [each.flatten().tolist() for each in new]

    for name in ("no pooler", "five classes"):
        assert made(name, 0) == made(name, 0)
        assert made(name, 0)[-1] != made(name, 1)[-1]
    assert made("five classes", 0)[0] == made("five classes", 1)[0], "a pooler that was saved is kept"


def test_a_row_in_half_precision_does_not_see_whether_others_are_padded(tmp_path: Path) -> None:
    """Without a mask, attention of several queries to a key has another kernel, which rounds otherwise."""
    import transformers

    wide = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **wide)
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    params = {"path": str(tmp_path), "head": "linear", "padding": PADDING}
    model = build_for_shape(Component("hugging_face", params), (32,), 2, seed=0)
    full = torch.randint(1, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
    padded = full.clone()
    padded[1:, 9:] = PADDING
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(tokens: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens)[0].square().sum()
        return list(torch.autograd.grad(loss, trained))

    pairs = zip(gradients(full), gradients(padded), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_numbers_are_no_tokens(folders: Mapping[str, str]) -> None:
    with pytest.raises(InvalidInput, match="it reads token ids, not numbers; use data: text"):
        model_of(folders["bert"])(torch.zeros(2, LENGTH))


def test_features_must_be_tokens(folders: Mapping[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"reads token ids, not features of shape \[3, 8\]"):
        build_for_shape(Component("hugging_face", {"path": folders["bert"]}), (3, 8), 2, 0)


@pytest.mark.parametrize("params", [{"adapter": LORA}, {"trainable": "all"}], ids=["an adapter", "all"])
def test_layers_that_are_computed_again_give_the_same_gradients(
    folders: Mapping[str, str], params: dict[str, Any]
) -> None:
    texts, labels = torch.randint(1, VOCABULARY, (4, LENGTH)), torch.tensor([0, 1, 2, 0])

    def found(checkpointing: bool) -> tuple[list[float], dict[str, list[Any]]]:
        model = model_of(folders["bert"], head="linear", checkpointing=checkpointing, **params)
        calls = [0]
        for name, part in model.named_modules():
            if name.endswith("attention.self"):
                part.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        cross_entropy(model(texts), labels).backward()
        assert calls == [2 if checkpointing else 1]
        model.zero_grad()
        engine = GradientEngine(model, per_example_loss)
        summed = engine.weighted_sum(texts, labels, lambda norms: 1.0 / norms.norms)
        assert engine.per_example == {}
        return summed.norms.norms.tolist(), {name: each.tolist() for name, each in summed.gradients.items()}

    assert found(checkpointing=True) == found(checkpointing=False)


def test_layers_of_a_decoder_are_computed_again_without_its_cache(folders: Mapping[str, str]) -> None:
    """Keys for later tokens would be there twice, and more than padding masks."""
    texts, labels = torch.randint(1, VOCABULARY, (4, LENGTH)), torch.tensor([0, 1, 2, 0])
    texts[:2, LENGTH // 2 :] = PADDING

    def norms(checkpointing: bool) -> list[float]:
        model = model_of(folders["llama"], head="linear", checkpointing=checkpointing)
        engine = GradientEngine(model, per_example_loss)
        found: list[float] = engine.norms(texts, labels).norms.tolist()
        return found

    assert norms(checkpointing=True) == norms(checkpointing=False)


def test_a_trial_fine_tunes_an_adapter(folders: Mapping[str, str], tmp_path: Path) -> None:
    tokenizer, texts = make_tokenizer(tmp_path / "tokenizer.json"), make_texts(tmp_path / "texts.csv")
    data = {"path": str(texts), "text": "body", "tokenizer": str(tokenizer), "max_length": LENGTH, "label": "mood"}
    spec = small_trial(
        data=DataSpec("text", {**data, "classes": ["neg", "pos"]}, test_fraction=0.2),
        model=Component("hugging_face", {"path": folders["bert"], "head": "linear", "adapter": LORA}),
        epochs=1,
    )
    result, trace, _ = train(spec, tmp_path / "trial")
    assert trace.steps > 1
    assert result.evaluation.accuracy is not None
