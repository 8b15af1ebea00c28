"""Options that several commands share, each declared once, and what they turn into: an LLM, SamplingParams.

A command takes a whole group as one argument (declaring.py). Defaults are those of the dataclasses in
`hybridkv/config.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import utf8
from hybridkv.config import CacheConfig, EngineConfig, ReuseConfig, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.overrides import overridden

if TYPE_CHECKING:
    from hybridkv.llm import LLM

_CACHE, _ENGINE = asdict(CacheConfig()), asdict(EngineConfig())
_MODEL = "a Hugging Face folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct"
# panels of --help
PROMPT, MODEL, MEMORY, SAMPLING, OUTPUT = "Prompt", "Model", "Memory", "Sampling", "Output"
EVICTION = "Keeping only the tokens that matter"


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
            "(FP8 and FP4 of DeepSeek-V4's and Qwen3.5's files as they are), or auto: plain, on a GPU packed as in a "
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


@dataclass(frozen=True)
class ReuseOptions:
    """What prompts leave behind for others that begin alike."""

    reuse: Annotated[
        bool,
        Option(
            "--reuse/--no-reuse",
            help="keep what was read for prompts that begin alike, as long as nothing else needs the memory",
            rich_help_panel=MEMORY,
        ),
    ] = True
    checkpoints: Annotated[
        str,
        Option(
            "--checkpoints",
            metavar="SIZE",
            help="for copies of recurrent state that prompts are taken up at, such as 2GiB; 0: none",
            rich_help_panel=MEMORY,
        ),
    ] = str(ReuseConfig.checkpoints)
    checkpoint_every: Annotated[
        int | None,
        Option(
            "--checkpoint-every",
            metavar="TOKENS",
            help="between checkpoints inside long texts; 0: none there; as their bytes suggest",
            rich_help_panel=MEMORY,
        ),
    ] = ReuseConfig.every

    @property
    def reads_ahead(self) -> bool:
        """Whether next turns are read before they come: there are none."""
        return False

    def config(self) -> ReuseConfig | None:
        """What an LLM is opened with."""
        if not self.reuse:
            if self.checkpoints != ReuseConfig.checkpoints or self.checkpoint_every is not None:
                raise BadParameter("--checkpoints and --checkpoint-every say what is kept, which --no-reuse rules out")
            return None
        try:
            found = ReuseConfig(0 if self.checkpoints == "0" else self.checkpoints, self.checkpoint_every)
            return replace(found, warm=self.reads_ahead)
        except HybridKVError as problem:
            flag = "--checkpoint-every" if str(problem).startswith("every") else "--checkpoints"
            raise BadParameter(f"{flag}: {problem}") from None


@dataclass(frozen=True)
class TurnReuseOptions(ReuseOptions):
    """The same where conversations have next turns."""

    warm: Annotated[
        bool | None,
        Option(
            "--warm/--no-warm",
            help="read the next turn before it comes, while nothing else is asked, where the chat template drops "
            f"earlier thoughts and more than {ReuseConfig.warm_least} tokens would be read again; on",
            rich_help_panel=MEMORY,
        ),
    ] = None

    @property
    def reads_ahead(self) -> bool:
        """Whether next turns are read before they come."""
        return self.warm is not False

    def config(self) -> ReuseConfig | None:
        """What an LLM is opened with."""
        if self.warm and not self.reuse:
            raise BadParameter("--warm reads what is kept for a next turn, which --no-reuse rules out")
        return super().config()


# who publishes the models whose shapes are known, by the beginning of their names
_OWNERS = {"Qwen": "Qwen", "DeepSeek": "deepseek-ai", "SmolLM": "HuggingFaceTB", "Llama": "meta-llama"}
_ONLY_WITH_BUDGET = {
    f.name: f.default
    for f in fields(ModelOptions)
    if f.name in ("window", "recent", "first", "policy", "scope", "pooling", "spread", "bounded", "decode_every")
}


@dataclass(frozen=True)
class ChatOptions:
    """What a chat template is given besides the messages."""

    system: Annotated[str | None, Option("--system", metavar="TEXT", help="system message", rich_help_panel=PROMPT)] = (
        None
    )
    thinking: Annotated[
        bool | None,
        Option(
            "--think/--no-think",
            help="let the model think first, or not; as its chat template has it",
            rich_help_panel=PROMPT,
        ),
    ] = None
    template_arg: Annotated[
        list[str] | None,
        Option(
            "--template-arg",
            metavar="KEY=VALUE",
            help="a variable of the chat template, as JSON or text; repeatable",
            rich_help_panel=PROMPT,
        ),
    ] = None
    tools: Annotated[
        str | None,
        Option(
            "--tools",
            metavar="FILE",
            help="functions that the model may call: a JSON list of their schemas",
            rich_help_panel=PROMPT,
            autocompletion=completion.any_file,
        ),
    ] = None
    hide_thinking: Annotated[
        bool, Option("--hide-thinking", help="show the answer without the thoughts before it", rich_help_panel=OUTPUT)
    ] = False

    @property
    def variables(self) -> dict[str, Any]:
        """The template's variables; a value that is not JSON is text."""
        found: dict[str, Any] = {}
        for text in self.template_arg or ():
            key, sign, value = text.partition("=")
            if not sign or not key.isidentifier():
                raise BadParameter(f"--template-arg takes KEY=VALUE such as reasoning_effort=low, not {text!r}")
            if key in ("tools", "thinking", "system", "eviction"):
                flag = {"thinking": "think", "eviction": "budget"}.get(key, key)
                raise BadParameter(f"--template-arg {key}: use --{flag} instead")
            if key in ("self", "llm", "messages", "params", "cache"):
                raise BadParameter(f"--template-arg cannot set {key}: a template's variable is not called that")
            try:
                found[key] = json.loads(value)
            except (ValueError, RecursionError):
                found[key] = utf8(value)
        return found

    @property
    def tool_list(self) -> list[dict[str, Any]] | None:
        """What --tools names."""
        if self.tools is None:
            return None
        from hybridkv.commands.prompts import read_text

        try:
            found = json.loads(read_text(self.tools, "--tools"))
        except (ValueError, RecursionError) as problem:
            raise BadParameter(f"--tools: {self.tools!r} is not JSON ({problem})") from None
        if not isinstance(found, list):
            raise BadParameter(f"--tools: {self.tools!r} holds a JSON {type(found).__name__}, expected a list of tools")
        return found

    def refuse_raw(self, raw: bool) -> None:
        """--raw leaves out the template that these are for."""
        given = {
            "--system": self.system,
            "--think": self.thinking,
            "--template-arg": self.template_arg,
            "--tools": self.tools,
        }
        for flag, value in given.items():
            if raw and value is not None:
                raise BadParameter(f"{flag} needs the chat template, which --raw leaves out")


