"""Request: one prompt on its way to an answer. What it holds in the cache is known to the manager alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.eviction_record import EvictionRecord
from hybridkv.text.stream import TextStream


class Status(Enum):
    """Where a request stands."""

    # holds nothing on the device; its tokens, generated ones included, are computed (again) once it is admitted, unless
    # its cache waits on the host
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities under the model itself, before temperature and filters."""

    token: float
    top: dict[int, float]


class RequestKey:
    """A request's name in the cache. Every key is its own, so that it never meets a name that a caller has chosen."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"#{self.number}"


@dataclass(eq=False)
class Request:
    """One prompt and its answer so far, the settings it came with, and where it stands."""

    key: RequestKey
    order: int  # arrival; the youngest is preempted first
    tokens: list[int]  # prompt, then what was generated
    prompt_tokens: int
    params: SamplingParams  # resolved: of what has a default, nothing is None
    text: TextStream
    seed: int  # of its random numbers, 63 bits: that of the parameters, or one of its own
    hold: bool = False  # keep the cache when finished, for a next turn
    limit: int = 0  # tokens, prompt and answer, at which it ends; known when it has its first one
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None
    end_token: bool = False  # its last token ended it, and is no part of the answer
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # None for the first token
    ends_at: frozenset[int] = frozenset()  # tokens that end the answer
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear in the answer
    banned: tuple[int, ...] = ()  # tokens that must not
    following: Any = None  # its answer's place in what it must look like (text/constraint.py); None: it is free
    eviction: EvictionConfig | None = None  # what it keeps; None: everything
    evictions: dict[int, EvictionRecord] = field(default_factory=dict)  # position -> entries kept there
    evicting: object | None = None  # an eviction of it that is under way (eviction/under_way.py): it cannot run
    policy: str | None = None  # by which it was evicted last, `auto` resolved; None: never
    siblings: list[Request] = field(default_factory=list)  # further answers to the same prompt (n > 1)
    source: Request | None = None  # whose sibling it is, until it has a token of its own
    continues: Request | None = None  # a finished request whose held cache this one goes on with, once it is admitted
    prefix: Request | None = None  # a finished request with whose held cache this one begins; it stays held for others
    sampler: Any = None  # what engine/sampler.py keeps for it; it can be dropped at any time, and is then made again
    unseen: int = 0  # tokens that are on the device and the host does not know yet
    preemptions: int = 0
    restored: int = 0  # of these, those after which its cache came back from the host, and nothing was computed again
    restored_tokens: int = 0  # that had not to be computed again, in all
    reads: bool = True  # it may begin with what others have read
    writes: bool = True  # others may begin with what it reads
    salt: bytes = b""  # only requests of the same salt see what it has read, and it sees only theirs
    whose: bytes = b""  # who asked, where a server's clients take turns; what they share says nothing of that
    marks: tuple[tuple[int, str], ...] = ()  # positions at which a checkpoint is wished (cache/checkpoints.py: Mark)
    awaits: tuple[Request, int] | None = None  # who reads what it begins with too, and up to where
    reuse: dict[str, Any] = field(default_factory=dict)  # what of its prompt was there already, and why not more
    loading: Any = None  # how long that took which came from the host (cache/tiers.py: Timer)
    pins: bool = False  # its prompt is to stay for others (cache/pins.py)
    pinned: Any = None  # what keeps it, once it has been read
    text_memory: int = 0  # prompt tokens that were taken as an earlier answer had them (text/memory.py)
    cached_tokens: int = 0  # prompt tokens that were not computed
    given_up: bool = False  # the held cache that it was to go on in was given up, and is read again
    stats: dict[str, float] = field(default_factory=dict)
    added_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def generated(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.tokens[self.prompt_tokens :]

    @property
    def answer_tokens(self) -> int:
        """How many tokens the answer has so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def forming(self) -> list[Request]:
        """Siblings that wait for this request's prompt. If it ends before that is read, they end with it."""
        return [s for s in self.siblings if s.source is self and s.finish_reason is None]

    @property
    def needs_last_token(self) -> bool:
        """Whether the host must know the last token before the next one is sampled."""
        return self.params.logits_hook is not None or bool(self.bad_words) or self.following is not None

    @property
    def must_see(self) -> bool:
        """Whether its next step is planned only when the host has seen what the step in flight gives: a token that only
        the device knows may end an answer whose cache is held, or is asked for; and entries, or siblings, may follow.
        """
        if self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens:
            return True
        if self.hold and self.eviction is not None:
            return True
        if not self.unseen:
            return False
        eviction = self.eviction
        evicts = eviction is not None and bool(eviction.bounded or eviction.decode_every)
        # a sibling that has just begun has no sampler state yet; its source would sample it again
        return self.hold or self.needs_last_token or evicts or self.source is not None or bool(self.forming)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come; `finish_reason` says why."""
        return self.status is Status.FINISHED

    @property
    def keeps_cache(self) -> bool:
        """Whether its cache is held when it finishes."""
        return self.hold and self.finish_reason != "error"
