"""``make invariance``: a token's numbers must not depend on who else is in the batch. A bit that differs fails.

Draws random batches on this machine's CPU, for bfloat16, float32 and int8: products (rows one by one and in crowds of
any size), what lies between them, attention, whole models (alone, in crowds, at other chunk cuts, in other blocks),
layers of experts, and sampling with logprobs. Prints what was checked, and what it costs against the libraries' own
products. Imports torch and the executor.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the executor has it, and before torch loads

import torch
from torch import Tensor

from services.executor import sampling
from services.executor.batch import SampleRow, StepBatch, is_plain
from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Kernels, Quantization
from services.executor.model import config as model_config
from services.executor.model.llama import Llama
from services.executor.model.weights import Weights
from shared.wire.sampling import Sampling
from tools.invariance_rows import Finding, cuts, rowwise

if TYPE_CHECKING:
    from services.executor.model.config import ModelConfig

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MODES: dict[str, tuple[torch.dtype, Quantization]] = {
    "bfloat16": (torch.bfloat16, "none"),
    "float32": (torch.float32, "none"),
    "int8": (torch.bfloat16, "int8"),
}


def shapes_of(config: "ModelConfig") -> list[tuple[int, int]]:
    """[columns out, columns in] of a layer's products and of the logits."""
    queries, hidden, inner = config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    return [(qkv, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner), (config.vocab_size, hidden)]


def between_products(
    kernels: Kernels, config: "ModelConfig", x: Tensor, draw: np.random.Generator
) -> Iterator[Finding]:
    """Norms and activation."""
    weight = torch.randn(config.hidden_size).to(x.dtype)
    rows = x[:, : config.hidden_size]

    def norm(some: Tensor) -> Tensor:
        return kernels.add_rms_norm(some, some.flip(1).contiguous(), weight, 1e-5)

    yield rowwise("RMS norm with residual", norm, rows, draw)
    yield rowwise("SiLU times up", kernels.silu_mul, torch.cat([x, x.roll(1, 0)], dim=1), draw)


def attention(
    kernels: Kernels, config: "ModelConfig", dtype: torch.dtype, rows: int, draw: np.random.Generator
) -> Finding:
    """Sequences whole, each alone, against chunks and decodes of them in crowds."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    checked = differing = 0
    while checked < rows:
        lens = [int(n) for n in draw.integers(1, 700, 4)]
        tables, num_blocks = _tables(lens, draw)
        cache = kernels.new_cache(num_blocks, BLOCK_SIZE, kv_heads, dim, dtype)
        for part in cache:
            part.normal_()
        queries = [torch.randn(n, heads, dim).to(dtype) for n in lens]

        def attend(batch: StepBatch, q: Tensor, cache: object = cache) -> Tensor:
            return kernels.step(batch, BLOCK_SIZE).attend(q, cache, dim**-0.5, 0)  # type: ignore[arg-type]

        whole = [attend(_batch([(i, 0, n)], tables), queries[i]) for i, n in enumerate(lens)]
        starts = [0] * len(lens)
        while any(start < n for start, n in zip(starts, lens, strict=True)):
            work = _some_work(starts, lens, draw)
            found = attend(_batch(work, tables), torch.cat([queries[i][start : start + n] for i, start, n in work]))
            expected = torch.cat([whole[i][start : start + n] for i, start, n in work])
            differing += int((found != expected).flatten(1).any(1).sum())
        checked += sum(lens)
    return Finding("attention", checked, differing)


def model(
    folder: Path, mode: str, kernels: Kernels, rows: int, draw: np.random.Generator, context: int = 200
) -> Finding:
    """Logits of every position: prompts alone in one piece, against crowds, chunk cuts and other blocks."""
    dtype, _ = MODES[mode]
    config = model_config.read(folder)
    context = min(context, config.context_len)
    checked = differing = 0
    with torch.inference_mode():
        llama = Llama(config, Weights(folder, CPU, dtype), kernels, CPU)
        while checked < rows:
            lens = [int(n) for n in draw.integers(1, context, 6)]
            tokens = [draw.integers(0, config.vocab_size, n).astype(np.int32) for n in lens]
            whole = []
            for i in range(len(lens)):
                whole += _logits(llama, kernels, config, dtype, [lens[i]], [tokens[i]], None, draw)
            crowd = _logits(llama, kernels, config, dtype, lens, tokens, draw, draw)
            differing += sum(int((a != b).any(1).sum()) for a, b in zip(whole, crowd, strict=True))
            checked += sum(lens)
    return Finding("whole model's logits", checked, differing)


def _logits(
    llama: Llama,
    kernels: Kernels,
    config: "ModelConfig",
    dtype: torch.dtype,
    lens: list[int],
    tokens: list[np.ndarray],
    cutting: np.random.Generator | None,
    draw: np.random.Generator,
) -> list[Tensor]:
    """[n, vocabulary] for each sequence; in one step, or in random ones where something cuts."""
    tables, num_blocks = _tables(lens, draw)
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    caches = [kernels.new_cache(*shape, dtype) for _ in range(config.num_layers)]
    starts = [0] * len(lens)
    found: list[list[Tensor]] = [[] for _ in lens]
    while any(start < n for start, n in zip(starts, lens, strict=True)):
        work = [(i, 0, n) for i, n in enumerate(lens)] if cutting is None else _some_work(starts, lens, cutting)
        if cutting is None:
            starts = list(lens)
        batch = _batch(work, tables, tokens)
        states = llama.states(batch, caches, BLOCK_SIZE)
        logits = llama.logits(states, np.arange(len(batch.token_ids)))
        for (i, _, _), part in zip(work, torch.split(logits, [n for _, _, n in work]), strict=True):
            found[i].append(part)
    return [torch.cat(parts) for parts in found]


def sampled(rows: int, vocab_size: int, draw: np.random.Generator) -> Finding:
    """Tokens and logprobs of rows with parameters of every kind: alone against crowds."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    samples = [_sample_row(i, draw, vocab_size) for i in range(rows)]
    alone = []
    for i in range(rows):
        output = sampling.sample(logits[i : i + 1].clone(), [samples[i]]).read()
        alone.append((output.tokens[0], output.logprobs.get(0)))
    differing = 0
    order = draw.permutation(rows)
    for start, end in cuts(rows, draw, 64):
        chosen = order[start:end]
        output = sampling.sample(logits[torch.from_numpy(chosen)], [samples[i] for i in chosen]).read()
        for at, i in enumerate(chosen):
            differing += (output.tokens[at], output.logprobs.get(at)) != alone[i]
    return Finding("sampled tokens and logprobs", rows, differing)


