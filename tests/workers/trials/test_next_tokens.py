"""A model that predicts the next token is run on random tokens, to see that it does not read it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Tokens
from dpsweep.workers.models import build_for_shape
from dpsweep.workers.spec import Component
from dpsweep.workers.trials.feasibility import require_causal

LENGTH, VOCABULARY = 8, 16
TOKENS = Tokens(VOCABULARY, padding=0, causal=True)
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def check(model: nn.Module) -> None:
    torch.manual_seed(0)
    model.train()
    require_causal(model, TOKENS, torch.ones(3, LENGTH, dtype=torch.int64))
    assert model.training


class Looking(nn.Module):
    """Adds to a logit of each token the next one, where it is ``within`` a block of so many tokens."""

    def __init__(self, within: int) -> None:
        super().__init__()
        self.embed, self.within = nn.Embedding(VOCABULARY, VOCABULARY), within

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        is_within = (torch.arange(LENGTH) + 1) % self.within != 0
        return x + x.roll(-1, 1) * is_within[:, None]


def language_model(causal: bool) -> nn.Module:
    params = {"width": 8, "heads": 2, "causal": causal}
    return build_for_shape(Component("language_model", params), (LENGTH,), VOCABULARY, 0)


def test_a_language_model_needs_its_mask() -> None:
    check(language_model(causal=True))
    with pytest.raises(InvalidInput, match=r"reads the token to predict; .* needs a model with a causal mask"):
        check(language_model(causal=False))


@pytest.mark.parametrize("within", [2, 4, LENGTH])
def test_a_look_at_the_next_token_inside_a_block_is_seen(within: int) -> None:
    check(Looking(1))
    with pytest.raises(InvalidInput, match="changes with later tokens"):
        check(Looking(within))


class Rounded(nn.Module):
    """Adds to each logit a little of all tokens of the batch, as the rounding of experts that share it does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x + 1e-2 * x.mean()


def test_rounding_that_rows_share_is_no_look_ahead() -> None:
    check(Rounded())


DECODERS = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {"intermediate_size": 16}),
    "experts": ("MixtralForCausalLM", "MixtralConfig", {"intermediate_size": 16, "num_key_value_heads": 2}),
}
HALVES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NEEDS_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


class Read(nn.Module):
    """The logits of a model of transformers that is frozen."""

    def __init__(self, model: str, config: str, dtype: torch.dtype, **params: Any) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **params))
        self.network = made.to(dtype).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        return logits


@NEEDS_TRANSFORMERS
@HALVES
@pytest.mark.parametrize("case", DECODERS)
def test_decoders_pass(case: str, dtype: torch.dtype) -> None:
    model, config, params = DECODERS[case]
    check(Read(model, config, dtype, **params))


@NEEDS_TRANSFORMERS
@HALVES
def test_an_encoder_with_the_head_of_a_decoder_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidInput, match="changes with later tokens"):
        check(Read("BertLMHeadModel", "BertConfig", dtype, intermediate_size=12))
