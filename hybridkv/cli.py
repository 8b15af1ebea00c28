"""The command line: `hybridkv generate | chat | serve | compress | cache | plan | inspect | demo | eval | bench`.
Commands are in `hybridkv/commands/`; here is what they have in common: help, version, and one line for every error a
user can cause.

Exit codes: 0 done, 1 some of several prompts failed, 2 a wrong argument, a model that cannot be used or a
device that failed under a server, 3 a rank of several GPUs ended, 130 stopped by Ctrl-C, 141 a pipe was closed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from hybridkv import __version__
from hybridkv.commands.bench import bench
from hybridkv.commands.cache import cache
from hybridkv.commands.chat import chat
from hybridkv.commands.compress import compress
from hybridkv.commands.declaring import flowing
from hybridkv.commands.demo import demo
from hybridkv.commands.evaluate import evaluate
from hybridkv.commands.flag_words import in_flags
from hybridkv.commands.generate import generate
from hybridkv.commands.inspect import inspect
from hybridkv.commands.launch import launch
from hybridkv.commands.panels import OUTPUT
from hybridkv.commands.plan import plan
from hybridkv.commands.serve import serve
from hybridkv.errors import HybridKVError

app = typer.Typer(
    name="hybridkv", pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
COMPLETE = "_HYBRIDKV_COMPLETE"  # set by the shell's completion script
UsageError = typer.BadParameter.__bases__[0]  # click's, wherever this version of typer keeps click
for command in (generate, chat, serve, launch, compress, cache, plan, inspect, demo, evaluate, bench):
    name = "eval" if command is evaluate else None  # else the function's own
    app.command(name, help=flowing(command.__doc__ or ""))(command)


@app.callback(invoke_without_command=True)
def hybridkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="show the version and exit")] = False,
) -> None:
    """A paged KV-cache engine and inference runtime for hybrid-attention language models."""
    if version:
        print(f"hybridkv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def program() -> Any:
    """The commands as click has them, with the words `<bool>` behind switches left out of their help."""
    found = typer.main.get_command(app)
    for command in (found, *found.commands.values()):  # type: ignore[attr-defined]
        helping = command.get_help_option(typer.Context(command, help_option_names=["-h", "--help"]))  # type: ignore
        helping.help, helping.rich_help_panel = "show this and exit", None if command is found else OUTPUT  # type: ignore
        for option in (helping, *command.params):
            if getattr(option, "is_flag", False):
                option.metavar = ""  # type: ignore[union-attr]
    return found


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the end
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold characters that the terminal's encoding lacks
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a shell script starts background jobs like that; SIGINT sent to this process is meant to stop it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = program()(arguments, prog_name="hybridkv", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        code = 130
    except BrokenPipeError:
        _forget_output()
        code = 141
    except SystemExit as leaving:  # of the completion, or typer's own answer to a closed pipe
        code = leaving.code
        if code == 1 and COMPLETE not in os.environ:
            _forget_output()
            code = 141
    except (HybridKVError, OSError, MemoryError, RuntimeError, UsageError) as error:
        message = _explain(error)
        if message is None:
            raise
        print(f"hybridkv: error: {message}", file=sys.stderr)
        code = 3 if type(error).__name__ == "GroupError" else 2
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> str | None:
    """What to tell the user, in one line; None for an error that is not theirs."""
    text = str(error)
    if isinstance(error, UsageError):
        named = getattr(error, "param", None) is not None or not isinstance(error, typer.BadParameter)
        text = error.format_message() if named else error.message  # type: ignore[attr-defined]
    elif isinstance(error, HybridKVError):
        text = in_flags(text)
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        text = f"out of memory ({text[:200]}); use a smaller --context or --max-requests, or --kv-dtype fp8"
    elif isinstance(error, RuntimeError):
        return None
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def _forget_output() -> None:
    """Let nothing be flushed to a closed pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
