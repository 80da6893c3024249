"""Faults of the fake backend, for tests only: what ``PATERNOSTER_FAULTS`` may say, and which lanes it strikes.

Called by ``fake``. A rule names a text of the prompt and the output token at which it strikes.
"""

import os
import threading
from collections.abc import Iterable
from typing import Literal, NoReturn

import msgspec

from services.executor.backend import StepError
from services.executor.batch import SampleRow
from shared import fake_model

VARIABLE = "PATERNOSTER_FAULTS"

Deed = Literal["raise", "nan", "exit", "hang"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``do`` it to a request whose prompt holds ``prompt_contains`` once ``at_output_token`` tokens are out."""

    prompt_contains: str
    do: Deed
    at_output_token: int = 0


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fake backend's pace and its faults."""

    step_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    start_delay_s: float = 0.0
    rules: list[Rule] = []


def parse(text: str) -> Faults:
    """Read the variable's JSON; an empty text is no fault. Raises ValueError."""
    if not text:
        return Faults()
    try:
        return msgspec.json.decode(text, type=Faults)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{VARIABLE}: {error}") from error


class Striker:
    """Decides whom the rules strike. Remembers per lane which rules its prompt has called up."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [(rule.prompt_contains.encode(), rule) for rule in rules]
        self._called: dict[int, list[Rule]] = {}

    def forget(self, lane: int) -> None:
        """The lane was retired."""
        self._called.pop(lane, None)

    def strike(self, samples: list[SampleRow]) -> dict[int, str]:
        """Do what the rules say. Returns the samples that get NaN logits; raises StepError; exits; hangs."""
        if not self._rules:
            return {}
        struck = [(index, sample, deed) for index, sample in enumerate(samples) for deed in self._deeds(sample)]
        deeds = {deed for _, _, deed in struck}
        if "exit" in deeds:
            os._exit(1)
        if "hang" in deeds:
            _hang()
        if "raise" in deeds:
            raise StepError("fault: raise", [sample.lane for _, sample, deed in struck if deed == "raise"])
        return {index: "fault: NaN logits" for index, _, _ in struck}

    def _deeds(self, sample: SampleRow) -> list[Deed]:
        if sample.lane not in self._called:
            prompt = b"".join(map(fake_model.token_bytes, sample.tokens[: sample.num_prompt].tolist()))
            self._called[sample.lane] = [rule for needle, rule in self._rules if needle in prompt]
        num_output = sample.position - sample.num_prompt
        return [rule.do for rule in self._called[sample.lane] if rule.at_output_token == num_output]


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()
