"""Queries and pages of keys for tests of scores; what a score must not read is NaN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv.kernels.formats.fp8 import Fp8Pages, fp8_decode_ref, fp8_encode_ref
from hybridkv.kernels.formats.kv_format import Pages


@dataclass
class Case:
    q: Tensor  # [W, H, D]
    when: Tensor  # [W]
    pages: Pages
    table: Tensor
    positions: Tensor
    keys: list[Tensor]  # per stream, as stored, float64
    exact: list[Tensor]  # before quantisation

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def on(self, device: str) -> tuple[Tensor, Tensor, Pages, Tensor, Tensor, float]:
        p = self.pages
        p = Fp8Pages(*(t.to(device) for t in p)) if isinstance(p, Fp8Pages) else p.to(device)
        where = (self.q, self.when, self.table, self.positions)
        q, when, table, positions = (t.to(device) for t in where)
        return q, when, p, table, positions, self.scale

    def sums(self) -> Tensor:
        """[W, H] f32: log-sum-exp of what each query sees; -inf where that is nothing."""
        W, H, _ = self.q.shape
        R, out = H // len(self.positions), torch.full((W, H), -torch.inf)
        for w, h in torch.cartesian_prod(torch.arange(W), torch.arange(H)).tolist():
            k = self.keys[h // R]
            seen = self.positions[h // R, : len(k)] <= self.when[w]
            out[w, h] = (k[seen] @ self.q[w, h].double() * self.scale).logsumexp(0)
        return out

    def weights(self, keys: list[Tensor]) -> Tensor:
        """[W, H, L] float64: attention by its definition; 0 where a query does not see a key."""
        (W, H, _), (G, L) = self.q.shape, self.positions.shape
        out = torch.zeros(W, H, L, dtype=torch.float64)
        for h in range(H):
            k = keys[h // (H // G)]
            at = self.positions[h // (H // G), : len(k)]
            for w in range(W):
                seen = at <= self.when[w]
                if seen.any():
                    s = (k @ self.q[w, h].double() * self.scale).masked_fill(~seen, -torch.inf)
                    out[w, h, : len(k)] = s.softmax(0)
        return out

    def truth(self, keys: list[Tensor]) -> Tensor:
        """[H, L]: summed over the window."""
        return self.weights(keys).sum(0)

    def peaks(self, keys: list[Tensor]) -> Tensor:
        """[G, L]: the largest of the window and of a KV head's query heads."""
        return self.weights(keys).amax(0).view(len(self.positions), -1, self.positions.shape[1]).amax(1)


def make(kind: str, W: int, R: int, D: int, P: int, lengths: tuple[int, ...], gaps: bool = False) -> Case:
    """`gaps`: a compacted request, whose positions have holes and differ from stream to stream."""
    G, L = len(lengths), max(lengths)
    held = [-(-n // P) for n in lengths]
    order = iter((torch.randperm(sum(held) + 1) + 1).tolist())
    pages = torch.full((sum(held) + 3, P, D), torch.nan)
    table = torch.full((G, max(held, default=0) + 2), -1, dtype=torch.int32)
    positions = torch.full((G, L), -1, dtype=torch.int64)
    exact = []
    for g, n in enumerate(lengths):
        mine = [next(order) for _ in range(held[g])]
        table[g, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        exact.append(torch.randn(n, D))
        for i in range(n):
            pages[mine[i // P], i % P] = exact[g][i]
        at = torch.arange(n) + L - n
        positions[g, :n] = torch.randperm(3 * L)[:n].sort().values - 3 * L + L if gaps else at
    positions = torch.where(torch.arange(L) < torch.tensor(lengths)[:, None], positions.clamp(min=0), -1)
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    q, when = torch.randn(W, G * R, D).to(dtype), torch.arange(L - W, L)
    stored: Pages = pages.to(dtype)
    if kind == "fp8":
        codes, scale = fp8_encode_ref(pages)
        codes[pages.isnan()], scale[pages.isnan().any(-1)] = 0x7F, torch.nan
        stored, keys = Fp8Pages(codes, scale), [fp8_decode_ref(*fp8_encode_ref(k)).double() for k in exact]
    else:
        keys = [k.to(dtype).double() for k in exact]
    if kind == "bf16-f32":
        q = torch.randn(W, G * R, D)
    return Case(q, when, stored, table, positions, keys, [k.double() for k in exact])


CASES = {
    "one key, one query": dict(W=1, R=1, D=8, P=2, lengths=(1,)),
    "one stream is empty": dict(W=2, R=2, D=32, P=16, lengths=(0, 5)),
    "odd everything": dict(W=5, R=3, D=40, P=53, lengths=(131, 77)),
    "pages of one": dict(W=4, R=1, D=16, P=1, lengths=(70,)),
    "pages of two, window longer than the stream": dict(W=9, R=2, D=64, P=2, lengths=(67, 3)),
    "many blocks": dict(W=3, R=2, D=100, P=64, lengths=(385,)),
    "wide heads": dict(W=17, R=2, D=256, P=64, lengths=(129, 64)),
    "holes": dict(W=6, R=2, D=32, P=16, lengths=(90, 61), gaps=True),
    "the largest window": dict(W=128, R=1, D=16, P=64, lengths=(140,)),
}


def on_other_pages(c: Case, P: int) -> None:
    """The same entries of a request of one stream, on pages of another size and in another order."""
    n, old = len(c.keys[0]), (c.pages if isinstance(c.pages, Tensor) else c.pages.values).shape[1]
    entries = [p.view(-1, *p.shape[2:]) for p in (c.pages if isinstance(c.pages, Fp8Pages) else (c.pages,))]
    flat = c.table[0].repeat_interleave(old)[:n].long() * old + torch.arange(n) % old
    N = -(-n // P)
    order = torch.randperm(N)
    place = order[torch.arange(n) // P] * P + torch.arange(n) % P
    moved = []
    for e in entries:
        new = torch.zeros(N * P, *e.shape[1:], dtype=e.dtype)
        new[place] = e[flat]
        moved.append(new.view(N, P, *e.shape[1:]))
    c.pages, c.table = (Fp8Pages(*moved) if isinstance(c.pages, Fp8Pages) else moved[0]), order.int()[None]
