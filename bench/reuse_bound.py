"""How much of a trace any policy could reuse in so many bytes, if it knew all requests beforehand: no more than this.

Between two requests that read a column it is kept or not, and while it is kept others cannot have its bytes. A request
needs the pages of its own text, so others share what is left. Which columns are kept when, for the most tokens, is a
linear program, once a part of a column may be kept; prices of room at each request bound it from above, whatever they
are, and are moved until they bound it well. States weigh nothing here, and no policy is so lucky: the true limit is
lower. What no mark allows does not count, that is what `Simulator` finds without a limit.

    python bench/reuse_bound.py [--seeds 1 3] [--only agent] [--gib 16 6]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from reuse_simulation import Numbers, Simulator, Sizes
from reuse_traces import TRACES, Asked

from hybridkv.cache.columns import KEY_DTYPE, Columns

STEPS = 3000  # of the prices


class Needs(NamedTuple):
    """What a trace could reuse: `count` columns that request `after` reads and request `before` had read last."""

    before: np.ndarray  # [n]
    after: np.ndarray  # [n]
    count: np.ndarray  # [n]
    own: np.ndarray  # [requests] columns that each needs itself
    tokens: int  # of all prompts


def needs(trace: Sequence[Asked], sizes: Sizes) -> Needs:
    """Every column of every prompt, with the request that had it last."""
    endless, numbers = Simulator(0, sizes=sizes), Numbers()
    names: dict[tuple[int, bytes], int] = {}
    last: dict[int, int] = {}
    found: dict[tuple[int, int], int] = {}
    own, size = [], sizes.q * KEY_DTYPE.itemsize
    for i, asked in enumerate(trace):
        most = endless.ask(asked) // sizes.q
        keys = Columns.keys(np.concatenate([numbers.tokens(asked.prompt), numbers.tokens(asked.answer)])[:-1])
        own.append(len(keys) // size)
        name = 0
        for j in range(own[-1]):
            name = names.setdefault((name, keys[j * size : (j + 1) * size]), len(names) + 1)
            if j < most:
                found[last[name], i] = found.get((last[name], i), 0) + 1
            last[name] = i
    pairs = np.array(list(found), np.int64).reshape(-1, 2)
    count = np.array(list(found.values()), np.float64)
    return Needs(pairs[:, 0], pairs[:, 1], count, np.array(own), sum(asked.tokens for asked in trace))


def bound(trace: Sequence[Asked], limit: int, sizes: Sizes | None = None) -> float:
    """The share of prompt tokens that no policy can exceed in `limit` bytes."""
    sizes = sizes or Sizes()
    before, after, count, own, tokens = needs(trace, sizes)
    room = np.maximum(0.0, limit / sizes.column_bytes - own)  # columns of others, at each request
    price, best = np.zeros(len(own)), float(count.sum())
    for step in range(STEPS):
        paid = np.concatenate([[0.0], np.cumsum(price)])
        left = 1.0 - (paid[after] - paid[before + 1])  # of what each column is worth, once its room is paid for
        kept = left > 0
        best = min(best, float((price * room).sum() + (left * count)[kept].sum()))
        held = np.zeros(len(own) + 1)
        np.add.at(held, before[kept] + 1, count[kept])
        np.add.at(held, after[kept], -count[kept])
        over = np.cumsum(held)[:-1] - room
        price = np.maximum(0.0, price + 0.3 / (1 + step / 50) * over / max(1.0, np.abs(over).max()))
    return best * sizes.q / tokens


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs=2, default=[1, 3], metavar=("FIRST", "LAST"))
    options.add_argument("--only", nargs="*", default=list(TRACES), choices=list(TRACES))
    options.add_argument("--gib", nargs="*", type=float, default=[16.0, 6.0])
    given = options.parse_args()
    seeds = range(given.seeds[0], given.seeds[1] + 1)
    print("| GiB | " + " | ".join(given.only) + " |")
    print("|---|" + "---|" * len(given.only))
    for gib in given.gib:
        shown = [fmean(bound(TRACES[name](seed), int(gib * 2**30)) for seed in seeds) for name in given.only]
        print(f"| {gib:g} | " + " | ".join(f"{share:.3f}" for share in shown) + " |", flush=True)


if __name__ == "__main__":
    main()
