"""How top_entries (topk.py) searches a row: groups, levels and tiles, and the bytes they take. No torch is needed."""

from __future__ import annotations

RATIO = 4  # groups of one level in a group of the next
WIDE_RATIO = 8  # the same at most where k is above LOOSE
KEPT = 1024  # groups of a level that there is room for, at least
LOOSE = 1024  # k: up to here there is room for 2 k groups or more
MAX_CHOICES = 16384  # entries that a program chooses from, whatever k is
TILE = 2048  # entries that a program of the first launch reads


def plan_levels(width: int, k: int) -> tuple[int, int, int]:
    """Groups of a level that there is room for, the ratio of one level's groups to the next, how many levels."""
    kept = 1 << max(k - 1, 0).bit_length()  # the next power of two
    kept, ratio = (max(KEPT, 2 * kept), RATIO) if k <= LOOSE else (kept, min(WIDE_RATIO, MAX_CHOICES // kept))
    levels = 0
    while -(-width // ratio**levels) > kept * ratio:
        levels += 1
    return kept, ratio, levels


def plan_tiles(width: int, ratio: int, levels: int) -> tuple[int, int, int]:
    """Entries that a program reads, how many programs a row takes, and the groups of all its levels together."""
    tile = max(TILE, ratio ** (levels + 1))  # groups that lie together are one program's
    tiles = -(-width // tile) if levels else 0
    return tile, tiles, sum(tiles * (tile // ratio**i) for i in range(1, levels + 1))


def scratch_bytes(rows: int, width: int, k: int) -> int:
    """Bytes that top_entries takes beside its result for logits [rows, width]."""
    if not rows or not k:
        return 0
    kept, ratio, levels = plan_levels(width, k)
    groups = plan_tiles(width, ratio, levels)[2]
    return 4 * rows * (groups + kept) if levels else 0
