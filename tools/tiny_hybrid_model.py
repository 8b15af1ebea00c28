"""The model that is trained: transformers' Qwen3_5ForCausalLM, with a forward pass that is fast at this size.

The parameters are transformers' own, so saving is `save_pretrained`. The pass over them is written anew, because a
model of a few million parameters is bound by launches and by memory: all rows of a batch lie behind one another,
[N, C] with N = rows x length, so that a length changes nothing for what torch.compile has compiled. Only the attention
and the delta rule see rows; the delta rule is fla's where it is installed. `difference` holds the pass against
transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridkv.bench.peers import tuned_together

DeltaRule = Callable[..., tuple[Tensor, Any]]
NEAR = 0.08  # how far fla's bf16 kernels may be from the same rule in float32: norm of the difference / norm


def model_config(vocab: int, hidden: int, mlp: int, end: int) -> Any:
    """Eight layers, each fourth one full attention."""
    from transformers import Qwen3_5TextConfig

    heads = hidden // 64
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_conv_kernel_dim=4,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        use_cache=True,
    )  # fmt: skip


def new_model(config: Any, seed: int) -> Any:
    """Random weights. The decays begin slow (time steps of 0.001 to 0.1), unlike transformers' own start values, with
    which a state forgets all within a few tokens.
    """
    from transformers import Qwen3_5ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config).float()
    usual = 0.56 * config.hidden_size**-0.5
    for name, p in model.named_parameters():
        if p.ndim == 2:
            into_stream = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(p, std=usual / (2 * config.num_hidden_layers) ** 0.5 if into_stream else usual)
        elif name.endswith("A_log"):
            p.data.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(p).uniform_(-6.9, -2.3))
            p.data = step + torch.log(-torch.expm1(-step))  # softplus of it is the step
    model.tie_weights()
    return model


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a batch stand in their rows."""

    length: int
    first: Tensor  # [3, N, 1] 1 where there is a token 1, 2, 3 places before, else 0
    cos: Tensor  # [N, 1, rotated]
    sin: Tensor


def rows_of(model: Any, tokens: int, length: int) -> Rows:
    """For a batch of `tokens` in rows of `length`."""
    weight = model.model.embed_tokens.weight
    places = torch.arange(length, device=weight.device)
    cos, sin = model.model.rotary_emb(weight[:1].float(), places[None, None].expand(3, 1, -1))
    rows = tokens // length
    first = torch.stack([(places >= back).float() for back in (1, 2, 3)])
    return Rows(length, first.repeat(1, rows)[..., None], *(t[0].repeat(rows, 1)[:, None] for t in (cos, sin)))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """[N, C] -> [N, C], zero-centred weight, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def before_delta(layer: Any, x: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    """The stream -> q, k, v [N, heads, 64], decay and beta [N, heads], z."""
    part = layer.linear_attn
    x = norm(x, layer.input_layernorm.weight)
    mixed, z = F.linear(x, part.in_proj_qkv.weight), F.linear(x, part.in_proj_z.weight)
    taps = part.conv1d.weight[:, 0]  # [C, 4]
    wide = mixed.float()
    summed = wide * taps[:, 3]
    for back in (1, 2, 3):
        summed = summed + F.pad(wide, (0, 0, back, 0))[:-back] * first[back - 1] * taps[:, 3 - back]
    q, k, v = F.silu(summed).to(mixed.dtype).view(x.shape[0], 3, -1, 64).unbind(1)
    beta = F.linear(x, part.in_proj_b.weight).sigmoid()
    step = F.softplus(F.linear(x, part.in_proj_a.weight).float() + part.dt_bias)
    return q.contiguous(), k.contiguous(), v.contiguous(), -part.A_log.exp() * step, beta, z


def after_delta(layer: Any, x: Tensor, out: Tensor, z: Tensor) -> Tensor:
    """What the delta rule gave [N, heads, 64] -> the stream after the layer."""
    part = layer.linear_attn
    out = out.float()
    out = part.norm.weight * (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6))
    gated = out.flatten(1) * F.silu(z.float())
    return feed_forward(layer, x + F.linear(gated, part.out_proj.weight))


def before_attention(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The stream -> q, k, v [N, heads, 64] and the gate."""
    part = layer.self_attn
    n = x.shape[0]
    x = norm(x, layer.input_layernorm.weight)
    q, gate = F.linear(x, part.q_proj.weight).view(n, -1, 128).chunk(2, -1)
    k, v = (F.linear(x, p.weight).view(n, -1, 64) for p in (part.k_proj, part.v_proj))
    q, k = (rotated(norm(t, w), cos, sin).to(v.dtype) for t, w in ((q, part.q_norm.weight), (k, part.k_norm.weight)))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), gate.flatten(1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, heads, 64]: the first dimensions turned by the token's place, the others as they are."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    a, b = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def after_attention(layer: Any, x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    """What the attention gave [N, heads, 64] -> the stream after the layer."""
    out = out.flatten(1) * torch.sigmoid(gate)
    return feed_forward(layer, x + F.linear(out, layer.self_attn.o_proj.weight))


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The second half of every layer."""
    y = norm(x, layer.post_attention_layernorm.weight)
    wide = F.silu(F.linear(y, layer.mlp.gate_proj.weight)) * F.linear(y, layer.mlp.up_proj.weight)
    return x + F.linear(wide, layer.mlp.down_proj.weight)


def head(model: Any, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The stream and the next tokens [N] -> loss of each token [N], and whether it would have been said."""
    logits = F.linear(norm(x, model.model.norm.weight), model.model.embed_tokens.weight).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


