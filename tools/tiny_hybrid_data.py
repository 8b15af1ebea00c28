"""What the small hybrid is trained on: conversations about generated texts, packed into rows of one length.

A conversation is rendered as an evaluation renders it: the document and the question in one user turn, the answer in
the assistant's. More questions about the same text follow where the text has more to ask for, and now and then a turn
that asks to repeat a part of it. Worker processes make whole batches; a batch is three arrays [rows, length + 1].
"""

from __future__ import annotations

import multiprocessing as mp
import queue
import random
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.sample import CountTokens, Question, Sample
from hybridkv.evaluation.tasks import TASKS, make_sample
from hybridkv.evaluation.tasks.draft import TEMPLATE_TOKENS, Draft, fit
from hybridkv.evaluation.tasks.facts import KINDS
from hybridkv.evaluation.tasks.needles import a_key, a_number, a_uuid, different, heading, needle, question
from hybridkv.evaluation.tasks.prose import hide, noise, prose

NAMES = (*TASKS, "many", "repeat")
MANY, REPEATED = len(TASKS), len(TASKS) + 1
NO_TASK = 255  # of tokens that are no answer
ELSEWHERE = 26  # weight of tokens that are no answer, of 255: a tenth
COPIED = 100  # weight of what is repeated, of which there is much
OURS = 6  # tokens that our chat template adds
REPEAT = "Repeat the previous context exactly."
BEGINS = " It begins: "
UNORDERED = ("cwe",)  # any order is right, and none is easier to see than another: all are taught
LISTS = ("niah_multikey_2", "niah_multikey_3", "phone_book")  # texts that are nothing but things to ask for
FEW = ("paraphrase", "two_questions", "niah_multikey_1", "niah_multiquery", "tool_chain")  # with some more to ask for
HIDDEN = re.compile(r"The secret (number|code) of (\S+) is (\S+)\.")
LISTED = re.compile(r"^(\w+ \w+): (\d{3}-\d{4})$", re.MULTILINE)
CALLED = re.compile(r'^{"tool": "(\w+?_(\w+))".*\n{"\2": ("[A-Z]-\d+")', re.MULTILINE)
TOLD = [(kind, re.compile(kind.statement.format(name=r"(\w+ \w+)", value=r"(\w+)"))) for kind in KINDS]

# share of the time gone -> lengths of rows to choose from; retrieval forms quickly in short ones
CURRICULUM: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.08, (256,)),
    (0.18, (512, 256)),
    (0.32, (1024, 512)),
    (0.60, (2048, 2048, 2048, 1024, 512)),
    (1.00, (4096, 4096, 4096, 2048, 2048, 1024)),
)


def lengths_at(share: float, longest: int) -> tuple[int, ...]:
    """Lengths of rows when this share of the time has gone."""
    lengths = next((lengths for until, lengths in CURRICULUM if share < until), CURRICULUM[-1][1])
    return tuple(min(length, longest) for length in lengths)


def more_questions(sample: Sample) -> list[Question]:
    """All that the text says and a question of some task asks for; none if a system prompt rules the answers."""
    text = sample.document
    if sample.system:
        return []
    more = [question(*found, 0) for found in HIDDEN.findall(text)]
    for name, value in LISTED.findall(text):
        more.append(Question(f"What is the phone number of {name}?", (value,), f"The phone number of {name} is"))
    for tool, field, value in CALLED.findall(text):
        more.append(Question(f"Which {field} did {tool} return?", (value,), f'{tool} returned {{"{field}":'))
    for kind, told in TOLD:
        for name, value in told.findall(text):
            more.append(Question(kind.question.format(name=name), (value,), kind.answer_prefix.format(name=name)))
    return more


def answer_text(asked: Question, order: Sequence[int] | None = None) -> str:
    """The answer that is taught: the references, in their own order or in another one."""
    said = ", ".join([asked.references[i] for i in order] if order else asked.references)
    said += "}" if "{" in asked.answer_prefix else "."
    return f" {said}" if asked.answer_prefix else said


