"""docs/metrics.md lists every metric of every process as it is exposed: name, kind, labels and what it is."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from services.executor.metrics import ExecutorMetrics
from services.gateway.metrics import Metrics
from services.scheduler.core.counters import Counters
from services.scheduler.metrics import CoreCollector, Figures, StepMetrics
from services.scheduler.request_metrics import RequestMetrics
from shared.loop_lag import LoopLag
from shared.wire.executor import BatchFailed, batch_plan

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| ([^|]*) \| (.*) \|$", re.MULTILINE)
Row = tuple[str, str, str, str]


def gateway() -> CollectorRegistry:
    metrics = Metrics("m")
    metrics.watch(lambda: 0, lambda: True, _Zeros())
    metrics.http_ended("/health", 200, 0.1)
    LoopLag(metrics.registry)
    return metrics.registry


def scheduler() -> CollectorRegistry:
    registry = CollectorRegistry()
    StepMetrics(registry)
    RequestMetrics(registry)
    LoopLag(registry)
    dropped: dict[str, dict[str, int]] = {"gateways": {}, "executors": {}}
    figures = Figures(Counters(stale={"step": 1}), {"running": 0, "waiting": 0, "executors": []}, 0, dropped, {}, 0)
    registry.register(CoreCollector(lambda: figures))
    return registry


def executor() -> CollectorRegistry:
    metrics = ExecutorMetrics()
    metrics.watch_link(_Zeros(), lambda: True)
    metrics.answered(batch_plan(0, 0, -1), BatchFailed(0, 0, "error"))
    metrics.ignored("step")
    LoopLag(metrics.registry)
    return metrics.registry


class _Zeros(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def row(metric: Metric) -> Row:
    labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
    name = metric.name + ("_total" if metric.type == "counter" else "")
    return name, metric.type, ", ".join(sorted(labels)), metric.documentation


def section(title: str) -> set[Row]:
    page = PAGE.read_text()
    _, _, rest = page.partition(f"\n## {title}\n")
    return {match.groups() for match in ROW.finditer(rest.partition("\n## ")[0])}  # type: ignore[misc]


def test_the_page_lists_every_metric_of_every_process() -> None:
    for title, registry in (("Gateway", gateway()), ("Scheduler", scheduler()), ("Executor", executor())):
        exposed = {row(metric) for metric in registry.collect()}
        assert all(name.startswith("paternoster:") for name, *_ in exposed)
        lines = "\n".join(f"| `{n}` | {kind} | {labels} | {text} |" for n, kind, labels, text in sorted(exposed))
        assert section(title) == exposed, f"{PAGE.name} should say under {title}:\n{lines}"
