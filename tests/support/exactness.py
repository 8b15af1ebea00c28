"""Driving a prompt through exact mode in any pattern of steps, and comparing all that came of it, bit by bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from hybridkv import LLM, CacheConfig
from hybridkv.models import attention

BUDGET, STEPS = 96, 5


class Models:
    """Tiny models with room for more than 4096 tokens, each opened once."""

    def __init__(self, place: Path, device: str) -> None:
        self.place, self.device = place, device
        self.open = cache(self._open)

    def _open(self, kind: str, dtype: str, kv: str, budget: int | None, exact: bool = True, context: int = 512) -> LLM:
        folder = self.place / kind
        if not folder.exists():
            tiny.save(kind, folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
        cache_config = CacheConfig(kv_dtype=kv, page_size=16, budget=budget, window=24, recent=16)
        return LLM(str(folder), self.device, dtype, exact, cache_config, max_requests=3, max_context=context)


@dataclass
class Trace:
    """All that one run of a prompt left behind."""

    logits: list[Tensor] = field(default_factory=list)
    attended: list[list[Tensor]] = field(default_factory=list)  # [steps][layers]
    found: dict[str, Any] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)  # of each call of the exact attention

    def flat(self) -> dict[str, Tensor]:
        out = {"logits": torch.cat(self.logits)}
        out |= {f"attention {i}": torch.cat(x) for i, x in enumerate(zip(*self.attended, strict=True))}
        return out | self.found


def drive(
    llm: LLM, ids: list[int], chunk_ends: list[int], monkeypatch: pytest.MonkeyPatch, company: bool = False
) -> Trace:
    """The prompt in steps that end at `chunk_ends`, then eviction where the model has a budget, then greedy steps."""
    manager, trace, here = llm.manager, Trace(), slice(0)
    evictor = llm.engine.evictor
    request = SimpleNamespace(key="it", prompt_tokens=len(ids), evictions={}, hold=False)
    request.eviction = evictor.default if evictor is not None else None
    if request.eviction is not None:
        trace.found["weights"] = llm.engine.stream_weights  # reading for them is not watched
    exact = attention.attention_exact

    def watched(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            out = attend(*args)
            trace.attended[-1].append(out[here].clone())
            return out

        return call

    def counted(q: Tensor, *args: Any) -> Tensor:
        trace.rows.append(len(q))
        return exact(q, *args)

    for name in ("attend", "attend_exact"):
        monkeypatch.setattr(attention, name, watched(getattr(attention, name)))
    monkeypatch.setattr(attention, "attention_exact", counted)
    monkeypatch.setattr(llm.engine.runner, "graphs", None)  # what a graph replays cannot be watched
    others = {"one": tiny.token_ids(4000, seed=1), "many": tiny.token_ids(4000, seed=2)} if company else {}
    for key in ("it", *others):
        manager.admit_request(key)

    def step(tokens: list[int]) -> Tensor:
        nonlocal here
        plan = [("it", tokens)]
        if company:
            at = {key: manager.position(key) for key in others}
            plan.insert(0, ("one", others["one"][at["one"] : at["one"] + 1]))
            plan.append(("many", others["many"][at["many"] : at["many"] + 5]))
        counts = [(key, len(part)) for key, part in plan]
        begin = int(company)
        here = slice(begin, begin + len(tokens))
        trace.attended.append([])
        ready = manager.prepare_forward(counts)
        inputs = llm.engine.runner.inputs([p for _, p in plan], range(here.start, here.stop), ready)
        logits = llm.engine.runner.forward(inputs)
        manager.commit(counts)
        return logits

    for a, b in pairwise([0, *chunk_ends]):
        trace.logits.append(step(ids[a:b]))
    remember(trace, llm, "prompt")
    if request.eviction is not None:
        assert evictor is not None
        layers = evictor.layers(request, manager, weighted=True)
        trace.found |= {f"captured {i}": layer.queries for i, layer in enumerate(layers)}
        trace.found |= {f"scores {i}": evictor.policy.score(layer) for i, layer in enumerate(layers)}
        for policy in ("snapkv", request.eviction.policy):  # sums and even budgets; peaks and shared ones
            keep = evictor.choose(request, manager, replace(request.eviction, policy=policy))
            assert sum(len(x) for k in keep for x in k) == BUDGET * sum(map(len, keep))
            kept = {f"keep by {policy} {i} {g}": x for i, k in enumerate(keep) for g, x in enumerate(k)}
            trace.found |= {name: torch.from_numpy(x) for name, x in kept.items()}
        evictor.evict(request, manager)
        assert manager.lengths("it")["attention"].mean() == BUDGET
    for _ in range(STEPS):
        trace.logits.append(step([int(trace.logits[-1][-1].argmax())]))
    remember(trace, llm, "end")
    for key in ("it", *others):
        manager.release_request(key)
    manager.check_integrity()
    monkeypatch.undo()
    return trace


def remember(trace: Trace, llm: LLM, when: str) -> None:
    """K/V bytes in the order of the entries, and the state."""
    manager = llm.manager
    slot, table = manager.slot_of["it"], manager.tables["attention"]
    for layer in table.schema.layers:
        lane, rows = table.schema.place(layer)
        pages = torch.from_numpy(table.pages[slot, rows]).to(manager.device)
        for g, length in enumerate(table.lengths[slot, rows].tolist()):  # heads may hold different numbers
            entry = torch.arange(length, device=manager.device)
            for name, pool in table.pool.lane(lane).items():
                place = pages[g, entry // pool.shape[1]].long(), entry % pool.shape[1]
                trace.found[f"{name} {layer} {g} {when}"] = pool[place].clone()  # [length, ...] as stored
    for layer in range(llm.config.layers):
        for name, rows in manager.state.layer(layer).items():
            if name != "queries":
                trace.found[f"{name} {layer} {when}"] = rows[slot].clone()


def differing(one: Trace, other: Trace) -> list[str]:
    a, b = one.flat(), other.flat()
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]


def bits(x: Tensor) -> Tensor:
    """The stored bits: unlike values, they tell 0 from -0."""
    return x.contiguous().view(torch.uint8) if x.is_floating_point() else x
