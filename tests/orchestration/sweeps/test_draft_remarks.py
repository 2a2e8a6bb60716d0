"""What a draft says of tables that people cannot use as they are: missing names, mixed units, marks, rare classes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.text_column import TextColumn
from tests.workers.data_folders import make_tokenizer

ROWS = range(120)


def table(folder: Path, header: str, *columns: list[str]) -> Path:
    """A CSV file of these columns; without a line of names for an empty header."""
    path = folder / "table.csv"
    path.write_text("".join(f"{line}\n" for line in (header, *map(",".join, zip(*columns, strict=True))) if line))
    return path


LABELS = [str(row % 2) for row in ROWS]
SEXES = ["fm"[row // 2 % 2] for row in ROWS]
SCORES = [f"{row % 60 + 0.25}" for row in ROWS]
MISSING = "IS THE LINE OF NAMES MISSING?"


def test_a_table_without_names_is_asked_about_and_years_are_names(tmp_path: Path) -> None:
    without = draft_sweep(table(tmp_path, "", SCORES, SEXES, LABELS), ["0"], "f")
    assert MISSING in without
    years = table(tmp_path, "2019,2020,sex,y", SCORES, SCORES[::-1], SEXES, LABELS)
    assert MISSING not in draft_sweep(years, ["y"], "sex")
    assert MISSING not in draft_sweep(years, ["y"], None)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([f"{row}.5 {'kg' if row % 5 else 'g'}" for row in ROWS], 'in several ways, such as "0.5 g" and "1.5 kg"; use'),
        ([f'"{row},25"' if row % 2 else f"{row}.25" for row in ROWS], 'several ways, such as "0.25" and "1,25"'),
        ([f'"[{row}.5, -1e-3, {row}]"' for row in ROWS], "are lists of numbers; as lists of a .parquet file they can"),
        ([f"word{row % 60}" for row in ROWS], "which has 60 different texts, more than 50; declare"),
        ([f"P{row}" for row in ROWS], "which is different in every row, as an identifier is; if it is a text"),
        (
            [f"{1 + row % 28}.{1 + row % 12}.{1900 + row}" for row in ROWS],
            "which holds dates or times; as numbers, such as days",
        ),
        ([f"{1900 + row}-01-02T12:05" for row in ROWS], "which holds dates or times; as numbers, such as"),
        ([f"{'€' if row % 5 else '$'}{row}" for row in ROWS], 'in several ways, such as "$0" and "€1"; use'),
        (
            [f"{1 + row % 28} March {1900 + row}" for row in ROWS],
            "which holds dates or times; as numbers, such as days",
        ),
        ([f"{1900 + row}0131" for row in ROWS[1:]] + ["20000229"], "which holds dates or times; as numbers, such as"),
        ([f"<{row}" if row % 9 == 0 else f"{row}.5" for row in ROWS], 'numbers and texts such as "<0"; leave those'),
    ],
    ids=["units", "signs", "lists", "words", "ids", "dates", "times", "currencies", "months", "digits", "limits"],
)
def test_a_column_that_is_left_out_is_left_out_by_cause(tmp_path: Path, written: list[str], said: str) -> None:
    alone = table(tmp_path, "odd,sex,y", written, SEXES, LABELS)
    with pytest.raises(InvalidInput, match=r"can be a feature of a model.*Left out: 'odd', ") as refused:
        draft_sweep(alone, ["y"], "sex")
    beside = draft_sweep(table(tmp_path, "odd,score,sex,y", written, SCORES, SEXES, LABELS), ["y"], "sex")
    (line,) = [line for line in beside.splitlines() if line.startswith('  # left out: "odd"')]
    assert said in line
    assert said in str(refused.value)


@pytest.mark.parametrize(("mark", "is_mark"), [("-999", True), ("99999", True), ("-1", False)])
def test_a_number_that_stands_for_a_missing_value_is_asked_about(tmp_path: Path, mark: str, is_mark: bool) -> None:
    scores = [mark if row % 10 == 0 else score for row, score in enumerate(SCORES)]
    text = draft_sweep(table(tmp_path, "score,y", scores, LABELS), ["y"], None)
    remark = f'# "score" has {mark} in many rows, far from all other numbers; if it stands for a missing value, leave'
    assert (remark in text) is is_mark


def test_points_between_thousands_are_asked_about(tmp_path: Path) -> None:
    of_thousands = [f"{1 + row}.{row:03d}" if row % 5 else f"{row + 5}" for row in ROWS]
    drafts = [
        draft_sweep(table(tmp_path, "pay,sex,y", each, SEXES, LABELS), ["y"], "sex") for each in (of_thousands, SCORES)
    ]
    asked = '"pay" has three digits after each point: if points separate thousands, add numbers: {"pay": comma}'
    assert [asked in draft for draft in drafts] == [True, False]


def test_a_draft_says_that_accuracy_hides_whether_a_rare_class_is_found(tmp_path: Path) -> None:
    rare = [str(int(row % 10 == 0)) for row in ROWS]
    drafts = [draft_sweep(table(tmp_path, "score,sex,y", SCORES, SEXES, each), ["y"], "sex") for each in (rare, LABELS)]
    assert ["# 90.0% of the rows have one class" in draft for draft in drafts] == [True, False]
    assert ["select_by: worst_group_balanced_accuracy" in draft for draft in drafts] == [True, False]


@pytest.mark.parametrize(
    ("values", "tells"),
    [
        (["07" if row % 20 == 0 else "01" if row % 2 else "20" for row in ROWS], True),  # a code of the outcome
        ([f"{row % 2 * 100 + row % 60}" for row in ROWS], True),  # a number that one cut divides
        ([f"{row % 40}" for row in ROWS], False),  # enough values to fit by chance
        ([f"{row % 60 + 0.25}" for row in ROWS], False),
        ([("a", "b", "c")[row % 3] for row in ROWS], False),
    ],
)
def test_a_column_that_tells_the_class_is_asked_about(tmp_path: Path, values: list[str], tells: bool) -> None:
    labels = [("no", "yes")[row % 2] for row in ROWS]
    text = draft_sweep(table(tmp_path, "mark,sex,y", values, SEXES, labels), ["y"], "sex")
    assert ('# CONFIRM: "mark" alone tells the class of nearly every row' in text) == tells
    assert '"sex" alone' not in text


def test_a_rare_class_is_told_by_its_own_code_alone(tmp_path: Path) -> None:
    """A column is compared with what the most frequent class leaves to be found, not with all rows."""
    rare = [row % 12 == 0 for row in ROWS]
    labels = ["died" if is_rare else "left" for is_rare in rare]
    for code, tells in ((rare, True), ([row % 12 == 1 for row in ROWS], False)):
        path = table(tmp_path, "code,x,y", [str(int(each)) for each in code], SCORES, labels)
        assert ('"code" alone tells' in draft_sweep(path, ["y"], None)) == tells


def test_a_label_of_a_few_counts_may_be_a_regression(tmp_path: Path) -> None:
    counts = [str(row % 4) for row in ROWS]
    drafts = [draft_sweep(table(tmp_path, "score,sex,y", SCORES, SEXES, of), ["y"], "sex") for of in (counts, LABELS)]
    assert ["counts and other amounts are learnt by task: regression" in of for of in drafts] == [True, False]


def test_a_column_of_structs_is_no_group(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    nested = [{"sex": sex} for sex in SEXES]
    parquet.write_table(pa.table({"score": list(map(float, SCORES)), "who": nested, "y": LABELS}), path)
    with pytest.raises(InvalidInput, match=r"the column 'who' holds values of type struct<sex: string>; name another"):
        draft_sweep(path, ["y"], "who")


def test_a_method_that_counts_groups_is_drafted_if_every_group_is_larger_than_the_noise(tmp_path: Path) -> None:
    for few, is_drafted in ((12, False), (40, True)):
        groups = ["x" if row < few else "fm"[row % 2] for row in ROWS]
        text = draft_sweep(table(tmp_path, "score,sex,y", SCORES, groups, LABELS), ["y"], "sex")
        assert ("  - {name: dpsgd_f" in text) == is_drafted
        assert ("too few rows of a group for the noise of these counts" in text) != is_drafted


def test_classes_and_groups_of_few_rows_are_named(tmp_path: Path) -> None:
    towns = ["rare" if row < 5 else "town" if row % 2 else "city" for row in ROWS]
    labels = ["once" if row == 7 else each for row, each in enumerate(LABELS)]
    text = draft_sweep(table(tmp_path, "score,town,y", SCORES, towns, labels), ["y"], "town")
    assert '# fewer than 10 rows each: "once"; too few to learn or to test' in text
    assert '# fewer than 10 rows each: "rare"; too few' in text


def test_a_label_whose_value_counts_as_missing_is_refused_by_cause(tmp_path: Path) -> None:
    labels = ["NA" if row % 3 == 0 else "known" for row in ROWS]
    with pytest.raises(InvalidInput, match=r'has 1 distinct value, and 33% .*: "NA" counts as missing; write'):
        draft_sweep(table(tmp_path, "score,y", SCORES, labels), ["y"], None)


def test_remarks_above_the_names_are_named(tmp_path: Path) -> None:
    path = table(tmp_path, "# made on Monday\nscore,y", SCORES, LABELS)
    with pytest.raises(DataCorruption, match="does a remark stand above the names"):
        draft_sweep(path, ["y"], None)


def test_an_encoding_beyond_cp1252_is_proposed(tmp_path: Path) -> None:
    town = "大阪"
    path = table(tmp_path, "score,town,y", SCORES, [town if row % 3 else "x" for row in ROWS], LABELS)
    path.write_bytes(path.read_text().encode("shift_jis"))
    sweep = parse_sweep(draft_sweep(path, ["y"], "town"))
    assert sweep.data[0].params["groups"] == ["x", town]
    assert plan_sweep(sweep).refusals == ()


@pytest.mark.parametrize(("encoding", "label"), [("cp1251", "ответ"), ("shift_jis", "結果"), ("cp1252", "Größe")])
def test_an_encoding_is_found_by_the_name_of_the_label(tmp_path: Path, encoding: str, label: str) -> None:
    path = table(tmp_path, f"score,{label}", SCORES, LABELS)
    path.write_bytes(path.read_text().encode(encoding))
    data = parse_sweep(draft_sweep(path, [label], None)).data[0]
    assert (data.params["encoding"], data.params["label"]) == (encoding, label)


def test_a_packed_table_is_to_be_unpacked(tmp_path: Path) -> None:
    path = table(tmp_path, "score,y", SCORES, LABELS)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InvalidInput, match=r"is no table of text: it is packed by gzip; unpack it"):
        draft_sweep(path, ["y"], None)


def test_numbers_near_the_largest_and_endless_names_are_left_out(tmp_path: Path) -> None:
    huge = [f"{'-' * (row % 2)}1e308" if row % 9 else "1" for row in ROWS]
    path = table(tmp_path, f"score,huge,{'n' * 1100},y", SCORES, huge, [str(row % 8) for row in ROWS], LABELS)
    text = draft_sweep(path, ["y"], None)
    assert parse_sweep(text).data[0].params["features"] == ["score"]
    assert 'left out: "huge", whose numbers are too large for a range' in text
    assert "whose name is too long for a key of a sweep file" in text
    long = "n" * 1100
    with pytest.raises(InvalidInput, match=r"the name of the label 'n{20}'\.\.\. has 1,100 characters; shorten it"):
        draft_sweep(table(tmp_path, f"score,{long}", SCORES, [str(row) for row in ROWS]), [long], None)
    with pytest.raises(InvalidInput, match="the numbers of 'y' are too large to be a label"):
        draft_sweep(table(tmp_path, "score,y", SCORES, [f"{row}e306" for row in ROWS]), ["y"], None)


def test_values_that_differ_by_a_sign_that_is_not_shown_are_asked_about(tmp_path: Path) -> None:
    text = draft_sweep(
        table(tmp_path, "score,sex,y", SCORES, ["f\u200b" if row % 2 else "f" for row in ROWS], LABELS), ["y"], "sex"
    )
    assert '# "f" and "f\\u200b" differ only by case or blanks' in text


def test_points_beside_decimal_commas_are_of_thousands(tmp_path: Path) -> None:
    prices, plain = [f"{40 + row * 37 % 90}.{200 + row} €" for row in ROWS], [f"{row * 7 % 50 + 1}.500" for row in ROWS]
    widths = [f'"{row * 11 % 70},5 m"' for row in ROWS]
    sweep = parse_sweep(draft_sweep(table(tmp_path, "price,rent,width,y", prices, plain, widths, LABELS), ["y"], None))
    assert sweep.data[0].params["numbers"] == dict.fromkeys(("price", "rent", "width"), "comma")
    low, high = sweep.data[0].params["ranges"]["price"]
    assert low > 1000 < high
    assert plan_sweep(sweep).refusals == ()
    points = [f"{row * 7 % 50}.5" for row in ROWS]
    mixed = parse_sweep(draft_sweep(table(tmp_path, "price,x,width,y", prices, points, widths, LABELS), ["y"], None))
    assert mixed.data[0].params["numbers"]["price"] == "point"


def test_an_amount_that_differs_in_every_row_is_no_identifier(tmp_path: Path) -> None:
    text = draft_sweep(table(tmp_path, "score,y", SCORES, [str(row * 37 % 120 * 90) for row in ROWS]), ["y"], None)
    assert "task: regression" in text
    assert "identifier" not in text


def test_a_text_among_numbers_stands_for_a_missing_one(tmp_path: Path) -> None:
    scores = ["k.A." if row % 5 == 0 else score for row, score in enumerate(SCORES)]
    text = draft_sweep(table(tmp_path, "score,sex,y", scores, SEXES, LABELS), ["y"], "sex")
    assert 'missing in 20.0% of the rows, which are left out ("k.A." too)' in text
    words = [f"word{row}" if row % 5 == 0 else score for row, score in enumerate(SCORES)]
    with pytest.raises(InvalidInput, match='numbers and texts such as "word0"'):
        draft_sweep(table(tmp_path, "score,sex,y", words, SEXES, LABELS), ["y"], "sex")


def test_rows_without_a_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("body,mood\n" + "the cat,a\n,b\nthe dog,b\nred sky,a\n" * 20)
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    drafted = draft_sweep(tmp_path / "texts.csv", ["mood"], None, read=TextColumn("body", tokenizer))
    assert '  text: "body"    # missing in 25.0% of the rows, which are left out' in drafted


def test_an_amount_learnt_from_texts_has_the_range_that_its_bound_is_for(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("body,pay\n" + "".join(f"the cat,{20_000 + row}\n" for row in ROWS))
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    drafted = draft_sweep(tmp_path / "texts.csv", ["pay"], None, read=TextColumn("body", tokenizer))
    assert parse_sweep(drafted).data[0].params["ranges"] == {"pay": [20_000, 20_150]}
    assert plan_sweep(parse_sweep(drafted)).refusals == ()


END = "<|endoftext|>"
BESIDE: Mapping[str, tuple[Mapping[str, object], Mapping[str, object], str | None]] = {
    "nothing": ({}, {}, None),
    "its end, by id": ({"model_max_length": 1024}, {"pad_token_id": None, "eos_token_id": 4}, END),
    "its end": ({"eos_token": END}, {}, END),
    "several ends": ({}, {"eos_token_id": [4, 0]}, END),
    "a description": ({"pad_token": {"content": "cat"}, "eos_token": END}, {"eos_token_id": 4}, "cat"),
    "padding before the end": ({"eos_token": END}, {"pad_token_id": 1}, "cat"),
    "tokens that it lacks": (
        {"pad_token": "\ud800", "eos_token": [END]}, {"pad_token_id": -1, "eos_token_id": True}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_the_token_that_fills_texts_is_drafted_from_the_files_of_the_tokenizer(tmp_path: Path, case: str) -> None:
    """Without one in the tokenizer itself, as in that of GPT-2, the source reads no text."""
    tokenizers = pytest.importorskip("tokenizers")
    words, model, expected = BESIDE[case]
    known = {word: place for place, word in enumerate(("the", "cat", "dog", "[UNK]"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([END])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "texts.csv").write_text("body,mood\n" + "the cat,a\nthe dog,b\n" * 40)
    text = TextColumn("body", tmp_path / "tokenizer.json")
    sweep = parse_sweep(draft_sweep(tmp_path / "texts.csv", ["mood"], None, read=text))
    assert sweep.data[0].params.get("padding_token") == expected
    assert (plan_sweep(sweep).refusals == ()) == (expected is not None)


def test_codes_are_categories_and_no_amounts(tmp_path: Path) -> None:
    few = [str(10_115 + 900 * (row % 7)) for row in ROWS]
    many, each = [str(10_000 + 37 * (row % 60)) for row in ROWS], [str(900_000 + 77 * row) for row in ROWS]
    zero = [f"{2_138 + row % 3:05}" for row in ROWS]
    path = table(tmp_path, "x,zipCode,postal_code,phone,fips,zipper,y", SCORES, few, many, each, zero, few, LABELS)
    text = draft_sweep(path, ["y"], None)
    params = parse_sweep(text).data[0].params
    assert params["features"] == ["x", "zipper", "zipCode", "fips"]
    assert [*params["ranges"]] == ["x", "zipper"]
    assert params["categories"] == {"zipCode": sorted({*few}), "fips": ["02138", "02139", "02140"]}
    assert plan_sweep(parse_sweep(text)).refusals == ()
    said = {line.split('"')[1]: line for line in text.splitlines() if "codes" in line or "left out" in line}
    assert said["zipCode"].endswith("codes by its name: if they are amounts, give a range instead")
    assert "fips" not in said, "zeros in front are of no amount"
    assert (
        "different codes, by its name, more than 50; declare the categories that matter, or read" in said["postal_code"]
    )
    assert said["phone"].endswith("which is different in every row, as an identifier is")
    as_text = parse_sweep(draft_sweep(path, ["y"], None, hashed="postal_code")).data[0].params
    assert [*as_text["hashed"]] == ["postal_code"]
    amount = parse_sweep(draft_sweep(path, ["postal_code"], None))
    assert (amount.data[0].params["task"], "zipCode" in amount.data[0].params["categories"]) == ("regression", True)


def test_features_that_leave_few_rows_complete_are_left_out(tmp_path: Path) -> None:
    gaps = [["" if row * (each + 3) % 11 < 5 else f"{row / 7:.2f}" for row in ROWS] for each in range(6)]
    path = table(tmp_path, "x,a,b,c,d,e,f,y", SCORES, *gaps, LABELS)
    text = draft_sweep(path, ["y"], None)
    features = parse_sweep(text).data[0].params["features"]
    assert (features[0], len(features)) == ("x", 2)
    lines = [line for line in text.splitlines() if "with it, less than half of the rows would be complete" in line]
    assert {line.split('"')[1] for line in lines} == {*"abcdef"} - {*features}
    (trained,) = {trial.dataset.train_size + trial.dataset.test_size for trial in plan_sweep(parse_sweep(text)).trials}
    assert trained == 120 - sum(not value for value in gaps["abcdef".index(features[1])]) >= 60


def test_several_columns_in_one_option_are_said_to_be_several(tmp_path: Path) -> None:
    path = table(tmp_path, "x,sex,origin,y", SCORES, SEXES, [*SEXES[1:], "f"], LABELS)
    with pytest.raises(
        InvalidInput, match="'sex, origin' is not in the table, but 'sex' and 'origin' are; draft by 'sex'"
    ):
        draft_sweep(path, ["y"], "sex, origin")
    with pytest.raises(InvalidInput, match="but 'y' and 'sex' are; repeat --label for each"):
        draft_sweep(path, ["y,sex"], None)
    with pytest.raises(InvalidInput, match="the group column 'sex,origon' is not in the table; did you mean"):
        draft_sweep(path, ["y"], "sex,origon")


def test_one_place_is_no_embedding_and_durations_are_no_texts(tmp_path: Path) -> None:
    path = table(tmp_path, "emb[0],emb[2],y", SCORES, SCORES[5:] + SCORES[:5], LABELS)
    assert parse_sweep(draft_sweep(path, ["y"], None)).data[0].params["features"] == ["emb[0]", "emb[2]"]
    columns = {"x": [*map(float, SCORES)], "took": pa.array([*ROWS], pa.duration("s")), "y": LABELS}
    parquet.write_table(pa.table(columns), tmp_path / "times.parquet")
    text = draft_sweep(tmp_path / "times.parquet", ["y"], None)
    assert '# left out: "took", which holds dates or times; as numbers' in text


def test_a_label_that_counts_the_rows_is_asked_about(tmp_path: Path) -> None:
    said = '# "y" has whole numbers that only count the rows, as an identifier does'
    for amounts, is_said in (([str(row + 7) for row in ROWS], True), ([str(row * row % 997) for row in ROWS], False)):
        assert (said in draft_sweep(table(tmp_path, "x,y", SCORES, amounts), ["y"], None)) == is_said
