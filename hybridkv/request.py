"""Request: one prompt on its way to an answer. What it holds in the cache is the manager's knowledge, not kept here
twice.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from hybridkv.config import SamplingParams
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


@dataclass(eq=False)
class Request:
    key: Hashable  # its name in the cache
    order: int  # arrival; the youngest is preempted first
    tokens: list[int]  # prompt, then what was generated
    prompt_tokens: int
    params: SamplingParams
    text: TextStream
    generator: torch.Generator
    hold: bool = False  # keep the cache when finished, for a next turn
    status: Status = Status.WAITING
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    evictions: dict[int, list[list[np.ndarray]]] = field(default_factory=dict)  # position -> entries kept there
    seen: torch.Tensor | None = None  # [vocab] bool, tokens so far, where a repetition penalty asks for it
    counted: int = 0  # tokens that `seen` has
    preemptions: int = 0
    cached_tokens: int = 0  # of the prompt, taken over from a held cache
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
