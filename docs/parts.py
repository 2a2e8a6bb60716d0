"""Writes dpsweep/parts.pyi from the schema of sweep files and the registries: ``python docs/parts.py``."""

from __future__ import annotations

import inspect
import json
import keyword
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from dpsweep.orchestration.sweeps.components import COMPONENTS, parameters_of, types_of
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import NO_KEY, OWN_NOISE

PLACE = Path(__file__).parent.parent / "dpsweep" / "parts.pyi"
_HEAD = '''"""Types of `dpsweep.parts`. Written by ``python docs/parts.py``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar

T = TypeVar("T")
Each: TypeAlias = T | Sequence[T]
"""A value, or a list of values that the sweep varies."""
Part: TypeAlias = str | Mapping[str, Any]
"""A component by its name, or with its parameters."""
'''
_SWEEP = '''
class Sweep(Mapping[str, Any]):
    """A sweep as a mapping, for `dpsweep.plan` and `dpsweep.run`, with the keys of a sweep file as arguments."""

    def __init__(
        self,
        *,
{arguments}
    ) -> None: ...
    def __getitem__(self, key: str) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def to_yaml(self) -> str:
        """Return the sweep as the text of a sweep file."""
'''
_OF_NOTEBOOKS = {
    "data": "Any",
    "model": "Each[Part | Callable[..., Any]]",
    "loss": "Each[Part | Callable[..., Any]]",
    "clipping": "Any",
}
"""Keys that take objects of a notebook, and the types of what they take."""
_OF_LISTS = ("SamplingSpec", "NormSpec")
"""Sections that may hold lists of values inside."""
_NO_SECTIONS = ("Component", "DataSpec")
_PLAIN = {"null": "None", "boolean": "bool", "string": "str", "integer": "int", "number": "float"}


def module() -> str:
    """Return the text of dpsweep/parts.pyi: sections of a sweep, components by key, and the sweep."""
    whole = SweepSpec.model_json_schema()
    whole["properties"].pop("adapted")  # written by dpsweep
    sections = [_section(name, whole["$defs"][name]) for name in _sections(whole, whole["properties"])]
    components = [_components(key, registry) for key, registry in COMPONENTS.items()]
    written = "\n".join([_HEAD, *sections, *components, _sweep(whole)])
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", str(PLACE), "-"]
    return subprocess.run(command, input=written, capture_output=True, text=True, check=True).stdout


def _sections(whole: Mapping[str, Any], properties: Mapping[str, Any]) -> list[str]:
    """Return the names of the sections that fields hold, and that these hold, by name."""
    names = {name for name in re.findall(r"#/\$defs/(\w+)", json.dumps(properties)) if name not in _NO_SECTIONS}
    inner = {each for name in names for each in _sections(whole, whole["$defs"][name]["properties"])}
    return sorted(names | inner)


def _section(name: str, found: Mapping[str, Any]) -> str:
    rows = [
        f"    {key}: {f'Each[{_kind(value)}]' if name in _OF_LISTS else _kind(value)}"
        for key, value in found["properties"].items()
        if key not in ("params", NO_KEY)
    ]
    return "\n".join([f"class {_title(name)}(TypedDict, total=False):", *rows, ""])


def _title(name: str) -> str:
    return f"{name.removesuffix('Settings').removesuffix('Spec')}Section"


def _kind(value: Mapping[str, Any]) -> str:
    """Return the type of a field of the schema, as Python writes it."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return "Part" if name in _NO_SECTIONS else _title(name)
    if "allOf" in value:
        return _kind(value["allOf"][0])
    if "anyOf" in value:
        return " | ".join(dict.fromkeys(_kind(each) for each in value["anyOf"]))
    if "enum" in value or "const" in value:
        return f"Literal[{', '.join(repr(each) for each in value.get('enum', [value.get('const')]))}]"
    match value.get("type"):
        case "array":
            return f"Each[{_kind(value['items'])}]"
        case "object" if isinstance(value.get("additionalProperties"), dict):
            return f"Mapping[str, {_kind(value['additionalProperties'])}]"
        case "object":
            return "Mapping[str, Any]"
        case None:
            return "Any"
        case kind:
            return _PLAIN[kind]


def _components(key: str, registry: Mapping[str, Callable[..., object]]) -> str:
    title = "".join(word.capitalize() for word in key.split("_"))
    methods = [_component(key, name, make) for name, make in registry.items()]
    return "\n".join([f"class _{title}:", *methods, "", f"{title}: Final[_{title}]", ""])


def _component(key: str, name: str, make: Callable[..., object]) -> str:
    kinds, arguments = types_of(key, name), ["self"]
    for parameter in parameters_of(make):
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        arguments.append(f"{parameter.name}: Each[{_text(kinds[parameter.name])}]{default}")
    if key == "noise":
        arguments.append(f"{OWN_NOISE}: Each[float] | None = None")
    if len(arguments) > 1:
        arguments.insert(1, "*")
    called = f"{name}_" if keyword.iskeyword(name) else name
    about = " ".join((inspect.getdoc(make) or "").partition("\n\n")[0].split())
    short = about if len(about) <= 100 and '"' not in about and "\\" not in about else ""
    body = f'\n        """{short}"""' if short else " ..."
    return f"    def {called}({', '.join(arguments)}) -> Part:{body}"


def _text(kind: Any) -> str:
    """Return a type as Python writes it; Any for those that a sweep file writes otherwise."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _text(get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_text, get_args(kind))))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"Mapping[{', '.join(map(_text, get_args(kind)))}]"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"Sequence[{_text(get_args(kind)[0])}]"
    return {bool: "bool", int: "int", float: "float", str: "str", type(None): "None"}.get(kind, "Any")


def _sweep(whole: Mapping[str, Any]) -> str:
    fields, needed = whole["properties"], whole["required"]
    ordered = sorted(fields, key=lambda key: key not in needed)
    return _SWEEP.format(arguments="\n".join(_argument(key, fields[key], key in needed) for key in ordered))


def _argument(key: str, value: Mapping[str, Any], is_needed: bool) -> str:
    kind = _OF_NOTEBOOKS.get(key) or _kind(value)
    kind += " | Literal['off']" if key == "norms" else ""
    return f"        {key}: {kind}{'' if is_needed else ' = ...'},"


if __name__ == "__main__":
    PLACE.write_text(module())
