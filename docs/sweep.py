"""Writes docs/sweep.md from the schema of sweep files: ``python docs/sweep.py``."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpsweep.orchestration.sweeps import schema, sections, tune
from dpsweep.orchestration.sweeps.components import COMPONENTS, parameters_of
from dpsweep.orchestration.sweeps.key_places import sections_of
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import NO_KEY
from dpsweep.workers import spec

_HEAD = """# Sweep files: every key

Look up a key here. [sweeps/quickstart.yaml](../sweeps/quickstart.yaml) is a commented sweep. More on
[data and models](data.md), [training](training.md), [accountants and schedules](accounting.md).

`dpsweep plan FILE` checks a sweep file and shows every trial. "Or a list" marks an axis: the sweep has one trial for
each combination of the values of all axes. A component is a name (`flat`) or a mapping with its parameters.

**Lists inside.** A list may stand for any value inside a component or section of an axis:
`clipping: {name: flat, bound: [0.5, 1, 2]}`. Several lists are combined. Where a parameter itself takes a list, such as
`hidden` of `mlp`, a list of lists is several. In a component of your own a list is one value. `{each: [...]}` is always
several.

**Axes that vary together.** `zip: [clipping, optimizer]` pairs the values of these axes, which must be
equally many. Several groups are a list of such lists.

**Noise of a schedule.** `noise: [{name: constant, noise_multiplier: 1.1}, ...]` gives a schedule its
initial noise multiplier; such trials are not calibrated to `privacy.target_epsilon`.

"""


def reference() -> str:
    """The page: a table of keys for each section of a sweep file, then the components that keys may name."""
    whole = SweepSpec.model_json_schema()
    sections = dict(sections_of(whole))
    tables = [_table("A sweep", "", whole, sections)]
    told = descriptions(SweepSpec)
    for name, key in sections.items():
        about = " ".join((inspect.getdoc(_class(name)) or "").partition("\n\n")[0].split())
        tables.append(_table(f"`{key}`", about.removeprefix(told.get(key, "")), whole["$defs"][name], sections))
    components = [_components(key, registry) for key, registry in COMPONENTS.items()]
    return "\n".join([_HEAD, *tables, _COMPONENTS_HEAD, *components])


_MOST_NAMES = 6
"""Longer lists of names are cut."""
_COMPONENTS_HEAD = """## Components

Names that a key may take, with parameters and defaults. `module:function` is [your own](data.md#your-own-code).
"""


def _class(name: str) -> type[Any]:
    found = next(getattr(module, name) for module in (schema, sections, tune, spec) if hasattr(module, name))
    assert inspect.isclass(found)
    return found


def _table(title: str, about: str, found: Mapping[str, Any], sections: Mapping[str, str]) -> str:
    described = {"name": "name of the source, [below](#components)"} if "params" in found["properties"] else {}
    described |= descriptions(_class(found["title"]))
    rows = [
        f"| `{key}` | {_values(key, value, sections)} | {_default(key, value, found)} | {_words(described[key])} |"
        for key, value in found["properties"].items()
        if key not in ("params", NO_KEY)
    ]
    if "params" in found["properties"]:
        rows.append("| any other | | | parameters of the component, [below](#components) |")
    opening = _words(about)
    lead = [opening, ""] if opening and not re.match(r"\w+: ", opening) else []
    return "\n".join([f"## {title}", "", *lead, "| key | values | default | |", "|---|---|---|---|", *rows, ""])


def descriptions(cls: type[Any]) -> dict[str, str]:
    """Return the text of each field: the docstring under it, or ``field: ...`` in the docstring of its class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    names = [
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    whole = " ".join((inspect.getdoc(cls) or "").split())
    starts = "|".join(names)
    found = {name: text.strip() for name, text in re.findall(rf"\b({starts}): (.+?)(?=\s(?:{starts}): |$)", whole)}
    for field, under in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
            found.setdefault(ast.unparse(field.target), " ".join(str(under.value.value).split()))
    return found


def _values(key: str, value: Mapping[str, Any], sections: Mapping[str, str]) -> str:
    """The accepted values in words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if name == "Component":
            return f"[component](#components-for-{key})"
        return f"[section](#{sections[name].replace('.', '')})" if name in sections else "map"
    if "allOf" in value:
        return _values(key, value["allOf"][0], sections)
    if "anyOf" in value:
        kinds = dict.fromkeys(_values(key, each, sections) for each in value["anyOf"])
        is_none_by_default = "default" in value and value["default"] in (None, [None])
        return " or ".join(kind for kind in kinds if kind != "none" or not is_none_by_default)
    if "enum" in value or "const" in value:
        names = [f"`{each}`" for each in value.get("enum", [value.get("const")])]
        return ", ".join(names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], "... (a wrong name lists all)"])
    match value.get("type"):
        case "array":
            items = _values(key, value["items"], sections)
            is_axis = value.get("minItems", value.get("minLength"))
            return f"{items}, or a list" if is_axis else f"list: {items}"
        case "object" if isinstance(value["additionalProperties"], dict):
            return f"map: {_values(key, value['additionalProperties'], sections)}"
        case "object":
            return "map"
        case None:
            return "values"
        case "null":
            return "none"
        case "boolean":
            return "`true`, `false`"
        case "string":
            return "text"
        case "integer" | "number" as kind:
            return " ".join(filter(None, (kind, _bounds(value))))
    raise AssertionError(f"no words for {value}")


def _bounds(value: Mapping[str, Any]) -> str:
    words = {
        "exclusiveMinimum": ">",
        "minimum": "≥",
        "ge": "≥",
        "gt": ">",
        "exclusiveMaximum": "<",
        "maximum": "≤",
        "le": "≤",
        "lt": "<",
    }
    return " ".join(
        f"{sign} {value[name]:.12g}" for name, sign in words.items() if name in value and value[name] < 2**63
    )


def _default(key: str, value: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if key in found.get("required", ()):
        return "required"
    default = value.get("default")
    if isinstance(default, list) and len(default) == 1:
        (default,) = default
    match default:
        case {"name": str(name), "params": params} if not params:
            return f"`{name}`"
        case {"name": str(name), "params": params}:
            return f"`{{name: {name}, {', '.join(f'{each}: {param}' for each, param in params.items())}}}`"
        case None if "$ref" in value or "allOf" in value:
            return "its defaults"
        case None | [] | {}:
            return ""
        case {**fields} if fields:
            return "its defaults"
    return f"`{json.dumps(default)}`".replace('"', "")


def _components(key: str, registry: Mapping[str, Callable[..., object]]) -> str:
    taking: dict[str, list[str]] = {}
    for name, make in registry.items():
        taking.setdefault(", ".join(_parameters(make)), []).append(f"`{name}`")
    own = ["`module:function`"] if key in ("data", "model", "clipping") else []
    alone = [", ".join([*taking.pop("", ()), *own])]
    rows = [*filter(None, alone), *(f"{', '.join(names)}: {parameters}" for parameters, names in taking.items())]
    return "\n".join([f"### Components for `{key}`", "", *(f"- {row}" for row in rows), ""])


def _parameters(make: Callable[..., object]) -> Iterator[str]:
    for parameter in parameters_of(make):
        default = "" if parameter.default is parameter.empty else f"={_plain(parameter.default)}"
        yield f"`{parameter.name}{default}`"


def _plain(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _words(text: str) -> str:
    """A docstring as one line of Markdown."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    (Path(__file__).parent / "sweep.md").write_text(reference())
