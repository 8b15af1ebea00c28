"""Reader: typed, bounded reads of a config."""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.config import shown
from hybridkv.errors import ModelFileError

Raw = Mapping[str, object]
LIMIT = 1 << 24  # no size in a config is larger than this


class Reader:
    """Every refusal names the key and what it held."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw

    def size(self, key: str, default: int | None = None, limit: int = LIMIT) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise ModelFileError(f"config: {key} must be a whole number from 1 to {limit}, not {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e308) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low < value < high:  # type: ignore[operator]  # NaN and infinity fail this too
            limits = f"above {low:g}" + (f" and below {high:g}" if high < 1e308 else "")
            raise ModelFileError(f"config: {key} must be a number {limits}, not {shown(value)}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFileError(f"config: {key} must be true or false, not {shown(value)}")
        return default if value is None else value
