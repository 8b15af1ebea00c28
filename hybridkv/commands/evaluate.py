"""`hybridkv eval`: what a smaller cache costs in answers, measured on generated tasks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Exit, Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import with_options
from hybridkv.commands.eval_options import EvalOptions
from hybridkv.commands.invocation import command_name
from hybridkv.commands.panels import OUTPUT
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.settings import LEAST_SCORE, EvalSettings

if TYPE_CHECKING:
    from hybridkv.evaluation.results import Saved
    from hybridkv.evaluation.statistics import Summary


@with_options
def evaluate(
    options: EvalOptions,
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="where the results go",
            show_default="eval-MODEL",
            rich_help_panel=OUTPUT,
            autocompletion=completion.any_file,
        ),
    ] = None,
    limit: Annotated[
        float | None,
        Option(
            "--limit", metavar="SECONDS", help="stop after this time; the same command goes on", rich_help_panel=OUTPUT
        ),
    ] = None,
    restart: Annotated[
        bool, Option("--restart", help="drop what the folder holds and begin anew", rich_help_panel=OUTPUT)
    ] = False,
    show: Annotated[
        str | None,
        Option(
            "--show",
            metavar="FOLDER",
            help="print the tables of results that are there, and run nothing",
            rich_help_panel=OUTPUT,
            autocompletion=completion.any_file,
        ),
    ] = None,
) -> None:
    """Measure what a smaller cache costs in answers.

    Generated tasks are answered with the full cache and with each policy at each ratio. Prints tables, and writes a
    folder with every answer (results.jsonl), the figures (summary.csv) and a page with plots (index.html). A run that
    was stopped goes on where it was when the same command is given again.
    """
    if show is not None:
        beside = [*options.given(), *["output"] * (output is not None), *["restart"] * restart]
        if beside:
            raise BadParameter(f"--show prints results that are there; leave out --{beside[0].replace('_', '-')}")
        show_results(Path(show).expanduser())
        return
    if limit is not None and not limit > 0:
        raise BadParameter(f"--limit takes a number of seconds above 0, not {limit:g}")
    settings = options.settings()
    run(settings, Path(f"eval-{short_name(settings.model)}" if output is None else output).expanduser(), restart, limit)


def short_name(model: str | None) -> str:
    """A model's name, for that of a folder."""
    name = "SmolLM2-135M-Instruct" if model is None else Path(model.rstrip("/")).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def run(settings: EvalSettings, folder: Path, restart: bool, limit: float | None) -> None:
    """Go on with the units that are missing, then print what there is."""
    from hybridkv.commands.display import note
    from hybridkv.evaluation.results import Results, read_back
    from hybridkv.evaluation.run import Run
    from hybridkv.parallel.group import torchrun_place

    if settings.tp != 1 and torchrun_place() is not None:
        raise HybridKVError(
            "eval opens the model anew for each dtype, and starts the other ranks by itself: run it once, without "
            "torchrun (RANK and WORLD_SIZE)"
        )
    why, failed = "", None
    with Results(folder, settings, restart) as results:
        before = len(results.saved.records)
        try:
            if not results.saved.complete:
                with bar() as report:
                    finished = Run(settings, results.saved.records).go(results.write, report, limit)
                why = "" if finished else "the limit was reached"
        except KeyboardInterrupt:
            why = "stopped"
        except BaseException as problem:
            # over ranks Ctrl-C may come in the middle of an exchange, which then ends them
            stopped = isinstance(problem.__cause__, KeyboardInterrupt)
            why, failed = ("stopped", None) if stopped else ("", problem)
    saved = read_back(folder)  # an interrupt may have come between writing and remembering
    summary = None
    if saved.records and (failed is None or len(saved.records) > before):
        summary = show_tables(folder, saved)
    if failed is not None:
        raise failed
    if why:
        note(f"{why}: {what_is_kept(folder, saved)}")
    if why == "stopped":
        raise Exit(130)
    if summary is not None:
        say_where(folder)
        refuse_a_weak_model(summary)


def what_is_kept(folder: Path, saved: Saved) -> str:
    """Of a run that was stopped, and how to go on."""
    if not saved.records:
        return "nothing was measured yet"
    show = f"{command_name()} eval --show {shlex.quote(str(folder))}"
    return (
        f"{len(saved.done)} of {saved.run['units']} units are kept in {folder}; the same command goes on from there, "
        f"{show} prints the tables again"
    )


def show_results(folder: Path) -> None:
    """The tables of a folder, and its CSV and page made anew."""
    from hybridkv.evaluation.results import read_results

    saved = read_results(folder)
    if not saved.records:
        raise HybridKVError(f"{str(folder)!r} has no answer yet: the run was stopped before its first one")
    show_tables(folder, saved)
    say_where(folder)


def show_tables(folder: Path, saved: Saved) -> Summary:
    """Print the tables, and write them."""
    from rich.console import Console

    from hybridkv.evaluation.page import write_files
    from hybridkv.evaluation.statistics import summarise
    from hybridkv.evaluation.tables import show

    summary = summarise(saved)
    write_files(folder, summary, saved.records)
    show(Console(highlight=False), summary)
    return summary


def say_where(folder: Path) -> None:
    """The files that were written."""
    print(f"Plots: {folder / 'index.html'}\nFigures: {folder / 'summary.csv'}\nAnswers: {folder / 'results.jsonl'}")


def refuse_a_weak_model(summary: Summary) -> None:
    """With every task under the least score nothing is averaged, and the run has not shown what was asked for."""
    scores = {task: score for view in summary.views for task, score in view.shown_only.items()}
    if not scores or summary.settings.all_tasks or any(view.averaged for view in summary.views):
        return
    best = max(scores, key=lambda task: scores[task])
    raise HybridKVError(
        f"{summary.run.get('model_name', 'this model')} answers no task well enough with the full cache: the best is "
        f"{best} with {scores[best]:.1f}, and under {LEAST_SCORE:g} what is cut shows little; take a larger model or "
        "shorter --lengths, or ask for --all-tasks; the answers are kept"
    )


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error if it is a terminal: units done, how many a minute, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    # the speed of the last minutes: units of different lengths take different times
    how: dict[str, Any] = {"transient": True, "redirect_stdout": False, "speed_estimate_period": 300.0}
    with Progress(*columns, console=console, disable=not console.is_terminal, **how) as bars:
        opening = bars.add_task("opening the model", total=None, rate="")
        asking: list[TaskID] = []

        def report(done: int, units: int, what: str) -> None:
            if not asking:  # units of an earlier run do not count for the speed
                bars.remove_task(opening)
                asking.append(bars.add_task(what, total=units, completed=done, rate=""))
            speed = bars.tasks[0].speed
            rate = f"{60 * speed:.3g} a minute" if speed else ""
            bars.update(asking[0], completed=done, description=what, rate=rate)

        yield report
