"""An HTTP server on loopback that answers as a test wants, in place of MLflow's or Ray's."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, str], Any]
"""From method and path to the value of an answer; a text is an address to which the client is sent on, and bytes are
sent as they are, the last of them again and again."""


class Server(ThreadingHTTPServer):
    """Answers every request by a function of its method and path, and notes the requests."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.logins = answer, list[str](), list[str | None]()
        self.is_over = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        self.server.logins.append(self.headers.get("Authorization"))
        found = self.server.answer(self.command, path)
        if isinstance(found, bytes):
            self.drip(found)
            return
        self.send_response(307 if isinstance(found, str) else 200)
        content = b"" if isinstance(found, str) else json.dumps(found).encode()
        for name, value in {"Location": found, "Content-Length": len(content)}.items():
            if name != "Location" or isinstance(found, str):
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PATCH = do_GET

    def drip(self, begun: bytes) -> None:
        self.wfile.write(begun)
        with contextlib.suppress(OSError):  # the client has gone
            while not self.server.is_over.wait(0.05):
                self.wfile.write(begun[-1:])

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def answering(answer: Answer) -> Iterator[Server]:
    """A server that answers until the block ends."""
    server = Server(answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()
