"""Run: the units of an evaluation, one after the other, each read once and answered with every cut.

A unit is a batch of samples of one task at one length, in one mode, with one form of the cache. Its records come
together, so that a run that was stopped goes on with the next unit. Units of a task whose first samples the full cache
answers badly are asked of the full cache alone: what a cut costs cannot be seen there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from hybridkv.checkpoint.source import locate_model
from hybridkv.config import CacheConfig
from hybridkv.document import document_parts
from hybridkv.engine.replay import ReplayPart
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.cuts import FULL, Cut, Reader, divergence
from hybridkv.evaluation.render import Renderer
from hybridkv.evaluation.sample import Question, Sample
from hybridkv.evaluation.settings import EvalSettings
from hybridkv.evaluation.tasks import make_sample, sample_set_hash
from hybridkv.evaluation.tasks.prose import prose
from hybridkv.eviction.named import AUTO
from hybridkv.eviction.replay import Replay
from hybridkv.llm import LLM
from hybridkv.models import open_checkpoint
from hybridkv.models.config import ModelConfig
from hybridkv.request import Request

Record = dict[str, Any]
Progress = Callable[[int, int, str], None]  # units done, units in all, what is being done

SCREEN = 50.0  # per cent: a task whose first batch scores less with the full cache is not cut
STEP_TOKENS = 512  # that a bounded prompt is cut after; the same on every device
CPU_BATCH, GPU_BATCH = 8, 50
SLACK = 512  # tokens beside a prompt: its answers, or the text whose distributions are compared
REPLAYED = SLACK + Replay.chunk + 256  # and a part of it that is read once more, with what asks for it
CONTINUATION = 256  # tokens of a text whose distributions are compared
DIVERGENCE = "divergence"  # in place of a task's name


@dataclass(frozen=True)
class Unit:
    """What is read and answered together."""

    kv_dtype: str
    state_dtype: str
    length: int
    mode: str
    task: str  # or DIVERGENCE
    first: int  # sample
    count: int

    @property
    def form(self) -> tuple[str, str]:
        """Of the cache."""
        return self.kv_dtype, self.state_dtype

    @property
    def key(self) -> str:
        """Names the unit in a results file."""
        return f"{self.kv_dtype}/{self.state_dtype}/{self.length}/{self.mode}/{self.task}/{self.first}+{self.count}"

    def record(self, kind: str, cut: Cut, number: int) -> Record:
        """What every record of the unit begins with."""
        return {
            "kind": kind, "unit": self.key, "task": self.task, "length": self.length, "mode": self.mode,
            "policy": cut.policy, "ratio": cut.ratio, "kv_dtype": self.kv_dtype, "state_dtype": self.state_dtype,
            "number": number,
        }  # fmt: skip


def units(settings: EvalSettings, batch: int) -> Iterator[Unit]:
    """All units in the order in which they run."""
    forms = product(settings.kv_dtypes, settings.state_dtypes)
    for (kv, state), length, mode in product(forms, settings.lengths, settings.modes):
        for task, samples in [
            *((task, settings.samples) for task in settings.tasks),
            (DIVERGENCE, settings.divergence),
        ]:
            for first in range(0, samples, batch):
                yield Unit(kv, state, length, mode, task, first, min(batch, samples - first))


class Run:
    """One evaluation. `earlier`: records of units that are done already."""

    def __init__(self, settings: EvalSettings, earlier: Sequence[Record] = ()) -> None:
        self.settings = settings.check()
        self.earlier = list(earlier)
        self.llm: LLM | None = None
        self.form: tuple[str, str] | None = None

    def go(self, write: Callable[[list[Record]], None], progress: Progress, limit: float | None = None) -> bool:
        """Run what is left and hand each unit's records to `write`. Whether all is done; False: the limit was reached.

        limit: seconds after which no further unit is begun.
        """
        begun = time.monotonic()
        try:
            self._open(self.settings.kv_dtypes[0], self.settings.state_dtypes[0])
            all_units = list(units(self.settings, self.batch))
            write([{"kind": "run", **self.facts(), "units": len(all_units)}])
            done = {record["unit"] for record in self.earlier if "unit" in record}
            for i, unit in enumerate(all_units):
                if unit.key in done:
                    continue
                if limit is not None and time.monotonic() - begun > limit:
                    return False
                progress(i, len(all_units), f"{unit.task} {unit.length} {unit.mode}")
                self._open(*unit.form)
                records = self._divergence(unit) if unit.task == DIVERGENCE else self._answers(unit)
                self.earlier += records
                write(records)
            progress(len(all_units), len(all_units), "done")
            return True
        finally:
            self.close()

    def facts(self) -> Record:
        """What is measured: weights by name and hash, and where they run."""
        assert self.llm is not None
        llm, device = self.llm, self.llm.device
        return {
            "model_name": llm.path.name.removesuffix(".gguf"),
            "model_hash": llm.manager.model_fingerprint(),
            "dtype": str(llm.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "auto": AUTO,
        }

    def close(self) -> None:
        """Give the model back."""
        if self.llm is not None:
            self.llm.close()
        self.llm = self.form = None

    @property
    def batch(self) -> int:
        """Samples that are read at once."""
        assert self.llm is not None
        asked = self.settings.max_requests
        return asked or (GPU_BATCH if self.llm.device.type == "cuda" else CPU_BATCH)

    def _open(self, kv_dtype: str, state_dtype: str) -> None:
        if self.form == (kv_dtype, state_dtype):
            return
        self.close()
        s = self.settings
        on_gpu = s.device.startswith("cuda") or (s.device == "auto" and _has_gpu())
        batch = s.max_requests or (GPU_BATCH if on_gpu else CPU_BATCH)
        slots = 2 * batch + 2  # each held cache and its fork
        # a text that is read once more stands beside itself
        context = max(s.lengths) + (REPLAYED if any(Cut(p, 2).replays for p in s.policies) else SLACK)
        self.llm = self._opened(context, slots, kv_dtype, state_dtype, on_gpu)
        self.form = kv_dtype, state_dtype

    def _opened(self, context: int, slots: int, kv_dtype: str, state_dtype: str, on_gpu: bool) -> LLM:
        s = self.settings
        with open_checkpoint(locate_model(s.model)) as checkpoint:
            limit = ModelConfig.from_dict(checkpoint.config).max_positions
        if context > limit:
            raise HybridKVError(
                f"prompts of {max(s.lengths)} tokens and what is read after them need a context of {context} tokens, "
                f"and the model's own limit is {limit}; ask for lengths of {limit - context + max(s.lengths)} or less"
            )
        return LLM(
            s.model,
            device=s.device,
            dtype=s.dtype,
            exact=s.exact,
            cache=CacheConfig(kv_dtype=kv_dtype, state_dtype=state_dtype, query_buffers=slots),
            max_requests=slots,
            max_context=context,
            memory=s.memory,
            tp=s.tp,
            step_tokens=None if on_gpu and not any(Cut(p, 2).bounded for p in s.policies) else STEP_TOKENS,
        )

    # ---- answers

    def _answers(self, unit: Unit) -> list[Record]:
        assert self.llm is not None
        renderer = Renderer(self.llm)
        with self.llm.engine.owned():
            reader = Reader(self.llm.engine)
            samples = [
                make_sample(unit.task, unit.first + i, unit.length, self.settings.seed, renderer.count)
                for i in range(unit.count)
            ]
            return list(self._ask(unit, samples, renderer, reader))

    def _ask(self, unit: Unit, samples: list[Sample], renderer: Renderer, reader: Reader) -> Iterator[Record]:
        seen = unit.mode == "seen"
        rendered = [renderer.sample(sample) for sample in samples]
        read = reader.read([each.prompt if seen else each.document for each in rendered])
        for request, sample in zip(read, samples, strict=True):
            reader.again[request] = partial(self._parts, sample, request, seen, renderer)
        try:
            full = list(self._answered(unit, FULL, samples, renderer, reader, read, [each.prompt for each in rendered]))
            yield from full
            if not self._worth_cutting(unit, full):
                return
            for policy, ratio in product(self.settings.policies, self.settings.ratios):
                cut = Cut(policy, ratio)
                prompts = [each.prompt for each in rendered]
                yield from self._answered(unit, cut, samples, renderer, reader, read, prompts)
        finally:
            reader.release(read)

    def _parts(self, sample: Sample, request: Request, seen: bool, renderer: Renderer) -> tuple[list[ReplayPart], int]:
        """A sample's document in parts that are read once more, and how many tokens stand before it."""
        assert self.llm is not None
        position = request.prompt_tokens
        if not seen:
            return document_parts(self.llm, sample.document, sample.system or None, position)
        last = request.tokens[position - 1]

        def ask(text: str) -> list[int]:
            return renderer.next_turn(Question(text, ()), last)

        return document_parts(self.llm, sample.document, sample.system or None, position, ask)

    def _worth_cutting(self, unit: Unit, full: list[Record]) -> bool:
        """Whether the full cache answers the task's first batch well enough."""
        if self.settings.all_tasks:
            return True
        first = [
            record["score"]
            for record in [*self.earlier, *full]
            if record["kind"] == "answer"
            and not (unit.mode == "seen" and record["question"])
            and record["policy"] == FULL.policy
            and record["unit"].startswith(
                f"{unit.kv_dtype}/{unit.state_dtype}/{unit.length}/{unit.mode}/{unit.task}/0+"
            )
        ]
        return not first or 100 * sum(first) / len(first) >= SCREEN

    def _answered(
        self, unit: Unit, cut: Cut, samples: list[Sample], renderer: Renderer, reader: Reader, read: list[Request],
        prompts: list[list[int]],
    ) -> Iterator[Record]:  # fmt: skip
        """Records of one cut: the first question of each sample, then those that follow on the same cache."""
        seen = unit.mode == "seen"
        if cut.bounded:
            forks = reader.read_bounded([request.tokens[: request.prompt_tokens] for request in read], cut, seen)
            held = [reader.held(fork, reader.peak(fork)) for fork in forks]
        else:
            forks = [reader.fork(request, cut, seen) for request in read]
            held = [reader.held(fork, reader.held(request).kv_bytes) for fork, request in zip(forks, read, strict=True)]
        # the first token follows from what was there when the prompt had been read
        given = [[fork.tokens[-1]] if seen else [] for fork in forks]
        ends = reader.engine.eos_ids
        most = [sample.questions[0].max_tokens for sample in samples]
        go_on = [i for i, first in enumerate(given) if most[i] > len(first) and not (first and first[0] in ends)]
        hold = max(len(sample.questions) for sample in samples) > 1
        answers = reader.answer(
            [forks[i] for i in go_on], [prompts[i] + given[i] for i in go_on], [most[i] - len(given[i]) for i in go_on],
            hold,
        )  # fmt: skip
        # where the first token ended the answer, a further question follows in the fork itself
        last = {i: fork for i, fork in enumerate(forks) if i not in go_on}
        if not hold:
            reader.release(list(last.values()))
        last |= dict(zip(go_on, answers, strict=True))
        said: list[list[int]] = [list(first) for first in given]
        for i, answer in zip(go_on, answers, strict=True):
            said[i] += answer.generated
        for i, sample in enumerate(samples):
            yield self._record(unit, cut, sample, 0, renderer.decode(said[i]), len(said[i]), held[i])
        if hold:
            pairs = [(sample, held[i], last[i]) for i, sample in enumerate(samples)]
            yield from self._follow_up(unit, cut, pairs, renderer, reader)

    def _follow_up(
        self, unit: Unit, cut: Cut, pairs: list[tuple[Sample, Any, Request]], renderer: Renderer, reader: Reader
    ) -> Iterator[Record]:
        """Further questions, as next turns of what was answered."""
        requests = [request for _, _, request in pairs]
        for turn in range(1, max(len(sample.questions) for sample, _, _ in pairs)):
            prompts, most = [], []
            for (sample, _, _), request in zip(pairs, requests, strict=True):
                # the token that ended the answer is written by the template of the next turn
                said = request.tokens[:-1] if request.finish_reason == "stop" else request.tokens
                question = sample.questions[turn]
                prompts.append([*said, *renderer.next_turn(question, said[-1])])
                most.append(question.max_tokens)
            requests = reader.answer(requests, prompts, most, hold=True)
            for (sample, held, _), request in zip(pairs, requests, strict=True):
                text = renderer.decode(request.generated)
                yield self._record(unit, cut, sample, turn, text, request.answer_tokens, held)
        reader.release(requests)

    @staticmethod
    def _record(unit: Unit, cut: Cut, sample: Sample, turn: int, answer: str, tokens: int, held: Any) -> Record:
        score = sample.questions[turn].score(answer)
        found = {
            "question": turn,
            "score": round(score, 6),
            **held.as_json(),
            "answer_tokens": tokens,
            "answer": answer,
        }
        text = sample_set_hash([sample])[:16]  # names what was read
        return unit.record("answer", cut, sample.number) | found | {"text": text}

    # ---- distributions

    def _divergence(self, unit: Unit) -> list[Record]:
        assert self.llm is not None
        renderer, engine = Renderer(self.llm), self.llm.engine
        seen = unit.mode == "seen"
        records = []
        with engine.owned():
            reader = Reader(engine)
            for number in range(unit.first, unit.first + unit.count):
                tokens = text_tokens(number, unit.length + CONTINUATION, self.settings.seed, renderer)
                document, rest = tokens[: unit.length], tokens[unit.length :]
                read = reader.read([document])
                reader.again[read[0]] = partial(document_parts, self.llm, document, None, len(document))
                try:
                    logits = {}
                    for cut in [FULL, *(Cut(p, r) for p, r in product(self.settings.policies, self.settings.ratios))]:
                        if cut.bounded:
                            fork = reader.read_bounded([document], cut, seen)[0]
                        else:
                            fork = reader.fork(read[0], cut, seen)
                        held = reader.held(fork, reader.held(read[0]).kv_bytes)
                        found = engine.score_after(fork, rest)
                        reader.release([fork])
                        logits.setdefault("full", found)
                        kl, kl_999, top1 = divergence(logits["full"], found)
                        figures = {"kl": round(kl, 6), "kl_999": round(kl_999, 5), "top1": round(top1, 5)}
                        records.append(unit.record(DIVERGENCE, cut, number) | figures | held.as_json())
                finally:
                    reader.release(read)
        return records


def text_tokens(number: int, tokens: int, seed: int, renderer: Renderer) -> list[int]:
    """So many tokens of generated prose."""
    rng = random.Random(f"{seed}/text/{number}/{tokens}")
    sentences, sentence = [], prose(rng)
    found: list[int] = []
    while len(found) < tokens:
        sentences += [next(sentence) for _ in range(tokens // 16)]
        found = renderer.plain(" ".join(sentences))
    return found[:tokens]


def _has_gpu() -> bool:
    from hybridkv.devices import resolve_device

    return resolve_device("auto").type == "cuda"
