"""DeepSeek-V4 end to end on the first layers of its schedule, beside the same model in transformers.

Random weights, the same in both. Prefill: a prompt in chunks, seconds (ours after a first pass over the same prompt,
which compiles) and peak memory beyond the weights, caches included. Decode: one token of one request after the prompt,
by a forward of transformers and by a step of the engine (graph replay, sampling and bookkeeping included), and the
graph's own time. transformers reads all prompts, too, and after the first one the last logits of both are compared;
--skip-peers leaves out both. With --weight-dtype released the same steps are timed on random FP8 and FP4 codes, too,
whose products are compared with their definition first. With --ranks 2,4,8 they are timed on the first of so many ranks
alone, its sums left out (ranks.py), in the form that was asked for. While the models are made, a process for each kind
of cache and form of weights compiles on four layers. What matters most comes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridkv import CacheConfig, SamplingParams
from hybridkv.bench.options import BenchOptions
from hybridkv.bench.ranks import Silent, own_logits, own_tokens, parted
from hybridkv.bench.report import Column, Report, WrongResult, check, rounding
from hybridkv.bench.shapes import Shape, find_shape, first_layers, make_shape
from hybridkv.bench.timing import GIB, Ceilings, Meter, free_memory
from hybridkv.cache import KVCacheManager
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError
from hybridkv.kernels.moe.block_experts import ExpertStack, run_block_experts, run_block_experts_ref
from hybridkv.models import FAMILIES, cache_schema
from hybridkv.models.config import ModelConfig
from hybridkv.models.decoder import Model
from hybridkv.models.deepseek_v4 import DeepseekV4
from hybridkv.models.random_weights import random_decoder
from hybridkv.models.weight_forms import RELEASED
from hybridkv.parallel.random_part import RandomCodes, RandomTensors, random_part
from hybridkv.parallel.shard import Shard, check_size

if TYPE_CHECKING:
    from hybridkv.bench.peers_v4 import V4Peer

LAYERS, EXPERTS = 8, 16  # that one GPU holds twice
CHUNK = 4096
STEPS, PEER_STEPS = 20, 5  # decode steps that are timed
CHECKED = 1024  # tokens whose logits are compared
COMPILING = 45.0  # seconds at the most, beside the building of models
CODED_ROWS = 300
CODED_BOUND = 6.5e-3  # both multiply in bf16 and round where the other does: 1.6e-3 RMS a rounding
CODE = "import sys; from hybridkv.bench.v4_model import compile_alone; compile_alone(*sys.argv[1:])"
COLUMNS = (
    Column("s", "prefill s", 10, ".3f"),
    Column("peak_gib", "peak GiB", 9, ".2f"),
    Column("ms", "decode ms", 10, ".2f"),
    Column("graph_ms", "graph ms", 9, ".2f"),
)


def run(shape: Shape, options: BenchOptions, ceilings: Ceilings) -> Report:
    shape = smaller(shape, options.layers)
    for size in options.ranks:
        check_size(shape.config, size)
    chunk = options.chunks[0] if options.chunks else 64 if shape.tiny else CHUNK
    prompts = options.contexts or ((192,) if shape.tiny else (16384, 65536))
    kinds = options.kv_dtypes or (("fp8", "bf16") if shape.device == "cuda" else ("f32",))
    about = {"model": shape.name, "layers": shape.config.layers, "experts": shape.raw["n_routed_experts"]}
    about |= {"chunk": chunk}
    report = Report("v4_model", "ms", COLUMNS, shape.device, ceilings, about, deadline=options.deadline)
    report.start()
    compilers = start_compilers(shape, kinds, options.weight_dtype, prompts, chunk)
    begin = time.monotonic()
    report.doing("making weights")
    bench = V4Bench(shape, report, chunk, options.skip_peers)
    if options.weight_dtype == RELEASED:
        report.attempt("codes", "products against their definition", bench.codes)
    elif options.weight_dtype != "auto":
        raise HybridKVError(f"v4_model times weights in auto or {RELEASED}, not {options.weight_dtype}")
    report.note(f"models are made in {time.monotonic() - begin:.0f} s; {wait_for(compilers, begin)}")
    for prompt in prompts:
        tokens = torch.randint(0, shape.config.vocab, (prompt,), device=shape.device)
        for kind in kinds:
            report.attempt(f"hybridkv {kind}", f"prompt {prompt}", lambda t=tokens, k=kind: bench.ours(t, k))
            free_memory(shape.device)
            if bench.coded is not None:
                name = f"hybridkv {kind}, {RELEASED}"
                report.attempt(name, f"prompt {prompt}", lambda t=tokens, k=kind: bench.ours(t, k, bench.coded))
                free_memory(shape.device)
        peer = bench.peer
        if peer is None:
            continue
        report.attempt("transformers", f"prompt {prompt}", lambda t=tokens, peer=peer: bench.theirs(t, peer))
        free_memory(shape.device)
        if prompt == prompts[0]:
            report.attempt("agreement", f"prompt {CHECKED}", lambda peer=peer: bench.agreement(peer))
            free_memory(shape.device)
    for size in options.ranks:
        report.attempt(f"a rank of {size}", "alone", lambda n=size: bench.rank(n, prompts, kinds))
        free_memory(shape.device)
    return report


def smaller(shape: Shape, layers: int | None) -> Shape:
    """The shape with as many layers and experts as are measured."""
    few = first_layers(shape.raw, min(layers or LAYERS, shape.config.layers))
    if not shape.tiny:
        few["n_routed_experts"] = EXPERTS
    return make_shape(shape.name, few, shape.device, shape.dtype)


class V4Bench:
    """One set of weights in our model; with peers, those of transformers' model."""

    def __init__(self, shape: Shape, report: Report, chunk: int, skip_peers: bool) -> None:
        self.shape, self.report, self.chunk = shape, report, chunk
        self.peer = None
        self.coded: Model | None = None  # the same widths with weights as they are released
        if skip_peers:
            self.model: Model = random_decoder(shape.config, shape.device, shape.dtype)
            return
        from hybridkv.bench.peers_v4 import V4Peer

        self.peer = V4Peer(shape)
        config = ModelConfig.from_dict(self.peer.config())
        loader = Loader(InMemory(self.peer.weights()), torch.device(shape.device), shape.dtype)
        self.model = FAMILIES[config.architecture].load(config, loader)

    def codes(self) -> None:
        """A model of random codes, once its products are right: those of the experts, one row and many."""
        shape = self.shape
        model = random_decoder(shape.config, shape.device, shape.dtype, form=RELEASED)
        assert isinstance(model, DeepseekV4)
        experts, E = model.layers[0].experts, shape.raw["n_routed_experts"]
        assert experts.shared is not None
        stacks = ExpertStack(experts.gate_up, experts.down), experts.shared
        errors = []
        for rows in (1, CODED_ROWS):
            x = torch.randn(rows, shape.config.hidden, device=shape.device).to(shape.dtype)
            chosen = torch.rand(rows, E, device=shape.device).topk(min(4, E)).indices.int()
            chosen = torch.cat((chosen, torch.full_like(chosen[:, :1], E)), 1)
            weights = torch.rand(chosen.shape, device=shape.device)
            got, want = (op(x, weights, chosen, stacks, 10.0) for op in (run_block_experts, run_block_experts_ref))
            errors.append(check(f"experts in codes, {rows} rows", got, want, CODED_BOUND))
        self.coded = model
        sizes = [one.nbytes / GIB for one in (self.model, model)]
        self.report.note(
            f"weights {sizes[0]:.2f} GiB, as released {sizes[1]:.2f}; products of codes agree to {max(errors):.0e}"
        )

    def rank(self, size: int, prompts: tuple[int, ...], kinds: tuple[str, ...]) -> None:
        """The first rank of so many, which hears nothing of the others."""
        shape, coded = self.shape, self.coded is not None
        made, device = RandomCodes if coded else RandomTensors, torch.device(shape.device)
        model = random_part(made(shape.config, device, shape.dtype), Shard(0, size), Silent(size), device)
        self.report.note(f"a rank of {size} has {model.nbytes / GIB:.2f} GiB of weights")
        form = f", {RELEASED}" if coded else ""
        for prompt in prompts:
            tokens = torch.randint(0, own_tokens(model), (prompt,), device=device)
            for kind in kinds:
                self.ours(tokens, kind, parted(model), f"hybridkv {kind}{form}, a rank of {size}")
                free_memory(shape.device)

    def ours(self, tokens: Tensor, kind: str, model: Model | None = None, name: str | None = None) -> None:
        engine = own_logits(engine_for(model or self.model, self.shape, kind, len(tokens) + 64, self.chunk))
        run_ours(engine, tokens, 2)  # compiles what is not compiled yet
        meter, seconds = run_ours(engine, tokens, STEPS)
        graph = graph_ms(engine) if self.shape.device == "cuda" else None
        name = name or (f"hybridkv {kind}" if model is None else f"hybridkv {kind}, {RELEASED}")
        self.report.add(
            name, f"prompt {len(tokens)}", s=meter.seconds, ms=seconds * 1e3, graph_ms=graph,
            peak_gib=meter.peak + engine.manager.memory_bytes() / GIB, tokens=len(tokens), kv_dtype=kind,
        )  # fmt: skip

    def theirs(self, tokens: Tensor, peer: V4Peer) -> None:
        peer.run(tokens[: self.chunk], self.chunk, 1)  # warms up
        meter, seconds = peer.run(tokens, self.chunk, PEER_STEPS)
        self.report.add(
            "transformers", f"prompt {len(tokens)}", s=meter.seconds, ms=seconds * 1e3, peak_gib=meter.peak,
            tokens=len(tokens),
        )  # fmt: skip

    def agreement(self, peer: V4Peer) -> None:
        """Relative RMS between both models' logits: two forms of one model whose sums run in other orders.

        The median over the tokens counts: where rounding makes a router pick another expert, a token's logits differ
        more, and that is no fault.
        """
        count = CHECKED if self.shape.device == "cuda" else CHECKED // 8
        tokens = torch.randint(0, self.shape.config.vocab, (count,), device=self.shape.device)
        kind = "bf16" if self.shape.device == "cuda" else "f32"
        engine = engine_for(self.model, self.shape, kind, count + 64, CHECKED)
        got, want = engine.score(tokens.tolist()), peer.logits(tokens)
        errors = (got - want).norm(dim=-1) / want.norm(dim=-1)  # [T]
        error, bound = errors.median().item(), rounding(self.shape.config.layers)
        if not error <= bound:  # NaN fails too
            raise WrongResult(
                f"logits beside transformers': the median token is {error:.1e} off, more than {bound:.0e}"
            )
        most = f"{errors.max().item():.1e}"
        self.report.note(f"logits of {count} tokens against transformers, relative: median {error:.1e}, largest {most}")


