"""Which entries survive where streams share a budget, written out in loops."""

from collections.abc import Sequence

import numpy as np


def share_by_loops(
    scores: Sequence[Sequence[Sequence[float]]], n: np.ndarray, budget: int, recent: int, floor: float, layers: float
) -> tuple[list[list[list[int]]], list[float]]:
    """Entries that stay of each stream of each layer, ascending, and the scores of the last ones that were let in.

    Each stream keeps its recent entries and its best up to the floor; the streams of a layer win a part of its budget
    among themselves; the best of all that is left in any stream of any layer fill the rest.
    """
    want: dict[tuple[int, int], set[int]] = {}
    rest, bounds = [], []
    for i, lengths in enumerate(n.tolist()):
        room, left = 0, []
        for g, length in enumerate(lengths):
            row, old = scores[i][g], max(0, length - recent)
            ranked = sorted(range(old), key=lambda j, row=row: (-row[j], j))
            least = min(length, max(1, int(budget * floor), length - old))
            sure = least - (length - old)
            want[i, g] = set(ranked[:sure]) | set(range(old, length))
            room += max(min(length, int(budget * layers)), least) if layers < 1 else budget
            left += [(-row[j], i, g, j) for j in ranked[sure:]]
            bounds += [row[j] for j in ranked[:sure][-1:]]
        room = max(0, room - sum(len(want[i, g]) for g in range(len(lengths))))
        left.sort()
        for _, _, g, j in left[:room]:
            want[i, g].add(j)
        bounds += [-each[0] for each in left[:room][-1:]]
        rest += left[room:]
    room = max(0, budget * n.size - sum(map(len, want.values()))) if layers < 1 else 0
    rest.sort()
    for _, i, g, j in rest[:room]:
        want[i, g].add(j)
    bounds += [-each[0] for each in rest[:room][-1:]]
    return [[sorted(want[i, g]) for g in range(n.shape[1])] for i in range(len(n))], bounds
