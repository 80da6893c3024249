"""The parts of one gateway process, put together. Made by main (and by tests); read by the endpoints."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from services.gateway.api.errors import ApiError, unavailable
from services.gateway.api.settings import SEED_MASK
from services.gateway.constraint_checker import ConstraintChecker
from services.gateway.ids import random_seed
from services.gateway.link import Link
from services.gateway.metrics import Metrics
from services.gateway.options import GatewayOptions
from services.gateway.request_templates import RequestTemplates
from services.gateway.streams import Streams
from services.gateway.text.dialect import dialect_of
from services.gateway.text.fake_tokenizer import fake_tokenizer
from services.gateway.text.tokenizer import Tokenizer
from shared.net.loop import OnCrash
from shared.tracing import tracing
from shared.wire.facts import ModelFacts

Result = TypeVar("Result")

TEXT_THREADS = 2
TEXT_TIMEOUT_S = 30.0
"""For tokenizing, rendering and the like, from when it is asked for."""
SHORT = 1000
"""Characters of a text, or bytes of a request: tokenized in about 0.2 ms, which is what the way to another thread and
back costs."""
DEFAULT_MODEL_NAME = "default"
"""Reaches the served model whatever its name."""


def load_tokenizer(options: GatewayOptions) -> Tokenizer:
    """The tokenizer that the options ask for. Raises OSError or ValueError when the model folder has none."""
    if options.backend == "fake":
        return fake_tokenizer()
    return Tokenizer.load(Path(options.model))


class Gateway:
    """One gateway: what it holds lives as long as the process."""

    def __init__(self, options: GatewayOptions, tokenizer: Tokenizer, on_crash: OnCrash | None = None) -> None:
        self.options = options
        self.tokenizer = tokenizer
        template = tokenizer.chat_template(with_tools=True)
        self.dialect = dialect_of(options, template.source if template is not None else "")
        """Of the model's own template."""
        self.metrics = Metrics(options.served_model_name)
        self.tracing = tracing(options.otlp_endpoint, "gateway", options.name, self.metrics.registry)
        self.streams = Streams()
        self.link = Link(
            options.scheduler,
            options.name,
            tokenizer.digest,
            options.recovery_timeout_s,
            self.streams,
            on_crash,
            options.keys,
        )
        folder = None if options.backend == "fake" else Path(options.model)
        self.constraints = ConstraintChecker(folder)
        self.request_templates = RequestTemplates(trusted=options.trust_request_chat_template)
        self.draining = False
        self.started_at = int(time.time())
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._num_seeds = 0
        self.metrics.watch(lambda: len(self.streams), lambda: self.status()[0], self.link.counters)

    def start(self) -> None:
        """Begin to look for the scheduler; needs a running loop."""
        self.link.start()

    async def close(self) -> None:
        """Leave the scheduler; live streams get no more tokens."""
        await self.link.close()
        await self.constraints.close()
        await self.request_templates.close()
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def status(self) -> tuple[bool, str]:
        """Whether requests are served now, and if not, why."""
        if self.draining:
            return False, "draining"
        return self.link.ready, self.link.reason

    def facts(self) -> ModelFacts:
        """Of the served model. Raises ApiError (503) while no request can be served."""
        ready, reason = self.status()
        if not ready or self.link.facts is None:
            raise unavailable(f"not ready: {reason}")
        return self.link.facts

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not served here; no name is the served one."""
        if name not in (None, self.options.served_model_name, DEFAULT_MODEL_NAME):
            raise ApiError(404, f"the model {name[:100]!r} does not exist", param="model", code="model_not_found")

    def new_seed(self) -> int:
        """For a request that brings none: random, or the next of a row that ``--seed`` fixes."""
        if self.options.seed is None:
            return random_seed()
        self._num_seeds += 1
        text = f"{self.options.seed} request {self._num_seeds}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & SEED_MASK

    async def on_text(self, work: Callable[[], Result], length: int) -> Result:
        """Work on a text or a request of that length: off the event loop unless it is short. Raises ApiError (503)."""
        return work() if length <= SHORT else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run slow text work off the event loop. Raises ApiError (503) when it has not ended in time.

        The work is bounded by the size of a request; what takes long is to wait for others. What waits is given up,
        what runs ends by itself.
        """
        try:
            async with asyncio.timeout(TEXT_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)
        except TimeoutError:
            raise unavailable("too many long texts at once") from None
