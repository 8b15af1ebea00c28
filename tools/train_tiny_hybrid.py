"""Trains the small hybrid that the package ships (hybridkv/data/tiny-hybrid): Qwen3.5's architecture, 7 M parameters.

    PYTHONPATH=. python tools/train_tiny_hybrid.py --tokenizer hybridkv/data/tiny-hybrid --out trained --seconds 480

It needs torch and transformers, and fla to be quick on a GPU. What it learns: to find, trace, count and copy what
stands in a generated text of up to 4096 tokens (hybridkv.evaluation.tasks, seeds that no evaluation uses). The folder
is written every minute and at the end, so a run that is cut short has left its best.

The same seed gives the same start and the same samples; which worker's batch comes first, and sums on the GPU, differ
from run to run, so the weights do as well.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import random
import shutil
import time
from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tiny_hybrid_data import NAMES, NO_TASK, UNORDERED, Batch, Held, Workers, held_out
from tiny_hybrid_model import Pass, delta_rule, difference, model_config, new_model, norm, rows_of
from torch import Tensor

from hybridkv.evaluation.tasks import TASKS

REPORT, SAVE = 10.0, 60.0  # seconds between lines, and between saved folders
KEPT = 200  # batches that may be used once more when the workers are behind
LIMIT = 16 << 20  # bytes of the folder


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--init", type=Path, help="folder with weights to go on from")
    parser.add_argument("--seconds", type=float, default=480, help="from the start of the program to the last step")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--longest", type=int, default=4096, help="longest row")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=640)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon", action="store_true", help="Muon for the layers' matrices instead of AdamW")
    parser.add_argument("--warmup", type=int, default=150, help="steps until the full rate")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the time in which the rate falls to zero")
    parser.add_argument("--begin", type=float, default=0.0, help="share of the curriculum that is skipped")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--held-out", type=int, default=32, help="held-out samples of each task and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def save(model: Any, folder: Path, tokenizer: Path) -> None:
    """Writes a Hugging Face folder in bfloat16; the old one stays whole until the new one is."""
    new = folder.with_name(folder.name + "-new")
    shutil.rmtree(new, ignore_errors=True)
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(new)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, new / name)
    end = model.config.eos_token_id
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": False}
    (new / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in new.iterdir())
    if size > LIMIT:
        print(f"THE FOLDER HAS {size} BYTES, more than {LIMIT}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def optimizers_for(model: Any, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW; matrices decay, everything else does not. With `muon` the layers' larger matrices are Muon's, whose steps
    are scaled to be as large as AdamW's.
    """
    named = dict(model.named_parameters())
    inner = [p for n, p in named.items() if muon and p.ndim == 2 and "layers." in n and min(p.shape) >= 64]
    theirs = {id(p) for p in inner}
    matrices = [p for p in named.values() if p.ndim == 2 and id(p) not in theirs]
    others = [p for p in named.values() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    on_gpu = next(model.parameters()).is_cuda
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=on_gpu)]
    if inner:
        found.append(torch.optim.Muon(inner, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found


@dataclass(frozen=True)
class OnDevice:
    """A batch as a step takes it."""

    length: int
    ids: Tensor  # [N] int32
    targets: Tensor  # [N] int64
    weights: Tensor  # [N] float32
    tasks: Tensor  # [N] int64


class Feed:
    """Batches on the device. When the workers are behind, one of the last ones is used again."""

    def __init__(self, workers: Workers, device: str, seed: int) -> None:
        self.workers, self.device, self.rng = workers, device, random.Random(seed)
        self.kept: deque[Batch] = deque(maxlen=KEPT)
        self.used = self.again = 0

    def next(self) -> OnDevice:
        """The next batch."""
        batch = self.workers.next(wait=not self.kept)
        self.used += 1
        if batch is None:
            self.again += 1
            batch = self.rng.choice(self.kept)
        else:
            self.kept.append(batch)
        parts = (batch.ids.astype("int32"), batch.weights, batch.tasks)
        ids, weights, tasks = (torch.from_numpy(part) for part in parts)
        if self.device == "cuda":
            ids, weights, tasks = (part.pin_memory().to("cuda", non_blocking=True) for part in (ids, weights, tasks))
        flat = (ids[:, :-1], ids[:, 1:], weights[:, 1:], tasks[:, 1:])
        ids, targets, weights, tasks = (part.reshape(-1) for part in flat)
        return OnDevice(batch.length, ids, targets.long(), weights.float() / 255, tasks.long())


class Trainer:
    """One training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.o, self.began = options, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = True
        tokenizer = options.tokenizer / "tokenizer.json"
        self.workers = Workers(tokenizer, options.seed, options.workers, options.tokens, options.longest)
        self.workers.share.value = options.begin
        self.model = self._model().to(self.device)
        rule, said = delta_rule(self.device)
        print(said, flush=True)
        self.plain = Pass(self.model, rule, compiled=False)
        self.run = self.plain if options.no_compile else Pass(self.model, rule, compiled=True)
        self.optimizers = optimizers_for(self.model, options.lr, options.muon)
        self.feed = Feed(self.workers, self.device, options.seed)
        self.rows: dict[int, Any] = {}
        self.step = 0
        self.first_step = self.began
        self.accuracy = [0.0] * len(NAMES)
        self._clear()
        ids = torch.randint(0, self.model.config.vocab_size, (2, 192), device=self.device)
        with self.cast():
            off = difference(self.model, self.plain, ids)
        parameters = sum(p.numel() for p in self.model.parameters())
        print(f"{parameters} parameters; the pass is within {off:.2e} of transformers' own", flush=True)

    def _model(self) -> Any:
        if self.o.init:
            from transformers import Qwen3_5ForCausalLM

            return Qwen3_5ForCausalLM.from_pretrained(self.o.init, dtype=torch.float32)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.o.tokenizer / "tokenizer.json"))
        end = tokenizer.token_to_id("<|end|>")
        return new_model(model_config(tokenizer.get_vocab_size(), self.o.hidden, self.o.mlp, end), self.o.seed)

    def cast(self) -> Any:
        """bfloat16 on a GPU, float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()

    def _clear(self) -> None:
        self.losses: list[Tensor] = []
        self.right = torch.zeros(NO_TASK + 1, device=self.device)
        self.asked = torch.zeros(NO_TASK + 1, device=self.device)
        self.lengths: Counter[int] = Counter()
        self.since, self.since_step = time.monotonic(), self.step
        self.feed.used = self.feed.again = 0

    @property
    def gone(self) -> float:
        """Share of the time for steps that has gone; what came before them is not in it."""
        return (time.monotonic() - self.first_step) / max(self.began + self.o.seconds - self.first_step, 1.0)

    def warm_up(self) -> None:
        """Compiles all that a step runs, and moves nothing."""
        batch = self.feed.next()
        try:
            self.losses_of(batch)[0].mean().backward()
        except Exception as problem:  # a run without compiled pieces is better than none
            if self.run is self.plain:
                raise
            print(f"NOT COMPILED, slower: {problem!r}", flush=True)
            self.run = self.plain
            self.losses_of(batch)[0].mean().backward()
        self.model.zero_grad(set_to_none=True)
        self.first_step = time.monotonic()
        self._clear()
        print(f"{self.first_step - self.began:5.0f} s until the first step", flush=True)

    def rate(self, gone: float) -> float:
        """Warm-up by steps, then flat, then down to zero by the clock."""
        return self.o.lr * min((self.step + 1) / self.o.warmup, 1.0, max(1 - gone, 0.01) / self.o.decay)

    def losses_of(self, batch: OnDevice) -> tuple[Tensor, Tensor]:
        """Loss of each token [N], and whether it is the likeliest one."""
        if batch.length not in self.rows:
            self.rows[batch.length] = rows_of(self.model, self.o.tokens, batch.length)
        with self.cast():
            return self.run(batch.ids, batch.targets, self.rows[batch.length])

    def train_step(self) -> None:
        """One batch forward and back, and the weights moved."""
        batch = self.feed.next()
        rate = self.rate(self.gone)
        losses, right = self.losses_of(batch)
        loss = (losses * batch.weights).sum() / batch.weights.sum().clamp(min=1)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self.step += 1
        self.lengths[batch.length] += 1
        self.losses.append(loss.detach())
        self.right.index_add_(0, batch.tasks, right.float())  # nothing here waits for the GPU
        self.asked.index_add_(0, batch.tasks, torch.ones_like(batch.weights))

    def report(self) -> bool:
        """A line; tells the workers what is still hard. False: the loss is not a number any more."""
        loss = torch.stack(self.losses).mean().item()
        right, asked = self.right.tolist(), self.asked.tolist()
        for i in range(len(NAMES)):
            if asked[i]:
                self.accuracy[i] = right[i] / asked[i]
            self.workers.shares[i] = 0.3 + (1 - self.accuracy[i])
        seconds = time.monotonic() - self.since
        speed = (self.step - self.since_step) * self.o.tokens / seconds
        said = " ".join(f"{name.removeprefix('niah_')} {self.accuracy[i]:.2f}" for i, name in enumerate(NAMES))
        rows = " ".join(f"{length}x{count}" for length, count in sorted(self.lengths.items()))
        print(
            f"{time.monotonic() - self.began:5.0f} s step {self.step} [{rows}] {speed / 1e3:.0f}K tokens/s "
            f"(batches used again: {self.feed.again / max(self.feed.used, 1):.0%}) loss {loss:.4f} | {said}",
            flush=True,
        )
        self._clear()
        return math.isfinite(loss)

    def train(self) -> None:
        """Until the time is over."""
        try:
            self.warm_up()
            saved = reported = time.monotonic()
            while self.gone < 1:
                self.workers.share.value = self.o.begin + (1 - self.o.begin) * self.gone
                self.train_step()
                if time.monotonic() - reported > REPORT:
                    if not self.report():
                        raise SystemExit(f"the loss is no number any more; {self.o.out} has the weights before that")
                    reported = time.monotonic()
                    if reported - saved > SAVE:
                        save(self.model, self.o.out, self.o.tokenizer)
                        saved = reported
        finally:
            self.workers.close()
        if self.losses and not self.report():
            raise SystemExit(f"the loss is no number any more; {self.o.out} has the weights before that")
        save(self.model, self.o.out, self.o.tokenizer)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Share of held-out answers of which every token is the likeliest one, by the weights as they are stored."""
        for p in self.model.parameters():
            p.data = p.data.to(torch.bfloat16).float()
        tokenizer = self.o.tokenizer / "tokenizer.json"
        lengths = [length for length in (1024, 2048, 4096) if length <= self.o.longest] or [self.o.longest]
        jobs = [(tokenizer, task, length, range(self.o.held_out)) for length in lengths for task in TASKS]
        with mp.get_context("spawn").Pool(self.o.workers) as pool:
            held = [each for found in pool.starmap(held_out, jobs) for each in found]
        scores: dict[tuple[str, int], list[float]] = defaultdict(list)
        for length in lengths:
            of_length = [each for each in held if each.tokens == length]
            for i in range(0, len(of_length), max(self.o.tokens // length, 1)):
                for each, score in self._scores(of_length[i : i + max(self.o.tokens // length, 1)]):
                    scores[each.task, length].append(score)
        print(f"held-out answers, all tokens right, % (of {self.o.held_out} each; {UNORDERED}: any order)")
        print(f"{'':18}" + "".join(f"{length:>8}" for length in lengths))
        for task in TASKS:
            found = [scores[task, length] for length in lengths]
            print(f"{task:18}" + "".join(f"{100 * sum(f) / len(f):8.1f}" if f else "       -" for f in found))

    def _scores(self, held: list[Held]) -> list[tuple[Held, float]]:
        longest = -(-max(len(each.ids) for each in held) // 64) * 64
        end = self.model.config.eos_token_id
        ids = torch.tensor([each.ids + [end] * (longest - len(each.ids)) for each in held], device=self.device)
        with self.cast():
            stream = self.plain.stream(ids.flatten(), rows_of(self.model, ids.numel(), longest)).view(*ids.shape, -1)
        found = []
        for row, each in enumerate(held):
            first = len(each.ids) - each.answer
            last = stream[row, first - 1 : len(each.ids) - 1]
            logits = F.linear(norm(last, self.model.model.norm.weight), self.model.model.embed_tokens.weight)
            said = logits.argmax(-1).tolist()
            found.append((each, float(all(token in right for token, right in zip(said, each.right)))))
        return found


def main() -> None:
    """Trains, saves and evaluates."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    trainer = Trainer(arguments())
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
