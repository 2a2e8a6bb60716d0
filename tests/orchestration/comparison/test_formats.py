"""Hostile text on a terminal and in Markdown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dpsweep.orchestration.comparison.formats import for_markdown, for_terminal


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
