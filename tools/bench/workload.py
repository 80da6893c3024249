"""What a load test sends: lengths from a stated distribution, prompts of a wanted length, times of arrival.

Pure and seeded: the same seed gives the same load. Called by ``tools.bench.serve``; imports the standard library only.
"""

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

_ENGLISH = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research girl "
    "guy moment air teacher force education"
)
WORDS = _ENGLISH.split()
"""Common English words: close to one token each for most tokenizers."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: ``64``, ``16:128`` (uniform, both ends in), ``exp:64`` or ``exp:64:512``
    (exponential with that mean, cut at the second number)."""

    kind: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError, saying what is allowed."""
        parts = text.split(":")
        kind = "exp" if parts[0] == "exp" else "uniform"
        numbers = parts[1:] if kind == "exp" else parts
        if not 1 <= len(numbers) <= 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ValueError(f"{text!r} is none of N, LOW:HIGH, exp:MEAN and exp:MEAN:MOST")
        low, high = int(numbers[0]), int(numbers[-1])
        if kind == "exp" and len(numbers) == 1:
            high = 10 * low
        if not 1 <= low <= high:
            raise ValueError(f"{text!r} must hold whole numbers from 1 up, the smaller one first")
        return cls(kind, low, high)

    def draw(self, chance: random.Random) -> int:
        """One length, at least 1."""
        if self.kind == "exp":
            return min(self.high, max(1, round(chance.expovariate(1 / self.low))))
        return chance.randint(self.low, self.high)


def words(count: int, chance: random.Random) -> str:
    """A prompt of ``count`` words; two prompts hardly ever begin alike, so that no cache answers for the model."""
    return " ".join(chance.choice(WORDS) for _ in range(max(1, count)))


@dataclass(frozen=True)
class Calibration:
    """How many tokens a server makes of our words: ``tokens = fixed + per_word * words``."""

    fixed: float
    per_word: float

    @classmethod
    async def of(cls, count_tokens: Callable[[str], Awaitable[int]], chance: random.Random) -> "Calibration":
        """From two prompts that ``count_tokens`` counts."""
        few, many = 20, 120
        tokens_of_few = await count_tokens(words(few, chance))
        tokens_of_many = await count_tokens(words(many, chance))
        per_word = max(0.1, (tokens_of_many - tokens_of_few) / (many - few))
        return cls(tokens_of_few - per_word * few, per_word)

    def words_for(self, tokens: int) -> int:
        """How many words come nearest to ``tokens`` tokens; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True)
class Job:
    """One request of the load."""

    prompt: str
    max_tokens: int


def jobs(seed: int, calibration: Calibration, prompts: Lengths, outputs: Lengths) -> Iterator[Job]:
    """The load, without end."""
    chance = random.Random(seed)
    for num_prompt, num_output in lengths_of(seed, prompts, outputs):
        yield Job(words(calibration.words_for(num_prompt), chance), num_output)


def lengths_of(seed: int, prompts: Lengths, outputs: Lengths) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of one request after the other, without end; the same for a simulation's."""
    chance = random.Random(f"lengths {seed}")
    while True:
        yield prompts.draw(chance), outputs.draw(chance)


def arrivals(seed: int, rate: float) -> Iterator[float]:
    """Seconds from the start at which requests of a Poisson process of ``rate`` a second arrive, without end."""
    chance = random.Random(f"arrivals {seed}")
    now_s = 0.0
    while True:
        now_s += chance.expovariate(rate)
        yield now_s
