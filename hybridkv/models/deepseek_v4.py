"""DeepSeek-V4: a window in every layer, and in most of them compressed entries of all tokens before.

    X  residual streams [T, n, hidden]      x = norm(collapse X);  X = expand(X, attention(x));  the same with experts

    attention   x -> one product in f32:  low-rank query | window row | what each compressor takes in | index weights
                low-rank query -> queries | index queries
                the handle stores the window row and the entries that are now full
                select picks entries, attend reads window and entries (v4_attention.py)
                heads -> a low-rank product for each group of them -> hidden

A layer is one of three kinds: window, CSA (entries of 4 tokens, of which an index picks the best), HCA (entries of 128,
all read). Window layers rotate by one table of angles, the others by a second, in which an entry has the position of
its first token. Nothing here reads a value back from the device, so a step can be captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.cache import CompressedHandle
from hybridkv.checkpoint.loader import Loader
from hybridkv.kernels.linear.block_linear import linear_blocks
from hybridkv.kernels.linear.block_scaled import BlockScaled, empty_blocks
from hybridkv.kernels.linear.f32_out import linear_wide, wide_dtype
from hybridkv.kernels.linear.linear import Linear
from hybridkv.kernels.moe.block_experts import ExpertStack, Stack, run_block_experts
from hybridkv.kernels.moe.grouped import run_experts
from hybridkv.kernels.moe.v4_router import Router, route
from hybridkv.kernels.rope import rope_angles
from hybridkv.kernels.v4.hyper_connections import HyperMap, hyper_enter, hyper_exit, hyper_expand
from hybridkv.kernels.v4.norm_rope import norm_rope
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import weight_bytes
from hybridkv.models.deepseek_config import DeepseekV4Config
from hybridkv.models.v4_attention import Angles, attend, select

EXPERT_PARTS = (
    "experts.gate_up_proj",
    "experts.down_proj",
    *(f"shared_experts.{p}_proj.weight" for p in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class StepAngles:
    """All angles of a step, made once for its layers."""

    window: Angles  # at the tokens' positions, for window layers
    compressed: Angles  # at the tokens' positions, for the other layers
    csa: Angles  # at the first token of the entry that a token may complete
    hca: Angles  # the same

    @staticmethod
    def at(positions: Tensor, v: DeepseekV4Config, window_freq: Tensor, compress_freq: Tensor) -> StepAngles:
        """The angles of a step, for tokens and for the entries that they may complete."""

        def angles(at: Tensor, freq: Tensor) -> Angles:
            cos, sin = rope_angles(at, freq)
            return cos.squeeze(1), sin.squeeze(1)

        firsts = ((positions + 1 - ratio).clamp(min=0) for ratio in (v.csa_ratio, v.hca_ratio))
        csa, hca = (angles(first, compress_freq) for first in firsts)
        return StepAngles(angles(positions, window_freq), angles(positions, compress_freq), csa, hca)


@dataclass(frozen=True)
class Compressor:
    """What turns the content and gate of a window of tokens into one entry."""

    bias: Tensor  # [ratio, channels] f32, added to the gate by the token's place in its window
    norm: Tensor  # [width] f32


@dataclass(frozen=True)
class Attention:
    """What all kinds share: a window of recent tokens. `compress` adds what a kind has beside it."""

    config: ModelConfig
    v: DeepseekV4Config
    inputs: Linear  # [sum of sizes, hidden]
    sizes: tuple[int, ...]  # rows of the low-rank query, of the window row, and of what the kind needs
    q_norm: Tensor  # [q_rank] f32
    kv_norm: Tensor  # [head_dim] f32
    queries: Linear  # [H D (+ index_heads index_dim), q_rank]
    sink: Tensor  # [H] f32
    group_out: Tensor | BlockScaled  # [groups, rank, H / groups D]; as codes [groups rank, H / groups D]
    out: Linear  # [hidden, groups rank]

    def __call__(self, x: Tensor, angles: StepAngles, handle: CompressedHandle) -> Tensor:
        c, T = self.config, len(x)
        low, row, *rest = linear_wide(x, self.inputs).split(self.sizes, -1)
        low = norm_rope(low.unsqueeze(1), x.dtype, c.eps, self.q_norm).squeeze(1)
        q, q_index = self.queries(low).tensor_split([c.heads * c.head_dim], -1)
        own = self.own_angles(angles)
        q = norm_rope(q.unflatten(1, (c.heads, c.head_dim)), x.dtype, c.eps, angles=own)
        handle.write_swa(row, self.kv_norm, c.eps, own)
        chosen = self.compress(rest, q_index, angles, handle)
        mixed = attend(handle, q, self.sink, c.attention_scale, own, chosen)
        if isinstance(self.group_out, BlockScaled):
            return self.out(linear_blocks(mixed.reshape(T, -1), self.group_out, self.v.o_groups))
        groups = mixed.reshape(T, len(self.group_out), self.group_out.shape[2]).transpose(0, 1)
        return self.out(torch.bmm(groups, self.group_out.transpose(1, 2)).transpose(0, 1).reshape(T, -1))

    def own_angles(self, angles: StepAngles) -> Angles:
        """What this kind of layer rotates its queries and window rows by."""
        return angles.compressed

    def compress(
        self, taken: list[Tensor], q_index: Tensor, angles: StepAngles, handle: CompressedHandle
    ) -> Tensor | None:
        """Store the entries that are full. Returns the entries that each token reads; None: all there are."""
        return None  # a window layer has none


@dataclass(frozen=True)
class WindowAttention(Attention):
    """A layer that sees the last tokens only."""

    def own_angles(self, angles: StepAngles) -> Angles:
        return angles.window


@dataclass(frozen=True)
class HcaAttention(Attention):
    """A layer with one entry for many tokens; it reads all of them."""

    main: Compressor

    def compress(
        self, taken: list[Tensor], q_index: Tensor, angles: StepAngles, handle: CompressedHandle
    ) -> Tensor | None:
        p, z = taken
        handle.maybe_flush_hca(p, z, self.main.bias, self.main.norm, self.config.eps, angles.hca)
        return None


@dataclass(frozen=True)
class CsaAttention(Attention):
    """A layer with one entry for few tokens; an index picks which of them are read."""

    main: Compressor
    index: Compressor

    def compress(
        self, taken: list[Tensor], q_index: Tensor, angles: StepAngles, handle: CompressedHandle
    ) -> Tensor | None:
        v, eps = self.v, self.config.eps
        p, z, p_index, z_index, weights = taken
        handle.maybe_flush_csa("main", p, z, self.main.bias, self.main.norm, eps, angles.csa)
        handle.maybe_flush_csa("index", p_index, z_index, self.index.bias, self.index.norm, eps, angles.csa)
        heads = q_index.unflatten(1, (v.index_heads, v.index_dim))
        heads = norm_rope(heads, q_index.dtype, angles=angles.compressed)
        return select(handle, heads, weights * (v.index_heads * v.index_dim) ** -0.5, v.index_topk)


@dataclass(frozen=True)
class Experts:
    """Router, routed experts, and one that every token goes through."""

    gate: Linear  # [E, hidden]
    router: Router
    gate_up: Stack  # [E + 1, 2 I, hidden]; the last is the shared expert
    down: Stack  # [E + 1, hidden, I]
    limit: float
    shared: ExpertStack | None = None  # where some are codes: the shared expert, and [E, ...] above
    run: Callable[..., Tensor] = run_block_experts  # of both

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights, chosen = route(linear_wide(x, self.gate), tokens, self.router)
        if self.shared is not None:
            stacks = ExpertStack(self.gate_up, self.down), self.shared
            return self.run(x, weights, chosen, stacks, self.limit)
        assert isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor)
        return run_experts(x, weights, chosen, self.gate_up, self.down, self.limit)


@dataclass(frozen=True)
class Block:
    """A layer: attention and experts, each between hyper connections."""

    to_attention: HyperMap
    attention: Attention
    to_experts: HyperMap
    experts: Experts

    def __call__(
        self,
        streams: Tensor,  # [T, n, hidden]
        tokens: Tensor,
        angles: StepAngles,
        handle: CompressedHandle,
        rows: Tensor | None = None,  # the tokens that go on; all are stored
    ) -> Tensor:
        x, post, comb = hyper_enter(streams, self.to_attention)
        streams = hyper_expand(streams, self.attention(x, angles, handle), post, comb)
        if rows is not None:
            streams, tokens = streams[rows], tokens[rows]
        if len(streams) == 0:
            return streams
        x, post, comb = hyper_enter(streams, self.to_experts)
        return hyper_expand(streams, self.experts(x, tokens), post, comb)


@dataclass(frozen=True)
class DeepseekV4:
    """Token ids to logits, through the cache."""

    config: ModelConfig
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Block, ...]
    exit: HyperMap
    head: Linear  # [vocab, hidden]
    window_freq: Tensor  # [rope / 2] f32
    compress_freq: Tensor

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64 absolute
        handles: Mapping[int, CompressedHandle],
        rows: Tensor | None,  # [S] tokens whose logits are wanted; None: all
    ) -> Tensor:  # [S, vocab] f32
        """Logits of the wanted tokens; entries and state of all tokens are stored."""
        return self.logits(self.hidden(tokens, positions, handles, rows))

    @torch.inference_mode()
    def hidden(
        self, tokens: Tensor, positions: Tensor, handles: Mapping[int, CompressedHandle], rows: Tensor | None
    ) -> Tensor:
        """[S, hidden]: what the head turns into logits."""
        v = _v4(self.config)
        angles = StepAngles.at(positions, v, self.window_freq, self.compress_freq)
        streams = self.embed(tokens).unsqueeze(1).repeat(1, v.streams, 1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            streams = layer(streams, tokens, angles, handles[i], rows if i == last else None)
        if len(streams) == 0:
            return streams.new_zeros((0, self.config.hidden))
        return hyper_exit(streams, self.exit)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] tokens -> [T, hidden]."""
        return F.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, vocab] f32 of what `hidden` gave."""
        if len(hidden) == 0:
            return hidden.new_zeros((0, self.head.shape[0]), dtype=torch.float32)
        return linear_wide(hidden, self.head)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return weight_bytes(self)


def load(config: ModelConfig, loader: Loader) -> DeepseekV4:
    """The model, its weights read."""
    v = _v4(config)
    layers = tuple(_block(config, v, loader, i) for i in range(config.layers))
    embedding = loader.weight("model.embed_tokens.weight", config.vocab, config.hidden)
    return DeepseekV4(
        config=config,
        embedding=embedding,
        layers=layers,
        exit=_hyper(config, v, loader, "model.hc_head.hc_", "model.norm.weight", rows=v.streams, scales=1),
        head=loader.make_linear(embedding) if config.tied else loader.linear(config.hidden, ("lm_head", config.vocab)),
        window_freq=torch.tensor(config.inv_freq, dtype=torch.float32, device=loader.device),
        compress_freq=torch.tensor(v.compress_inv_freq, dtype=torch.float32, device=loader.device),
    )


def _v4(config: ModelConfig) -> DeepseekV4Config:
    assert config.v4 is not None
    return config.v4


def _block(config: ModelConfig, v: DeepseekV4Config, loader: Loader, i: int) -> Block:
    name, rows = f"model.layers.{i}", v.streams * (v.streams + 2)
    return Block(
        to_attention=_hyper(config, v, loader, f"{name}.attn_hc.", f"{name}.input_layernorm.weight", rows, 3),
        attention=_attention(config, v, loader, f"{name}.self_attn", v.kinds[i]),
        to_experts=_hyper(config, v, loader, f"{name}.ffn_hc.", f"{name}.post_attention_layernorm.weight", rows, 3),
        experts=_experts(config, v, loader, f"{name}.mlp", i in v.hash_layers),
    )


def _hyper(
    config: ModelConfig, v: DeepseekV4Config, loader: Loader, name: str, norm: str, rows: int, scales: int
) -> HyperMap:
    return HyperMap(
        fn=loader.vector(f"{name}fn", rows, v.streams * config.hidden),
        base=loader.vector(f"{name}base", rows),
        scale=loader.vector(f"{name}scale", scales),
        norm=loader.vector(norm, config.hidden),
        norm_eps=config.eps,
        eps=v.hc_eps,
        iters=v.sinkhorn_iters,
    )


def _wide(loader: Loader, inputs: int, *parts: tuple[str, int]) -> Linear:
    """Projections (name, rows) of the same input as one, stored in a dtype that gives f32 results."""
    dtype = wide_dtype(loader.runs_on, loader.dtype)
    if any(loader.block_form(f"{name}.weight") for name, _ in parts):
        return loader.block_linear(inputs, [(f"{name}.weight", rows) for name, rows in parts], dtype)
    weight = torch.empty(sum(rows for _, rows in parts), inputs, dtype=dtype, device=loader.device)
    at = 0
    for name, rows in parts:
        loader.fill(weight[at : at + rows], f"{name}.weight")
        at += rows
    return loader.make_linear(weight)


def _compressor(loader: Loader, name: str, ratio: int, channels: int, width: int) -> Compressor:
    bias = loader.vector(f"{name}.position_bias", ratio, channels)
    return Compressor(bias, loader.vector(f"{name}.kv_norm.weight", width))


def _attention(config: ModelConfig, v: DeepseekV4Config, loader: Loader, name: str, kind: str) -> Attention:
    c, main, index = config, f"{name}.compressor", f"{name}.compressor.indexer"
    D, Di = c.head_dim, v.index_dim
    inputs = [(f"{name}.q_a_proj", v.q_rank), (f"{name}.kv_proj", D)]
    queries = [(f"{name}.q_b_proj", c.heads * D)]
    if kind == "hca":
        inputs += [(f"{main}.kv_proj", D), (f"{main}.gate_proj", D)]
    if kind == "csa":
        inputs += [(f"{main}.kv_proj", 2 * D), (f"{main}.gate_proj", 2 * D)]
        inputs += [(f"{index}.kv_proj", 2 * Di), (f"{index}.gate_proj", 2 * Di)]
        inputs += [(f"{index}.scorer.weights_proj", v.index_heads)]
        queries += [(f"{index}.q_b_proj", v.index_heads * Di)]
    width = c.heads * D // v.o_groups
    common = dict(
        config=c,
        v=v,
        inputs=_wide(loader, c.hidden, *inputs),
        sizes=tuple(rows for _, rows in inputs),
        q_norm=loader.vector(f"{name}.q_a_norm.weight", v.q_rank),
        kv_norm=loader.vector(f"{name}.kv_norm.weight", D),
        queries=loader.linear(v.q_rank, *queries),
        sink=loader.vector(f"{name}.sinks", c.heads),
        group_out=_group_out(loader, f"{name}.o_a_proj.weight", v.o_groups, v.o_rank, width),
        out=loader.linear(v.o_groups * v.o_rank, (f"{name}.o_b_proj", c.hidden)),
    )
    if kind == "hca":
        return HcaAttention(**common, main=_compressor(loader, main, v.hca_ratio, D, D))
    if kind == "csa":
        return CsaAttention(
            **common,
            main=_compressor(loader, main, v.csa_ratio, 2 * D, D),
            index=_compressor(loader, index, v.csa_ratio, 2 * Di, Di),
        )
    return WindowAttention(**common)


def _group_out(loader: Loader, name: str, groups: int, rank: int, width: int) -> Tensor | BlockScaled:
    if form := loader.block_form(name):
        return loader.blocks(name, groups * rank, width, form=form)
    return loader.weight(name, groups * rank, width).view(groups, rank, width)


def _shared_expert(loader: Loader, name: str, I: int, D: int) -> ExpertStack:
    """The expert that every token takes as a stack of its own; gate and up are codes if both are of one form."""
    names = [f"{name}.{part}_proj.weight" for part in ("gate", "up", "down")]
    gate, up, down = (loader.block_form(part) for part in names)
    gate_up: Stack = torch.empty(1, 2 * I, D, dtype=loader.dtype, device=loader.device)
    if gate is not None and gate == up:
        gate_up = empty_blocks(gate.joined(I, I), (1, 2 * I, D), loader.device)
    for i, part in enumerate(names[:2]):
        if isinstance(gate_up, BlockScaled):
            loader.fill_blocks(gate_up[0].part(i * I, I), part)
        else:
            loader.fill(gate_up[0, i * I : (i + 1) * I], part)
    last = loader.weight(names[2], D, I)[None] if down is None else loader.blocks(names[2], D, I, form=down).stacked()
    return ExpertStack(gate_up, last)


def _experts(config: ModelConfig, v: DeepseekV4Config, loader: Loader, name: str, hashed: bool) -> Experts:
    E, I, D = v.experts, v.expert_width, config.hidden
    shared = f"{name}.shared_experts"
    own, shared_width = None, loader.held(f"{shared}.gate_proj.weight", I, D)[0]
    if shared_width != I or any(loader.block_form(f"{name}.{part}") for part in EXPERT_PARTS):
        gate_up = loader.experts(f"{name}.experts.gate_up_proj", E, 2 * I, D)
        down = loader.experts(f"{name}.experts.down_proj", E, D, I)
        own = _shared_expert(loader, shared, shared_width, D)
    else:
        gate_up = torch.empty(E + 1, 2 * I, D, dtype=loader.dtype, device=loader.device)
        down = torch.empty(E + 1, D, I, dtype=loader.dtype, device=loader.device)
        loader.fill(gate_up[:E], f"{name}.experts.gate_up_proj")
        loader.fill(gate_up[E, :I], f"{shared}.gate_proj.weight")
        loader.fill(gate_up[E, I:], f"{shared}.up_proj.weight")
        loader.fill(down[:E], f"{name}.experts.down_proj")
        loader.fill(down[E], f"{shared}.down_proj.weight")
    router = Router(
        per_token=v.per_token,
        scaling=v.scaling,
        renormalise=v.renormalise,
        bias=None if hashed else loader.vector(f"{name}.gate.e_score_correction_bias", E),
        table=loader.indices(f"{name}.gate.tid2eid", config.vocab, v.per_token, below=E) if hashed else None,
    )
    return Experts(
        gate=_wide(loader, D, (f"{name}.gate", E)),
        router=router,
        gate_up=gate_up,
        down=down,
        limit=v.limit,
        shared=own,
    )
