"""FP8 keys and values on real weights: what the embedded model finds with an f32 cache, it finds with FP8."""

from importlib.resources import files

from hybridkv import LLM, CacheConfig, SamplingParams

NEEDLES = (
    ("The engineer's favourite fruit is the mango.", "What is the engineer's favourite fruit?", "mango"),
    ("The cook's favourite harbour is Trondheim.", "What is the cook's favourite harbour?", "trondheim"),
    ("The secret code of the voyage is 7291.", "What is the secret code of the voyage?", "7291"),
)
DEPTHS = (0.2, 0.8)


def answers(kv_dtype: str) -> list[bool]:
    """For each needle and depth, whether the answer holds what the needle says."""
    cache = CacheConfig(kv_dtype)
    llm = LLM(device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=2048)
    assert (llm.manager.tables["attention"].pool.tensors.keys() == {"k", "v"}) == (kv_dtype == "f32")
    lines = files("hybridkv").joinpath("data", "petrel_log.txt").read_text(encoding="utf-8").split("\n\n")[:8]
    found = []
    for sentence, question, answer in NEEDLES:
        for depth in DEPTHS:
            at = round(len(lines) * depth)
            document = "\n\n".join([*lines[:at], sentence, *lines[at:]])
            prompt = llm.encode_chat([{"role": "user", "content": f"{document}\n{question}"}])
            assert len(prompt) > 500
            [out] = llm.generate([prompt], SamplingParams(max_tokens=24, stop="\n"))
            found.append(answer in out.text.lower())
    return found


def test_needles_found_with_an_f32_cache_are_found_with_fp8() -> None:
    wide, narrow = answers("f32"), answers("fp8")
    assert sum(wide) >= 3  # the check means something
    assert [w and not n for w, n in zip(wide, narrow, strict=True)] == [False] * len(wide), (wide, narrow)