def engine_for(model: Model, shape: Shape, kind: str, context: int, chunk: int) -> Engine:
    """For one request."""
    schema = cache_schema(model.config, CacheConfig(kv_dtype=kind), shape.dtype)
    manager = KVCacheManager(schema, schema.pool_pages(1, context), 1, context, shape.device)
    return Engine(model, manager, step_tokens=chunk)


def start_compilers(
    shape: Shape, kinds: tuple[str, ...], form: str, prompts: tuple[int, ...], chunk: int
) -> list[subprocess.Popen]:
    """One for each kind of cache and form of weights."""
    if shape.device != "cuda":
        return []
    given, forms = [shape.name, json.dumps(prompts), str(chunk)], dict.fromkeys(("", form if form == RELEASED else ""))
    pairs = [(kind, each) for kind in kinds for each in forms]
    return [subprocess.Popen([sys.executable, "-c", CODE, *pair, *given], stdout=subprocess.DEVNULL) for pair in pairs]


def compile_alone(kind: str, form: str, name: str, prompts: str, chunk: str) -> None:
    """Every kernel that the rows of this kind run, on four layers; they end in Triton's cache on disk."""
    shape = smaller(find_shape(name, None, "cuda", v4=True), 4)
    model = random_decoder(shape.config, shape.device, shape.dtype, form=form)
    for length in json.loads(prompts):
        run_ours(engine_for(model, shape, kind, length + 64, int(chunk)), torch.randint(0, 1000, (length,)), 2)


