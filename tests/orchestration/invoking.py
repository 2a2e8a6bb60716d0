"""The command without what `main` does around it, so that an error is an exception."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.commands.main import app


def invoked(*arguments: object, **options: Any) -> Result:
    """What the command gave, whether or not it succeeded; ``options`` are those of `CliRunner.invoke`."""
    return CliRunner().invoke(app, [*map(str, arguments)], **options)


def printed(*arguments: object, **options: Any) -> str:
    """The stdout of a command that succeeds; what it refuses is raised."""
    done = invoked(*arguments, **options)
    if isinstance(done.exception, DpsweepError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(error: type[DpsweepError], *arguments: object) -> str:
    """Why a command refuses."""
    done = invoked(*arguments)
    assert isinstance(done.exception, error), done.output
    return str(done.exception)
