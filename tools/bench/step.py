"""``paternoster bench step``: one step of the executor against what this machine could do at best.

The floor is measured in the same process, in turns with the step: the model's own products, all layers, by the fastest
of ours, packed oneDNN and plain torch, plus the bytes of KV that attention must read at the measured speed of memory.
Called by ``tools.bench.command``. Imports torch and the executor; runs on CPUs.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from services.executor.backends.torch_backend import TorchBackend
from services.executor.batch import SampleRow, StepBatch
from services.executor.kernels.interface import Kernels, Quantization
from services.executor.model import config as model_config
from services.executor.model import device as devices
from services.executor.options import ExecutorOptions
from shared.wire.sampling import Sampling
from tools.bench.floor import Memory, Products, interleaved
from tools.bench.timed_kernels import ATTENTION, PRODUCTS, TimedKernels

SAMPLING, REST = "sampling", "the rest: embedding, Python"
BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepOptions:
    """What to measure."""

    model: Path
    decodes: tuple[int, ...]
    prefill_tokens: int
    prefill_cached: int
    """Tokens already in the cache in front of the prefill chunk."""
    context: int
    """Of each decode, its own token included."""
    dtype: str
    quantization: Quantization
    threads: int | None
    temperature: float
    repeats: int
    json_file: str


@dataclass(frozen=True)
class Row:
    """One kind of step; times are medians."""

    decodes: int
    prefill_tokens: int
    context: int
    dtype: str
    quantization: str
    step_ms: float
    floor_ms: float
    ratio: float
    attention_share: float
    """Of the step."""
    floor_products_ms: dict[str, float]
    floor_kv_ms: float
    fastest_products: str
    gflop_per_s: float
    """Products and attention over the step's time."""
    gb_per_s: float
    """Weights and KV over the step's time."""
    read_gb_per_s: float
    attention_over_kv: float
    """Time of attention over that of reading its KV bytes."""
    attention_gflop_per_s: float
    products_gflop_per_s: float
    parts_ms: dict[str, float]
    prefill_cached: int = 0
    threads: int = 0


