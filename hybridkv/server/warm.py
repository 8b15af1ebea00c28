"""Before a server says that it is ready: steps that are captured when they first run are run once."""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.config import SamplingParams
from hybridkv.llm import LLM

TOKENS = 3  # of an answer: the first comes with the prompt, the next from a step of its own
ANY_TOKEN = 0


def capture_graphs(llm: LLM, sizes: Iterable[int] | None = None) -> None:
    """Capture the decode graph of each number of requests; on a CPU there is none. `sizes`: of these alone.

    Streams are short here: where few requests with FP8 keys have a second graph for long ones, and for steps that read
    and write together, the first request that needs one still captures it.
    """
    graphs = llm.engine.runner.graphs
    found = sizes if sizes is not None else graphs.sizes if graphs is not None else ()
    for rows in sorted({min(rows, llm.plan.slots) for rows in found}):
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        llm.generate([[ANY_TOKEN]] * rows, params, cache=False)
