"""Request: one prompt on its way to an answer. What it holds in the cache is known to the manager alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import torch

from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.eviction_record import EvictionRecord
from hybridkv.text.stream import TextStream


class Status(Enum):
    WAITING = "waiting"  # holds nothing; its tokens, generated ones included, are computed (again) once it is admitted
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
    key: RequestKey
    order: int  # arrival; the youngest is preempted first
    tokens: list[int]  # prompt, then what was generated
    prompt_tokens: int
    params: SamplingParams
    text: TextStream
    generator: torch.Generator
    hold: bool = False  # keep the cache when finished, for a next turn
    limit: int = 0  # tokens, prompt and answer, at which it ends; known when it has its first one
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    eviction: EvictionConfig | None = None  # what it keeps; None: everything
    evictions: dict[int, EvictionRecord] = field(default_factory=dict)  # position -> entries kept there
    siblings: list[Request] = field(default_factory=list)  # further answers to the same prompt (n > 1)
    continues: Request | None = None  # a finished request whose held cache this one goes on with, once it is admitted
    seen: torch.Tensor | None = None  # [vocab] bool, tokens so far, where a repetition penalty asks for it
    counted: int = 0  # tokens that `seen` has
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens taken over from a held cache
    stats: dict[str, float] = field(default_factory=dict)
    added_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def keeps_cache(self) -> bool:
        """Whether its cache is held when it finishes."""
        return self.hold and self.finish_reason != "error"
