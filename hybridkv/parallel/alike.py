"""Alike: what ranks that something else has started must have the same of, compared before anything is loaded.

They say it through the group's store, not by an exchange: where versions or devices differ, exchanges may not work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from hybridkv.parallel.group import JOIN, Group, UnlikeRanks

Words = list[Any]  # a value, and how it is said


def check_alike(
    group: Group, what: str, own: Mapping[str, object], said: Mapping[str, str] | None = None, limit: float = JOIN
) -> None:
    """UnlikeRanks, the same on every rank, if a value of `own` differs on any; names that not all have are left out.
    `said`: words for some values. `limit`: seconds that the others have to come.
    """
    words = {name: (said or {}).get(name, repr(value)) for name, value in own.items()}
    told = {name: [value, words[name]] for name, value in own.items()}
    with group.said(what):
        group.store.set(f"{what} of {group.rank}", json.dumps(told))
        group.meet(what, limit=limit)
        found = [json.loads(group.store.get(f"{what} of {rank}")) for rank in range(group.size)]
    names = [name for name in own if all(name in each for each in found)]
    unlike = [text for name in names if (text := _unlike(name, [each[name] for each in found]))]
    if unlike:
        group.let_all_hear()
        raise UnlikeRanks(f"{'; '.join(unlike)}: start all ranks with the same options, model and version of hybridkv")


def check_versions(group: Group) -> None:
    """The same of what exchanges depend on."""
    version = import_module("hybridkv").__version__  # it stands above this module
    own = {"version": version, "torch": ".".join(torch.__version__.split(".")[:2]), "device": group.device.type}
    check_alike(group, "the versions", own, limit=group.timeout)  # all have just met


def _unlike(name: str, found: list[Words]) -> str:
    """What a name stands for on which ranks: "budget is 64 on rank 1, None on rank 0"; empty: all have the same."""
    kinds: list[tuple[Words, list[int]]] = []
    for rank, words in enumerate(found):
        for other, ranks in kinds:
            if other[0] == words[0]:
                ranks.append(rank)
                break
        else:
            kinds.append((words, [rank]))
    if len(kinds) == 1:
        return ""
    return f"{name} is " + ", ".join(f"{words[1]} on {_named(ranks)}" for words, ranks in reversed(kinds))


def _named(ranks: list[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
