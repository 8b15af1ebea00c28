"""How servers fetch from each other. NIXL is no part of the dev extra: `make test-nixl` has it."""

from importlib.util import find_spec

import pytest

MISSING = find_spec("nixl") is None
WHY = "NIXL is not here: make test-nixl"
TRANSPORTS = ("tcp", pytest.param("nixl", marks=pytest.mark.skipif(MISSING, reason=WHY)))
