"""What a request's span says, by the conventions for generative AI. Called by the outer middleware and by answers."""

from collections.abc import Sequence

from services.gateway.api.note import Note
from services.gateway.api.settings import Settings
from services.gateway.usage import Usage
from shared.metrics import harmless
from shared.tracing import Span, Tracing

TRACEPARENT = b"traceparent"


@harmless
def begin(tracing: Tracing, note: Note, method: str, route: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Note the span of an HTTP request; the client's own trace goes on in it."""
    parent = next((value.decode("latin-1") for name, value in headers if name == TRACEPARENT), "")
    note.span = tracing.start(f"{method} {route}", parent, "server")
    note.span.set({"http.request.method": method, "http.route": route})


@harmless
def describe(span: Span, model: str, settings: Settings, usage: Usage, finishes: Sequence[str], note: Note) -> None:
    """A request for text is over."""
    span.set(
        {
            "gen_ai.request.model": model,
            "gen_ai.request.n": settings.n,
            "gen_ai.request.temperature": settings.temperature,
            "gen_ai.request.top_p": settings.top_p,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.response.finish_reasons": finishes,
        }
    )
    if settings.max_tokens is not None:
        span.set({"gen_ai.request.max_tokens": settings.max_tokens})
    if note.ttft_s is not None:
        span.set({"gen_ai.latency.time_to_first_token": note.ttft_s})


@harmless
def end(span: Span, status: int, request_id: str, seconds: float) -> None:
    """It is answered."""
    span.set({"http.response.status_code": status, "request.id": request_id, "gen_ai.latency.e2e": seconds})
    if status >= 500:
        span.fail(f"HTTP {status}")
    span.end()
