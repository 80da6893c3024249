"""Spans of OpenTelemetry, sent to a collector over OTLP/HTTP. Used by every service that was given an endpoint.

Without one nobody makes a ``Tracing``, and the SDK is not even imported. Spans are handed to a thread that sends them;
a collector that is slow, down or wrong costs spans and one line in the log, but never a request.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter

from shared.metrics import PREFIX

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SpanProcessor

_log = logging.getLogger(__name__)

PATH = "/v1/traces"
"""Of OTLP/HTTP; added to an endpoint that does not end in it."""
TIMEOUT_S = 5.0
"""For one batch, repeated attempts included."""
LEAVE_S = 2.0
"""How long the last spans have at the end of the process."""
DELAY_MS = 1000
"""How long spans are collected before they are sent."""

Kind = Literal["server", "internal"]
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Span:
    """One piece of a request's way."""

    def __init__(self, span: "trace.Span") -> None:
        self._span = span
        context = span.get_span_context()
        sampled = context.is_valid and context.trace_flags.sampled
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if sampled else ""
        """W3C's header for whoever goes on with the request; empty when nobody wants this trace."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happens now."""
        self._span.add_event(name, attributes)

    def fail(self, why: str) -> None:
        """It does not go well."""
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, why)

    def end(self, at_ns: int | None = None) -> None:
        """It is over, now or since a time of ``time.time_ns``. Once is enough; more is harmless."""
        if self._span.is_recording():
            self._span.end(at_ns)


class Tracing:
    """The spans of one process."""

    def __init__(self, endpoint: str, service: str, instance: str, registry: CollectorRegistry) -> None:
        """Raises ModuleNotFoundError where the packages of the extra ``traces`` are not installed."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._begun = Counter(f"{PREFIX}trace_spans", "Spans that began.", registry=registry)
        resource = Resource.create({"service.name": f"paternoster-{service}", "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_processor(endpoint, registry))
        self._tracer = self._provider.get_tracer("paternoster")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}

    def start(self, name: str, parent: str = "", kind: Kind = "internal") -> Span:
        """A span that begins now, below the one that a ``traceparent`` names; one that is none is as no parent."""
        context = self._propagator.extract({"traceparent": parent}) if parent else None
        self._begun.inc()
        return Span(self._tracer.start_span(name, context, self._kinds[kind]))

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        leaving = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)


def tracing(endpoint: str, service: str, instance: str, registry: CollectorRegistry) -> Tracing | None:
    """None without an endpoint. Raises ModuleNotFoundError."""
    return Tracing(endpoint, service, instance, registry) if endpoint else None


def address(endpoint: str) -> str:
    """Where spans go: ``http://host:4318`` means ``http://host:4318/v1/traces``."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(PATH) else endpoint + PATH


def _processor(endpoint: str, registry: CollectorRegistry) -> "SpanProcessor":
    """Sends spans in the background; tells of a collector that fails once, until it is well again."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line of ours says it all
    exported = Counter(f"{PREFIX}trace_spans_exported", "Spans that the collector has taken.", registry=registry)

    class Exporter(SpanExporter):
        def __init__(self) -> None:
            self._inner = OTLPSpanExporter(endpoint=address(endpoint), timeout=TIMEOUT_S)
            self._failing = False

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            try:
                result = self._inner.export(spans)
            except Exception:
                result = SpanExportResult.FAILURE
            if result is SpanExportResult.SUCCESS:
                exported.inc(len(spans))
                self._failing = False
            elif not self._failing:
                self._failing = True
                _log.warning("the collector at %s takes no spans: they are lost until it does", endpoint)
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    return BatchSpanProcessor(Exporter(), schedule_delay_millis=DELAY_MS)
