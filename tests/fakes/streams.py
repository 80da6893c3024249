"""One stream as its gateway sees it, held against what an undisturbed run would bring. Used by ``scheduler_world``."""

from dataclasses import dataclass, field
from functools import cache

import msgspec

from services.executor.backends.fake import FakeBackend
from services.executor.stepper import Stepper
from shared.wire import tokens
from shared.wire.executor import Admit, BatchResult, Work, batch_plan
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Delta, Submit
from shared.wire.sampling import Sampling

VOCAB = 2
EOS = 1
CONTEXT = 24
POISON = {666: False, 667: True}
"""Seeds of requests that make every step fail they take part in; of the second kind executors die."""
FACTS = ModelFacts("tiny", VOCAB, CONTEXT, [EOS], "fake")


@cache
def undisturbed(prompt: bytes, sampling: Sampling, num_tokens: int, vocab_size: int, context_len: int) -> list[int]:
    """The tokens that follow a prompt, by an executor of one lane that is never disturbed; stops are not looked at."""
    facts = ModelFacts("undisturbed", vocab_size, context_len, [], "fake")
    num_blocks = -(-context_len // 4)
    stepper = Stepper(FakeBackend(facts, ExecutorLimits(num_blocks, 4, 1, context_len)))
    blocks = tokens.pack(range(num_blocks))
    num_prompt = tokens.count(prompt)
    plan = batch_plan(0, 0, -1, admits=[Admit(0, 0, prompt, num_prompt, 0, blocks, sampling)])
    output: list[int] = []
    start = 0
    while len(output) < num_tokens:
        plan = msgspec.structs.replace(
            plan, **_work_columns(Work(0, start, num_prompt + len(output) - start, True)), step=len(output)
        )
        answer = stepper.step(plan)
        assert isinstance(answer, BatchResult), answer
        start = num_prompt + len(output)
        output += tokens.unpack(answer.sample_tokens)
        plan = batch_plan(0, len(output), len(output) - 1)
    return output


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

    @property
    def num_prompt(self) -> int:
        return tokens.count(self.submit.prompt)

    @property
    def most_tokens(self) -> int:
        limit = min(self.num_prompt + self.submit.max_tokens, self.facts.context_len)
        return min(limit, self.pool_slots or limit) - self.num_prompt

    def expected(self) -> tuple[list[int], str]:
        """All output tokens and the finish reason of an undisturbed run."""
        vocab_size, context_len = self.facts.vocab_size, self.facts.context_len
        output = undisturbed(self.submit.prompt, self.submit.sampling, self.most_tokens, vocab_size, context_len)
        stops = set(tokens.unpack(self.submit.stop_token_ids))
        if not self.submit.ignore_eos:
            stops |= set(self.facts.eos_token_ids)
        for index, token in enumerate(output):
            if token in stops and index >= self.submit.sampling.min_tokens:
                return output[: index + 1], "stop"
        return output, "length"

    def receive(self, delta: Delta) -> None:
        """R2, R3 and transparency: what comes is what an undisturbed run brings next, and nothing after the end."""
        assert not self.end, "R2: something follows the terminal message"
        assert self.accepted, "a delta before Accepted"
        self.tokens += tokens.unpack(delta.token_ids)
        output, reason = self.expected()
        assert self.tokens == output[: len(self.tokens)], f"R3: {self.tokens} is no beginning of {output}"
        if delta.finish is None:
            assert delta.token_ids, "an empty delta"
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
        else:
            assert delta.error
