"""Rows with several owners: which stay, how they are read, and how they are cut."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Source, describe, load_dataset, make_split, source_of_arrays
from dpsweep.workers.data.base import cut
from dpsweep.workers.data.owners import NOBODY, Ids, dependent_rows, greedily_kept, ownership
from dpsweep.workers.spec import DataSpec
from tests.known import known

Graph = list[set[int]]
GRAPHS = st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=24)


def as_owners(graph: Graph) -> torch.Tensor:
    """The owners of each row, in a table that repeats one of them where there is room."""
    width = max(map(len, graph)) + 1
    return torch.tensor([[*own, next(iter(own))][:width] + [NOBODY] * (width - 1 - len(own)) for own in graph])


def rows_of(graph: Graph, kept: Ids) -> Counter[int]:
    return Counter(owner for row in kept for owner in graph[row])


@given(GRAPHS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_rows_stay_as_if_taken_one_by_one(graph: Graph, most: int, random: object) -> None:
    order = np.arange(len(graph))
    random.shuffle(order)  # type: ignore[attr-defined]
    stay, counts = list[int](), Counter[int]()
    for row in order.tolist():
        if all(counts[owner] < most for owner in graph[row]):
            stay.append(row)
            counts.update(graph[row])
    kept = greedily_kept(as_owners(graph), most, order)
    assert kept.tolist() == sorted(stay)
    assert max(rows_of(graph, kept).values()) <= most
    for row in set(range(len(graph))) - set(kept.tolist()):
        assert any(rows_of(graph, kept)[owner] == most for owner in graph[row]), "no further row would fit"


@given(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=7), st.integers(1, 2))
def test_greedy_rows_are_at_least_a_kth_of_the_most_that_fit(graph: Graph, most: int) -> None:
    found = len(greedily_kept(as_owners(graph), most, np.arange(len(graph))))
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(graph)), n) for n in range(len(graph) + 1))
    best = max(len(rows) for rows in subsets if max(rows_of(graph, np.array(rows)).values(), default=0) <= most)
    assert found * max(map(len, graph)) >= best


def test_rows_that_share_people_through_others_are_one_set() -> None:
    sets = dependent_rows(as_owners([{0, 1}, {2}, {1, 3}, {4, 5}, {5}, {3}]))
    assert [np.flatnonzero(sets == each).tolist() for each in np.unique(sets)] == [[0, 2, 5], [1], [3, 4]]
    assert dependent_rows(torch.tensor([7, 7, 2])).tolist() == [7, 7, 2]


def source(graph: Graph) -> Source:
    features = np.arange(2.0 * len(graph), dtype=np.float32).reshape(-1, 2)
    train = make_split(features, np.arange(len(graph)) % 2, user_ids=as_owners(graph).numpy())
    return Source("documents", train, None, ("0", "1"), ("0", "1"))


def random_graph(rows: int, people: int) -> Graph:
    draw = np.random.default_rng(0)
    return [set(draw.integers(0, people, draw.integers(1, 4)).tolist()) for _ in range(rows)]


def test_a_cut_shares_nobody_and_counts_the_rows_between() -> None:
    data = cut(source(random_graph(400, 60)), DataSpec("documents", test_fraction=0.3, public_fraction=0.2))
    parts = [data.train, data.test, known(data.public)]
    people = [set(ownership(part.user_ids)[1].tolist()) for part in parts if part.user_ids is not None]
    assert all(people)
    assert not any(one & other for one, other in itertools.combinations(people, 2))
    assert len(people[1]) <= 0.3 * 60
    between = [int(note.split()[0]) for note in data.notes]
    assert sum(between) + sum(map(len, parts)) == 400
    assert "rows (" in data.notes[0]
    assert "are left out by test_fraction" in data.notes[0]
    assert (
        cut(source(random_graph(400, 60)), DataSpec("documents", test_fraction=0.3)).train.select(np.arange(3)).user_ids
        is not None
    )


def test_a_cut_that_leaves_nothing_is_refused() -> None:
    everybody = source([{0, 1, 2}] * 6)
    with pytest.raises(InvalidInput, match="no row whose owners are all held out; set it higher, or give test_path"):
        cut(everybody, DataSpec("documents", test_fraction=0.4))


TESTED: Graph = [{10, 11}, {11}, {12}, {0}]


def test_people_who_share_test_rows_count_as_one() -> None:
    tested = make_split(np.zeros((4, 2), np.float32), [0, 1, 0, 1], first_id=9, user_ids=as_owners(TESTED).numpy())
    train = source([{0, 1}, {1}, {2}, {2}]).train
    described = describe(cut(Source("documents", train, tested, ("0", "1"), ("0", "1")), DataSpec("d")), (3,))
    assert (described.test_users, described.test_group_users) == (3, (2, 2))
    assert described.shared_users == 1, "one who trains owns a test row, too"
    assert described.rows_per_user == ((1, 1), (2, 2))
    assert dict(known(described.rows_kept)) == {1: 2, 2: 4, 3: 4}


def test_a_row_has_an_owner() -> None:
    with pytest.raises(InvalidInput, match="a row without an owner"):
        make_split(np.zeros((2, 1), np.float32), [0, 1], user_ids=[[3, NOBODY], [NOBODY, NOBODY]])


DOCUMENTS = [["ann", "bob"], ["cid"], ["bob", "cid", "dan"], ["ann"]]


def owners_of(path: Path, **params: object) -> list[set[str]]:
    """Return the owners of each row by the table's own names, which are sorted."""
    params = {"path": str(path), "label": "y", "features": ["x"], **params}
    rows = load_dataset(DataSpec(path.suffix[1:], {**params, "test_path": str(path.with_name("t" + path.name))})).train
    assert rows.user_ids is not None
    assert rows.user_ids.ndim == 2
    people = ["ann", "bob", "cid", "dan", "eve"]
    return [{people[owner] for owner in row if owner != NOBODY} for row in rows.user_ids.tolist()]


