"""``paternoster bench kernels``: each kernel by itself, with the shapes of one model.

Products: matrix rate of ours and of the libraries, taken in turns. Attention and what lies between products: bytes that
must move over the time, as a share of the memory's speed measured in the same process; a prefill's attention also as a
matrix rate. Called by ``tools.bench.command``. Imports torch and the executor; runs on CPUs.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from services.executor.batch import StepBatch
from services.executor.kernels.choice import choose
from services.executor.kernels.interface import LayerCache, Quantization, Rotary
from services.executor.model import config as model_config
from services.executor.model import device as devices
from tools.bench.floor import Memory, Products, interleaved

BLOCK_SIZE = 16
ROWS = (1, 8, 32, 128)
COPIES = 8
"""Layers' worth of weights and KV that a measurement goes through, so that little of it is in a cache."""


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one size; times are medians."""

    kernel: str
    size: str
    us: float
    gflop_per_s: float
    gb_per_s: float
    share_of_memory: float
    """Of the measured read bandwidth; above 1 the data came from a cache."""


class _Work:
    """Calls of one kernel, and what each computes and moves."""

    def __init__(self, kernel: str, size: str, call: Callable[[int], object], flops: float, moved: float) -> None:
        self.kernel, self.size, self.call, self.flops, self.moved = kernel, size, call, flops, moved

    def run(self) -> float:
        """Seconds of one call."""
        began = time.perf_counter()
        for copy in range(COPIES):
            self.call(copy)
        return (time.perf_counter() - began) / COPIES


def _step(rows: int, context: int, count: int) -> StepBatch:
    blocks = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)
    positions = np.tile(np.arange(context - count, context, dtype=np.int32), rows)
    slots = np.concatenate(
        [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t in tables for p in (positions[:count],)]
    )
    starts = (np.arange(rows + 1) * count).astype(np.int32)
    lens = np.full(rows, context, np.int32)
    return StepBatch(0, list(range(rows)), positions, positions, slots.astype(np.int64), starts, lens, tables, [])


def _others(
    config: model_config.ModelConfig, dtype: torch.dtype, quantization: Quantization, batch: StepBatch, name: str
) -> list[_Work]:
    """Everything of a layer but its products, for one step."""
    kernels = choose(torch.device("cpu"), dtype, config.head_dim, BLOCK_SIZE, quantization)
    heads, kv_heads, dim, hidden, inner = (
        *(config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size),
        config.intermediate_size,
    )
    shape = (batch.block_tables.size, BLOCK_SIZE, kv_heads, dim)
    caches: list[LayerCache] = [kernels.new_cache(*shape, dtype) for _ in range(COPIES)]
    for cache in caches:
        for part in cache:
            part.uniform_(-1, 1)
    rows, size = len(batch.token_ids), dtype.itemsize
    step = kernels.step(batch, BLOCK_SIZE)
    queries, qkv = (torch.randn(rows, n, dim).to(dtype) for n in (heads, heads + 2 * kv_heads))
    x, residual, gate_up = (torch.randn(rows, n).to(dtype) for n in (hidden, hidden, 2 * inner))
    weight = torch.ones(hidden, dtype=dtype)
    angles = torch.rand(int(batch.positions.max()) + 1, dim // 2)
    rotary = Rotary(angles, angles)
    kv_bytes = 2.0 * kv_heads * dim * size
    seen = 4.0 * heads * dim * float((batch.positions.astype(np.int64) + 1).sum())
    read = kv_bytes * float(batch.context_lens.sum())
    return [
        _Work("attention", name, lambda i: step.attend(queries, caches[i], dim**-0.5, 0), seen, read),
        _Work(
            "rotary and KV write",
            name,
            lambda i: step.rotate_and_write(qkv, heads, rotary, None, caches[i]),
            0,
            2.0 * qkv.numel() * size,
        ),
        _Work("norm", name, lambda i: kernels.add_rms_norm(x, residual, weight, 1e-5), 0, 4.0 * x.numel() * size),
        _Work("activation", name, lambda i: kernels.silu_mul(gate_up), 0, 1.5 * gate_up.numel() * size),
    ]


def run(
    folder: Path, dtype_name: str, quantization: Quantization, threads: int | None, repeats: int, json_file: str
) -> int:
    """Measure, print and write; returns the exit code."""
    devices.set_threads(threads)
    dtype = devices.choose_dtype(dtype_name, torch.device("cpu"))
    config = model_config.read(folder)
    memory = Memory()
    found: list[KernelRow] = []
    with torch.inference_mode():
        for shape in _shapes(config):
            products = Products([*[shape] * COPIES, shape], dtype, quantization)
            for rows in ROWS:
                runs = {way: partial(products.run, way, rows, 0) for way in products.ways}
                taken = interleaved({**runs, "memory": memory.run}, repeats)
                flops = 2.0 * rows * shape[0] * shape[1]
                weights = shape[0] * shape[1] * (1 if quantization == "int8" else dtype.itemsize)
                for way in products.ways:
                    name = f"product {shape[1]} x {shape[0]}, {way}"
                    found.append(_row(name, f"{rows} rows", taken[way] / COPIES, flops, weights, taken["memory"]))
        for kind in ((32, 256, 1), (32, 512, 1), (1, 2048, 512)):
            batch = _step(*kind)
            name = f"{kind[0]} rows of {kind[2]} at {kind[1]}"
            for work in _others(config, dtype, quantization, batch, name):
                taken = interleaved({"kernel": work.run, "memory": memory.run}, repeats)
                found.append(_row(work.kernel, name, taken["kernel"], work.flops, work.moved, taken["memory"]))
    table = Table(title=f"{dtype}, quantization {quantization}, {torch.get_num_threads()} threads")
    for column in ("kernel", "size", "us", "GFLOP/s", "GB/s", "of the memory's speed"):
        table.add_column(column, justify="left" if column in ("kernel", "size") else "right")
    for row in found:
        table.add_row(*(value if isinstance(value, str) else f"{value:g}" for value in asdict(row).values()))
    Console().print(table)
    if json_file:
        Path(json_file).write_text(json.dumps({"rows": [asdict(row) for row in found]}, indent=2) + "\n")
    return 0


def _shapes(config: model_config.ModelConfig) -> list[tuple[int, int]]:
    queries, hidden, inner = config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    return [(qkv, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]


def _row(kernel: str, size: str, seconds: float, flops: float, moved: float, memory: float) -> KernelRow:
    return KernelRow(
        kernel,
        size,
        us=round(seconds * 1e6, 1),
        gflop_per_s=round(flops / seconds / 1e9, 1),
        gb_per_s=round(moved / seconds / 1e9, 2),
        share_of_memory=round(moved * memory / seconds, 2),
    )
