"""Tables of the user's own: what becomes of their columns, what the notes say, and what is said when they are amiss."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest
import torch

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.data import Source, load_source
from dpsweep.workers.data.conventions import number_of
from dpsweep.workers.spec import DataSpec
from tests.known import known
from tests.workers.data_folders import make_table
from tests.workers.private_details import assert_private

FEATURES = {"ranges": {"age": [0, 100]}, "categories": {"job": ["baker", "smith", "tailor"]}}


def read(path: Path, **params: object) -> Source:
    """A table whose label is the column y unless another is named."""
    source = "parquet" if path.suffix == ".parquet" else "csv"
    return load_source(DataSpec(source, {"path": str(path), "label": "y", **params}))


class TestTable:
    def test_declared_columns_become_features(self, tmp_path: Path) -> None:
        path = tmp_path / "people.csv"
        csv.write_csv(pa.table({"age": [10, 30, 99], "job": ["b", "a", "?"], "y": ["no", "yes", "no"]}), path)
        source = read(path, ranges={"age": [0, 50]}, categories={"job": ["a", "b"]}, classes=["no", "yes"])
        expected = [[0.2, 0.0, 1.0], [0.6, 1.0, 0.0], [1.0, 0.0, 0.0]]
        assert torch.allclose(source.train.features, torch.tensor(expected))
        assert source.train.labels.tolist() == [0, 1, 0]
        assert source.notes == ()

    def test_texts_become_counts_that_depend_on_no_other_row(self, tmp_path: Path) -> None:
        """Also where a text of numbers alone looks like one, and for a text without letters."""
        path = tmp_path / "notes.csv"

        def features(*texts: str) -> torch.Tensor:
            csv.write_csv(pa.table({"note": texts, "y": ["a", "b"] * (len(texts) // 2)}), path)
            source = read(path, hashed={"note": 64}, classes=["a", "b"])
            assert source.reasons == ()
            return source.train.features

        together = features("Call me later", "call me  LATER", "12 345", "汉字", "!", "another")
        assert together.norm(dim=1).tolist() == pytest.approx([3.0] * 6)
        assert torch.equal(together[0], together[1]), "neither case nor the number of blanks counts"
        assert torch.equal(together[2:4], features("12 345", "汉字"))

    def test_rows_with_missing_values_leave_their_id_unused(self, tmp_path: Path) -> None:
        path = make_table(tmp_path / "people.parquet")
        source = read(path, label="income", features=["age", "job"])
        assert len(source.train) == 119
        assert 5 not in source.train.example_ids
        assert source.notes[-1] == "1 of 120 rows (0.8%) are left out: they lack a value ('age' 1)"

    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    @pytest.mark.parametrize("declared", [{"ranges": {"x": [0, 10]}}, {"unscaled": ["x"]}, {}], ids=str)
    def test_rows_with_an_infinite_number_are_left_out(
        self, tmp_path: Path, suffix: str, declared: dict[str, object]
    ) -> None:
        rows = pa.table({"x": [1.0, math.inf, 3.0, None, -math.inf, 5.0], "y": ["a", "b"] * 3})
        path = tmp_path / f"made.{suffix}"
        csv.write_csv(rows, path) if suffix == "csv" else parquet.write_table(rows, path)
        source = read(path, features=["x"], classes=["a", "b"], **declared)
        assert source.train.example_ids.tolist() == [0, 2, 5]
        said = "3 of 6 rows (50.0%) are left out: they lack a value or hold an infinite number ('x' 3)"
        assert said in source.notes

    @pytest.mark.parametrize(
        ("declared", "learnt"),
        [
            ({}, ("ranges", "classes", "groups")),
            ({"ranges": {"age": [0, 100]}}, ("ranges", "classes", "groups")),
            ({"classes": ["high", "low"]}, ("ranges", "groups")),
            ({**FEATURES, "groups": ["f", "m"]}, ("classes",)),
            ({**FEATURES, "classes": ["high", "low"]}, ("groups",)),
            ({**FEATURES, "classes": ["high", "low"], "groups": ["f", "m"]}, ()),
        ],
    )
    def test_all_that_is_learnt_from_the_rows_is_said(
        self, tmp_path: Path, declared: dict[str, object], learnt: tuple[str, ...]
    ) -> None:
        path = make_table(tmp_path / "people.csv")
        params = {"path": str(path), "label": "income", "group": "sex", "features": ["age", "job"], **declared}
        source = load_source(DataSpec("csv", params))
        assert source.reasons == tuple(f"{what}_from_rows" for what in learnt)
        columns = ["job"] if "ranges" in declared else ["age", "job"]
        said = (f"no range or categories: {', '.join(columns)}",) if "ranges" in learnt else ()
        assert source.notes[: len(said)] == said
        unnamed = load_source(DataSpec("csv", {name: params[name] for name in params if name != "features"}))
        assert not any("job" in note for note in unnamed.notes), "only the file's first line gives these names"

    def test_values_are_taken_as_they_are_spelt(self, tmp_path: Path) -> None:
        (tmp_path / "spelt.csv").write_text("zip,y,g\n007,0,True\n08,1,NA\n08,1,Zürich\n7,0,\n007,10,True\n")
        path, params = tmp_path / "spelt.csv", {"group": "g", "categories": {"zip": ["007", "08"]}}
        source = read(path, **params)
        assert source.train.features.tolist() == [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        assert source.class_names == ("0", "1", "10")
        assert source.group_names == ("group 1", "group 2"), "nobody declared the names: only the rows tell them"
        declared = read(path, **params, groups=["True", "Zürich"])
        assert declared.group_names == ("True", "Zürich")
        assert declared.train.groups.equal(source.train.groups)
        assert source.train.example_ids.tolist() == [0, 2, 4]

    def test_what_is_declared_without_quotes_stands_for_all_its_spellings(self, tmp_path: Path) -> None:
        (tmp_path / "spelt.csv").write_text("x,b,y\n1,True,0.0\n01,FALSE,1.0\n1e0,true,0\n2.50,false,1\nsNaN,yes,1\n")
        declared = {"categories": {"x": ["01", 1, 2.5], "b": [True]}, "classes": [0.0, 1.0]}
        source = read(tmp_path / "spelt.csv", **declared)
        expected = [[0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
        assert source.train.features.tolist() == expected
        assert source.class_names == ("0", "1")
        assert source.train.labels.tolist() == [0, 1, 0, 1, 1]

    def test_long_numbers_without_quotes_are_told_apart(self, tmp_path: Path) -> None:
        (tmp_path / "long.csv").write_text(f"x,y\n1,{2**62}\n2,{2**62 + 1}\n3,{2**62}.0\n")
        declared = {"classes": [2**62 + 1, 2**62], "ranges": {"x": [0, 4]}}
        source = read(tmp_path / "long.csv", **declared)
        assert source.train.labels.tolist() == [1, 0, 1]

    @pytest.mark.parametrize("names", [[False, True], ["false", "true"], ["False", "True"], ["FALSE", "TRUE"]])
    def test_booleans_are_declared_in_any_spelling(self, tmp_path: Path, names: list[object]) -> None:
        columns = {"x": [True, False, None, True], "y": [True, False, True, False]}
        path = tmp_path / "booleans.parquet"
        parquet.write_table(pa.table(columns), path)
        source = read(path, categories={"x": names}, classes=names)
        assert source.train.features.tolist() == [[0, 1], [1, 0], [0, 1]]
        assert source.train.labels.tolist() == [1, 0, 0]
        assert source.class_names == tuple(str(name).lower() if isinstance(name, bool) else name for name in names)
        with pytest.raises(
            InvalidInput, match=r"column 'x' of .* holds booleans, but 'yes' is declared; .* false, true"
        ):
            read(path, categories={"x": ["yes", "True"]})

    @pytest.mark.parametrize("params", [{}, {"user": "u"}, {"label": "u", "task": "regression"}])
    def test_names_in_nested_values_are_withheld(self, tmp_path: Path, params: dict[str, str]) -> None:
        path = tmp_path / "votes.parquet"
        parquet.write_table(pa.table({"x": [1.0, 2.0], "y": ["a", "b"], "u": [{"ann": 1}, {"bob": 2}]}), path)
        with pytest.raises(InvalidInput, match="holds struct, but") as refused:
            read(path, **params)
        assert "ann" not in str(refused.value)

    @pytest.mark.parametrize("value", [0, -3, 2**53 + 1, 1_700_000_000_000_000_000, -(2**62), 0.5])
    def test_a_number_that_never_changes_becomes_zero(self, tmp_path: Path, value: float) -> None:
        parquet.write_table(pa.table({"x": [value] * 2, "y": ["a", "b"]}), tmp_path / "same.parquet")
        source = read(tmp_path / "same.parquet")
        assert source.train.features.tolist() == [[0.0], [0.0]]

    def test_numbers_that_differ_by_less_than_a_float_holds(self, tmp_path: Path) -> None:
        columns = {"x": pa.array([2**64 - 2, 2**64 - 1], pa.uint64()), "y": ["a", "b"]}
        parquet.write_table(pa.table(columns), tmp_path / "near.parquet")
        source = read(tmp_path / "near.parquet")
        assert source.train.features.tolist() == [[0.0], [0.0]]

    def test_numbers_beyond_what_a_float_holds(self, tmp_path: Path) -> None:
        columns = {
            "wide": [0, 2**62, 2**63 - 1],
            "far": [-1e308, 0.0, float("inf")],
            "money": [Decimal("0.25"), Decimal("0.50"), Decimal("1.25")],
            "y": [0.0, 1.0, float("nan")],
            "owner": [2**62, 2**62 + 1, 2**62],
        }
        parquet.write_table(pa.table(columns), tmp_path / "wide.parquet")
        ranges = {"wide": [0, 2**63], "far": [-1, 1], "money": [0, 1]}
        source = read(tmp_path / "wide.parquet", user="owner", ranges=ranges, classes=[0, 1.0])
        assert source.train.features.tolist() == [[0.0, 0.0, 0.25], [0.5, 0.5, 0.5]]
        assert known(source.train.user_ids).tolist() == [0, 1]

    def test_a_category_that_only_the_test_rows_have_is_all_zeros(self, tmp_path: Path) -> None:
        for name, job in (("train", "baker"), ("test", "pilot")):
            (tmp_path / f"{name}.csv").write_text(f"job,y\n{job},a\nsmith,b\n")
        source = read(tmp_path / "train.csv", test_path=str(tmp_path / "test.csv"))
        assert known(source.test).features.tolist() == [[0.0, 0.0], [0.0, 1.0]]

    def test_users_are_the_same_in_both_tables(self, tmp_path: Path) -> None:
        for name, users in (("train", [1, 2, 1]), ("test", ["2", "x", "1"])):
            parquet.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": ["a", "b", "b"], "u": users}), tmp_path / name)
            (tmp_path / name).rename(tmp_path / f"{name}.parquet")
        source = read(tmp_path / "train.parquet", test_path=str(tmp_path / "test.parquet"), user="u")
        assert source.test is not None
        assert (known(source.train.user_ids).tolist(), known(source.test.user_ids).tolist()) == ([0, 1, 0], [1, 2, 0])

    def test_types_of_parquet(self, tmp_path: Path) -> None:
        columns = {
            "size": [1.0, float("nan"), 3.0, 5.0],
            "married": [True, False, None, False],
            "town": pa.array(["x", "y", "x", "y"]).dictionary_encode(),
            "y": pa.array([10, 2, 10, 2], pa.int8()),
        }
        parquet.write_table(pa.table(columns), tmp_path / "typed.parquet")
        source = read(tmp_path / "typed.parquet")
        assert source.train.example_ids.tolist() == [0, 3]
        assert source.class_names == ("2", "10")
        assert source.train.features.tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0]]

    def test_json_lines_are_read_as_parquet_is(self, tmp_path: Path) -> None:
        """Also a number after whole ones, a list, a value that is not there, and a text that looks like a time."""
        rows: list[dict[str, object]] = [
            {"size": 1, "at": "2020-01-02", "e": [0, 1.5], "y": 10},
            {"size": 2.5, "at": "2020-01-02 00:00", "e": [2, 3], "y": 2},
            {"size": None, "at": "x", "e": [2, 3], "y": 2},
            {"at": "x", "e": [2, 3], "y": 2},
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        days = {"categories": {"at": ["2020-01-02", "2020-01-02 00:00"]}, "unscaled": ["size", "e"]}
        found = [read(tmp_path / f"rows.{suffix}", **days).train for suffix in ("jsonl", "parquet")]
        assert found[0].features.tolist() == found[1].features.tolist()
        assert found[0].features.sum(1).tolist() == [3.5, 8.5]
        assert found[0].labels.tolist() == found[1].labels.tolist() == [1, 0]
        (tmp_path / "deep.jsonl").write_text(f'{{"y": {"[" * 200}{"]" * 200}}}\n')
        with pytest.raises(DataCorruption, match="a line holds values that are nested too deeply"):
            read(tmp_path / "deep.jsonl")

    @pytest.mark.parametrize("is_list", [False, True])
    def test_texts_that_are_not_unicode_are_refused(self, tmp_path: Path, is_list: bool) -> None:
        """Arrow itself takes any bytes of these files for texts."""
        (tmp_path / "rows.jsonl").write_bytes(b'{"y": "a", "x": ' + (b'["\xff"]' if is_list else b'"\xff"') + b"}\n")
        stored = pa.array([b"\xff", b"a"], pa.binary())
        texts = pa.Array.from_buffers(pa.string(), 2, stored.buffers())
        lists = pa.ListArray.from_arrays([0, 1, 2], texts)
        parquet.write_table(pa.table({"y": ["a", "b"], "x": lists if is_list else texts}), tmp_path / "rows.parquet")
        for suffix in ("jsonl", "parquet"):
            with pytest.raises(DataCorruption, match="a text in it is not Unicode; write it as UTF-8"):
                read(tmp_path / f"rows.{suffix}")
        (tmp_path / "half.jsonl").write_text('{"y": "\\ud800"}\n')
        with pytest.raises(DataCorruption, match="a text in it is not Unicode; write it as UTF-8"):
            read(tmp_path / "half.jsonl")

    def test_users_are_numbered(self, tmp_path: Path) -> None:
        path = make_table(tmp_path / "people.csv")
        source = read(path, label="income", user="id", group="sex")
        assert known(source.train.user_ids).unique().numel() == 30
        assert source.group_names == ("group 1", "group 2")

    def test_test_rows_have_ids_after_the_training_rows(self, tmp_path: Path) -> None:
        train, test = make_table(tmp_path / "a.csv"), make_table(tmp_path / "b.csv", 20)
        source = read(train, label="income", test_path=str(test))
        assert source.test is not None
        assert source.test.example_ids.min() == 120
        assert source.test.features.shape[1] == source.train.features.shape[1]

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"label": "incme"}, "no column 'incme' in .*people.csv; spell it"),
            ({"label": "income", "group": "gender"}, "no column 'gender'"),
            ({"label": "income", "ranges": {"agee": [0, 1]}}, "'agee' has a range or categories, but is no feature"),
            ({"label": "income", "ranges": {"age": [5, 5]}}, "must be increasing"),
            ({"label": "income", "ranges": {"age": 5}}, "ranges.age is 5: "),
            ({"label": "income", "ranges": {"age": [None, 5]}}, "ranges.age.0 is None: Input should be a valid number"),
            ({"label": "income", "ranges": {"age": [0, float("inf")]}}, "ranges.age.1 is inf: .* finite number"),
            ({"label": "income", "ranges": {"age": [-1e308, 1e308]}}, "must be increasing and finite"),
            ({"label": "income", "ranges": {"job": [0, 1]}}, "'job' has a range but holds more than numbers"),
            ({"label": "income", "categories": {"job": "clerk"}}, "categories.job is 'clerk'"),
            ({"label": "income", "categories": {"job": ["smith", "smith"]}}, "categories of 'job' .* all different"),
            ({"label": "income", "categories": {"job": []}}, "categories of 'job' .* at least one"),
            (
                {"label": "income", "ranges": {"age": [0, 9]}, "categories": {"age": [1]}},
                "more than one of a range, categories and a place",
            ),
            ({"label": "income", "features": ["income"]}, "also a feature"),
            ({"label": "income", "features": ["age", "age"]}, "`features` names 'age' more than once"),
            ({"label": "income", "features": "age"}, "features is 'age'"),
            ({"label": 3}, "label.str is 3: Input should be a valid string"),
            (
                {"label": "income", "classes": [False, True]},
                "label column 'income' has a value that is neither declared",
            ),
            ({"label": "income", "classes": ["low", None]}, "classes.1 is None: write null and NaN in quotes"),
            ({"label": "income", "classes": ["high", "low", "low"]}, "classes of 'people' .* all different"),
            (
                {"label": "income", "group": "sex", "groups": ["f"]},
                "group column 'sex' has a value that is neither declared",
            ),
            ({"label": "income", "test_path": "people.csv"}, "test_path is the training table"),
            ({"label": "income", "classes": ["high"]}, "label column 'income' has a value that is neither declared"),
            ({"label": "income", "colour": 1}, "unknown key 'colour'"),
            ({"label": "income", "encoding": "utf8000"}, "encoding is 'utf8000', which Python does not know"),
            (
                {"label": "income", "encoding": "base64"},
                "encoding is 'base64', which Python does not know as one of text",
            ),
            *(
                (
                    {"label": "income", "encoding": name},
                    f"encoding is '{name}', which Python does not know as one of text",
                )
                for name in ("undefined", "UTF7", "unicode_escape")
            ),
            ({"label": "income", "unscaled": ["agee"]}, "'agee' has a range or categories, but is no feature"),
            ({"label": "income", "unscaled": ["age"], "ranges": {"age": [0, 9]}}, "more than one of a range"),
            ({"label": "income", "hashed": {"jobb": 9}}, "'jobb' has a range or categories, but is no feature"),
            ({"label": "income", "hashed": {"job": 9}, "categories": {"job": ["a"]}}, "more than one of a range"),
            ({"label": "income", "hashed": {"job": 0}}, "places of the texts 'job' is 0"),
            ({"label": "income", "ignore_case": ["jobb"]}, "there is no column 'jobb'"),
            ({}, "needs label"),
        ],
    )
    def test_mistakes_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, object], message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = make_table(tmp_path / "people.csv")
        with pytest.raises(InvalidInput, match=message):
            load_source(DataSpec("csv", {"path": str(path), **params}))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("x,y\n", "the table has no rows"),
            ("x,z,y\n1,,a\n2,,b\n", "no row is complete; a column lacks most values: leave it out of `features`"),
            ("x,z,y\n1,1,\n2,1,\n", "no row is complete; column 'y' lacks most values: correct it, or name another"),
            ("x,x,y\n1,2,a\n3,4,b\n", "more than one column of the same name"),
            ("x:y\n1:a\n", "there is no column 'y' in .*bad.csv; spell it"),
            ("x,y,y\n1,2,a\n", "more than one column called 'y'; rename the others"),
            ("x,y\n1,a\n2,a\n", "all labels of 'bad' are the same, but classification needs"),
            ("x,y\n-1e308,a\n1e308,b\n", "a column has values too large"),
            ("x,y\n" + "".join(f"t{i},{i % 2}\n" for i in range(1001)), "a column has more than 1000 distinct texts"),
            (
                "x;y\n" + "".join(f"{i},5;{i % 2}\n" for i in range(60)),
                "a column has another text in most rows, .* or by `numbers` how it writes numbers",
            ),
        ],
    )
    def test_rows_that_cannot_be_learnt_from_are_named(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(InvalidInput, match=message):
            read(tmp_path / "bad.csv")

    @pytest.mark.parametrize(
        ("values", "kind"), [([[1], [2, 3]], "list"), ([{"a": 1}, {"a": 2}], "struct"), ([b"\xff", b"\xfe"], "binary")]
    )
    def test_values_that_are_neither_numbers_nor_text_are_named(
        self, tmp_path: Path, values: list[object], kind: str
    ) -> None:
        path = tmp_path / "nested.parquet"
        parquet.write_table(pa.table({"x": values, "z": [1, 2], "y": ["a", "b"]}), path)
        with pytest.raises(InvalidInput, match=f"a column of {path} holds {kind}"):
            read(path)
        source = read(path, features=["z"])
        assert source.train.features.shape == (2, 1)

    @pytest.mark.parametrize(
        ("test", "message"),
        [
            ("z,y\n1,a\n", "no column 'x' in .*test.csv"),
            ("x,y\n,a\n", "have 2 and 0 examples"),
            ("x,y\nmany,a\n", "column 'x' has a range but holds more than numbers"),
        ],
    )
    def test_test_rows_that_do_not_fit_are_named(self, tmp_path: Path, test: str, message: str) -> None:
        (tmp_path / "train.csv").write_text("x,y\n1,a\n2,b\n")
        (tmp_path / "test.csv").write_text(test)
        with pytest.raises(InvalidInput, match=message):
            read(tmp_path / "train.csv", test_path=str(tmp_path / "test.csv"))

    def test_a_class_that_only_the_test_rows_have_is_refused_and_private(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("x,y\n1,a\n2,b\n")
        (tmp_path / "test.csv").write_text("x,y\n1,c\n")
        with pytest.raises(InvalidInput, match="label column 'y' has a value that is neither declared nor") as refused:
            read(tmp_path / "train.csv", test_path=str(tmp_path / "test.csv"))
        assert_private(refused.value, "the value 'c'; valid: a, b")

    @pytest.mark.parametrize("name", ["damaged.csv", "damaged.parquet"])
    @pytest.mark.parametrize("content", [b"", b"a,b\n1\n", b"\x00\xff", "a,b\n1,é\n".encode("latin1")])
    def test_a_damaged_file_is_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataCorruption, match=f"cannot read {tmp_path / name}"):
            load_source(DataSpec("csv", {"path": str(tmp_path / name), "label": "b"}))

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"\xef\xbb\xbf", "it is empty"),
            (b"a,b\n1,x\n2\n", "a row has 1 fields where the first has 2"),
            (b'a,b\n"1,x\n2,y\n', "a row has 1 fields where the first has 2 .is a quote not closed"),
            ("a,b\né,x\n2,y\n".encode("latin1"), "it is not UTF-8 text"),
            ("a,b\n1,é\n2,y\n".encode("latin1"), "it is not UTF-8 text"),
            ("é,b\n1,x\n2,y\n".encode("latin1"), "it is not UTF-8 text"),
        ],
    )
    def test_what_is_wrong_with_a_csv_file_is_said_without_its_content(
        self, tmp_path: Path, content: bytes, reason: str
    ) -> None:
        (tmp_path / "bad.csv").write_bytes(content)
        with pytest.raises(DataCorruption, match=f"bad.csv: {reason}.*; correct or replace the file"):
            read(tmp_path / "bad.csv", label="b")

    @pytest.mark.parametrize(
        ("name", "content"),
        [("a.csv", 'x,y\n1,a\n"2,b\n"3,a\n4,b\n'), ("a.tsv", 'x\ty\n1\ta\n"2\tb\n3"\ta\n4\tb\n')],
    )
    def test_a_quote_that_joins_rows_is_named_by_its_lines(self, tmp_path: Path, name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(DataCorruption, match=f"{name}: a quote joins lines 3 to 4 to one row; close it"):
            load_source(DataSpec("csv", {"path": str(tmp_path / name), "label": "y"}))

    def test_quoted_line_breaks_may_lie_where_blocks_of_the_file_end(self, tmp_path: Path) -> None:
        rows = "".join(f'"{i % 3}\n,",{i % 2}\n' for i in range(200_000))
        (tmp_path / "long.csv").write_text("x,y\n" + rows)
        source = read(tmp_path / "long.csv")
        assert source.train.features.shape == (200_000, 3)

    def test_a_parquet_file_that_would_fill_the_memory_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file of some kilobytes, as its numbers are all the same."""
        monkeypatch.setattr("dpsweep.accounting.records.parquet_tables.half_of_memory", lambda: 2**22)
        table = pa.table({"x": pa.array([0] * 10**6), "y": pa.array(["a", "b"] * 500_000)})
        parquet.write_table(table, tmp_path / "many.parquet")
        with pytest.raises(InvalidInput, match=r"many\.parquet does not fit into the free memory"):
            read(tmp_path / "many.parquet")

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=f"^data source 'csv': there is no {tmp_path}/nothing.csv"):
            read(tmp_path / "nothing.csv")


