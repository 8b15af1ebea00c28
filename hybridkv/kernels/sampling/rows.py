"""SampleRow: what is asked of one row of logits, and how many of them reach a kernel in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-6  # smaller ones are 0 or overflow in f32; the result is greedy from here on
MAX_LISTED_K = 1024  # top-k up to here is chosen from a list of candidates (launch.py)

# Words of a row in the table, int64 each; numbers with a point are the bits of a float64.
WORDS = (
    "ROW", "OUT", "FLAGS", "POSITION", "SEED", "RATE", "TOP_K", "TOP_P", "FARTHEST", "REPETITION", "FREQUENCY",
    "PRESENCE", "SEEN", "BIAS", "FORBIDDEN", "OWN",
)  # fmt: skip
PLACE = {name: i for i, name in enumerate(WORDS)}

# Flags of a row. It draws (or is greedy); its logits are counted against, biased, forbidden in part, its own; its best
# token is looked for; its token is chosen from a list, or drawn from the whole row and then weighed for top-p.
DRAWS, COUNTED, BIASED, FORBIDS, OWN_LOGITS, SURVEYED = (1 << i for i in range(6))
TOP_K, TOP_P, LISTED, WHOLE, WEIGHED = (1 << i for i in range(6, 11))


def seen_words(vocab: int) -> int:
    """Words of 32 tokens' bits."""
    return (vocab + 31) // 32


def seen_tokens(vocab: int, prompt: Sequence[int], answer: Sequence[int], device: torch.device) -> Tensor:
    """[words + vocab] int32, made on the device: a bit for each token that came at all; then for each token 1 if it
    came, plus twice how often the answer has it. One copy, for which nothing waits.
    """
    ids, times = np.unique(np.array(answer, np.int64), return_counts=True)
    both = np.unique(np.concatenate((np.array(prompt, np.int64), ids)))
    counts = np.ones(len(both), np.int64)
    counts[np.searchsorted(both, ids)] += 2 * times
    words, first = np.unique(both >> 5, return_index=True)
    bits = np.bitwise_or.reduceat(np.int64(1) << (both & 31), first) if len(both) else counts
    bits = bits.astype(np.uint32).view(np.int32).astype(np.int64)
    start = seen_words(vocab)
    sent = torch.from_numpy(np.stack((np.concatenate((words, both + start)), np.concatenate((bits, counts)))))
    if device.type == "cuda":
        sent = sent.pin_memory().to(device, non_blocking=True)
    seen = torch.zeros(start + vocab, dtype=torch.int32, device=device)
    return seen.scatter_(0, sent[0], sent[1].int())


@dataclass
class SampleRow:
    """How the token of one row is chosen (sample.py has the definition). Made once for a request; what changes from
    token to token is set before each call: `row`, `out`, `position`, `forbidden` and `own`.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    seed: int = 0
    seen: Tensor | None = None  # [words + vocab] int32 of `seen_tokens`, where a penalty is asked for; the token joins
    bias: Tensor | None = None  # [vocab] f32, added
    row: int = 0  # of the logits
    out: int = 0  # where its token goes
    position: int = 0  # of the token
    forbidden: Sequence[int] = ()  # tokens that must not come
    own: Tensor | None = None  # [vocab] f32 in place of the row's logits: forbidden tokens and biases are in it already
    words: np.ndarray = field(init=False)
    _plain: tuple[int, int] = (-1, 0)  # a vocabulary, and `plain_flags` for it

    def __post_init__(self) -> None:
        floats = (self.rate, self.top_p, self.farthest, self.repetition, self.frequency, self.presence)
        rate, top_p, farthest, *penalties = np.array(floats, np.float64).view(np.int64).tolist()
        words = [0, 0, 0, 0, self.seed, rate, self.top_k, top_p, farthest, *penalties, 0, 0, 0, 0]
        self.words = np.array(words, np.int64)

    @property
    def rate(self) -> float:
        """What distances are multiplied by."""
        return 1 / max(self.temperature, MIN_TEMPERATURE)

    @property
    def farthest(self) -> float:
        """The largest distance from the best that min-p lets pass."""
        return -math.log(self.min_p) if self.min_p else math.inf

    @property
    def adjusts(self) -> bool:
        """Whether the best token may be another than that of the largest logit."""
        return self.seen is not None or self.bias is not None or bool(self.forbidden) or self.own is not None

    def plain_flags(self, vocab: int) -> int:
        """`flags` of a row whose logits are not adjusted: the same for every token, and found once."""
        if self._plain[0] != vocab:
            self._plain = vocab, self.flags(vocab)
        return self._plain[1]

    def flags(self, vocab: int) -> int:
        top_k, top_p = 0 < self.top_k < vocab, self.top_p < 1
        if not self.temperature:
            return SURVEYED | self._sources()
        listed = top_k and self.top_k <= MAX_LISTED_K
        way = LISTED if listed else 0 if top_k else WHOLE | WEIGHED if top_p else WHOLE
        found = DRAWS | self._sources() | (TOP_K if top_k else 0) | (TOP_P if top_p else 0) | way
        return found | (SURVEYED if listed or self.adjusts else 0)

    def _sources(self) -> int:
        own = self.own is not None
        return (
            (COUNTED if self.seen is not None else 0)
            | (BIASED if self.bias is not None and not own else 0)
            | (FORBIDS if self.forbidden and not own else 0)
            | (OWN_LOGITS if own else 0)
        )


def table_of(rows: Sequence[SampleRow], vocab: int, device: torch.device) -> tuple[Tensor, int]:
    """[S, words] int64 on the device, and behind it bits of forbidden tokens, in one copy; the flags of all rows."""
    size, width = len(WORDS), (seen_words(vocab) + 1) // 2  # int64 words of the bits
    masks = [(i, row) for i, row in enumerate(rows) if row.forbidden and row.own is None]
    count, pinned = len(rows) * size + len(masks) * width, device.type == "cuda"
    sent = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=pinned)
    found = sent.numpy()
    table = found[: len(rows) * size].reshape(len(rows), size)
    together = fill_table(table, rows, vocab)
    for number, (i, row) in enumerate(masks):
        begin = len(rows) * size + number * width
        bits = found[begin : begin + width]
        bits[:] = 0
        ids = np.array(row.forbidden)
        np.bitwise_or.at(bits.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        table[i, PLACE["FORBIDDEN"]] = begin
    return sent.to(device, non_blocking=True), together


def fill_table(table: np.ndarray, rows: Sequence[SampleRow], vocab: int) -> int:
    """Write the words of rows to table [S, words], but where bits of forbidden tokens lie. Returns all rows' flags."""
    if not rows:
        return 0
    np.concatenate([row.words for row in rows], out=table.reshape(-1))
    table[:, PLACE["ROW"]] = [row.row for row in rows]
    table[:, PLACE["OUT"]] = [row.out for row in rows]
    table[:, PLACE["POSITION"]] = [row.position for row in rows]
    flags = [row.flags(vocab) if row.adjusts else row.plain_flags(vocab) for row in rows]
    table[:, PLACE["FLAGS"]] = flags
    for i, row in enumerate(rows):
        if row.adjusts:
            for name, tensor in (("SEEN", row.seen), ("BIAS", row.bias), ("OWN", row.own)):
                table[i, PLACE[name]] = 0 if tensor is None else tensor.data_ptr()
    together = 0
    for each in set(flags):
        together |= each
    return together