def _sample_row(index: int, draw: np.random.Generator, vocab_size: int) -> SampleRow:
    choice = draw.random(6)
    parameters = Sampling(
        temperature=float(draw.choice([0.0, 0.3, 1.0, 2.0])),
        top_k=int(draw.integers(1, 100)) if choice[0] < 0.3 else 0,
        top_p=float(draw.uniform(0.1, 1)) if choice[1] < 0.5 else 1.0,
        min_p=0.05 if choice[2] < 0.3 else 0.0,
        repetition_penalty=1.3 if choice[3] < 0.3 else 1.0,
        presence_penalty=0.5 if choice[4] < 0.3 else 0.0,
        seed=index,
        num_logprobs=5 if choice[5] < 0.5 else -1,
    )
    tokens = draw.integers(0, vocab_size, int(draw.integers(2, 50))).astype(np.int32)
    return SampleRow(index, index, 0, parameters, len(tokens), tokens, len(tokens) // 2, is_plain(parameters))


def _some_work(starts: list[int], lens: Sequence[int], draw: np.random.Generator) -> list[tuple[int, int, int]]:
    """(sequence, start, count) of a random step, in random order; ``starts`` move on."""
    work: list[tuple[int, int, int]] = []
    for i in draw.permutation(len(lens)):
        left = lens[i] - starts[i]
        if left and (draw.random() < 0.7 or not work):
            count = 1 if draw.random() < 0.3 else int(draw.integers(1, left + 1))
            work.append((int(i), starts[i], count))
            starts[i] += count
    return work


def _tables(lens: Sequence[int], draw: np.random.Generator) -> tuple[list[np.ndarray], int]:
    """Random blocks for each sequence, and how many there are in the pool."""
    needed = [-(-n // BLOCK_SIZE) for n in lens]
    blocks = draw.permutation(sum(needed) + 2).astype(np.int32)
    return np.split(blocks[: sum(needed)], np.cumsum(needed)[:-1]), len(blocks)


def _batch(
    work: Sequence[tuple[int, int, int]], tables: Sequence[np.ndarray], tokens: Sequence[np.ndarray] | None = None
) -> StepBatch:
    positions = [np.arange(start, start + count) for _, start, count in work]
    slots = [
        tables[i][p // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + p % BLOCK_SIZE
        for (i, _, _), p in zip(work, positions, strict=True)
    ]
    ends = np.array([start + count for _, start, count in work], np.int32)
    padded = np.full((len(work), -(-int(ends.max()) // BLOCK_SIZE)), -1, np.int32)
    for row, (i, _, _), end in zip(padded, work, ends, strict=True):
        used = -(-int(end) // BLOCK_SIZE)
        row[:used] = tables[i][:used]
    flat = np.concatenate(positions).astype(np.int32)
    ids = (
        flat if tokens is None else np.concatenate([tokens[i][p] for (i, _, _), p in zip(work, positions, strict=True)])
    )
    counts = [count for _, _, count in work]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return StepBatch(0, list(range(len(work))), ids, flat, np.concatenate(slots), starts, ends, padded, [])


def check(folder: Path, mode: str, rows: int, model_rows: int, draw: np.random.Generator) -> Iterator[Finding]:
    """All checks of one mode with the shapes of one model."""
    dtype, quantization = MODES[mode]
    config = model_config.read(folder)
    kernels = choose(CPU, dtype, config.head_dim, BLOCK_SIZE, quantization)
    for columns, depth in shapes_of(config):
        x = torch.randn(rows, depth).to(dtype)
        product = kernels.linear((torch.randn(columns, depth) / depth**0.5).to(dtype), None)
        yield rowwise(f"product {depth} x {columns}", product, x, draw, turns=2 if columns > 10_000 else 3)
    if quantization == "none":
        wide = torch.randn(rows, max(config.hidden_size, config.intermediate_size)).to(dtype)
        yield from between_products(kernels, config, wide, draw)
        yield attention(kernels, config, dtype, rows, draw)
    yield model(folder, mode, kernels, model_rows, draw)


def costs(folder: Path, mode: str) -> Iterator[str]:
    """Our products' time over the fastest way without a promise, one line a number of rows."""
    from tools.bench.floor import Products, interleaved

    dtype, quantization = MODES[mode]
    config = model_config.read(folder)
    products = Products([*shapes_of(config)[:-1] * 4, shapes_of(config)[-1]], dtype, quantization)
    for rows in (1, 2, 8, 32):
        taken = interleaved({way: partial(products.run, way, rows, rows) for way in products.ways}, 9)
        others = {way: taken[way] for way in taken if way != "ours"}
        fastest = min(others, key=others.__getitem__)
        yield f"{rows:3} rows: {taken['ours'] / others[fastest]:.2f} times {fastest} ({others[fastest] * 1e3:.2f} ms)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print; 1 when anything differs."""
    parser = argparse.ArgumentParser(description="Compare bits of rows alone and in crowds.")
    parser.add_argument("--model", default="default", help="as for 'paternoster model fetch'")
    parser.add_argument("--rows", type=int, default=3000, help="rows of each shape")
    parser.add_argument("--model-rows", type=int, default=3000, help="positions of the whole model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from tools import invariance_experts
    from tools import model as models

    folder = models.cached(options.model, lambda line: print(line, file=sys.stderr))
    torch.manual_seed(options.seed)
    draw = np.random.default_rng(options.seed)
    config = model_config.read(folder)
    failed = 0
    for mode in MODES:
        began = time.monotonic()
        for finding in check(folder, mode, options.rows, options.model_rows, draw):
            failed += bool(finding.differing)
            _tell(mode, finding, began)
        for line in costs(folder, mode):
            print(f"{mode:9} cost, {line}", flush=True)
        began = time.monotonic()
        layer = invariance_experts.Layer(*MODES[mode])
        finding = invariance_experts.check(layer, options.rows, draw)
        failed += bool(finding.differing)
        _tell(mode, finding, began)
        for line in invariance_experts.costs(layer):
            print(f"{mode:9} cost of experts, {line}", flush=True)
    finding = sampled(options.rows, config.vocab_size, draw)
    failed += bool(finding.differing)
    _tell("", finding, time.monotonic())
    print("rows differ" if failed else "every row has the same bits alone and in every crowd")
    return 1 if failed else 0


def _tell(mode: str, finding: Finding, began: float) -> None:
    told = "equal" if not finding.differing else f"{finding.differing} DIFFER"
    print(f"{mode:9} {finding.what}: {finding.rows} rows, {told} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
