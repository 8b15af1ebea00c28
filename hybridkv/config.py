"""What a user can set, with every default in one place. Frozen: what was resolved at the start stays so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from json import loads as parse_json
from typing import Any

from hybridkv.errors import HybridKVError, RequestError

# names here and in torch, which this file does not import
KV_DTYPES = {"f32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
INDEX_DTYPES = ("f32", "bf16", "fp8", "mxfp4", "nvfp4")
MODEL_DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = ("auto", "fp8", "f16", "int4", "released", "plain")
# those of eviction.named; auto is one of them, by what is known when the cache is cut
POLICY_NAMES = (
    "auto",
    "peak",
    "heads",
    "replay",
    "snapkv",
    "tova",
    "knorm",
    "keydiff",
    "leverage",
    "streaming",
    "random",
)
# policies by which streams keep different numbers of entries, unless their settings say spread=even
UNEVEN_POLICIES = ("auto", "peak", "heads", "replay")
# A prefill chunk is a whole number of these: the chunked delta rule gives the same bits however a prompt is cut at
# multiples of 64.
CHUNK_QUANTUM = 64


@dataclass(frozen=True)
class EvictionConfig:
    """What a request keeps. `CacheConfig` holds the same for requests that ask for nothing else.

    Args:
        budget: tokens kept per stream on average once the prompt is read.
        window: how many of the last queries vote on what to keep.
        recent: tokens at the end that stay whatever their score; the budget includes them.
        policy: what a token's score is: auto, peak, heads, snapkv, tova, knorm, keydiff, leverage, streaming or random,
            for conversations and documents replay too, with settings as in "peak:ahead=31" if need be; or a
            hybridkv.eviction.Policy of your own.
        scope: one list of survivors for each head, each layer, or for all: head | layer | global.
        bounded: evict at every step of prompt and answer: no more than budget + one step is ever held.
        decode_every: evict again to the budget every n generated tokens; 0: never.
        first: tokens at the beginning that stay whatever their score, as part of the budget; None: as many as the
            policy was made for.
    """

    budget: int
    window: int = 64
    recent: int = 64
    policy: object = "auto"
    scope: str = "head"
    bounded: bool = False
    decode_every: int = 0
    first: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.budget) or self.budget < 1:
            raise HybridKVError(f"budget must be a positive number of tokens, not {shown(self.budget)}; None keeps all")
        for name, low in (("window", 1), ("recent", 0), ("decode_every", 0), ("first", 0)):
            value = getattr(self, name)
            if name == "first" and value is None:
                continue
            if not is_whole(value) or not low <= value <= 1 << 20:
                raise HybridKVError(f"{name} must be a whole number from {low}, not {shown(value)}")
        if self.budget < self.recent + (self.first or 0):
            ends = f"{self.recent} recent" + (f" and the {self.first} first" if self.first else "")
            raise HybridKVError(
                f"budget {self.budget} is smaller than the {ends} tokens that always stay; raise budget or lower "
                + ("first or recent" if self.first else "recent")
            )
        if self.scope not in ("head", "layer", "global"):
            raise HybridKVError(f"scope must be head, layer or global, not {shown(self.scope)}")
        name = self.policy.partition(":")[0] if isinstance(self.policy, str) else None
        if name is not None and name not in POLICY_NAMES:
            choices = ", ".join(POLICY_NAMES)
            raise HybridKVError(
                f"policy {shown(name)} is unknown{meant(name, POLICY_NAMES)}; choose {choices}, or give a Policy"
            )


@dataclass(frozen=True)
class CacheConfig:
    """How the KV cache is stored, and what requests keep that bring no `EvictionConfig` of their own.

    Args:
        kv_dtype: f32 | bf16 | fp8 (E4M3, a scale for each token and head); auto: the model's own dtype.
        page_size: tokens a page holds (DeepSeek-V4 has `block` instead).
        budget: tokens kept per stream on average once the prompt is read; None: all.
        window: as in EvictionConfig; no request may ask for a longer one.
        recent: as in EvictionConfig.
        policy: as in EvictionConfig.
        scope: as in EvictionConfig.
        bounded: as in EvictionConfig.
        decode_every: as in EvictionConfig.
        first: as in EvictionConfig.
        keep_turns: of a conversation, the last turns that stay whole, beside what is before the first one; None: all.
        turn_budget: tokens kept a stream of each turn that is older than those.
        query_buffers: requests that keep their last queries at once: prompts not yet evicted, and conversations. None:
            as many as are needed, and without a budget one, for requests that bring their own; 0: without a budget,
            nobody may bring one.
        state_dtype: recurrent state of Gated DeltaNet layers: f32 | bf16 (half the bytes).
        index_dtype: DeepSeek-V4's index keys: f32 | bf16 | fp8 | mxfp4 | nvfp4; auto: mxfp4 beside fp8 KV.
        block: DeepSeek-V4 alone: tokens that a page covers, a multiple of both compression ratios (128).
        rings: the name of query_buffers before 0.2.
    """

    kv_dtype: str = "auto"
    page_size: int = 64
    budget: int | None = None
    window: int = 64
    recent: int = 64
    policy: object = "auto"
    scope: str = "head"
    bounded: bool = False
    decode_every: int = 0
    first: int | None = None
    keep_turns: int | None = None
    turn_budget: int = 128
    query_buffers: int | None = None
    state_dtype: str = "f32"
    index_dtype: str = "auto"
    block: int = 128
    rings: int | None = None

    def __post_init__(self) -> None:
        if self.rings is not None:
            warnings.warn("CacheConfig.rings is now called query_buffers", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "query_buffers", self.rings if self.query_buffers is None else self.query_buffers)
            object.__setattr__(self, "rings", None)  # so that dataclasses.replace does not bring it back
        least = 0 if self.budget is None else 1
        if self.query_buffers is not None and (
            not is_whole(self.query_buffers) or not least <= self.query_buffers <= 4096
        ):
            raise HybridKVError(f"query_buffers must be from {least} to 4096, or None, not {shown(self.query_buffers)}")
        if self.budget is None and (self.bounded or self.decode_every):
            raise HybridKVError("bounded and decode_every need a budget")
        settings = self._eviction_settings
        if self.budget is None:
            settings["budget"] = 1 << 20  # any: the others are checked all the same
        EvictionConfig(**settings)  # type: ignore[arg-type]
        check_turns(self.keep_turns, self.turn_budget)
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise HybridKVError(f"kv_dtype {self.kv_dtype!r} is not supported; choose auto, {', '.join(KV_DTYPES)}")
        if self.state_dtype not in ("f32", "bf16"):
            raise HybridKVError(f"state_dtype must be f32 or bf16, not {shown(self.state_dtype)}")
        if self.index_dtype not in ("auto", *INDEX_DTYPES):
            choices = ", ".join(INDEX_DTYPES)
            raise HybridKVError(f"index_dtype {shown(self.index_dtype)} is not supported; choose auto, {choices}")
        if not is_whole(self.block) or not 1 <= self.block <= 1 << 20:
            raise HybridKVError(f"block must be a number of tokens, a multiple of 128, not {shown(self.block)}")
        if not is_whole(self.page_size) or not 1 <= self.page_size <= 1 << 16:
            raise HybridKVError(f"page_size must be a whole number from 1 to 65536, not {shown(self.page_size)}")

    @property
    def _eviction_settings(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(EvictionConfig)}

    @property
    def eviction(self) -> EvictionConfig | None:
        """What requests keep, if they ask for nothing else; None: everything."""
        return None if self.budget is None else EvictionConfig(**self._eviction_settings)  # type: ignore[arg-type]


GPU_STEP_TOKENS = 4096  # a GPU's matrix units are busy from some 2000 tokens on, and a step's launches take 20 ms


@dataclass(frozen=True)
class EngineConfig:
    """How much may run at once.

    Args:
        max_requests: requests resident at the same time.
        max_context: longest request in tokens; None: the model's own limit, or what the memory holds.
        memory: bytes for weights and cache together, or "12GiB"; None: what fits.
        step_tokens: tokens one step computes: all decoding requests, then prompt chunks (at least 64 tokens).
        host_cache: bytes on the host for caches that wait for a next turn and, on a GPU, for what prompts begin with,
            or "16GiB"; 0: none; None: as the device has it.
        keep_preempted: requests that make room for others wait there with their caches, and are not computed again.
    """

    max_requests: int = 8
    max_context: int | None = None
    memory: int | str | None = None
    step_tokens: int = 512
    host_cache: int | str | None = None
    keep_preempted: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.max_requests) or not 1 <= self.max_requests <= 4096:
            raise HybridKVError(f"max_requests must be from 1 to 4096, not {shown(self.max_requests)}")
        if self.max_context is not None and (not is_whole(self.max_context) or self.max_context < 1):
            raise HybridKVError(f"max_context must be a positive number of tokens, not {shown(self.max_context)}")
        steps = self.step_tokens
        if not is_whole(steps) or not CHUNK_QUANTUM <= steps <= 1 << 20 or steps % CHUNK_QUANTUM:
            raise HybridKVError(
                f"step_tokens must be a multiple of {CHUNK_QUANTUM}, at most {1 << 20}, not {shown(steps)}"
            )
        parse_bytes(self.memory)
        parse_bytes(self.host_cache or None, "host_cache")

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as a number."""
        return parse_bytes(self.memory)

    @property
    def host_bytes(self) -> int | None:
        """`host_cache` as a number."""
        return 0 if self.host_cache == 0 else parse_bytes(self.host_cache, "host_cache")


