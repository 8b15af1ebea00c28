"""PTX of one warp, run in numpy: the few instructions that kernels write themselves, tensor cores' products among them.

Registers hold [32] words, one for each lane; sums are float64.
"""

import re

import numpy as np
import torch

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4  # a lane's row and place among the four that share it, in a product's operands


def halves(words: np.ndarray) -> list[np.ndarray]:
    """The two BF16 of each word, as float64."""
    return [(words >> np.uint32(shift) << np.uint32(16)).view(np.float32).astype(np.float64) for shift in (0, 16)]


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two numbers as a word of two BF16."""
    bits = [
        torch.from_numpy(v).bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32) for v in (low, high)
    ]
    return bits[0] | bits[1] << np.uint32(16)


class Warp:
    def __init__(self, inputs: dict[str, np.ndarray]) -> None:
        self.held: dict[str, np.ndarray] = dict(inputs)

    def __getitem__(self, name: str) -> np.ndarray:
        name = name.strip()
        if name in self.held:
            return self.held[name]
        return np.zeros(32) if name.startswith("0f") else np.full(32, int(name, 0) & 0xFFFFFFFF, np.uint32)

    def run(self, ptx: str) -> None:
        for statement in ptx.strip().strip("{}").split(";"):
            if statement.strip() and not statement.strip().startswith(".reg"):
                kind, rest = statement.split(None, 1)
                if kind.startswith("mma"):
                    self.multiply(*([v.strip() for v in part.split(",")] for part in re.findall(r"\{(.*?)\}", rest)))
                else:
                    to, *args = rest.split(",")
                    self.held[to.strip()] = self.value(kind.split(".")[0], kind, [self[v] for v in args])

    def value(self, op: str, kind: str, v: list[np.ndarray]) -> np.ndarray:
        if kind.endswith("bf16x2"):
            parts = [halves(x) for x in v]
            return joined(*(p[0] * p[1] + (p[2] if len(p) > 2 else 0) for p in zip(*parts, strict=True)))
        if op == "prmt":
            given = np.concatenate([x[:, None].copy().view(np.uint8) for x in v[:2]], 1)
            picks = v[2][:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
            found = np.take_along_axis(given, (picks & 7).astype(np.int64), 1)
            found = np.where(picks & 8, np.where(found > 127, 255, 0), found)
            return found.astype(np.uint8).view(np.uint32)[:, 0]
        if op in ("mul", "mad"):  # of words, the low half
            return v[0] * v[1] + (v[2] if op == "mad" else np.uint32(0))
        ops = {"and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift, "shr": np.right_shift}
        return v[0] if op == "mov" else ops[op](v[0], v[1])

    def multiply(self, sums: list[str], a: list[str], b: list[str], before: list[str]) -> None:
        """mma.m16n8k16: rows g and g + 8 of a, columns 2 t, 2 t + 1 and 8 more; b [16, 8]; sums [16, 8]."""
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for half in (0, 1):
            for name, (row, k) in zip(a, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
                left[G + row, 2 * T + k + half] = halves(self[name])[half]
            for name, k in zip(b, (0, 8), strict=True):
                right[2 * T + k + half, G] = halves(self[name])[half]
        product = left @ right
        for to, c, (row, column) in zip(sums, before, ((0, 0), (0, 1), (8, 0), (8, 1)), strict=True):
            self.held[to] = self[c] + product[G + row, 2 * T + column]
