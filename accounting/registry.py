"""Look up a component by name and build it from named parameters, with errors that suggest the fix."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from dpsweep.accounting.errors import DpsweepError, InvalidInput

T = TypeVar("T")


def one_of(names: Collection[str]) -> str:
    """Return two or more names as a choice.

    >>> one_of(["rdp", "pld", "gdp"])
    'rdp, pld or gdp'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}"


def nearest(word: str, valid: Collection[str]) -> str:
    """Return the end of an error message: the closest valid word, if any is close, and all valid words.

    >>> nearest("poison", ["poisson", "fixed"])
    "did you mean 'poisson'? valid: fixed, poisson"
    """
    return f"{meant(word, valid)}valid: {', '.join(sorted(valid))}"


def meant(word: object, valid: Collection[str]) -> str:
    """Return a question for the closest valid word, with a space behind it; "" if none is close, all that are alike.

    >>> meant("posson", ["poisson", "fixed"])
    "did you mean 'poisson'? "
    >>> meant("betas", ["learning_rate", "beta1", "beta2"])
    "did you mean 'beta1' or 'beta2'? "
    """
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word, valid, n=max(1, len(valid)))
    likeness = {each: difflib.SequenceMatcher(None, each, word).ratio() for each in close}
    closest = [repr(each) for each in close if likeness[each] == likeness[close[0]]]
    return f"did you mean {' or '.join(sorted(closest))}? " if closest else ""


def unlike(message: str, word: object) -> str:
    """Return a message of pydantic on a value that is none of several words, with the closest of them.

    >>> unlike("Input should be 'poisson' or 'fixed'", "posson")
    "did you mean 'poisson'? Input should be 'poisson' or 'fixed'"
    """
    return meant(word, re.findall(r"'([^']*)'", message)) + message


def lookup(registry: Mapping[str, T], name: str, what: str) -> T:
    """Return the entry ``name``, or `InvalidInput` with the nearest valid name; ``what`` names the kind of entry.

    A name with parameters behind a colon, as on the command line, is refused with its form in a sweep file.
    """
    if not isinstance(name, str):
        raise InvalidInput(f"{what} is {name!r}, but must be a name; {nearest('', registry)}")
    if name not in registry:
        head, _, listed = name.partition(":")
        keys = ", ".join((f"name: {head}", *(each.strip().replace("=", ": ") for each in listed.split(","))))
        asks = f"write its parameters as keys: {{{keys}}}" if head in registry else nearest(name, registry)
        raise InvalidInput(f"unknown {what} {name!r}; {asks}")
    return registry[name]


def build(
    registry: Mapping[str, Callable[..., T]], name: str, params: Mapping[str, Any], what: str, **context: Any
) -> T:
    """Call the entry ``name`` with the user's ``params`` and with those arguments in ``context`` that it accepts.

    Raises: InvalidInput for an unknown key, a missing required key, or a value that the entry itself refuses. The
    message names the entry once, and the valid keys or the bound.
    """
    factory = lookup(registry, name, what)
    subject = f"{what} {name!r}"
    parameters = inspect.signature(factory).parameters.values()
    takes_any_key = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    own = named.keys() - context.keys()
    for key in params:
        if key not in own and (key in context or not takes_any_key):
            none = "any other is valid" if takes_any_key else "it takes none"
            raise InvalidInput(f"unknown key {key!r} of {subject}; {nearest(key, own) if own else none}")
    missing = [
        key for key, parameter in named.items() if parameter.default is parameter.empty and key in own - params.keys()
    ]
    given = {key: value for key, value in context.items() if takes_any_key or key in named}
    if missing:
        unused = ", ".join(key for key in context if key not in given)
        hint = f"; given to arguments of these names: {unused}" if unused else ""
        raise InvalidInput(f"{subject} needs {', '.join(missing)}; valid: {', '.join(sorted(own))}{hint}")
    try:
        return factory(**given, **params)
    except (TypeError, ValueError) as error:
        if isinstance(error, DpsweepError) and str(error).startswith(subject):
            raise
        raise InvalidInput(f"{subject}: {error}") from error
