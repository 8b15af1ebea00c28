"""Estimate: the bytes that a model's cache and steps take for some requests of some context, and what fits in a room.

The page (data/plan.js) computes the same from numbers that plan_page.py exports; a test compares the two in a browser.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hybridkv.cache.rounded_states import checkpoint_dtype_of, with_checkpoint_dtype
from hybridkv.cache.schema import LONGEST_COLUMN, CacheSchema, column_tokens
from hybridkv.cache.tier_sizes import staging_bytes
from hybridkv.config import GPU_STEP_TOKENS, CacheConfig, EngineConfig, ReuseConfig
from hybridkv.dtypes import itemsize
from hybridkv.engine.workspace import captured_bytes, workspace
from hybridkv.eviction.sizes import STREAMS, query_buffers_for
from hybridkv.models import cache_schema, with_query_buffer
from hybridkv.models.config import ModelConfig
from hybridkv.planner import fewer_checkpoints, most_that_fits

MOST_REQUESTS = 4096  # that EngineConfig takes


@dataclass(frozen=True)
class Need:
    """Bytes beside the weights."""

    pages: int  # while the last of the prompts is read: they are read one after the other
    held: int  # of them, once all prompts are read
    state: int
    tables: int
    workspace: int
    checkpoints: int = 0  # of state that is kept for others
    staging: int = 0  # that copies to and from the host go through
    rows: int = 0  # how many checkpoints there are

    @property
    def cache(self) -> int:
        """What is allocated for requests."""
        return self.pages + self.state + self.tables

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.cache + self.workspace + self.checkpoints + self.staging


@dataclass(frozen=True)
class Estimate:
    """One way of running a model: where, with which KV dtype, and with which budget."""

    config: ModelConfig
    cache: CacheConfig  # with its KV dtype, and with or without a budget
    dtype: str  # of the activations
    gpu: bool
    exact: bool = False
    reuse: ReuseConfig | None = None  # what is kept for others
    memory: int | None = None  # bytes for weights and cache together
    host: int | None = None  # bytes on the host; None: as LLM takes them
    codes: bool = False  # whether weights are codes with a scale for each block

    @cached_property
    def opened(self) -> CacheConfig:
        """The settings that `LLM` opens the model with: without a budget, one query buffer for who brings one."""
        return with_query_buffer(self.config, self.cache)

    @cached_property
    def schema(self) -> CacheSchema:
        """What is stored for a request."""
        found = cache_schema(self.config, self.opened, self.dtype)
        return with_checkpoint_dtype(found, checkpoint_dtype_of(self.reuse))

    @property
    def step(self) -> int:
        """Tokens that a step reads at the most."""
        return GPU_STEP_TOKENS if self.gpu else EngineConfig.step_tokens

    @property
    def captured(self) -> int:
        """Bytes that captured steps with prompts keep of what is left in reserve, at the most."""
        return captured_bytes(self.config, self.schema, self.step, itemsize(self.dtype)) if self.gpu else 0

    def kv_bytes(self, tokens: int, most: int | None) -> int:
        """Bytes of the pages of one request of `tokens` tokens whose attention streams hold `most` of them."""
        held = tokens if most is None else min(tokens, most)
        return sum(s.pages(held if s.name == STREAMS else tokens) * s.page_bytes for s in self.schema.streams)

    def held(self, tokens: int) -> int:
        """Bytes of the pages of one request once its prompt is read."""
        return self.kv_bytes(tokens, self.cache.budget)

    def peak(self, tokens: int) -> int:
        """Bytes of the pages of one request while its prompt is read."""
        budget = self.cache.budget
        return self.kv_bytes(tokens, budget + self.step if self.cache.bounded and budget is not None else None)

    @cached_property
    def checkpoints(self) -> tuple[int, int]:
        """How many checkpoints there are where all fits, and how many in any case."""
        if self.reuse is None or column_tokens(self.schema) > LONGEST_COLUMN:
            return 0, 0
        rows = self.reuse.rows(self.schema.checkpoint_bytes, self.memory, not self.gpu)
        return rows, 0 if self.reuse.checkpoints == "auto" else rows

    @property
    def staging(self) -> int:
        """Bytes that copies to and from the host go through."""
        return staging_bytes(self.gpu, self.host)

    def chosen(self, requests: int, context: int, room: int | None = None) -> Need:
        """What they take with as many checkpoints as LLM takes in `room` bytes beside the weights."""
        (rows, least), each = self.checkpoints, self.schema.checkpoint_bytes
        found = self.need(requests, context)
        if room is not None:
            tried = fewer_checkpoints(rows, least)
            rows = next((n for n in tried if found.nbytes + (n - least) * each <= room), least)
        return replace(found, rows=rows, checkpoints=rows * each)

    def need(self, requests: int, context: int) -> Need:
        """What `requests` requests of `context` tokens take, with no more checkpoints than there must be."""
        schema, held = self.schema, self.held(context)
        lent = query_buffers_for(self.opened, self.step, requests) * schema.query_buffer_bytes
        limits = EngineConfig(requests, step_tokens=self.step)
        beside = workspace(
            self.config, schema, self.opened, limits, context, self.dtype, self.gpu, self.gpu and self.codes
        )
        return Need(
            pages=(requests - 1) * held + self.peak(context),
            held=requests * held,
            state=requests * schema.slot_bytes + lent,
            tables=requests * schema.table_bytes(context),
            workspace=beside.nbytes,
            checkpoints=self.checkpoints[1] * schema.checkpoint_bytes,
            staging=self.staging,
            rows=self.checkpoints[1],
        )

    def longest_context(self, requests: int, room: int) -> int:
        """Most tokens that each of `requests` requests can have in `room` bytes."""
        return most_that_fits(lambda n: self.need(requests, n).nbytes, room, self.config.max_positions)

    def most_requests(self, context: int, room: int) -> int:
        """How many requests of `context` tokens fit in `room` bytes."""
        return most_that_fits(lambda n: self.need(n, context).nbytes, room, MOST_REQUESTS)