def step_batch(options: StepOptions, decodes: int) -> StepBatch:
    """Decodes, then a prefill chunk, each in blocks of its own that lie anywhere in the pool."""
    counts = [1] * decodes + [options.prefill_tokens] * bool(options.prefill_tokens)
    lens = [options.context] * decodes + [options.prefill_cached + options.prefill_tokens] * (len(counts) - decodes)
    needed = [-(-length // BLOCK_SIZE) for length in lens]
    draw = np.random.default_rng(0)
    blocks = draw.permutation(sum(needed)).astype(np.int32)
    tables = np.full((len(lens), max(needed)), -1, np.int32)
    for table, start, number in zip(tables, np.cumsum([0, *needed]), needed, strict=False):
        table[:number] = blocks[start : start + number]
    positions = [np.arange(length - count, length) for length, count in zip(lens, counts, strict=True)]
    slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, p in zip(tables, positions, strict=True)]
    sampling = Sampling(temperature=options.temperature, top_p=0.95 if options.temperature else 1.0)
    return StepBatch(
        step=0,
        lanes=list(range(len(lens))),
        token_ids=draw.integers(0, 1000, sum(counts)).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(lens, np.int32),
        block_tables=tables,
        samples=[
            SampleRow(i, i, 0, sampling, n, np.zeros(n, np.int32), n, not options.temperature)
            for i, n in enumerate(lens)
        ],
    )


class Bench:
    """A loaded model and its floor."""

    def __init__(self, options: StepOptions) -> None:
        self._options = options
        kernels: list[TimedKernels] = []

        def wrap(inner: Kernels) -> Kernels:
            kernels.append(TimedKernels(inner))
            return kernels[0]

        per_decode = -(-options.context // BLOCK_SIZE)
        chunk = -(-(options.prefill_cached + options.prefill_tokens) // BLOCK_SIZE)
        executor = ExecutorOptions(
            model=str(options.model),
            device="cpu",
            dtype=options.dtype,
            quantization=options.quantization,
            num_blocks=max(options.decodes) * per_decode + chunk,
            block_size=BLOCK_SIZE,
            threads=options.threads,
        )
        self._backend = TorchBackend(executor, lambda line: print(line, file=sys.stderr), wrap)
        self._kernels = kernels[0]
        self.config = model_config.read(options.model)
        self._dtype = devices.choose_dtype(options.dtype, devices.choose_device("cpu"))
        self._products = Products(self._kernels.shapes, self._dtype, options.quantization)
        self._memory = Memory()

    def _run(self, batch: StepBatch) -> float:
        began = time.perf_counter()
        self._backend.launch(batch).read()
        return time.perf_counter() - began

    def _counted(self, batch: StepBatch, parts: list[dict[str, float]]) -> float:
        """The step with its parts counted."""
        self._kernels.reset()
        self._kernels.counting = True
        began = time.perf_counter_ns()
        self._backend.launch(batch).read()
        ended = time.perf_counter_ns()
        self._kernels.counting = False
        found = {name: ns / 1e6 for name, ns in self._kernels.ns.items()}
        found[SAMPLING] = (ended - self._kernels.last_ns) / 1e6
        found[REST] = (ended - began) / 1e6 - sum(found.values())
        parts.append(found)
        return (ended - began) / 1e9

    def measure(self, decodes: int) -> Row:
        """Take turns between the step and everything its floor is made of."""
        options, config = self._options, self.config
        batch = step_batch(options, decodes)
        num_tokens, num_sampled = len(batch.token_ids), len(batch.samples)
        parts: list[dict[str, float]] = []
        runs: dict[str, Any] = {
            way: partial(self._products.run, way, num_tokens, num_sampled) for way in self._products.ways
        }
        runs |= {"step": lambda: self._run(batch), "counted": lambda: self._counted(batch, parts)}
        taken = interleaved(runs | {"memory": self._memory.run}, options.repeats)
        parts_ms = {name: float(np.median([each[name] for each in parts[1:]])) for name in parts[0]}

        *layers, logits = self._kernels.shapes
        bytes_per_weight = 1 if options.quantization == "int8" else self._dtype.itemsize
        flops = 2.0 * (num_tokens * sum(n * k for n, k in layers) + num_sampled * logits[0] * logits[1])
        weight_bytes = bytes_per_weight * sum(n * k for n, k in self._kernels.shapes)
        kv_width = config.num_layers * config.num_kv_heads * config.head_dim
        kv_bytes = 2 * kv_width * self._dtype.itemsize * int(batch.context_lens.sum())
        seen = float((batch.positions.astype(np.int64) + 1).sum())
        attention_flops = 4.0 * config.num_layers * config.num_heads * config.head_dim * seen
        products_ms = {way: taken[way] * 1e3 for way in self._products.ways}
        fastest = min(products_ms, key=products_ms.__getitem__)
        kv_ms = kv_bytes * taken["memory"] * 1e3
        step_ms, floor_ms = taken["step"] * 1e3, products_ms[fastest] + kv_ms
        attention_ms = parts_ms[ATTENTION]
        return Row(
            decodes=decodes,
            prefill_tokens=options.prefill_tokens,
            context=options.context,
            dtype=str(self._dtype).removeprefix("torch."),
            quantization=options.quantization,
            step_ms=round(step_ms, 3),
            floor_ms=round(floor_ms, 3),
            ratio=round(step_ms / floor_ms, 3),
            attention_share=round(attention_ms / sum(parts_ms.values()), 3),
            floor_products_ms={way: round(ms, 3) for way, ms in products_ms.items()},
            floor_kv_ms=round(kv_ms, 3),
            fastest_products=fastest,
            gflop_per_s=round((flops + attention_flops) / step_ms / 1e6, 1),
            gb_per_s=round((weight_bytes + kv_bytes) / step_ms / 1e6, 2),
            read_gb_per_s=round(1e-9 / taken["memory"], 2),
            attention_over_kv=round(attention_ms / kv_ms, 2),
            attention_gflop_per_s=round(attention_flops / attention_ms / 1e6, 1),
            products_gflop_per_s=round(flops / parts_ms[PRODUCTS] / 1e6, 1),
            parts_ms={name: round(ms, 3) for name, ms in sorted(parts_ms.items(), key=lambda part: -part[1])},
            prefill_cached=options.prefill_cached,
            threads=torch.get_num_threads(),
        )


def show(row: Row) -> Table:
    """The row as a person reads it."""
    kind = f"{row.decodes} decodes with {row.context} tokens of context" if row.decodes else ""
    chunk = f"a prefill chunk of {row.prefill_tokens} behind {row.prefill_cached}" if row.prefill_tokens else ""
    table = Table(title=" and ".join(filter(None, [kind, chunk])) + f" ({row.dtype}, {row.quantization})", min_width=70)
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column("of the step", justify="right")
    table.add_row("step", f"{row.step_ms:.2f}", "100%")
    total = sum(row.parts_ms.values())
    for name, ms in row.parts_ms.items():
        table.add_row(f"  {name}", f"{ms:.2f}", f"{ms / total:.0%}")
    table.add_row("floor", f"{row.floor_ms:.2f}", f"{row.floor_ms / row.step_ms:.0%}", style="bold")
    for way, ms in row.floor_products_ms.items():
        table.add_row(f"  products, {way}" + (" (taken)" if way == row.fastest_products else ""), f"{ms:.2f}", "")
    table.add_row(f"  KV at {row.read_gb_per_s:.1f} GB/s", f"{row.floor_kv_ms:.2f}", "")
    table.caption = (
        f"step over floor {row.ratio:.2f}; {row.gflop_per_s:.0f} GFLOP/s, {row.gb_per_s:.1f} GB/s; attention "
        f"{row.attention_over_kv:.2f} times its KV bytes, {row.attention_gflop_per_s:.0f} GFLOP/s (products "
        f"{row.products_gflop_per_s:.0f})"
    )
    return table


def run(options: StepOptions) -> int:
    """Measure, print and write; returns the exit code."""
    bench = Bench(options)
    rows = []
    for decodes in options.decodes:
        rows.append(bench.measure(decodes))
        Console().print(show(rows[-1]))
    if options.json_file:
        Path(options.json_file).write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0
