"""Kept: which prompt tokens each stream of a request held when the prompt had been read, what that costs in bytes, and
how the model answered with them and with all of them. Plain data.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.schema import ceil_div
from hybridkv.eviction.evict import STREAMS
from hybridkv.eviction_record import EvictionRecord
from hybridkv.llm import LLM
from hybridkv.request import Request
from hybridkv.text.tokenizer import Tokenizer

STATE_NAMES = {"gdn": "Gated DeltaNet"}


@dataclass(frozen=True)
class Answer:
    """What the model said. `cut`: it had more to say."""

    text: str
    cut: bool = False

    @staticmethod
    def of(request: Request) -> Answer:
        """The answer of a finished request."""
        return Answer(request.text.text, request.finish_reason == "length")


@dataclass(frozen=True)
class State:
    """Layers that hold a state of fixed size instead of tokens."""

    name: str
    layers: list[int]
    layer_bytes: int  # of each


@dataclass(frozen=True)
class Kept:
    """A prompt of T tokens in a model with attention layers of G heads."""

    model: str
    texts: list[str]  # [T]; joined they are the prompt
    layers: list[int]  # numbers of the attention layers in the model
    masks: np.ndarray  # [layers, G, T] bool
    bytes_before: list[int]  # of each layer's pages, with every token kept
    bytes_after: list[int]
    settings: dict[str, str]
    question: str = ""
    answer: Answer | None = None  # with the tokens that were kept
    full_answer: Answer | None = None  # with all of them; None: it was not asked for
    states: tuple[State, ...] = ()

    @property
    def counts(self) -> np.ndarray:
        """[T] how many streams kept each token."""
        return self.masks.sum((0, 1))

    @property
    def lengths(self) -> np.ndarray:
        """[layers, G] tokens that each stream holds."""
        return self.masks.sum(2)


def kept(
    llm: LLM,
    request: Request,
    evictions: Mapping[int, EvictionRecord],
    settings: dict[str, str],
    question: str = "",
    full_answer: Answer | None = None,
) -> Kept:
    """What the cache held of a finished request's prompt when it had just been read, and the answer that followed.

    evictions: what they kept of all heads (`Engine.evictions_of`).
    """
    T, whole = request.prompt_tokens, llm.engine.schema
    schema = next(s for s in whole.streams if s.name == STREAMS)
    masks = np.zeros((schema.streams, T), bool)
    for stream, positions in enumerate(positions_held(evictions, schema.streams, T)):
        masks[stream, positions] = True
    masks = masks.reshape(len(schema.layers), schema.heads, T)
    page, size = schema.entries_per_page, schema.page_bytes
    return Kept(
        model=llm.path.stem if llm.path.suffix == ".gguf" else llm.path.name,
        texts=token_texts(llm.tokenizer, request.tokens[:T]),
        layers=list(schema.layers),
        masks=masks,
        bytes_before=[schema.heads * ceil_div(T, page) * size] * len(schema.layers),
        bytes_after=[sum(ceil_div(int(n), page) for n in heads) * size for heads in masks.sum(2)],
        settings=settings,
        question=question,
        answer=Answer.of(request),
        full_answer=full_answer,
        states=tuple(
            State(STATE_NAMES.get(state.name, state.name), list(state.layers), state.slot_bytes // len(state.layers))
            for state in whole.states
            if not state.lent
        ),
    )


def positions_held(evictions: Mapping[int, EvictionRecord], streams: int, tokens: int) -> list[np.ndarray]:
    """Of each stream the positions that are left once so many tokens were read, by what a request remembers of its
    evictions.
    """
    found, seen = [np.arange(0)] * streams, 0
    for position in sorted(at for at in evictions if at <= tokens):
        stays = [entries for layer in evictions[position] for entries in layer]
        new = np.arange(seen, position)
        found = [np.concatenate([held, new])[entries] for held, entries in zip(found, stays, strict=True)]
        seen = position
    new = np.arange(seen, tokens)
    return [np.concatenate([held, new]) for held in found]


def token_texts(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. A character spread over several tokens appears with the last of them."""
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    if not tokenizer.joins_bytes:
        return [tokenizer.token_text(token) for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(tokenizer.piece(token, skip_special=False)) for token in tokens]
