"""How tests compare numbers: bytes for what is moved, relative RMS or the logit gap for what is computed."""

import torch
from torch import Tensor


def _aligned(ref: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    assert ref.shape == got.shape, f"shapes differ: reference {tuple(ref.shape)}, got {tuple(got.shape)}"
    return ref.detach().double().cpu(), got.detach().double().cpu()


def rel_rms(ref: Tensor, got: Tensor) -> float:
    """RMS of the difference over RMS of the reference, at float64.

    Places where both hold the same infinity count as equal. NaN anywhere, or an infinity on one side only, gives NaN.
    """
    ref, got = _aligned(ref, got)
    if ref.numel() == 0:
        return 0.0
    same_inf = ref.isinf() & (ref == got)
    ref, got = ref.masked_fill(same_inf, 0.0), got.masked_fill(same_inf, 0.0)
    if not (ref.isfinite().all() and got.isfinite().all()):
        return float("nan")
    error, scale = (got - ref).square().mean().sqrt(), ref.square().mean().sqrt()
    if scale == 0:
        return 0.0 if error == 0 else float("inf")
    return (error / scale).item()


def assert_close_rms(name: str, ref: Tensor, got: Tensor, bound: float) -> None:
    ref64, got64 = _aligned(ref, got)
    for what, mask in (("reference", ref64.isnan()), ("result", got64.isnan())):
        assert not mask.any(), f"{name}: {int(mask.sum())} of {mask.numel()} values of the {what} are NaN"
    for sign in (float("inf"), float("-inf")):
        wrong = (ref64 == sign) != (got64 == sign)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} positions are {sign} on one side only"
    error = rel_rms(ref, got)
    assert error <= bound, f"{name}: relative RMS {error:.3e} is over {bound:.3e}"  # a NaN fails this too


def assert_same_bytes(a: Tensor, b: Tensor) -> None:
    """Same dtype, shape and bytes: -0.0 differs from 0.0, and a NaN equals only a NaN with the same bits."""
    assert a.dtype == b.dtype, f"dtypes differ: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    # flattened first: a 0-d tensor has no last dimension to view as bytes
    bytes_a, bytes_b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    differ = bytes_a != bytes_b
    if differ.any():
        first = int(differ.nonzero()[0]) // a.element_size()
        raise AssertionError(
            f"{int(differ.sum())} of {differ.numel()} bytes differ, first in element {first} of {tuple(a.shape)}: "
            f"{a.reshape(-1)[first].item()} and {b.reshape(-1)[first].item()}"
        )


def logit_gap(ref: Tensor, got: Tensor) -> float:
    """Largest difference over the largest reference value: what a logit error is worth. NaN or infinity gives NaN."""
    ref, got = _aligned(ref, got)
    if not (ref.isfinite().all() and got.isfinite().all()):
        return float("nan")
    return ((got - ref).abs().max() / ref.abs().max()).item()
