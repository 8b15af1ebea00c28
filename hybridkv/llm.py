"""LLM: the offline face: a model that is open, and what is asked of it: answers, prefixes, documents, saved caches.

How it is opened is opening.py's, how prompts become token ids prompts.py's, how they become requests asking.py's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybridkv.answers import AnswersAsTheyEnd, ChatStream, Completion, Stream
from hybridkv.asking import (
    Add,
    ChatRequest,
    Eviction,
    adding,
    adding_all,
    adding_chat,
    listed_prompts,
    one_answer,
)
from hybridkv.cache.convert import Key
from hybridkv.cache.store import Store
from hybridkv.cache_key import cache_key
from hybridkv.checkpoint.source import locate_model
from hybridkv.config import GPU_STEP_TOKENS, CacheConfig, EngineConfig, ReuseConfig, SamplingParams, parse_bytes
from hybridkv.devices import resolve_device, resolve_fp8
from hybridkv.document import Document, compress, load_document
from hybridkv.document import Progress as DocumentProgress
from hybridkv.embedded import Progress
from hybridkv.engine.engine import INHERIT
from hybridkv.engine.owner import EngineOwner, Ticket
from hybridkv.engine.warm import WarmReader
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.opening import open_model, over_ranks, told_to_others
from hybridkv.overrides import overridden
from hybridkv.prefix import Prefix, read_prefix
from hybridkv.prompts import Messages, Prompt, Tools
from hybridkv.settings import REUSE, Settings
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.memory import ChatMemory
from hybridkv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hybridkv.parallel.launch import Place


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
            files, or of Qwen3.5's and Qwen3-Next's, with their scales; "plain": as dtype; "auto": plain, but on a GPU
            those of a GGUF file stay packed and, with bfloat16, such codes as they are, and on a CPU they are f16 (with
            AVX-512 int4) where `dtype` is left to "auto" and comes to float32 and the files have 16 bits a weight or
            fewer.
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
        self.documents: dict[str, Document] = {}  # that a server offers, by name
        with told_to_others(tp):
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
            fp8 = resolve_fp8(weight_dtype)
            cache, where = overridden(cache or CacheConfig()), resolve_device(device)
            path = locate_model(model, fetch_progress)
            settings = Settings(where, dtype, weight_dtype, fp8, exact, cache, limits, reuse)
            if tp != 1:
                settings = over_ranks(settings, tp, path, disk_cache is None)
        self.ranks = settings.ranks
        try:
            self._open(path, settings, load_progress, compile_progress)
            if self.ranks is not None:
                self.ranks.opened(self.owner)  # which lives as long as a stream of it does
        except BaseException as problem:
            if self.ranks is not None:
                self.ranks.failed(problem)
            raise

    def _open(
        self, path: Path, settings: Settings, load_progress: Progress | None, compile_progress: Progress | None
    ) -> None:
        """Open the model, and have a thread run its engine."""
        opened = self._opened = open_model(path, settings, load_progress, compile_progress)
        self.path, self.config, self.dtype, self.device = opened.path, opened.config, opened.dtype, settings.device
        self.cache_config, self.reuse_config = opened.settings.cache, opened.settings.reuse
        self.choice, self.weight_form = opened.choice, opened.weight_form
        self.plan, self.sampling_defaults, self.prompts = opened.plan, opened.sampling_defaults, opened.prompts
        self.tokenizer, self.chat_template = opened.prompts.tokenizer, opened.prompts.chat_template
        self.model, self.manager, self.engine = opened.model, opened.manager, opened.engine
        self.owner = EngineOwner(self.engine)
        self.warm: WarmReader | None = None  # reads next turns before they come
        if self.reuse_config is not None and self.reuse_config.warm and self.ranks is None:
            self.warm = WarmReader(self.reuse_config.warm_least)
            self.warm.wake = self.owner.in_background(self.warm)

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
            listed = list(params) if isinstance(params, Sequence) else [params] * len(listed_prompts(prompts))
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
    ) -> list[Add]:
        """What `generate` hands to the engine's thread: a function for each prompt that begins its request."""
        return adding_all(self.engine, self.encode, prompts, params, eviction, cache)

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
    ) -> Add:
        """What `stream` hands to the engine's thread: a function that begins its request."""
        one_answer(params)
        return adding(self.engine, self.encode(prompt), params, eviction, cache=cache)

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
        parts = self.engine, self.prompts, self.warm
        return adding_chat(*parts, messages, params, tools, thinking, eviction, template_variables, cache)

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
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            given: list[Any] = list(prompt)
            tokens = self.prompts.common_tokens(given, tools, thinking, template_variables)
        else:
            tokens = self.encode(prompt)  # type: ignore[arg-type]
        return read_prefix(self.owner, tokens, pin)

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
                while it repeats it stays), or one that chooses at once, such as "auto" or "keydiff"; over several ranks
                only such a one.
            system: a system prompt, which is kept whole.
            progress: called with (what is being done, tokens done, all tokens).

        The cache stays in the model until `Document.close`. A model with recurrent layers keeps their state as it is:
        keys and values alone become fewer.
        """
        return compress(self, document, ratio, budget, policy, system, progress)

    def load_document(self, path: str | Path) -> Document:
        """A document that `Document.save` wrote with this model, in any process. Nothing is read again.

        A file that is damaged, or of another model or KV dtype, is refused, with what differs. Where slots or pages are
        short, caches that were unused longest make room.
        """
        return load_document(self, path)

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
        if self.warm is not None:
            self.warm.forget(salt if tokens is None else salt or b"", tokens)
        self.owner.run(lambda engine: engine.forget(salt, tokens))
        if self.chat_template is not None and self.tokenizer is not None:
            self.chat_memory.forget(salt, tokens)

    def open_store(self) -> Store:
        """The folder of saved caches, or RequestError."""
        if self.store is None:
            raise RequestError("there is no folder to save in; open the model with disk_cache='DIR'")
        return self.store

    def cache_key(self, adapter: str = "", salt: str = "") -> Key:
        """What a saved cache depends on beside its tokens, part by part, a request's `adapter` and `salt` included."""
        return cache_key(self._opened, adapter, salt)

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
        return self.prompts.encode(prompt)

    def render(
        self, messages: Messages, *, tools: Tools = None, thinking: bool | None = None, **template_variables: Any
    ) -> str:
        """A conversation as text in the model's own chat format, ready for an answer; see `chat` for the arguments."""
        return "".join(text for text, _ in self.prompts.pieces(messages, tools, thinking, template_variables))

    def encode_chat(
        self, messages: Messages, *, tools: Tools = None, thinking: bool | None = None, **template_variables: Any
    ) -> list[int]:
        """Token ids of a conversation, ready for an answer; see `chat` for the arguments. Control tokens spelled inside
        a message stay plain text.
        """
        return self.prompts.encode_chat(messages, tools, thinking, template_variables)

    @property
    def chat_memory(self) -> ChatMemory:
        """Marks of the model's chat template, and answers as they were sampled. Nothing is remembered where nothing is
        reused, nor in exact mode: there the past must not choose among token sequences of one text.
        """
        return self.prompts.chat_memory

    def chat_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        """What a chat needs beside the model, or RequestError where the model's files lack it."""
        return self.prompts.chat_parts()
