"""The memory that choosing survivors (select.py) takes, and the blocks that bound it. No torch is needed."""

from __future__ import annotations

from hybridkv.kernels.topk_levels import MAX_CHOICES, scratch_bytes

TEMPORARY_BYTES = 64 << 20  # what a selection takes at once, beside its result
# keys, masks, sorted keys and indices are 18 bytes a score; sorting pairs on a GPU takes buffers of up to 40 more
SORT_BYTES_PER_SCORE = 64
SHARED_BINS = 256  # values of a digit, by which select_shared narrows its bounds
DIGITS = 4  # of a key
SHARED_STATE = 4  # numbers that it keeps for a row, or for a group, beside its counts


def rows_at_once(length: int) -> int:
    """Rows of `length` scores that the torch form sorts together."""
    return max(1, TEMPORARY_BYTES // (SORT_BYTES_PER_SCORE * max(1, length)))


def kernel_rows(length: int, width: int) -> int:
    """Rows of `length` scores that the kernel searches in one launch."""
    return max(1, TEMPORARY_BYTES // max(1, scratch_bytes(1, length, width)))


def runs_kernel(width: int) -> bool:
    """Whether the kernel has room for this many survivors of a row."""
    return width <= MAX_CHOICES // 2


def select_bytes(rows: int, length: int, width: int, gpu: bool = True) -> int:
    """Bytes that select_entries takes at the most for scores [rows, length]: its result and its temporaries."""
    result = 4 * rows * width
    if gpu and runs_kernel(width):
        block = min(rows, kernel_rows(length, width))
        # results of blocks are put together at the end, when the scratch is free again
        return result + max(scratch_bytes(block, length, width), result if block < rows else 0)
    return result + min(rows, rows_at_once(length)) * SORT_BYTES_PER_SCORE * max(length, width)


def shared_scratch(rows: int, groups: int) -> int:
    """Whole numbers of 4 bytes that the kernel of select_shared.py counts with."""
    of_row = DIGITS * 2 * SHARED_BINS + SHARED_STATE + DIGITS
    return rows * of_row + groups * (DIGITS * SHARED_BINS + SHARED_STATE + DIGITS)


def shared_bytes(rows: int, length: int, groups: int, gpu: bool = True) -> int:
    """Bytes that select_shared takes at the most for scores [rows, length]: its result and its temporaries."""
    result = 4 * rows * length + 8 * rows
    if gpu:
        return result + 4 * shared_scratch(rows, groups)
    # keys, one comparison of all of them with a bound, and that as numbers to be added; then the rows are sorted
    return result + max(9 * rows * length, min(rows, rows_at_once(length)) * SORT_BYTES_PER_SCORE * length)
