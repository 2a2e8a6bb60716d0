"""Texts as tokens: against the tokenizer itself, and against the definition of what language models predict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from tokenizers import Tokenizer

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.data import Source, Tokens, load_dataset, load_source
from dpsweep.workers.data import texts as drawn
from dpsweep.workers.data.encoder import Block
from dpsweep.workers.data.table import user_names
from dpsweep.workers.data.texts import masked_tokens, next_tokens
from dpsweep.workers.spec import DataSpec
from dpsweep.workers.tasks import IGNORED
from tests.known import known as present
from tests.workers.data_folders import make_texts, make_tokenizer

LENGTH = 8
MASK, PAD, VOCABULARY = 2, 0, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("texts")
    make_tokenizer(found / "tokenizer.json")
    for suffix in ("csv", "parquet", "jsonl"):
        make_texts(found / f"texts.{suffix}")
    return found


def load(folder: Path, file: str = "texts.csv", **params: Any) -> Source:
    known = {"text": "body", "tokenizer": str(folder / "tokenizer.json"), "max_length": LENGTH}
    return load_source(DataSpec("text", {"path": str(folder / file), **known, **params}))


def test_every_format_gives_the_tokens_of_the_tokenizer(folder: Path) -> None:
    declared = {"label": "mood", "classes": ["neg", "pos"], "group": "lang", "groups": ["de", "en"], "user": "who"}
    found = [load(folder, f"texts.{suffix}", **declared) for suffix in ("csv", "parquet", "jsonl")]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [line.split(",") for line in (folder / "texts.csv").read_text().replace('"', "").splitlines()[1:]]
    expected = [(tokenizer.encode(body).ids + LENGTH * [PAD])[:LENGTH] for body, *_ in rows]
    for source in found:
        assert source.train.features.dtype == torch.int32
        assert source.train.features.tolist() == expected
        assert source.train.labels.tolist() == [["neg", "pos"].index(mood) for _, mood, *_ in rows]
        assert source.train.groups.tolist() == [["de", "en"].index(lang) for *_, lang, _ in rows]
        assert len(present(source.train.user_ids).unique()) == 50
        assert source.preparation == Tokens(VOCABULARY, PAD)
        assert source.notes == ()
        assert source.preparation(source.train.features).dtype == torch.int64


def test_texts_are_cut_and_rows_without_one_are_left_out(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    lines = ["body,mood", '"the cat\nsat on the mat",pos', ",neg", "dog,", '"",neg', "red sky,neg", '" ",neg']
    (tmp_path / "texts.csv").write_text("\n".join(lines) + "\n")
    found = load(tmp_path, max_length=4, label="mood", classes=["neg", "pos"])
    assert found.train.example_ids.tolist() == [0, 4, 5]
    assert found.train.features.tolist() == [[3, 4, 6, 8], [10, 11, 0, 0], [0, 0, 0, 0]]
    assert found.notes == (
        "3 of 6 rows (50.0%) are left out: they lack a value ('body' 2, 'mood' 1)",
        "rows left out by mood: neg 2, pos 0, not known 1",
    )
    cached = load(tmp_path, max_length=4, label="mood", classes=["neg", "pos"], cache=str(tmp_path / "tokens"))
    for each in (found.train, cached.train):
        assert present(each.flaws).tolist() == [[True, False], [False, False], [False, True]]
        assert each.select(np.array([2])).flaws.tolist() == [[False, True]]  # type: ignore[union-attr]


def test_amounts_are_scaled_by_their_range(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "texts.csv").write_text("body,pay\nthe cat,20\nthe dog,35\nred sky,90\n")
    found = load(tmp_path, label="pay", task="regression", ranges={"pay": [20, 50]})
    assert found.train.labels[:, 0].tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(InvalidInput, match="'body' has a range or categories, but is no feature"):
        load(tmp_path, label="pay", task="regression", ranges={"body": [20, 50]})


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_blocks_do_not_change_what_is_read(folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder, f"texts.{suffix}", objective="masked_lm", group="lang")
    monkeypatch.setattr("dpsweep.workers.data.texts._ROWS_AT_ONCE", 7)
    monkeypatch.setattr(drawn, "_ROWS_AT_ONCE", 3)
    again = load(folder, f"texts.{suffix}", objective="masked_lm", group="lang")
    assert torch.equal(whole.train.features, again.train.features)
    assert torch.equal(whole.train.labels, again.train.labels)
    assert torch.equal(whole.train.groups, again.train.groups)


@pytest.mark.parametrize(
    ("first", "later", "found"),
    [
        ("2024-05-01", "ann", {"2024-05-01", "ann"}),
        ("2024-05-01", "2024-05-02", {"2024-05-01", "2024-05-02"}),
        (None, "ann", {"ann"}),
        ("bob", None, {"bob"}),
        ([], ["ann", "bob"], {"ann", "bob"}),
        (7, 8, {"7", "8"}),
    ],
)
def test_a_column_of_json_is_read_as_it_stands(
    tmp_path: Path, first: object, later: object, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "BYTES_AT_ONCE", 400)
    make_tokenizer(tmp_path / "tokenizer.json")
    rows = [{"body": "the cat", "score": 1, "who": first, "other": 1}] * 8
    rows += [{"body": "the dog", "score": 0.5, "who": later, "other": "one", "new": 1}] * 8
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = list[str]()

    def noted(tables: Sequence[pa.Table], user: str | None) -> tuple[str, ...]:
        named.extend(user_names(tables, user))
        return tuple(named)

    monkeypatch.setattr(drawn, "user_names", noted)
    source = load(tmp_path, "texts.jsonl", label="score", task="regression", user="who")
    assert set(named) == found
    assert set(source.train.labels[:, 0].tolist()) <= {1.0, 0.5}
    assert len(source.train) == 8 * sum(each not in (None, []) for each in (first, later))


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        ("7", '"ann"', "a column holds values of two types, number and string; write all of them alike"),
        ("7", "7.5", "a column of whole numbers holds another;"),
        ("7", '7, "who": 8', "a row names a column twice"),
        ("7", "7}\n[7]\n{", "a line of JSON is no object"),
        ("7", '7, "new": ' + "[" * 40_000 + "]" * 40_000, "a line holds values that are nested too deeply"),
        ("7", '7, "new": ' + '[\n"]",' * 300 + "1" + "]" * 300, "a line holds values that are nested too deeply"),
    ],
)
def test_json_that_cannot_be_read_is_told_without_its_values(
    tmp_path: Path, first: str, later: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "BYTES_AT_ONCE", 400)
    make_tokenizer(tmp_path / "tokenizer.json")
    lines = [f'{{"body": "the cat", "mood": "pos", "who": {value}}}\n' for value in (first, later) for _ in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    with pytest.raises(DataCorruption, match=said):
        load(tmp_path, "texts.jsonl", label="mood", user="who")


def test_texts_of_parquet_are_read_however_they_are_stored(folder: Path, tmp_path: Path) -> None:
    """As polars and others store them. Bytes that are no text are refused."""
    expected = load(folder, "texts.parquet", label="mood", user="who").train
    rows = parquet.read_table(folder / "texts.parquet")
    body = rows["body"].combine_chunks()
    at = rows.column_names.index("body")
    for stored in (body.cast(pa.string_view()), body.cast(pa.large_string()), body.dictionary_encode()):
        parquet.write_table(rows.set_column(at, "body", stored), tmp_path / "texts.parquet")
        found = load(folder, str(tmp_path / "texts.parquet"), label="mood", user="who").train
        assert torch.equal(found.features, expected.features), stored.type
    damaged = pa.array([b"\xff"] * len(rows), pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(rows), damaged.buffers())
    parquet.write_table(rows.set_column(at, "body", texts), tmp_path / "texts.parquet")
    (tmp_path / "texts.jsonl").write_bytes(b'{"body": "\xff", "mood": "a", "who": "b"}\n')
    for suffix in ("parquet", "jsonl"):
        with pytest.raises(DataCorruption, match="a text in it is not Unicode; write it as UTF-8"):
            load(folder, str(tmp_path / f"texts.{suffix}"), label="mood", user="who")


class TestMaskedTokens:
    """Rows of random tokens, of which the last positions are padding."""

    draw = np.random.default_rng(1)
    ids = draw.integers(3, VOCABULARY, (4000, 32)).astype(np.int32)
    own = np.arange(32) < draw.integers(1, 33, (4000, 1))
    block = Block(np.where(own, ids, PAD).astype(np.int32), own)

    def test_what_is_predicted_is_what_stood_there(self) -> None:
        ids, labels = masked_tokens(self.block, 0, MASK, VOCABULARY, 0.15, 3)
        counted = labels != IGNORED
        assert (labels[counted] == self.block.ids[counted]).all()
        assert (ids[~counted] == self.block.ids[~counted]).all()
        assert not counted[~self.own].any()
        assert counted.any(1).all(), "one of each row at least"

    def test_shares_are_those_of_the_definition(self) -> None:
        ids, labels = masked_tokens(self.block, 0, MASK, VOCABULARY, 0.15, 3)
        long = self.own.sum(1) >= 30
        counted = labels != IGNORED
        assert counted[long].sum() / self.own[long].sum() == pytest.approx(0.15, abs=0.02)
        assert (ids[counted] == MASK).mean() == pytest.approx(0.8 + 0.1 / VOCABULARY, abs=0.02)
        kept = (ids[counted] == labels[counted]).mean()
        assert kept == pytest.approx(0.1 + 0.1 / VOCABULARY, abs=0.02)

    def test_a_row_depends_on_its_position_and_the_seed_alone(self) -> None:
        ids, labels = masked_tokens(self.block, 0, MASK, VOCABULARY, 0.15, 3)
        part = Block(self.block.ids[100:120], self.own[100:120])
        some, of_some = masked_tokens(part, 100, MASK, VOCABULARY, 0.15, 3)
        assert (some == ids[100:120]).all()
        assert (of_some == labels[100:120]).all()
        changed = Block(self.block.ids.copy(), self.own.copy())
        changed.ids[7], changed.own[7] = PAD, False
        others, _ = masked_tokens(changed, 0, MASK, VOCABULARY, 0.15, 3)
        assert (np.delete(others, 7, 0) == np.delete(ids, 7, 0)).all()
        another, _ = masked_tokens(self.block, 0, MASK, VOCABULARY, 0.15, 4)
        assert (another != ids).any()


def test_the_next_token_is_predicted_up_to_the_padding() -> None:
    block = Block(np.array([[5, 6, 7, 0]], np.int32), np.array([[True, True, True, False]]))
    ids, labels = next_tokens(block, PAD)
    assert ids.tolist() == [[5, 6, 7, 0]]
    assert labels.tolist() == [[6, 7, IGNORED, IGNORED]]


def test_a_cut_keeps_users_whole_and_labels_with_their_rows(folder: Path) -> None:
    params = {"path": str(folder / "texts.jsonl"), "text": "body", "tokenizer": str(folder / "tokenizer.json")}
    spec = DataSpec("text", {**params, "max_length": LENGTH, "objective": "causal_lm", "user": "who"})
    dataset = load_dataset(spec)
    assert dataset.task == "language_modelling"
    assert dataset.num_classes == VOCABULARY
    assert not set(present(dataset.train.user_ids).tolist()) & set(present(dataset.test.user_ids).tolist())
    following = dataset.train.features[:, 1:].long()
    assert torch.equal(dataset.train.labels[:, :-1], torch.where(following == PAD, IGNORED, following))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "objective label needs `label`, a column; or set objective"),
        ({"label": "mood", "objective": "masked_lm"}, "objective masked_lm predicts tokens, not the column 'mood'"),
        ({"label": "moods"}, "there is no column 'moods' in .*; spell it"),
        ({"text": "bodies", "label": "mood"}, "there is no column 'bodies' in .*; spell it"),
        (
            {"objective": "masked_lm", "mask_token": "<m>"},
            r"no token '<m>'; name one that it has by `mask_token`; its special tokens are '\[PAD\]', .*'\[MASK\]'",
        ),
        ({"label": "mood", "padding_token": "<p>"}, "has no token '<p>'; name one that it has by `padding_token`"),
        ({"label": "mood", "max_length": 1}, "max_length is 1: Input should be greater than or equal to 2"),
        ({"label": "mood", "tokenizer": "/none.json"}, "there is no tokenizer /none.json; .*: hf download NAME"),
        ({"label": "mood", "mask_fraction": 1.0}, "mask_fraction is 1.0: Input should be less than 1"),
        ({"label": "mood", "classes": ["neg"]}, "has a value that is neither declared"),
        ({"label": ["mood", "lang"]}, "label names 2 columns, but classification has one; set task"),
        ({"label": "body"}, "the column 'body' is the text, and also a label, group or user"),
        ({"objective": "causal_lm", "task": "regression"}, "task regression is of `label`, but objective causal_lm"),
        ({"objective": "causal_lm", "classes": ["a"]}, "`classes` are of classification, but the task is language_mod"),
        ({"label": "mood", "objective": "next"}, "objective is 'next': Input should be 'label', 'masked_lm' or"),
    ],
)
def test_mistakes_are_named(folder: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load(folder, **params)


def test_other_columns_may_change_their_type(tmp_path: Path) -> None:
    """A CSV whose first block shows whole numbers where a later one has words."""
    make_tokenizer(tmp_path / "tokenizer.json")
    filling = " ".join(["the cat sat"] * 40)
    rows = [f"{filling},pos,{row}" for row in range(4000)] + ["the dog,neg,none of these"]
    (tmp_path / "texts.csv").write_text("\n".join(["body,mood,note", *rows]) + "\n")
    assert len(load(tmp_path, label="mood").train) == 4001


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_text_of_megabytes_is_read_and_a_row_beyond_a_block_is_named(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    rows = [{"body": body, "mood": mood} for body, mood in (("x" * 3_000_000, "pos"), ("red sky", "neg"))]
    table = "".join(f"{row['body']},{row['mood']}\n" for row in rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"texts.{suffix}").write_text({"csv": "body,mood\n" + table, "jsonl": lines}[suffix])
    assert len(load(tmp_path, f"texts.{suffix}", label="mood").train) == 2
    monkeypatch.setattr(drawn, "BYTES_AT_ONCE", 2**20)
    with pytest.raises(DataCorruption, match=r"a row is too long \(is a quote not closed\?\)"):
        load(tmp_path, f"texts.{suffix}", label="mood")


def test_a_quote_in_another_column_joins_no_rows_either(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "texts.csv").write_text('note,body,mood\nx,the cat,pos\n"x,red sky,neg\n"x,the dog,pos\n')
    with pytest.raises(DataCorruption, match="a quote joins lines 3 to 4 to one row"):
        load(tmp_path, label="mood")


def test_columns_of_csv_are_read_as_those_of_tables(tmp_path: Path) -> None:
    """Blanks around a value, NA where it is declared, flags in words; of the text itself, NA is still no text."""
    make_tokenizer(tmp_path / "tokenizer.json")
    rows = ["the cat,true,NA", "red sky, False , EU", "NA,true,EU", " dog ,1.0,EU"]
    (tmp_path / "texts.csv").write_text("\n".join(["body,good,region", *rows, ""]))
    of_region: dict[str, Any] = {"group": "region", "groups": ["NA", "EU"]}
    found = load(tmp_path, label="good", task="multi_label", **of_region)
    assert found.train.example_ids.tolist() == [0, 1, 3]
    assert found.train.labels.tolist() == [[1], [0], [1]]
    assert found.train.groups.tolist() == [0, 1, 1]
    with pytest.raises(DataCorruption, match="a column of numbers holds another text"):
        load(tmp_path, label="good", task="regression", **of_region)
    written = ["1", "1.00", "1.000000000000000000e+00", "TRUE", "0", "0.", "0.000000000000000000e+00", "False"]
    (tmp_path / "texts.csv").write_text("\n".join(["body,good", *(f"the cat,{each}" for each in written), ""]))
    assert load(tmp_path, label="good", task="multi_label").train.labels[:, 0].tolist() == [1] * 4 + [0] * 4
    (tmp_path / "texts.csv").write_text("body,good\nthe cat,1.01\n")
    with pytest.raises(InvalidInput, match="has a value besides 0 and 1"):
        load(tmp_path, label="good", task="multi_label")


def test_the_test_texts_are_others(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"test_path is the training table .* itself"):
        load(folder, label="mood", test_path=str(folder / "texts.csv"))
    make_texts(tmp_path / "more.jsonl", rows=20)
    found = load(folder, label="mood", test_path=str(tmp_path / "more.jsonl"), objective="label")
    assert present(found.test).example_ids.tolist() == list(range(200, 220))


def test_files_that_are_none_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json is no tokenizer file"):
        load(folder, label="mood", tokenizer=str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text("{")
    with pytest.raises(DataCorruption, match=r"cannot read .*texts\.jsonl"):
        load(folder, label="mood", path=str(tmp_path / "texts.jsonl"))
    with pytest.raises(InvalidInput, match=r"there is no .*/nowhere\.csv; give the path of the data"):
        load(folder, label="mood", path=str(tmp_path / "nowhere.csv"), tokenizer=str(tmp_path / "nowhere.json"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match=r"pipe is a pipe, a socket or a device; give the path of a file"):
        load(folder, label="mood", tokenizer=str(tmp_path / "pipe"))
    (tmp_path / "texts.txt").write_text("the cat")
    with pytest.raises(
        InvalidInput, match=r"of type '\.txt', which is not read; save or unpack it as another; valid: \.csv"
    ):
        load(folder, label="mood", path=str(tmp_path / "texts.txt"))
    with pytest.raises(InvalidInput, match=r"is a folder; give the path of a file of a type in \.csv"):
        load(folder, label="mood", path=str(tmp_path))


def _jumps(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"]["far"] = 2**32 - 1


def _lacks_its_unknown(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["unk_token"] = "[none]"
    del tokenizer["model"]["vocab"]["bad"]


def _unfolds(tokenizer: dict[str, Any]) -> None:
    """Put a thousand letters in place of each, again and again; the package would end the process."""
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": 1000 * "a"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [longer, {"type": "Prepend", "prepend": "a"}, longer]}


def _panics(tokenizer: dict[str, Any]) -> None:
    """Name a special token that the file does not describe."""
    first, rest = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [first, rest], "pair": [rest], "special_tokens": {}}
    tokenizer["post_processor"] = template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_jumps, r"gives a token the id 4,294,967,295, .* at most 4,194,304"),
        (_unfolds, r"makes texts more than 64 times as long before they are cut"),
        (_lacks_its_unknown, r"tokenizer\.json cannot encode the texts"),
        (_panics, r"tokenizer\.json cannot encode the texts \(PanicException\)"),
    ],
)
def test_a_tokenizer_that_was_forged_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    """Before memory is taken for as many tokens as it claims, and whatever its Rust code raises."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidInput, match=message):
        load(folder, label="mood", tokenizer=str(tmp_path / "tokenizer.json"))
