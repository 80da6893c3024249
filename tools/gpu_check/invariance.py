"""Are a row's bits the same alone, in any batch, at any cut, in a captured step? Thousands of rows, every shape."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from services.executor.cuda_graphs import DecodeGraphs
from services.executor.kernels.triton.kernels import TritonKernels
from services.executor.model.config import ModelConfig
from services.executor.model.llama import Llama
from services.executor.model.weights import Weights
from tools.gpu_check.worlds import BLOCK_SIZE, Row, Shape, World, lay_out

SCALE = 0.1


class Moved(NamedTuple):
    """One check: how many of the rows that were compared had other bits."""

    what: str
    rows: int
    moved: int


def check(kernels: TritonKernels, shape: Shape, dtype: torch.dtype, num_rows: int, context: int) -> Iterator[Moved]:
    """Compare ``num_rows`` rows of every kernel; contexts are up to ``context`` tokens."""
    world = World([context], shape, dtype, kernels.device)
    for name, (columns, depth) in shape.products().items():
        product = kernels.linear(world.random(columns, depth, scale=depth**-0.5), None)
        yield _in_pieces(f"product {name} {columns} x {depth}", product, world.random(num_rows, depth))
    weight = world.random(shape.hidden)
    normed = world.random(num_rows, shape.hidden)
    yield _in_pieces("RMS norm", lambda x: kernels.add_rms_norm(x, None, weight, 1e-5), normed)
    yield _in_pieces("SiLU", kernels.silu_mul, world.random(num_rows, 2 * shape.inner))
    yield _decodes(kernels, shape, dtype, num_rows, context)
    for window in (0, context // 3):
        yield _cuts(kernels, shape, dtype, context, window)


def pieces(num_rows: int, seed: int = 0) -> Iterator[slice]:
    """Cut rows into batches of one (the first one is) and of every size that may matter to a tile."""
    draw, start = np.random.default_rng(seed), 0
    while start < num_rows:
        size = 1 if start == 0 else int(draw.choice([1, 1, 2, 3, 7, 8, 16, 31, 33, 63, 64, 65, 127, 200]))
        yield slice(start, min(start + size, num_rows))
        start += size


def _in_pieces(what: str, run: Callable[[Tensor], Tensor], x: Tensor) -> Moved:
    whole = run(x)
    return Moved(what, len(x), sum(_moved(run(x[piece].contiguous()), whole[piece]) for piece in pieces(len(x))))


def _moved(found: Tensor, expected: Tensor) -> int:
    return int((found != expected).flatten(1).any(1).sum())


def _decodes(kernels: TritonKernels, shape: Shape, dtype: torch.dtype, num_rows: int, context: int) -> Moved:
    """Decodes of contexts of all lengths, over the same few tables: all at once, and in batches."""
    world = World([context] * 8, shape, dtype, kernels.device, seed=1)
    cache = world.cache(kernels.new_cache)
    lengths = np.random.default_rng(2).integers(1, context + 1, num_rows).tolist()
    rows = [world.row(i % 8, 1, length) for i, length in enumerate(lengths)]
    queries = world.random(num_rows, shape.heads, shape.head_dim)

    def attend(piece: slice) -> Tensor:
        return kernels.step(lay_out(rows[piece]), BLOCK_SIZE).attend(queries[piece].contiguous(), cache, SCALE, 0)

    whole = attend(slice(0, num_rows))
    moved = sum(_moved(attend(piece), whole[piece]) for piece in pieces(num_rows, seed=3))
    return Moved(f"decodes of up to {context} tokens", num_rows, moved)


def _cuts(kernels: TritonKernels, shape: Shape, dtype: torch.dtype, context: int, window: int) -> Moved:
    """A prompt computed in one go, in chunks of all sizes, and token by token."""
    world = World([context], shape, dtype, kernels.device, seed=4)
    cache = world.cache(kernels.new_cache)
    queries = world.random(context, shape.heads, shape.head_dim)

    def attend(piece: slice) -> Tensor:
        batch = lay_out([world.row(0, piece.stop - piece.start, piece.stop)])
        return kernels.step(batch, BLOCK_SIZE).attend(queries[piece].contiguous(), cache, SCALE, window)

    whole = attend(slice(0, context))
    moved = sum(_moved(attend(piece), whole[piece]) for piece in pieces(context, seed=5))
    return Moved(f"cuts of a prompt of {context} tokens, window {window}", context, moved)


class _RandomWeights:
    """Weights of any shape, for a model that need not mean anything."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(7)

    def __contains__(self, name: str) -> bool:
        return False

    def check_names(self, expected: set[str]) -> None:
        """Whatever is expected is here."""

    def take(self, name: str, *size: int) -> Tensor:
        """Norms near 1, matrices that keep the size of what they are given."""
        drawn = torch.randn(size, generator=self._generator, device=self._device)
        return (drawn * 0.1 + 1 if len(size) == 1 else drawn * size[1] ** -0.5).to(self._dtype)


class Model(NamedTuple):
    """A random model of some layers with its caches, whose blocks 0.. are dealt to rows in turn."""

    llama: Llama
    graphs: DecodeGraphs
    run: Callable[[Sequence[tuple[int, int]], bool], Tensor]
    """Logits of the last token of rows (context, count), as captured or not."""


def random_model(
    kernels: TritonKernels, shape: Shape, dtype: torch.dtype, num_layers: int, max_rows: int, context: int
) -> Model:
    """A llama of this shape. Its captured steps are not captured yet."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=num_layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        context_len=context,
        norm_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(0,) * num_layers,
        rope_frequencies=tuple(10000.0 ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)),
        rope_scale=1.0,
    )
    llama = Llama(config, cast(Weights, _RandomWeights(kernels.device, dtype)), kernels, kernels.device)
    per_row = -(-context // BLOCK_SIZE)
    sizes = (max_rows * per_row, BLOCK_SIZE, shape.kv_heads, shape.head_dim, dtype)
    caches = [kernels.new_cache(*sizes) for _ in range(num_layers)]
    graphs = DecodeGraphs(llama, kernels, caches, BLOCK_SIZE, max_rows, context)

    def run(rows: Sequence[tuple[int, int]], captured: bool) -> Tensor:
        batch = lay_out([Row(end, count, range(i * per_row, (i + 1) * per_row)) for i, (end, count) in enumerate(rows)])
        states = graphs.states(batch) if captured else llama.states(batch, caches, BLOCK_SIZE)
        assert states is not None
        return llama.logits(states, batch.query_starts[1:] - 1)

    return Model(llama, graphs, run)


def check_captured(model: Model, max_rows: int, context: int) -> Moved:
    """Prefill, then the same decodes captured, not captured and one by one: the logits of each row."""
    lengths = np.random.default_rng(6).integers(context // 2, context, max_rows).tolist()
    model.run([(length, length) for length in lengths], False)
    decodes = [(length, 1) for length in lengths]
    plain = model.run(decodes, False)
    moved = _moved(model.run(decodes, True), plain)
    for num_rows in range(1, max_rows):
        moved += _moved(model.run(decodes[:num_rows], True), plain[:num_rows])
    return Moved("logits of captured decodes", max_rows * (max_rows + 1) // 2, moved)
