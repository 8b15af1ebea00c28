"""Checkpoints: copies of recurrent state at the ends of columns, in rows of the state pool beyond those of the slots.

A prompt can be taken up where a checkpoint lies and all columns before it are there. Which positions are worth one is
decided here (`spaced`), and which goes when rows are short (`reserve`) or pages (`give_way`):

    1. columns below which no checkpoint is left, the oldest first      columns.py; the caller does that before it asks
    2. checkpoints on trial (the end of a turn) that were not used while half of all were made or used, the oldest first
    3. the one that a `Policy` names

One that is pinned is never taken. One on a running request's path may go for a row: the request has a state of its own,
and many of a long text are worth less than what other prompts left. For pages it is passed over, since the request
keeps them. Rows are numbers: nothing here copies a state or knows what one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, get_args

from hybridkv.cache.columns import Column, Columns

NEAR = 512  # tokens: no checkpoint is taken so near behind another one, but where a client asks for it

Kind = Literal["client", "message", "reply", "branch", "call", "grid", "warm", "turn", "begin"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ORDER: dict[str, int] = {kind: i for i, kind in enumerate(KINDS)}  # at one place the first of these counts
MOST_CLIENT_MARKS = 4  # of one prompt
ON_TRIAL: Kind = "turn"  # the end of a turn: goes before others until it was used once


class Mark(NamedTuple):
    """A position of a prompt at which a checkpoint is wished.

    client: where the client asks; message: before the last message; reply: where the reply to the last user message
    begins; branch: where prompts part; call: where an answer opens a call; grid: inside a long text; turn: the end
    of an answer; warm: how far a next turn was read before it came (warm.py); begin: a message begins, which is no
    wish, but parts of a prompt that are long are long messages.
    """

    position: int
    kind: str  # one of KINDS


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A state at the end of a column."""

    column: Column
    row: int  # of the state pool
    kind: str
    stamp: int  # when it was made, or used last
    uses: int = 0
    pins: int = 0  # as long as there are any it is not dropped
    value: float = 0.0  # a policy's own

    @property
    def position(self) -> int:
        """Tokens that the state has seen."""
        return self.column.end

    @property
    def on_trial(self) -> bool:
        """Whether it goes before all others, once half of them are later."""
        return self.kind == ON_TRIAL and not self.uses

    def shallower(self) -> Checkpoint | None:
        """The next one above it on its path."""
        column = self.column.parent
        while column is not None:
            if isinstance(column.checkpoint, Checkpoint):
                return column.checkpoint
            column = column.parent
        return None

    @property
    def gain(self) -> int:
        """Tokens that are not read again because of it alone."""
        before = self.shallower()
        return self.position - (0 if before is None else before.position)

    def own_columns(self) -> int:
        """Columns that only this checkpoint keeps useful: those from it up to the next that covers another one."""
        column, found = self.column, 0
        while column.parent is not None and column.covers == 1:
            column, found = column.parent, found + 1
        return found


