"""The options of `hybridkv eval`, and the settings that they turn into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from typer import Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import number, tokens
from hybridkv.commands.panels import MODEL
from hybridkv.evaluation.settings import LEAST_SCORE, ON_CPU, ON_GPU, EvalSettings
from hybridkv.evaluation.tasks import RULER, TASKS

ASKED, STORED = "What is asked", "How the cache is stored"
_MODEL = "a Hugging Face folder, a .gguf file, a hub id or tiny-hybrid; without it the embedded SmolLM2-135M-Instruct"
GROUPS = {"ruler": RULER, "all": tuple(TASKS)}  # of tasks


def _listed(item: Callable[[str], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A reader of values with commas between them."""

    def read(text: Any) -> tuple[Any, ...]:
        return tuple(item(part.strip()) for part in str(text).split(",") if part.strip())

    return read


def _ratio(text: str) -> float:
    found = number(text)
    return int(found) if found == found // 1 and abs(found) < 1 << 53 else found


def _default(name: str) -> str:
    """What stands in the help for a default that depends on the device."""

    def words(value: object) -> str:
        group = next((group for group, tasks in GROUPS.items() if tasks == value), None)
        return group or (",".join(map(str, value)) if isinstance(value, tuple) else str(value))

    cpu, gpu = words(ON_CPU[name]), words(ON_GPU[name])
    return cpu if cpu == gpu else f"{cpu} on a CPU, {gpu} on a GPU"


def _list(flag: str, metavar: str, help: str, item: Callable[[str], Any], panel: str = ASKED, **more: Any) -> Any:
    """An option with several values; what stands for its default in the help is `show_default`."""
    return Option(flag, metavar=metavar, help=help, parser=_listed(item), rich_help_panel=panel, **more)


@dataclass(frozen=True)
class EvalOptions:
    """What `hybridkv eval` can be asked for. None: what suits the device."""

    model: Annotated[
        str | None,
        Option("--model", "-m", metavar="PATH", help=_MODEL, rich_help_panel=MODEL, autocompletion=completion.model),
    ] = None
    device: Annotated[str, Option("--device", metavar="NAME", help="auto, cpu or cuda", rich_help_panel=MODEL)] = "auto"
    dtype: Annotated[
        str,
        Option("--dtype", metavar="NAME", help="of the weights: auto, float32 or bfloat16", rich_help_panel=MODEL),
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
        bool, Option("--exact", help="the same bits whatever the batch, at some cost in speed", rich_help_panel=MODEL)
    ] = False
    max_requests: Annotated[
        int | None,
        Option(
            "--max-requests",
            metavar="N",
            help="texts that are read and answered together",
            show_default="8 on a CPU, 50 on a GPU",
            rich_help_panel=MODEL,
        ),
    ] = None
    memory: Annotated[
        str | None,
        Option("--memory", metavar="SIZE", help="for weights and cache together, such as 12GiB", rich_help_panel=MODEL),
    ] = None
    tasks: Annotated[
        Any,
        _list(
            "--tasks",
            "NAMES",
            "ruler (eleven tasks, as RULER has them), all (five more), or names with commas between them",
            str.lower,
            show_default=_default("tasks"),
            autocompletion=completion.tasks,
        ),
    ] = None
    policies: Annotated[
        Any,
        _list(
            "--policies",
            "NAMES",
            "policies with commas between them, with settings as in peak:ahead=31",
            str.lower,
            show_default=",".join(EvalSettings.policies),
            autocompletion=completion.policies,
        ),
    ] = None
    ratios: Annotated[
        Any,
        _list("--ratios", "LIST", "how many times smaller the cache gets", _ratio, show_default=_default("ratios")),
    ] = None
    lengths: Annotated[
        Any,
        _list("--lengths", "LIST", "tokens of a prompt, such as 2048,4k", tokens, show_default=_default("lengths")),
    ] = None
    modes: Annotated[
        Any,
        _list(
            "--modes",
            "NAMES",
            "seen: the question is in the prompt that is cut; unseen: it comes after the cut",
            str.lower,
            show_default=",".join(EvalSettings.modes),
        ),
    ] = None
    samples: Annotated[
        int | None,
        Option(
            "--samples",
            metavar="N",
            help="texts of each task and length",
            show_default=_default("samples"),
            rich_help_panel=ASKED,
        ),
    ] = None
    divergence: Annotated[
        int | None,
        Option(
            "--divergence",
            metavar="N",
            help="texts on which the next token's distribution is compared with the full cache's; 0: none",
            show_default=_default("divergence"),
            rich_help_panel=ASKED,
        ),
    ] = None
    all_tasks: Annotated[
        bool,
        Option(
            "--all-tasks",
            help=f"cut the cache also for tasks that the full cache answers with far less than {LEAST_SCORE:g}",
            rich_help_panel=ASKED,
        ),
    ] = False
    seed: Annotated[int, Option("--seed", metavar="N", help="of the generated texts", rich_help_panel=ASKED)] = 0
    kv_dtypes: Annotated[
        Any,
        _list(
            "--kv-dtypes",
            "NAMES",
            "of the KV cache: auto, or some of f32, bf16, fp8; all are compared with the full cache in the first",
            str.lower,
            STORED,
            show_default="auto",
        ),
    ] = None
    state_dtypes: Annotated[
        Any,
        _list("--state-dtypes", "NAMES", "of Gated DeltaNet's state: f32, bf16", str.lower, STORED, show_default="f32"),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def settings(self) -> EvalSettings:
        """Checked settings. What was not given is what suits the device."""
        given = self.given()
        if "tasks" in given:
            given["tasks"] = tuple(name for part in given["tasks"] for name in GROUPS.get(part, (part,)))
        EvalSettings(**given).check()  # before torch is imported, which takes seconds
        from hybridkv.devices import resolve_device
        from hybridkv.evaluation.cuts import Cut
        from hybridkv.eviction.named import find_policy

        size = ON_CPU if resolve_device(self.device).type == "cpu" else ON_GPU
        found = EvalSettings(**size | given).check()
        for policy in found.policies:
            find_policy(Cut(policy, found.ratios[0]).settings[0])
        return found
