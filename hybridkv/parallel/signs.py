"""Signs: exit codes and signals between the processes of a model. Needs no torch: a rank heeds them at once."""

from __future__ import annotations

import re
import signal

FAILED = 3  # exit code of a rank whose group has ended
DUMP = signal.SIGUSR1  # has a rank write where it stands


def leave_the_end_to_rank_0() -> None:
    """Signals that ask all processes of a group to end are rank 0's, as those of Ctrl-C and of systemd are: it lets
    what runs come to its end, and then ends the others. Called by the main thread.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def said_by(rank: int, problem: BaseException) -> str:
    """A problem as a line of a rank, which is named once."""
    text = str(problem)
    return f"hybridkv: {text}" if re.match(rf"rank {rank}\b", text) else f"hybridkv: rank {rank}: {text}"
