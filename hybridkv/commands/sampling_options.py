"""Options of how tokens are chosen and when an answer ends, and what they turn into: SamplingParams."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from typer import BadParameter, Option

from hybridkv.commands.panels import SAMPLING
from hybridkv.config import SamplingParams

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
