"""Importing this makes Triton compile for a Hopper GPU (or for COMPILE_FOR, such as 89) where there is none: launchers
run, what they launch is compiled and not run. `built` then holds (kernel's name, compiled kernel) of every launch. Only
in a process of its own, without the interpreter.
"""

import os
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024  # bytes that a program may have
built: list[tuple[str, Any]] = []


class Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: (0,) * 8


class NoDevice:
    utils, launcher_cls = Nothing(), None

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", int(os.environ.get("COMPILE_FOR", "90")), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return "x"


driver.set_active(NoDevice())
run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
    built.append((self.__name__, run(self, *args, grid=grid, warmup=True, **more)))


JITFunction.run = compile_only


def usage(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes that are spilled, as NVIDIA's assembler reports them of the compiled PTX."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        command = [assembler, "-v", "--gpu-name", "sm_90a", source, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    assert registers is not None and len(spilled) == 2, said
    return int(registers[1]), sum(map(int, spilled))