@dataclass
class Piece:
    """Tokens of a conversation, each with its weight (of 255) and the task whose answer it belongs to."""

    ids: list[int]
    weights: list[int]
    tasks: list[int]

    @staticmethod
    def of(ids: list[int], task: int = NO_TASK) -> Piece:
        """All of one kind: an answer (with its task) or not."""
        weight = {NO_TASK: ELSEWHERE, REPEATED: COPIED}.get(task, 255)
        return Piece(ids, [weight] * len(ids), [task] * len(ids))

    def add(self, other: Piece) -> None:
        """`other` follows."""
        self.ids += other.ids
        self.weights += other.weights
        self.tasks += other.tasks


class Writer:
    """Samples to tokens."""

    def __init__(self, tokenizer: Path, seed: str) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.user, self.assistant, self.system, self.end = (
            self.tokenizer.token_to_id(f"<|{name}|>") for name in ("user", "assistant", "system", "end")
        )
        self.seed = seed
        self.rng = random.Random(seed)
        self.number = 0
        self.characters = dict.fromkeys(NAMES, 2.5)  # of a token, by task, as met so far
        self.least: dict[str, int] = {}  # tokens for which a task was too long

    def encode(self, text: str) -> list[int]:
        """Text to ids; control tokens are never found in it."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        """Tokens of a text, counted."""
        return len(self.encode(text))

    def sample(self, task: str, tokens: int) -> Sample | None:
        """One more training sample; its length is guessed from its characters. None: the task does not fit."""
        if tokens <= self.least.get(task, 0):
            return None
        self.number += 1
        a_token = self.characters[task]

        def count(text: str) -> int:
            return int(len(text) / a_token) - TEMPLATE_TOKENS + OURS

        try:
            if task == "many":
                return self.many(tokens, count)
            return make_sample(task, self.number, tokens, f"train/{self.seed}", count)
        except HybridKVError:
            self.least[task] = tokens
            return None

    def many(self, tokens: int, count: CountTokens) -> Sample:
        """A text with many needles of one kind, to be asked for one after another."""
        rng = self.rng
        kind, value = rng.choice((("number", a_number), ("number", a_number), ("code", a_uuid)))
        keys, values = different(a_key, rng), different(value, rng)
        pairs = [(next(keys), next(values)) for _ in range(min(rng.randint(2, 24), max(tokens // 80, 1)))]
        needles = [(rng.random(), needle(kind, *pair)) for pair in pairs]
        document = hide(needles, rng.choice((noise, prose, prose))(rng), heading(kind))
        asked = tuple(question(kind, *pair, 0) for pair in pairs)
        return Sample("many", self.number, fit(Draft(document, asked[:1]), tokens, count, "many"), asked)

    def first_turn(self, sample: Sample, asked: str) -> tuple[Piece, list[int]]:
        """System prompt, document and what is asked, ready for the answer; and the document's ids."""
        document = self.encode(sample.document)
        self.characters[sample.task] += 0.3 * (len(sample.document) / len(document) - self.characters[sample.task])
        before = [self.system, *self.encode(sample.system), self.end] if sample.system else []
        ids = [*before, self.user, *document, *self.encode("\n\n" + asked), self.end]
        return Piece.of(ids), document

    def turn(self, asked: str) -> Piece:
        """A later user turn."""
        return Piece.of([self.user, *self.encode(asked), self.end])

    def answer(self, asked: Question, task: int) -> Piece:
        """The assistant's turn: the beginning is given, the rest is learned."""
        order = None
        if NAMES[task] in UNORDERED:
            order = self.rng.sample(range(len(asked.references)), len(asked.references))
        piece = Piece.of([self.assistant, *self.encode(asked.answer_prefix)])
        piece.add(Piece.of([*self.encode(answer_text(asked, order)), self.end], task))
        return piece

    def repeat(self, document: list[int], room: int) -> tuple[str, Piece] | None:
        """A request to repeat a part of the document, and the part: from its beginning, or after some words of it."""
        rng = self.rng
        size = min(rng.randint(48, 256), len(document), room - 40)
        if size < 24:
            return None
        start = 0 if rng.random() < 0.3 else rng.randrange(len(document) - size + 1)
        asked = REPEAT
        if start:
            asked += BEGINS + self.tokenizer.decode(document[max(start - rng.randint(6, 12), 0) : start]).strip()
        piece = Piece.of([self.assistant])
        piece.add(Piece.of([*document[start : start + size], self.end], REPEATED))
        return asked, piece

    def conversation(self, task: str, tokens: int) -> Piece | None:
        """A sample with its questions, then more questions and a part to repeat while there is room. None: too long."""
        rng = self.rng
        reserve = 0.0
        if task in LISTS or task == "many":
            reserve = min(rng.uniform(0.1, 0.45), 1200 / tokens)
        elif task in FEW:
            reserve = min(rng.uniform(0.1, 0.4), 300 / tokens)
        elif rng.random() < 0.15:
            reserve = min(0.3, 300 / tokens)  # for a part to repeat
        sample = self.sample(task, int(tokens * (0.99 - reserve)))
        if sample is None:
            return None
        number = NAMES.index(task)
        asked = list(sample.questions)
        whole, document = self.first_turn(sample, asked[0].text)
        whole.add(self.answer(asked[0], number))
        if len(whole.ids) > tokens:
            return None
        known = {each.text for each in asked}
        more = [each for each in more_questions(sample) if each.text not in known]
        rng.shuffle(more)
        for each in asked[1:] + more[:40]:
            turn = self.turn(each.text)
            turn.add(self.answer(each, number))
            if len(whole.ids) + len(turn.ids) > tokens:
                break
            whole.add(turn)
        room = tokens - len(whole.ids)
        if room > 100 and rng.random() < 0.4 and (again := self.repeat(document, room)):
            whole.add(self.turn(again[0]))
            whole.add(again[1])
        return whole if len(whole.ids) <= tokens else None

    def copying(self, task: str, tokens: int) -> Piece | None:
        """A document that is repeated as the first thing that is asked."""
        sample = self.sample(task, max(tokens // 2, tokens - 300))
        if sample is None:
            return None
        document = self.encode(sample.document)
        again = self.repeat(document, tokens - len(document) - 8)
        if again is None:
            return None
        whole, _ = self.first_turn(sample, again[0])
        whole.add(again[1])
        return whole if len(whole.ids) <= tokens else None

    def row(self, length: int, shares: list[float]) -> Piece:
        """Conversations behind one another, cut at `length`. `shares`: how often each of NAMES is wanted."""
        rng = self.rng
        row = Piece([], [], [])
        misses = 0
        while (room := length - len(row.ids)) >= 96 and misses < 12:  # what is left may be too small for most tasks
            name = rng.choices(NAMES, shares)[0]
            whole = rng.random() < 0.5 or room < 256
            tokens = room if whole else rng.randint(128, room)
            if name == "repeat":
                made = self.copying(rng.choice(NAMES[:MANY]), tokens)
            else:  # the rest of the room is for more turns
                made = self.conversation(name, tokens)
            if made is None:
                misses += 1
            else:
                row.add(made)
        rest = length - len(row.ids)
        row.add(Piece([self.end] * rest, [0] * rest, [NO_TASK] * rest))
        return row

    def batch(self, tokens: int, length: int, shares: list[float]) -> Batch:
        """So many tokens in rows of one length."""
        rows = [self.row(length + 1, shares) for _ in range(tokens // length)]
        return Batch(
            length,
            np.array([row.ids for row in rows], dtype=np.uint16),
            np.array([row.weights for row in rows], dtype=np.uint8),
            np.array([row.tasks for row in rows], dtype=np.uint8),
        )


@dataclass
class Batch:
    """Rows of one length, each with one token more: the last target."""

    length: int
    ids: np.ndarray  # [rows, length + 1] uint16
    weights: np.ndarray  # uint8, of 255
    tasks: np.ndarray  # uint8, index into NAMES, or NO_TASK


@dataclass
class Held:
    """A held-out question with its answer, as one row."""

    task: str
    tokens: int
    ids: list[int]
    answer: int  # how many tokens at the end are the answer, its end mark included
    right: list[set[int]]  # what may be said at each of them


def held_out(tokenizer: Path, task: str, tokens: int, numbers: range) -> list[Held]:
    """First questions of samples of a seed that training never draws; the length is counted."""
    writer = Writer(tokenizer, "held-out")
    found = []
    for number in numbers:
        try:
            sample = make_sample(task, number, tokens, "held-out", writer.count)
        except HybridKVError:
            return []
        asked = sample.questions[0]
        whole, _ = writer.first_turn(sample, asked.text)
        answer = writer.answer(asked, NAMES.index(task))
        whole.add(answer)
        size = sum(of_task != NO_TASK for of_task in answer.tasks)
        right = [{token} for token in whole.ids[-size:]]
        if task in UNORDERED:
            right = in_any_order(right, [writer.encode(f" {reference}") for reference in asked.references])
        found.append(Held(task, tokens, whole.ids, size, right))
    return found


def in_any_order(said: list[set[int]], words: list[list[int]]) -> list[set[int]]:
    """What may be said at each token of a list of words: at a word's beginning that of any word that is left."""
    right = [set(tokens) for tokens in said]
    left, here = list(words), 0
    while left:
        flat = [next(iter(tokens)) for tokens in said[here:]]
        word = next(word for word in left if flat[: len(word)] == word)
        right[here] = {other[0] for other in left}
        left.remove(word)
        here += len(word) + 1  # and a comma
    return right


class Workers:
    """Processes that make batches ahead of time. What they make next follows `share` (of the time) and `shares`."""

    def __init__(self, tokenizer: Path, seed: int, count: int, tokens: int, longest: int) -> None:
        context = mp.get_context("spawn")  # torch has threads by then; a fork of them is not safe
        self.share = context.Value("d", 0.0)
        self.shares = context.Array("d", [1.0] * len(NAMES))
        self.made: Any = context.Queue(maxsize=4 * count)
        arguments = (tokenizer, seed, tokens, longest, self.share, self.shares, self.made)
        self.processes = [context.Process(target=_work, args=(i, *arguments), daemon=True) for i in range(count)]
        for process in self.processes:
            process.start()

    def next(self, wait: bool) -> Batch | None:
        """The next batch; None if there is none yet and we do not wait."""
        while True:
            try:
                return self.made.get(timeout=5) if wait else self.made.get_nowait()
            except queue.Empty:
                dead = [process.exitcode for process in self.processes if not process.is_alive()]
                if dead:
                    raise RuntimeError(f"{len(dead)} workers have ended (exit status {dead[0]})") from None
                if not wait:
                    return None

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.terminate()


def _work(i: int, tokenizer: Path, seed: int, tokens: int, longest: int, share: Any, shares: Any, made: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one
    writer = Writer(tokenizer, f"{seed}/{i}")
    while True:
        length = writer.rng.choice(lengths_at(share.value, longest))
        made.put(writer.batch(tokens, length, list(shares)))


def texts(seed: str, tokens: int, samples: int) -> Iterator[str]:
    """Texts of all tasks with questions and answers, for the tokenizer to be made from."""
    for task in TASKS:
        for number in range(samples):
            sample = make_sample(task, number, tokens, seed, lambda text: len(text) // 3)
            yield sample.document
            yield sample.system
            for asked in sample.questions:
                yield f"{asked.text}\n{asked.answer_prefix}{answer_text(asked)}"
    for kind in ("number", "code"):
        yield needle(kind, "key", "value")
    yield REPEAT + BEGINS
