"""A collector of spans in the test's own process: takes OTLP over HTTP, or refuses to."""

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span; ids in hexadecimal digits."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: list[str]
    seconds: float
    failed: bool


@dataclass
class Collector:
    """Use it as a context manager."""

    status: int = 200
    spans: list[Seen] = field(default_factory=list)
    num_posts: int = 0

    def __enter__(self) -> "Collector":
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.num_posts += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.spans += _read(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """As ``--otlp-endpoint`` takes it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def of(self, name: str) -> list[Seen]:
        """Spans of this name."""
        return [span for span in self.spans if span.name == name]


def _read(body: bytes) -> list[Seen]:
    seen = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = next(each.value.string_value for each in resource.resource.attributes if each.key == "service.name")
        for scope in resource.scope_spans:
            for span in scope.spans:
                seen.append(
                    Seen(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        {each.key: _value(each.value) for each in span.attributes},
                        [event.name for event in span.events],
                        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        span.status.code == 2,
                    )
                )
    return seen


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
