"""Drafted sweeps of texts: with a tokenizer, a pretrained model, or words hashed to features."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.text_column import TextColumn
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.orchestration.invoking import printed
from tests.orchestration.processes import dpsweep
from tests.workers.data_folders import make_texts, make_tokenizer


def test_texts_are_drafted_with_a_tokenizer(tmp_path: Path) -> None:
    path, tokenizer = make_texts(tmp_path / "texts.jsonl"), make_tokenizer(tmp_path / "tokenizer.json")
    plan = plan_sweep(parse_sweep(draft_sweep(path, ["mood"], "lang", read=TextColumn("body", tokenizer))))
    assert (plan.refusals, plan.warnings) == ((), ())
    assert plan.trials[0].dataset.class_names == ("neg", "pos")
    assert plan.trials[0].dataset.feature_shape == (128,)


def messages(path: Path, rows: int = 1_500) -> Path:
    """Short texts, of which one in ten is of the rare kind, with words of its own."""
    draw = random.Random(0)
    lines = []
    for row in range(rows):
        is_spam = row % 10 == 0
        words = [draw.choice(("meet", "later", "lunch", "home", "thanks", "tomorrow", "see", "you")) for _ in range(6)]
        words[draw.randrange(6)] = draw.choice(("prize", "winner", "claim", "urgent")) if is_spam else str(row)
        lines.append(f"{' '.join(words)},{'spam' if is_spam else 'ham'}")
    path.write_text("\n".join(["message,kind", *lines]) + "\n")
    return path


def test_a_table_of_texts_alone_is_drafted_and_its_rare_class_is_found(tmp_path: Path) -> None:
    """Without any file beside the table, at an epsilon of 1, and with nothing taken from the rows."""
    drafted = yaml.safe_load(draft_sweep(messages(tmp_path / "messages.csv"), ["kind"], None))
    assert drafted["data"]["hashed"] == {"message": 1024}
    drafted |= {"clipping": drafted["clipping"][1], "seeds": 0, "norms": "off"}
    drafted["privacy"]["target_epsilon"] = 1
    plan = plan_sweep(parse_sweep(yaml.safe_dump(drafted)))
    assert (plan.refusals, plan.warnings, plan.trials[0].dataset.reasons) == ((), (), ())
    groups = run_trial(plan.trials[0].spec, str(tmp_path / "trial")).evaluation.groups
    found = {group.name: group.accuracy or 0.0 for group in groups}
    assert found["spam"] > 0.5
    assert found["ham"] > 0.9


def test_columns_of_several_words_are_texts_and_any_other_if_asked_for(tmp_path: Path) -> None:
    """Signs that need no blanks are words, too; names and identifiers are not."""
    table = tmp_path / "notes.csv"
    draw = random.Random(0)
    written = ((f"nota numero {row}", "汉字汉字汉字" + chr(0x4E00 + row), f"user{row}") for row in range(120))
    table.write_text("note,han,user,y\n" + "".join(f"{','.join(each)},{draw.randint(0, 1)}\n" for each in written))
    for asked, hashed in ((None, ["note", "han"]), ("user", ["note", "han", "user"])):
        text = draft_sweep(table, ["y"], None, hashed=asked)
        sweep = parse_sweep(text)
        assert list(sweep.data[0].params["hashed"]) == hashed
        assert ('# left out: "user", which is different in every row' in text) == (asked is None)
        assert plan_sweep(sweep).refusals == ()
    with pytest.raises(InvalidInput, match="the text column 'y' is also a label, group or user"):
        draft_sweep(table, ["y"], None, hashed="y")


def test_texts_are_drafted_with_a_pretrained_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, model = make_texts(tmp_path / "texts.csv"), tmp_path / "model"
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    transformers.BertModel(transformers.BertConfig(vocab_size=16, **small)).save_pretrained(model)
    named = (
        "--label",
        "mood",
        "--group",
        "lang",
        "--text",
        "body",
        "--pretrained",
        model,
        "--to",
        tmp_path / "own.yaml",
    )
    for table, lacking in ((path, "has no tokenizer.json"), (tmp_path / "nowhere.csv", "there is no /.*nowhere.csv;")):
        refused = dpsweep("init", table, *named)
        assert (refused.returncode, bool(re.search(lacking, refused.stderr))) == (2, True)
    with pytest.raises(InvalidInput, match=r"there is no folder .*; fetch a model to one: hf download NAME"):
        TextColumn.read_by("body", None, tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"model.safetensors is a file; give the folder of the model, .*/model$"):
        TextColumn.read_by("body", None, model / "model.safetensors")
    for flag, step in (("--text", "join several to one column"), ("--image", "draft by 'body', as a model reads one")):
        named_twice = ("--label", "mood", flag, "body", flag, "lang", "--to", tmp_path / "two.yaml")
        with pytest.raises(InvalidInput, match=f"{flag} names one column; {step}"):
            printed("init", path, *named_twice)
    tokenizer = make_tokenizer(model / "tokenizer.json")
    assert dpsweep("init", path, *named).returncode == 0
    plan = plan_sweep(parse_sweep((tmp_path / "own.yaml").read_text()))
    assert plan.refusals == ()
    assert "--text body --pretrained model`" in (tmp_path / "own.yaml").read_text()
    frozen = known(plan.trials[0].spec.preprocessing)
    assert frozen.params["path"] == str(model)
    config = transformers.RobertaConfig(vocab_size=16, max_position_embeddings=12, **small)
    transformers.RobertaModel(config).save_pretrained(model)
    text = TextColumn.read_by("body", tokenizer, model)
    drafted = draft_sweep(path, ["mood"], None, read=text)
    assert "  max_length: 10    # tokens" in drafted
    assert "norm of a row, about 1.4 here" in drafted  # features of length 1, and a constant
    assert "tokenizer.json of its own" not in drafted
    assert plan_sweep(parse_sweep(drafted)).refusals == ()


def test_another_tokenizer_than_the_models_is_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path, model = make_texts(tmp_path / "texts.csv"), tmp_path / "model"
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    transformers.BertModel(transformers.BertConfig(vocab_size=16, **small)).save_pretrained(model)
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(tokenizer.read_text())
    (model / "tokenizer.json").write_text(json.dumps({**content, "truncation": {"max_length": 4}}))

    def told() -> bool:
        drafted = draft_sweep(path, ["mood"], None, read=TextColumn("body", tokenizer, model))
        notes = [note for note in plan_sweep(parse_sweep(drafted)).warnings if "makes other tokens than" in note]
        assert notes == [note for note in notes if note.startswith(f"text_features {model}: its folder has")]
        assert bool(notes) == ("tokenizer.json of its own, which makes other tokens" in drafted)
        return bool(notes)

    assert not told()
    (model / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": []}))
    assert told()
