"""Strategies that all targets share: odd values, and bytes that are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 10**4, 10**9, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, -0.0, 0.1, 0.5, 1.0, 1.5, 1e-5, 1e-12, 5e-324, 1e-300, 1e16, 1e300, 1.7e308, -0.5, 1 - 1e-16),
)
WORDS: tuple[str, ...] = (
    *("", " ", "flat", "constant", "poisson", "auto", "none", "null", "true", "NaN", "inf", "-inf", "1e400", "0x10"),
    *(
        "../..",
        "/etc/passwd",
        "a" * 300,
        "os:system",
        "subprocess:getoutput",
        "[/bold]",
        "\x1b]0;t\x07",
        "\x00",
        "é\u202e",
    ),
    *(
        "%s%n",
        "{0}",
        "${HOME}",
        "--help",
        "-",
        "1,2,3",
        "1..64",
        "2..1",
        "1..99999999",
        "s3://",
        "file:///",
        "http://[::1",
    ),
)


def odd_values() -> st.SearchStrategy[Any]:
    """Values as JSON and YAML can hold them."""
    scalars = st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(WORDS),
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
    )
    return st.one_of(
        scalars,
        st.lists(scalars, max_size=3),
        st.dictionaries(st.sampled_from(("name", "bound", "method", "x", "")), scalars, max_size=3),
    )


@dataclass(frozen=True)
class Edit:
    """A change of bytes at a share of their length, in [0, 1)."""

    kind: str
    place: float
    piece: bytes


def edits() -> st.SearchStrategy[list[Edit]]:
    kinds = st.sampled_from(("flip", "cut", "insert", "drop", "double", "swap"))
    places = st.floats(0.0, 1.0, exclude_max=True)
    return st.lists(st.builds(Edit, kinds, places, st.binary(min_size=1, max_size=9)), min_size=1, max_size=4)


def edited(data: bytes, changes: list[Edit]) -> bytes:
    """``data`` after the changes; it may be as before."""
    for change in changes:
        at, size = int(change.place * len(data)), len(change.piece)
        match change.kind:
            case "flip":
                data = data[:at] + bytes([(data[at] if at < len(data) else 0) ^ change.piece[0]]) + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "insert":
                data = data[:at] + change.piece + data[at:]
            case "drop":
                data = data[:at] + data[at + size :]
            case "double":
                data = data[:at] + data[at : at + 8 * size] + data[at:]
            case _:
                data = data[:at] + change.piece + data[at + size :]
    return data


def places_in(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every key or position in it, from the inside out."""
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        if isinstance(content[key], dict | list):
            yield from places_in(content[key])
        yield content, key
