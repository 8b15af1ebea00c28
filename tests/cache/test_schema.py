"""The schema says what real models store: its arithmetic against known sizes, and its page counts at every edge."""

import random

import pytest
import torch

from hybridkv.cache import CacheSchema, KVCacheManager, PagedPool, StateSchema, StreamSchema, TensorSpec

MiB = 2**20

# 448 FP8 values, 64 BF16 rotary values, 7 scale bytes and a pad byte
ENTRY = (
    TensorSpec("nope", (448,), torch.float8_e4m3fn),
    TensorSpec("rope", (64,), torch.bfloat16),
    TensorSpec("scale", (8,), torch.uint8),
)


def test_ratio_two_and_shared_source_layers() -> None:
    """Three source layers at ratio 2 and one at ratio 1, 288 + 68 bytes an entry: 890 bytes a token."""
    entry = (TensorSpec("kv", (288,), torch.uint8), TensorSpec("index", (68,), torch.uint8))
    schema = CacheSchema(
        (
            StreamSchema("encoder", (2, 8, 14), entry, 64, shared=True, tokens_per_entry=2),
            StreamSchema("decoder", (20,), entry, 128),
        )
    )
    assert schema.kv_bytes(MiB) == 890 * MiB
    s = schema.streams[0]
    assert [s.entries(n) for n in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [s.pages(n) for n in (0, 1, 2, 128, 129, 130)] == [0, 0, 1, 1, 1, 2]


def qwen35_27b(kv: torch.dtype, page: int = 64) -> CacheSchema:
    """64 layers, every fourth with 4 KV heads of 256; the rest Gated DeltaNet with 16 key and 48 value heads of 128."""
    full = tuple(range(3, 64, 4))
    linear = tuple(i for i in range(64) if i not in full)
    conv = TensorSpec("conv", (3, 2 * 16 * 128 + 48 * 128), torch.bfloat16)
    state = StateSchema("gdn", linear, (conv, TensorSpec("recurrent", (48, 128, 128), torch.float32)))
    return CacheSchema(
        (StreamSchema("kv", full, (TensorSpec("k", (256,), kv), TensorSpec("v", (256,), kv)), page, heads=4),), (state,)
    )


def test_qwen35_27b_cache_sizes() -> None:
    assert qwen35_27b(torch.float32).kv_bytes(4096) == 512 * MiB
    assert qwen35_27b(torch.bfloat16).kv_bytes(4096) == 256 * MiB
    schema = qwen35_27b(torch.bfloat16)
    assert schema.kv_bytes(262_144) == 16_384 * MiB
    assert schema.slot_bytes / MiB == pytest.approx(146.8, abs=0.05)
    assert schema.slot_bytes == 144 * MiB + 48 * 3 * 10_240 * 2
    assert schema.streams[0].streams == 64 and schema.streams[0].lanes == 1


EDGES = (0, 1, 3, 4, 5, 127, 128, 129)


@pytest.mark.parametrize("per_page", [1, 3, 4, 32, 64])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_pages_are_entries_rounded_up_at_every_edge(ratio: int, per_page: int) -> None:
    s = StreamSchema("s", (0, 5, 9), ENTRY, per_page, heads=2, tokens_per_entry=ratio)
    for start in EDGES:
        for delta in (0, 1, 3, 4, 5, 127, 128, 129, 10_000):
            tokens = start + delta
            whole = sum(1 for t in range(tokens) if (t + 1) % ratio == 0)
            assert s.entries(tokens) == whole
            needed = len({entry // per_page for entry in range(whole)})
            assert s.pages_per_stream(tokens) == needed and s.pages(tokens) == 6 * needed


def test_a_pool_has_the_bytes_that_the_schema_says() -> None:
    lanes = StreamSchema("lanes", (2, 4, 6), ENTRY, 32, shared=True, tokens_per_entry=4)
    for s in (lanes, *qwen35_27b(torch.bfloat16).streams):
        pool = PagedPool(s, 3, torch.device("cpu"))
        assert pool.nbytes == 3 * s.page_bytes
        for spec in s.tensors:
            assert pool.tensors[spec.name].shape == (s.lanes, 3, s.entries_per_page, *spec.shape)


@pytest.mark.parametrize("shared", [False, True])
def test_layers_have_rows_and_lanes_of_their_own(shared: bool) -> None:
    s = StreamSchema("s", (7, 2, 4), ENTRY, 8, heads=3, shared=shared)
    places = [(lane, row) for layer in s.layers for lane, rows in [s.place(layer)] for row in range(s.streams)[rows]]
    assert len(set(places)) == len(places) == 9
    assert {lane for lane, _ in places} == set(range(s.lanes)) and {row for _, row in places} == set(range(s.streams))
    with pytest.raises(ValueError):
        s.place(3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": ()},
        {"tensors": ()},
        {"entries_per_page": 0},
        {"heads": 0},
        {"tokens_per_entry": 0},
        {"entries_per_page": -4},
    ],
)
def test_a_stream_of_nothing_is_refused(wrong: dict) -> None:
    right = dict(name="lost", layers=(0,), tensors=ENTRY, entries_per_page=4, heads=1, tokens_per_entry=1)
    StreamSchema(**right)
    with pytest.raises(ValueError, match="lost"):
        StreamSchema(**(right | wrong))


def test_two_schemas_of_one_name_are_refused() -> None:
    a, b = StreamSchema("x", (0,), ENTRY, 4), StateSchema("x", (0,), ENTRY)
    with pytest.raises(ValueError, match="x"):
        CacheSchema((a,), (b,))


def test_an_empty_schema_costs_nothing() -> None:
    assert CacheSchema().kv_bytes(1000) == CacheSchema().slot_bytes == CacheSchema().bytes({}, 8, 1000) == 0


@pytest.mark.parametrize("seed", range(4))
def test_growing_by_any_steps_reserves_what_the_end_needs(seed: int) -> None:
    """However a request grows, it holds ceil(entries / entries per page) pages of each stream at each position."""
    rng = random.Random(seed)
    tiny = (TensorSpec("x", (1,), torch.float32),)
    schema = CacheSchema(
        tuple(
            StreamSchema(
                f"r{ratio}p{per_page}",
                (2 * i, 2 * i + 1),
                tiny,
                per_page,
                heads=heads,
                shared=shared,
                tokens_per_entry=ratio,
            )
            for i, (ratio, per_page, heads, shared) in enumerate(
                ((1, 4, 2, False), (2, 3, 1, True), (4, 32, 1, True), (128, 1, 1, True), (128, 3, 1, False))
            )
        )
    )
    for _ in range(12):
        m = KVCacheManager(schema, schema.pool_pages(1, 1500), slots=1, max_tokens=1500)
        m.admit_request(0)
        position = 0
        while True:
            delta = rng.choice((1, 1, 3, 4, 5, 127, 128, 129, rng.randrange(1, 400)))
            if position + delta > 1500:
                break
            m.prepare_forward([(0, delta)])
            m.commit([(0, delta)])
            position += delta
            for s in schema.streams:
                entries = position // s.tokens_per_entry
                assert m.held_pages(0)[s.name] == s.streams * -(-entries // s.entries_per_page)
                assert (m.lengths(0)[s.name] == entries).all()
        assert m.held_bytes(0) == schema.kv_bytes(position)
        m.check_integrity()


def test_a_layer_belongs_to_one_set_of_streams_and_a_state_name_to_one_tensor() -> None:
    entry = (TensorSpec("x", (1,), torch.float32),)
    with pytest.raises(ValueError, match="two stream schemas"):
        CacheSchema((StreamSchema("a", (0, 1), entry, 4), StreamSchema("b", (1, 2), entry, 4)))
    with pytest.raises(ValueError, match="one name"):
        CacheSchema(states=(StateSchema("a", (0,), entry), StateSchema("b", (0,), entry)))