def wait_for(compilers: list[subprocess.Popen], begin: float) -> str:
    if not compilers:
        return "nothing is compiled first"
    for each in compilers:
        try:
            each.wait(max(0.1, begin + COMPILING - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()
    said = ", ".join("ended" if each.returncode == 0 else f"exit {each.returncode}" for each in compilers)
    return f"kernels are compiled after {time.monotonic() - begin:.0f} s ({said})"


def run_ours(engine: Engine, tokens: Tensor, steps: int) -> tuple[Meter, float]:
    """The prompt until its first token, and the median seconds of a decode step."""
    engine.add(tokens.tolist(), SamplingParams(max_tokens=steps + 4, ignore_eos=True))
    with Meter(engine.manager.device.type) as prefill:
        while not engine.step():
            pass
    for _ in range(2):
        engine.step()  # captures the graph
    times = []
    while not engine.idle:
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return prefill, sorted(times)[len(times) // 2]


def graph_ms(engine: Engine) -> float:
    graphs = engine.runner.graphs
    assert graphs is not None and graphs.captured, "the decode step was not captured"
    found = graphs.captured[min(graphs.captured)]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before = torch.cuda.memory_allocated()
    start.record()
    for _ in range(20):
        found.graph.replay()
    stop.record()
    stop.synchronize()
    assert torch.cuda.memory_allocated() == before, "a replay moved the allocator"
    return start.elapsed_time(stop) / 20
