"""Options of what prompts leave behind for others that begin alike, and what they turn into: a ReuseConfig."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import BadParameter, Option

from hybridkv.commands.panels import MEMORY
from hybridkv.config import ReuseConfig
from hybridkv.errors import HybridKVError


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
    checkpoint_dtype: Annotated[
        str,
        Option(
            "--checkpoint-dtype",
            metavar="NAME",
            help="of recurrent state in checkpoints: auto (as it is stored), or bf16: rounded, half the bytes",
            rich_help_panel=MEMORY,
        ),
    ] = ReuseConfig.checkpoint_dtype

    @property
    def reads_ahead(self) -> bool:
        """Whether next turns are read before they come: there are none."""
        return False

    def config(self) -> ReuseConfig | None:
        """What an LLM is opened with."""
        if not self.reuse:
            given = self.checkpoints, self.checkpoint_every, self.checkpoint_dtype
            if given != (ReuseConfig.checkpoints, ReuseConfig.every, ReuseConfig.checkpoint_dtype):
                raise BadParameter(
                    "--checkpoints, --checkpoint-every and --checkpoint-dtype say what is kept, which --no-reuse rules "
                    "out"
                )
            return None
        try:
            return ReuseConfig(
                0 if self.checkpoints == "0" else self.checkpoints,
                self.checkpoint_every,
                warm=self.reads_ahead,
                checkpoint_dtype=self.checkpoint_dtype,
            )
        except HybridKVError as problem:
            flags = {"every": "--checkpoint-every", "checkpoint_dtype": "--checkpoint-dtype"}
            flag = flags.get(str(problem).split()[0], "--checkpoints")
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
