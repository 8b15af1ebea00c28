"""DeepSeek-V4's ops alone, one layer each: our kernels beside their torch forms and the floor (cases_v4.py)."""

from __future__ import annotations

from hybridkv.bench.cases import Listed, Setup
from hybridkv.bench.cases_v4 import v4_cases
from hybridkv.bench.kernels import matching, run_listed
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.report import Report
from hybridkv.bench.shapes import Shape
from hybridkv.bench.timing import Ceilings


def listed(shape: Shape, options: BenchOptions) -> list[Listed]:
    return matching(list(v4_cases(Setup(shape, options.quick, ()))), options.only)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    return run_listed("v4_kernels", listed(shape, options), shape, options, ceilings)
