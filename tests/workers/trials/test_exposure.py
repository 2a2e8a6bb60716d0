"""Secrets written into texts: where they stand, how far a model gives them away, and how far epsilon lets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.accounting.attacks import exposure_limit
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Dataset, load_dataset
from dpsweep.workers.evaluation.attack_results import read_attacks
from dpsweep.workers.spec import (
    AttackSpec,
    AuditSpec,
    Component,
    DataSpec,
    ExposureSpec,
    NoiseSpec,
    SamplingSpec,
    TrialSpec,
)
from dpsweep.workers.tasks.task import IGNORED
from dpsweep.workers.trials.exposure import with_secrets
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.workers.data_folders import make_texts, make_tokenizer
from tests.workers.trial_specs import small_trial

PADDING, LENGTH = 0, 6
ASKED = ExposureSpec(canaries=5, repeats=8, length=LENGTH, candidates=256)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    folder = tmp_path_factory.mktemp("texts")
    params = {
        "path": str(make_texts(folder / "texts.csv")),
        "tokenizer": str(make_tokenizer(folder / "tokenizer.json")),
        "text": "body",
        "max_length": 8,
        "objective": "causal_lm",
    }
    return DataSpec("text", params, test_fraction=0.2)


def spec_of(texts: DataSpec, asked: ExposureSpec = ASKED, **changes: Any) -> TrialSpec:
    spec = small_trial(
        data=texts,
        model=Component("language_model", {"width": 32, "depth": 1, "heads": 2}),
        loss=Component("causal_lm"),
        optimizer=Component("adam", {"learning_rate": 0.01}),
        sampling=SamplingSpec("poisson", 40),
        attacks=AttackSpec(exposure=asked),
    )
    return replace(spec, **changes)


def rows_of(dataset: Dataset) -> list[tuple[int, ...]]:
    return [tuple(row) for row in dataset.train.features.tolist()]


def test_secrets_stand_in_place_of_examples_and_depend_on_the_seed_alone(texts: DataSpec) -> None:
    plain = load_dataset(texts)
    with_them = with_secrets(spec_of(texts), plain)
    changed = [
        at for at, (one, other) in enumerate(zip(rows_of(plain), rows_of(with_them), strict=True)) if one != other
    ]
    assert len(changed) == 5 * 8
    assert len({rows_of(with_them)[at] for at in changed}) == 5
    tokens, labels = with_them.train.features[changed], with_them.train.labels[changed]
    assert (tokens[:, :LENGTH] != PADDING).all()
    assert (tokens[:, LENGTH:] == PADDING).all()
    assert torch.equal(labels[:, : LENGTH - 1].long(), tokens[:, 1:LENGTH].long())
    assert (labels[:, LENGTH - 1 :] == IGNORED).all()
    assert "40 examples of the training data were written over by secrets (attacks.exposure)" in with_them.notes
    assert torch.equal(with_them.train.example_ids, plain.train.example_ids)

    others = replace(plain, train=replace(plain.train, features=plain.train.features.flip(0)))
    elsewhere = with_secrets(spec_of(texts), others)
    assert torch.equal(elsewhere.train.features[changed], tokens)
    assert rows_of(with_secrets(spec_of(texts, seed=1), plain)) != rows_of(with_them)


def test_a_model_gives_away_what_it_is_not_protected_from(texts: DataSpec, tmp_path: Path) -> None:
    """Without noise nearly all bits of all secrets, at epsilon near 0 no more than guessing."""
    bare: dict[str, Any] = {"clipping": Component("none"), "noise": NoiseSpec(0.0), "epochs": 25}
    open_, closed = tmp_path / "open", tmp_path / "closed"
    run_trial(spec_of(texts, **bare), str(open_))
    run_trial(spec_of(texts, noise=NoiseSpec(100.0), epochs=2), str(closed))
    found, protected = (known(read_attacks(TrialFiles(str(root)).attacks).exposure) for root in (open_, closed))
    assert found.mean > 7.0
    assert found.extracted >= 3
    assert protected.lower < exposure_limit(0.5, 1e-5, 256)
    assert protected.extracted <= 1


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "a longer secret": ({"length": 9}, "length is 9, but the texts have 8 tokens; set it to 8 or less"),
    "too many": ({"canaries": 81, "repeats": 1}, "would write over 81 training examples, but at most 80, half of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_room_is_one_line(texts: DataSpec, case: str) -> None:
    params, message = REFUSED[case]
    with pytest.raises(InvalidInput, match=message):
        with_secrets(spec_of(texts, replace(ASKED, **params)), load_dataset(texts))


def test_only_models_of_the_next_token_are_asked() -> None:
    with pytest.raises(InvalidInput, match=r"ranks secrets by a model of the next token .*, which 'digits' has not"):
        with_secrets(spec_of(DataSpec("digits")), load_dataset(DataSpec("digits")))


def test_rows_that_an_audit_leaves_out_may_not_be_secrets(texts: DataSpec, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"half are left out of training, secrets of attacks\.exposure among them"):
        run_trial(spec_of(texts, audit=AuditSpec(canaries=20)), str(tmp_path))
