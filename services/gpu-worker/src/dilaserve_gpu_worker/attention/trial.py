"""What attention backends are tried against, at start and in tests: random ragged batches, and
attention written out plainly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dilaserve_gpu_worker.attention.runs import PooledKeys, Ragged, Run
from dilaserve_gpu_worker.attention.varlen import Lengths
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS

__all__ = ["RaggedCase", "plain_attention", "plain_gathered", "plain_paged", "random_case"]
__all__ += ["masked_gathered", "masked_paged"]

N_PADDING = 5
"""Tokens behind the last row."""


@dataclass(frozen=True, slots=True)
class RaggedCase:
    """One layer's inputs."""

    ragged: Ragged
    q_THA: Tensor
    k_TGA: Tensor
    v_TGA: Tensor
    pooled: PooledKeys | None

    def to(self, device: torch.device, dtype: torch.dtype) -> RaggedCase:
        """The same elsewhere, rounded to `dtype`."""
        q, k, v = (x.to(device, dtype) for x in (self.q_THA, self.k_TGA, self.v_TGA))
        pooled = self.pooled and PooledKeys(
            self.pooled.k_SGA.to(device, dtype), self.pooled.v_SGA.to(device, dtype)
        )
        return replace(self, q_THA=q, k_TGA=k, v_TGA=v, pooled=pooled)


