"""Kept: which prompt tokens each stream of a request still holds, and what that costs in bytes. Plain data."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv.cache.schema import ceil_div
from hybridkv.eviction.evict import STREAMS
from hybridkv.llm import LLM
from hybridkv.request import Request
from hybridkv.text.tokenizer import Tokenizer


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
    answer: str = ""

    @property
    def counts(self) -> np.ndarray:
        """[T] how many streams kept each token."""
        return self.masks.sum((0, 1))

    @property
    def lengths(self) -> np.ndarray:
        """[layers, G] tokens that each stream holds."""
        return self.masks.sum(2)


def kept(llm: LLM, request: Request, settings: dict[str, str], answer: str = "") -> Kept:
    """What the request's cache holds of its prompt now. Call it when the prompt has just been read."""
    manager, T = llm.manager, request.prompt_tokens
    schema = manager.tables[STREAMS].schema
    masks = np.zeros((schema.streams, T), bool)
    for stream, positions in enumerate(manager.entry_positions(request.key, STREAMS)):
        masks[stream, positions[positions < T]] = True
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
        answer=answer,
    )


def token_texts(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. A character spread over several tokens appears with the last of them."""
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    if not tokenizer.joins_bytes:
        return [tokenizer.token_text(token) for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(tokenizer.piece(token, skip_special=False)) for token in tokens]
