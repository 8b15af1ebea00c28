"""What a user can set: every bad value is refused by a message that names the field."""

from functools import partial
from typing import Any

import pytest
import torch

from hybridkv.config import POLICY_NAMES, CacheConfig, EngineConfig, EvictionConfig, SamplingParams, parse_bytes
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import POLICIES

NAN, INF = float("nan"), float("inf")
HUGE = 10**400  # too large for a float
NOT_NUMBERS = ("1", "", b"1", None, [1], (1,), {}, True, False, object())
BAD = {  # field -> what it refuses beside NOT_NUMBERS
    "max_tokens": (0, -1, 2**31 + 1, HUGE, 1.0, NAN, INF),
    "temperature": (-0.1, -1, 1e5, NAN, INF, -INF, HUGE, -HUGE),
    "top_k": (-1, 2**31 + 1, HUGE, 1.0, NAN, INF),
    "top_p": (0, 0.0, -0.1, 1.1, NAN, INF, HUGE),
    "min_p": (-0.1, 1.1, NAN, INF, HUGE),
    "repetition_penalty": (0, 0.0, -1, 1e9, NAN, INF, HUGE),
    "seed": (-1, 2**63, HUGE, 1.0, NAN, INF),
    "logprobs": (-1, 101, HUGE, 1.0, NAN, INF),
    "prompt_logprobs": (-1, 101, HUGE, 1.0, NAN, INF),
    "presence_penalty": (-2.1, 2.1, NAN, INF, -INF, HUGE),
    "frequency_penalty": (-2.1, 2.1, NAN, INF, -INF, HUGE),
    "min_tokens": (-1, 2**31 + 1, HUGE, 1.0, NAN, INF),
    "n": (0, -1, 129, HUGE, 1.0, NAN, INF),
}
NEVER_NONE = ("presence_penalty", "frequency_penalty", "min_tokens", "n")


def test_ranges_of_whole_numbers_are_written_whole() -> None:
    with pytest.raises(RequestError, match="max_tokens must be a whole number from 1 to 2147483648, not 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="temperature must be a number from 0 to 10000, not -1"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize("field", BAD)
def test_bad_sampling_parameters_are_named(field: str) -> None:
    for bad in (*BAD[field], *NOT_NUMBERS):
        if bad is None and field not in NEVER_NONE:
            continue
        with pytest.raises(RequestError, match=rf"\b{field}\b") as problem:
            SamplingParams(**{field: bad})
        assert len(str(problem.value)) < 200, field


@pytest.mark.parametrize("bad", ("yes", 1, 0, None, [], NAN))
def test_ignore_eos_is_true_or_false(bad: Any) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=bad)


@pytest.mark.parametrize(
    "bad", ("", [""], ["a", ""], [1], [None], 5, True, NAN, b"x", ["x" * 1025], ["x"] * 17, {"a": 1})
)
def test_bad_stop_strings_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"\bstop\b"):
        SamplingParams(stop=bad)


@pytest.mark.parametrize("bad", ([-1], [True], ["1"], [1.0], [NAN], [HUGE], [2**31 + 1], "12", 5, True, range(1025)))
def test_bad_stop_ids_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=bad)


@pytest.mark.parametrize(
    "bad", ("", [""], ["a", "  "], [1], [None], 5, True, b"x", ["x" * 1025], ["x"] * 1025, {"a": 1})
)
def test_bad_bad_words_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="bad_words"):
        SamplingParams(bad_words=bad)


@pytest.mark.parametrize(
    "bad",
    (5, "5", [5], (1, 2), {-1: 0.0}, {"1": 0.0}, {True: 0.0}, {1.0: 0.0}, {2**31 + 1: 0.0}, {HUGE: 0.0}, {1: 101},
     {1: -100.1}, {1: NAN}, {1: INF}, {1: None}, {1: "1"}, {1: True}, {1: HUGE}, dict.fromkeys(range(16385), 0.0)),
    ids=lambda v: repr(v)[:12],
)  # fmt: skip
def test_a_bad_logit_bias_is_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias") as problem:
        SamplingParams(logit_bias=bad)
    assert len(str(problem.value)) < 200


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens 6 is more than max_tokens 5"):
        SamplingParams(min_tokens=6, max_tokens=5)
    with pytest.raises(RequestError, match="seed"):
        SamplingParams(seed=2**63 - 3, n=4)
    with pytest.raises(RequestError, match="logits_hook must be a function"):
        SamplingParams(logits_hook="argmax")  # type: ignore[arg-type]
    assert SamplingParams(min_tokens=6).min_tokens == 6 and SamplingParams(seed=2**63 - 4, n=4).n == 4


