"""Options that several commands share, each declared once, and what they turn into: an LLM, SamplingParams.

A command takes a whole group as one argument:

    @with_options
    def chat(model: ModelOptions, sampling: SamplingOptions, system: Annotated[...] = None) -> None: ...

Defaults are those of the dataclasses in `hybridkv/config.py`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from hybridkv.config import CacheConfig, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from hybridkv.llm import LLM


_CACHE, _ENGINE, _SAMPLING = asdict(CacheConfig()), asdict(EngineConfig()), asdict(SamplingParams())
_MODEL = "a Hugging Face folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, where, and how much memory it may take."""

    model: Annotated[str | None, Option("--model", "-m", metavar="PATH", help=_MODEL)] = None
    device: Annotated[str, Option("--device", metavar="NAME", help="auto, cpu or cuda")] = "auto"
    dtype: Annotated[str, Option("--dtype", metavar="NAME", help="of the weights: auto, float32 or bfloat16")] = "auto"
    kv_dtype: Annotated[
        str, Option("--kv-dtype", metavar="NAME", help="of the KV cache: auto (as the weights), f32 or bf16")
    ] = _CACHE["kv_dtype"]
    max_requests: Annotated[
        int | None,
        Option(
            "--max-requests",
            metavar="N",
            help=f"requests resident at once; as many as there are prompts, {_ENGINE['max_requests']} at the most",
        ),
    ] = None
    context: Annotated[
        int | None,
        Option("--context", metavar="TOKENS", help="longest request; the model's own limit, or what fits in memory"),
    ] = _ENGINE["max_context"]
    memory: Annotated[
        str | None,
        Option("--memory", metavar="SIZE", help="for weights and cache together, such as 12GiB; what is free"),
    ] = None

    def open(self, requests: int = 1) -> LLM:
        """Load the model, with a progress display on a terminal. `requests`: how many will run."""
        from hybridkv.commands.display import progress
        from hybridkv.llm import LLM

        with progress() as bars:
            return LLM(
                model=self.model,
                device=self.device,
                dtype=self.dtype,
                cache=CacheConfig(kv_dtype=self.kv_dtype),
                max_requests=min(requests, _ENGINE["max_requests"]) if self.max_requests is None else self.max_requests,
                max_context=self.context,
                memory=self.memory,
                fetch_progress=bars.show("fetching SmolLM2-135M-Instruct"),
                load_progress=bars.show("loading weights"),
            )


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends."""

    max_tokens: Annotated[int, Option("--max-tokens", metavar="N", help="most tokens of an answer")] = _SAMPLING[
        "max_tokens"
    ]
    temperature: Annotated[float, Option("--temperature", metavar="X", help="0 takes the likeliest token")] = _SAMPLING[
        "temperature"
    ]
    top_k: Annotated[int, Option("--top-k", metavar="N", help="choose among the N likeliest; 0: all")] = _SAMPLING[
        "top_k"
    ]
    top_p: Annotated[
        float, Option("--top-p", metavar="X", help="choose among the likeliest that hold this much probability")
    ] = _SAMPLING["top_p"]
    min_p: Annotated[
        float, Option("--min-p", metavar="X", help="drop tokens less likely than this share of the likeliest")
    ] = _SAMPLING["min_p"]
    repetition_penalty: Annotated[
        float, Option("--repetition-penalty", metavar="X", help="above 1: tokens seen before become less likely")
    ] = _SAMPLING["repetition_penalty"]
    seed: Annotated[int | None, Option("--seed", metavar="N", help="same seed, same answer")] = _SAMPLING["seed"]
    stop: Annotated[
        list[str] | None, Option("--stop", metavar="TEXT", help="ends the answer where this would appear; repeatable")
    ] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="go on past the model's own end")] = _SAMPLING["ignore_eos"]

    def params(self, logprobs: int | None = None) -> SamplingParams:
        return SamplingParams(**asdict(self) | {"stop": tuple(self.stop or ()), "logprobs": logprobs})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread arguments that are groups of options into their fields, which is the form that typer reads."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    own = [p.replace(annotation=hints[n]) for n, p in inspect.signature(command).parameters.items() if n not in groups]
    spread = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=annotation)
        for group in groups.values()
        for f, annotation in zip(fields(group), get_type_hints(group, include_extras=True).values(), strict=True)
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + spread
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def utf8(text: str) -> str:
    """Text that a terminal gave, without the half characters that a wrong locale leaves in it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_FLAGS = {"max_context": "context"} | {f.name: f.name for g in (ModelOptions, SamplingOptions) for f in fields(g)}


def in_flags(message: str) -> str:
    """An error in the words of the command line: kv_dtype='bf16' -> --kv-dtype bf16, max_context -> --context."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in _FLAGS or (value is None and "_" not in name):
            return match[0]
        return f"--{_FLAGS[name].replace('_', '-')}" + (f" {value}" if value else "")

    return re.sub(r"(?<![\w/.'\"-])([a-z_]+)(?:='(\w+)')?(?![\w/.'\"])", flag, message)
