"""A run of random events from a string of bytes, ten for each: far cheaper to draw than a rule at a time.

Hypothesis draws, and shrinks, the bytes. Ten zeros are nothing, lower bytes are simpler events, so a failure shrinks to
the few events that matter. Used by the property tests.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shared.wire import tokens
from shared.wire.facts import ExecutorLimits
from tests.fakes.scheduler_world import World
from tests.fakes.streams import POISON, VOCAB

RECORD_BYTES = 10
MOST_GATEWAYS = 3
MOST_EXECUTORS = 3
MOST_LIVE = 12
"""Streams; with more the same happens, slower."""
ASKS: list[dict[str, object]] = [
    {"num_logprobs": 0},
    {"num_logprobs": 2, "frequency_penalty": 0.4},
    {"num_logprobs": 1, "prompt_logprobs": True},
    {"repetition_penalty": 1.5},
]
"""What some requests ask for besides tokens."""

BEGINNINGS = [
    [i * i // 3 % VOCAB for i in range(fork)] + [i * (i + 1) // 2 % VOCAB for i in range(30)] for fork in (0, 3, 8, 13)
]
"""Prompts begin like one of these: they share what they share, and fork anywhere in a block."""

T = TypeVar("T")


class Chooser:
    """Choices from one record's bits."""

    def __init__(self, record: bytes) -> None:
        self._bits = int.from_bytes(record, "little")

    def below(self, number: int) -> int:
        """A number from 0 on, below ``number``."""
        self._bits, choice = divmod(self._bits, number)
        return choice

    def one_of(self, options: Sequence[T]) -> T:
        """One of several; repeat the likely ones."""
        return options[self.below(len(options))]


def play(world: World, tape: bytes) -> Iterator[str]:
    """Let it all happen; yields the name of each event that the core has handled."""
    for start in range(0, len(tape), RECORD_BYTES):
        chooser = Chooser(tape[start + 1 : start + RECORD_BYTES])
        happening = KINDS[tape[start] % len(KINDS)]
        handled = world.num_events
        happening(world, chooser)
        if world.num_events > handled:
            yield happening.__name__


def _gateway(world: World, chooser: Chooser) -> str:
    return chooser.one_of(list(world.streams))


def _executor(world: World, chooser: Chooser) -> str | None:
    return chooser.one_of(list(world.executors)) if world.executors else None


def _num_live(world: World) -> int:
    return sum(map(len, world.streams.values()))


def nothing(world: World, chooser: Chooser) -> None:
    pass


def run_step(world: World, chooser: Chooser) -> None:
    busy = [executor.id for executor in world.executors.values() if executor.plans and not executor.hangs]
    if busy:
        world.run_step(chooser.one_of(busy))
    elif len(world.executors) < MOST_EXECUTORS and chooser.below(2):
        join_executor(world, chooser)
    elif _num_live(world) < MOST_LIVE:
        submit(world, chooser)
    else:
        world.pass_time(600)


def submit(world: World, chooser: Chooser) -> None:
    if _num_live(world) >= MOST_LIVE:
        run_step(world, chooser)
        return
    gateway, max_tokens = _gateway(world, chooser), 1 + chooser.below(12)
    seed = chooser.one_of([0, 1, 2, 3, 3, 2, 1, 0, *POISON])
    fields = {
        "stop_token_ids": chooser.one_of([b"", b"", tokens.pack([0])]),
        "ignore_eos": bool(chooser.below(2)),
        "min_tokens": chooser.one_of([0, 0, 2]),
        "priority": chooser.one_of([0, 0, 1, -1]),
        "tenant": chooser.one_of(["", "", "", "other"]),
        "deadline_ms": chooser.one_of([0, 0, 0, 0, 200]),
        "salt": chooser.one_of(["", "", "", "salt"]),
        **chooser.one_of([{}, {}, {}, *ASKS]),
    }
    choices = chooser.one_of([1, 1, 1, 1, 2, 3])
    prompt = chooser.one_of(BEGINNINGS)[: 1 + chooser.below(30)]
    group = f"group {world.numbers}" if choices > 1 else ""
    for choice in range(choices):
        world.submit(gateway, prompt, max_tokens, seed=seed + choice, group=group, **fields)


def submit_again(world: World, chooser: Chooser) -> None:
    gateway = _gateway(world, chooser)
    if world.streams[gateway]:
        world.submit(gateway, [0], 1, request_id=chooser.one_of(list(world.streams[gateway])))


def cancel(world: World, chooser: Chooser) -> None:
    gateway = _gateway(world, chooser)
    world.cancel(gateway, chooser.one_of([*world.streams[gateway], "unknown"]))


def fail_next_step(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.fail_next_step(executor, chooser.one_of([None, None, 0, 1, 2]), chooser.one_of([False, False, True]))


def spoil_next_sample(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.spoil_next_sample(executor, chooser.below(4))


def join_executor(world: World, chooser: Chooser) -> None:
    if len(world.executors) >= MOST_EXECUTORS:
        return
    num_slots = world.pool_slots or 0
    block_size = chooser.one_of([size for size in range(1, 5) if num_slots % size == 0])
    num_blocks = num_slots // block_size if num_slots else 6 + chooser.below(7)
    lanes, step_tokens = 1 + chooser.below(4), chooser.one_of([1, 2, 3, 5, 8, 16])
    world.join_executor(ExecutorLimits(num_blocks, block_size, lanes, step_tokens), chooser.one_of(["a", "b"]))


def kill_executor(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.kill_executor(executor)


def say_hello_again(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.say_hello_again(executor)


def drain_executor(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.drain_executor(executor, chooser.one_of([0, 30, 400]))


def hang_executor(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.executors[executor].hangs = True


def lie(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.lie(executor, chooser.below(4))


def tell_old_news(world: World, chooser: Chooser) -> None:
    executor = _executor(world, chooser)
    if executor is not None:
        world.tell_old_news(executor, chooser.below(4), chooser.below(2))


def join_gateway(world: World, chooser: Chooser) -> None:
    if len(world.streams) < MOST_GATEWAYS:
        world.join_gateway()


def leave_gateway(world: World, chooser: Chooser) -> None:
    if len(world.streams) > 1:
        world.leave_gateway(_gateway(world, chooser))


def restart_scheduler(world: World, chooser: Chooser) -> None:
    world.restart_scheduler(bool(chooser.below(2)))


def pass_time(world: World, chooser: Chooser) -> None:
    world.pass_time(chooser.one_of([1, 50, 250, 600]))


Happening = Callable[[World, Chooser], None]
_WEIGHTS: list[tuple[Happening, int]] = [
    (nothing, 1),
    (run_step, 129),
    (submit, 50),
    (pass_time, 20),
    (cancel, 12),
    (join_executor, 14),
    (tell_old_news, 5),
    (fail_next_step, 5),
    (join_gateway, 4),
    (spoil_next_sample, 3),
    (drain_executor, 3),
    (kill_executor, 2),
    (say_hello_again, 1),
    (submit_again, 2),
    (hang_executor, 1),
    (lie, 1),
    (leave_gateway, 2),
    (restart_scheduler, 1),
]
KINDS: list[Happening] = [happening for happening, weight in _WEIGHTS for _ in range(weight)]
assert len(KINDS) == 256, "every first byte is as likely as the next"
