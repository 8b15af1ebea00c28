"""The command line: `hybridkv generate | chat | plan | inspect | demo | bench`. Commands are in `hybridkv/commands/`;
here is what they have in common: help, version, and one line for every error a user can cause.

Exit codes: 0 done, 2 a wrong argument or a model that cannot be used, 130 stopped by Ctrl-C, 141 a pipe was closed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from hybridkv import __version__
from hybridkv.commands.bench import bench
from hybridkv.commands.chat import chat
from hybridkv.commands.demo import demo
from hybridkv.commands.generate import generate
from hybridkv.commands.inspect import inspect
from hybridkv.commands.options import in_flags
from hybridkv.commands.plan import plan
from hybridkv.errors import HybridKVError

app = typer.Typer(name="hybridkv", add_completion=False, pretty_exceptions_enable=False)
UsageError = typer.BadParameter.__bases__[0]  # click's, wherever this version of typer keeps click
for command in (generate, chat, plan, inspect, demo, bench):
    app.command()(command)


@app.callback(invoke_without_command=True)
def hybridkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """A paged KV-cache engine and inference runtime for hybrid-attention language models."""
    if version:
        print(f"hybridkv {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the end
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold characters that the terminal's encoding lacks
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        # threads that wait for each other sleep soon: on a busy machine spinning makes an answer 20 times slower
        os.environ["GOMP_SPINCOUNT"] = "10000"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a shell script starts background jobs like that; SIGINT sent to this process is meant to stop it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = app(arguments, prog_name="hybridkv", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        code = 130
    except BrokenPipeError:
        _forget_output()
        code = 141
    except SystemExit as leaving:  # typer's own answer to a closed pipe
        _forget_output()
        code = 141 if leaving.code == 1 else leaving.code
    except (HybridKVError, OSError, MemoryError, RuntimeError, UsageError) as error:
        message = _explain(error)
        if message is None:
            raise
        print(f"hybridkv: error: {message}", file=sys.stderr)
        code = 2
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
