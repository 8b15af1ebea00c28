"""The launches of sample_rows, for all rows together, whatever each asks for. A row that needs nothing of a kernel
leaves it at once, and a kernel that no row needs is not launched:

    survey, bound    adjusted rows, small top-k   the best token; a bound that the k best tokens of a row reach
    list             small top-k                  the tokens that reach the bound
    draw             rows without top-k           the token drawn without top-p, of each piece of a row
    weigh            of these, with top-p         the weight before the drawn token, by which it passes or not
    draw, weigh      rows whose token did not     the same among the tokens before it, three times
    finish           all                          the token

Top-k's bound comes from groups of neighbours: k tokens at least reach the k-th largest of the groups' largest. Top-p
without top-k is not searched for at all: a token drawn from everything is right if it passes, and if it does not, no
token behind it does. With p = 0.95 one row of 20 needs the second round, and one of 800 the third: such rows are
listed, and more programs take each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.kernels.backend import sm_count, triton
from hybridkv.kernels.sampling import rows as asked
from hybridkv.kernels.sampling.finish import finish_kernel
from hybridkv.kernels.sampling.kernels import (
    MAX_STEPS,
    bound_kernel,
    draw_kernel,
    list_kernel,
    survey_kernel,
    weigh_kernel,
)
from hybridkv.kernels.sampling.noise import MAX_VOCAB
from hybridkv.kernels.sampling.rows import SampleRow, table_of

BLOCK = 1024  # logits that a program holds at once
MAX_PIECES = 256  # of a row
PROGRAMS = 16  # of a launch, for each multiprocessor: enough to hide how long a read takes
DRAWN = 512  # logits that a program holds at once that draws or weighs: one warp, which waits for no other
DRAW_WARPS = 1
DRAW_REGISTERS = 128  # of a thread: 16 such programs share a multiprocessor
DRAW_PROGRAMS = 16
SEARCHED = 1024  # logits that a program holds at once that searches a row alone
GROUP = 64  # neighbours of which the largest is kept, at least
MAX_GROUPS = 4096
LISTED = 4096  # tokens that a row's list holds
ROUNDS = 4  # of drawing: with top-p 0.95 one row of a million is left, which a single program then searches
LEFT_PIECES, LEFT_ROWS = 64, 32  # pieces of a row that is drawn again, and such rows at once
REGISTERS = 64  # of a thread that only reads and lists: more programs at once are worth more


def sample_rows_triton(
    logits: Tensor,
    rows: Sequence[SampleRow],
    found: Tensor,
    block: int = BLOCK,
    listed: int = LISTED,
) -> None:
    """As sample_rows. `block`, `listed`: other sizes, with the same result."""
    if rows:
        table, flags = table_of(rows, logits.shape[1], logits.device)
        launch_rows(logits, table, flags, len(rows), found, block, listed)


def launch_rows(
    logits: Tensor,  # [R, V]
    table: Tensor,  # as table_of gives it
    flags: int,
    S: int,
    found: Tensor,  # [2, n] int64
    block: int = BLOCK,
    listed: int = LISTED,
) -> None:
    """All launches, with nothing of the host's in them."""
    V, device = logits.shape[1], logits.device
    assert V <= MAX_VOCAB, "the sum of all weights would not fit"
    assert found.is_contiguous()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    masks = table.view(torch.int32)
    blocks = triton.cdiv(V, block)
    P, steps = divided(blocks, S, PROGRAMS * sm_count(device))
    rounds = ROUNDS if flags & asked.WEIGHED else 1 if flags & asked.WHOLE else 0
    plain = dict(num_warps=4, enable_fp_fusion=False)  # of two roundings none may be left out

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    known, groups, group, G = empty(S, 4), empty(0), GROUP, 0
    if flags & asked.SURVEYED:
        largest, place = empty(S, P, dtype=torch.float32), empty(S, P)
        group = min(block, max(GROUP, triton.next_power_of_2(triton.cdiv(V, MAX_GROUPS))))
        G = blocks * (block // group)
        groups = empty(S, G if flags & asked.LISTED else 0)
        survey_kernel[P, S](
            logits, table, masks, largest, place, groups, V, steps, G, logits.stride(0),
            BV=block, GROUP=group, GROUPS=bool(flags & asked.LISTED), **plain,
        )  # fmt: skip
        bound_kernel[(S,)](
            table, largest, place, groups, known, V, P, G,
            BP=MAX_PIECES, BG=triton.next_power_of_2(G), **plain,
        )  # fmt: skip
    sizes = (6 * rounds * S, rounds * S, rounds * (1 + S), S)
    both, came, left, count = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    sums, drawn = both.view(torch.int64).split((2 * rounds * S, rounds * S))
    room = listed if flags & asked.LISTED else 0
    listed_d, listed_id = empty(S, room), empty(S, room)
    if room:
        list_kernel[P, S](
            logits, table, masks, found, known, count, listed_d, listed_id, groups, V, found.shape[1], steps, G,
            logits.stride(0), BV=block, GROUP=group, CAP=listed, maxnreg=REGISTERS, **plain,
        )  # fmt: skip
    block = min(block, DRAWN)
    blocks = triton.cdiv(V, block)
    own = dict(BV=block, num_warps=DRAW_WARPS, maxnreg=DRAW_REGISTERS, enable_fp_fusion=False)
    for i_r in range(rounds):
        again = i_r > 0
        pieces = divided(blocks, S, DRAW_PROGRAMS * sm_count(device)) if not again else divided(blocks, 1, LEFT_PIECES)
        grid, own["AGAIN"] = (pieces[0], min(S, LEFT_ROWS) if again else S), again
        read = (logits, table, masks, found, known, drawn)
        sizes = (V, found.shape[1], pieces[1], i_r, S, logits.stride(0))
        draw_kernel[grid](*read, left, *sizes, **own)
        if flags & asked.WEIGHED:
            weigh_kernel[grid](*read, sums, came, left, *sizes, **own)
    finish_kernel[(S,)](
        logits, table, masks, found, known, count, listed_d, listed_id, drawn, sums, V, found.shape[1], S,
        rounds, logits.stride(0), BV=SEARCHED, CAP=listed,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def divided(blocks: int, rows: int, programs: int) -> tuple[int, int]:
    """Into how many pieces rows of so many blocks are cut for so many programs, and the blocks of a piece."""
    steps = min(max(triton.cdiv(rows * blocks, programs), triton.cdiv(blocks, MAX_PIECES)), MAX_STEPS, blocks)
    pieces = triton.cdiv(blocks, steps)
    return pieces, triton.cdiv(blocks, pieces)
