"""The embedded model on a CPU: prefill and decode speed of hybridkv, of transformers' generate, and of llama.cpp if it
is there.

Same weights (dequantised by our reader), same prompt, one process, taken in turns. A time is the wall clock of a whole
call: prefill is a call for 1 token, decode is the difference to a call for 1 + n tokens; medians of all rounds. The
forms of the weights:

    int4        what LLM() takes with AVX-512: 4-bit codes for few rows, f16 for more (kernels/linear/int4.py)
    f16         what LLM() takes without: f16 weights, f32 activations (kernels/linear/half.py)
    bfloat16    dtype="bfloat16", and float32 likewise: weights and activations, for transformers too
    Q4_1        llama.cpp (package xllamacpp, optional): the file's own blocks, which are smaller

Before anything is timed, greedy tokens are compared with those of transformers in the same dtype (in bfloat16 they may
part at a near-tie; the number of equal ones is printed). `--old` runs it all once more as a CPU without AVX-512 would
(llama.cpp aside: it has no such switch).

Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.resources import files

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybridkv import LLM, SamplingParams
from hybridkv.embedded import embedded_model
from hybridkv.kernels.linear.linear import fast_bf16
from hybridkv.models import open_checkpoint
from hybridkv.text.tokenizer import Tokenizer

Generate = Callable[[list[int], int], list[int]]  # (prompt, new tokens) -> new tokens
Name = tuple[str, str]  # form of the weights, program
PACKED, DTYPES = ("int4", "f16"), ("bfloat16", "float32")
OLD_CPU = {  # what libraries read when they are loaded; the Makefile's, and FBGEMM's
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
}
console = Console(stderr=True)


def ours(form: str) -> Generate:
    if form in DTYPES:
        llm = LLM(device="cpu", dtype=form, weight_dtype="plain", reuse=None)
    else:
        llm = LLM(device="cpu", dtype="float32", weight_dtype=form, reuse=None)

    def run(prompt: list[int], tokens: int) -> list[int]:
        [out] = llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))
        return out.token_ids

    return run


def theirs(dtype: str) -> Generate:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    with open_checkpoint(embedded_model()) as checkpoint:
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "model_type"}))
        model.load_state_dict({n: checkpoint.read(n).float() for n in checkpoint.names()}, strict=False)
    model.tie_weights()
    model = model.to(getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(prompt: list[int], tokens: int) -> list[int]:
        config = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
            0, len(prompt) :
        ].tolist()

    return run


def llama_cpp(threads: int) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(embedded_model())
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(prompt: list[int], tokens: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
        answer = server.handle_completions(body)
        assert isinstance(answer, dict) and "timings" in answer, f"llama.cpp answered {str(answer)[:200]}"
        assert answer["timings"]["predicted_n"] == tokens
        return []

    return run


def measure(runs: dict[Name, Generate], prompt: list[int], tokens: int, repeats: int) -> dict[Name, dict[str, float]]:
    """Medians of whole calls, the programs taking turns so that a busy moment hits all of them."""
    short: dict[Name, list[float]] = {name: [] for name in runs}
    long: dict[Name, list[float]] = {name: [] for name in runs}
    for i in track(range(repeats + 1), description="rounds", console=console):
        for name, run in runs.items():
            for times, count in ((short[name], 1), (long[name], 1 + tokens)):
                begin = time.perf_counter()
                run(prompt, count)
                if i:  # the first round warms up
                    times.append(time.perf_counter() - begin)
    rows = {}
    for name in runs:
        prefill, both = statistics.median(short[name]), statistics.median(long[name])
        rows[name] = {
            "prefill_tok_s": len(prompt) / prefill,
            "decode_tok_s": tokens / (both - prefill),
            "best_prefill_tok_s": len(prompt) / min(short[name]),
            "best_decode_tok_s": tokens / (min(long[name]) - min(short[name])),
        }
    return rows


def document(tokens: int) -> list[int]:
    """The first tokens of the demo's document: real text, so that the tokens which follow mean something."""
    with open_checkpoint(embedded_model()) as checkpoint:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    assert tokenizer is not None
    ids = tokenizer.encode(files("hybridkv").joinpath("data", "petrel_log.txt").read_text(encoding="utf-8"))
    if len(ids) < tokens:
        raise SystemExit(f"the document has {len(ids)} tokens; --prompt {tokens} is too long")
    return ids[:tokens]


def equal_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded after the first")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--forms", nargs="+", default=[*PACKED, *DTYPES], choices=[*PACKED, *DTYPES])
    parser.add_argument("--old", action="store_true", help="as a CPU without AVX-512 would")
    args = parser.parse_args()
    wanted = {"GOMP_SPINCOUNT": "10000"} | (OLD_CPU if args.old else {})  # the first as `import hybridkv` sets it
    if wanted.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})  # libraries read them once
    torch.set_num_threads(args.threads)
    prompt = document(args.prompt)
    load = os.getloadavg()[0]
    if load > 0.5 * (os.cpu_count() or 1):
        console.print(
            f"[yellow]the machine is busy (load {load:.1f}): threads that spin against others distort every figure"
        )

    runs: dict[Name, Generate] = {(form, "hybridkv"): ours(form) for form in args.forms}
    runs |= {(dtype, "transformers"): theirs(dtype) for dtype in DTYPES if dtype == "float32" or dtype in args.forms}
    answers = {name: run(prompt, 1 + args.tokens) for name, run in runs.items()}
    peer = {form: (form if form in DTYPES else "float32", "transformers") for form in args.forms}
    agree = {form: equal_prefix(answers[form, "hybridkv"], answers[peer[form]]) for form in args.forms}
    if agree.get("float32") == 0:
        raise SystemExit("float32: not even the first greedy token agrees with transformers; nothing is timed")
    if importlib.util.find_spec("xllamacpp"):
        runs["Q4_1", "llama.cpp"] = llama_cpp(args.threads)
    results = measure(runs, prompt, args.tokens, args.repeats)

    table = Table(
        title_justify="left", title=f"SmolLM2-135M, {args.prompt} + {args.tokens} tokens, {args.threads} threads"
    )
    for column in ("weights", "engine", "prefill tok/s", "decode tok/s", "prefill ratio", "decode ratio", "best round"):
        table.add_column(column, justify="left" if column in ("weights", "engine") else "right")
    for (form, name), row in results.items():
        base = results.get(peer[form]) if form in peer else None
        ratios = [f"{row[k] / base[k]:.2f}x" if base else "" for k in ("prefill_tok_s", "decode_tok_s")]
        best = f"{row['best_prefill_tok_s']:.0f} / {row['best_decode_tok_s']:.1f}"
        table.add_row(form, name, f"{row['prefill_tok_s']:.0f}", f"{row['decode_tok_s']:.1f}", *ratios, best)
    Console(width=110).print(table)
    print(f"greedy tokens equal before the first difference, of {1 + args.tokens}: {agree}")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("transformers", "xllamacpp"):
        if importlib.util.find_spec(package):
            versions[package] = importlib.import_module(package).__version__
    print(
        json.dumps(
            {
                "bench": "cpu",
                "date": datetime.date.today().isoformat(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, bf16 in hardware: {fast_bf16()}",
                "vectors": torch.backends.cpu.get_cpu_capability(),
                "load_before": round(load, 2),
                "versions": versions,
                "prompt": args.prompt,
                "tokens": args.tokens,
                "threads": args.threads,
                "equal_tokens": agree,
                "results": {f"{name} {form}": row for (form, name), row in results.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
