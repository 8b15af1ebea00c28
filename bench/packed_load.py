"""Whether a real packed load takes the bytes that `hybridkv plan` says: a GGUF file with random blocks, loaded and run.

    python bench/packed_load.py                                # Qwen3.5-27B in Q4_K in what a 24 GB card leaves
    python bench/packed_load.py --model Qwen3.5-9B --form q6_k --card 4090 --context 65536 --requests 2

The file is written to a temporary folder (16 GB for the 27B) and removed. Compared are the weights' and the cache's
bytes, which must be the plan's exactly, and on a GPU what torch's allocator gave out for both, which rounds every
tensor up to 512 bytes. A few tokens are generated: random weights say nothing, but numbers must stay finite.

On a CPU weights are f16, or 4-bit codes beside that: there the comparison is with the plan for a CPU. Prints a table,
and one JSON line last; the exit code is 1 where a number differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.bench.random_gguf import FORMATS, write_random_gguf
from hybridkv.cards import find_card
from hybridkv.commands.plan_estimate import Estimate
from hybridkv.commands.plan_source import Source, find_source
from hybridkv.commands.plan_weights import Weights, find_weights, form_weights
from hybridkv.files import read_json
from hybridkv.models.known import known_config
from hybridkv.planner import human

BESIDE = 1 << 20  # bytes that may come on top: indices, flags, tables of angles


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="Qwen3.5-27B", help="a name that plan knows, or a config.json")
    made.add_argument("--form", default="q4_k", choices=sorted(FORMATS))
    made.add_argument("--card", default="24GB", help="whose usable memory is given to LLM")
    made.add_argument("--context", type=int, default=32768)
    made.add_argument("--requests", type=int, default=1)
    made.add_argument("--kv-dtype", default="bf16", choices=["f32", "bf16", "fp8"])
    made.add_argument("--tokens", type=int, default=8, help="to generate")
    made.add_argument("--device", default="auto")
    made.add_argument("--folder", default=None, help="where the temporary folder is made")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    raw, name = config_of(options.model)
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="packed_load_", dir=options.folder))
    try:
        path, begin = folder / f"{name}-{options.form}.gguf", time.perf_counter()
        tensors = write_random_gguf(raw, path, options.form)
        written = {"file_bytes": path.stat().st_size, "write_s": time.perf_counter() - begin, "tensors": len(tensors)}
        say(f"{path.name}: {human(written['file_bytes'])} written in {written['write_s']:.1f} s")
        found = written | load(path, options, find_source(name if known_config(options.model) else options.model))
    finally:
        shutil.rmtree(folder)
    show(found)
    print(json.dumps({"bench": "packed_load", "model": name, "form": options.form, "card": options.card, **found}))
    return 0 if found["ok"] else 1


def config_of(model: str) -> tuple[dict[str, Any], str]:
    """The Hugging Face config, and a name for the file."""
    known = known_config(model)
    if known is not None:
        return known[1], known[0]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    return read_json(path), path.resolve().parent.name


def load(path: Path, options: argparse.Namespace, source: Source) -> dict[str, Any]:
    """Load the file and run it. `source`: the model without a file, as `plan --weights` has it."""
    usable = find_card(options.card).usable
    before = requested() if torch.cuda.is_available() else 0
    begin = time.perf_counter()
    llm = LLM(
        path,
        device=options.device,
        cache=CacheConfig(kv_dtype=options.kv_dtype),
        max_requests=options.requests,
        max_context=options.context,
        memory=usable,
        reuse=None,  # what is planned here is a cache without checkpoints
    )
    seconds = time.perf_counter() - begin
    gpu = llm.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
    allocated = requested() - before if gpu else None
    context = device_context() if gpu else None
    weights = planned_weights(path, options, source, llm)
    estimate = Estimate(source.config, CacheConfig(kv_dtype=options.kv_dtype), weights.dtype, gpu)
    need = estimate.need(options.requests, options.context)
    model: Any = llm.model
    angles = sum(table.nbytes for table in (getattr(model, "inv_freq", None),) if table is not None)
    held, cache = model.nbytes - angles, llm.manager.memory_bytes()
    begin = time.perf_counter()
    prompt = [1 + i % (source.config.vocab - 1) for i in range(min(64, options.context // 2))]
    prompts = [prompt] * options.requests
    answers = llm.generate(prompts, SamplingParams(max_tokens=options.tokens, ignore_eos=True, temperature=0.0))
    errors = [answer.error for answer in answers if answer.error]
    lengths = [len(answer.token_ids) for answer in answers]
    gap = None if allocated is None else allocated - held - cache
    ok = held == weights.nbytes and cache == need.cache and not errors and lengths == [options.tokens] * len(prompts)
    return {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "weights_form": weights.label,
        "load_s": seconds,
        "planned_weights": weights.nbytes,
        "held_weights": held,
        "planned_cache": need.cache,
        "held_cache": cache,
        "allocated": allocated,
        "allocated_beside": gap,
        "rounding": torch.cuda.memory_allocated() - requested() if gpu else None,
        "driver_and_context": context,
        "usable": usable,
        "longest_context": estimate.longest_context(options.requests, usable - weights.nbytes),
        "most_requests": estimate.most_requests(options.context, usable - weights.nbytes),
        "generated": sum(lengths),
        "generate_s": time.perf_counter() - begin,
        "errors": errors,
        "ok": ok and (gap is None or 0 <= gap <= BESIDE),
    }


def requested() -> int:
    """Bytes that tensors asked for. What torch counts as allocated is more: it leaves up to 1 MiB behind a tensor
    unused rather than divide a block.
    """
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # nothing before the first tensor


def device_context() -> int:
    """Bytes of the card that this process and the driver take beside torch's memory, if nobody else uses it."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def planned_weights(path: Path, options: argparse.Namespace, source: Source, llm: LLM) -> Weights:
    """As the plan without a file has them where they stay packed; else as the plan for this file and a CPU."""
    if llm.choice.packed:
        return form_weights(source, options.form)
    dtype = str(llm.dtype).removeprefix("torch.")
    form = "int4" if llm.choice.int4 else "f16" if llm.choice.half else "plain"  # a CPU's, by what it can do
    return find_weights(find_source(str(path)), llm.device.type == "cuda", dtype, form, False)


def show(found: dict[str, Any]) -> None:
    """The table, in plain text: a machine with a GPU may have nothing to draw it with."""
    say(f"\nplanned and held on {found['device']}, bytes")
    rows = [("weights " + found["weights_form"], found["planned_weights"], found["held_weights"])]
    rows += [("cache", found["planned_cache"], found["held_cache"])]
    if found["allocated"] is not None:
        rows += [("all tensors", found["planned_weights"] + found["planned_cache"], found["allocated"])]
    for label, planned, held in rows:
        say(f"  {label:<16}{planned:>18,}{held:>18,}  {'the same' if planned == held else f'{held - planned:+,}'}")
    if found["rounding"] is not None:
        rounding, context = human(found["rounding"]), human(found["driver_and_context"])
        say(f"  torch rounds up by {rounding}; driver and context take {context}")
    say(
        f"loaded in {found['load_s']:.1f} s; {found['generated']} tokens in {found['generate_s']:.1f} s\nin "
        f"{human(found['usable'])} the longest context is {found['longest_context']}, the most requests "
        f"{found['most_requests']}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
