"""Features of texts by a frozen model of transformers, with random weights."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Dataset, Tokens, load_dataset
from dpsweep.workers.machine.folders import NODE_FOLDER
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.own_code.own_record import changed_code
from dpsweep.workers.spec import Component, DataSpec
from dpsweep.workers.training.preprocessing import make_preprocessing
from dpsweep.workers.trials.trained_model import load_trained
from tests.workers.data_folders import make_texts, make_tokenizer
from tests.workers.trial_runs import train
from tests.workers.trial_specs import TUMOURS, small_trial

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
LENGTH, WIDTH, POSITIONS = 8, 12, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer."""
    import transformers

    sizes = {
        "max_position_embeddings": POSITIONS,
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    made = tmp_path_factory.mktemp("bert")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig(vocab_size=16, **sizes)).save_pretrained(made)
    return made


@pytest.fixture
def texts(tmp_path: Path) -> DataSpec:
    tokenizer, path = make_tokenizer(tmp_path / "tokenizer.json"), make_texts(tmp_path / "texts.csv")
    table = {"path": str(path), "text": "body", "label": "mood", "classes": ["neg", "pos"]}
    return DataSpec("text", {**table, "tokenizer": str(tokenizer), "max_length": LENGTH}, test_fraction=0.2)


def featured(folder: Path, dataset: Dataset, cache: Path | None = None) -> Dataset:
    named = {"path": str(folder), "cache": None if cache is None else str(cache)}
    made = make_preprocessing(Component("text_features", named))
    assert made.releases == ()
    return made.transform(dataset, made.fit(dataset, SeededNoise(0, torch.device("cpu"))))


def test_are_means_of_states_of_length_one_each_of_one_text(folder: Path, texts: DataSpec) -> None:
    import transformers

    dataset = load_dataset(texts)
    found = featured(folder, dataset)
    assert found.feature_shape == (WIDTH,)
    own = transformers.BertModel.from_pretrained(folder).eval()
    for features, tokens in zip(found.train.features, dataset.train.features.long(), strict=True):
        with torch.no_grad():
            states = own(input_ids=tokens[None, tokens != 0]).last_hidden_state[0]
        expected = states.mean(0) / states.mean(0).norm()
        assert torch.allclose(features, expected, atol=1e-5)


def test_are_made_once_on_a_node_and_kept_in_a_cache(
    folder: Path, texts: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = load_dataset(texts)
    alone = featured(folder, dataset)
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path / "node"))
    (tmp_path / "node").mkdir(0o700)
    assert torch.equal(featured(folder, dataset).train.features, alone.train.features)
    shared = {file: file.stat().st_mtime_ns for file in (tmp_path / "node").iterdir() if file.suffix != ".lock"}
    assert len(shared) == 2, "of training and test rows"
    kept = featured(folder, dataset, tmp_path / "cache")
    assert {file: file.stat().st_mtime_ns for file in shared} == shared
    assert torch.equal(kept.test.features, alone.test.features)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_weights_that_are_replaced_in_a_folder_make_other_features(
    folder: Path, texts: DataSpec, tmp_path: Path
) -> None:
    """A process that plans and trains keeps the trunk in memory, and stores the digest of the files as they are."""
    import transformers

    dataset, own = load_dataset(texts), tmp_path / "own"
    shutil.copytree(folder, own)
    before = featured(own, dataset)
    assert torch.equal(before.test.features, featured(folder, dataset).test.features)
    featured(own, dataset)
    other = transformers.BertModel.from_pretrained(own)
    for parameter in other.parameters():
        parameter.data *= 2.0
    other.save_pretrained(own)
    after = featured(own, dataset)
    shutil.copytree(own, tmp_path / "copy")
    assert torch.equal(after.test.features, featured(tmp_path / "copy", dataset).test.features)
    assert not torch.allclose(after.test.features, before.test.features, atol=1e-3)


def test_a_trial_trains_on_them_and_keeps_the_digest_of_the_weights(
    folder: Path, texts: DataSpec, tmp_path: Path
) -> None:
    frozen = Component("text_features", {"path": str(folder), "cache": str(tmp_path / "cache")})
    spec = small_trial(data=texts, preprocessing=frozen, model=Component("logistic"), epochs=1)
    result, _, files = train(spec, tmp_path / "trial")
    (tmp_path / "cache").rename(tmp_path / "kept")
    assert result.parameters == 2 * WIDTH + 2
    record = Path(files.code, "weights", "preprocessing.sha256").read_text()
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert f"{digest}  {folder}/model.safetensors" in record.splitlines()
    dataset = load_dataset(texts)
    logits = load_trained(files, spec).logits(dataset.test.features)
    assert logits.shape == (len(dataset.test), 2)
    assert load_trained(files, spec).logits(np.zeros((0, LENGTH))).shape == (0, 2)
    assert not (tmp_path / "cache").exists(), "whoever opens somebody else's model writes no features of theirs"
    weights = folder / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        assert changed_code(files, spec, NO_CODE) == (str(weights),)
        with pytest.raises(InvalidInput, match=r"model\.safetensors has changed since the trial in .* began"):
            load_trained(files, spec)
        with pytest.raises(InvalidInput, match=r"model\.safetensors has changed since"):
            train(spec, tmp_path / "trial")
    finally:
        weights.write_bytes(kept)
    assert train(spec, tmp_path / "trial")[0] == result


def test_what_is_no_text_or_no_model_is_one_line(folder: Path, texts: DataSpec, tmp_path: Path) -> None:
    import transformers

    frozen = make_preprocessing(Component("text_features", {"path": str(folder)}))
    with pytest.raises(InvalidInput, match="holds no texts; use data: text"):
        frozen.rehearse(load_dataset(TUMOURS))
    absent = make_preprocessing(Component("text_features", {"path": str(tmp_path / "none")}))
    with pytest.raises(InvalidInput, match=r"there is no model at .*none.* hf download NAME"):
        absent.rehearse(load_dataset(texts))
    with pytest.raises(InvalidInput, match="path of text_features is 3, but must be text"):
        make_preprocessing(Component("text_features", {"path": 3}))
    long = {**texts.params, "max_length": POSITIONS + 1}
    with pytest.raises(InvalidInput, match="was made for texts of 10 tokens, not 11; set max_length of the data to at"):
        frozen.rehearse(load_dataset(DataSpec("text", long, test_fraction=0.2)))
    dataset = load_dataset(texts)
    with pytest.raises(InvalidInput, match="knows 16 tokens, the tokenizer 17; use its own tokenizer"):
        frozen.rehearse(replace(dataset, preparation=Tokens(17, 0)))
    broken = transformers.BertModel.from_pretrained(folder)
    broken.get_input_embeddings().weight.data[-1] = torch.nan  # of a rare token
    broken.save_pretrained(tmp_path / "broken")
    unusable = make_preprocessing(Component("text_features", {"path": str(tmp_path / "broken")}))
    with pytest.raises(InvalidInput, match=r"broken' has NaN or infinite numbers in 1 tensor, first embeddings\.word_"):
        unusable.rehearse(dataset)
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InvalidInput, match=r"makes no model for the trunk of .*damaged' .*; give a folder"):
        make_preprocessing(Component("text_features", {"path": str(damaged)})).rehearse(dataset)
    rehearsed = frozen.rehearse(replace(dataset, public=None))
    assert rehearsed.feature_shape == (WIDTH,)
