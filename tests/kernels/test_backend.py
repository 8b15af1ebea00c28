"""Facts about the device, and kernel files where Triton or its Gluon is not there."""

import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from own_process import run_fresh

import hybridkv.kernels
from hybridkv.kernels import backend

MODULES = [found.name for found in pkgutil.walk_packages(hybridkv.kernels.__path__, "hybridkv.kernels.")]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.device]]:
    """A function that gives the machine another card; its device has not been asked about before."""
    number = iter(range(90, 128))
    monkeypatch.setattr(backend, "COMPILED", True)

    def make(capability: tuple[int, int], sms: int, shared_memory: int) -> torch.device:
        properties = SimpleNamespace(multi_processor_count=sms, shared_memory_per_block_optin=shared_memory)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return torch.device("cuda", next(number))

    yield make
    for fact in (backend.capability, backend.sm_count, backend.shared_memory):
        fact.cache_clear()


def test_off_a_gpu_every_fact_has_one_answer() -> None:
    for device in (torch.device("cpu"), torch.device("meta")):
        assert backend.capability(device) == (0, 0) and backend.sm_count(device) == backend.SMS_OFF_GPU
        assert backend.shared_memory(device) >= backend.LARGE_SHARED_MEMORY
        assert not backend.is_hopper(device) and not backend.has_pdl(device) and not backend.has_gluon(device)


@pytest.mark.parametrize(
    ("capability", "hopper", "pdl"),
    [((8, 0), False, False), ((8, 9), False, False), ((9, 0), True, True), ((10, 0), False, True)],
)
def test_hopper_is_one_card_and_pdl_came_with_it(
    card: Callable[..., torch.device], capability: tuple[int, int], hopper: bool, pdl: bool
) -> None:
    device = card(capability, 132, 232448)
    assert (backend.is_hopper(device), backend.has_pdl(device)) == (hopper, pdl)
    assert backend.has_gluon(device) == (hopper and backend.HAS_GLUON)
    assert (backend.sm_count(device), backend.shared_memory(device)) == (132, 232448)


IMPORT = """
import sys
from importlib import import_module

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "HIDDEN" or name.startswith("HIDDEN."):
            raise ImportError(name)

sys.meta_path.insert(0, Hidden())
if "HIDDEN" != "triton":
    import triton
    triton.__version__ = "9.9.0"
for name in NAMES:
    import_module(name)
"""


@pytest.mark.parametrize("hidden", ["triton", "triton.experimental"])
def test_every_kernel_file_can_be_imported_without(hidden: str) -> None:
    """Without Triton, and with a Triton whose Gluon is another language."""
    pytest.importorskip("triton")
    assert len(MODULES) > 50
    run_fresh(IMPORT.replace("HIDDEN", hidden).replace("NAMES", repr(MODULES)))
