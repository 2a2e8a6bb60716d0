"""Data and scripts inside a page, so that it needs neither network nor server."""

from __future__ import annotations

import base64
import functools
import gzip
import json
from typing import Any

from plotly.offline import get_plotlyjs


@functools.cache
def packed_plotly() -> str:
    """Return the element that holds plotly.js, packed; a script of the page unpacks it."""
    return packed("plotly", get_plotlyjs())


def packed(name: str, text: str) -> str:
    """Return an element that holds the text compressed by gzip, in base64: about a third of a script's size."""
    content = base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()
    return f'<script id="{name}" type="text/plain">{content}</script>'


def script_safe(value: Any) -> str:
    """Return JSON with <, > and & escaped, so that no text can end the script element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
