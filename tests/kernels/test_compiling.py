"""Kernels compiled many at a time, counted, and not run. Without a GPU: compiled for one."""

from pathlib import Path

import pytest
from own_process import compile_alone

pytest.importorskip("triton", minversion="3.6")

SETUP = """
import threading
import no_device
from no_device import JITFunction
JITFunction.run = no_device.run  # as Triton has it
import torch, triton
from triton import knobs
from hybridkv.kernels import best_tokens
from hybridkv.kernels.compiling import counted, kernel_folder, together
"""
TOGETHER = (
    SETUP
    + """
def launch():
    for V in (4096, 4097):
        logits, largest, place = torch.zeros(2, V), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
        for _ in range(2):  # the second time it is under way already
            best_tokens.piece_kernel[3, 2](logits, largest, place, V, V, BV=2048, num_warps=4)


run, told = JITFunction.run, []
with counted() as first, together(lambda done, known: told.append((done, known)), workers=2):
    launch()
    assert torch.empty(1000).eq(0).all(), "what no kernel writes is zeros"
with counted() as again, together():
    launch()
print(first.compiled, first.found, again.compiled, again.found, told[-1], JITFunction.run is run)
print(len(first.slowest), first.seconds > 0, threading.active_count(), knobs.compilation.listener)
print(kernel_folder())
"""
)


def test_kernels_are_compiled_once_and_then_known(tmp_path: Path) -> None:
    counts, rest, folder = compile_alone(TOGETHER, tmp_path).splitlines()
    assert counts == "2 0 0 0 (2, 2) True" and rest == "2 True 1 None" and folder == str(tmp_path)
    # in another process they are found on disk
    counts, *_ = compile_alone(TOGETHER, tmp_path).splitlines()
    assert counts == "0 2 0 0 (2, 2) True"


BROKEN = (
    SETUP
    + """
from hybridkv.kernels.backend import tl


@triton.jit
def broken_kernel(x):
    tl.store(x, tl.load(x, mask=tl.arange(0, 3) < 1))


try:
    with together():
        broken_kernel[1,](torch.zeros(4))
    print("left to the launch")
    broken_kernel.run(torch.zeros(4), grid=(1,), warmup=True)
except Exception as problem:
    print(type(problem).__name__)
"""
)


def test_a_kernel_that_cannot_be_compiled_is_left_to_its_launch(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"  # Triton reads a kernel's source
    script.write_text(BROKEN)
    said = compile_alone(f"import runpy; runpy.run_path({str(script)!r})", tmp_path)
    assert said.split("\n")[:2] == ["left to the launch", "CompilationError"]


INTERRUPTED = (
    SETUP
    + """
run = JITFunction.run
try:
    with together():
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
from triton.runtime._async_compile import active_mode
print(JITFunction.run is run, active_mode.get())
"""
)


def test_an_interrupt_leaves_triton_as_it_was(tmp_path: Path) -> None:
    assert compile_alone(INTERRUPTED, tmp_path).strip() == "True None"


BESIDE = (
    SETUP
    + """
seen = []


def recorder(self, *args, grid, warmup, **more):
    seen.append((threading.current_thread().name, warmup))


def launch():
    best_tokens.piece_kernel[3, 2](torch.zeros(2, 64))


JITFunction.run = recorder
inside, leave = threading.Event(), threading.Event()


def held():
    with together():
        inside.set()
        leave.wait(240)


def after():
    with together():
        launch()


with together():
    launch()
    other = threading.Thread(target=launch, name="other")
    other.start()
    other.join(240)
print(seen)
two = [threading.Thread(target=held), threading.Thread(target=after)]
two[0].start()
inside.wait(240)
two[1].start()
leave.set()
for each in two:
    each.join(240)
print(JITFunction.run is recorder, seen[-1][1])
"""
)


def test_kernels_of_other_threads_run_and_two_at_once_leave_triton_as_it_was(tmp_path: Path) -> None:
    """An engine that is open already goes on answering while another model is opened."""
    seen, after = compile_alone(BESIDE, tmp_path).splitlines()
    assert seen == "[('MainThread', True), ('other', False)]" and after == "True True"
