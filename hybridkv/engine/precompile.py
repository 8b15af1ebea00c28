"""Precompile: the kernels of an engine's common steps, compiled many at a time before its first request.

The steps are gone through with nothing but padding, or with a request that is admitted for it, and no kernel runs
(kernels/compiling.py). Layers of one kind launch the same kernels, so each kind is gone through once: it takes less
than a second beside the compiler. What other steps need is compiled when they first run.

A note in the folder of the kernels says that this was done for such an engine; then it is not done again, and kernels
are read from disk as they are met.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridkv import kernels
from hybridkv.cache import ForwardStep
from hybridkv.config import SamplingParams
from hybridkv.devices import on_device
from hybridkv.engine.sampler import sample
from hybridkv.engine.workspace import chunk_rows
from hybridkv.kernels.compiling import counted, kernel_folder, together
from hybridkv.kernels.sampling.mask import mask_rows
from hybridkv.kernels.step_index import StepShape
from hybridkv.request import RequestKey

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine

Progress = Callable[[int, int], None]
PROMPTS = (5, 64, 500)  # tokens of prompts that are gone through, and a whole step
SIZES = (64, 512)  # tokens of captured steps with prompts, and the largest


def precompile(engine: Engine, progress: Progress | None = None) -> int:
    """Compile what common steps launch, unless that was done before. Returns how many kernels were compiled.

    `progress`: called with (kernels done, kernels met so far), by any thread; never if nothing is to be compiled.
    """
    folder = kernel_folder()
    if folder is None or not on_gpu(engine):
        return 0
    done = folder / f"hybridkv-{_name(engine)}.json"
    if done.exists():
        return 0
    with on_device(engine.manager.device), counted() as found:
        try:
            if not go_through(engine, progress):
                return 0
        except Exception as problem:  # as a rule no memory is left; whatever it is, steps compile what they need
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(f"kernels are compiled when they are first needed: {problem}", stacklevel=2)
            return found.compiled
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done.write_text(json.dumps({"compiled": found.compiled, "found": found.found}))
    except OSError:  # a folder that cannot be written: kernels are not kept either
        pass
    return found.compiled


def on_gpu(engine: Engine) -> bool:
    """Whether its steps launch kernels."""
    return engine.manager.device.type == "cuda"


@torch.inference_mode()
def go_through(engine: Engine, progress: Progress | None = None, workers: int | None = None) -> bool:
    """Compile, or read from disk, what common steps launch. Nothing runs. False: this Triton cannot do it."""
    try:
        with together(progress, workers):
            for step, tokens in _steps(engine):
                _forward(engine, step, tokens)
            _sample(engine)
    except ImportError:  # another version of Triton has its threads elsewhere
        return False
    return True


def _steps(engine: Engine) -> Iterator[tuple[ForwardStep, int]]:
    """Common steps, and their tokens."""
    manager, graphs, mixed = engine.manager, engine.runner.graphs, engine.runner.mixed
    for n in dict.fromkeys((*PROMPTS, engine.scheduler.step_tokens)):
        if n >= manager.max_tokens or n > manager.tokens_alone():
            continue
        key = RequestKey(-1)
        manager.admit_request(key)
        try:
            yield manager.prepare_forward([(key, n)]), n
        finally:
            manager.release_request(key)
    for rows in graphs.sizes if graphs is not None else (1, manager.slots):
        reaches = {manager.max_tokens} if graphs is None else {graphs.key(rows, n)[1] for n in (1, manager.max_tokens)}
        for reach in sorted(reaches):
            yield manager.padding_step(rows, reach), rows
    if mixed is not None and mixed.sizes:
        for size in sorted({*(n for n in SIZES if n in mixed.sizes), mixed.sizes[-1]}):
            for decodes in sorted({n for n in mixed.decodes if n <= size}):
                yield manager.padding_of_shape(StepShape(size, decodes, chunk_rows(size))), size


def _forward(engine: Engine, step: ForwardStep, tokens: int) -> None:
    """Go through a step, with one layer of each kind."""
    manager, model = engine.manager, engine.runner.model
    ids = torch.zeros(tokens, dtype=torch.int64, device=manager.device)
    rows = torch.zeros(1, dtype=torch.int64, device=manager.device) if step.num_decodes < step.rows else None
    own = step.again() if step.shape is not None else step
    handles = manager.acquire(own)
    layers = _kinds(getattr(model, "layers", ()))
    if layers:
        model = replace(model, layers=tuple(model.layers[i] for i in layers))  # type: ignore[type-var,attr-defined]
        handles = {place: handles[i] for place, i in enumerate(layers)}
    model.forward(ids, own.index.positions, handles, rows)


def _sample(engine: Engine) -> None:
    """Greedy requests, and such that take the model's own settings or ask for some."""
    model, device = engine.runner.model, engine.manager.device
    embedding: Tensor = model.embedding  # type: ignore[attr-defined]
    for count in dict.fromkeys((1, engine.manager.slots)):
        logits = torch.zeros(count, engine.vocab, dtype=embedding.dtype, device=device)
        for params in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, seed=0)):
            sample(logits, [engine.new_request([0], params) for _ in range(count)])
        masks = torch.zeros(1, (engine.vocab + 31) // 32, dtype=torch.int32, device=device)
        mask_rows(logits, masks, torch.zeros(1, dtype=torch.int64, device=device))


def _kinds(layers: Sequence[object]) -> list[int]:
    """The first layer of every kind, and the last one, from which only some rows go on."""
    first: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        first.setdefault(_kind(layer), i)
    return [*first.values(), len(layers) - 1] if first else []


def _kind(part: object) -> Any:
    """What is equal for two parts that launch the same kernels: their types, shapes and settings."""
    if isinstance(part, Tensor):
        return part.shape, part.stride(), part.dtype, part.data_ptr() % 16
    if is_dataclass(part) and not isinstance(part, type):
        return type(part), *(_kind(getattr(part, f.name)) for f in fields(part))
    if isinstance(part, list | tuple):
        return tuple(_kind(each) for each in part)
    return part if isinstance(part, int | float | str | bool | None) else type(part)


def _name(engine: Engine) -> str:
    """Of engines that launch the same kernels: what the kernels are compiled from and for."""
    import triton

    manager, model = engine.manager, engine.runner.model
    what = (
        _sources(), triton.__version__, torch.__version__, torch.cuda.get_device_name(manager.device),
        torch.cuda.get_device_capability(manager.device), manager.schema, manager.slots,
        manager.exact, engine.scheduler.step_tokens, model.config,
        [_kind(model.layers[i]) for i in _kinds(model.layers)],  # type: ignore[attr-defined]
    )  # fmt: skip
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


@cache
def _sources() -> str:
    """A hash of all kernels' sources."""
    found = hashlib.sha256()
    for path in sorted(Path(next(iter(kernels.__path__))).rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
