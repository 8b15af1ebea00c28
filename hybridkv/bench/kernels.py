"""Every op alone, one layer, at the widths of a model: time, bytes or operations, and what bounds it.

A row's time is the median of CUDA-graph replays over inputs that alternate, larger together than the chip's cache
(at most sixty-four: the smallest ops stay in it). "torch" is the op's reference in plain torch, by plain calls.
The floor is the bytes that must move at the copy rate of this run, or the operations at its matmul rate. Peers are
what is installed: torch's SDPA backends on contiguous keys, fla. Exact forms have the fast ones beside them.

Most of the time goes into compiling: with --warm N it is done first, by N processes (warm.py).
"""

from __future__ import annotations

import gc
import re

from hybridkv.bench.cases import PAGE, Listed, Setup
from hybridkv.bench.cases_attention import append_cases, attention_cases, inputs_cases
from hybridkv.bench.cases_attention import exact_cases as exact_attention_cases
from hybridkv.bench.cases_dense import exact_cases as exact_linear_cases
from hybridkv.bench.cases_dense import linear_cases, norm_cases
from hybridkv.bench.cases_eviction import eviction_cases
from hybridkv.bench.cases_gdn import gdn_cases
from hybridkv.bench.cases_sampling import sampling_cases
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Column, Report
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Ceilings, at_most, free_memory, median_us
from hybridkv.errors import HybridKVError

COLUMNS = (
    Column("us", "us"),
    Column("floor_us", "floor us"),
    Column("share", "of floor", 8, "%"),
    Column("tb_s", "TB/s", 7, ".2f"),
    Column("tflop_s", "TFLOP/s", 8, ".0f"),
    Column("torch_us", "torch us", 11),
    Column("error", "error", 8, ".0e"),
    Column("peers", "peers us", 10, "each"),
)
SECTIONS = (
    append_cases, attention_cases, gdn_cases, eviction_cases, linear_cases, norm_cases, inputs_cases, sampling_cases,
    exact_attention_cases, exact_linear_cases,
)  # fmt: skip
PEER_SECONDS = 20.0  # a peer that is not compiled, tuned and timed by then is left out


def listed(shape: Shape, options: BenchOptions) -> list[Listed]:
    kinds = options.kv_dtypes or (("bf16", "fp8") if shape.device == "cuda" else ("f32", "fp8"))
    setup = Setup(shape, options.quick, kinds)
    return matching([case for cases in SECTIONS for case in cases(setup)], options.only)


def matching(every: list[Listed], only: str | None) -> list[Listed]:
    found = [case for case in every if re.search(only or "", f"{case.op} {case.name}")]
    if not found:
        raise HybridKVError(f"--only {only!r} matches no op")
    return found


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    return run_listed("kernels", listed(shape, options), shape, options, ceilings)


def run_listed(name: str, wanted: list[Listed], shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    about = {"model": shape.name, "page_size": PAGE}
    report = Report(name, "us", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    gc.freeze()  # what is there now is not looked through after every row
    if options.warm:
        from hybridkv.bench.warm import warm_up

        report.note(warm_up(name, options))
    for i, each in enumerate(wanted):
        report.attempt(each.op, each.name, lambda each=each: measure(report, each, options))
        free_memory(shape.device)
        report.doing(f"{i + 1} of {len(wanted)} rows")
    return report


def measure(report: Report, each: Listed, options: BenchOptions) -> None:
    case = each.build()
    error = case.verify()
    device, ceilings = report.device, report.ceilings
    us = median_us(case.run, case.inputs, graph=case.graph, device=device)
    floor = ceilings.floor_us(case.nbytes, case.flops)
    by_flops = case.flops / ceilings.tflop_s > case.nbytes / ceilings.tb_s
    torch_us = None
    if case.torch is not None and not options.quick:
        torch_us = median_us(case.torch, case.inputs[:1], repeats=3, graph=False, device=device)
    peers: dict[str, float] = {}
    for name, (op, inputs) in ({} if options.skip_peers else case.peers).items():
        try:
            with at_most(PEER_SECONDS):
                peers[name] = median_us(op, inputs, device=device)
        except Exception as problem:  # a peer that does not take this shape, or breaks
            report.note(f"{each.op}: {name} skipped: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}")
    report.add(
        each.op,
        each.name,
        us=us,
        floor_us=floor,
        share=floor / us,
        tb_s=None if by_flops else case.nbytes / us / 1e6,
        tflop_s=case.flops / us / 1e6 if by_flops else None,
        nbytes=case.nbytes,
        flops=case.flops,
        torch_us=torch_us,
        error=error,
        peers=peers,
    )
