"""What the gateway measures of itself, under the field's usual names. Labels are bounded: no client chooses one.

Filled by the middleware and by ``services.gateway.generation``; read by ``/metrics``.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.metrics import PREFIX

SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80)
LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """One registry per gateway (tests have several in one process)."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model_name}
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first text sent", SHORT_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one choice", BETWEEN_S
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last byte", LONG_S
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", LENGTHS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a request, all choices together", LENGTHS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens")
        self._success = Counter(
            f"{PREFIX}request_success",
            "Choices that ended, by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {
            reason: self._success.labels(finished_reason=reason, **self._model)
            for reason in ("stop", "length", "error", "abort")
        }
        self.http_requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests", ["route", "status"], registry=self.registry
        )
        self.live_streams = Gauge(
            f"{PREFIX}gateway_streams", "Choices that the scheduler works on for this gateway", registry=self.registry
        )

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", what, ["model_name"], buckets=buckets, registry=self.registry).labels(
            **self._model
        )

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"{PREFIX}{name}", what, ["model_name"], registry=self.registry).labels(**self._model)
