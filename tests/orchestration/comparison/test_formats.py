"""Hostile text on a terminal, in Markdown and in addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsweep.orchestration.comparison.formats import for_markdown, for_terminal, masked, masked_in


def test_a_terminal_is_not_steered() -> None:
    assert for_terminal("a\x1b]0;title\x07b\r\n\u202ec") == r"a\x1b]0;title\x07b\r" + "\n" + r"\u202ec"
    assert for_terminal("Zürich ε = 3\tok") == "Zürich ε = 3\tok"


@given(st.text())
def test_no_text_steers_a_terminal(text: str) -> None:
    assert not {character for character in for_terminal(text) if ord(character) < 32} - {"\n", "\t"}
    assert not {"\x1b", "\x9b", "\u202e"} & set(for_terminal(text))


def test_markdown_shows_text_and_nothing_else() -> None:
    hostile = "![x](http://evil/a.png) <img src=x> [l](javascript:1) `c`"
    assert for_markdown(hostile) == r"\!\[x\](http://evil/a.png) \<img src=x\> \[l\](javascript:1) \`c\`"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:hunter2@host/db", "postgresql://me:***@host/db"),
        ("postgresql://host/db?user=me&password=hunter2", "postgresql://host/db?user=me&password=***"),
        ("postgresql://host/db?sslpassword=a%2Fb&x=1", "postgresql://host/db?sslpassword=***&x=1"),
        ("https://sometoken@host/path", "https://***@host/path"),
        ("sqlite:////runs/x/mlflow.db", "sqlite:////runs/x/mlflow.db"),
        ("http://[broken", "***"),
    ],
)
def test_secrets_are_masked(uri: str, shown: str) -> None:
    assert masked(uri) == shown


def test_secrets_are_masked_in_what_a_library_says() -> None:
    uri = "mysql://me:p%40ss@host/db"
    assert (
        masked_in("access denied for 'p@ss' at mysql://me:p%40ss@host", uri)
        == "access denied for '***' at mysql://me:***@host"
    )
