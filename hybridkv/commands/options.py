"""Options of the commands that open a model, each declared once: which model, its cache, and what requests keep.

A command takes a whole group as one argument (declaring.py). Defaults are those of the dataclasses in
`hybridkv/config.py`. What is asked of a model is declared in sampling_options.py and chat_options.py, what prompts
leave behind in reuse_options.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from hybridkv.commands import completion
from hybridkv.commands.panels import EVICTION, MEMORY, MODEL
from hybridkv.commands.reuse_options import ReuseOptions
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.errors import HybridKVError
from hybridkv.overrides import overridden

if TYPE_CHECKING:
    from hybridkv.llm import LLM

_CACHE, _ENGINE = asdict(CacheConfig()), asdict(EngineConfig())
_MODEL = "a Hugging Face folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class OpenOptions:
    """Which model, where, and how much memory it may take."""

    model: Annotated[
        str | None,
        Option("--model", "-m", metavar="PATH", help=_MODEL, rich_help_panel=MODEL, autocompletion=completion.model),
    ] = None
    device: Annotated[str, Option("--device", metavar="NAME", help="auto, cpu or cuda", rich_help_panel=MODEL)] = "auto"
    dtype: Annotated[
        str,
        Option("--dtype", metavar="NAME", help="of the weights: auto, float32 or bfloat16", rich_help_panel=MODEL),
    ] = "auto"
    weight_dtype: Annotated[
        str,
        Option(
            "--weight-dtype",
            metavar="NAME",
            help="of the matrices: plain (as --dtype), fp8 (E4M3, a scale a row), f16 or int4 (on a CPU), released "
            "(FP8 and FP4 of DeepSeek-V4's and Qwen's files as they are), or auto: plain, on a GPU packed as in a "
            "GGUF file or released, on a CPU f16 or int4 beside --dtype auto where that is float32",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    tp: Annotated[
        int,
        Option(
            "--tp",
            metavar="N",
            help="GPUs that share the model (tensor parallelism); --memory is of each",
            rich_help_panel=MODEL,
        ),
    ] = 1
    exact: Annotated[
        bool,
        Option(
            "--exact",
            help="the same bits whatever the batch and the chunks, at some cost in speed",
            rich_help_panel=MODEL,
        ),
    ] = False
    kv_dtype: Annotated[
        str,
        Option(
            "--kv-dtype",
            metavar="NAME",
            help="of the KV cache: auto (as the weights), f32, bf16 or fp8",
            rich_help_panel=MEMORY,
        ),
    ] = _CACHE["kv_dtype"]
    state_dtype: Annotated[
        str,
        Option(
            "--state-dtype",
            metavar="NAME",
            help="of Gated DeltaNet's recurrent state: f32 or bf16",
            rich_help_panel=MEMORY,
        ),
    ] = _CACHE["state_dtype"]
    index_dtype: Annotated[
        str,
        Option(
            "--index-dtype",
            metavar="NAME",
            help="of DeepSeek-V4's index keys: auto (as KV; beside fp8 mxfp4), f32, bf16, fp8, mxfp4 or nvfp4",
            rich_help_panel=MEMORY,
        ),
    ] = _CACHE["index_dtype"]
    max_requests: Annotated[
        int | None,
        Option(
            "--max-requests",
            metavar="N",
            help=f"requests resident at once; as many as there are prompts, {_ENGINE['max_requests']} at most",
            rich_help_panel=MEMORY,
        ),
    ] = None
    context: Annotated[
        int | None,
        Option(
            "--context",
            metavar="TOKENS",
            help="longest request, such as 32768 or 32k; the model's own limit, or what fits in memory",
            rich_help_panel=MEMORY,
        ),
    ] = _ENGINE["max_context"]
    memory: Annotated[
        str | None,
        Option(
            "--memory",
            metavar="SIZE",
            help="for weights and cache together, such as 12GiB; what is free",
            rich_help_panel=MEMORY,
        ),
    ] = None

    def cache(self) -> CacheConfig:
        """The cache's settings, with those of the environment in their place."""
        return overridden(
            CacheConfig(**{f.name: getattr(self, f.name) for f in fields(CacheConfig) if hasattr(self, f.name)})
        )

    def open(
        self,
        requests: int = 1,
        cache: CacheConfig | None = None,
        reuse: ReuseOptions | None = None,
        shares: bool = True,
        **more: Any,
    ) -> LLM:
        """Load the model, with a progress display on a terminal.

        `requests`: how many will run; `shares`: whether prompts begin with what others have read; `more`: for the LLM.
        """
        cache = self.cache() if cache is None else cache
        kept: dict[str, Any] = {} if reuse is None else {"reuse": reuse.config()}
        kept |= {} if shares else {"reuse": None}
        from hybridkv.commands.display import compiling, progress
        from hybridkv.llm import LLM

        self._refuse_a_shape()

        with progress() as bars:
            return LLM(
                model=self.model,
                device=self.device,
                dtype=self.dtype,
                weight_dtype=self.weight_dtype,
                exact=self.exact,
                cache=cache,
                max_requests=min(requests, _ENGINE["max_requests"]) if self.max_requests is None else self.max_requests,
                max_context=self.context,
                memory=self.memory,
                tp=self.tp,
                fetch_progress=bars.show("fetching SmolLM2-135M-Instruct"),
                load_progress=bars.show("loading weights"),
                compile_progress=bars.show(compiling()),
                **kept,
                **more,
            )

    def _refuse_a_shape(self) -> None:
        """`plan` knows shapes by name; to run a model its files are needed."""
        from hybridkv.models.known import known_config

        if self.model is None or "/" in self.model or Path(self.model).expanduser().exists():
            return
        name, _ = known_config(self.model) or ("", {})
        if owner := next((o for begin, o in _OWNERS.items() if name.startswith(begin)), None):
            raise BadParameter(
                f"--model: there is no file or folder {self.model!r}, and its shape alone does not run; give the "
                f"folder or the .gguf file that holds it, or {owner}/{name}, which is fetched from the hub with "
                "pip install 'hybridkv[hub]'"
            )


