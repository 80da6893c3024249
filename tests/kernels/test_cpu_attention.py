"""The compiled attention kernel: equal to plain torch (K1), reads what it may (K2, K3), blind to neighbours (K4)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.kernels.cpu.bindings import CpuLibrary, new_cache

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def kernels() -> CpuLibrary:
    return CpuLibrary()


class World:
    """Random sequences with their keys and values scattered over a pool whose every unused slot holds NaN."""

    def __init__(
        self, lens: list[int], counts: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        self.generator = torch.Generator().manual_seed(sum(lens) * 31 + len(lens))
        needed = [-(-n // BLOCK_SIZE) for n in lens]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=self.generator)
        self.tables = torch.full((len(lens), max(needed)), -1, dtype=torch.int32)
        self.cache = new_cache(num_blocks, kv_heads, BLOCK_SIZE, dim, dtype)
        for part in self.cache:
            part.fill_(float("nan"))
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        used = 0
        for i, n in enumerate(lens):
            self.tables[i, : needed[i]] = order[used : used + needed[i]]
            used += needed[i]
            keys, values = self.random(n, kv_heads, dim).to(dtype), self.random(n, kv_heads, dim).to(dtype)
            self.plain.append((keys, values))
            slot = torch.arange(n)
            block = self.tables[i, slot // BLOCK_SIZE].long()
            pack = self.cache.keys.shape[-1]
            self.cache.keys[block, :, :, slot % BLOCK_SIZE] = keys.view(n, kv_heads, dim // pack, pack)
            self.cache.values[block, :, slot % BLOCK_SIZE // pack, :, slot % pack] = values
        self.lens, self.counts = lens, counts
        self.query = self.random(sum(counts), heads, dim).to(dtype)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self, kernels: CpuLibrary, window: int = 0) -> torch.Tensor:
        starts = torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(self.lens, dtype=torch.int32)
        scale = self.query.shape[2] ** -0.5
        return kernels.paged_attention(self.query, self.cache, self.tables, starts, lens, scale, window)

    def expected(self, window: int = 0) -> torch.Tensor:
        out, at = [], 0
        for n, count, (keys, values) in zip(self.lens, self.counts, self.plain, strict=True):
            query = self.query[at : at + count].float()
            at += count
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("rhd,nhd->hrn", query, keys) * query.shape[2] ** -0.5
            back = (n - count + torch.arange(count))[:, None] - torch.arange(n)
            hidden = back < 0
            if window:
                hidden |= back >= window
            scores = scores.masked_fill(hidden, float("-inf"))
            out.append(torch.einsum("hrn,nhd->rhd", scores.softmax(-1), values))
        return torch.cat(out)


SEQUENCES = st.lists(
    st.integers(1, 600).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=5
)
HEADS = st.sampled_from([(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 80), (6, 2, 16), (14, 2, 48), (10, 2, 32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=40)
@given(sequences=SEQUENCES, heads=HEADS, window=st.sampled_from([0, 0, 1, 7, 64, 300]))
def test_equals_plain_attention(
    kernels: CpuLibrary, dtype: torch.dtype, sequences: list[tuple[int, int]], heads: tuple[int, int, int], window: int
) -> None:
    world = World([n for n, _ in sequences], [count for _, count in sequences], *heads, dtype)
    out = world.run(kernels, window).float()
    assert not out.isnan().any()
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, world.expected(window), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_chunk_cut(kernels: CpuLibrary, dtype: torch.dtype) -> None:
    length = 1100
    whole = World([length, 40, 700], [length, 3, 1], 9, 3, 64, dtype)
    together = whole.run(kernels)
    for cut in (1, 15, 16, 17, 255, 256, 257, 512, 900, length - 1):
        starts = torch.tensor([0, length - cut], dtype=torch.int32)
        lens = torch.tensor([length], dtype=torch.int32)
        query = whole.query[cut:length].contiguous()
        out = kernels.paged_attention(query, whole.cache, whole.tables[:1], starts, lens, 0.125)
        assert torch.equal(out, together[cut:length])
    for row in range(0, length, 7):
        alone = kernels.paged_attention(
            whole.query[row : row + 1].contiguous(),
            whole.cache,
            whole.tables[:1],
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([row + 1], dtype=torch.int32),
            0.125,
        )
        assert torch.equal(alone[0], together[row])


def test_renaming_blocks_changes_no_bit(kernels: CpuLibrary) -> None:
    world = World([333, 90], [20, 1], 9, 3, 64, torch.float32)
    before = world.run(kernels)
    renamed = torch.randperm(len(world.cache.keys), generator=world.generator)
    for part in world.cache:
        part[renamed] = part.clone()
    world.tables = torch.where(world.tables >= 0, renamed[world.tables.long()].int(), -1)
    assert torch.equal(world.run(kernels), before)
