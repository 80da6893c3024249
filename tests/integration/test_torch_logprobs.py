"""Logprobs and penalties of the torch backend: transformers' own numbers, and the same bits however one is cut."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from services.executor.backends import torch_backend
from services.executor.backends.torch_backend import TorchBackend, load
from services.executor.options import ExecutorOptions
from services.executor.stepper import Stepper
from services.gateway.logprobs import Record, read_records
from shared.wire.executor import BatchResult, LaneLogprobs, Work, batch_plan, samples_of
from shared.wire.sampling import Sampling
from tests.fakes import tiny_models
from tests.fakes.plans import admit, run_plan

PROMPT = np.random.default_rng(5).integers(4, 130, 45).tolist()
TELL = Sampling(num_logprobs=5, prompt_logprobs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.reference("qwen3"), tmp_path_factory.mktemp("models") / "Tiny")


def backend_of(folder: Path, dtype: str = "float32") -> TorchBackend:
    options = ExecutorOptions(model=str(folder), backend="torch", dtype=dtype, threads=1, num_blocks=64)
    backend = load(options, lambda _: None)
    assert isinstance(backend, TorchBackend)
    return backend


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def backend(request: pytest.FixtureRequest, folder: Path) -> TorchBackend:
    return backend_of(folder, request.param)


def generate(
    backend: TorchBackend,
    sampling: Sampling,
    num_tokens: int = 8,
    *,
    output: Sequence[int] = (),
    chunk: int = 100,
    neighbours: int = 0,
) -> tuple[list[int], list[LaneLogprobs]]:
    """One request, its prompt in chunks, among neighbours that decode all the while."""
    stepper = Stepper(backend)
    admits = [admit(0, PROMPT, range(4), output=output, sampling=sampling)]
    for lane in range(1, neighbours + 1):
        first = 4 + 4 * lane
        admits.append(admit(lane, [5 + lane], range(first, first + 4), sampling=Sampling(num_logprobs=lane % 3 - 1)))
    said, told, position, step = list(output), list[LaneLogprobs](), 0, 0
    while len(said) < num_tokens:
        known = len(PROMPT) + len(said)
        count = min(chunk, known - position)
        work = [Work(lane, step, 1, True) for lane in range(1, neighbours + 1)]
        work.append(Work(0, position, count, position + count == known))
        answer = run_plan(stepper, batch_plan(1, step, step - 1, admits=admits, work=work))
        assert isinstance(answer, BatchResult), answer
        said += [sample.token for sample in samples_of(answer) if sample.lane == 0]
        told += [entry for entry in answer.logprobs if entry.lane == 0]
        admits, position, step = [], position + count, step + 1
    return said, told


def records(told: list[LaneLogprobs]) -> list[Record]:
    """In the order of positions."""
    ordered = sorted(told, key=lambda entry: entry.start)
    return [record for entry in ordered for record in read_records(entry.records, 5)]


def test_prompt_and_output_have_transformers_logprobs(folder: Path) -> None:
    said, told = generate(backend_of(folder), TELL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT + said])
    with torch.inference_mode():
        expected = torch.log_softmax(model(ids).logits[0].double(), -1)
    found = records(told)
    assert len(found) == len(PROMPT) + len(said) - 1
    for position, record in enumerate(found, 1):
        assert record.logprob == pytest.approx(expected[position - 1, ids[0, position]].item(), rel=1e-4, abs=1e-5)
        top = expected[position - 1].topk(5)
        assert list(record.top_logprobs) == pytest.approx(top.values.tolist(), rel=1e-4, abs=1e-5)
        assert list(record.top_ids) == top.indices.tolist()


def bits(told: list[LaneLogprobs]) -> bytes:
    return b"".join(entry.records for entry in sorted(told, key=lambda entry: entry.start))


def test_records_are_the_same_to_the_bit_however_the_prompt_is_cut_and_whoever_is_there(backend: TorchBackend) -> None:
    said, told = generate(backend, TELL)
    for chunk, neighbours in ((100, 5), (1, 0), (2, 1), (7, 0), (7, 5), (44, 3)):
        again, told_again = generate(backend, TELL, chunk=chunk, neighbours=neighbours)
        assert again == said
        assert bits(told_again) == bits(told), f"chunks of {chunk} among {neighbours}"


def test_a_prompt_is_told_a_bounded_number_of_rows_at_a_time(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = generate(backend, TELL)[1]
    sizes: list[int] = []
    logits = backend._model.logits

    def counted(states: object, tokens: object) -> torch.Tensor:
        result = logits(states, tokens)  # type: ignore[arg-type]
        sizes.append(len(result))
        return result

    monkeypatch.setattr(torch_backend, "MAX_PROMPT_LOGITS", 10)
    monkeypatch.setattr(backend._model, "logits", counted)
    assert bits(generate(backend, TELL)[1]) == bits(told)
    assert max(sizes) == 10


PENALISED = Sampling(repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2, num_logprobs=5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sched_28_a_preemption_keeps_penalties_seeds_and_logprobs(backend: TorchBackend, temperature: float) -> None:
    """What was said before the preemption still counts, to the bit."""
    sampling = Sampling(*[temperature, *[getattr(PENALISED, name) for name in Sampling.__struct_fields__[1:]]])
    said, told = generate(backend, sampling, 14)
    assert said != generate(backend, Sampling(temperature=temperature), 14)[0]
    for cut in (1, 6, 13):
        resumed, told_of_resumed = generate(backend, sampling, 14, output=said[:cut], chunk=9, neighbours=2)
        assert resumed == said
        assert bits(told_of_resumed) == bits(told[cut:])


def test_a_repetition_penalty_is_transformers(folder: Path) -> None:
    said, _ = generate(backend_of(folder), Sampling(repetition_penalty=1.7), 16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=16, min_new_tokens=16, do_sample=False, logits_processor=penalty
        )
    assert said == out[0, len(PROMPT) :].tolist()
