"""What a budget costs in quality: questions about a document of 3000 tokens, with all tokens kept and with few.

The document is the demo's log with one sentence put into it at one or more depths. An answer passes if it names what
that sentence says. Prints a table and ends with one JSON line.

    python bench/eviction_quality.py --budgets 256 512 1024 --depths 1
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.resources import files

from hybridkv import LLM, CacheConfig, SamplingParams

# (sentence, question, what a right answer holds)
NEEDLES = (
    ("The cook's favourite harbour is Trondheim.", "What is the cook's favourite harbour?", "trondheim"),
    ("The engineer's favourite fruit is the mango.", "What is the engineer's favourite fruit?", "mango"),
)
DEMO = (
    ("", "What was the most important result of the voyage?", "wheatear"),
    ("", "What is the name of the chief scientist of the next voyage?", "brandt"),
)


def prompts(depths: int) -> list[tuple[str, str, str]]:
    """(name, prompt, what passes)."""
    text = files("hybridkv").joinpath("data", "petrel_log.txt").read_text(encoding="utf-8")
    lines = text.split("\n\n")
    found = [(question, f"{text}\n{question}", answer) for _, question, answer in DEMO]
    for sentence, question, answer in NEEDLES:
        for i in range(depths):
            at = round(len(lines) * (i + 0.5) / depths)
            document = "\n\n".join([*lines[:at], sentence, *lines[at:]])
            found.append((f"{answer} at {(i + 0.5) / depths:.0%}", f"{document}\n{question}", answer))
    return found


def passes(cache: CacheConfig, asked: list[tuple[str, str, str]]) -> tuple[list[bool], float, float]:
    """(what passed, MiB of pages at the end, seconds)."""
    llm = LLM(device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=4096)
    began, held, right = time.perf_counter(), 0.0, []
    for _, prompt, answer in asked:
        tokens = llm.encode_chat([{"role": "user", "content": prompt}])
        request = llm.engine.add(tokens, SamplingParams(max_tokens=40, stop=("\n",)))
        while not request.finished:
            llm.engine.step()
        held = max(held, request.stats["kv_bytes_kept"])
        right.append(answer in request.text.text.lower())
    return right, held / 2**20, time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    options.add_argument("--depths", type=int, default=1)
    options.add_argument("--policy", default="auto")
    given = options.parse_args()
    asked, rows = prompts(given.depths), []
    choices = [(None, False)] + [(budget, bounded) for budget in given.budgets for bounded in (False, True)]
    print(f"{'budget':>8} {'bounded':>8} {'right':>8} {'KV':>12}")
    for budget, bounded in choices:
        cache = CacheConfig(kv_dtype="f32", budget=budget, bounded=bounded, policy=given.policy)
        right, held, seconds = passes(cache, asked)
        rows.append({"budget": budget, "bounded": bounded, "right": sum(right), "of": len(right), "kv_mib": held})
        shown = f"{sum(right)}/{len(right)}"
        print(f"{budget or 'all':>8} {'yes' if bounded else 'no':>8} {shown:>8} {held:8.1f} MiB  {seconds:5.0f} s")
        print("         wrong:", ", ".join(name for (name, _, _), good in zip(asked, right, strict=True) if not good))
    print(json.dumps({"bench": "eviction_quality", "policy": given.policy, "rows": rows}))


if __name__ == "__main__":
    main()
