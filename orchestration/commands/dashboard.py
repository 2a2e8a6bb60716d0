"""`dpsweep dashboard`: a local page of all sweeps below some folders, which renews itself."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.orchestration.commands.options import warn
from dpsweep.orchestration.store.layout import folder_at

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from dpsweep.orchestration.report.board import Board

PERIOD: Final = 5.0
"""Seconds after which the page asks again."""
_LAST_ANSWERS_WITHIN: Final = 1
"""Seconds that answers may take when the command ends: a reader who reads slowly would hold it up."""
_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY: Final = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'"
)
"""A report lies in a folder that may be somebody else's: its scripts run without our origin, and reach no address."""


def dashboard(
    folders: Annotated[
        list[str], typer.Argument(help="Folders or URIs below which sweeps are looked for.", metavar="FOLDER...")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show all sweeps below folders on one local page: progress, curves as they grow, and a comparison.

    The page renews itself. Only who has its address, which holds a token, can open it.
    """
    import uvicorn

    from dpsweep.accounting.records.files import exists
    from dpsweep.orchestration.report.board import Board

    roots = tuple(dict.fromkeys(folder_at(folder) for folder in folders))
    for given, root in zip(folders, roots, strict=False):
        if not exists(root):
            raise InvalidInput(f"there is no {given}; name a folder below which sweeps lie")
    token = secrets.token_urlsafe(24)
    with _listening(host, port) as server:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"dashboard: http://{shown}:{server.getsockname()[1]}/?token={token}")
        board = Board(roots)
        threading.Thread(target=_renewed, args=(board,), name="dpsweep-dashboard", daemon=True).start()
        app = application(board, token)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_LAST_ANSWERS_WITHIN
        )
        uvicorn.Server(settings).run(sockets=[server])


def _renewed(board: Board) -> None:
    """Look at the sweeps again and again, as long as the process lives."""
    while True:
        try:
            board.refresh()
        except (DpsweepError, OSError) as error:  # a folder that goes away, or a store that does not answer
            warn(f"{error}; looking again in {PERIOD:.0f} s")
        time.sleep(PERIOD)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises: InvalidInput if it cannot."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(
            f"cannot listen on {host} port {port}: {reason}; give an address of this machine with --host, or "
            "another --port"
        ) from None


def application(board: Board, token: str) -> Starlette:
    """Return the server: the page, its numbers as JSON, and the report of each sweep; each asks for the token."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse
    from starlette.routing import Route

    from dpsweep.accounting.records.files import read_bytes
    from dpsweep.orchestration.report.board import board_page

    cookie = (
        f"dpsweep-{token[:8]}"  # a browser keeps the cookies of a host whatever the port: of each dashboard its own
    )

    def refused(request: Request) -> Response | None:
        given = request.cookies.get(cookie, "")
        if secrets.compare_digest(given.encode(), token.encode()):
            return None
        return PlainTextResponse(
            "Open the address that dpsweep dashboard printed, with its token.\n", HTTPStatus.UNAUTHORIZED
        )

    async def page(request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), token.encode()):
            answer: Response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
            answer.set_cookie(cookie, token, httponly=True, samesite="strict")
            return answer
        if (no := refused(request)) is not None:
            return no
        return _html(board_page(board.state(), PERIOD), _PAGE_POLICY)

    async def state(request: Request) -> Response:
        return refused(request) or JSONResponse(board.state())

    async def report(request: Request) -> Response:
        if (no := refused(request)) is not None:
            return no
        address = board.report(request.query_params.get("folder", ""))
        if address is None:
            return PlainTextResponse("The dashboard shows no such sweep.\n", HTTPStatus.NOT_FOUND)
        try:
            content = await run_in_threadpool(read_bytes, address)
        except (DpsweepError, OSError):
            return PlainTextResponse("This sweep has no report yet.\n", HTTPStatus.NOT_FOUND)
        return _html(content.decode(errors="replace"), _REPORT_POLICY)

    routes: Sequence[Route] = (Route("/", page), Route("/state", state), Route("/report", report))
    return Starlette(routes=list(routes))


def _html(content: str, policy: str) -> Response:
    from starlette.responses import HTMLResponse

    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(content, headers=headers)
