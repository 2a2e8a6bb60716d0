"""One planted bug, and how the tables beside this file write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new``, which breaks what ``breaks`` says.

    old: occurs exactly once in its file; short, so that it survives changes beside it. privacy: the bug under-states a
    cost, weakens noise or discloses private data. tests: what must fail, if others than those of the file. survives:
    why no test can notice it, for an accepted survivor; "" where one must.
    """

    old: str
    new: str
    breaks: str
    privacy: bool = False
    tests: tuple[str, ...] = ()
    survives: str = ""


@dataclass(frozen=True)
class Mutant:
    """A bug in ``file``. tests: what must fail, as pytest takes it (a file, or ``file::test``); fast, without Ray."""

    file: str
    bug: Bug
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The top-level package that it changes."""
        return self.file.split("/")[0]

    @property
    def title(self) -> str:
        return f"{self.file}: {self.bug.breaks}"

    def planted(self, text: str) -> str:
        """``text`` of the file with the bug. Raises: ValueError unless the old text occurs exactly once."""
        found = text.count(self.bug.old)
        if found != 1:
            raise ValueError(f"{self.file} holds {self.bug.old!r} {found} times, but must hold it once; write it anew")
        return text.replace(self.bug.old, self.bug.new)


def bugs_in(file: str, tests: tuple[str, ...], *bugs: Bug) -> tuple[Mutant, ...]:
    """The bugs of one file, each noticed by ``tests`` unless it names its own."""
    return tuple(Mutant(file, bug, bug.tests or tests) for bug in bugs)