def test_what_is_left_open_is_the_models_own_default_else_greedy_and_off() -> None:
    plain = SamplingParams(max_tokens=7, seed=3).resolved()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.repetition_penalty) == (
        0.0,
        0,
        1.0,
        0.0,
        1.0,
    )
    assert plain.max_tokens == 7 and plain.seed == 3 and plain.logprobs is None
    assert SamplingParams().resolved().max_tokens is None
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "repetition_penalty": None}
    found = SamplingParams(top_k=5).resolved(model)  # type: ignore[arg-type]
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty) == (
        0.6,
        5,
        0.95,
        0.0,
        1.0,
    )
    assert found.max_tokens is None and found.resolved({"temperature": 0.1}) is found
    assert SamplingParams(temperature=0).resolved(model).temperature == 0  # type: ignore[arg-type]
    assert SamplingParams(top_p=1, min_p=0.0).resolved({"top_p": 0.5, "min_p": 0.5}).top_p == 1
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams().resolved({"temperature": -1.0})


def test_sampling_parameters_own_their_values() -> None:
    bias = {5: 1.0}
    made = SamplingParams(logit_bias=bias)
    bias[6] = 2.0
    assert made.logit_bias == {5: 1.0} and SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]
    assert SamplingParams(bad_words="no").bad_words == ("no",)  # type: ignore[arg-type]
    assert hash(made) == hash(SamplingParams(logit_bias={5: 1.0}))


def test_policies_are_known_by_name_before_anything_is_opened() -> None:
    assert ("auto", *POLICIES) == POLICY_NAMES
    for make in (CacheConfig, partial(EvictionConfig, 100), partial(CacheConfig, budget=100)):
        with pytest.raises(HybridKVError, match="policy 'h2o' is unknown; choose auto, peak, "):
            make(policy="h2o")
    CacheConfig(policy=POLICIES["tova"]())


def test_good_sampling_parameters_are_kept() -> None:
    for good in (
        {"max_tokens": 1},
        {"max_tokens": 2**31},
        {"temperature": 0},
        {"temperature": 1e-9},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"seed": 2**63 - 1},
        {"seed": 0},
        {"logprobs": 0},
        {"logprobs": 100},
        {"stop_token_ids": (0, 5)},
        {"ignore_eos": True},
    ):
        ((field, value),) = good.items()
        assert getattr(SamplingParams(**good), field) == value
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 5  # type: ignore[misc]


@pytest.mark.parametrize("bad", ("fp4", "", "F32", "float32", None, 32, True, ["f32"], torch.float32))
def test_an_unknown_kv_dtype_is_answered_with_the_known_ones(bad: Any) -> None:
    with pytest.raises(HybridKVError, match="kv_dtype.*auto, f32, bf16"):
        CacheConfig(kv_dtype=bad)


@pytest.mark.parametrize("bad", (0, -1, 65537, HUGE, 1.0, NAN, INF, *NOT_NUMBERS), ids=lambda v: repr(v)[:12])
def test_a_bad_page_size_is_named(bad: Any) -> None:
    with pytest.raises(HybridKVError, match="page_size"):
        CacheConfig(page_size=bad)


@pytest.mark.parametrize("field", ("max_requests", "max_context", "step_tokens"))
def test_bad_engine_limits_are_named(field: str) -> None:
    extra = {"max_requests": (4097,), "max_context": (), "step_tokens": (1, 63, 65, 100, 64.0, 128.0)}[field]
    for bad in (0, -1, -64, 1.5, NAN, INF, -INF, HUGE + 1, *extra, *NOT_NUMBERS):
        if field == "max_context" and bad in (None, HUGE + 1):  # None has a meaning; a size is held against the model's
            continue
        with pytest.raises(HybridKVError, match=rf"\b{field}\b"):
            EngineConfig(**{field: bad})


NOT_SIZES = (
    0,
    -1,
    1.5,
    NAN,
    INF,
    HUGE,
    True,
    b"12",
    [1],
    "",
    "GiB",
    "12 XB",
    "-5GiB",
    "1e9",
    "0",
    "0MiB",
    "0.1b",
    "nan",
)


@pytest.mark.parametrize("bad", (*NOT_SIZES, "inf", "12GiB6", "9" * 400, "9" * 30 + "TiB"), ids=lambda v: repr(v)[:12])
def test_a_bad_memory_size_is_named(bad: Any) -> None:
    with pytest.raises(HybridKVError, match="memory"):
        EngineConfig(memory=bad)


@pytest.mark.parametrize(
    ("size", "want"),
    (
        (None, None),
        (1, 1),
        (12884901888, 12884901888),
        ("123", 123),
        ("7b", 7),
        ("12GiB", 12 << 30),
        ("12 GB", 12 * 10**9),
        (" 800 mib ", 800 << 20),
        ("1.5KiB", 1536),
        ("2kb", 2000),
        ("3MB", 3 * 10**6),
        ("1TiB", 1 << 40),
        ("2tb", 2 * 10**12),
    ),
)
def test_sizes_are_read(size: Any, want: int | None) -> None:
    assert parse_bytes(size) == want
    assert EngineConfig(memory=size).memory_bytes == want
