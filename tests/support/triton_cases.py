"""What the tests of the attention kernels share: pages of every storage on the kernels' device, and tolerances."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.attention.tile import read_pages
from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_encode
from hybridkv.kernels.formats.kv_format import Pages

F32, BF16, FP8 = "f32", "bf16", "fp8"
TORCH = {F32: torch.float32, BF16: torch.bfloat16}
# (query, pages). Relative RMS against float64 on what is stored. f32: sums of a few hundred f32 products. A bf16 query
# with bf16 or FP8 pages: weights and result are rounded to bf16, 2^-9 at most and 1.1e-3 RMS each.
BOUND = {
    (F32, F32): 2e-6, (F32, BF16): 2e-6, (F32, FP8): 2e-6, (BF16, F32): 2e-3, (BF16, BF16): 4e-3, (BF16, FP8): 4e-3,
}  # fmt: skip


@dataclass
class Streams:
    """B requests of G streams in random pages. Pages and places that belong to nobody hold NaN."""

    k_pool: Pages  # [N, P, D]
    v_pool: Pages
    table: Tensor  # [B, G, W] int32
    lengths: np.ndarray  # [B, G]

    @property
    def args(self) -> tuple[Pages, Pages, Tensor, np.ndarray]:
        return self.k_pool, self.v_pool, self.table, self.lengths

    @property
    def on_device(self) -> Tensor:
        return torch.from_numpy(self.lengths).to(self.table.device)

    def rows(self, part: slice) -> tuple[Pages, Pages, Tensor, np.ndarray]:
        return self.k_pool, self.v_pool, self.table[part], self.lengths[part]

    def entries(self, b: int, g: int, length: int) -> tuple[Tensor, Tensor]:
        """The stored keys and values of a stream in float64."""
        k, v = (read_pages(p, self.table[b, g : g + 1], 0, length)[0].double() for p in (self.k_pool, self.v_pool))
        return k, v


def store(x: Tensor, kind: str) -> Pages:
    if kind != FP8:
        return x.to(TORCH[kind])
    codes, scale = fp8_encode(x)
    return Fp8Pages(codes, scale.masked_fill(x.isnan().any(-1), torch.nan))


def streams(lengths: list[list[int]], P: int, D: int, kind: str, device: str, spare: int = 3) -> Streams:
    held = np.array(lengths, np.int64)
    count = -(-held // P)
    pages = torch.randperm(int(count.sum()) + spare, device=device).to(torch.int32)
    table = torch.full((*held.shape, int(count.max()) + 2), -1, dtype=torch.int32, device=device)
    pools = [torch.full((len(pages), P, D), torch.nan, device=device) for _ in range(2)]
    for stream, (b, g) in enumerate(np.ndindex(*held.shape)):
        at = int(count.reshape(-1)[:stream].sum())
        own = pages[at : at + int(count[b, g])]
        table[b, g, : len(own)] = own
        for i, pool in enumerate(pools):
            new = torch.full((len(own) * P, D), torch.nan, device=device)
            # keys and values of different sizes, so that FP8 scales differ
            new[: held[b, g]] = torch.randn(int(held[b, g]), D, device=device) * (1.5, 0.3)[i]
            new[: held[b, g] : 7] *= 3
            pool[own.long()] = new.view(-1, P, D)
    return Streams(store(pools[0], kind), store(pools[1], kind), table, held)


def queries(T: int, H: int, D: int, kind: str, device: str) -> Tensor:
    """A slice of a wider row, as a fused projection gives it."""
    return torch.randn(T, H + 4, D, device=device).to(TORCH[kind])[:, 2 : 2 + H]


def dense(q: Tensor, held: Streams, starts: list[int], scale: float) -> Tensor:
    """The definition, in float64. A query that sees nothing gives zeros."""
    G = held.table.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for b in range(len(held.lengths)):
        begin, end = starts[b], starts[b + 1]
        heads = q[begin:end].double().view(end - begin, G, -1, q.shape[-1])
        for g in range(G):
            length = int(held.lengths[b, g])
            if length == 0:
                continue
            k, v = held.entries(b, g, length)
            last = torch.arange(end - begin, device=q.device) + length - (end - begin)
            hidden = torch.arange(length, device=q.device) > last[:, None]  # [n, length]
            scores = (heads[:, g] @ k.T * scale).masked_fill(hidden[:, None], -torch.inf)
            out[begin:end].view(end - begin, G, -1, q.shape[-1])[:, g] = scores.softmax(-1).nan_to_num() @ v
    return out


def log_sums(q: Tensor, held: Streams, starts: list[int], scale: float) -> Tensor:
    """Log-sum-exp of every query and head [T, H] in float64; -inf where nothing is seen."""
    G = held.table.shape[1]
    out = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(len(held.lengths)):
        begin, end = starts[b], starts[b + 1]
        heads = q[begin:end].double().view(end - begin, G, -1, q.shape[-1])
        for g in range(G):
            length = int(held.lengths[b, g])
            if length == 0:
                continue
            last = torch.arange(end - begin, device=q.device) + length - (end - begin)
            hidden = torch.arange(length, device=q.device) > last[:, None]  # [n, length]
            scores = heads[:, g] @ held.entries(b, g, length)[0].T * scale
            out[begin:end].view(end - begin, G, -1)[:, g] = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(
                -1
            )
    return out
