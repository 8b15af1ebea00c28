"""Ranks that something else has started: unlike ones are refused, and all hear why one cannot begin."""

import shutil
from typing import Any

import pytest
import ranks
from tiny_ranks import build

from hybridkv.parallel.group import free_port

SAME = "start all ranks with the same options, model and version of hybridkv"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, a copy, another one of its shape, the same weights read otherwise, and a file that is cut short."""
    place = tmp_path_factory.mktemp("starting")
    found = {name: place / name for name in ("plain", "copy", "other", "config", "short")}
    build("qwen3_5", 9).save_pretrained(found["plain"])
    build("qwen3_5", 10).save_pretrained(found["other"])
    for name in ("copy", "config", "short"):
        shutil.copytree(found["plain"], found[name])
    config = found["config"] / "config.json"
    text = config.read_text()
    assert '"rms_norm_eps": 1e-06' in text
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    weights = found["short"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return {name: str(path) for name, path in found.items()} | {"nowhere": str(place / "nowhere")}


def start(models: list[str], settings: Any = None, broken: Any = None, size: int = 2) -> list[list[Any] | None]:
    """What each rank says."""
    given = dict(models=models, settings=settings or {}, broken=broken or {})
    return ranks.run(size, "start", port=free_port(), **given)


def refused(said: list[list[Any] | None], words: str) -> None:
    """All ranks end with the same line."""
    assert said == [["UnlikeRanks", f"{words}: {SAME}"]] * len(said)


@pytest.mark.parametrize(
    ("settings", "words"),
    (
        (dict(cache=dict(kv_dtype="fp8")), "kv_dtype is 'fp8' on rank 1, 'auto' on rank 0"),
        (dict(cache=dict(budget=96)), "budget is 96 on rank 1, None on rank 0"),
        (dict(exact=True), "exact is True on rank 1, False on rank 0"),
        (dict(dtype="bfloat16"), "dtype is 'bfloat16' on rank 1, 'float32' on rank 0"),
        (dict(weight_dtype="fp8"), "weight_dtype is 'fp8' on rank 1, 'plain' on rank 0"),
        (dict(max_context=128), "max_context is 128 on rank 1, 256 on rank 0"),
        (dict(max_requests=3), "max_requests is 3 on rank 1, 2 on rank 0"),
        (dict(step_tokens=128), "step_tokens is 128 on rank 1, 64 on rank 0"),
        (dict(reuse=None), "reuse is False on rank 1, True on rank 0"),
    ),
    ids=lambda found: next(iter(found)) if isinstance(found, dict) else "",
)
def test_ranks_with_unlike_settings_are_refused(settings: Any, words: str, folders: dict[str, str]) -> None:
    refused(start([folders["plain"]], {"1": settings}), words)


@pytest.mark.parametrize(("what", "name"), (("version", "version is '0.2.9'"), ("torch", "torch is '1.2'")))
def test_ranks_of_unlike_versions_are_refused(what: str, name: str, folders: dict[str, str]) -> None:
    """Before they are a group."""
    for rank, line in enumerate(start([folders["plain"]], broken={"1": what})):
        assert line is not None and line[0] == "UnlikeRanks", rank
        assert line[1].startswith(f"{name} on rank 1, '") and line[1].endswith(f"' on rank 0: {SAME}")


@pytest.mark.slow
def test_a_rank_that_compares_nothing_is_not_waited_for(folders: dict[str, str]) -> None:
    """As an earlier version does: it goes on to form a group, and the others have just met it."""
    one, two = start([folders["plain"]], broken={"1": "no comparison"})
    assert one == ["GroupError", "rank 0 of 2: rank 1 did not come to 'the versions' in 5 s"]
    assert two is not None and two[0] == "GroupError"


@pytest.mark.parametrize("other", ("other", "config"))
def test_ranks_with_unlike_models_are_refused(other: str, folders: dict[str, str]) -> None:
    one, two = start([folders["plain"], folders[other]])
    assert one == two and one is not None and one[0] == "UnlikeRanks"
    assert one[1].startswith(f"model is {folders[other]} (") and f" on rank 1, {folders['plain']} (" in one[1]


def test_of_more_ranks_all_are_named(folders: dict[str, str]) -> None:
    unlike = {"1": dict(cache=dict(page_size=32)), "3": dict(cache=dict(page_size=32))}
    refused(start([folders["plain"]], unlike, size=4), "page_size is 32 on ranks 1 and 3, 64 on ranks 0 and 2")


def test_ranks_with_unlike_memory_go_by_the_smallest_and_folders_may_differ(folders: dict[str, str]) -> None:
    """And what is asked for in other words."""
    unlike = {"0": dict(memory="1GiB"), "1": dict(memory=200 << 20, weight_dtype="plain", host_cache="1GiB")}
    one, two = start([folders["plain"], folders["copy"]], unlike)
    assert two is None and one is not None and one[0] == "opened" and len(one[1]) == 4


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize(("model", "words"), (("short", "is it complete?"), ("nowhere", "there is no file or folder")))
def test_all_hear_of_a_rank_that_cannot_open_its_files(
    model: str, words: str, rank: int, folders: dict[str, str]
) -> None:
    """It has not joined them, and they wait for it."""
    models = [folders["plain"]] * 4
    models[rank] = folders[model]
    said = start(models, size=4)
    own = said.pop(rank)
    assert own is not None and own[0] == "ModelFileError" and words in own[1]
    assert said == [["GroupError", f"rank {rank}: {own[1]}"]] * 3


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("when", ("joined", "load", "load, late"))
def test_all_hear_of_a_rank_that_fails_while_it_loads(when: str, rank: int, folders: dict[str, str]) -> None:
    said = start([folders["plain"]], broken={str(rank): when}, size=4)
    assert said.pop(rank) == ["RuntimeError", "no memory here. More of it"]
    assert said == [["GroupError", f"rank {rank}: RuntimeError: no memory here"]] * 3


def test_what_all_ranks_lack_is_said_by_each(folders: dict[str, str]) -> None:
    one, two = start([folders["nowhere"]])
    assert one == two and one is not None and one[0] == "ModelFileError"


def test_a_rank_that_still_loads_hears_of_one_that_fails(folders: dict[str, str]) -> None:
    one, two = start([folders["plain"]], broken={"0": "load, without end", "1": "load"})
    assert one == ["GroupError", "rank 1: RuntimeError: no memory here"] and two is not None


def test_a_rank_may_load_for_longer_than_an_exchange_may_take(folders: dict[str, str]) -> None:
    """The other one waits for it, and not in an exchange."""
    one, two = start([folders["plain"]], broken={"1": "load, last"})
    assert one is not None and one[0] == "opened" and two is None
