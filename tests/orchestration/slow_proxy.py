"""A proxy on loopback for readers, which answers late, as if from far away, and counts the requests that it holds."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Traffic:
    """asked: method and path of every request. most_at_once: requests that were held together. refused: parts of paths
    that are answered by 403. missing: bytes that every answer lacks at its end."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    refused: tuple[str, ...] = ()
    missing: int = 0
    _held: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, method: str, path: str) -> None:
        with self._lock:
            self.asked.append((method, path))
            self._held += 1
            self.most_at_once = max(self.most_at_once, self._held)

    def end(self) -> None:
        with self._lock:
            self._held -= 1

    def forget(self) -> None:
        with self._lock:
            self.asked.clear()
            self.most_at_once = 0


@contextmanager
def slow_proxy(address: str, seconds: float) -> Iterator[tuple[str, Traffic]]:
    """A server that passes every request on to ``address`` after this time; yields its own address."""
    traffic, target = Traffic(), urlsplit(address)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            path = unquote(self.path.partition("?")[0])
            traffic.begin(self.command, path)
            try:
                time.sleep(seconds)
                if any(each in path for each in traffic.refused):
                    self._answer(403, [], b"")
                    return
                onward = http.client.HTTPConnection(str(target.hostname), target.port)
                onward.request(self.command, self.path, headers=dict(self.headers))
                answer = onward.getresponse()
                content = answer.read()
                self._answer(answer.status, answer.getheaders(), content[: len(content) - traffic.missing])
                onward.close()
            finally:
                traffic.end()

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            kept = {name: value for name, value in headers if name.lower() not in ("transfer-encoding", "connection")}
            if self.command != "HEAD":
                kept["Content-Length"] = str(len(body))
            self.send_response_only(status)
            for name, value in kept.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = _pass_on

        def log_message(self, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", traffic
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
