"""A process's own small HTTP server for ``/metrics`` and ``/health``; used by every service's main.

It runs in a daemon thread beside the event loop, so it answers also while the loop is busy; what it serves is cached
state. Here is also what all metrics share: their prefix, and ``harmless``. Imports prometheus_client and the standard
library only.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, ParamSpec
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

Health = Callable[[], tuple[bool, str]]
"""Whether the process is well, and one line about it. Called in the server's thread."""

PREFIX = "paternoster:"
"""In front of every metric's name."""

Given = ParamSpec("Given")

_log = logging.getLogger(__name__)
_failed: set[str] = set()
"""What was logged."""


def harmless(measure: Callable[Given, None]) -> Callable[Given, None]:
    """A mistake in what measures must cost nobody a token: it is logged, once, and that is all."""

    @functools.wraps(measure)
    def try_to(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            measure(*args, **kwargs)
        except Exception as error:
            name = measure.__qualname__
            if name not in _failed:
                _failed.add(name)
                _log.error("the metrics of %s are wrong from here on: %s", name, type(error).__name__, exc_info=error)

    return try_to


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Health and metrics polls are not worth a line each."""


class MetricsServer:
    """The running server. ``port`` is the real one, also when 0 was asked for."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.port: int = server.server_port
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve(host: str, port: int, registry: CollectorRegistry, health: Health) -> MetricsServer:
    """Serve ``/metrics`` of ``registry`` and ``/health``. Raises OSError when the port is taken."""
    metrics_app = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                page: Iterable[bytes] = metrics_app(environ, start_response)
                return page
            case "/health":
                well, line = health()
                return _plain(start_response, "200 OK" if well else "503 Service Unavailable", line)
            case _:
                return _plain(start_response, "404 Not Found", "there are /metrics and /health here")

    return MetricsServer(make_server(host, port, app, server_class=_Server, handler_class=_QuietHandler))


def _plain(start_response: Any, status: str, line: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [line.encode() + b"\n"]