@dataclass(frozen=True)
class ModelOptions(OpenOptions):
    """The same, and what requests keep."""

    budget: Annotated[
        int | None,
        Option(
            "--budget",
            metavar="TOKENS",
            help="tokens kept a stream once the prompt is read, such as 2048 or 2k; all",
            rich_help_panel=EVICTION,
        ),
    ] = _CACHE["budget"]
    window: Annotated[
        int, Option("--window", metavar="N", help="last queries that vote on what to keep", rich_help_panel=EVICTION)
    ] = _CACHE["window"]
    recent: Annotated[
        int,
        Option(
            "--recent", metavar="N", help="last tokens that always stay; part of the budget", rich_help_panel=EVICTION
        ),
    ] = _CACHE["recent"]
    policy: Annotated[
        str,
        Option(
            "--policy",
            metavar="NAME",
            help="what counts: auto, peak, heads, snapkv, tova, knorm, keydiff, leverage, streaming or random, in a "
            "chat also replay; with settings as in peak:ahead=31",
            rich_help_panel=EVICTION,
        ),
    ] = str(_CACHE["policy"])
    scope: Annotated[
        str,
        Option("--scope", metavar="NAME", help="a list for each head, each layer, or global", rich_help_panel=EVICTION),
    ] = _CACHE["scope"]
    first: Annotated[
        int | None,
        Option(
            "--first",
            metavar="N",
            help="first tokens that always stay; part of the budget; the policy's own choice",
            rich_help_panel=EVICTION,
        ),
    ] = _CACHE["first"]
    pooling: Annotated[
        str | None,
        Option(
            "--pooling",
            metavar="HOW",
            help="how scores spread to neighbours: an odd number of them (peak, heads, keydiff, leverage), none, avg "
            "or max (snapkv); the policy's own choice",
            rich_help_panel=EVICTION,
        ),
    ] = None
    spread: Annotated[
        str | None,
        Option(
            "--spread",
            metavar="NAME",
            help="the budget over streams: even, layer (its heads share it), all (all layers do) or pyramid (early "
            "layers get more); the policy's own choice",
            rich_help_panel=EVICTION,
        ),
    ] = None
    bounded: Annotated[
        bool,
        Option(
            "--bounded",
            help="evict at every step of prompt and answer: never more than budget + one step",
            rich_help_panel=EVICTION,
        ),
    ] = _CACHE["bounded"]
    decode_every: Annotated[
        int,
        Option(
            "--decode-every",
            metavar="N",
            help="evict again every N tokens of the answer; 0: never",
            rich_help_panel=EVICTION,
        ),
    ] = _CACHE["decode_every"]

    def cache(self) -> CacheConfig:
        """The cache's settings, with those of the environment in their place."""
        settings = {f.name: getattr(self, f.name) for f in fields(CacheConfig) if hasattr(self, f.name)}
        if self.budget is None:  # perhaps the environment has one
            settings |= {"bounded": False, "decode_every": 0}
        found = overridden(CacheConfig(**settings | {"policy": self.make_policy()}))
        if found.budget is not None:
            return replace(found, bounded=self.bounded, decode_every=self.decode_every)
        idle = [f for f, was in _ONLY_WITH_BUDGET.items() if getattr(self, f) != was]
        if self.budget is None and idle:
            raise BadParameter(f"--{idle[0].replace('_', '-')} says how to evict and needs --budget")
        return found

    def make_policy(self) -> str:
        """The policy as a text, with the settings that other options give it."""
        if self.scope != "head" and self.spread not in (None, "even"):
            raise BadParameter(f"--spread {self.spread} gives streams different budgets and needs --scope head")
        text = self.policy
        for flag, value in (("policy", self.policy), ("pooling", self.pooling), ("spread", self.spread)):
            if value is None:
                continue
            text += "" if flag == "policy" else f":{flag}={value}"
            if ":" in text:  # a name alone is checked without torch
                from hybridkv.eviction.named import find_policy

                try:
                    find_policy(text)
                except HybridKVError as problem:
                    raise BadParameter(f"--{flag}: {problem}") from None
        return text

    def describe(self, cache: CacheConfig) -> dict[str, str]:
        """The settings of eviction in words, for a page or a table."""
        found = {"budget": "all" if cache.budget is None else f"{cache.budget} tokens a stream"}
        found |= {"policy": str(cache.policy), "scope": cache.scope, "window": f"{cache.window} queries"}
        first = "the policy's own" if cache.first is None else f"{cache.first} tokens"
        found |= {"first": first, "recent": f"{cache.recent} tokens", "bounded": "yes" if cache.bounded else "no"}
        return found


# who publishes the models whose shapes are known, by the beginning of their names
_OWNERS = {"Qwen": "Qwen", "DeepSeek": "deepseek-ai", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama"}
_ONLY_WITH_BUDGET = {
    f.name: f.default
    for f in fields(ModelOptions)
    if f.name in ("window", "recent", "first", "policy", "scope", "pooling", "spread", "bounded", "decode_every")
}