REUSE_POLICIES = ("value", "lru")
CHECKPOINT_DTYPES = ("auto", "bf16")


@dataclass(frozen=True)
class ReuseConfig:
    """What requests leave behind for others that begin alike. Nothing of it changes an answer, but for
    `checkpoint_dtype`; pages are given up when they are needed.

    Args:
        checkpoints: bytes for copies of recurrent state, or "2GiB"; 0: none; "auto": up to 16 of them, on a CPU up to
            64 and 1 GiB, within a twentieth of the memory. Models without such state need none.
        every: tokens between checkpoints inside long texts; None: as their bytes suggest; 0: none there.
        policy: which checkpoint goes when there is no room: "value" (the one that can be expected to save least reading
            for its bytes, aged by use) or "lru" (the one used longest ago).
        warm: read the next turn of a chat before it comes, when nothing else is to be done, where the chat template
            shows it otherwise than it was computed (it drops thoughts); not over several ranks.
        warm_least: tokens; only where more of them would be read again.
        checkpoint_dtype: of recurrent state in checkpoints: "auto" (as the requests have it) or "bf16" (f32 state is
            rounded when it is kept; half the bytes, so twice as many for the same `checkpoints`; not in exact mode).
    """

    checkpoints: int | str = "auto"
    every: int | None = None
    policy: str = "value"
    warm: bool = False
    warm_least: int = 2048
    checkpoint_dtype: str = "auto"

    MOST_ROWS = 16
    MOST_ROWS_CPU = 64
    MOST_BYTES_CPU = 1 << 30
    SHARE = 20  # of the memory, one part in so many

    def __post_init__(self) -> None:
        if self.every is not None and (not is_whole(self.every) or not 0 <= self.every <= 1 << 24):
            raise HybridKVError(f"every must be a number of tokens, 0 for none, or None, not {shown(self.every)}")
        if self.checkpoints not in ("auto", 0):
            parse_bytes(self.checkpoints, "checkpoints")
        if self.policy not in REUSE_POLICIES:
            raise HybridKVError(f"policy must be {' or '.join(REUSE_POLICIES)}, not {shown(self.policy)}")
        if not isinstance(self.warm, bool):
            raise HybridKVError(f"warm must be True or False, not {shown(self.warm)}")
        if not is_whole(self.warm_least) or not 0 <= self.warm_least <= 1 << 24:
            raise HybridKVError(f"warm_least must be a number of tokens, 0 or more, not {shown(self.warm_least)}")
        if self.checkpoint_dtype not in CHECKPOINT_DTYPES:
            choices = " or ".join(CHECKPOINT_DTYPES)
            raise HybridKVError(f"checkpoint_dtype must be {choices}, not {shown(self.checkpoint_dtype)}")

    def rows(self, state_bytes: int, memory: int | None, cpu: bool) -> int:
        """Checkpoints that there is room for, each of `state_bytes` as it is kept. `memory`: that is given in all;
        None: any. `cpu`: whether the model runs on one.
        """
        if not state_bytes or self.checkpoints == 0:
            return 0
        if self.checkpoints != "auto":
            found = (parse_bytes(self.checkpoints, "checkpoints") or 0) // state_bytes
            if not found:
                raise HybridKVError(
                    f"a checkpoint takes {state_bytes} bytes, {shown(self.checkpoints)} were given for all of them; "
                    "give more, or checkpoints=0"
                )
            return min(found, 1 << 16)
        most, limit = (self.MOST_ROWS_CPU, self.MOST_BYTES_CPU) if cpu else (self.MOST_ROWS, None)
        sizes = [n for n in (None if memory is None else memory // self.SHARE, limit) if n is not None]
        return min([most, *(n // state_bytes for n in sizes)])


def check_turns(keep_turns: object, turn_budget: object) -> None:
    """Whether these say what a conversation keeps of its turns, or HybridKVError."""
    for name, value, low in (("keep_turns", keep_turns, 1), ("turn_budget", turn_budget, 0)):
        if name == "keep_turns" and value is None:
            continue
        if not is_whole(value) or not low <= value <= 1 << 20:  # type: ignore[operator]
            none = " or None (all turns)" if name == "keep_turns" else ""
            raise HybridKVError(f"{name} must be a whole number from {low}{none}, not {shown(value)}")


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value for a message. Very long whole numbers cannot be written out at all."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "a huge number"
    try:
        text = repr(value)
    except ValueError:  # such a number inside a list
        return f"a {type(value).__name__} with a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def meant(name: str, names: Sequence[str]) -> str:
    """A hint for a message, " (did you mean peak?)"; "" where no name is near."""
    close = get_close_matches(name, names, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def parse_bytes(size: int | str | None, name: str = "memory") -> int | None:
    """12884901888, "12GiB", "12 GB", "800MiB" -> bytes. None stays None. `name`: what it is, for the error."""
    if size is None:
        return None
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    match = (
        re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    )
    found = size if is_whole(size) else 0
    if match is not None and match[2].lower() in units:
        found = int(float(match[1]) * units[match[2].lower()])
    if not 1 <= found < 1 << 63:  # type: ignore[operator]
        raise HybridKVError(f"{name} must be a size in bytes such as 12GiB or 800MiB, not {shown(size)}")
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like; exactly one of these. It needs the extra `structured`.

    Args:
        json: a JSON schema, as an object or as text.
        json_object: True: any JSON object.
        regex: a regular expression for all of the answer.
        choice: texts, one of which is the answer.
        grammar: a grammar in llguidance's form of Lark.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise RequestError(f"structured_outputs takes exactly one of {names}; {len(given)} were given")
        if isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", parse_json(self.json))
            except (ValueError, RecursionError) as problem:
                raise RequestError(f"structured_outputs: the JSON schema is no valid JSON: {problem}") from None
        kinds = {"regex": str, "grammar": str, "json": Mapping, "choice": (list, tuple), "json_object": bool}
        if not isinstance(self.given, kinds[self.kind]):
            raise RequestError(f"structured_outputs: {self.kind} cannot be {shown(self.given)}")

    @property
    def kind(self) -> str:
        """The name of the one that was given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))

    @property
    def given(self) -> Any:
        """Its value."""
        return getattr(self, self.kind)


# What each of these is where neither the caller nor the model says: greedy, and every filter off.
SAMPLING_OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

LogitsHook = Callable[[list[int], Any], Any]  # see SamplingParams


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. The order in which all of this applies is in
    engine/sampler.py. From temperature to repetition_penalty None is the model's own default where it has one (its
    generation_config), else greedy, and the others off.

    Args:
        max_tokens: tokens of the answer; None: as many as the context allows.
        temperature: what logits are divided by; 0: greedy, whatever the model's default is.
        top_k: choose among the k likeliest tokens; 0: all.
        top_p: choose among the likeliest tokens that have this probability together; 1: all.
        min_p: choose among tokens at least this probable, as a part of the likeliest one's; 0: all.
        repetition_penalty: logits of tokens in prompt and answer are divided (negative ones multiplied) by it; 1: none.
        presence_penalty: taken once from the logit of each token that the answer has.
        frequency_penalty: the same, as often as the answer has it.
        logit_bias: token id -> what is added to its logit.
        min_tokens: tokens of the answer before it may end by itself or by stop.
        bad_words: texts that the answer must not have: their last token is ruled out where the others precede it.
        logits_hook: a function (generated token ids, logits Tensor [vocab] f32) -> a Tensor like it, or None where it
            was changed in place. It is called for every token on the engine's thread. If it raises, its request ends
            with an error, and no other does.
        seed: the same seed gives the same answer; None: another one each time.
        stop: text that ends the answer and is cut from it; a string or several.
        stop_token_ids: tokens that end the answer, beside the model's own.
        logprobs: how many alternatives to report per token; 0: the chosen token's alone; None: nothing.
        prompt_logprobs: the same of the prompt's tokens; a prompt is then always read anew.
        ignore_eos: go on where the model would end.
        n: answers to the prompt, which is read once; answer i has the seed `seed + i`.
        structured_outputs: what the answer must look like: StructuredOutputs, or its fields as an object, such as
            {"json": schema}. Logprobs are those of the model itself all the same.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    bad_words: tuple[str, ...] = field(default=())
    logits_hook: LogitsHook | None = None
    seed: int | None = None
    stop: tuple[str, ...] = field(default=())
    stop_token_ids: tuple[int, ...] = field(default=())
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    n: int = 1
    structured_outputs: Any = field(default=None, hash=False)

    MAX_STOPS = 16
    MAX_STOP_LENGTH = 1024
    MAX_LOGPROBS = 100
    MAX_BIASES = 16384
    MAX_BAD_WORDS = 1024
    MAX_N = 128

    def __post_init__(self) -> None:
        stops, words = self._texts("stop", self.stop), self._texts("bad_words", self.bad_words)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "stop_token_ids", self._listed("stop_token_ids", self.stop_token_ids))
        self._check_bias()
        self._check_structure()
        for name, kind, low, high in (
            ("max_tokens", int, 1, 2**31),
            ("temperature", float, 0.0, 1e4),
            ("top_k", int, 0, 2**31),
            ("top_p", float, 0.0, 1.0),
            ("min_p", float, 0.0, 1.0),
            ("repetition_penalty", float, 1e-3, 1e3),
            ("seed", int, 0, 2**63 - 1),
            ("logprobs", int, 0, self.MAX_LOGPROBS),
            ("prompt_logprobs", int, 0, self.MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._check(name, getattr(self, name), kind, low, high)
        self._check("presence_penalty", self.presence_penalty, float, -2.0, 2.0)
        self._check("frequency_penalty", self.frequency_penalty, float, -2.0, 2.0)
        self._check("min_tokens", self.min_tokens, int, 0, 2**31)
        self._check("n", self.n, int, 1, self.MAX_N)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 (1 keeps all tokens)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.seed is not None and self.seed + self.n > 2**63:
            raise RequestError(f"seed {self.seed} is too large for {self.n} answers, which take the seeds after it")
        if len(stops) > self.MAX_STOPS or not all(map(self._good_text, stops)):
            raise RequestError(f"stop takes at most {self.MAX_STOPS} texts of 1 to {self.MAX_STOP_LENGTH} characters")
        if len(words) > self.MAX_BAD_WORDS or not all(self._good_text(word) and word.strip() for word in words):
            raise RequestError(
                f"bad_words takes at most {self.MAX_BAD_WORDS} texts of 1 to {self.MAX_STOP_LENGTH} characters, not "
                "spaces alone"
            )
        if self.logits_hook is not None and not callable(self.logits_hook):
            raise RequestError(f"logits_hook must be a function or None, not {shown(self.logits_hook)}")
        if len(self.stop_token_ids) > 1024:
            raise RequestError(f"stop_token_ids takes at most 1024 ids, {len(self.stop_token_ids)} were given")
        for token in self.stop_token_ids:
            self._check("stop_token_ids", token, int, 0, 2**31)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {shown(self.ignore_eos)}")

    def resolved(self, defaults: Mapping[str, float] | None = None) -> SamplingParams:
        """With every None that has a default filled in: from `defaults`, the model's own, named as in a
        generation_config, else greedy or off. Other names in `defaults` are left alone.
        """
        known = SAMPLING_OFF | {name: value for name, value in (defaults or {}).items() if value is not None}
        missing = {name: known[name] for name in SAMPLING_OFF if getattr(self, name) is None}
        return replace(self, **missing) if missing else self  # type: ignore[arg-type]

    def _check_bias(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {shown(bias)}")
        if len(bias) > self.MAX_BIASES:
            raise RequestError(f"logit_bias takes at most {self.MAX_BIASES} tokens, {len(bias)} were given")
        for token, value in bias.items():
            self._check("a token id of logit_bias", token, int, 0, 2**31)
            self._check(f"logit_bias of token {token}", value, float, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", dict(bias))

    def _check_structure(self) -> None:
        asked = self.structured_outputs
        if isinstance(asked, Mapping):
            known = [f.name for f in fields(StructuredOutputs)]
            if unknown := [name for name in asked if name not in known]:
                raise RequestError(f"structured_outputs has no {shown(unknown[0])}; there are {', '.join(known)}")
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**asked))
        elif asked is not None and not isinstance(asked, StructuredOutputs) and not hasattr(asked, "start"):
            raise RequestError(f"structured_outputs must be StructuredOutputs or an object, not {shown(asked)}")

    @classmethod
    def _texts(cls, name: str, value: object) -> tuple:
        return (value,) if isinstance(value, str) else cls._listed(name, value)

    @classmethod
    def _good_text(cls, text: object) -> bool:
        return isinstance(text, str) and 0 < len(text) <= cls.MAX_STOP_LENGTH

    @staticmethod
    def _listed(name: str, value: object) -> tuple:
        if value is None:
            return ()
        if not isinstance(value, list | tuple | range | set | frozenset):
            raise RequestError(f"{name} must be a list, not {shown(value)}")
        return tuple(value)

    @staticmethod
    def _check(name: str, value: object, kind: type, low: float, high: float) -> None:
        good = is_whole(value) or (kind is float and isinstance(value, float))
        if not good or not low <= value <= high:  # type: ignore[operator]  # NaN fails this too
            what = f"a whole number from {low} to {high}" if kind is int else f"a number from {low:g} to {high:g}"
            raise RequestError(f"{name} must be {what}, not {shown(value)}")
