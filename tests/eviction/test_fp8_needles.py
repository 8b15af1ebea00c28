"""FP8 keys and values on real weights: what the embedded model finds with an f32 cache, it finds with FP8."""

from functools import cache
from importlib.resources import files

import pytest
import torch
from numerics import rel_rms
from torch import Tensor

from hybridkv import LLM, CacheConfig

NEEDLES = (  # a sentence of the document without its end, and the end: nothing that could be guessed
    ("The engineer's favourite fruit is the", " mango"),
    ("The cook's favourite harbour is", " Trondheim"),
    ("The secret code of the voyage is", " 7291"),
)


def document() -> str:
    """The start of the ship's log with a needle after every other paragraph."""
    lines = files("hybridkv").joinpath("data", "petrel_log.txt").read_text(encoding="utf-8").split("\n\n")[:6]
    for i, (begin, end) in enumerate(NEEDLES):
        lines.insert(3 * i + 1, f"{begin}{end}.")
    return "\n\n".join(lines)


@cache
def ends(kv_dtype: str) -> tuple[Tensor, Tensor]:
    """The needles' sentences are begun again after the document. Of the tokens that end them: logits [n, vocab] and the
    tokens [n].
    """
    llm = LLM(device="cpu", dtype="float32", cache=CacheConfig(kv_dtype), max_requests=1, max_context=1024)
    assert (llm.manager.tables["attention"].pool.tensors.keys() == {"k", "v"}) == (kv_dtype == "f32")
    tokens, places = llm.encode(document()), []
    assert len(tokens) > 400
    for begin, end in NEEDLES:
        tokens += llm.encode(f"\n\n{begin}")
        said = llm.encode(end)
        places += range(len(tokens), len(tokens) + len(said))
        tokens += said
    logits = llm.logits(tokens)[[place - 1 for place in places]]
    return logits, torch.tensor([tokens[place] for place in places])


def log_likelihood(kv_dtype: str) -> Tensor:
    logits, said = ends(kv_dtype)
    return logits.log_softmax(-1).gather(1, said[:, None])[:, 0]


@pytest.mark.slow
def test_needles_found_with_an_f32_cache_are_found_with_fp8() -> None:
    wide, narrow = log_likelihood("f32"), log_likelihood("fp8")
    assert wide.min() > -1  # found: without its needle a token is one of thousands
    # a quantised value has 3 bits after the first, so each key and value is off by 2.6 % RMS; 3.3 % is seen in logits
    assert rel_rms(ends("f32")[0], ends("fp8")[0]) < 0.07
    assert (wide - narrow).abs().max() < 0.4  # 0.08 is seen, where the f32 cache gives 0.48: the answer stays in front
