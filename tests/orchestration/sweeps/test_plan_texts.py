"""Plans of models that read tokens: what they may not see, and tokens that they do not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestration.sweeps.test_plan_combinations import TOKENS, TRANSFORMER, planned, reason
from tests.workers.data_folders import make_texts, make_tokenizer

LANGUAGE_MODEL = {"name": "language_model", "width": 8, "depth": 1, "heads": 2}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, object]:
    path, tokenizer = make_texts(tmp_path / "texts.csv"), make_tokenizer(tmp_path / "tokenizer.json")
    return {"name": "text", "path": str(path), "text": "body", "tokenizer": str(tokenizer), "max_length": 8}


def test_a_model_may_not_read_the_token_that_it_predicts(texts: dict[str, object]) -> None:
    data = {**texts, "objective": "causal_lm"}
    assert planned(data=data, model=LANGUAGE_MODEL, loss="causal_lm").refusals == ()
    line = reason(data=data, model={**LANGUAGE_MODEL, "causal": False}, loss="causal_lm")
    assert "model 'language_model': its logit at a position changes with later tokens" in line
    masked = planned(data={**texts, "objective": "masked_lm"}, model=LANGUAGE_MODEL, loss="masked_lm")
    assert masked.refusals == ()


def test_a_model_that_embeds_tokens_is_not_told_to() -> None:
    few = reason(data=TOKENS, model={**TRANSFORMER, "vocabulary": 2})
    assert "cannot take features" in few
    assert "embeds them" not in few
    assert "whole numbers need a model that embeds them" in reason(data=TOKENS, model="mlp")
