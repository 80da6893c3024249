"""The small server beside each process."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from shared import metrics


@pytest.fixture
def state() -> dict[str, tuple[bool, str]]:
    return {"health": (True, "well")}


@pytest.fixture
def url(state: dict[str, tuple[bool, str]]) -> Iterator[str]:
    registry = CollectorRegistry()
    Gauge(metrics.PREFIX + "lanes", "Lanes.", registry=registry).set(3)
    server = metrics.serve("127.0.0.1", 0, registry, lambda: state["health"])
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_served(url: str) -> None:
    assert "paternoster:lanes 3.0" in _get(url + "/metrics")[1]


def test_health_says_whether_and_why_not(url: str, state: dict[str, tuple[bool, str]]) -> None:
    assert _get(url + "/health") == (200, "well\n")
    state["health"] = (False, "stuck")
    assert _get(url + "/health") == (503, "stuck\n")


def test_other_paths_are_not_found(url: str) -> None:
    assert _get(url + "/")[0] == 404
    assert "metrics" in _get(url + "/x")[1]


def test_a_port_that_is_taken_is_an_error(url: str) -> None:
    with pytest.raises(OSError, match="in use"):
        metrics.serve("127.0.0.1", int(url.rsplit(":", 1)[1]), CollectorRegistry(), lambda: (True, ""))
