"""Lists of whole numbers in options, such as 1,2,4 or 1..64."""

from __future__ import annotations

from dpsweep.accounting.errors import InvalidInput

_MOST_NUMBERS = 10_000
"""Longest list of numbers in an option such as --group-size."""


def whole_numbers(flag: str, text: str, at_least: int) -> list[int]:
    """Return the numbers in a flag such as 1,2,4 or 1..64. Raises: InvalidInput for anything else."""
    numbers: list[int] = []
    for item in map(str.strip, text.split(",")):
        first, dots, last = item.partition("..")
        ends = (first, last) if dots else (first, first)
        if not all(end.isdecimal() and len(end) < 20 for end in ends) or not at_least <= int(ends[0]) <= int(ends[1]):
            raise InvalidInput(
                f"{flag} has {item!r}, but needs whole numbers of at least {at_least}, such as 1,2,4 or 1..64"
            )
        if len(numbers) + int(ends[1]) - int(ends[0]) >= _MOST_NUMBERS:
            raise InvalidInput(f"{flag} has {item!r}: more than {_MOST_NUMBERS} numbers; give fewer")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers
