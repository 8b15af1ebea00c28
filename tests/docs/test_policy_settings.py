"""docs/eviction.md gives the settings of the default policies as the code has them."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hybridkv.eviction.named import find_policy
from hybridkv.eviction.spread import All

TEXT = (Path(__file__).parents[2] / "docs" / "eviction.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["peak", "heads"])
def test_settings_and_their_defaults_are_those_of_the_policy(name: str) -> None:
    shared = find_policy(name)
    assert isinstance(shared, All)
    row = TEXT.split("| policy | settings |")[1].split(f"| `{name}` |")[1].split("\n")[0]
    said = dict(re.findall(r"`(\w+)` \(([^,;)]+)", row))
    values = {f.name: getattr(shared.policy, f.name) for f in fields(shared.policy)}  # type: ignore[arg-type]
    assert said == {key: "yes" if value is True else f"{value:g}" for key, value in values.items()}
    part = re.search(rf"`{name}`(?: has)?\s([\d.]+\d)", TEXT.split("With `layers=0`")[1])
    assert part is not None and float(part[1]) == shared.layers
