"""Sanitizes untrusted text for terminals and Markdown, and masks secrets in addresses. Pure."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, unquote, urlsplit

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>!#|~&])")
_SECRET = re.compile(r"pass|pwd|secret|token|key|auth|credential", re.IGNORECASE)
MASK = "***"


def looks_secret(name: str) -> bool:
    """Return whether a variable of this name probably holds a secret.

    >>> looks_secret("AWS_SECRET_ACCESS_KEY"), looks_secret("DPSWEEP_DATA")
    (True, False)
    """
    return _SECRET.search(name) is not None


def for_terminal(text: str) -> str:
    """Return the text with terminal control characters and characters that change the writing direction escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def name_for_terminal(name: str) -> str:
    """Return the name of a file on one line, with bytes that are no text spelt out; else as `for_terminal`.

    >>> print(name_for_terminal("a\\nerror: none"))
    a\\nerror: none
    """
    text = for_terminal(name.encode(errors="backslashreplace").decode())
    return text.replace("\n", r"\n").replace("\t", r"\t")


def for_markdown(text: str) -> str:
    """Return the text escaped for Markdown: it is shown literally, without images, links or HTML."""
    return _MARKDOWN.sub(r"\\\1", for_terminal(text))


def secrets_of(uri: str) -> tuple[str, ...]:
    """Return the secret parts of an address: its password, a user name without password that may be a token (HTTP
    only), and query parameters with secret names. The whole address if it cannot be parsed."""
    try:
        parts = urlsplit(uri)
        user, password = parts.username, parts.password
    except ValueError:
        return (uri,)
    named = [value for name, value in parse_qsl(parts.query) if _SECRET.search(name)]
    lone = user if user and not password and parts.scheme.startswith("http") else None
    return tuple(dict.fromkeys(value for value in (password, lone, *named) if value))


def masked(text: str, uri: str) -> str:
    """Return ``text``, which may be ``uri`` itself, with the secrets of ``uri`` masked, whether percent-encoded
    or not.
    """
    for secret in sorted(secrets_of(uri), key=len, reverse=True):
        for spelt in dict.fromkeys((secret, unquote(secret), quote(secret, safe=""), quote(secret))):
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(spelt)}(?![A-Za-z0-9])", MASK, text)
    return text
