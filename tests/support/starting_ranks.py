"""Ranks that something else has started, as torchrun does, and that open a model: for parallel/test_starting.py."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

import hybridkv
from hybridkv import LLM, CacheConfig, SamplingParams, opening, ranks
from hybridkv.errors import HybridKVError
from hybridkv.parallel import launch
from hybridkv.parallel.group import Group

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def start(
    group: Group, port: int, models: list[str], settings: dict[str, dict[str, Any]], broken: dict[str, str]
) -> list[Any]:
    """The kind of an error and its words, or of rank 0 ["opened", tokens]; the others end inside of LLM. `settings`,
    `broken`: of some ranks.
    """
    group.meet("start")  # else it may be gone before the others have a group
    group.close()
    place = {"RANK": group.rank, "WORLD_SIZE": group.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    number = str(group.rank)
    if "no comparison" in broken.values():
        os.environ[ranks.SECONDS] = "5"
    how: dict[str, Any] = dict(device="cpu", dtype="float32", max_requests=2, max_context=256, step_tokens=64)
    how |= settings.get(number, {})
    how["cache"] = CacheConfig(**how.get("cache", {}))
    _break(broken.get(number, ""))
    try:
        with LLM(models[group.rank % len(models)], tp=group.size, **how) as llm:
            return ["opened", llm.generate([[5, 6, 7]], GREEDY)[0].token_ids]
    except (HybridKVError, RuntimeError) as problem:
        return [type(problem).__name__, str(problem)]


def _break(what: str) -> None:
    """Something of this rank is otherwise than on the others."""
    if what == "version":
        hybridkv.__version__ = "0.2.9"
    elif what == "torch":
        torch.__version__ = "1.2.3+cpu"
    elif what == "no comparison":
        launch.check_versions = lambda group: None
    elif what == "joined":
        opening.check_exact = _fails
    elif what == "load":
        ranks.load_sharded = _fails
    elif what == "load, late":  # all others have loaded
        ranks.load_sharded = _after_the_others(_fails)
    elif what == "load, last":
        ranks.load_sharded = _after_the_others(ranks.load_sharded)
    elif what == "load, without end":
        ranks.load_sharded = _never_ends


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no memory here. More of it")


def _never_ends(*parts: Any, **_: Any) -> Any:
    while True:
        time.sleep(0.01)
        parts[6](1, 100)  # its progress


def _after_the_others(do: Callable[..., Any]) -> Callable[..., Any]:
    def load(*parts: Any, **how: Any) -> Any:
        group = parts[2]
        while not all(group.store.check([f"loaded/{rank}"]) for rank in range(group.size) if rank != group.rank):
            time.sleep(0.01)
        return do(*parts, **how)

    return load
