"""What the gateway measures of itself, under the field's usual names. Labels are bounded: no client chooses one.

Told by the middleware, the answers and ``services.gateway.generation`` what happens; read by ``/metrics``. Nothing here
can fail a request (``harmless``). docs/metrics.md lists every name.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.metrics import PREFIX, harmless
from shared.net.session import REASONS
from shared.tally import Tally, Total

SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80)
LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICES = (1, 2, 5, 10, 20, 50, 128)
FINISHES = ("stop", "length", "tool_calls", "error", "abort")


class Metrics:
    """One registry per gateway (tests have several in one process)."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name}
        self._first_text = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first text sent.", SHORT_S
        )
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of one choice.", BETWEEN_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a choice that ended.", BETWEEN_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last byte.", LONG_S)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", LENGTHS)
        self._request_output = self._histogram(
            "request_generation_tokens", "Output tokens of a request, all choices together.", LENGTHS
        )
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest choice.", LENGTHS
        )
        self._n = self._histogram("request_params_n", "Choices that a request asks for.", CHOICES)
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Most output tokens that a request asks for, where it does.", LENGTHS
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._output = self._counter("generation_tokens", "Output tokens.")
        self._cut_off = self._counter("clients_cut_off", "Streams ended because their client did not read them.")
        success = self._labelled("request_success", "Choices that ended, by reason.", "model_name", "finished_reason")
        self._ended = {reason: success.labels(finished_reason=reason, **self._model) for reason in FINISHES}
        self._http_requests = self._labelled("http_requests", "HTTP requests.", "route", "status")
        self._http_seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From a request's arrival to its last byte, by route.",
            ["route"],
            buckets=SHORT_S,
            registry=self.registry,
        )
        self._http_of = cache(self._http_series)

    def _http_series(self, route: str, status_class: int) -> tuple[Counter, Histogram]:
        return self._http_requests.labels(route, f"{status_class}xx"), self._http_seconds.labels(route)

    def watch(self, streams: Callable[[], int], ready: Callable[[], bool], dropped: Mapping[str, int]) -> None:
        """Show what is read at each scrape: live streams, readiness, the link's dropped frames by reason."""
        self._gauge("gateway_streams", "Choices that the scheduler works on for this gateway.").set_function(streams)
        self._gauge("gateway_ready", "1 while requests can be served.").set_function(lambda: float(ready()))
        frames = Gauge(
            f"{PREFIX}link_dropped_frames", "Frames that the link has dropped.", ["reason"], registry=self.registry
        )
        for reason in REASONS:
            frames.labels(reason).set_function(partial(dropped.__getitem__, reason))

    @harmless
    def http_ended(self, route: str, status: int, seconds: float) -> None:
        """An HTTP request of one of a bounded number of routes is over."""
        requests, taken = self._http_of(route, status // 100)
        requests.inc()
        taken.observe(seconds)

    @harmless
    def accepted(self, num_prompt: int, n: int, max_tokens: int | None) -> None:
        """A request is in the scheduler's queue with all of its choices."""
        self._prompt.value += num_prompt
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    @harmless
    def first_text(self, seconds: float) -> None:
        """A request's first text has left, so long after its arrival."""
        self._first_text.observe(seconds)

    @harmless
    def tokens(self, number: int, seconds: float | None) -> None:
        """A choice got tokens, so long after those before them (None: they are its first)."""
        self._output.value += number
        if seconds is not None and number:
            self._between.observe(seconds / number)

    @harmless
    def choice_ended(self, reason: str, num_tokens: int = 0, seconds: float = 0.0) -> None:
        """One of ``FINISHES``; so long after its first token."""
        self._ended[reason].inc()
        if num_tokens > 1:
            self._per_token.observe(seconds / (num_tokens - 1))

    @harmless
    def request_ended(self, seconds: float, num_prompt: int, num_outputs: list[int]) -> None:
        """A request has been answered in full; output tokens of each choice."""
        self._e2e.observe(seconds)
        self._request_prompt.observe(num_prompt)
        self._request_output.observe(sum(num_outputs))
        self._longest.observe(max(num_outputs))

    @harmless
    def client_cut_off(self) -> None:
        """A client that did not read its stream was let go."""
        self._cut_off.value += 1

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Tally:
        return Tally(f"{PREFIX}{name}", what, self._model, buckets, self.registry)

    def _counter(self, name: str, what: str) -> Total:
        return Total(f"{PREFIX}{name}", what, self._model, self.registry)

    def _labelled(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", what, registry=self.registry)
