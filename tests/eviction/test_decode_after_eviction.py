"""Decoding on a compacted cache is decoding on a full one with the dropped entries out of sight."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from long_form import spread
from numerics import assert_same_bytes, logit_gap

from eviction.harness import MaskedRun, masked_logits
from hybridkv.eviction import POLICIES, Ada, Pyramid
from hybridkv.eviction.named import find_policy
from hybridkv.eviction.policies import SnapKV

KINDS = ("llama", "qwen3_5")
PROMPT, ALL = 150, 180
CHOICES = [(name, "head") for name, make in POLICIES.items() if not make().needs_replay]
CHOICES += [("snapkv", "layer"), ("snapkv", "global"), ("tova", "global")]
CHOICES += [("auto", "head"), ("auto", "layer"), ("auto", "global"), ("peak:spread=all", "head")]
CHOICES += [(Ada(), "head"), (Pyramid(steepness=4.0), "head"), (Ada(Pyramid(steepness=4.0)), "head")]
NAMES = [f"{p if isinstance(p, str) else type(p).__name__}-{s}" for p, s in CHOICES]


@spread("kind, policy, scope", KINDS, [pytest.param(*choice, id=name) for choice, name in zip(CHOICES, NAMES)])
def test_decode_equals_a_full_cache_with_the_dropped_entries_masked(
    kind: str, policy: object, scope: str, run_of: Callable, oracle: Callable
) -> None:
    found = oracle(kind)
    ids = found.ids[:ALL]
    run = run_of(kind, budget=48, policy=policy, scope=scope)
    first = run.feed(ids[:PROMPT], 64)
    before = run.manager.held_pages("r")["attention"]
    chosen = run.evict(ids[:PROMPT])
    lengths = run.manager.lengths("r")["attention"]
    assert lengths.sum() <= 48 * len(lengths) and run.manager.position("r") == PROMPT
    assert run.manager.held_pages("r")["attention"] < before
    if find_policy(policy, scope=scope).spread is not None:
        assert len(set(lengths.tolist())) > 1, "streams were meant to differ in length"
    else:
        assert (lengths == 48).all()
    if scope != "head":
        assert all((a == layer[0]).all() for layer in chosen for a in layer)
    if scope == "global":
        assert all((layer[0] == chosen[0][0]).all() for layer in chosen)
    got = torch.cat((first, run.feed(ids[PROMPT:], 1)))

    masked = MaskedRun(run.model, run.config, run.drops["r"])
    want = torch.cat((masked.feed(ids[:PROMPT], 64), masked.feed(ids[PROMPT:], 1)))
    assert logit_gap(want, got) < 1e-5
    assert logit_gap(masked_logits(found, ids, run.drops["r"]), got) < found.bound
    # and the dropped entries were not idle: with them in sight the answers are others
    assert logit_gap(found.logits[PROMPT:ALL], got[PROMPT:]) > 1e-3
    run.manager.check_integrity()


@pytest.mark.parametrize("dtype", ("bf16", "fp8"))
@pytest.mark.parametrize("policy", (SnapKV(pooling="avg"), Ada()), ids=("snapkv", "ada"))
@pytest.mark.parametrize("kind", KINDS)
def test_small_dtypes_decode_as_their_own_masked_cache(
    kind: str, policy: object, dtype: str, run_of: Callable, oracle: Callable
) -> None:
    ids = oracle(kind).ids[:ALL]
    run = run_of(kind, budget=48, policy=policy, kv_dtype=dtype)
    first = run.feed(ids[:PROMPT], 64)
    run.evict(ids[:PROMPT])
    got = torch.cat((first, run.feed(ids[PROMPT:], 1)))
    masked = MaskedRun(run.model, run.config, run.drops["r"])
    want = torch.cat((masked.feed(ids[:PROMPT], 64), masked.feed(ids[PROMPT:], 1)))
    # a last-bit difference may round a stored key the other way, which is worth one step of the format
    assert logit_gap(want, got) < {"bf16": 5e-3, "fp8": 5e-2}[dtype]
    assert (want.argmax(-1) == got.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", ("f32", "bf16", "fp8"))
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_move_byte_for_byte_in_ascending_order(kind: str, dtype: str, run_of: Callable) -> None:
    torch.manual_seed(0)
    run = run_of(kind, budget=40, policy=Ada(), kv_dtype=dtype)
    ids = torch.randint(0, 97, (150,)).tolist()
    run.feed(ids, 64)
    heads = range(run.model.config.kv_heads)
    before = {(layer, g): run.stream(layer, g) for layer in run.layers for g in heads}
    chosen = run.evict(ids)
    for i, layer in enumerate(run.layers):
        for g in heads:
            keep = chosen[i][g]
            assert (keep[1:] > keep[:-1]).all()
            for name, was in before[layer, g].items():
                assert_same_bytes(was[torch.from_numpy(keep)], run.stream(layer, g)[name])


def test_position_and_not_length_turns_the_keys(run_of: Callable, oracle: Callable) -> None:
    """The control: the same decode with the length as position is far off, so the tests above can tell."""
    found = oracle("llama")
    ids = found.ids[:ALL]
    run = run_of("llama", budget=48, policy="snapkv:pooling=none")  # every stream has 48 entries
    run.feed(ids[:PROMPT])
    run.evict(ids[:PROMPT])
    step = run.manager.prepare_forward([("r", 1)])
    step = replace(step, index=replace(step.index, positions=torch.tensor([48])))
    wrong = run.runner.forward(run.runner.inputs([ids[PROMPT : PROMPT + 1]], [0], step))
    want = masked_logits(found, ids[: PROMPT + 1], run.drops["r"])[PROMPT:]
    assert logit_gap(want, wrong) > 1e-3
