"""A process that is one end of a link and prints what happens to it: ``ROLE ENDPOINT INTERVAL_S TIMEOUT_S``.

As ``dealer`` it sends a ``Cancel`` named after its session with each heartbeat; as ``router`` it prints its address
first. It runs until it is killed.
"""

import asyncio
import sys
from typing import Any

from shared.wire import gateway
from shared.wire.session import Heartbeat
from tests.fakes.links import DealerEnd, RouterEnd


def _tell(*words: object) -> None:
    print(*words, flush=True)


class _Dealer(DealerEnd):
    def heartbeat(self) -> Heartbeat:
        self.dealer.send(gateway.Cancel(f"session-{len(self.welcomes)}"))
        return Heartbeat()

    def welcome(self, message: Any) -> None:
        super().welcome(message)
        _tell("welcome", message.epoch)

    def message(self, message: Any) -> None:
        _tell("message", message.request_id)

    def lost(self, why: str) -> None:
        super().lost(why)
        _tell("lost", why)


class _Router(RouterEnd):
    def hello(self, peer: str, message: Any) -> None:
        super().hello(peer, message)
        _tell("hello", peer)

    def heartbeat(self, peer: str, message: Heartbeat) -> None:
        _tell("heartbeat", peer)

    def lost(self, peer: str, why: str) -> None:
        _tell("lost", peer, why)


async def _main(role: str, endpoint: str, interval_s: float, timeout_s: float) -> None:
    if role == "dealer":
        _Dealer(endpoint, interval_s=interval_s, timeout_s=timeout_s).dealer.start()
    else:
        _tell("address", _Router(interval_s=interval_s, timeout_s=timeout_s).router.bind(endpoint))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
