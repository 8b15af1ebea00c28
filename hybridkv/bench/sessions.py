"""A conversation that rests: frozen, with its pages on the host, on the disk; beside reading all of it again.

A prompt of random tokens is read, and its cache is held. Each way of putting it away and bringing it back is timed, and
what has come back is compared with what was there, bit for bit, before its time counts. Then the prompt is read again,
and one token after it: what a restored conversation saves. The file is read twice: after the kernel was told to forget
it (from the disk, where that works), and from its memory. With a budget, entries are evicted when the prompt has been
read, and the cache is that of the budget whatever the prompt's length. `export` and `resume` are of a request that
moves in the middle of its answer: its cache to the host's memory, pinned, and back into a slot. Exact mode is checked
last, on few layers.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hybridkv.bench.options import BUDGET, BenchOptions
from hybridkv.bench.prefill import random_tokens
from hybridkv.bench.report import Column, Report, WrongResult
from hybridkv.bench.shapes import Shape, random_model
from hybridkv.bench.standin import make_engine
from hybridkv.bench.timing import Ceilings, Meter, free_memory
from hybridkv.cache.frozen import export_frozen, import_frozen
from hybridkv.cache.holding import holding
from hybridkv.cache.session import Session
from hybridkv.cache.store import Store
from hybridkv.config import CacheConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.owner import EngineOwner
from hybridkv.engine.storing import load_request, save_request
from hybridkv.models.decoder import Model
from hybridkv.models.random_weights import random_decoder
from hybridkv.request import Request

EXACT_LAYERS = 4
MOVES = 5  # out and in, of which the medians count
MIB = 1 << 20
KEY = {"model": "random weights", "mode": "fast"}
COLUMNS = (
    Column("ms", "ms", 9, ".1f"),
    Column("mib", "MiB", 9, ".1f"),
    Column("gb_s", "GB/s", 7, ".2f"),
    Column("faster", "x reading", 9, ".1f"),
)


@dataclass(frozen=True)
class Kind:
    """What a cache stores, and keeps."""

    kv: str
    state: str
    budget: int | None

    @property
    def name(self) -> str:
        """In a row."""
        kept = "" if self.budget is None else f" budget {self.budget}"
        return f"{self.kv} KV, {self.state} state{kept}"


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    chunk = 64 if shape.tiny else (options.chunks or (8192,))[0]
    lengths = options.contexts or ((192,) if shape.tiny else (16384,))
    budget = 64 if shape.tiny else options.budget or BUDGET
    kinds = (
        [Kind("fp8", "bf16", budget), Kind("bf16", "f32", None)]
        if shape.device == "cuda"
        else [Kind("f32", "f32", budget)]
    )
    if options.kv_dtypes:
        kinds = [Kind(kv, "f32", None) for kv in options.kv_dtypes]
    about = {"model": shape.name, "layers": shape.config.layers, "chunk": chunk, "weights": options.weight_dtype}
    report = Report("sessions", "ms", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    model = random_model(shape, options.weight_dtype)
    for kind in kinds:
        for length in lengths:
            bench = partial(Sessions, shape, model, report, kind, length, chunk)
            report.attempt("sessions", f"{kind.name} T={length}", lambda make=bench: make().rows())
            del bench
            free_memory(shape.device)
    del model
    free_memory(shape.device)
    report.attempt("exact", f"{EXACT_LAYERS} layers", lambda: exact_bits(shape, report, min(lengths), chunk))
    return report


def exact_bits(shape: Shape, report: Report, length: int, chunk: int) -> None:
    """Answers after every way of resting, and the one of a request that never rested: the same tokens."""
    few = shape.cut(min(EXACT_LAYERS, shape.config.layers))
    model = random_decoder(few.config, few.device, few.dtype, exact=True)
    kind = Kind("bf16" if few.device == "cuda" else "f32", "f32", None)
    Sessions(few, model, report, kind, min(length, 2 * chunk + 100), chunk, exact=True).check()
    report.note(
        f"exact mode, {few.config.layers} layers: thawed, imported, restored and forked requests answer with the "
        "tokens of the one that never rested"
    )


class Sessions:
    """One model, one kind of cache, one length."""

    def __init__(
        self, shape: Shape, model: Model, report: Report, kind: Kind, length: int, chunk: int, exact: bool = False
    ) -> None:
        few = min(64, kind.budget or 64)
        cache = CacheConfig(kv_dtype=kind.kv, state_dtype=kind.state, budget=kind.budget, recent=few, window=few)
        context = length + chunk + 64
        self.engine = make_engine(
            model, cache, shape.device, shape.dtype, 2, context, step_tokens=chunk, spare=context, exact=exact
        )
        self.engine.manager.host.pages = True  # also on a CPU, to see that it runs
        self.owner, self.shape, self.report, self.kind = EngineOwner(self.engine), shape, report, kind
        self.length, self.name = length, f"{kind.name} T={length}"
        self.key = KEY | {"mode": "exact" if exact else "fast"}

    # ---- what is timed

    def rows(self) -> None:
        """All of them, in order."""
        folder = Path(tempfile.mkdtemp(prefix="hybridkv-sessions-"))
        try:
            warm, _ = self.read(min(self.length, 2 * self.engine.scheduler.step_tokens))  # compiles
            self.owner.run(lambda e: e.abort(warm))
            self._rows(Store(folder / "store"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self.owner.close()

    def _rows(self, store: Store) -> None:
        request, reading = self.read(self.length)
        self.row("read again", reading)
        state = self.contents(request)
        size = sum(t.nbytes for t in state.values())
        scheduler, manager = self.engine.scheduler, self.engine.manager
        run = self.owner.run
        for _ in range(2):  # the first takes memory from the system
            down = self.timed(lambda: run(lambda e: scheduler.freeze(request)))
            up = self.timed(lambda: run(lambda e: scheduler.bring_back(request)))
        rows = manager.schema.slot_bytes
        self.row("freeze", down, rows)
        self.row("thaw", up, rows, reading)
        self.same("thaw", request, state)
        run(lambda e: scheduler.freeze(request))
        for _ in range(2):
            down = self.timed(lambda: run(lambda e: export_frozen(manager, request.key)))
            up = self.timed(lambda: run(lambda e: import_frozen(manager, request.key)))
        self.row("pages to the host", down, size - rows)
        self.row("pages back", up, size - rows, reading)
        self.same("import", request, state)
        save = lambda: save_request(self.owner, store, "session", request, {}, self.key)  # noqa: E731
        self.row("save", self.timed(save), size)
        self.row("save, nothing new", self.timed(save), size)
        forgotten = forget(store)
        back, seconds = self.restored(store)
        self.row("restore, disk" if forgotten else "restore", seconds, size, reading)
        self.same("restore", back, state)
        run(lambda e: e.abort(back))
        back, seconds = self.restored(store)
        self.row("restore, page cache", seconds, size, reading)
        run(lambda e: e.abort(request))
        first = self.timed(lambda: self.answer(back, 1))
        self.row("next token", first)
        self.moved(reading)
        self.report.note(f"{self.name}: all that came back has the bits of what was there")

    def moved(self, reading: float) -> None:
        """A request in the middle of its answer leaves for (pinned) host memory, and comes back as another one."""
        params = SamplingParams(max_tokens=8, ignore_eos=True)

        def answering(engine: Engine) -> Request:
            request = engine.add(random_tokens(engine.vocab, self.length), params)
            while request.answer_tokens < 2:
                engine.step()
            engine.drain()
            return request

        def resumed(engine: Engine, session: Session) -> Request:
            """With its cache in a slot: its next step can run."""
            request = engine.resume(session)
            assert request.continues is not None and engine.scheduler.bring_back(request.continues)
            return request

        run = self.owner.run
        request, down, up, sent, came = run(answering), [], [], [], []
        state = self.contents(request)
        for _ in range(1 + MOVES):
            sent.clear()
            down.append(self.timed(lambda: sent.append(run(lambda e: e.export(request)))))
        run(lambda e: e.abort(request))
        [session] = sent
        assert session.snapshot is not None
        size = session.snapshot.nbytes
        for _ in range(1 + MOVES):
            if came:
                run(lambda e: e.abort(came.pop()))
            up.append(self.timed(lambda: came.append(run(lambda e: resumed(e, session)))))
        self.row("export", statistics.median(down[1:]), size)  # the first takes memory from the system
        self.row("resume", statistics.median(up[1:]), size, reading)
        stays = {name: t for name, t in state.items() if not name.startswith("queries/")}  # which no eviction needs now
        self.same("resume", came[0].continues, stays)
        run(lambda e: finished(e, came[0]))

    def restored(self, store: Store) -> tuple[Request, float]:
        found: list[Request | None] = []
        seconds = self.timed(lambda: found.append(load_request(self.owner, store, "session", self.key)[0]))
        [request] = found
        assert request is not None
        return request, seconds

    def row(self, op: str, seconds: float, nbytes: int | None = None, reading: float | None = None) -> None:
        found = {"ms": seconds * 1e3, "kind": self.kind.name, "tokens": self.length}
        if nbytes is not None:
            found |= {"mib": nbytes / MIB, "gb_s": nbytes / seconds / 1e9}
        if reading is not None:
            found["faster"] = reading / seconds
        self.report.add(op, self.name, **found)

    def timed(self, what: Callable[[], object]) -> float:
        with Meter(self.shape.device) as meter:
            what()
        return meter.seconds

    # ---- requests

    def read(self, length: int) -> tuple[Request, float]:
        """A prompt until its first token, its cache held; and how long that took."""
        tokens = random_tokens(self.engine.vocab, length)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        made: list[Request] = []

        def read(engine: Engine) -> None:
            made.append(finished(engine, engine.add(tokens, params, hold=True)))

        seconds = self.timed(lambda: self.owner.run(read))
        return made[0], seconds

    def answer(self, after: Request, count: int) -> list[int]:
        """Tokens that follow a held request, which goes on in its cache."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        turn = self.owner.run(lambda e: finished(e, e.add(after.tokens, params, hold=True, after=after)))
        if not turn.cached_tokens:
            raise WrongResult("the cache of a held request was computed again")
        self.owner.run(lambda e: e.abort(turn))
        return turn.generated

    def contents(self, request: Request) -> dict[str, Tensor]:
        """All that the request holds, on the host."""

        def read(engine: Engine) -> dict[str, Tensor]:
            held = holding(engine.manager, request.key)
            found = {"/".join(key): t for key, t in held.states().items()}
            for name, lengths in held.lengths.items():
                found |= {f"{name}/{k}": t for k, t in held.read(name, np.zeros_like(lengths), lengths).items()}
            return found

        return self.owner.run(read)

    def same(self, what: str, request: Request, want: dict[str, Tensor]) -> None:
        """What the request holds has these bits, or WrongResult."""
        got = self.contents(request)
        for name, tensor in want.items():
            if not torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)):
                raise WrongResult(f"{what}: {name} is not what it was, bit for bit")

    def check(self) -> None:
        """One request that never rests, and four that do: all answer with the same tokens."""
        folder = Path(tempfile.mkdtemp(prefix="hybridkv-sessions-"))
        scheduler, manager, run, store = self.engine.scheduler, self.engine.manager, self.owner.run, Store(folder / "s")
        try:
            want = self.answer(self.read(self.length)[0], 24)
            found = {}
            request, _ = self.read(self.length)
            run(lambda e: scheduler.freeze(request))
            fork = run(lambda e: e.fork_held(request))
            found["forked"] = self.answer(fork, 24)
            run(lambda e: export_frozen(manager, request.key))
            save_request(self.owner, store, "session", request, {}, self.key)
            found["exported"] = self.answer(request, 24)
            found["restored"] = self.answer(self.restored(store)[0], 24)
            for name, tokens in found.items():
                if tokens != want:
                    raise WrongResult(f"{name}: the answer is not that of a request that never rested")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self.owner.close()


def finished(engine: Engine, request: Request) -> Request:
    """Run until the request has ended."""
    while not request.finished:
        engine.step()
    if request.error is not None:
        raise RuntimeError(request.error)
    return request


def forget(store: Store) -> bool:
    """Whether the kernel was asked to drop the store's files from its memory."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in store.path.rglob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    return True
