"""Graphics cards by name: how much memory each has, and how much of it a model can have.

Totals are what nvidia-smi reports, in MiB: a little less than what is printed on the box, or more (an H100 "80 GB" has
81559 MiB). ECC and drivers move them by a percent or so.

Of the total, CONTEXT is left to the driver and to CUDA's own context, and of what is then free LLM takes HEADROOM where
no limit is given: the rest is for activations, cuBLAS and the allocator's gaps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from hybridkv.errors import HybridKVError

CONTEXT = 1 << 30  # bytes of driver and CUDA context, which nvidia-smi counts and LLM does not see as free
HEADROOM = 0.9  # of the free memory is used when no limit was given
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """A graphics card."""

    name: str
    mib: int  # as nvidia-smi reports
    capability: tuple[int, int]  # CUDA's compute capability; (0, 0): not known

    @property
    def nbytes(self) -> int:
        """All of its memory."""
        return self.mib * MIB

    @property
    def usable(self) -> int:
        """Bytes for weights, cache and workspace: what LLM takes on an empty card."""
        return int(max(self.nbytes - CONTEXT, 0) * HEADROOM)


AMPERE, AMPERE_CONSUMER, ADA, HOPPER, BLACKWELL, BLACKWELL_CONSUMER = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
CARDS = tuple(
    Card(name, mib, capability)
    for capability, cards in (
        (AMPERE_CONSUMER, {
            "RTX 3060": 12288, "RTX 3060 Ti": 8192, "RTX 3070": 8192, "RTX 3070 Ti": 8192, "RTX 3080": 10240,
            "RTX 3080 12GB": 12288, "RTX 3080 Ti": 12288, "RTX 3090": 24576, "RTX 3090 Ti": 24564,
            "RTX A4000": 16376, "RTX A5000": 24564, "RTX A6000": 49140, "A2": 15356, "A10": 23028, "A10G": 23028,
            "A40": 46068,
        }),
        (ADA, {
            "RTX 4060": 8188, "RTX 4060 Ti": 8188, "RTX 4060 Ti 16GB": 16380, "RTX 4070": 12282,
            "RTX 4070 Super": 12282, "RTX 4070 Ti": 12282, "RTX 4070 Ti Super": 16376, "RTX 4080": 16376,
            "RTX 4080 Super": 16376, "RTX 4090": 24564, "RTX 4000 Ada": 20475, "RTX 5000 Ada": 32760,
            "RTX 6000 Ada": 49140, "L4": 23034, "L40": 46068, "L40S": 46068,
        }),
        (BLACKWELL_CONSUMER, {
            "RTX 5060": 8151, "RTX 5060 Ti": 8151, "RTX 5060 Ti 16GB": 16311, "RTX 5070": 12227, "RTX 5070 Ti": 16303,
            "RTX 5080": 16303, "RTX 5090": 32607, "RTX PRO 6000": 97887,
        }),
        ((7, 5), {"T4": 15360}),
        (AMPERE, {"A30": 24576, "A100 40GB": 40960, "A100 80GB": 81920}),
        (HOPPER, {
            "H100 80GB": 81559, "H100 NVL": 95830, "H20": 97871, "GH200 96GB": 97871, "H200": 143771,
        }),
        (BLACKWELL, {"B200": 183359}),
    )
    for name, mib in cards.items()
)  # fmt: skip
ALIASES = {"a100": "A100 80GB", "h100": "H100 80GB", "h100pcie": "H100 80GB", "h100sxm": "H100 80GB",
           "gh200": "GH200 96GB", "a100pcie": "A100 80GB", "a100sxm": "A100 80GB", "6000ada": "RTX 6000 Ada",
           "h200nvl": "H200", "h200sxm": "H200", "pro6000blackwell": "RTX PRO 6000"}  # fmt: skip
FP8_KV = (8, 9)  # the least compute capability whose kernels know FP8 keys and values
FP8_WEIGHTS = (9, 0)  # and FP8 matrices
PACKED_WEIGHTS = (8, 0)  # and matrices in a GGUF file's formats


def plain(name: str) -> str:
    """A name without what people leave out or write differently: 'NVIDIA GeForce RTX 4090' -> '4090'."""
    found = re.sub(r"[^a-z0-9]", "", name.lower())
    found = re.sub(r"^(nvidia)?(geforce|tesla|quadro)?(rtx|gtx)?", "", found)
    return re.sub(r"(\d)(gb|gib)$", r"\1", found)


_BY_NAME = {plain(card.name): card for card in CARDS}
_BY_NAME |= {plain(card.name.removeprefix("RTX ")): card for card in CARDS}
_BY_NAME |= {spelled: next(card for card in CARDS if card.name == name) for spelled, name in ALIASES.items()}


def find_card(name: str) -> Card:
    """A card by its name, written loosely ("4090", "rtx4090", "A100 40GB"), or one of a size ("24GB", which owners use
    for 24 GiB). HybridKVError names cards that are near.
    """
    if size := re.fullmatch(r"\s*(\d{1,4}(?:\.\d{1,2})?)\s*(?:gb|gib|g)\s*", name.lower()):
        mib = int(float(size[1]) * 1024)
        if mib:
            return Card(f"a card of {size[1]} GB", mib, (0, 0))
    wanted = plain(name)
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    near = get_close_matches(wanted, _BY_NAME, n=4, cutoff=0.5) if wanted else []
    near += [key for key in _BY_NAME if wanted and key not in near and (key.startswith(wanted[:3]))]
    names = list(dict.fromkeys(_BY_NAME[key].name for key in near))[:6]
    hint = (
        f"near it are {', '.join(names)}" if names else "known are, for example, RTX 4090, RTX 5090, L40S, H100, H200"
    )
    raise HybridKVError(f"there is no card {name[:80]!r} in the list; {hint}; or give its size (24GB), or --memory")
