"""One stream as its gateway sees it, held against what an undisturbed run would bring. Used by ``scheduler_world``."""

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import msgspec

from services.executor.backends.fake import FakeBackend
from services.executor.stepper import Stepper
from shared import fake_model
from shared.wire import tokens
from shared.wire.executor import Admit, BatchResult, Work, batch_plan
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Delta, Submit
from shared.wire.logprobs import Logprobs, record_bytes
from shared.wire.sampling import Sampling
from tests.fakes.plans import run_plan

VOCAB = 2
EOS = 1
CONTEXT = 24
POISON = {666: False, 667: True}
"""Seeds of requests that make every step fail they take part in; of the second kind executors die."""
FACTS = ModelFacts("tiny", VOCAB, CONTEXT, [EOS], "fake")

RUN_FOR = 12
"""Undisturbed runs are as long as a multiple of this."""


class Undisturbed(NamedTuple):
    """What a request brings that is alone on an executor."""

    output: list[int]
    records: list[bytes]
    """Logprobs of each token of the output."""
    prompt: bytes
    """Logprobs of the prompt."""


@cache
def undisturbed(prompt: bytes, sampling: Sampling, num_tokens: int, vocab_size: int, context_len: int) -> Undisturbed:
    """What follows a prompt, by an executor of one lane that is never disturbed; stops are not looked at."""
    ends = fake_model.EOS_TOKEN_IDS if vocab_size == fake_model.VOCAB_SIZE else []
    facts = ModelFacts("undisturbed", vocab_size, context_len, ends, "fake")
    num_blocks = -(-context_len // 4)
    stepper = Stepper(FakeBackend(facts, ExecutorLimits(num_blocks, 4, 1, context_len)))
    blocks = tokens.pack(range(num_blocks))
    num_prompt = tokens.count(prompt)
    plan = batch_plan(0, 0, -1, admits=[Admit(0, 0, prompt, num_prompt, 0, blocks, sampling)])
    output: list[int] = []
    records: list[bytes] = []
    prompt_records = b""
    start = 0
    while len(output) < num_tokens:
        plan = msgspec.structs.replace(
            plan, **_work_columns(Work(0, start, num_prompt + len(output) - start, True)), step=len(output)
        )
        answer = run_plan(stepper, plan)
        assert isinstance(answer, BatchResult), answer
        start = num_prompt + len(output)
        output += tokens.unpack(answer.sample_tokens)
        records += [told.records for told in answer.logprobs if told.start >= num_prompt]
        prompt_records += b"".join(told.records for told in answer.logprobs if told.start < num_prompt)
        plan = batch_plan(0, len(output), len(output) - 1)
    return Undisturbed(output, records, prompt_records)


def _work_columns(work: Work) -> dict[str, bytes]:
    plan = batch_plan(0, 0, 0, work=[work])
    return {name: getattr(plan, name) for name in ("work_lanes", "work_starts", "work_counts", "work_samples")}


@dataclass
class Stream:
    """One request as its gateway sees it."""

    submit: Submit
    facts: ModelFacts
    pool_slots: int | None
    """Tokens every executor's pool holds, if all hold the same."""
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    usage: tuple[int, int] | None = None
    error: str = ""
    cancelled: bool = False
    blamed: bool = False
    accepted: bool = False
    prompt_records: bytes = b""
    """Logprobs of the prompt so far."""
    cached_tokens: int = 0
    """As told in this session of the scheduler's."""

    @property
    def num_prompt(self) -> int:
        return tokens.count(self.submit.prompt)

    @property
    def most_tokens(self) -> int:
        limit = min(self.num_prompt + self.submit.max_tokens, self.facts.context_len)
        return min(limit, self.pool_slots or limit) - self.num_prompt

    def undisturbed(self) -> Undisturbed:
        """What an undisturbed run brings, but for stops."""
        vocab_size, context_len, most = self.facts.vocab_size, self.facts.context_len, self.most_tokens
        run_for = most
        if self.submit.sampling.constraint is None:  # else its text may be over after that
            # Many streams ask for the same and more or less of it: one run serves them all.
            run_for = min(-(-most // RUN_FOR) * RUN_FOR, context_len - self.num_prompt)
        found = undisturbed(self.submit.prompt, self.submit.sampling, run_for, vocab_size, context_len)
        return Undisturbed(found.output[:most], found.records[:most], found.prompt)

    def expected(self) -> tuple[list[int], str]:
        """All output tokens and the finish reason of an undisturbed run."""
        output = self.undisturbed().output
        stops = set(tokens.unpack(self.submit.stop_token_ids))
        if not self.submit.ignore_eos:
            stops |= set(self.facts.eos_token_ids)
        for index, token in enumerate(output):
            forced = self.submit.sampling.constraint is not None
            if token in stops and (forced or index >= self.submit.sampling.min_tokens):
                return output[: index + 1], "stop"
        return output, "length"

    def receive(self, delta: Delta) -> None:
        """R2, R3 and transparency: what comes is what an undisturbed run brings next, and nothing after the end."""
        assert not self.end, "R2: something follows the terminal message"
        assert self.accepted, "a delta before Accepted"
        self._receive_logprobs(delta)
        self.tokens += tokens.unpack(delta.token_ids)
        output, reason = self.expected()
        assert self.tokens == output[: len(self.tokens)], f"R3: {self.tokens} is no beginning of {output}"
        if delta.usage is not None:
            assert 0 <= delta.usage.cached_tokens <= self.num_prompt
            if delta.finish is None:
                assert delta.usage.cached_tokens > 0, "a delta tells of nothing in the cache"
                assert not self.cached_tokens, "a delta tells of the cache again"
            self.cached_tokens = delta.usage.cached_tokens
        if delta.finish is None:
            assert delta.token_ids or (delta.logprobs is not None and delta.logprobs.prompt), "an empty delta"
            assert len(self.tokens) < len(output), "a stream goes on after its end"
            return
        self.end, self.error = delta.finish, delta.error
        assert delta.usage is not None
        assert (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (self.num_prompt, len(self.tokens))
        if delta.finish == "length" and self.pool_slots is None:
            return  # cut to the largest of pools that differ: any beginning may be all
        if delta.finish in ("stop", "length"):
            assert (self.tokens, self.end) == (output, reason), f"{self.tokens} {self.end}, not {output} {reason}"
            assert (delta.stop_token_id == self.tokens[-1]) if reason == "stop" else (delta.stop_token_id == -1)
        elif delta.finish == "cancelled":
            assert self.cancelled
        elif delta.finish == "deadline":
            assert self.submit.deadline_ms
            assert delta.error
        else:
            assert delta.error

    def _receive_logprobs(self, delta: Delta) -> None:
        """Every token's record comes with it, every prompt token's before the first token, all as undisturbed."""
        sampling = self.submit.sampling
        told = delta.logprobs or Logprobs()
        if sampling.num_logprobs < 0:
            assert told == Logprobs()
            return
        expected, count = self.undisturbed(), tokens.count(delta.token_ids)
        first = len(self.tokens)
        assert told.output == b"".join(expected.records[first : first + count]), "logprobs of the output"
        if told.prompt:
            place = (told.prompt_start - 1) * record_bytes(sampling.num_logprobs)
            assert 0 <= place <= len(self.prompt_records), "logprobs of the prompt have a gap"
            self.prompt_records += told.prompt[len(self.prompt_records) - place :]
            assert expected.prompt.startswith(self.prompt_records)
        if sampling.prompt_logprobs and delta.token_ids:
            assert self.prompt_records == expected.prompt, "a token came before logprobs of the prompt"
