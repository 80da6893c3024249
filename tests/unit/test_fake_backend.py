"""The fake backend: every token depends on all of its context, read back through the tables, and on nothing else."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from services.executor.backends import fake, fake_faults
from services.executor.backends.fake import FakeBackend
from services.executor.backends.fake_faults import Faults, Rule
from services.executor.options import ExecutorOptions
from services.executor.stepper import Stepper
from shared import fake_model
from shared.wire import tokens
from shared.wire.executor import Append, BatchResult, Work, batch_plan
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.sampling import Sampling
from tests.fakes.plans import admit, failed, run_plan, sampled
from tests.fakes.steps import Row, step

LIMITS = ExecutorLimits(num_blocks=64, block_size=4, num_lanes=8, max_step_tokens=4096)
PROMPT = list(b"Once upon a time")


def new_stepper(faults: Faults | None = None, facts: ModelFacts | None = None) -> Stepper:
    return Stepper(FakeBackend(facts or fake_model.facts(256), LIMITS, faults))


def generate(
    stepper: Stepper,
    prompt: Sequence[int] = PROMPT,
    num_tokens: int = 20,
    *,
    sampling: Sampling | None = None,
    chunk: int = 100,
    blocks: Sequence[int] | None = None,
    lane: int = 0,
) -> list[int]:
    """Run one request alone on its lane, prompt in chunks, and retire it."""
    free = list(range(64)) if blocks is None else list(blocks)
    table = [free.pop(0) for _ in range(-(-len(prompt) // 4))]
    steps = range(10**6)
    admits = [admit(lane, prompt, table, sampling=sampling)]
    output: list[int] = []
    position, step = 0, 0
    while len(output) < num_tokens:
        known = len(prompt) + len(output)
        count = min(chunk, known - position)
        appends = [Append(lane, free.pop(0))] if (position + count + 3) // 4 > (known + 2) // 4 else []
        work = Work(lane, position, count, position + count == known)
        answer = run_plan(stepper, batch_plan(1, steps[step], step - 1, admits=admits, appends=appends, work=[work]))
        output += sampled(answer)
        admits, position, step = [], position + count, step + 1
    run_plan(stepper, batch_plan(1, step, step - 1, retires=[lane]))
    return output


def test_same_text_whatever_the_chunks_blocks_and_lane() -> None:
    expected = generate(new_stepper())
    assert generate(new_stepper(), chunk=1) == expected
    assert generate(new_stepper(), chunk=5, blocks=range(63, -1, -1), lane=7) == expected
    used = new_stepper()
    generate(used, list(b"other words"))
    assert generate(used) == expected


def test_text_depends_on_the_seed_and_on_every_token() -> None:
    expected = generate(new_stepper())
    assert generate(new_stepper(), sampling=Sampling(seed=1)) != expected
    for index in range(len(PROMPT)):
        changed = [*PROMPT[:index], PROMPT[index] + 1, *PROMPT[index + 1 :]]
        assert generate(new_stepper(), changed)[0] != expected[0], index


def test_text_does_not_depend_on_the_temperature() -> None:
    assert generate(new_stepper(), sampling=Sampling(temperature=1.0)) == generate(new_stepper())


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_same_text_in_every_process(hash_seed: str) -> None:
    script = "from tests.unit.test_fake_backend import *; print(generate(new_stepper()))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
    assert output.decode().strip() == str(generate(new_stepper()))


def test_text_is_pinned() -> None:
    text = b"".join(map(fake_model.token_bytes, generate(new_stepper(), num_tokens=8))).decode()
    assert text == " miresa🙂 poroř nasu. risi menu vita reni🙂"


def test_neighbours_do_not_change_a_text() -> None:
    expected = generate(new_stepper(), num_tokens=1)
    stepper = new_stepper()
    prompts = [PROMPT, list(b"x"), list(b"a much longer prompt than the others have")]
    admits, work, first_block = [], [], 0
    for lane, prompt in enumerate(prompts):
        num_blocks = -(-len(prompt) // 4)
        admits.append(admit(lane, prompt, range(first_block, first_block + num_blocks)))
        work.append(Work(lane, 0, len(prompt), True))
        first_block += num_blocks
    assert sampled(run_plan(stepper, batch_plan(1, 1, 0, admits=admits, work=work)))[0] == expected[0]


def test_a_slot_taken_anew_is_not_read_before_it_is_written() -> None:
    backend = FakeBackend(fake_model.facts(256), LIMITS)
    row = Row(PROMPT, 0, 16, list(range(4)))
    backend.run(step([row], 4))
    backend.run(step([row._replace(start=8, num_tokens=8)], 4))
    backend.taken([1])
    with pytest.raises(AssertionError, match="nobody has written"):
        backend.run(step([row._replace(start=8, num_tokens=8)], 4))


def test_what_a_lane_leaves_behind_is_cached() -> None:
    expected = generate(new_stepper(), num_tokens=1)
    stepper = new_stepper()
    generate(stepper, num_tokens=1)
    plan = batch_plan(1, 9, 8, admits=[admit(0, PROMPT, range(4), num_cached=8)], work=[Work(0, 8, 8, True)])
    assert sampled(run_plan(stepper, plan)) == expected


def test_cached_tokens_of_a_live_lane_are_shared() -> None:
    expected = generate(new_stepper(), num_tokens=1)
    stepper = new_stepper()
    run_plan(stepper, batch_plan(1, 1, 0, admits=[admit(0, PROMPT, range(4))], work=[Work(0, 0, 16, True)]))
    shared = admit(1, PROMPT, [0, 1, 2, 9], num_cached=12)
    assert sampled(run_plan(stepper, batch_plan(1, 2, 1, admits=[shared], work=[Work(1, 12, 4, True)]))) == expected


def test_mostly_words_and_an_end_now_and_then() -> None:
    stepper = new_stepper()
    seen = Counter(generate(stepper, [65, 97 + seed % 26], 1, sampling=Sampling(seed=seed))[0] for seed in range(3000))
    ends = sum(seen[token] for token in fake_model.EOS_TOKEN_IDS)
    words = sum(count for token, count in seen.items() if fake_model.FIRST_WORD <= token < fake_model.FIRST_SPECIAL)
    assert 25 <= ends <= 75
    assert words > 2500
    assert not seen[fake_model.IM_START]


def test_a_two_byte_character_is_finished() -> None:
    for seed in range(20):
        (token,) = generate(new_stepper(), [65, 0xC3], 1, sampling=Sampling(seed=seed))
        bytes([0xC3, token]).decode()


def test_stop_tokens_wait_for_min_tokens() -> None:
    world = ModelFacts("tiny", vocab_size=2, context_len=64, eos_token_ids=[1], tokenizer_digest="none")
    sampling = Sampling(min_tokens=12, stop_token_ids=tokens.pack([1]))
    output = generate(new_stepper(facts=world), [0, 1, 0], 40, sampling=sampling)
    assert output[:12] == [0] * 12
    assert 1 in output[12:]


def test_masking_stop_tokens_leaves_other_texts_alone() -> None:
    stops = tokens.pack([*fake_model.EOS_TOKEN_IDS, *range(fake_model.FIRST_WORD, 600)])
    for seed in range(30):
        free = generate(new_stepper(), num_tokens=3, sampling=Sampling(seed=seed))
        held = generate(new_stepper(), num_tokens=3, sampling=Sampling(seed=seed, min_tokens=3, stop_token_ids=stops))
        allowed = set(range(fake_model.VOCAB_SIZE)) - set(tokens.unpack(stops))
        assert set(held) <= allowed
        assert held[0] == free[0] or free[0] not in allowed


def boom(do: str, at_output_token: int = 0) -> Faults:
    return Faults(rules=[Rule("boom", do, at_output_token)])  # type: ignore[arg-type]


def test_raise_blames_its_lane_and_only_at_its_token() -> None:
    stepper = new_stepper(boom("raise", 1))
    admits = [admit(0, list(b"calm"), [0, 1]), admit(3, list(b"boom"), [2, 3])]
    first = run_plan(stepper, batch_plan(1, 1, 0, admits=admits, work=[Work(0, 0, 4, True), Work(3, 0, 4, True)]))
    assert len(sampled(first)) == 2
    failure = failed(run_plan(stepper, batch_plan(1, 2, 1, work=[Work(0, 4, 1, True), Work(3, 4, 1, True)])))
    assert (failure.kind, tokens.unpack(failure.lanes)) == ("error", [3])
    again = run_plan(stepper, batch_plan(1, 3, 2, retires=[3], work=[Work(0, 4, 1, True)]))
    assert sampled(again) == generate(new_stepper(), list(b"calm"), 2)[1:]


def test_nan_fails_its_sample_alone() -> None:
    stepper = new_stepper(boom("nan"))
    admits = [admit(0, list(b"boom"), [0]), admit(3, list(b"calm"), [2])]
    answer = run_plan(stepper, batch_plan(1, 1, 0, admits=admits, work=[Work(0, 0, 4, True), Work(3, 0, 4, True)]))
    assert isinstance(answer, BatchResult)
    assert sampled(answer) == generate(new_stepper(), list(b"calm"), 1)
    assert [(failure.lane, failure.seq) for failure in answer.failures] == [(0, 100)]


def test_the_next_request_on_a_lane_is_not_struck() -> None:
    stepper = new_stepper(boom("nan"))
    run_plan(stepper, batch_plan(1, 1, 0, admits=[admit(0, list(b"boom"), [0])], work=[Work(0, 0, 4, True)]))
    plan = batch_plan(1, 2, 1, retires=[0], admits=[admit(0, list(b"calm"), [0])], work=[Work(0, 0, 4, True)])
    assert len(sampled(run_plan(stepper, plan))) == 1


def test_cost_model() -> None:
    stepper = new_stepper(Faults(step_ms=10, prefill_ms_per_token=2))
    answer = run_plan(stepper, batch_plan(1, 1, 0, admits=[admit(0, [65] * 8, [0, 1, 2])], work=[Work(0, 0, 8, True)]))
    assert isinstance(answer, BatchResult)
    assert answer.run_us >= 26_000
    decode = run_plan(stepper, batch_plan(1, 2, 1, work=[Work(0, 8, 1, True)]))
    assert isinstance(decode, BatchResult)
    assert decode.run_us >= 10_000


@pytest.mark.parametrize("text", ["{", '{"rulez": []}', '{"rules": [{"prompt_contains": "a", "do": "explode"}]}', "[]"])
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PATERNOSTER_FAULTS"):
        fake_faults.parse(text)


def test_faults_as_the_contract_writes_them() -> None:
    text = """{"step_ms": 5, "prefill_ms_per_token": 0.1, "start_delay_s": 0,
        "rules": [{"prompt_contains": "boom", "at_output_token": 3, "do": "exit"}]}"""
    assert fake_faults.parse(text) == Faults(5, 0.1, 0, [Rule("boom", "exit", 3)])
    assert fake_faults.parse("") == Faults()


def test_load_takes_sizes_from_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fake_faults.VARIABLE, raising=False)
    backend = fake.load(ExecutorOptions(backend="fake", max_model_len=100, num_blocks=7, max_lanes=3), print)
    assert backend.facts == fake_model.facts(100)
    assert backend.limits == ExecutorLimits(7, 16, 3, 512)
    by_memory = fake.load(ExecutorOptions(backend="fake", kv_memory=64 * 50), print)
    assert by_memory.limits.num_blocks == 50