def write(path: Path, columns: dict[str, object]) -> None:
    rows = pa.table({"x": [0.0, 1.0, 2.0, 3.0], "y": ["a", "b", "a", "b"], **columns})
    if path.suffix == ".parquet":
        parquet.write_table(rows, path)
    else:
        lines = zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True)
        cells = [[*rows.column_names], *(["" if cell is None else str(cell) for cell in line] for line in lines)]
        path.write_text("\n".join(map(",".join, cells)) + "\n")


@pytest.mark.parametrize("kind", ["list", "large list", "separator", "columns", "columns of a text file"])
def test_a_table_names_owners_in_one_column_or_several(kind: str, tmp_path: Path) -> None:
    suffix = ".csv" if kind in ("separator", "columns of a text file") else ".parquet"
    eve: dict[str, object] = {"who": ["eve"] * 4 if kind == "separator" else [["eve"]] * 4}
    columns: dict[str, object] = {"who": DOCUMENTS}
    more: dict[str, object] = {"user": "who"}
    match kind:
        case "large list":
            columns = {"who": pa.array(DOCUMENTS, pa.large_list(pa.large_string()))}
        case "separator":
            columns, more = {"who": ["; ".join(each) for each in DOCUMENTS]}, {**more, "user_separator": ";"}
        case "columns" | "columns of a text file":
            padded = [[*each, None, None][:3] for each in DOCUMENTS]
            columns = {f"who{place}": [each[place] for each in padded] for place in range(3)}
            more, eve = {"user": list(columns)}, {name: ["eve"] * 4 for name in columns}
    write(tmp_path / f"rows{suffix}", columns)
    write(tmp_path / f"trows{suffix}", eve)
    assert owners_of(tmp_path / f"rows{suffix}", **more) == list(map(set, DOCUMENTS))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"user": []}, "one column or several different ones"),
        ({"user": ["who", "who"]}, "one column or several different ones"),
        ({"user": ["who", "whom"]}, "no column 'whom'"),
        ({"user": ["who", "x"], "user_separator": ";"}, "user_separator"),
    ],
)
def test_columns_of_owners_that_are_none_are_refused(more: dict[str, object], said: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", {"who": ["a", "b", "c", "d"]})
    write(tmp_path / "trows.csv", {"who": ["a", "b", "c", "d"]})
    with pytest.raises(InvalidInput, match=said):
        owners_of(tmp_path / "rows.csv", **more)


def test_a_row_without_an_owner_and_one_of_a_crowd(tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", {"who": [["ann"], [], None, ["bob"]]})
    write(tmp_path / "trows.parquet", {"who": [["eve"]] * 4})
    assert owners_of(tmp_path / "rows.parquet", user="who") == [{"ann"}, {"bob"}], "a row of nobody lacks a value"
    write(tmp_path / "rows.parquet", {"who": [[str(person) for person in range(65)]] * 4})
    with pytest.raises(InvalidInput, match="more than 64 owners"):
        owners_of(tmp_path / "rows.parquet", user="who")


def test_arrays_may_list_owners() -> None:
    found = known(source_of_arrays(np.zeros((4, 1), np.float32), [0, 1, 0, 1], users=DOCUMENTS).train.user_ids)
    assert ownership(found)[0].tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert found.tolist()[3] == [found.tolist()[0][0], NOBODY, NOBODY]
