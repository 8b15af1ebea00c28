"""Which steps of two ranks are replayed, without a GPU: the capture itself is stood in for; votes, digests, padding and
answers are real. tests/gpu/test_ranks.py has the same with graphs.
"""

import gpu_rank_jobs
import pytest
import ranks
import torch
from long_form import more

KINDS = ("qwen3_5", "deepseek_v4", "v4 in codes", *more("v4, whole experts", "llama", "qwen3_5_moe", "qwen3_next"))
BOUND = 1e-3  # of the logits' scale: sums in two parts, and padded steps, in f32; a router near a tie


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_replay_the_same_steps_and_answer_as_one(kind: str) -> None:
    want, answers, gaps = gpu_rank_jobs.reference(kind)
    first, second = (rank[kind] for rank in ranks.run(2, "families", kinds=(kind,), stand_in=True))
    for rank in (first, second):
        assert float((rank["logits"] - want).abs().max()) <= BOUND * float(want.abs().max())
        assert rank["scored"] == 10 and rank["replays"]["decode"] > 5 and rank["ahead"] > 10
        assert (rank["replays"]["mixed"] > 0) == ("v4" not in kind)  # whose prompts are not captured
    assert torch.equal(first["logits"], second["logits"]) and first["tokens"] == second["tokens"]
    assert (first["replays"], first["keys"], first["ahead"]) == (second["replays"], second["keys"], second["ahead"])
    sure = [next((i for i, gap in enumerate(each) if gap < BOUND), len(each)) for each in gaps]
    assert [a[:n] for a, n in zip(first["answers"], sure)] == [a[:n] for a, n in zip(answers, sure)]


def test_what_one_rank_cannot_capture_no_rank_replays() -> None:
    found = ranks.run(2, "refused", kind="llama", stand_in=True)
    for number, rank in enumerate(found):
        assert rank["replays"] == {"decode": 0, "mixed": 0} and not rank["keys"]
        why = "planted: no memory" if number == 1 else "rank 1 has no memory for it"
        assert rank["said"] and all(why in said for said in rank["said"])
    assert found[0]["tokens"] == found[1]["tokens"]
