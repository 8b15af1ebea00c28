"""Fork a request, save it to a file, and go on from both. The cache is used as a library, beside the engine.

python examples/fork_and_save.py [MODEL]      a folder or .gguf file; without one, the small embedded model
"""

import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path

import torch

from hybridkv import LLM, SamplingParams
from hybridkv.cache import Snapshot, restore_request, snapshot_request


def continue_greedily(llm: LLM, key: Hashable, token: int, count: int) -> list[int]:
    """`count` more tokens of a request that the engine does not know, after `token`, which is not in its cache yet."""
    answer = []
    for _ in range(count):
        position = llm.manager.position(key)
        step = llm.manager.prepare_forward([(key, 1)])  # takes pages
        tokens, positions = (torch.tensor([n], device=llm.device) for n in (token, position))
        logits = llm.model.forward(tokens, positions, llm.manager.acquire(step), None)  # [1, vocab]
        llm.manager.commit([(key, 1)])  # the token is now part of the request
        token = int(logits[0].argmax())
        answer.append(token)
    return answer


def main(model: str | None = None, prompt: str | list[int] | None = None, count: int = 12) -> dict[str, list[int]]:
    llm = LLM(model, max_requests=3, max_context=512)
    engine, manager = llm.engine, llm.manager
    params = SamplingParams(max_tokens=8 + count, ignore_eos=True)
    request = engine.add(llm.encode(prompt or "The sea was calm and"), params)
    while request.answer_tokens < 8:
        engine.step()
    engine.drain()  # a step may be in flight on a GPU; forks and snapshots need it to end first
    past, position = list(request.tokens), manager.position(request.key)

    manager.fork_request(request.key, "fork")  # shares all pages; copied only where one of both writes
    snapshot = snapshot_request(manager, request.key)  # a copy on the host
    while not engine.idle:
        engine.step()  # the request goes on, and its end does not touch the other two

    other_word = llm.encode(" Suddenly")[-1] if llm.tokenizer else 5
    found = {"request": request.tokens[len(past) :]}
    found["fork"] = [other_word, *continue_greedily(llm, "fork", other_word, count - 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.safetensors"
        snapshot.save(path)
        print(f"a request of {position} tokens takes {path.stat().st_size / 2**20:.2f} MiB in a file")
        restore_request(manager, Snapshot.load(path), "restored")  # another process could do this; the same model must
    found["restored"] = continue_greedily(llm, "restored", past[position], count)
    for key in ("fork", "restored"):
        manager.release_request(key)

    for name, tokens in found.items():
        text = llm.tokenizer.decode(past + tokens) if llm.tokenizer else tokens
        print(f"{name:9} {text!r}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
