"""CUDA graphs of steps that several ranks run together, sums over the ranks included.

NCCL's calls are recorded with the rest of a step. A graph of them is of use only if every rank has recorded the same
calls and replays it in the same step. So which graph a step takes follows from what all ranks agree on before they run
it (lock_step.py); every rank comes to a capture in the same step; and they vote, over the host, whether all have room
for a graph and whether all have recorded it: one that has not means that none has it.

Nothing is timed here: a clock differs from rank to rank, and so would the number of replays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from hybridkv.devices import on_device
from hybridkv.engine.capturing import Consent
from hybridkv.engine.step_cost import StepCost
from hybridkv.parallel.group import Group, GroupError, Signal

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine

T = TypeVar("T")


class RankConsent(Consent):
    """Of all ranks. `check`: raises if one has ended."""

    mode = "thread_local"  # NCCL's watchdog is a thread of its own, which looks at events meanwhile

    def __init__(self, group: Group, check: Callable[[], None] = lambda: None) -> None:
        self.group, self.check = group, check

    def warm_up(self, run: Callable[[], T]) -> T:
        """Outside the graph the ranks really sum, so that one that fails here cannot go on, and neither can they."""
        try:
            found = run()
        except RuntimeError as problem:
            raise GroupError(
                f"rank {self.group.rank} could not run a step before it was captured: {problem}"
            ) from problem
        self.group.settle(self.check)  # what follows waits for the device without a limit
        return found

    def all_agree(self, problem: RuntimeError | None) -> None:
        votes = self.group.all_gather(torch.tensor([problem is None], dtype=torch.uint8, device="cpu"))
        without = [rank for rank, vote in enumerate(votes.flatten().tolist()) if not vote]
        super().all_agree(problem)
        if without:
            raise RuntimeError(f"rank {without[0]} has no memory for it, or could not record it")


class Untimed(StepCost):
    """What a step costs is not known, on any rank."""

    def __init__(self) -> None:
        super().__init__(0)

    def measure(self, tokens: int, run: Callable[[], object], times: int) -> None:
        pass


@dataclass(frozen=True)
class WithLimit:
    """An event that is waited for with the group's limit."""

    event: Signal
    group: Group
    check: Callable[[], None]

    def synchronize(self) -> None:
        """Until the device has come to it, or GroupError."""
        self.group.wait(self.event, self.check)


def capture_together(engine: Engine, group: Group) -> None:
    """From here on the engine's graphs are those of all ranks."""
    runner, cost = engine.runner, Untimed()
    runner.cost = engine.scheduler.cost = cost
    if runner.graphs is not None:
        runner.graphs.cost, runner.graphs.consent = cost, RankConsent(group)
    if runner.mixed is not None:
        runner.mixed.cost, runner.mixed.consent, runner.mixed.by_position = cost, RankConsent(group), True


def check_ranks_with(engine: Engine, check: Callable[[], None]) -> None:
    """While an engine waits for the device it looks whether all ranks live."""
    for graphs in (engine.runner.graphs, engine.runner.mixed):
        if graphs is not None and isinstance(graphs.consent, RankConsent):
            graphs.consent.check = check


def drop_graphs(engine: Engine) -> None:
    """Destroy what was captured: before NCCL's communicator, which waits for graphs that hold its calls."""
    with on_device(engine.manager.device):
        for graphs in (engine.runner.graphs, engine.runner.mixed):
            if graphs is not None:
                for found in graphs.captured.values():
                    found.graph.reset()
                graphs.captured.clear()
