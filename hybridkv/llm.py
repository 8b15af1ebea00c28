"""LLM: the offline face. Opens a model, sizes the cache, and runs prompts through the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridkv.answers import AnswersAsTheyEnd, ChatStream, Completion, Stream
from hybridkv.cache import CacheSchema, KVCacheManager
from hybridkv.cache.convert import Key
from hybridkv.cache.reuse import Reuse
from hybridkv.cache.schema import check_column
from hybridkv.cache.store import Store
from hybridkv.cache.tier_sizes import CPU_LIMIT, staging_bytes
from hybridkv.cache.tiers import HostTier
from hybridkv.cache.worth import policy_of
from hybridkv.cards import HEADROOM
from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.checkpoint.generation_config import sampling_defaults
from hybridkv.checkpoint.identity import WeightsIdentity
from hybridkv.checkpoint.source import locate_model
from hybridkv.config import (
    GPU_STEP_TOKENS,
    CacheConfig,
    EngineConfig,
    EvictionConfig,
    ReuseConfig,
    SamplingParams,
    parse_bytes,
)
from hybridkv.devices import (
    check_fp8_cache,
    free_memory,
    on_device,
    resolve_device,
    resolve_dtype,
    resolve_fp8,
    resolve_half,
)
from hybridkv.document import Document, compress, load_document
from hybridkv.document import Progress as DocumentProgress
from hybridkv.embedded import Progress
from hybridkv.engine.engine import INHERIT, Engine
from hybridkv.engine.lock_step import NOT_OVER_RANKS
from hybridkv.engine.owner import EngineOwner, Ticket
from hybridkv.engine.precompile import precompile
from hybridkv.engine.warm import WarmReader
from hybridkv.engine.workspace import workspace
from hybridkv.errors import HybridKVError, RequestError, UnsupportedModel
from hybridkv.eviction import Evictor, most_held, query_buffers_for
from hybridkv.kernels.formats.kv_format import pool_format
from hybridkv.kernels.linear.block_linear import keeps_blocks
from hybridkv.kernels.linear.fp8 import keeps_codes
from hybridkv.kernels.linear.int4 import int4_pays
from hybridkv.kernels.linear.packed import keeps_packed
from hybridkv.models import cache_schema, check_exact, load_model, open_checkpoint, with_query_buffer
from hybridkv.models.config import ModelConfig
from hybridkv.models.fingerprint import config_digest, fingerprint_of
from hybridkv.overrides import overridden
from hybridkv.planner import CachePlan, fewer_checkpoints, human, model_bytes, plan_cache
from hybridkv.prefix import Prefix, read_prefix
from hybridkv.request import Request
from hybridkv.text.call_formats import calls_in
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.constraint import Thoughts, thoughts_of
from hybridkv.text.memory import ChatMemory
from hybridkv.text.messages import check_messages
from hybridkv.text.prompt import encode_pieces, render_pieces
from hybridkv.text.reasoning import ReasoningSplitter, assistant_message, reasoning_of
from hybridkv.text.tokenizer import Tokenizer
from hybridkv.warming import offer_next_turn

if TYPE_CHECKING:
    from hybridkv.parallel.launch import Place
    from hybridkv.ranks import Ranks

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Eviction = EvictionConfig | int | None | object  # object: INHERIT, what the LLM was opened with
REUSE = ReuseConfig()  # where nothing is said of it


class LLM:
    """A model that is open, with its cache. It may be used from several threads: what they ask runs together.

    Args:
        model: a Hugging Face folder, a .gguf file or a hub id; None: the embedded SmolLM2-135M.
        device: "cpu", "cuda" or "cuda:1"; "auto": a GPU where torch sees one.
        dtype: of the weights, "float32" or "bfloat16"; "auto": what the files and the device suggest.
        exact: the same bits for a token whatever else is in the batch and however prompts are cut into chunks; slower.
        cache: how keys and values are stored, and what requests keep.
        max_requests: requests resident at the same time; more may wait.
        max_context: tokens of the longest request, prompt and answer; None: what the model allows and the memory holds.
        memory: bytes for weights and cache together, or "12GiB"; None: nine tenths of what is free.
        step_tokens: tokens that one step computes at the most; None: 512, on a GPU 4096.
        weight_dtype: "fp8": matrices as E4M3 codes, a scale for each row; "f16": on a CPU, multiplied with float32;
            "int4": f16 and, for up to 4 rows, the 4-bit codes of a GGUF file, whose products are rounded to bfloat16: a
            request beside others may answer otherwise than alone; "released": the FP8 and FP4 codes of DeepSeek-V4's
            files, or FP8 ones of Qwen3.5's, with their scales; "plain": as dtype; "auto": plain, but on a GPU those of
            a GGUF file stay packed and, with bfloat16, such codes as they are, and on a CPU they are f16 (with AVX-512
            int4) where `dtype` is left to "auto" and comes to float32 and the files have 16 bits a weight or fewer.
        host_cache: bytes on the host, or "16GiB", for caches that wait for a next turn: state of those without a slot,
            and on a GPU the pages of those that made room for others; there also what prompts may begin with and the
            GPU has no room for; None: a quarter of what is free, at most 32 GiB, on a CPU 1 GiB.
        keep_preempted: running requests that make room for others wait on the host with their caches, and are not
            computed again (not over ranks; not run on a GPU yet).
        disk_cache: a folder for `save` and `load`; it is made when something is saved.
        disk_size: bytes that all that is saved there may have, or "100GiB"; None: what the disk holds.
        fetch_progress: called with (bytes done, all bytes) while the embedded model is fetched.
        load_progress: called with (tensors done, all tensors) while weights are read.
        compile_progress: called with (kernels done, kernels so far) while kernels are compiled, by any thread: on a
            GPU, where such an engine is opened for the first time.
        reuse: what requests leave behind for others that begin alike; None: nothing.
        tp: GPUs that share the model (docs/tensor_parallel.md); `device` is the first of them, `memory` is of each.

    `sampling_defaults` has what the model's own generation_config says of sampling, `plan` the sizes of the cache.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        exact: bool = False,
        cache: CacheConfig | None = None,
        max_requests: int = EngineConfig.max_requests,
        max_context: int | None = EngineConfig.max_context,
        memory: int | str | None = EngineConfig.memory,
        step_tokens: int | None = None,
        weight_dtype: str = "auto",
        host_cache: int | str | None = EngineConfig.host_cache,
        keep_preempted: bool = EngineConfig.keep_preempted,
        disk_cache: str | Path | None = None,
        disk_size: int | str | None = None,
        fetch_progress: Progress | None = None,
        load_progress: Progress | None = None,
        compile_progress: Progress | None = None,
        reuse: ReuseConfig | None = REUSE,
        tp: int | Place = 1,
    ) -> None:
        if step_tokens is None and resolve_device(device).type == "cuda":
            step_tokens = GPU_STEP_TOKENS
        limits = EngineConfig(
            max_requests,
            max_context,
            memory,
            EngineConfig.step_tokens if step_tokens is None else step_tokens,
            host_cache,
            keep_preempted,
        )
        self.store = None if disk_cache is None else Store(disk_cache, parse_bytes(disk_size, "disk_size"))
        if not isinstance(cache, CacheConfig | None) or not isinstance(model, str | Path | None):
            raise HybridKVError("model must be a path or a name, and cache a CacheConfig")
        if not isinstance(reuse, ReuseConfig | None):
            raise HybridKVError(f"reuse must be a ReuseConfig or None, not {type(reuse).__name__}")
        self.reuse_config = reuse
        self.documents: dict[str, Document] = {}  # that a server offers, by name
        self.fp8 = resolve_fp8(weight_dtype)
        self.cache_config = overridden(cache or CacheConfig())
        self.device = resolve_device(device)
        self.ranks: Ranks | None = None
        path = locate_model(model, fetch_progress)
        if tp != 1:
            from hybridkv.parallel.rank_bytes import reuse_over_ranks
            from hybridkv.ranks import take_ranks

            given = dict(
                model=str(path), dtype=dtype, exact=exact, cache=self.cache_config, max_requests=max_requests,
                max_context=max_context, memory=memory, step_tokens=limits.step_tokens, weight_dtype=weight_dtype,
                reuse=reuse,
            )  # fmt: skip
            self.ranks = take_ranks(tp, self.device, given, disk_cache is None)
            self.device, self.reuse_config = self.ranks.device, reuse_over_ranks(reuse, self.cache_config)
        try:
            self._open(path, dtype, exact, limits, weight_dtype, load_progress, compile_progress)
        except BaseException as problem:
            if self.ranks is not None:
                self.ranks.failed(problem)
            raise
        if self.ranks is not None:
            self.ranks.opened(self)

    def _open(
        self,
        path: Path,
        dtype: str,
        exact: bool,
        limits: EngineConfig,
        weight_dtype: str,
        load_progress: Progress | None,
        compile_progress: Progress | None,
    ) -> None:
        """Size the cache, load the model and put an engine around it."""
        with open_checkpoint(path) as checkpoint:
            self.path, self.config = checkpoint.path, ModelConfig.from_dict(checkpoint.config)
            self.dtype = resolve_dtype(dtype, self.device, checkpoint.config)
            self.set_aside = dict(checkpoint.set_aside)
            self.tokenizer, self._no_tokenizer = load_tokenizer(checkpoint)
            self.sampling_defaults = sampling_defaults(checkpoint)  # what SamplingParams leaves open
            self.cache_config = with_query_buffer(self.config, self.cache_config)
            check_exact(self.config, exact, self.cache_config.state_dtype)
            check_fp8_cache(self.cache_config, self.device)
            self.packed = weight_dtype == "auto" and not exact and keeps_packed(self.device, self.dtype)
            if self.config.v4 is not None and weight_dtype in ("f16", "int4"):
                raise HybridKVError(
                    f"weight_dtype='{weight_dtype}' is not there for DeepSeek-V4; use 'released', 'plain' or 'auto'"
                )
            keeps = weight_dtype == "auto" and not exact and keeps_blocks(self.device, self.dtype)
            self.released = weight_dtype == "released" or (keeps and bool(checkpoint.block_forms()))
            if self.released and exact:
                raise HybridKVError(
                    "exact mode computes with plain weights, not with weight_dtype='released'; use 'auto' or 'plain'"
                )
            if self.released and not checkpoint.block_forms():
                raise HybridKVError(
                    "weight_dtype='released' keeps FP8 and FP4 codes that have a scale for each block, and "
                    f"{self.path.name} has none that are read; use 'auto' or 'plain'"
                )
            narrow = checkpoint.narrow and self.config.v4 is None
            self.half = resolve_half(weight_dtype, dtype, self.device, self.dtype, exact, narrow)
            takes4 = weight_dtype == "int4" or (weight_dtype == "auto" and int4_pays())
            takes4 = takes4 and self.ranks is None
            self.int4 = checkpoint.codes4_names() if self.half and takes4 else frozenset()
            if weight_dtype == "int4" and not self.int4:
                raise HybridKVError(
                    "weight_dtype='int4' takes the 4-bit codes of a GGUF file (Q4_0, Q4_1 or Q4_K), and "
                    f"{self.path.name} has none; use 'f16', 'plain' or another file"
                )
            if self.ranks is not None:  # from here on `config` is of this rank's part
                self.config = self.ranks.cut(checkpoint, self.config, exact, self.packed, self.released)
            self.plan = self._plan(checkpoint, limits, exact)
            self.weights = WeightsIdentity(checkpoint.files)
            how = (self.device, self.dtype, load_progress, exact, self.fp8, self.packed, self.half)
            with on_device(self.device):  # matrices are packed and quantised by kernels
                if self.ranks is not None:
                    self.model = self.ranks.load(checkpoint, *how)
                else:
                    self.model = load_model(self.config, checkpoint, *how, self.int4, self.released)
        plan, rows = self.plan, None if self.reuse_config is None else self.plan.checkpoints
        host = None if limits.host_bytes is None else HostTier(limits.host_bytes, self.device)
        if self.ranks is not None:  # free memory, and what a copy of pages does, differ from rank to rank
            host = HostTier(CPU_LIMIT, self.device, pages=False)
        self.manager = KVCacheManager(
            plan.schema, plan.pages, plan.slots, plan.max_tokens, self.device, exact, plan.query_buffers,
            checkpoints=rows, host=host,
        )  # fmt: skip
        self.manager.host.preempted = limits.keep_preempted and self.ranks is None
        if self.reuse_config is not None:
            reuse = Reuse(self.manager, self.reuse_config.every, policy_of(self.reuse_config.policy, plan.schema))
            reuse.host.on = self.ranks is None  # what a rank's host has room for, others do not know
        self.manager.model_fingerprint = fingerprint_of(self.model)
        eos = self.tokenizer.eos_ids if self.tokenizer and self.tokenizer.eos_ids else frozenset(self.config.eos_ids)
        evictor = Evictor.make(self.cache_config, self.manager, scale=self.config.attention_scale)
        parts = self.model, self.manager, self.tokenizer, limits.step_tokens, eos, evictor
        ranks = self.ranks
        self.engine = Engine(*parts) if ranks is None else ranks.engine(self.cache_config, self.dtype, *parts)
        self.engine.sampling_defaults = self.sampling_defaults
        if self.ranks is None:
            precompile(self.engine, compile_progress)
        self.owner = EngineOwner(self.engine)
        self.warm: WarmReader | None = None  # reads next turns before they come
        if self.reuse_config is not None and self.reuse_config.warm and self.ranks is None:
            self.warm = WarmReader(self.reuse_config.warm_least)
            self.warm.wake = self.owner.in_background(self.warm)
        plain = "int4" if self.int4 else "f16" if self.half else str(self.dtype).removeprefix("torch.")
        form = "released" if self.released else "fp8" if self.fp8 else "packed" if self.packed else plain
        self.engine.about = {"model": self.path.name, "weights": form}
        if self.ranks is not None:
            self.engine.about["ranks"] = str(self.ranks.group.size)
        self.weight_form = form
        template = self.tokenizer.chat_template if self.tokenizer else None
        self.chat_template = (
            ChatTemplate(template, bos=self.tokenizer.bos_text, eos=self.tokenizer.eos_text)
            if self.tokenizer and template
            else None
        )

    def _plan(self, checkpoint: Checkpoint, limits: EngineConfig, exact: bool) -> CachePlan:
        """Decide all sizes before any weight is read."""
        schema = cache_schema(self.config, self.cache_config, self.dtype)
        has, device = checkpoint.__contains__, self.device.type
        fp8 = self.fp8 and not exact and keeps_codes(self.device, self.dtype)
        plain = packed = model_bytes(self.config, has, self.dtype, device, fp8, half=self.half, int4=self.int4)
        if self.released:
            plain = packed = model_bytes(self.config, has, self.dtype, device, blocks=checkpoint.block_forms())
        if not exact and keeps_packed(self.device, self.dtype):
            packed = model_bytes(self.config, has, self.dtype, device, packed=checkpoint.packed_bytes())
        weights = packed if self.packed else plain
        if self.ranks is not None:
            weights = self.ranks.weight_bytes(checkpoint, self.dtype, fp8, self.packed, self.half)
        memory = limits.memory_bytes or int(free_memory(self.device) * HEADROOM)
        if self.ranks is not None:
            memory, weights = self.ranks.agree(memory, weights, shared=limits.memory_bytes is None)
        if weights >= memory:
            given = "the limit" if limits.memory_bytes else "free memory"
            form = "fp8" if fp8 else "f16" if self.half else str(self.dtype).removeprefix("torch.")
            form = "their released form" if self.released else form
            form += " and 4 bits" if self.int4 else ""
            form = "packed" if weights < plain else f"in {form}"
            less = "dtype='bfloat16', " if self.dtype == torch.float32 and not self.half else ""
            less = "weight_dtype='released', " if not (self.released or exact) and checkpoint.block_forms() else less
            less = "weight_dtype='auto', " if packed < weights else less
            raise HybridKVError(
                f"the weights take {human(weights)} {form}, {given} is {human(memory)}; use {less}a smaller model or "
                "more memory"
            )
        context = limits.max_context or self.config.max_positions
        if context > self.config.max_positions:
            raise HybridKVError(
                f"max_context {context} exceeds the model's own limit of {self.config.max_positions} tokens"
            )
        held = most_held(self.cache_config, limits.step_tokens, 1 if self.ranks is None else self.ranks.parts)
        query_buffers = query_buffers_for(self.cache_config, limits.step_tokens, limits.max_requests)
        captures = self.device.type == "cuda"
        codes = captures and self.released
        beside = workspace(self.config, schema, self.cache_config, limits, context, self.dtype, captures, codes)
        room_beside = beside.nbytes if self.ranks is None else self.ranks.largest(beside.nbytes)
        rows, least = self._checkpoints(schema, memory)

        def plan(rows: int, room: int | None = memory - weights) -> CachePlan:
            return plan_cache(
                schema,
                limits.max_requests,
                context,
                room,
                shrink_context=limits.max_context is None,
                held=held,
                query_buffers=query_buffers,
                workspace=room_beside,
                checkpoints=rows,
                staging=staging_bytes(captures, limits.host_bytes),
            )

        found: CachePlan | None = None  # the one with most checkpoints, of those that are less than what is asked for
        for fewer in fewer_checkpoints(rows, least):
            try:
                made = plan(fewer)
            except HybridKVError:
                if fewer == least and found is None:
                    raise
                continue
            if made == plan(fewer, None):
                return made
            found = found or made
        assert found is not None
        return found

    def _checkpoints(self, schema: CacheSchema, memory: int) -> tuple[int, int]:
        """Rows for checkpoints, and how many of these there must be. Where columns are impossible nothing is reused."""
        if self.reuse_config is None:
            return 0, 0
        try:
            check_column(schema)
        except HybridKVError as problem:
            if replace(self.reuse_config, warm=REUSE.warm, warm_least=REUSE.warm_least) != REUSE:
                raise
            print(f"hybridkv: nothing is reused: {problem}", file=sys.stderr)
            self.reuse_config = None
            return 0, 0
        rows = self.reuse_config.rows(schema.slot_bytes, memory, self.device.type == "cpu")
        return rows, 0 if self.reuse_config.checkpoints == "auto" else rows

    # ---- answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        eviction: Eviction | Sequence[Eviction] = INHERIT,
        cache: bool | str = True,
        schema: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts, computed together.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: how to choose tokens and when to end, for all of them or one for each.
            eviction: what a request keeps: an EvictionConfig, a number (its budget), or None (everything); for all of
                them or one for each. Without it: what the LLM was opened with.
            schema: a JSON schema that all answers fit, in place of `structured_outputs` of the parameters.
            cache: whether prompts begin with what others have read, and others with what they read: True, False,
                "read" (only the first) or "write" (only the second).
        """
        if schema is not None:
            listed = list(params) if isinstance(params, Sequence) else [params] * len(_as_list(prompts))
            params = [replace(each or SamplingParams(), structured_outputs={"json": schema}) for each in listed]
        tickets = [Ticket(add) for add in self.requests(prompts, params, eviction, cache)]
        try:
            self.owner.submit(tickets)
            for ticket in tickets:
                ticket.wait()
        finally:
            self.owner.cancel(tickets)
        return [Completion.of(ticket.result()) for ticket in tickets]

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        eviction: Eviction | Sequence[Eviction] = INHERIT,
        cache: bool | str = True,
    ) -> AnswersAsTheyEnd:
        """Like `generate`, but each answer as soon as it is whole, with the number of its prompt, from 0.

        Leaving the loop early stops the requests that are left.
        """
        return AnswersAsTheyEnd(self.owner, self.requests(prompts, params, eviction, cache))

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        eviction: Eviction | Sequence[Eviction],
        cache: bool | str = True,
    ) -> list[Callable[[Engine], Request]]:
        """What `generate` hands to the engine's thread: a function for each prompt that begins its request."""
        listed = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts were given with {len(each)} sampling parameters")
        evictions = list(eviction) if isinstance(eviction, list | tuple) else [eviction] * len(listed)
        if len(evictions) != len(listed):
            raise RequestError(f"{len(listed)} prompts were given with {len(evictions)} settings of eviction")
        asked = zip(listed, each, evictions, strict=True)
        return [self._adding(self.encode(p), s, e, cache=cache) for p, s, e in asked]

    def _adding(
        self,
        tokens: list[int],
        params: SamplingParams | None,
        eviction: Eviction,
        thoughts: Thoughts | None = None,
        **how: Any,
    ) -> Callable[[Engine], Request]:
        """What the engine's thread does to begin a request; a grammar is compiled on this one."""
        ready = self.engine.compiled(params, thoughts) if isinstance(params, SamplingParams) else params
        return lambda engine: engine.add(tokens, ready, eviction=eviction, **how)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        eviction: Eviction = INHERIT,
        cache: bool | str = True,
    ) -> Stream:
        """The answer's text piece by piece. Leaving the loop early stops it.

        Args:
            prompt: a text, or a list of token ids.
            params: as in `generate`.
            eviction: as in `generate`.
            cache: as in `generate`.
        """
        return Stream(self.owner, self.single_request(prompt, params, eviction, cache))

    def single_request(
        self, prompt: Prompt, params: SamplingParams | None, eviction: Eviction, cache: bool | str = True
    ) -> Callable[[Engine], Request]:
        """What `stream` hands to the engine's thread: a function that begins its request."""
        one_answer(params)
        return self._adding(self.encode(prompt), params, eviction, cache=cache)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        cache: bool | str = True,
        **template_variables: Any,
    ) -> Completion:
        """The answer to a conversation, in the model's own chat format.

        Args:
            messages: objects such as {"role": "user", "content": "Hello"}, with tool_calls and the like where a
                template knows them.
            params: as in `generate`.
            tools: functions that the model may call, as JSON schemas, if its template takes them. Calls are in the
                text.
            thinking: on or off, if the template has such a switch; None: as the template has it.
            eviction: as in `generate`.
            cache: as in `generate`.
            template_variables: whatever else the template reads, such as reasoning_effort="low".

        The thoughts of a model that thinks are in `reasoning`, apart from `text`, where the template marks them.
        """
        asked = self.chat_request(messages, params, tools, thinking, eviction, template_variables, cache)
        ticket = Ticket(asked.add)
        try:
            self.owner.submit([ticket])
            ticket.wait()
        finally:
            self.owner.cancel([ticket])
        found = Completion.of(ticket.result())
        asked.ended(found)
        return found.divided(asked.splitter)

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        eviction: Eviction = INHERIT,
        cache: bool | str = True,
        **template_variables: Any,
    ) -> ChatStream:
        """Like `chat`, piece by piece: ChatPiece(text, reasoning), `reasoning` True while the model thinks."""
        one_answer(params)
        asked = self.chat_request(messages, params, tools, thinking, eviction, template_variables, cache)
        return ChatStream(Stream(self.owner, asked.add), asked.splitter, asked.ended)

    def chat_request(
        self,
        messages: Messages,
        params: SamplingParams | None,
        tools: Tools,
        thinking: bool | None,
        eviction: Eviction,
        template_variables: Mapping[str, Any],
        cache: bool | str = True,
    ) -> ChatRequest:
        """What `chat` hands to the engine's thread, and how the answer is divided."""
        tokenizer, template = self.chat_parts()
        pieces = self._chat_pieces(messages, tools, thinking, template_variables)
        text = "".join(text for text, _ in pieces)
        splitter = partial(reasoning_of, template, text)
        thoughts = thoughts_of(template, tokenizer, splitter())
        memory = self.chat_memory
        spelled = memory.spell(pieces, cache=cache)
        marks = memory.marks.marks(spelled.ids)
        adding = self._adding(spelled.ids, params, eviction, thoughts, cache=cache, marks=marks)

        def add(engine: Engine) -> Request:
            request = adding(engine)
            request.text_memory = spelled.remembered
            return request

        def ended(found: Completion) -> None:
            for sample in found.samples:
                if sample.finish_reason in ("stop", "length"):
                    ended = sample.finish_reason == "stop"
                    memory.remember(spelled, sample.text, sample.token_ids, ended, cache)
            if cache is not True or found.others or self.engine.resolve_eviction(eviction) is not None:
                return
            if found.finish_reason != "stop" or (tools and calls_in(template, found.text)):
                return
            answer = found.divided(splitter)
            said = [*messages, assistant_message(answer.text, answer.reasoning)]

            def spell(text: str) -> list[int]:
                question = {"role": "user", "content": text}
                return memory.spell(self._chat_pieces([*said, question], tools, thinking, template_variables)).ids

            offer_next_turn(self.warm, memory.marks, [*spelled.ids, *found.token_ids], len(spelled.ids), spell)

        return ChatRequest(add, splitter, ended)

    # ---- what many prompts begin with

    def prefix(
        self,
        prompt: Prompt | Messages,
        pin: bool = True,
        *,
        tools: Tools = None,
        thinking: bool | None = None,
        **template_variables: Any,
    ) -> Prefix:
        """Read once what many prompts will begin with. They find it by themselves, in `generate`, `chat` and the rest.

        Args:
            prompt: a text, token ids, or messages in the form of `chat`: then it is what all chats begin with that
                begin with these.
            pin: keep it however short memory is, until `Prefix.drop`; all that is pinned may have half of the cache.
            tools: as in `chat`, for messages.
            thinking: as in `chat`, for messages.
            template_variables: as in `chat`, for messages.

        Whole columns of it are kept (64 tokens for most models), and the recurrent state at the end of the last.
        """
        self._alone("a prefix that is kept by name")
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            given: list[Any] = list(prompt)
            tokens = self._common_tokens(given, tools, thinking, template_variables)
        else:
            tokens = self.encode(prompt)  # type: ignore[arg-type]
        return read_prefix(self.owner, tokens, pin)

    def _common_tokens(
        self, messages: Messages, tools: Tools, thinking: bool | None, variables: Mapping[str, Any]
    ) -> list[int]:
        """Token ids with which all chats begin that begin with these messages."""
        check_messages(messages)
        shown: dict[str, Any] = {"tools": tools, "thinking": thinking, **variables}
        asked = messages[-1]["role"] == "user"
        follow = "assistant" if asked else "user"
        found = [self.encode_chat([*messages, {"role": follow, "content": text}], **shown) for text in ("a", "b")]
        if asked:
            found.append(self.encode_chat(messages, **shown))
        alike = (len(set(each)) == 1 for each in zip(*found))
        return found[0][: sum(takewhile(bool, alike))]

    # ---- documents

    def compress(
        self,
        document: Prompt,
        *,
        ratio: float | None = None,
        budget: int | None = None,
        policy: object = "replay",
        system: str | None = None,
        progress: DocumentProgress | None = None,
    ) -> Document:
        """Read a text and keep a part of its cache, for any number of questions that are not known yet.

        Args:
            document: a text, which is put into the model's chat format where it has one, or token ids as they are.
            ratio: how many times smaller the cache becomes; 4 where no budget is given.
            budget: tokens kept a stream, on average, in place of a ratio.
            policy: what is kept, as in EvictionConfig: "replay" (the model reads the text twice, and what it looks at
                while it repeats it stays), or one that chooses at once, such as "auto" or "keydiff".
            system: a system prompt, which is kept whole.
            progress: called with (what is being done, tokens done, all tokens).

        The cache stays in the model until `Document.close`. A model with recurrent layers keeps their state as it is:
        keys and values alone become fewer.
        """
        self._alone("a document")
        return compress(self, document, ratio, budget, policy, system, progress)

    def load_document(self, path: str | Path) -> Document:
        """A document that `Document.save` wrote with this model, in any process. Nothing is read again.

        A file that is damaged, or of another model or KV dtype, is refused, with what differs. Where slots or pages are
        short, caches that were unused longest make room.
        """
        self._alone("a document")
        return load_document(self, path)

    def _alone(self, what: str) -> None:
        if self.ranks is not None:
            raise RequestError(f"over several ranks {what} is not available yet: use tp=1")

    # ---- on disk

    def save(self, conversation: Any, name: str) -> int:
        """Save a `conversation`, with its cache, as `name` in the folder `disk_cache`; returns the bytes written.

        What was saved under the name before is replaced in one go. Only what is new is written: a conversation that
        has grown, and others that begin alike, share what they have in common.
        """
        return conversation.save_in(self.open_store(), name)

    def load(self, name: str, params: SamplingParams | None = None, *, convert: bool = False) -> Any:
        """The conversation that was saved under a name, in any process: it goes on as if it had never been away.

        Args:
            name: as it was given to `save`; or the path of a file that `Conversation.save` wrote.
            params: how answers are chosen; they are the caller's, not the store's.
            convert: take a cache of another KV or state dtype, too: entries are encoded again and state is rounded, so
                answers may differ. Not in exact mode.

        One of other weights, another architecture or dtype is refused, with what differs, and so is one that is
        damaged; nothing is taken then. Another page size, context or number of requests makes no difference.
        """
        kind = import_module("hybridkv.conversation").Conversation  # it stands above this module
        if isinstance(name, Path) or (isinstance(name, str) and os.sep in name):
            return kind.load(self, name, params)
        return kind.load_from(self, self.open_store(), name, params, convert=convert)

    def forget(self, salt: bytes | None = None, text: Sequence[int] | None = None) -> None:
        """Drop what is kept for later prompts: entries that were read and states at their ends, wherever they lie,
        pinned prefixes, and answers and calls as they were sampled. What runs goes on; conversations keep their own
        caches, and saved ones stay in their folder (`hybridkv cache rm`).

        Args:
            salt: only what is kept under it, b"" being that of prompts without one; None: all there is.
            text: token ids. Only what is kept of this text goes, as far as no other text shares it: its last columns,
                up to where another kept text leaves it, a request reads or something is pinned.
        """
        if not isinstance(salt, bytes | None):
            raise RequestError(f"a salt is bytes, or None for all there is, not {type(salt).__name__}")
        tokens = None if text is None else self.engine.check_tokens(self.encode(text))

        def drop(engine: Engine) -> None:
            reuse = engine.manager.reuse
            if reuse is not None and tokens is None:
                reuse.forget(salt)
            elif reuse is not None:
                reuse.forget_text(salt or b"", np.array(tokens, np.int32))

        if self.ranks is not None:
            raise RequestError(NOT_OVER_RANKS.format(what="forgetting what is kept"))
        if self.warm is not None:
            self.warm.forget(salt if tokens is None else salt or b"", tokens)
        self.owner.run(drop)
        if self.chat_template is not None and self.tokenizer is not None:
            self.chat_memory.forget(salt, tokens)

    def open_store(self) -> Store:
        """The folder of saved caches, or RequestError."""
        if self.store is None:
            raise RequestError("there is no folder to save in; open the model with disk_cache='DIR'")
        return self.store

    def cache_key(self, adapter: str = "", salt: str = "") -> Key:
        """What a saved cache depends on beside its tokens, part by part, a request's `adapter` and `salt` included."""
        exact, schema = self.manager.exact, self.plan.schema
        layers = schema.compressed
        full = [pool_format(table.pool.tensors) for table in self.manager.tables.values()]
        kv = layers[0].entries.name if layers else next((form.name for form in full if form is not None), "none")
        key = {
            "architecture": self.config.architecture,
            "config": config_digest(self.config),
            "weights": self.weights.digest(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight_form": self.weight_form,
            "kv_dtype": kv,
            "state_dtype": "+".join(sorted({t.dtype for s in schema.states if not s.lent for t in s.tensors})),
            "index_dtype": next((layer.index.name for layer in layers if layer.index is not None), ""),
            "mode": "exact" if exact else "fast",
            "adapter": adapter,
            "salt": salt,
        }
        if exact:  # bits depend on these
            gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
            versions = {"torch": torch.__version__, "triton": _triton_version()}
            key |= {"device": f"{self.device.type} {gpu}".strip(), **versions}
        return key

    def logits(self, token_ids: Sequence[int], prefill: int | None = None, chunk: int | None = None) -> Tensor:
        """[T, vocab] f32: what the model expects after each token of a text, computed by the path that answers take.

        Args:
            token_ids: the text.
            prefill: how many of its tokens are read as a prompt, the others one by one; None: all.
            chunk: tokens of the prompt that a step reads; None: all of them.
        """
        return self.owner.run(lambda engine: engine.score(token_ids, prefill, chunk), drained=True)

    def close(self) -> None:
        """End what runs, and the engine's thread. Memory goes back when nothing refers to the LLM any more."""
        if self.warm is not None:
            self.warm.close()
        self.owner.close()
        if self.ranks is not None:
            self.ranks.end()
        self.engine.grammars.close()
        if self.chat_template is not None:
            self.chat_template.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a `prompt`: of a text as the tokenizer has it, with a first token if the model wants one. What
        is a list of ids already stays as it is.
        """
        if not isinstance(prompt, str):
            if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
                raise RequestError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__}")
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(self._no_tokenizer)
        return self.tokenizer.encode(prompt)

    def render(
        self, messages: Messages, *, tools: Tools = None, thinking: bool | None = None, **template_variables: Any
    ) -> str:
        """A conversation as text in the model's own chat format, ready for an answer; see `chat` for the arguments."""
        return "".join(text for text, _ in self._chat_pieces(messages, tools, thinking, template_variables))

    def encode_chat(
        self, messages: Messages, *, tools: Tools = None, thinking: bool | None = None, **template_variables: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for an answer; see `chat` for the arguments. Control tokens spelled inside
        a message stay plain text.
        """
        return encode_pieces(self.chat_parts()[0], self._chat_pieces(messages, tools, thinking, template_variables))

    def _chat_pieces(
        self, messages: Messages, tools: Tools, thinking: bool | None, variables: Mapping[str, Any]
    ) -> list[tuple[str, bool]]:
        tokenizer, template = self.chat_parts()
        return render_pieces(template, tokenizer, messages, tools=tools, thinking=thinking, **variables)

    @cached_property
    def chat_memory(self) -> ChatMemory:
        """Marks of the model's chat template, and answers as they were sampled. Nothing is remembered where nothing is
        reused, nor in exact mode: there the past must not choose among token sequences of one text.
        """
        tokenizer, template = self.chat_parts()
        return ChatMemory(template, tokenizer, on=self.reuse_config is not None and not self.manager.exact)

    def chat_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        """What a chat needs beside the model, or RequestError where the model's files lack it."""
        if self.tokenizer is None or self.chat_template is None:
            raise RequestError(f"{self.path.name} has no chat template; give plain text or token ids")
        return self.tokenizer, self.chat_template


@dataclass(frozen=True)
class ChatRequest:
    """A chat on its way: what begins its request, what makes the splitter of its answer, and what remembers it."""

    add: Callable[[Engine], Request]
    splitter: Callable[[], ReasoningSplitter]
    ended: Callable[[Completion], None]  # told of the answer, before it is divided


def one_answer(params: SamplingParams | None) -> None:
    """Refuse parameters that ask for several answers."""
    n = getattr(params, "n", 1)
    if n != 1:
        raise RequestError(f"a stream is one answer, {n} were asked for with n={n}; use generate or chat")


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if (
        not isinstance(prompts, Sequence)
        or isinstance(prompts, str | bytes)
        or (prompts and isinstance(prompts[0], Integral))  # numpy's too
    ):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def load_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or None and what to say when text arrives: a model without one still runs on token ids."""
    try:
        gguf = checkpoint.kind == "gguf"
        folder = checkpoint.path
        found = (
            Tokenizer.from_gguf(checkpoint.metadata) if gguf else Tokenizer.from_folder(folder, checkpoint.generation)
        )
    except UnsupportedModel as problem:
        return None, str(problem)
    return found, f"{checkpoint.path.name} has no tokenizer; give token ids instead of text"
