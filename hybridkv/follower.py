"""One of the ranks that `LLM(tp=n)` starts: opens its part of the model and follows rank 0 until that ends.

    python -m hybridkv.follower      settings on standard input: one line of JSON (parallel/launch.py)

Exit codes: 0 rank 0 has closed the model, 2 it cannot be opened here, 3 the group has ended.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import traceback
from typing import Any, NoReturn

from hybridkv.parallel.signs import DUMP, FAILED, leave_the_end_to_rank_0, said_by


def main() -> NoReturn:
    """The whole life of a rank."""
    _open_and_follow(begin())


def begin() -> dict[str, Any]:
    """What rank 0 has told. From here on this process ends with it."""
    leave_the_end_to_rank_0()
    faulthandler.register(DUMP)
    told = json.loads(_first_line())
    threading.Thread(target=_watch, daemon=True).start()
    return told


def _open_and_follow(told: dict[str, Any]) -> NoReturn:
    # imported here, since it takes seconds, in which signals and the end of rank 0 are to be heeded already
    import torch

    from hybridkv.config import CacheConfig, ReuseConfig
    from hybridkv.errors import HybridKVError
    from hybridkv.eviction.policy_words import policy_of_words
    from hybridkv.llm import LLM
    from hybridkv.parallel.group import Group, GroupError, reason_of
    from hybridkv.parallel.launch import Place

    rank, group = told["rank"], None
    try:
        group = Group.join(rank, told["size"], torch.device(told["device"]), told["meeting"], told["timeout"])
        settings: dict[str, Any] = told["settings"]
        settings["cache"] = CacheConfig(**settings["cache"] | {"policy": policy_of_words(settings["cache"]["policy"])})
        settings["reuse"] = None if settings["reuse"] is None else ReuseConfig(**settings["reuse"])
        settings["device"] = told["device"]
        LLM(**settings, tp=Place(group))  # it exits at the end of rank 0's
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)  # the watching thread is in a read
    except GroupError as problem:
        leave(rank, problem, FAILED)
    except HybridKVError as problem:
        if group is not None:
            group.leave_word(str(problem))
        leave(rank, problem, 2)
    except Exception as problem:  # no memory, for example
        traceback.print_exc()
        why = reason_of(problem)
        if group is not None:
            group.leave_word(why)
        leave(rank, why, 1)
    raise AssertionError("a rank that follows does not come back")


def _first_line() -> bytes:
    found = b""
    while not found.endswith(b"\n") and (more := os.read(0, 1)):
        found += more
    return found


def _watch() -> None:
    """Rank 0 holds the other end of standard input: if it is gone, so is this process."""
    while os.read(0, 4096):
        pass
    os._exit(FAILED)


def leave(rank: int, problem: object, code: int) -> NoReturn:
    """End, and say why."""
    print(said_by(rank, problem), file=sys.stderr, flush=True)
    os._exit(code)  # no wait for threads of a group that is gone


if __name__ == "__main__":
    main()
