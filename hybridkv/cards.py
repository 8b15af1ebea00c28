"""Graphics cards by name: how much memory each has, how much of it a model can have, and what its kernels can do.

Totals are in MiB. Those of PUBLISHED are what nvidia-smi reports, from a published table: a little less than what is
printed on the box, or more (an H100 "80 GB" has 81559 MiB). All others are nominal: about the size on the box, not
checked against a card. ECC and drivers move either by a percent or so.

Of the total, CONTEXT is left to the driver and to CUDA's own context, and of what is then free LLM takes HEADROOM where
no limit is given: the rest is for activations, cuBLAS and the allocator's gaps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from hybridkv.errors import HybridKVError

# Bytes of driver and CUDA context, which nvidia-smi counts and LLM does not see as free. Measured on an H200 with
# Qwen3.5-27B in Q4_K (bench/packed_load.py): 619 MiB, and 155 MiB by which torch rounds 771 tensors up.
CONTEXT = 1 << 30
HEADROOM = 0.9  # of the free memory is used when no limit was given
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """A graphics card."""

    name: str
    mib: int  # its total; see PUBLISHED
    capability: tuple[int, int]  # CUDA's compute capability; (0, 0): not known, and taken to have all

    @property
    def nbytes(self) -> int:
        """All of its memory."""
        return self.mib * MIB

    @property
    def usable(self) -> int:
        """Bytes for weights, cache and workspace: what LLM takes on an empty card."""
        return int(max(self.nbytes - CONTEXT, 0) * HEADROOM)

    @property
    def by_size(self) -> bool:
        """Whether only its size is known."""
        return self.capability == (0, 0)

    @property
    def nominal(self) -> bool:
        """Whether its total is the size on the box, and not what nvidia-smi was seen to report."""
        return not self.by_size and self.name not in PUBLISHED

    def lacks(self, what: str, least: tuple[int, int]) -> str | None:
        """A clause where the compute capability is known and less than `least`. what: how it begins: "KV fp8 needs"."""
        if self.by_size or self.capability >= least:
            return None
        needed, found = (".".join(map(str, pair)) for pair in (least, self.capability))
        return f"{what} compute capability {needed}, the {self.name} has {found}"


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
PUBLISHED = frozenset({"T4", "A10", "L4", "L40S", "A100 40GB", "A100 80GB", "H100 80GB", "H200"})
ALIASES = {"a100": "A100 80GB", "h100": "H100 80GB", "gh200": "GH200 96GB", "gh200480gb": "GH200 96GB",
           "h200nvl": "H200"}  # fmt: skip
FP8_KV = (8, 9)  # the least compute capability whose kernels know FP8 keys and values
FP8_WEIGHTS = (9, 0)  # and FP8 matrices
PACKED_WEIGHTS = (8, 0)  # and matrices in a GGUF file's formats
NEAR = 0.08  # a size that is named with a card ("L4 24GB" has 22.5 GiB) may differ from its total by so much
_NOISE = (
    r"nvidia|geforce|tesla|quadro|pcie|sxm\d?|hbm\d?e?|blackwell|generation|(server|workstation)? ?edition|max-?q|gpu"
)


def plain(name: str) -> str:
    """A name without what people leave out or write differently: 'NVIDIA GeForce RTX 4090' -> '4090'."""
    found = re.sub(r"[^a-z0-9]", "", re.sub(_NOISE, "", name.lower()))
    return re.sub(r"^(rtx|gtx)", "", found)


def split_size(name: str) -> tuple[str, int | None]:
    """'H100 80GB HBM3' -> ('H100  HBM3', 80); None where no size is named."""
    size = re.search(r"(?<![\d.])(\d{1,3}) ?(gb|gib)\b", name, re.IGNORECASE)
    return (name, None) if size is None else (name[: size.start()] + name[size.end() :], int(size[1]))


_BY_NAME = {plain(card.name): card for card in CARDS}
_BY_NAME |= {spelled: next(card for card in CARDS if card.name == name) for spelled, name in ALIASES.items()}


def find_card(name: str) -> Card:
    """A card by its name, written loosely ("4090", "rtx4090", "A100 40GB") or as nvidia-smi and torch print it ("NVIDIA
    H100 80GB HBM3"), or one of a size ("24GB", which owners use for 24 GiB; "24564MiB"). HybridKVError names cards that
    are near.
    """
    if size := re.fullmatch(r"\s*(?:(\d{1,4}(?:\.\d{1,2})?)\s*(?:gb|gib|g)|(\d{1,7})\s*(?:mb|mib))\s*", name.lower()):
        mib = int(float(size[1]) * 1024) if size[1] else int(size[2])
        if not mib:
            raise HybridKVError(f"a card of {name[:40]!r} has no memory; give its size (24GB), or a name")
        return Card(f"a card of {size[1]} GB" if size[1] else f"a card of {size[2]} MiB", mib, (0, 0))
    if plain(name) in _BY_NAME:
        return _BY_NAME[plain(name)]
    without, gib = split_size(name)
    base = plain(without)
    alike = [card for card in CARDS if base and base in (plain(card.name), plain(split_size(card.name)[0]))]
    alike += [_BY_NAME[base]] if base in _BY_NAME and _BY_NAME[base] not in alike else []
    fitting = [card for card in alike if gib is not None and abs(card.mib / 1024 / gib - 1) < NEAR]
    if fitting:
        return min(fitting, key=lambda card: abs(card.mib / 1024 - (gib or 0)))
    raise HybridKVError(f"there is no card {name[:80]!r} in the list; {_hint(name, base, alike)}, or --memory")


def _hint(name: str, base: str, alike: list[Card]) -> str:
    """What to give instead of a name that is not known."""
    if name.strip().isdigit() and len(name.strip()) < 4:
        return f"if it is a size, write {name.strip()}GB; or give a name (RTX 4090)"
    bases = {plain(split_size(card.name)[0]): card for card in CARDS}
    near = get_close_matches(base, bases, n=4, cutoff=0.7)
    near += [key for key in bases if len(base) > 2 and key.startswith(base[:3])]
    names = [card.name for card in alike] or list(dict.fromkeys(bases[key].name for key in near))[:6]
    known = (
        f"near it are {', '.join(names)}" if names else "known are, for example, RTX 4090, RTX 5090, L40S, H100, H200"
    )
    return f"{known}; or give its size (24GB)"
