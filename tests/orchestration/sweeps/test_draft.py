"""Drafted sweeps: what they propose, what they leave out, and that they plan cleanly."""

from __future__ import annotations

import random
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

from dpsweep.accounting.errors import InvalidInput, full_text
from dpsweep.accounting.mechanism.units import User
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.text_column import TextColumn
from tests.orchestration.processes import dpsweep
from tests.workers.data_folders import make_numbers, make_texts

ODD = 'farm"er: [x], #1'
COLUMNS = ("id", "age", "income", "job", "sex", "city", "code", "empty", "active", "approved")


def people(rows: int = 200) -> list[tuple[object, ...]]:
    draw = random.Random(0)
    return [
        (
            1000 + row,
            None if row % 50 == 0 else draw.randint(18, 91),
            round(draw.uniform(0.3, 97654.4), 2),
            draw.choice(["clerk", ODD, "yes"]),
            draw.choice("fm"),
            f"city{row % 80}",
            draw.choice(["007", "010"]),
            None,
            draw.choice([True, False]),
            draw.choice([0, 1]),
        )
        for row in range(rows)
    ]


def write(folder: Path, suffix: str, rows: int = 200) -> Path:
    path = folder / f"peo ple{suffix}"
    values = people(rows)
    if suffix == ".parquet":
        parquet.write_table(pa.table({name: [row[i] for row in values] for i, name in enumerate(COLUMNS)}), path)
    else:
        quoted = (",".join("" if v is None else '"' + str(v).replace('"', '""') + '"' for v in row) for row in values)
        path.write_text("\n".join([",".join(COLUMNS), *quoted]) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_draft_plans_cleanly_and_declares_all_that_it_uses(tmp_path: Path, suffix: str) -> None:
    text = draft_sweep(write(tmp_path, suffix), ["approved"], "sex")
    sweep = parse_sweep(text)
    plan = plan_sweep(sweep)
    incomplete = [row for row in people() if row[1] is None]
    of_labels, of_sexes = (Counter(row[place] for row in incomplete) for place in (9, 4))
    assert (plan.refusals, plan.warnings) == (
        (),
        (
            "data peo ple: 4 of 200 rows (2.0%) are left out: they lack a value ('age' 4)",
            f"data peo ple: rows left out by approved: 0 {of_labels[0]}, 1 {of_labels[1]}",
            f"data peo ple: rows left out by sex: f {of_sexes['f']}, m {of_sexes['m']}",
        ),
    )
    assert len(plan.trials) == 15
    assert plan.trials[0].dataset.reasons == ()
    assert plan.trials[0].dataset.group_names == ("f", "m")
    params = sweep.data[0].params
    assert params["ranges"] == {"age": [15, 95], "income": [0, 100000]}
    assert params["categories"]["job"] == ["clerk", ODD, "yes"]
    assert params["categories"]["code"] == ["007", "010"]
    assert "active" in params["features"]
    for column, reason in (("id", "identifier"), ("city", "more than 50"), ("empty", "no values")):
        assert column not in params["features"]
        (line,) = [line for line in text.splitlines() if line.startswith(f'  # left out: "{column}"')]
        assert reason in line


def test_a_draft_says_that_it_was_read_off_the_data(tmp_path: Path) -> None:
    text = draft_sweep(write(tmp_path, ".csv"), ["approved"], None)
    assert "CONFIRM BEFORE YOU RUN IT" in text
    assert parse_sweep(text).drafted
    assert text.count("read off the data") >= 3
    assert "missing in 2.0% of the rows" in text
    assert "groups:" not in text
    assert parse_sweep(text).data[0].params["features"][0] == "age"


@pytest.mark.parametrize(("rows", "models", "bound"), [(1_000, ["logistic"], 0.45), (3_000, ["logistic", "mlp"], 0.51)])
def test_a_hidden_layer_is_drafted_where_a_batch_is_large_beside_its_noise(
    tmp_path: Path, rows: int, models: list[str], bound: float
) -> None:
    draw = random.Random(0)
    path = tmp_path / "table.csv"
    numbers = (",".join(f"{draw.gauss(0, 1):.4f}" for _ in range(4)) for _ in range(rows))
    path.write_text("a,b,c,d,y\n" + "".join(f"{each},{'nt'[row % 2]}\n" for row, each in enumerate(numbers)))
    sweep = parse_sweep(draft_sweep(path, ["y"], None))
    assert [each.name for each in sweep.model] == models
    assert sweep.clipping[1].params["bound"] == bound
    assert plan_sweep(sweep).refusals == ()


@pytest.mark.parametrize(
    ("labels", "task", "loss", "ranges"),
    [
        (["y"], "regression", "mse", ["y", "x0"]),
        (["y", "z"], "regression", "mse", ["y", "z", "x0"]),
        (["red", "green", "blue"], "multi_label", "binary_cross_entropy", ["x0"]),
    ],
)
def test_other_tasks_are_drafted(tmp_path: Path, labels: list[str], task: str, loss: str, ranges: list[str]) -> None:
    """By what the labels hold; targets have ranges, too, so that their gradients are not cut at random."""
    text = draft_sweep(make_numbers(tmp_path / "numbers.csv"), labels, "sex")
    assert f"  task: {task}    # CONFIRM" in text
    sweep = parse_sweep(text)
    plan = plan_sweep(sweep)
    assert (plan.refusals, plan.warnings) == ((), ())
    assert plan.trials[0].dataset.task == task
    assert plan.trials[0].dataset.reasons == ()
    assert [each.name for each in sweep.loss] == [loss]
    tuned = text.replace("# tune:", "tune:").replace("# public_fraction:", "public_fraction:")
    assert plan_sweep(parse_sweep(tuned)).refusals == (), "what is proposed in a comment plans"
    assert set(ranges) <= set(sweep.data[0].params["ranges"])
    assert not set(labels) & set(sweep.data[0].params["features"])


def test_the_bound_of_a_regression_falls_with_the_deviation_of_its_targets(tmp_path: Path) -> None:
    """A target with a heavy tail takes a small part of its range, where noise for the whole of it would hide it."""
    draw = random.Random(0)
    bounds, told = [], []
    for tail in (0.1, 1.5):
        rows: list[object] = [round(draw.lognormvariate(0.0, tail), 4) for _ in range(2_000)]
        path = table(tmp_path, {"x": [row % 60 for row in range(2_000)], "y": rows})
        drafted = draft_sweep(path, ["y"], None)
        assert "with the deviation of the targets" in drafted
        told.append("few are large: narrow it, or take logarithms" in drafted)
        bounds.append(yaml.safe_load(drafted)["clipping"][1]["bound"])
        assert yaml.safe_load(drafted)["optimizer"]["learning_rate"] < 0.1, "a larger one diverges in a hidden layer"
    assert bounds[0] > 3.0 * bounds[1]
    assert told == [False, True]


def test_the_owner_of_a_row_is_no_feature(tmp_path: Path) -> None:
    table, target = write(tmp_path, ".csv"), tmp_path / "mine.yaml"
    done = dpsweep("init", table, "--label", "approved", "--group", "sex", "--user", "city", "--to", target)
    assert (done.returncode, done.stderr) == (0, "")
    data = parse_sweep(target.read_text()).data[0].params
    assert data["user"] == "city"
    assert "age" in data["features"]
    assert "city" not in data["features"]
    per_user = re.sub("# (unit: user|user_sampling|max_records)", r"\1", target.read_text())
    assert {trial.spec.unit for trial in plan_sweep(parse_sweep(per_user)).trials if trial.spec.is_private} == {User(4)}
    unknown = dpsweep("init", table, "--label", "approved", "--user", "citi", "--to", tmp_path / "other.yaml")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "the user column 'citi' is not in the table; did you mean 'city'?" in unknown.stderr
    two = dpsweep(
        "init", table, "--label", "approved", "--group", "sex", "--group", "city", "--to", tmp_path / "2.yaml"
    )
    assert (two.returncode, two.stderr.startswith("error: --group names one column; draft by 'sex'")) == (2, True)


def test_a_row_in_place_of_the_names_is_not_quoted(tmp_path: Path) -> None:
    table = tmp_path / "people.csv"
    table.write_text("Canary,41,Paris\n" + "Other,42,Rome\n" * 60)
    with pytest.raises(InvalidInput, match="first line holds numbers, so it is not shown") as refused:
        draft_sweep(table, ["approved"], None)
    assert "Canary" not in full_text(refused.value)


def test_a_name_in_a_table_adds_no_key_to_the_draft(tmp_path: Path) -> None:
    """Types of columns that are left out are shown in a comment, with the names in them."""
    table = pa.table(
        {
            "x": [row / 7 for row in range(60)],
            "y": 30 * ["a", "b"],
            "z": 60 * [{"a>\r\nnotify: {command: [id]} #\x1b": 1}],
        }
    )
    parquet.write_table(table, tmp_path / "people.parquet")
    drafted = draft_sweep(tmp_path / "people.parquet", ["y"], None)
    assert "notify" not in yaml.safe_load(drafted)


def test_labels_that_are_not_alike_are_refused(tmp_path: Path) -> None:
    numbers = make_numbers(tmp_path / "numbers.csv")
    for labels in (["y", "red"], ["sex", "red"]):
        with pytest.raises(InvalidInput, match=f"'{labels[0]}', 'red' are neither all of 0 and 1"):
            draft_sweep(numbers, labels, None)
    with pytest.raises(InvalidInput, match="the text column 'bodi' is not in the table; did you mean 'body'"):
        draft_sweep(make_texts(tmp_path / "texts.csv"), ["mood"], None, read=TextColumn("bodi", tmp_path))
    texts = dpsweep("init", tmp_path / "texts.csv", "--label", "mood", "--group", "lang", "--tokenizer", tmp_path)
    assert (texts.returncode, "it reads a column of texts; name it with --text" in texts.stderr) == (2, True)


def test_what_cannot_be_drafted_is_refused(tmp_path: Path) -> None:
    table = write(tmp_path, ".csv")
    for label, group, message in (
        ("aproved", "sex", "did you mean 'approved'"),
        ("city", "sex", "label column 'city' has [0-9]+ distinct values; name a column with 2 to 50"),
        ("approved", "city", "group column 'city' has [0-9]+ distinct"),
        ("empty", None, "has 0 distinct values"),
    ):
        with pytest.raises(InvalidInput, match=message):
            draft_sweep(table, [label], group)
    with pytest.raises(InvalidInput, match="has 20 rows; a sweep needs at least 50"):
        draft_sweep(write(tmp_path, ".csv", rows=20), ["approved"], "sex")
    with pytest.raises(InvalidInput, match="the label 'approved' is named more than once"):
        draft_sweep(table, ["approved", "sex", "approved"], None)
    with pytest.raises(
        InvalidInput, match=r"is a folder; give the path of a file of a type in \.csv, \.tsv, \.jsonl, \.parquet"
    ):
        draft_sweep(tmp_path, ["approved"], "sex")
    with pytest.raises(InvalidInput, match="there is no"):
        draft_sweep(tmp_path / "none.csv", ["approved"], "sex")
    long = dpsweep("init", f"{'n' * 300}.csv", "--label", "approved")
    assert (long.returncode, long.stderr.count("\n")) == (2, 1)
    assert "there is no" in long.stderr


def test_the_command_writes_a_private_file_once(tmp_path: Path) -> None:
    table, target = write(tmp_path, ".csv"), tmp_path / "mine.yaml"
    done = dpsweep("init", table, "--label", "approved", "--group", "sex", "--to", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert "dpsweep plan" in done.stdout
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    again = dpsweep("init", table, "--label", "approved", "--to", target)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "may hold your changes" in again.stderr


def table(folder: Path, columns: dict[str, list[object]], name: str = "table.csv", sign: str = ",") -> Path:
    path, rows = folder / name, zip(*columns.values(), strict=True)
    lines = [sign.join(columns), *(sign.join(f'"{value}"' if value != "" else "" for value in row) for row in rows)]
    path.write_text("\n".join(map(str, lines)) + "\n")
    return path


LABELS: list[object] = [row % 2 for row in range(120)]
SEXES: list[object] = ["fm"[row // 2 % 2] for row in range(120)]


def test_commands_that_are_told_can_be_pasted(tmp_path: Path) -> None:
    file = table(
        tmp_path, {"paid back?": LABELS, "sex": SEXES, "age": [20 + row % 50 for row in range(120)]}, "my people.csv"
    )
    target = tmp_path / "my people.yaml"
    done = dpsweep("init", file, "--label", "paid back?", "--group", "sex", "--to", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert shlex.split(done.stdout.partition("then: ")[2]) == ["dpsweep", "plan", str(target)]
    drafted = target.read_text().splitlines()[0].split("`")[1]
    assert shlex.split(drafted)[2:] == ["my people.csv", "--label", "paid back?", "--group", "sex"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("written", "convention", "span"),
    [
        (lambda row: f"{row % 60},{row:02d}5", "comma", [0, 60]),
        (lambda row: f"{row % 60 + 1},{row % 60:03d}", "point", [0, 65000]),
        (lambda row: f"1.{row:03d},50", "comma", [1000, 1150]),
        (lambda row: f"{row % 60} %", "point", [0, 60]),
        (lambda row: f"${row}.50", "point", [0, 150]),
        (lambda row: f"{row % 60} kg", "point", [0, 60]),
        (lambda row: "?" if row < 6 else f"{row}.5", "point", [0, 150]),
        (lambda row: f"{row % 10},{row:03d}", "comma", [0, 9.5]),
        (lambda row: f"({row}.50)", "point", [-150, 0]),
        (lambda row: f"{row % 9 + 1},{row % 90 + 10},{row:03d}", "point", [100000, 1000000]),
        (lambda row: f"€ {row % 9 + 1}.{row:03d},5", "comma", [1000, 9500]),
        (lambda row: "n. d." if row < 6 else f"{row}.5", "point", [0, 150]),
    ],
)
def test_numbers_in_other_conventions_are_numbers(
    tmp_path: Path, written: Callable[[int], str], convention: str, span: list[float]
) -> None:
    path = table(tmp_path, {"pay": [written(row) for row in range(120)], "sex": SEXES, "y": LABELS})
    text = draft_sweep(path, ["y"], "sex")
    sweep = parse_sweep(text)
    params = sweep.data[0].params
    assert params["numbers"] == {"pay": convention}
    assert params["ranges"]["pay"] == span
    plan = plan_sweep(sweep)
    assert plan.refusals == ()
    assert plan.trials[0].dataset.feature_shape == (1,)


def test_codes_dates_and_words_stay_texts(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "code": [f"00{row % 9}" for row in range(120)],
        "day": [f"2024-01-0{row % 9 + 1}" for row in range(120)],
        "size": ["A1" if row % 3 else "A2" for row in range(120)],
        "version": [f"1.{row % 3}.2" for row in range(120)],
    }
    sweep = parse_sweep(draft_sweep(table(tmp_path, {**columns, "y": LABELS}), ["y"], None))
    assert "numbers" not in sweep.data[0].params
    assert set(sweep.data[0].params["categories"]) == set(columns)


def test_a_declared_NA_is_a_value_and_a_draft_says_what_counts_as_missing(tmp_path: Path) -> None:
    countries: list[object] = [("DK", "NA", "NO", "")[row % 4] for row in range(120)]
    path = table(tmp_path, {"score": [row % 60 for row in range(120)], "country": countries, "y": LABELS})
    text = draft_sweep(path, ["y"], "country")
    (line,) = [line for line in text.splitlines() if line.startswith("  groups:")]
    assert 'missing in 50.0% of the rows, which are left out ("NA" too, unless you list it as a value)' in line
    with_it = parse_sweep(text.replace('groups: ["DK", "NO"]', 'groups: ["DK", "NA", "NO"]'))
    plan = plan_sweep(with_it)
    assert plan.trials[0].dataset.group_names == ("DK", "NA", "NO")
    assert "data table: 30 of 120 rows (25.0%) are left out: they lack a value ('country' 30)" in plan.warnings
    assert "data table: rows left out by country: DK 0, NA 0, NO 0, not known 30" in plan.warnings


@pytest.mark.parametrize(
    ("name", "values", "is_said"),
    [
        ("user id", [row % 40 for row in range(120)], True),
        ("customerId", [f"c{row % 70}" for row in range(120)], True),
        ("user id", list(range(120)), False),
        ("valid", [row % 40 for row in range(120)], False),
    ],
)
def test_a_draft_asks_whether_a_column_says_whose_row_it_is(
    tmp_path: Path, name: str, values: list[object], is_said: bool
) -> None:
    path = table(tmp_path, {"score": [row % 60 for row in range(120)], name: values, "y": LABELS})
    said = f'  # "{name}": if it says whose row it is, draft again with --user'
    assert (said in draft_sweep(path, ["y"], None)) == is_said
    assert said not in draft_sweep(path, ["y"], None, user=name)


def test_a_draft_counts_who_is_left_out(tmp_path: Path) -> None:
    ages: list[object] = ["" if sex == "f" and row % 3 == 0 else row % 60 for row, sex in enumerate(SEXES)]
    path = table(
        tmp_path,
        {"age": ages, "score": ["" if row == 1 else row % 50 for row in range(120)], "sex": SEXES, "y": LABELS},
    )
    lines = draft_sweep(path, ["y"], "sex").splitlines()
    assert "  # 21 of 120 rows (17.5%) are left out: they lack a value ('age' 20, 'score' 1)" in lines
    assert "  # 20 of these lack 'age' alone, and stay if it is no feature" in lines
    assert not any("lack 'score' alone" in line for line in lines), "one row is no reason to give up a feature"
    assert "  # rows left out by sex: f 21, m 0" in lines


def test_values_that_differ_by_case_or_blanks_are_asked_about(tmp_path: Path) -> None:
    labels: list[object] = [("False", "FALSE", "true", "True", "True ")[row % 5] for row in range(120)]
    text = draft_sweep(table(tmp_path, {"x": [row % 60 for row in range(120)], "y": labels}), ["y"], None)
    assert '# "FALSE" and "False" differ only by case or blanks: the same class?' in text
    assert '# "True" and "true" differ only' in text
    assert "list [false, true] without quotes, which stand for every spelling" in text
    drafted = draft_sweep(
        table(
            tmp_path, {"x": [row % 60 for row in range(120)], "y": [("No", "no", "Yes")[row % 3] for row in range(120)]}
        ),
        ["y"],
        None,
    )
    assert 'add ignore_case: ["y"], and list ["no", "yes"]' in drafted
    merged = drafted.replace('classes: ["No", "Yes", "no"]', 'ignore_case: ["y"]\n  classes: ["no", "yes"]')
    plan = plan_sweep(parse_sweep(merged))
    assert plan.refusals == ()
    assert plan.trials[0].dataset.class_names == ("no", "yes")
    coded: list[object] = [("caf\u00e9", "cafe\u0301", "no")[row % 3] for row in range(120)]
    text = draft_sweep(table(tmp_path, {"x": [row % 60 for row in range(120)], "y": coded}), ["y"], None)
    assert "differ only by how Unicode spells a letter: the same class? If so, spell them alike in the table" in text


def test_settings_are_drafted_for_the_rows_that_are_complete(tmp_path: Path) -> None:
    """Where half of few rows lack a value, counts of groups would cost more than the target."""
    jobs: list[object] = ["" if row % 2 else "clerk" if row % 4 else "farmer" for row in range(120)]
    drafted = draft_sweep(
        table(tmp_path, {"job": jobs, "x": [row % 60 for row in range(120)], "y": LABELS}), ["y"], None
    )
    plan = plan_sweep(parse_sweep(drafted))
    assert plan.refusals == ()
    assert {trial.spec.clipping.name for trial in plan.trials} == {"none", "flat"}
    assert "dpsgd_f, whose bounds follow the groups" in drafted


def test_an_embedding_is_features_and_other_nested_columns_are_left_out(tmp_path: Path) -> None:
    lists = [[row / 120.0, 1.0, -row / 7.0] for row in range(120)]
    columns = {
        "emb": pa.array(lists, pa.list_(pa.float32(), 3)),
        "free": pa.array(lists, pa.list_(pa.float32())),
        "words": pa.array([["a"]] * 120),
        "gaps": pa.array([None, *lists[1:]], pa.list_(pa.float32(), 3)),  # which Arrow writes, but cannot read
        "states": pa.array([None, *["a"] * 119]),
        "raw": pa.array([bytes([255, row]) for row in range(120)]),
        "y": LABELS,
    }
    parquet.write_table(pa.table(columns), tmp_path / "emb.parquet")
    text = draft_sweep(tmp_path / "emb.parquet", ["y"], None)
    assert '  # left out: "words", whose values are of type list<element: string>' in text
    assert '  # left out: "gaps", whose values are of type fixed_size_list<element: float>[3]' in text
    assert '  # left out: "states", which has the same value in every row that has one' in text
    assert '  # left out: "raw", which holds bytes; if they are pictures, draft with --image "raw" to learn' in text
    sweep = parse_sweep(text)
    assert sweep.data[0].params["features"] == ["emb", "free"]
    assert set(sweep.data[0].params["ranges"]) == {"emb", "free"}
    plan = plan_sweep(sweep)
    assert plan.refusals == ()
    assert plan.trials[0].dataset.feature_shape == (6,)
    assert plan.trials[0].dataset.reasons == ()


@pytest.mark.parametrize(("name", "sign"), [("table.tsv", "\t"), ("table.csv", ";"), ("table.csv", "\t")])
def test_tabs_and_semicolons_separate_too(tmp_path: Path, name: str, sign: str) -> None:
    path = table(tmp_path, {"x": [f"{row},5" for row in range(120)], "sex": SEXES, "y": LABELS}, name, sign)
    if sign == "\t" and name == "table.csv":
        path.write_bytes(path.read_text().encode("utf-16"))
    sweep = parse_sweep(draft_sweep(path, ["y"], "sex"))
    assert sweep.data[0].params["numbers"] == {"x": "comma"}
    assert plan_sweep(sweep).refusals == ()


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("encoding", "declared"), [("cp1252", "cp1252"), ("utf-8-sig", None), ("utf-16", None), ("utf-16-le", "utf-16-le")]
)
def test_other_encodings_are_drafted_and_read(tmp_path: Path, encoding: str, declared: str | None) -> None:
    towns: list[object] = [("Köln", "Århus")[row // 2 % 2] for row in range(120)]
    path = table(tmp_path, {"größe": [row % 60 for row in range(120)], "stadt": towns, "y": LABELS})
    path.write_bytes(path.read_text().encode(encoding))
    sweep = parse_sweep(draft_sweep(path, ["y"], "stadt"))
    assert sweep.data[0].params.get("encoding") == declared
    assert sweep.data[0].params["features"] == ["größe"]
    plan = plan_sweep(sweep)
    assert plan.refusals == ()
    assert plan.trials[0].dataset.group_names == ("Köln", "Århus")


def test_names_that_occur_twice_are_told_apart(tmp_path: Path) -> None:
    path, rows = tmp_path / "twice.csv", range(120)
    path.write_text(
        "x, x,z,w,y\n" + "".join(f"{row % 60},{row % 50},{row % 7}.5,{row % 7}.5, {row % 2}\n" for row in rows)
    )
    text = draft_sweep(path, ["y"], None)
    assert '  # left out: "w", whose values are those of "z"' in text
    sweep = parse_sweep(text)
    assert sweep.data[0].params["features"] == ["x", "x.1", "z"]
    assert plan_sweep(sweep).refusals == ()
    with pytest.raises(InvalidInput, match="has more than one column called 'x'; rename the others"):
        draft_sweep(path, ["x"], None)
    stored = [pa.array([row % 60 for row in rows]), pa.array([row % 50 for row in rows]), pa.array(LABELS)]
    parquet.write_table(pa.Table.from_arrays(stored, names=["x", "x", "y"]), tmp_path / "twice.parquet")
    in_parquet = parse_sweep(draft_sweep(tmp_path / "twice.parquet", ["y"], None))
    assert in_parquet.data[0].params["features"] == ["x", "x.1"]
    assert plan_sweep(in_parquet).refusals == ()


def test_columns_by_a_sign_that_is_not_known_are_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "carets.csv"
    path.write_text("x^y\n" + "1.5^no\n2.5^yes\n" * 60)
    with pytest.raises(InvalidInput, match=r"not in the table; .* it has one column: are columns separated by another"):
        draft_sweep(path, ["y"], None)


def test_only_whole_numbers_that_count_the_rows_are_identifiers(tmp_path: Path) -> None:
    drawn = random.Random(0)
    pay: list[object] = drawn.sample(range(10_000, 90_000), 120)
    columns: dict[str, list[object]] = {"pay": pay, "id": [1000 + 2 * row for row in range(120)], "y": LABELS}
    text = draft_sweep(table(tmp_path, columns), ["y"], None)
    assert parse_sweep(text).data[0].params["features"] == ["pay"]
    assert '# "pay" is different in every row; if it is an identifier, leave it out' in text
    assert '# left out: "id"' in text


def test_a_separator_may_be_named_or_stand_beside_others(tmp_path: Path) -> None:
    for name, header in (("named.csv", 'sep=|\n"x, in m"|s|y'), ("counted.csv", '"x, in m";s;y')):
        sign = "|" if header.startswith("sep") else ";"
        rows = "".join(f"{row % 60},5{sign}{'pq'[row // 2 % 2]}{sign}{row % 2}\n" for row in range(120))
        (tmp_path / name).write_text(f"{header}\n{rows}")
        sweep = parse_sweep(draft_sweep(tmp_path / name, ["y"], None))
        assert sweep.data[0].params["numbers"] == {"x, in m": "comma"}
        assert plan_sweep(sweep).refusals == ()


def test_enough_rows_get_private_ranges_and_nothing_is_read_off_them(tmp_path: Path) -> None:
    drawn = random.Random(0)
    tips: list[object] = [min(drawn.lognormvariate(0.8, 0.5), 33.0) if row % 2 else 0.0 for row in range(1000)]
    text = draft_sweep(table(tmp_path, {"tip": tips, "y": [row % 2 for row in range(1000)]}), ["y"], None)
    assert "Ranges of features need no confirmation: every trial finds them privately, inside its epsilon." in text
    assert "33" not in text.replace(str(tmp_path), "")
    sweep = parse_sweep(text)
    assert sweep.reference
    assert (sweep.data[0].params["unscaled"], "ranges" in sweep.data[0].params) == (["tip"], False)
    (component,) = sweep.preprocessing
    assert component is not None
    assert (component.name, component.params["columns"]) == ("robust_ranges", 1)
    plan = plan_sweep(sweep)
    assert (plan.refusals, plan.warnings) == ((), ())
    private = next(trial for trial in plan.trials if trial.spec.is_private)
    assert [release.name for release in private.trace.releases] == ["robust_ranges"]
    assert plan.trials[0].dataset.reasons == ()