ROWS: dict[str, list[Any]] = {
    "sex": ["f", "m", "f", "m", "f", "m"],
    "race": ["a", "a", "b", "b", "b", "c"],
    "age": [1, 2, 3, 4, 5, 6],
    "y": ["no", "yes", "no", "yes", "yes", "no"],
}
DECLARED = {"ranges": {"age": [0, 10]}, "classes": ["no", "yes"]}
GROUPS = {"sex": ["m", "f"], "race": ["a", "b", "c"]}


@pytest.mark.parametrize("text", ["1{}~", "({}x", "1e5{}~"])
def test_a_number_among_blanks_is_looked_for_once(text: str) -> None:
    """Three patterns of blanks in a row took hours to part 10,000 of them in every way."""
    assert number_of(text.format(10_000 * " "), "point") is None


class TestIntersections:
    def test_their_product_is_bounded(self, tmp_path: Path) -> None:
        words = [f"w{row}" for row in range(400)]
        rows = pa.table({"x": [*range(400)], "y": 200 * ["a", "b"], "g": words, "h": words})
        parquet.write_table(rows, tmp_path / "rows.parquet")
        with pytest.raises(InvalidInput, match="'g' and 'h' make more than 100,000 groups together; name fewer"):
            read(tmp_path / "rows.parquet", group=["g", "h"], features=["x"])

    """Groups by several columns at once."""

    def load(self, folder: Path, **given: object) -> Source:
        path = folder / "people.csv"
        csv.write_csv(pa.table(ROWS), path)
        return read(path, **DECLARED, **given)

    def test_groups_are_the_intersections(self, tmp_path: Path) -> None:
        source = self.load(tmp_path, group=["sex", "race"], groups=GROUPS)
        assert source.group_names == tuple(f"{sex} × {race}" for sex in ("m", "f") for race in ("a", "b", "c"))
        expected = [f"{sex} × {race}" for sex, race in zip(ROWS["sex"], ROWS["race"], strict=True)]
        assert [source.group_names[group] for group in source.train.groups] == expected
        assert source.train.features.shape == (6, 1), "group columns are no features"
        assert source.notes == ()

    def test_what_only_the_rows_tell_is_not_named(self, tmp_path: Path) -> None:
        for groups in (None, {"sex": ["f", "m"]}):
            source = self.load(tmp_path, group=["sex", "race"], groups=groups)
            assert source.group_names == tuple(f"group {place}" for place in range(1, 7))
            assert "groups_from_rows" in source.reasons

    def test_the_label_may_be_one_of_them(self, tmp_path: Path) -> None:
        source = self.load(tmp_path, group=["sex", "y"], groups={"sex": ["f", "m"]})
        assert source.group_names == ("f × no", "f × yes", "m × no", "m × yes")
        assert source.train.groups.tolist() == [0, 3, 0, 3, 1, 2]

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"group": ["sex", "race"], "groups": ["f", "m"]}, "give them by column, such as {sex: "),
            ({"group": ["sex", "sex"]}, "one attribute or several different ones"),
            ({"group": []}, "one attribute or several different ones"),
            ({"group": ["sex", "rase"]}, "no column 'rase'"),
            ({"group": "sex", "groups": {"race": ["a"]}}, "'race', which is no group column"),
            ({"group": ["sex", "race"], "groups": {**GROUPS, "race": ["a", "b"]}}, "group column 'race'"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, given: dict[str, object], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            self.load(tmp_path, **given)