class Pass:
    """The forward pass. `compiled` and `delta` say how it is run."""

    def __init__(self, model: Any, delta: DeltaRule, compiled: bool) -> None:
        self.model, self.delta = model, delta
        pieces = (before_delta, after_delta, before_attention, after_attention, head)
        if compiled:
            pieces = tuple(torch.compile(piece, dynamic=False) for piece in pieces)
        self.before_delta, self.after_delta, self.before_attention, self.after_attention, self.head = pieces

    def stream(self, ids: Tensor, rows: Rows) -> Tensor:
        """ids [N] -> [N, hidden] before the last norm."""
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        shape = (-1, rows.length)
        for layer in self.model.model.layers:
            if hasattr(layer, "linear_attn"):
                *of_rule, z = self.before_delta(layer, x, rows.first)
                q, k, v, g, beta = (t.unflatten(0, shape) for t in of_rule)
                out, _ = self.delta(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
                x = self.after_delta(layer, x, out.flatten(0, 1), z)
            else:
                *qkv, gate = self.before_attention(layer, x, rows.cos, rows.sin)
                q, k, v = (t.unflatten(0, shape).transpose(1, 2) for t in qkv)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = self.after_attention(layer, x, out.transpose(1, 2).flatten(0, 1), gate)
        return x

    def __call__(self, ids: Tensor, targets: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """ids and targets [N] -> loss [N] float32, right [N] bool."""
        return self.head(self.model, self.stream(ids, rows), targets)


def torch_rule() -> DeltaRule:
    """transformers' own delta rule in torch, whatever else is installed."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)


def delta_rule(device: str) -> tuple[DeltaRule, str]:
    """The rule to train with, and a line that says which; fla's only if it agrees with torch's, gradients as well."""
    if device != "cuda":
        return torch_rule(), "delta rule: torch (no GPU)"
    said = []
    for name, find in (("fla's", _fla_rule), ("fla's with a decay for each channel", _fla_channel_rule)):
        try:
            rule = find()
            with tuned_together():
                worst = _rule_difference(rule, torch_rule())
        except Exception as problem:  # a kernel that does not compile here must not end the run
            said.append(f"{name} does not run here ({problem!r})")
            continue
        if worst <= NEAR:
            return rule, "; ".join([*said, f"delta rule: {name} (within {worst:.4f} of torch's, gradients as well)"])
        said.append(f"{name} is wrong here (off by {worst:.3f})")
    return torch_rule(), f"DELTA RULE: TORCH, several times slower: {'; '.join(said)}"


def _fla_rule() -> DeltaRule:
    """fla refuses its backward pass on Hopper with some versions of Triton, where it was wrong for some shapes. Whether
    it is for ours is found out by comparing it.
    """
    import fla.ops.common.chunk_o as chunk_o  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    chunk_o.TRITON_ABOVE_3_7_1 = True
    return chunk_gated_delta_rule


def _fla_channel_rule() -> DeltaRule:
    """A more general rule, by other kernels; the decay of a head stands in all its channels."""
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]

    def rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **how: Any) -> tuple[Tensor, Any]:
        decays = g.float()[..., None].expand(*g.shape, k.shape[-1]).contiguous()
        return chunk_kda(q, k, v, decays, beta, **how)

    return rule


def _rule_difference(rule: DeltaRule, other: DeltaRule) -> float:
    """The largest difference of outputs and of each gradient, at the size of a step: fla tunes its kernels now."""
    made = torch.Generator("cuda").manual_seed(0)
    shape = (64, 1024, 4)
    q, k, v = (torch.randn(*shape, 64, device="cuda", generator=made) for _ in range(3))
    g = -torch.rand(shape, device="cuda", generator=made) * 0.2
    beta = torch.rand(shape, device="cuda", generator=made)
    back = torch.randn(*shape, 64, device="cuda", generator=made)
    found = []
    for each, dtype in ((rule, torch.bfloat16), (other, torch.float32)):
        leaves = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in (q, k, v)] + [g.clone().requires_grad_()]
        leaves.append(beta.to(torch.bfloat16).to(dtype).requires_grad_())
        out, _ = each(*leaves[:3], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)
        out.backward(back.to(out.dtype))
        found.append([out, *(t.grad for t in leaves)])
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*found))


@torch.no_grad()
def difference(model: Any, run: Pass, ids: Tensor) -> float:
    """How far this pass is from transformers' own on rows of ids [B, T]: largest difference of logits / largest one."""
    ours = run.stream(ids.flatten(), rows_of(model, ids.numel(), ids.shape[1]))
    ours = F.linear(norm(ours, model.model.norm.weight), model.model.embed_tokens.weight).float()
    theirs = model(ids, use_cache=False).logits.flatten(0, 1).float()
    return float((ours - theirs).abs().max() / theirs.abs().max())
