"""The same requests by clients of `AsyncLLM`: each is a task of one event loop that streams its answer as text, while
the engine runs on its own thread. Beside it, by turns: the same requests given to the engine at once, whose steps are
called one after the other with nothing beside them and without text, as the offline rows do.
"""

from __future__ import annotations

import asyncio
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, product

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from hybridkv.async_llm import AsyncLLM
from hybridkv.bench.load_samples import percentile
from hybridkv.bench.load_serve import forget, serve
from hybridkv.bench.load_workload import Asked
from hybridkv.bench.report import Report
from hybridkv.config import SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.llm import LLM
from hybridkv.prompts import Prompts
from hybridkv.text.tokenizer import Tokenizer

LOOK = 0.02  # seconds between two looks at how late the event loop is


class EngineLLM(LLM):
    """An LLM around an engine that is there: no files, and token ids in place of text."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.manager, self.owner = engine, engine.manager, EngineOwner(engine)
        self.prompts = Prompts("this engine", None, "give token ids", remembers=False)


def letters_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer in which every id is a word of four letters."""
    names = ("\u0120" + "".join(four) for four in product(string.ascii_letters, repeat=4))
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(islice(names, vocab))}, "\u0120aaaa"))
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return Tokenizer(backend, lambda: backend)


@dataclass
class Streamed:
    """What the clients got."""

    seconds: float = 0.0  # until the last piece
    tokens: int = 0
    pieces: int = 0
    late: list[float] = field(default_factory=list)  # seconds that the event loop was late


async def stream_all(llm: LLM, asked: Sequence[Asked], params: Sequence[SamplingParams]) -> Streamed:
    """One client for each request, all at once; RuntimeError where an answer is not whole."""
    asking, found = AsyncLLM(llm), Streamed()

    async def client(mine: Asked, how: SamplingParams) -> None:
        stream = asking.stream(mine.prompt, how)
        async for _ in stream:
            found.pieces += 1
        whole = stream.completion
        if whole is None or len(whole.token_ids) != mine.answer:
            got = "no answer" if whole is None else f"{len(whole.token_ids)} tokens"
            raise RuntimeError(f"a client that asked for {mine.answer} tokens got {got}")
        found.tokens += len(whole.token_ids)

    async def look() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LOOK)
            found.late.append(time.perf_counter() - before - LOOK)

    looking = asyncio.create_task(look())
    begin = time.perf_counter()
    try:
        await asyncio.gather(*map(client, asked, params))
        found.seconds = time.perf_counter() - begin
    finally:
        looking.cancel()
    if not found.late:  # it was over before the loop was looked at once
        found.late.append(found.seconds)
    return found


def client_rows(
    report: Report, engine: Engine, asked: Sequence[Asked], params: Sequence[SamplingParams], case: str, rounds: int
) -> float:
    """Add a row for each way and round. Returns the clients' share of the tokens a second of the engine alone, each by
    its best round.
    """
    direct: list[float] = []
    clients: list[Streamed] = []
    tokenizer, llm = letters_tokenizer(engine.vocab), EngineLLM(engine)
    try:
        for number in range(rounds):
            report.doing(f"engine alone, round {number + 1}")
            alone = serve(engine, asked, params)
            alone.check()
            direct.append(alone.seconds)
            report.add(
                "engine alone", f"{case}, {number + 1}", s=alone.seconds, tok_s=alone.answer_tokens / alone.seconds
            )
            report.doing(f"clients, round {number + 1}")
            engine.tokenizer = tokenizer
            forget(engine)
            try:
                clients.append(asyncio.run(stream_all(llm, asked, params)))
            finally:
                engine.tokenizer = None
            found = clients[-1]
            late = percentile(found.late, 99) * 1e3
            row = {"tok_s": found.tokens / found.seconds, "pieces": found.pieces, "late_p99_ms": late}
            report.add("clients", f"{case}, {number + 1}", s=found.seconds, **row)
    finally:
        llm.owner.close()
    share = min(direct) / min(found.seconds for found in clients)
    report.note(
        f"{len(asked)} clients in process: {share:.1%} of the tokens a second of the engine alone; event loop late by "
        f"{percentile([s for found in clients for s in found.late], 99) * 1e3:.1f} ms (p99)"
    )
    report.about["clients_share"] = share
    return share