_OWN = "the model's own, else {}"  # where generation_config says nothing


def _sampling(flag: str, metavar: str, help: str, default: str | bool = True) -> Any:
    """An option of the sampling panel. `default`: what stands for it in the help."""
    return Option(flag, metavar=metavar, help=help, show_default=default, rich_help_panel=SAMPLING)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends. What is not given is the model's own default, if it has one."""

    max_tokens: Annotated[
        int | None, _sampling("--max-tokens", "TOKENS", "longest answer", "as long as the context allows")
    ] = None
    min_tokens: Annotated[int, _sampling("--min-tokens", "N", "the answer does not end before")] = 0
    temperature: Annotated[
        float | None, _sampling("--temperature", "X", "0 takes the likeliest token", _OWN.format(0))
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", "N", "choose among the N likeliest; 0: all", _OWN.format(0))] = (
        None
    )
    top_p: Annotated[
        float | None,
        _sampling("--top-p", "X", "choose among the likeliest that hold this much probability", _OWN.format(1)),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("--min-p", "X", "drop tokens less likely than this share of the likeliest", _OWN.format(0)),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling("--repetition-penalty", "X", "above 1: tokens seen before become less likely", _OWN.format(1)),
    ] = None
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", "X", "taken once from the logit of each token that the answer has")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", "X", "the same, as often as the answer has it")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling("--logit-bias", "ID=X", "added to the logit of a token id; repeatable")
    ] = None
    bad_words: Annotated[
        list[str] | None, _sampling("--bad-words", "TEXT", "never appears in the answer; repeatable")
    ] = None
    seed: Annotated[int | None, _sampling("--seed", "N", "same seed, same answer")] = None
    stop: Annotated[
        list[str] | None, _sampling("--stop", "TEXT", "ends the answer where this would appear; repeatable")
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", "", "go on past the model's own end")] = False

    def params(self, **more: Any) -> SamplingParams:
        """What was asked for. `more`: fields that a command has options of its own for."""
        return SamplingParams(
            **asdict(self)
            | {"stop": tuple(self.stop or ()), "bad_words": tuple(self.bad_words or ()), "logit_bias": self._bias()}
            | more
        )

    def _bias(self) -> dict[int, float]:
        found = {}
        for text in self.logit_bias or ():
            token, _, value = text.partition("=")
            try:
                if int(token) in found:
                    raise BadParameter(f"--logit-bias names token {int(token)} twice")
                found[int(token)] = float(value)
            except ValueError:
                raise BadParameter(
                    f"--logit-bias takes a token id and a number such as 17=-2.5, not {text!r}"
                ) from None
        return found


DOCUMENT = Option(
    "--document",
    metavar="FILE",
    help="ask about a text that `hybridkv compress` has read",
    rich_help_panel=PROMPT,
    autocompletion=completion.any_file,
)


def refuse_beside_document(model: ModelOptions, chat: ChatOptions, raw: bool = False) -> None:
    """What a document brings itself, or what is not done with what follows it."""
    if chat.system is not None:
        raise BadParameter("--system: the document was read with its own; give it to `hybridkv compress`")
    for flag, given in (("--tools", chat.tools is not None), ("--raw", raw), ("--budget", model.budget is not None)):
        if given:
            why = "what follows a document is kept whole" if flag == "--budget" else "the document was read without it"
            raise BadParameter(f"{flag} and --document do not go together: {why}")


_FLAGS = {"max_context": "context", "keep_turns": "keep_turns", "turn_budget": "turn_budget"} | {
    f.name: f.name for g in (ModelOptions, SamplingOptions) for f in fields(g)
}

# what Python has and the command line has not
_WORDS = {"; None keeps all": "; without --budget all are kept", ", or give a Policy": ""}


def in_flags(message: str) -> str:
    """An error in the words of the command line: kv_dtype='bf16' -> --kv-dtype bf16, max_context -> --context."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in _FLAGS or (value is None and "_" not in name):
            return match[0]
        return f"--{_FLAGS[name].replace('_', '-')}" + (f" {value}" if value else "")

    for words, here in _WORDS.items():
        message = message.replace(words, here)
    return re.sub(r"(?<![\w/.'\"-])([a-z_]+)(?:='(\w+)')?(?![\w/.'\"])", flag, message)
