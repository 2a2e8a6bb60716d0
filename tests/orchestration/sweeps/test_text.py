"""Hostile values in every numeric and boolean field of the sweep's schema; new fields are found by themselves."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.schema import SweepSpec, parse_sweep
from dpsweep.orchestration.sweeps.sections import NO_KEY
from tests.orchestration.sample_grids import SMALL

Path = tuple[str, ...]

NEVER_NUMBERS = (
    *("true", "'1e-5'", "'5'", "''", "word", "yes", "{}", "0777", "0x10", "1:30", "1_000", "2020-01-01"),
    *(".inf", "-.inf", ".nan", "1e400", "-1e400", "9223372036854775808", "-" + 30 * "9", 5000 * "9"),
)
INSIDE = {"rows_per_user": {"users": {"1": 10}}}
REQUIRED = {
    "audit": {"canaries": 10},
    "tune": {"parameters": {"clipping.bound": [1.0, 2.0]}, "privacy": "public", "data": {"name": "digits"}},
    "adapted": {
        "winners": {8: {"values": {}, "score": 0.5, "candidates": 1}},
        "drawn": {"8": {"candidate": 0, "seed": 0}},
        "candidates": [{"clipping.bound": 1.0}],
    },
}
"""What a section must hold, if it is there."""
NEVER_TRUTHS = ("0", "1", "1.0", "'true'", "yes", "no", "on", "{}", "''")


def leaves(annotation: Any, kinds: tuple[type, ...], path: Path = ()) -> Iterator[Path]:
    """Where the schema takes a value of one of these types: the keys that lead there."""
    origin = get_origin(annotation)
    if origin is dict:
        yield from leaves(get_args(annotation)[1], kinds, (*path, "8"))
    elif origin in (Union, types.UnionType, tuple):
        for part in get_args(annotation):
            yield from leaves(part, kinds, path)
    elif origin is Annotated:
        yield from leaves(get_args(annotation)[0], kinds, path)
    elif origin is Literal or not isinstance(annotation, type):
        return
    elif issubclass(annotation, BaseModel) or is_dataclass(annotation):
        for name, inner in get_type_hints(annotation, include_extras=True).items():
            if not name.startswith("_") and name not in ("model_config", NO_KEY):
                yield from leaves(inner, kinds, (*path, name))
    elif annotation in kinds:
        yield path


NUMBERS = sorted(set(leaves(SweepSpec, (int, float))))
TRUTHS = sorted(set(leaves(SweepSpec, (bool,))))
dotted = ".".join
_SMALL = yaml.safe_load(SMALL)


def sweep_with(path: Path, value: str) -> str:
    """The small sweep with ``value``, as YAML, where ``path`` leads."""
    content = _SMALL | {key: value for key, value in REQUIRED.items() if key == path[0]}
    section = content
    for key in path[:-1]:
        section[key] = section = dict(section.get(key) or INSIDE.get(key, {}))
    section.pop(8, None)
    section[path[-1]] = "PLACE"
    return yaml.safe_dump(content).replace("PLACE", value)


def assert_refused(path: Path, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_sweep(sweep_with(path, value))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1, lines
    named = path[-1] in lines[0] or ("line " in lines[0] and "column " in lines[0])
    assert lines[0].startswith("sweep: "), lines
    assert named, lines
    assert len(lines[0]) < 500


def test_the_schema_is_walked() -> None:
    found = {dotted(path) for path in NUMBERS}
    assert {"epochs", "privacy.delta", "privacy.budget.rho", "data.keep.8", "norms.refreshes_per_epoch"} <= found
    assert {"execution.micro_batch_size", "accounting.group_sizes", "resources.gpus", "sampling.batch_size"} <= found
    assert ("execution", "deterministic") in TRUTHS


@pytest.mark.thinned(4)
@pytest.mark.parametrize("path", NUMBERS, ids=dotted)
def test_what_is_no_number_is_refused_by_name(path: Path) -> None:
    for value in NEVER_NUMBERS:
        assert_refused(path, value)


@pytest.mark.parametrize("path", TRUTHS, ids=dotted)
def test_what_is_neither_true_nor_false_is_refused_by_name(path: Path) -> None:
    for value in NEVER_TRUTHS:
        assert_refused(path, value)


@pytest.mark.parametrize("path", [path for path in NUMBERS if "keep" not in path], ids=dotted)
def test_negative_numbers_are_refused_by_name(path: Path) -> None:
    """Of groups that are kept, the data know how many there are."""
    for value in ("-1", "-1e-300", "-9223372036854775808"):
        assert_refused(path, value)


@pytest.mark.parametrize("path", NUMBERS, ids=dotted)
def test_an_accepted_zero_has_no_sign(path: Path) -> None:
    with contextlib.suppress(InvalidInput):
        sweep = parse_sweep(sweep_with(path, "-0.0"))
        assert all(math.copysign(1.0, number) == 1.0 for number in numbers_in(sweep.model_dump()))


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(part)


@pytest.mark.parametrize(("written", "meant"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("+1.e-5", 1e-5), (".5", 0.5)])
def test_numbers_are_read_as_people_write_them(written: str, meant: float) -> None:
    assert parse_sweep(sweep_with(("privacy", "delta"), written)).privacy.delta == meant


def test_words_that_older_yaml_takes_for_values_stay_words() -> None:
    text = SMALL.replace("{8: 0.1}", "{yes: 0.1, no: 0.2, 08: 0.3, 2020-01-01: 0.4, 1:30: 5, 8: 6}")
    assert list(parse_sweep(text).data[0].keep) == ["yes", "no", "08", "2020-01-01", "1:30", "8"]