class Policy(Protocol):
    """Which checkpoint goes first."""

    def made(self, checkpoint: Checkpoint) -> None:
        """It has just been taken."""

    def used(self, checkpoint: Checkpoint) -> None:
        """A prompt was taken up at it. Those above it on its path were not used."""

    def dropped(self, kind: str, uses: int) -> None:
        """One of this kind that was used so often has made room for others, and lies nowhere else."""

    def victim(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        """The one of these, at least one, that is given up."""
        ...


class LeastRecentlyUsed:
    """The one whose last use, or making, was longest ago."""

    def made(self, checkpoint: Checkpoint) -> None:
        """Its stamp says it already."""

    def used(self, checkpoint: Checkpoint) -> None:
        """Its stamp says it already."""

    def dropped(self, kind: str, uses: int) -> None:
        """It is not missed."""

    def victim(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        """The one with the oldest stamp."""
        return min(candidates, key=lambda c: c.stamp)


class Checkpoints:
    """All checkpoints over a trie. `rows`: how many there can be; they are numbered from `first` on."""

    def __init__(
        self, columns: Columns, rows: int, row_bytes: int, first: int = 0, policy: Policy | None = None
    ) -> None:
        self.columns, self.rows, self.row_bytes, self.first = columns, rows, row_bytes, first
        self.policy: Policy = LeastRecentlyUsed() if policy is None else policy
        self.all: dict[int, Checkpoint] = {}  # by row
        self.reserved: set[int] = set()  # rows that are being written and nobody sees yet
        self.dropped = {"rows": 0, "pages": 0, "forgotten": 0}  # how often, and for what
        self.leaving: Callable[[Checkpoint], None] | None = None  # told of one whose row is needed, before it goes
        self._free = list(range(first + rows - 1, first - 1, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of the states that are kept."""
        return len(self.all) * self.row_bytes

    @staticmethod
    def deepest(path: Sequence[Column], most: int) -> Checkpoint | None:
        """The last one on a path of columns that has seen no more than `most` tokens."""
        for column in reversed(path):
            if column.end <= most and isinstance(column.checkpoint, Checkpoint):
                return column.checkpoint
        return None

    def use(self, checkpoint: Checkpoint) -> None:
        """A prompt is taken up here: this one is refreshed, and no other."""
        checkpoint.stamp, checkpoint.uses = self.columns.tick(), checkpoint.uses + 1
        self.policy.used(checkpoint)

    # ---- making

    def reserve(self) -> int | None:
        """A row to write a state to, or None. Another checkpoint may be dropped for it. Then `add`, or `give_back`."""
        if not self._free and not self.give_row():
            return None
        row = self._free.pop()
        self.reserved.add(row)
        return row

    def reserve_spare(self) -> int | None:
        """A row that is free, or that another end of a turn has; None: there is none."""
        if not self._free:
            ends = [c for c in self.all.values() if c.kind == ON_TRIAL and not c.pins]
            if not ends:
                return None
            self.drop(self._worst([c for c in ends if c.on_trial] or ends), "rows")
        return self.reserve()

    def give_back(self, row: int) -> None:
        """What was written to a reserved row is not wanted."""
        self.reserved.remove(row)
        self._free.append(row)

    def add(self, column: Column, row: int, kind: str) -> Checkpoint:
        """The state in a reserved row is that at the column's end, from here on for all to see. If there is one
        already, it stays and the row is given back.
        """
        if isinstance(column.checkpoint, Checkpoint):
            self.give_back(row)
            return column.checkpoint
        self.reserved.remove(row)
        made = Checkpoint(column, row, kind, self.columns.tick())
        self.all[row] = made
        self.columns.cover(column, made)
        self.policy.made(made)
        return made

    # ---- dropping

    def drop(self, checkpoint: Checkpoint, why: str = "forgotten") -> None:
        """Its row is free; its columns may be dropped next."""
        if self.leaving is not None and why != "forgotten":
            self.leaving(checkpoint)
        del self.all[checkpoint.row]
        self._free.append(checkpoint.row)
        self.columns.uncover(checkpoint.column)
        self.dropped[why] += 1
        if why != "forgotten" and checkpoint.column.stored is None:  # else it may yet be used
            self.policy.dropped(checkpoint.kind, checkpoint.uses)

    def give_row(self) -> bool:
        """Whether one was dropped, on the path of a running request or not: for its row."""
        found = [c for c in self.all.values() if not c.pins]
        if found:
            self.drop(self._worst(found), "rows")
        return bool(found)

    def give_way(self, rows: bool = False) -> bool:
        """Whether one was dropped whose columns only it kept: for pages, after all columns without one have gone.
        `rows`: its row is of use, too, so that others are not passed over.
        """
        found = [c for c in self.all.values() if not c.pins and not c.column.live and (rows or c.column.covers == 1)]
        if found:
            self.drop(self._worst(found), "pages")
        return bool(found)

    def _worst(self, candidates: list[Checkpoint]) -> Checkpoint:
        # one that was made just now waits for a next turn, which may take a while
        middle = sorted(c.stamp for c in candidates)[len(candidates) // 2]
        trial = [c for c in candidates if c.on_trial and c.stamp < middle]
        return min(trial, key=lambda c: c.stamp) if trial else self.policy.victim(candidates)

    def rebuild(self) -> None:
        """Find the free rows anew, from who has one: the way back after an interrupt."""
        self.all = {c.row: c for c in (column.checkpoint for column in self.columns) if isinstance(c, Checkpoint)}
        self.reserved.clear()
        taken = self.all.keys()
        self._free = [row for row in range(self.first + self.rows - 1, self.first - 1, -1) if row not in taken]

    def check(self) -> None:
        """Every row is free, reserved or one checkpoint's, and each of these is where the trie says."""
        rows = sorted([*self._free, *self.reserved, *self.all])
        assert rows == list(range(self.first, self.first + self.rows)), f"rows are lost or owned twice: {rows}"
        there = {id(c.checkpoint) for c in self.columns if c.checkpoint is not None}
        assert there == {id(c) for c in self.all.values()}, "checkpoints and columns disagree"
        for row, checkpoint in self.all.items():
            assert checkpoint.row == row and checkpoint.column.checkpoint is checkpoint and not checkpoint.column.gone


def spaced(marks: Iterable[Mark], taken: Iterable[int], q: int, begin: int, end: int) -> list[Mark]:
    """Where checkpoints are taken between positions `begin` and `end`, ascending, from where they are wished.

    They are rounded down to columns. None is so near behind another one, or behind one of `taken`, that it is not
    worth it, but for those that a client asks for. One of the grid gives way to one that is wished behind it.
    """
    best: dict[int, Mark] = {}
    for mark in marks:
        at = mark.position // q * q
        if begin < at <= end and (at not in best or ORDER[mark.kind] < ORDER[best[at].kind]):
            best[at] = Mark(at, mark.kind)
    there: set[int] = {0, *taken}
    found: list[Mark] = []
    for at in sorted(best):
        mark = best[at]
        if found and found[-1].kind == "grid" != mark.kind and at - found[-1].position < NEAR:
            found.pop()
        last = max([t for t in there if t <= at] + [each.position for each in found[-1:]])
        if at not in there and (mark.kind == "client" or at - last >= NEAR):
            found.append(mark)
    return found


def grid_step(depth: int, state_bytes: float, token_bytes: float, q: int) -> int:
    """Tokens between checkpoints of a long text at some depth, a power of two.

    A state every N tokens costs S / N bytes a token and, where prompts part at depth d, loses N / 2 tokens. Tokens
    saved for each byte are most at N = sqrt(a^2 + 2 a d) - a, where a is how many tokens' pages a state weighs.
    """
    a = state_bytes / token_bytes
    best = (a * a + 2 * a * max(depth, 8192)) ** 0.5 - a
    return max(q, 1 << max(0, int(best).bit_length() - 1))


def grid_marks(
    length: int, marks: Sequence[int], state_bytes: float, token_bytes: float, q: int, every: int | None = None
) -> list[Mark]:
    """Checkpoints inside those parts of a prompt, between its marks, that are longer than a step of the grid.

    `every`: tokens of a step; None: as the bytes suggest, wider apart the deeper they are.
    """
    found: list[Mark] = []
    if not state_bytes or not token_bytes:
        return found
    for begin, end in pairwise([0, *marks, length]):
        at = begin
        while True:
            step = grid_step(at, state_bytes, token_bytes, q) if every is None else max(q, every // q * q)
            at = (at // step + 1) * step
            if at >= end or end - begin <= step:
                break
            found.append(Mark(at, "grid"))
    return found
