"""The torch backend under the real lane mirror: whole generations in mixed, chunked steps equal transformers' own."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from services.executor import sampling
from services.executor.backend import StepError
from services.executor.backends.torch_backend import TorchBackend, load
from services.executor.numerics import fingerprint
from services.executor.options import ExecutorOptions
from services.executor.stepper import Stepper
from shared.wire.executor import Append, BatchResult, Work, batch_plan, samples_of
from shared.wire.sampling import Sampling
from tests.fakes import tiny_models
from tests.fakes.plans import admit, run_plan
from tests.fakes.steps import Row, step
from tools import model as model_folders

BLOCK_SIZE = 16
GREEDY = Sampling()


def quiet(message: str) -> None:
    """Progress nobody reads."""


def backend_of(folder: Path, **options: object) -> TorchBackend:
    settings = {"dtype": "float32", "threads": 1, "num_blocks": 400} | options
    backend = load(ExecutorOptions(model=str(folder), backend="torch", **settings), quiet)  # type: ignore[arg-type]
    assert isinstance(backend, TorchBackend)
    backend.warm_up()
    return backend


@dataclass
class Request:
    """One generation; ``admitted_at`` is the step at which it takes its lane."""

    prompt: list[int]
    num_output: int
    sampling: Sampling = GREEDY
    admitted_at: int = 0
    output: list[int] = field(default_factory=list)
    computed: int = 0


def generate(backend: TorchBackend, requests: Sequence[Request], budget: int) -> list[list[int]]:
    """Run all requests through lanes and backend, decodes first, prefills cut to ``budget`` tokens a step."""
    stepper = Stepper(backend)
    free = np.random.default_rng(0).permutation(backend.limits.num_blocks).tolist()
    open_lanes: dict[int, Request] = {}
    num_blocks: dict[int, int] = {}
    waiting = list(enumerate(requests))
    number = 0
    while waiting or open_lanes:
        retires = [lane for lane, request in open_lanes.items() if len(request.output) == request.num_output]
        for lane in retires:
            del open_lanes[lane]
        admits, appends, work = [], [], []
        for lane, request in [entry for entry in waiting if entry[1].admitted_at <= number]:
            waiting.remove((lane, request))
            open_lanes[lane], num_blocks[lane] = request, 0
            admits.append(admit(lane, request.prompt, [], sampling=request.sampling))
        left = budget
        for lane, request in sorted(open_lanes.items(), key=lambda entry: not entry[1].output):
            known = len(request.prompt) + len(request.output)
            count = min(known - request.computed, left)
            if count:
                end = request.computed + count
                for _ in range(-(-end // BLOCK_SIZE) - num_blocks[lane]):
                    appends.append(Append(lane, free.pop()))
                    num_blocks[lane] += 1
                work.append(Work(lane, request.computed, count, end == known))
                request.computed, left = end, left - count
        answer = run_plan(stepper, batch_plan(1, number, number - 1, retires, admits, appends, work))
        assert isinstance(answer, BatchResult), answer
        assert not answer.failures
        for sample in samples_of(answer):
            open_lanes[sample.lane].output.append(sample.token)
        number += 1
    return [request.output for request in requests]


def alone(model: PreTrainedModel, prompt: Sequence[int], num_output: int) -> list[int]:
    """What transformers generates greedily, end tokens ignored."""
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            torch.tensor([list(prompt)]), max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False
        )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.reference("llama, grouped heads"), tmp_path_factory.mktemp("models") / "Tiny-1")


def some_requests(sampling: Callable[[int], Sampling]) -> list[Request]:
    draw = np.random.default_rng(3)
    return [
        Request(draw.integers(4, 130, int(draw.integers(1, 60))).tolist(), 12, sampling(i), admitted_at=i // 3)
        for i in range(16)
    ]


@pytest.mark.parametrize("budget", [7, 33, 512])
def test_sample_18_same_seed_same_tokens_alone_and_in_a_crowd(tiny: Path, budget: int) -> None:
    backend = backend_of(tiny)
    sampled = [Sampling(temperature=0.8, seed=i, top_p=0.95 if i % 2 else 1.0) for i in range(16)]
    crowd = generate(backend, some_requests(sampled.__getitem__), budget)
    for i, request in enumerate(some_requests(sampled.__getitem__)):
        request.admitted_at = 0
        assert generate(backend, [request], 512) == [crowd[i]]
    assert len({tuple(output) for output in crowd}) == 16


def test_continuing_with_the_output_so_far_changes_nothing(tiny: Path) -> None:
    """Preemption and recovery: the output becomes part of what is computed again."""
    backend = backend_of(tiny)
    whole = generate(backend, some_requests(lambda i: Sampling(temperature=1.0, seed=i)), 512)
    for i, request in enumerate(some_requests(lambda i: Sampling(temperature=1.0, seed=i))):
        request.prompt, request.num_output, request.admitted_at = request.prompt + whole[i][:5], 7, 0
        assert generate(backend, [request], 20) == [whole[i][5:]]


def test_facts_limits_and_numerics(tiny: Path) -> None:
    backend = backend_of(tiny, max_lanes=5, max_step_tokens=70, max_model_len=100)
    assert (backend.facts.model, backend.facts.vocab_size, backend.facts.context_len) == ("Tiny-1", 131, 100)
    assert backend.facts.eos_token_ids == [2, 3]
    assert len(backend.facts.tokenizer_digest) == 64
    limits = backend.limits
    assert (limits.num_blocks, limits.block_size, limits.num_lanes, limits.max_step_tokens) == (400, 16, 5, 70)
    assert backend.device.startswith("cpu")
    assert backend_of(tiny).numerics == backend.numerics
    assert backend_of(tiny, dtype="bfloat16").numerics != backend.numerics


def test_numerics_tell_kernels_configs_and_our_own_code_apart(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(tiny, "kernels a")
    assert fingerprint(tiny, "kernels b") != before
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    assert fingerprint(other, "kernels a") == before
    tiny_models.edit_config(other, rms_norm_eps=0.5)
    assert fingerprint(other, "kernels a") != before
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sampling.py").write_text("")
    monkeypatch.setattr("services.executor.numerics._OWN_CODE", tmp_path / "code")
    assert fingerprint(tiny, "kernels a") != before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"dtype": "int3"}, "int3"),
        ({"max_model_len": 129}, "128"),
        ({"num_blocks": None, "kv_memory": 10}, "no KV block fits"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_options_that_cannot_work_are_told(tiny: Path, options: dict[str, object], named: str) -> None:
    settings = {"model": str(tiny), "threads": 1, "dtype": "float32"} | options
    with pytest.raises(ValueError, match=named):
        load(ExecutorOptions(**settings), quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")])
def test_out_of_memory_fails_the_step_and_not_the_executor(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    backend = backend_of(tiny)
    batch = step([Row([5, 6, 7], 0, 3, [9])], BLOCK_SIZE)
    expected = backend.launch(batch).read().tokens

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(backend._model, "states", fail)
        with pytest.raises(StepError, match="out of memory in a step of 3 tokens") as caught:
            backend.launch(batch).read()
        assert not caught.value.fatal
    assert backend.launch(batch).read().tokens == expected


@pytest.mark.parametrize("fatal", [True, False])
def test_an_error_is_fatal_where_the_device_has_failed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, fatal: bool
) -> None:
    backend = backend_of(tiny)

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(backend._model, "states", fail)
    monkeypatch.setattr("services.executor.model.device.has_failed", lambda device: fatal)
    with pytest.raises(StepError if fatal else RuntimeError, match="illegal memory access") as caught:
        backend.launch(step([Row([5, 6, 7], 0, 3, [9])], BLOCK_SIZE))
    assert getattr(caught.value, "fatal", False) == fatal


def test_nan_in_one_lane_fails_it_alone(tiny: Path) -> None:
    """A lane whose own KV is NaN fails; the others get the tokens they get without it."""
    backend = backend_of(tiny)
    rows = [Row(list(range(5, 25 + i)), 19 + i, 1, [3 * i, 3 * i + 1]) for i in range(3)]
    prefill = [row._replace(start=0, num_tokens=row.start, sampling=None) for row in rows]
    backend.launch(step(prefill, BLOCK_SIZE)).read()
    expected = backend.launch(step(rows, BLOCK_SIZE)).read().tokens
    for cache in backend._caches:
        cache.keys[rows[1].blocks[0]] = float("nan")
    output = backend.launch(step(rows, BLOCK_SIZE)).read()
    assert output.failures.keys() == {1}
    assert [output.tokens[0], output.tokens[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("eos", [2, [2, 7], None])
def test_model_42_end_ids_are_the_union_of_all_sources(tmp_path: Path, eos: object) -> None:
    folder = tiny_models.save(tiny_models.reference("llama, tied"), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 500]}))
    assert backend_of(folder).facts.eos_token_ids == ([2, 3, 7, 9] if isinstance(eos, list) else [2, 3, 9])


@pytest.fixture(scope="module")
def default_model() -> Path:
    return model_folders.cached("default", quiet)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_default_model_equals_transformers_token_for_token(default_model: Path) -> None:
    """Prompts of 3 to 400 tokens, admitted one after the other, in steps that mix their pieces."""
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    chat = [{"role": "user", "content": "Give me three facts about the Moon."}]
    moon = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    text = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text())
    prompts = [moon, *(text[start : start + size] for start, size in ((50, 3), (300, 40), (700, 130), (900, 400)))]
    requests = [Request(list(prompt), 16, admitted_at=2 * i) for i, prompt in enumerate(prompts)]
    backend = backend_of(default_model)
    found = generate(backend, requests, 96)
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    assert found == [alone(model, prompt, 16) for prompt in prompts]
    assert tokenizer.decode(found[0]).startswith("1. The Moon is a celestial body that orbits Earth")
    assert backend.facts.eos_token_ids == [2]


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_comes_from_the_cache_gives_the_same_bits(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A prompt computed whole, and computed behind blocks that another lane left: equal logits, to the bit."""
    backend = backend_of(default_model, dtype=dtype)
    seen: list[torch.Tensor] = []
    sample = sampling.sample

    def spy(logits: torch.Tensor, *rest: object) -> object:
        seen.append(logits.clone())
        return sample(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "sample", spy)
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    prompt = tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text())[300:400]
    backend.launch(step([Row(prompt, 0, 100, list(range(7)))], BLOCK_SIZE)).read()
    for num_cached in (16, 64, 96):
        shared = list(range(num_cached // BLOCK_SIZE))
        table = shared + list(range(20, 27 - len(shared)))
        backend.launch(step([Row(prompt, num_cached, 100 - num_cached, table)], BLOCK_SIZE)).read()
    whole, *cached = seen
    assert whole.shape[0] == 1
    assert all(torch.equal(whole, other) for other in cached)
