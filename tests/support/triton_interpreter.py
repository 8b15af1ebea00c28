"""Triton kernels on the CPU: the interpreter runs where there is no CUDA device, and its numbers are corrected.

Importing this sets TRITON_INTERPRET (Triton reads it when it is imported and at every `@triton.jit`). `install` then
gives the interpreter of Triton 3.6 the number formats of the GPU:

    f32 -> bf16, fp8      it truncates, or loses the carry      round to nearest even; fp8 saturates, NaN stays
    fp8 NaN values        it reads them as numbers              NaN
    bf16 arithmetic       it works on the bit patterns          in f32, rounded once
    dot                   as the BLAS library sums it           in float64, in the order of k
    range(run-time n)     fails with numpy 2.4                  works

No kernel source and no compiled kernel changes.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"  # where tests of the kernels put their tensors
SATURATES = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # as the GPU's cvt.satfinite
RAW = {torch.bfloat16: np.int16, torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8}  # numpy lacks these


def cast(data: np.ndarray, source: torch.dtype, target: torch.dtype) -> np.ndarray:
    """Numbers of one format to another, both as numpy holds them (bit patterns for what numpy lacks)."""
    data = np.ascontiguousarray(data)
    x = torch.from_numpy(data.view(RAW[source])).view(source) if source in RAW else torch.from_numpy(data)
    if target in SATURATES:
        x = x.float().clamp(-SATURATES[target], SATURATES[target])  # clamp keeps NaN
    x = x.to(target)
    return x.view(getattr(torch, np.dtype(RAW[target]).name)).numpy() if target in RAW else x.numpy()


def dot(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """a [.., M, K] times b [.., K, N] plus d [.., M, N], in d's type.

    Products are summed in float64, in the order of k, one operation on whole arrays at a time. So a row of the result
    has the same bits however many rows and columns are beside it, on any CPU. A BLAS library promises neither.
    """
    if d.dtype.kind != "f":
        return np.matmul(a, b, dtype=d.dtype) + d  # integers: exact in any order
    columns = np.ascontiguousarray(np.moveaxis(a, -1, 0), np.float64)[..., None]  # [K, .., M, 1]
    rows = np.ascontiguousarray(np.moveaxis(b, -2, 0), np.float64)[..., None, :]  # [K, .., 1, N]
    total, product = np.zeros(d.shape), np.empty(d.shape)
    for column, row in zip(columns, rows):
        total += np.multiply(column, row, out=product)
    return total.astype(d.dtype) + d


def install() -> None:
    """Correct the interpreter, once. Nothing to do where kernels are compiled, or where there is no Triton."""
    if not INTERPRETED or importlib.util.find_spec("triton") is None:
        return
    import interpreter_speed
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "hybridkv_mended", False):
        return
    interpreter.hybridkv_mended = True
    interpreter_speed.install()
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    formats = {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    convert_as_it_was = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        a, b = formats.get(source.scalar), formats.get(target.scalar)
        if a is None or b is None or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return convert_as_it_was(data, source, target, rounding)
        data = data if a in RAW else data.view(interpreter._get_np_dtype(source))
        bits = getattr(np, f"uint{target.primitive_bitwidth}")
        return cast(data, a, b).view(bits).reshape(data.shape)

    def upcast(h: Any) -> Any:
        if not (isinstance(h, handle) and h.dtype.scalar == tl.bfloat16):
            return h
        return handle(convert(h.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

    def round_to_bf16(h: Any) -> Any:
        if h.data.dtype.kind != "f":  # a comparison's result
            return h
        return handle(convert(h.data.astype(np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16)

    def in_f32(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            f32_args = [upcast(a) for a in args]
            out = op(self, *f32_args)
            return out if all(a is u for a, u in zip(args, f32_args)) else round_to_bf16(out)

        return run

    def number(h: Any) -> np.ndarray:
        """A handle's values as numbers, where numpy holds bit patterns."""
        if formats.get(h.dtype.scalar) not in RAW:
            return h.data
        return convert(h.data, h.dtype.scalar, tl.float32, None).view(np.float32)

    interpreter._convert_float = convert
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(builder, name, in_f32(getattr(builder, name)))
    builder.create_dot = lambda self, a, b, d, *more: handle(dot(number(a), number(b), d.data), d.dtype.scalar)
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: round_to_bf16(handle(np.array([value], np.float32), tl.float32))
    patch_as_it_was = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch_as_it_was(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
