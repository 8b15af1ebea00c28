"""What the tests of both compressors share: streams of rows, the definition in float64, and a cache to flush into."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridkv.kernels.formats.page_format import load_entries_ref
from hybridkv.kernels.formats.page_layout import PageFormat, entry_format, index_format
from hybridkv.kernels.step_index import StepIndex
from hybridkv.kernels.v4 import flush_csa as csa
from hybridkv.kernels.v4 import flush_hca as hca
from hybridkv.kernels.v4 import running_pool as pool

EPS = 1e-6
P = 4  # entries of a page
FORMS: dict[str, tuple[Callable[..., None], ...]] = {  # CSA, HCA flush, HCA save
    "ref": (csa.flush_csa_ref, hca.flush_hca_ref, pool.save_running_ref),
    "triton": (csa.flush_csa_triton, hca.flush_hca_triton, pool.save_running_triton),
    "public": (csa.flush_csa, hca.flush_hca, pool.save_running),
}
FORMATS = ("f32", "bf16", "fp8", "fp8_entry", "index f32", "index bf16", "index fp8", "index mxfp4", "index nvfp4")


def format_of(name: str, c: int, rope: int) -> PageFormat:
    return index_format(name.removeprefix("index "), c) if name.startswith("index ") else entry_format(name, c, rope)


@dataclass
class Compressor:
    """A learned compressor: `streams` is 2 for CSA (overlapping windows) and 1 for HCA."""

    streams: int
    c: int
    rope: int
    ratio: int
    device: str = "cpu"
    bias: Tensor = field(init=False)  # [m, streams * c]
    weight: Tensor = field(init=False)  # [c]
    inv_freq: Tensor = field(init=False)  # [r/2]

    def __post_init__(self) -> None:
        self.bias = torch.randn(self.ratio, self.streams * self.c, device=self.device)
        self.weight = 1 + 0.3 * torch.randn(self.c, device=self.device)
        self.inv_freq = 0.7 ** torch.arange(self.rope // 2, device=self.device)

    def rows(self, T: int) -> tuple[Tensor, Tensor]:
        """Content and gate [T, streams * c] of T tokens: slices of one wider product; the streams differ in size."""
        width = self.streams * self.c
        wide = torch.randn(T, 2 * width + 12, device=self.device)
        p, z = wide[:, 4 : 4 + width], wide[:, 8 + width : 8 + 2 * width]
        p[:, self.c :] *= 1.7
        z *= 1.5
        return p, z

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """At the first token of the window that a token would complete."""
        angle = (positions + 1 - self.ratio).clamp(min=0).float()[:, None] * self.inv_freq
        wide = torch.cat((angle.cos(), angle.sin()), -1)  # two views of one table
        return wide[:, : self.rope // 2], wide[:, self.rope // 2 :]

    def finished(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Norm and rotation of pooled [E, c] in float64."""
        x = pooled * (pooled.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight.double()
        angle = positions.double()[:, None] * self.inv_freq.double()
        pairs = torch.view_as_complex(x[:, self.c - self.rope :].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(1)
        return torch.cat((x[:, : self.c - self.rope], turned), -1)

    def entries(self, p: Tensor, z: Tensor, wrong: str = "") -> Tensor:
        """The definition [E, c] in float64 on the rows of a whole request; `wrong` names a mistake to make."""
        m, c, E = self.ratio, self.c, len(p) // self.ratio
        shift = 1 if wrong == "bias row off by one" else 0
        bias = self.bias.double()[(torch.arange(len(p), device=p.device) + shift) % m]
        p, z = p.double(), z.double() + bias
        first = m * torch.arange(E, device=p.device)
        own, before = (first[:, None] + torch.arange(k, k + m, device=p.device) for k in (0, -m))  # [E, m] each
        stream = {"own": slice(-c, None), "next": slice(0, c)}
        if wrong == "streams swapped":
            stream = {"own": stream["next"], "next": stream["own"]}
        if wrong == "own stream carried over":
            stream["next"] = stream["own"]
        p_slots, z_slots = p[own][..., stream["own"]], z[own][..., stream["own"]]
        if self.streams == 2:
            missing = (before < 0).unsqueeze(-1)
            p_before = p[before][..., stream["next"]].masked_fill(missing, 0)
            pad = 0.0 if wrong == "zeros for what is missing" else -torch.inf
            z_before = z[before][..., stream["next"]].masked_fill(missing, pad)
            p_slots, z_slots = torch.cat((p_before, p_slots), 1), torch.cat((z_before, z_slots), 1)
        if wrong == "one weight for all channels":
            z_slots = z_slots.mean(-1, keepdim=True)
        pooled = (z_slots.softmax(1) * p_slots).sum(1)
        turn = {"rotated at the last position": m - 1, "rotated at the middle": m // 2}.get(wrong, 0)
        return self.finished(pooled, first + turn)


class Cache:
    """Pages and state of some slots for one compressor. Everything nobody wrote is NaN, or random bytes.

    Before the first page and the first slot lies one more, where place -1 and slot -1 would be: nothing changes there.
    """

    def __init__(self, compressor: Compressor, fmt: PageFormat, slots: int, places: int, depth: int = 0) -> None:
        device, c = compressor.device, compressor.c
        self.compressor, self.fmt = compressor, fmt
        N = -(-places // P)
        raw = torch.randint(0, 256, (N + 1, P, fmt.nbytes), dtype=torch.uint8, device=device)
        self.memory = [raw.view(fmt.dtype)]
        self.free = torch.randperm(N * P, device=device).tolist()
        self.places: dict[int, list[int]] = {}  # of a request's entries, in order
        if compressor.streams == 2:
            parts, shape = 2, (slots + 1, depth or 2 * compressor.ratio, 2 * c)
        else:
            parts, shape = 3, (slots + 1, depth or 1, c)
        self.memory += [torch.full(shape, torch.nan, device=device) for _ in range(parts)]

    @property
    def pages(self) -> Tensor:
        return self.memory[0][1:]

    @property
    def state(self) -> list[Tensor]:
        return [x[1:] for x in self.memory[1:]]

    def place(self, key: int, entry: int) -> int:
        held = self.places.setdefault(key, [])
        while len(held) <= entry:
            held.append(self.free.pop())
        return held[entry]

    def entry_index(self, index: StepIndex, keys: list[int]) -> Tensor:
        m, out = self.compressor.ratio, []
        for b, u in zip(index.token_to_req.tolist(), index.positions.tolist()):
            out.append(self.place(keys[b], u // m) if (u + 1) % m == 0 and keys[b] >= 0 else -1)
        return torch.tensor(out, dtype=torch.int64, device=index.token_to_req.device)

    def step(self, form: str, p: Tensor, z: Tensor, index: StepIndex, keys: list[int]) -> None:
        """`keys`: whose entries they are, one of each request; -1 for padding."""
        self.flush(form, p, z, index, self.entry_index(index, keys))

    def flush(
        self,
        form: str,
        p: Tensor,
        z: Tensor,
        index: StepIndex,
        entry_index: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        longest: int = 0,
    ) -> None:
        """And save. longest: new tokens of a request; 0: as the index says, which a graph cannot ask."""
        x, (flush_csa, flush_hca, save_running) = self.compressor, FORMS[form]
        cos, sin = angles or x.angles(index.positions)
        args = (self.pages, self.fmt, entry_index, p, z, *self.state, x.bias, x.weight, EPS, cos, sin, index, x.ratio)
        if x.streams == 2:
            flush_csa(*args, longest=longest or int(index.query_start_loc.diff().max()))
        else:
            flush_hca(*args)
            save_running(*self.state, p, z, x.bias, index, x.ratio)

    def request(self, form: str, p: Tensor, z: Tensor, slot: int, chunks: list[int], key: int = 0) -> None:
        """A whole request alone, in chunks of these sizes."""
        begin = 0
        for count in chunks:
            index = StepIndex.make([slot], [begin], [count], p.device)
            self.step(form, p[begin : begin + count], z[begin : begin + count], index, [key])
            begin += count
        assert begin == len(p)

    def entries(self, key: int = 0) -> Tensor:
        """The stored entries [E, c] of a request."""
        places = torch.tensor(self.places.get(key, []), dtype=torch.int64, device=self.pages.device)
        return load_entries_ref(self.pages, self.fmt, places)

    def copy(self) -> "Cache":
        other = Cache.__new__(Cache)
        other.compressor, other.fmt = self.compressor, self.fmt
        other.memory = [x.clone() for x in self.memory]
        other.free, other.places = list(self.free), {k: list(v) for k, v in self.places.items()}
        return other


def pieces(T: int, size: int) -> list[int]:
    """T tokens in chunks of one size, the last one shorter; size 0: random sizes."""
    out: list[int] = []
    while sum(out) < T:
        out.append(min(size or int(torch.randint(1, 12, ())), T - sum(out)))
    return out
