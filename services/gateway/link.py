"""The gateway's end of the link to the scheduler: whether requests can be served, and every message both ways.

Owns the Dealer and the recovery timer; feeds ``services.gateway.streams``. All of it runs on the event loop.
"""

import asyncio
import logging
import os
from typing import Any

import msgspec

from services.gateway.streams import Streams
from shared.net.curve import PeerKeys
from shared.net.dealer import Dealer
from shared.net.loop import OnCrash
from shared.wire.codec import scheduler_to_gateway
from shared.wire.facts import ModelFacts
from shared.wire.gateway import (
    Accepted,
    Availability,
    GatewayHello,
    GatewayWelcome,
    Rejected,
    StateQuery,
    StateReply,
    Tokens,
)
from shared.wire.session import Heartbeat

_log = logging.getLogger(__name__)

RETRY_S = 1.0
"""How often streams that the scheduler would not take back are offered again."""


class Link:
    """The session with the scheduler, as a Dealer's handler."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        tokenizer_digest: str,
        recovery_timeout_s: float,
        streams: Streams,
        on_crash: OnCrash | None = None,
        keys: PeerKeys | None = None,
    ) -> None:
        self._name = name
        self._tokenizer_digest = tokenizer_digest
        self._recovery_timeout_s = recovery_timeout_s
        self._streams = streams
        self._dealer = Dealer(endpoint, "gateway", name, scheduler_to_gateway, self, on_crash=on_crash, keys=keys)
        self._queries: dict[int, asyncio.Future[str]] = {}
        self._num_queries = 0
        self._recovery: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self.facts: ModelFacts | None = None
        """Of the served model, once an executor has joined; kept while there is none."""
        self.ready = False
        self.reason = "no scheduler yet"
        """Why not ``ready``."""
        self.counters = self._dealer.counters
        """Dropped frames by reason."""
        streams.send = self._dealer.send

    def start(self) -> None:
        """Connect; needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._dealer.start()

    async def close(self) -> None:
        """Say goodbye. Nothing is resubmitted any more."""
        for timer in (self._recovery, self._retry):
            if timer is not None:
                timer.cancel()
        await self._dealer.close()

    async def query_state(self, timeout_s: float) -> Any:
        """The scheduler's part of ``/debug/state``. Raises TimeoutError when it does not answer in time, ValueError
        when its answer is not JSON."""
        self._num_queries += 1
        query_id, answer = self._num_queries, self._loop.create_future()
        self._queries[query_id] = answer
        try:
            if not self._dealer.send(StateQuery(query_id)):
                raise TimeoutError
            return msgspec.json.decode(await asyncio.wait_for(answer, timeout_s))
        finally:
            del self._queries[query_id]

    # What the Dealer asks and tells.

    def hello(self) -> GatewayHello:
        """See ``DealerHandler``."""
        return GatewayHello(self._name, os.getpid())

    def heartbeat(self) -> Heartbeat:
        """See ``DealerHandler``."""
        return Heartbeat()

    def welcome(self, message: GatewayWelcome) -> None:
        """A session is open: what lives goes to the scheduler, which may be a new one."""
        _log.info("session with the scheduler, epoch %d", message.epoch)
        self._available(message)
        self._streams.resubmit()

    def message(self, message: Any) -> None:
        """One message of the session."""
        match message:
            case Tokens():
                self._streams.tokens(message)
            case Accepted():
                self._streams.accepted(message)
            case Rejected():
                self._streams.rejected(message)
                self._offer_again_later()
            case Availability():
                self._available(message)
                if self.ready:
                    self._streams.resubmit()
            case StateReply():
                answer = self._queries.get(message.query_id)
                if answer is not None and not answer.done():
                    answer.set_result(message.state_json)

    def lost(self, why: str) -> None:
        """The session is over; streams wait for the next one."""
        _log.warning("lost the scheduler: %s; %d streams wait", why, len(self._streams))
        self._streams.session_lost()
        self._unavailable(f"lost the scheduler: {why}")

    def refused(self, reason: str) -> None:
        """The scheduler does not want this gateway (as it is)."""
        _log.error("refused by the scheduler: %s", reason)
        self._unavailable(f"refused by the scheduler: {reason}")

    # Availability.

    def _available(self, message: GatewayWelcome | Availability) -> None:
        facts = self.facts = message.facts or self.facts
        if not message.ready:
            self._unavailable(message.reason or "no executor is ready")
        elif facts is None:
            self._unavailable("the scheduler does not know the model yet")
        elif facts.tokenizer_digest != self._tokenizer_digest:
            self._unavailable("the gateway's tokenizer is not that of the executors' model")
        else:
            self.ready, self.reason = True, ""
            if self._recovery is not None:
                self._recovery.cancel()
                self._recovery = None

    def _unavailable(self, reason: str) -> None:
        if self.ready or reason != self.reason:
            level = logging.INFO if self.facts is None else logging.WARNING  # before the first executor it is the start
            _log.log(level, "not ready: %s", reason)
        self.ready, self.reason = False, reason
        if self._recovery is None:
            self._recovery = self._loop.call_later(self._recovery_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._recovery = None
        self._streams.fail_all(f"nothing could serve this for {self._recovery_timeout_s:g} s: {self.reason}")

    def _offer_again_later(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._offer_now)

    def _offer_now(self) -> None:
        self._retry = None
        if self.ready:
            self._streams.resubmit()
