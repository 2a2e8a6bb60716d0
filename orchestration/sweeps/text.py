"""Parser of sweep files: YAML with the scalars of YAML 1.2, finite numbers and bounded size.

PyYAML reads YAML 1.1, in which ``yes`` is true, ``010`` is 8, ``1:30`` is 90, ``1e-5`` is a string and a key may be
given twice. In a sweep file, numbers are decimal, ``1e-5`` is a number, only ``true`` and ``false`` are booleans, every
other word is a string, and a duplicate key is an error.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import stat
from pathlib import Path
from typing import Any

import yaml

from dpsweep.accounting.errors import InvalidInput

MAX_BYTES = 256 * 1024
"""Maximum size of a sweep file; enough for thousands of seeds or learning rates."""
MAX_VALUES = 100_000
"""Maximum number of values in a sweep file after alias expansion; a long text counts as several."""
_LETTERS = 64
"""Characters of a text that count as one more value."""


def read_text(path: Path) -> str:
    """Return the text of a sweep file. Raises: InvalidInput if it cannot be read, is over `MAX_BYTES`, or is not
    UTF-8.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidInput(f"{path} is no file, but a folder, a pipe or a device; give the path of a sweep file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InvalidInput(f"{path} has more than {MAX_BYTES:,} bytes; shorten the lists of the sweep, or split it")
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"cannot read the sweep file {path}: it is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise InvalidInput(
            f"cannot read the sweep file {path}: {error.strerror}; give the path of one that can be read, from the "
            "working directory or absolute"
        ) from error


def parse_text(text: str) -> Any:
    """Return the value of a YAML text. Raises: InvalidInput with line and column if it is not valid.

    >>> parse_text("{delta: 1e-5, seeds: [0, 010], note: yes}")
    {'delta': 1e-05, 'seeds': [0, '010'], 'note': 'yes'}
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MAX_VALUES:
            raise InvalidInput(f"it holds more than {MAX_VALUES:,} values; shorten its lists, or split it")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        words = ", ".join(filter(None, (error.context, error.problem)))
        raise InvalidInput(f"{place}{words}") from error
    except yaml.YAMLError as error:
        raise InvalidInput(f"not valid YAML: {' '.join(str(error).split())}") from error
    except InvalidInput:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"a tag does not fit its value, or an escape fails ({error}); write plain values") from error
    except RecursionError as error:
        raise InvalidInput("it is nested too deeply, or an alias holds itself; write it flat") from error


def with_section(text: str, key: str, value: object, comment: str) -> str:
    """Return the sweep file ``text`` with ``key: value`` appended below a ``comment``, or rewritten as JSON if it
    cannot be.

    >>> print(with_section("seeds: 0", "epochs", 2, "Added later."))
    seeds: 0
    <BLANKLINE>
    # Added later.
    epochs: 2
    <BLANKLINE>
    """
    whole = {**parse_text(text), key: json.loads(json.dumps(value))}
    appended = f"{text.rstrip()}\n\n# {comment}\n{key}: {json.dumps(value)}\n"
    try:
        if parse_text(appended) == whole:
            return appended
    except InvalidInput:
        pass  # a mapping in braces cannot be appended to, and no key may be given twice
    return f"{json.dumps(whole)}\n"


def shortly(value: object) -> str:
    """Return the value's representation for an error message, at most 123 characters."""
    shown = reprlib.repr(value)
    return shown if len(shown) <= 120 else f"{shown[:120]}..."


class _Loader(yaml.SafeLoader):
    """Reads mappings, lists and the scalars registered below; any other tag is an error."""

    yaml_implicit_resolvers = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "seq")
    }


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values in a node after alias expansion, itself included. ``known``: results by node id."""
    if id(node) not in known:
        held = [item for pair in node.value for item in pair] if isinstance(node, yaml.MappingNode) else node.value
        is_text = isinstance(node, yaml.ScalarNode)
        known[id(node)] = 1 + (len(held) // _LETTERS if is_text else sum(_size(part, known) for part in held))
    return known[id(node)]


def _refused(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Return a mapping. A duplicate key is an error; PyYAML would silently drop its first value."""
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise _refused(f"the key {key.value!r} is given twice; keep one", key)
            seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


def _string(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return a text. Two escapes for the halves of one character are that character; half of one alone is an error."""
    text: bytes = node.value.encode("utf-16-le", "surrogatepass")
    try:
        return text.decode("utf-16-le")
    except UnicodeDecodeError as error:
        half = ascii(text[error.start : error.start + 2].decode("utf-16-le", "surrogatepass"))[1:-1]
        raise _refused(f"{half} is half of a character; write the whole character", node) from error


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > 20 or not -(2**63) <= int(node.value) < 2**63:
        raise _refused(f"{node.value[:40]} is beyond 64 bits; write a smaller number", node)
    return int(node.value)


def _real(loader: _Loader, node: yaml.ScalarNode) -> float:
    number = math.inf if "n" in node.value.lower() else float(node.value)
    if not math.isfinite(number):
        raise _refused(f"{node.value} is not a finite number; write a number", node)
    return number + 0.0  # turns -0.0 into 0.0


_INTEGER = r"[-+]?(0|[1-9][0-9]*)"
_REAL = (
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_RESOLVED = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INTEGER, list("-+0123456789")),
    ("float", _REAL, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
)
for _name, _pattern, _first in _RESOLVED:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)
for _name, _construct in (("map", _mapping), ("str", _string), ("int", _integer), ("float", _real)):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _construct)