def random_case(
    shapes: list[tuple[int, int, int]],
    *,
    seed: int,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 16,
    has_pool: bool = True,
) -> RaggedCase:
    """Runs of (rows, queries, keys); rows with as many queries as keys are whole requests, those
    with fewer are cached ones, whose queries are the last of their keys. In fp32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    chance = np.random.default_rng(seed)
    ragged = _ragged(shapes, chance, has_pool)
    n_tokens = sum(n_rows * n_queries for n_rows, n_queries, _ in shapes)

    def draw(n: int, n_of_heads: int) -> Tensor:
        return torch.randn(n, n_of_heads, head_dim, generator=generator)

    q_THA = draw(n_tokens + N_PADDING, n_heads)
    k_TGA, v_TGA = (draw(n_tokens + N_PADDING, n_kv_heads) for _ in range(2))
    pooled = None
    if has_pool:
        n_slots = PAGE_TOKENS * (1 + int(ragged.write_slots.max(initial=0)) // PAGE_TOKENS)
        n_slots = max(
            n_slots, PAGE_TOKENS * (1 + int(ragged.key_slots.max(initial=0)) // PAGE_TOKENS)
        )
        pooled = PooledKeys(draw(n_slots, n_kv_heads), draw(n_slots, n_kv_heads))
        slots = torch.from_numpy(ragged.write_slots)
        pooled.k_SGA[slots] = k_TGA[:n_tokens]
        pooled.v_SGA[slots] = v_TGA[:n_tokens]
    return RaggedCase(ragged, q_THA, k_TGA, v_TGA, pooled)


def plain_attention(case: RaggedCase) -> Tensor:
    """THA in fp64, row by row."""
    o_THA = torch.zeros(case.q_THA.shape, dtype=torch.float64, device=case.q_THA.device)
    for run in case.ragged.runs:
        for row in range(run.n_rows):
            first = run.start + row * run.n_queries
            part = slice(first, first + run.n_queries)
            k, v = case.k_TGA[part], case.v_TGA[part]
            if case.pooled is not None:
                slots = torch.from_numpy(case.ragged.slots_of(run, row)).to(k.device)
                k, v = case.pooled.k_SGA[slots], case.pooled.v_SGA[slots]
            o_THA[part] = _attend(case.q_THA[part], k, v)
    return o_THA


def plain_gathered(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
    """See attention.varlen.GatheredKernel."""
    queries, keys = lengths.cu_queries.tolist(), lengths.cu_keys.tolist()
    parts = zip(queries, queries[1:], keys, keys[1:], strict=False)
    return torch.cat([_attend(q[a:b], k[c:d], v[c:d]) for a, b, c, d in parts]).to(q.dtype)


def plain_paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, pages_NP: Tensor | None
) -> Tensor:
    """See attention.varlen.PagedKernel."""
    if pages_NP is None:
        return plain_gathered(q, k, v, lengths)
    queries = lengths.cu_queries.tolist()
    outputs = []
    for a, b, n_keys, pages in zip(
        queries, queries[1:], lengths.n_keys.tolist(), pages_NP, strict=False
    ):
        own_k, own_v = (x[pages].flatten(0, 1)[:n_keys] for x in (k, v))
        outputs.append(_attend(q[a:b], own_k, own_v))
    return torch.cat(outputs).to(q.dtype)


def masked_gathered(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
    """See attention.varlen.GatheredKernel: all queries over all keys, but for a mask. Reads no
    length on the processor, as a kernel does not."""
    q_row, k_row = _row_of(lengths.cu_queries, len(q)), _row_of(lengths.cu_keys, len(k))
    return _masked(q, k, v, q_row[:, None] == k_row)


def masked_paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, pages_NP: Tensor | None
) -> Tensor:
    """See attention.varlen.PagedKernel; likewise."""
    if pages_NP is None:
        return masked_gathered(q, k, v, lengths)
    pages = pages_NP.flatten()
    k_SGA, v_SGA = (x.index_select(0, pages).flatten(0, 1) for x in (k, v))
    n_wide = pages_NP.shape[1] * PAGE_TOKENS
    slot = torch.arange(len(k_SGA), device=q.device)
    row = slot // n_wide
    is_key = slot % n_wide < lengths.n_keys.index_select(0, row)
    is_own = _row_of(lengths.cu_queries, len(q))[:, None] == row
    return _masked(q, k_SGA, v_SGA, is_own & is_key)


def _row_of(sums: Tensor, n: int) -> Tensor:
    return torch.bucketize(torch.arange(n, device=sums.device), sums[1:], right=True)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q_HQA, k_GSA, v_GSA = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    mixed_HQA = F.scaled_dot_product_attention(
        q_HQA, k_GSA, v_GSA, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed_HQA.transpose(0, 1)


def _attend(q_NHA: Tensor, k_SGA: Tensor, v_SGA: Tensor) -> Tensor:
    n_groups = q_NHA.shape[1] // k_SGA.shape[1]
    k_SHA = k_SGA.double().repeat_interleave(n_groups, dim=1)
    v_SHA = v_SGA.double().repeat_interleave(n_groups, dim=1)
    scores_HNS = torch.einsum("nha,sha->hns", q_NHA.double(), k_SHA) / q_NHA.shape[-1] ** 0.5
    return torch.einsum("hns,sha->nha", scores_HNS.softmax(-1), v_SHA)


def _pages_to_take(n_pages: int, chance: np.random.Generator) -> list[int]:
    """From the last on: in order but for some that are exchanged, or in any order."""
    pages = np.arange(n_pages)[::-1].copy()
    n_exchanged = chance.choice([0, 2, 4, n_pages])
    moved = chance.choice(n_pages, min(n_exchanged, n_pages), replace=False)
    pages[moved] = pages[chance.permutation(moved)]
    order: list[int] = pages.tolist()
    return order


def _ragged(
    shapes: list[tuple[int, int, int]], chance: np.random.Generator, has_pool: bool
) -> Ragged:
    runs, written, keys = [], [], []
    start = first_key = 0
    n_pages = sum(n_rows * -(-n_keys // PAGE_TOKENS) for n_rows, _, n_keys in shapes)
    free = _pages_to_take(n_pages + 3, chance)
    for n_rows, n_queries, n_keys in shapes:
        is_full = n_queries == n_keys
        runs.append(Run(n_rows, n_queries, n_keys, start, None if is_full else first_key))
        for _ in range(n_rows):
            pages = np.array([free.pop() for _ in range(-(-n_keys // PAGE_TOKENS))])
            slots = (pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)[:n_keys]
            written.append(slots[n_keys - n_queries :])
            keys += [] if is_full else [slots]
        start += n_rows * n_queries
        first_key += 0 if is_full else n_rows * n_keys
    nothing = np.empty(0, np.int64)
    if not has_pool:
        return Ragged(runs, nothing, nothing)
    return Ragged(runs, np.concatenate([nothing, *written]), np.concatenate([nothing, *keys]))
