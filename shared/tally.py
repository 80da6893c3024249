"""Histogram and counter for what happens with every token and request: a fifth of what prometheus_client's own take.

For one thread: they take no locks. A scrape in another thread may see a value in the buckets and not yet in the sum.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """Values by bucket; ``bounds`` are the buckets' upper ones, ascending."""

    def __init__(
        self, name: str, what: str, labels: Mapping[str, str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._what, self._labels = name, what, dict(labels)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        family = HistogramMetricFamily(self._name, self._what, labels=list(self._labels))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(
            list(self._labels.values()), list(zip(names, accumulate(self._counts), strict=True)), self._sum
        )
        yield family


class Total(Collector):
    """A counter, likewise."""

    def __init__(self, name: str, what: str, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self._name, self._what, self._labels = name, what, dict(labels)
        self.value = 0
        """Only ever added to."""
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        family = CounterMetricFamily(self._name, self._what, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        yield family
