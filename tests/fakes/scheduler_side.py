"""The scheduler's end of the executor link without a scheduler: tests say what is planned and read what comes back."""

from typing import Any

from shared.net.router import Router
from shared.wire import codec
from shared.wire.executor import (
    BatchFailed,
    BatchPlan,
    BatchResult,
    Drain,
    Draining,
    ExecutorHello,
    ExecutorWelcome,
    Shutdown,
)
from shared.wire.session import Heartbeat
from tests.fakes.waiting import await_until

EPOCH = 7
DEADLINE_S = 100.0


class SchedulerSide:
    """A RouterHandler that welcomes every executor and keeps what it hears. Create it on a running loop."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", interval_s: float = 0.05, timeout_s: float = 5.0) -> None:
        self.hellos: list[ExecutorHello] = []
        self.answers: list[BatchResult | BatchFailed] = []
        self.beats: list[Heartbeat] = []
        self.losses: list[str] = []
        self.drains: list[Draining] = []
        self.lets_go = True
        """Whether an executor that asks to leave is told to."""
        self.peer = ""
        self.router: Router[Any] = Router(codec.executor_to_scheduler, self, interval_s=interval_s, timeout_s=timeout_s)
        self.endpoint = self.router.bind(endpoint)

    def hello(self, peer: str, message: ExecutorHello) -> None:
        self.hellos.append(message)
        self.peer = peer
        self.router.welcome(peer, ExecutorWelcome(EPOCH))

    def message(self, peer: str, message: BatchResult | BatchFailed | Draining) -> None:
        assert peer == self.peer
        if not isinstance(message, Draining):
            self.answers.append(message)
            return
        self.drains.append(message)
        if self.lets_go:
            self.send(Drain())
            self.send(Shutdown("drained"))

    def heartbeat(self, peer: str, message: Heartbeat) -> None:
        self.beats.append(message)

    def lost(self, peer: str, why: str) -> None:
        self.losses.append(why)

    async def joined(self, times: int = 1) -> None:
        await await_until(lambda: len(self.hellos) >= times, DEADLINE_S, f"hello number {times}")

    async def answered(self, times: int) -> BatchResult | BatchFailed:
        await await_until(lambda: len(self.answers) >= times, DEADLINE_S, f"answer number {times}")
        return self.answers[times - 1]

    async def ask(self, plan: BatchPlan) -> BatchResult | BatchFailed:
        """Send one plan and wait for its answer."""
        self.send(plan)
        return await self.answered(len(self.answers) + 1)

    def send(self, message: Any) -> None:
        assert self.router.send(self.peer, message)
