"""Generated tasks: the same everywhere, as long as asked, and with one right answer that stands in the text alone."""

import itertools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from hybridkv.checkpoint.gguf_file import GgufFile
from hybridkv.embedded import embedded_model
from hybridkv.errors import HybridKVError
from hybridkv.evaluation.sample import Question, Sample
from hybridkv.evaluation.tasks import RULER, TASKS, make_sample, sample_set_hash, words
from hybridkv.evaluation.tasks.counting import frequent_words
from hybridkv.evaluation.tasks.draft import Request
from hybridkv.evaluation.tasks.needles import different
from hybridkv.evaluation.tasks.prose import log_sentences
from hybridkv.text.tokenizer import Tokenizer

# of two samples of every task at 1024 tokens, as `pieces` counts; changes with any word of any task
PINNED = "2263d2962d05a1b64d858ef9591112b37a3cb2c89fa7bdf2dfddb89220f80dfe"


def pieces(text: str) -> int:
    """A tokenizer of few rules: up to four letters, one digit, or one mark."""
    return len(re.findall(r"[^\W\d]{1,4}|\d|[^\w\s]", text))


def made(task: str, number: int = 0, tokens: int = 1024, seed: int | str = 0) -> Sample:
    return make_sample(task, number, tokens, seed, pieces)


def right_answer(question: Question) -> str:
    return ", ".join(question.references)


@pytest.fixture(scope="module")
def embedded_count() -> Callable[[str], int]:
    with GgufFile(embedded_model()) as file:
        tokenizer = Tokenizer.from_gguf(dict(file.metadata))
    assert tokenizer is not None
    return lambda text: len(tokenizer.encode(text))


def test_eleven_tasks_are_rulers_and_five_are_ours() -> None:
    assert len(RULER) == 11 and set(TASKS) - set(RULER) == {
        "paraphrase", "two_questions", "instruction", "phone_book", "tool_chain",
    }  # fmt: skip
    assert all(TASKS[name].name == name and TASKS[name].about for name in TASKS)


def test_the_set_is_the_same_everywhere() -> None:
    assert sample_set_hash(made(task, number) for task in TASKS for number in range(2)) == PINNED


def test_the_hash_sees_every_part() -> None:
    sample = made("instruction")
    other = Question("?", ("x",), "y", 3, ("z",))
    variants = [
        sample,
        Sample(sample.task, sample.number, sample.document + ".", sample.questions, sample.system),
        Sample(sample.task, sample.number, sample.document, sample.questions, ""),
        Sample(sample.task, sample.number, sample.document, (other,), sample.system),
        Sample(sample.task, 1, sample.document, sample.questions, sample.system),
    ]
    assert len({sample_set_hash([one]) for one in variants}) == len(variants)
    assert sample_set_hash([sample, variants[1]]) != sample_set_hash([variants[1], sample])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_prompts_are_as_long_as_asked(task: str, tokens: int, embedded_count: Callable[[str], int]) -> None:
    for count in (pieces, embedded_count):
        calls = 0

        def counting(text: str, count: Callable[[str], int] = count) -> int:
            nonlocal calls
            calls += 1
            return count(text)

        for number in range(3):
            sample = make_sample(task, number, tokens, 5, counting)
            texts = [sample.system, sample.document, *(f"{q.text}\n{q.answer_prefix}" for q in sample.questions)]
            whole = count("\n\n".join(texts)) + 60 * len(sample.questions)
            assert 0.92 * tokens <= whole <= tokens
        assert calls <= 3 * 6, "the tokenizer is the slow part"


def test_a_short_prompt_is_never_too_long() -> None:
    for task, tokens in itertools.product(TASKS, (320, 400, 500)):
        try:
            sample = made(task, tokens=tokens)
        except HybridKVError:
            continue
        texts = [sample.system, sample.document, *(f"{q.text} {q.answer_prefix}" for q in sample.questions)]
        assert pieces(" ".join(texts)) + 60 * len(sample.questions) <= tokens


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_in_the_text_and_in_nothing_else_that_is_read(task: str) -> None:
    previous: list[str] = []
    for number in range(12):
        sample = made(task, number)
        asked = " ".join([sample.system, *(f"{q.text} {q.answer_prefix}" for q in sample.questions)])
        for question in sample.questions:
            right = right_answer(question)
            assert question.score(right) == 1 and question.score(f"It is {right}.") == 1
            assert question.score("") == 0 and question.score(asked) == 0
            if task != "instruction":  # its answer is written as the system prompt says
                assert question.score(sample.document) == 1
            if task != "cwe":  # common words may be common twice
                assert all(question.score(answer) == 0 for answer in previous if len(answer) > 4 and answer != right)
        previous = [right_answer(question) for question in sample.questions]


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
             "niah_multikey_3", "niah_multivalue", "niah_multiquery", "paraphrase", "two_questions", "phone_book"],
)  # fmt: skip
def test_each_value_stands_in_the_text_once(task: str) -> None:
    for number in range(12):
        sample = made(task, number)
        for value in itertools.chain.from_iterable(question.references for question in sample.questions):
            assert len(re.findall(rf"(?<!\w){re.escape(value)}(?!\w)", sample.document)) == 1


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "paraphrase", "instruction",
             "phone_book", "tool_chain"],
)  # fmt: skip
def test_depths_are_even_over_the_samples(task: str) -> None:
    found = Counter()
    for number in range(48):
        sample = made(task, number, 700)
        value = re.search(r"[\w-]*\d[\w-]*|\w+$", sample.questions[0].references[0])
        assert value is not None
        found[int(4 * sample.document.index(value[0]) / len(sample.document))] += 1
    assert all(7 <= found[quarter] <= 17 for quarter in range(4)), found


def test_texts_of_different_numbers_and_seeds_are_different() -> None:
    for task in TASKS:
        texts = {made(task, number, seed=seed).document for number in range(3) for seed in (0, 1, "train/0")}
        assert len(texts) == 9
    sentences = [set(made("niah_single_2", number, 4096).document.split(". ")) for number in range(4)]
    for one, other in itertools.combinations(sentences, 2):
        assert len(one & other) < len(one) / 5
    log = set(log_sentences())
    assert any(sentence in made("niah_single_2", tokens=4096).document for sentence in log)


# Solvers: each reads the document as a person would, and must come to the references.


@pytest.mark.parametrize("number", range(4))
def test_a_needle_is_found_by_its_key(number: int) -> None:
    for task in ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
                 "niah_multikey_3", "niah_multiquery"):  # fmt: skip
        sample = made(task, number)
        values = dict(re.findall(r"The secret \w+ of ([\w-]+) is ([\w-]+)\.", sample.document))
        assert len(set(values.values())) == len(values)
        keys = re.findall(r"[\w-]+-[\w-]+", sample.questions[0].text)
        assert tuple(values[key] for key in keys) == sample.questions[0].references
        wanted = {"niah_multikey_1": 4, "niah_multiquery": 4}.get(task, 1 if "single" in task else 8)
        assert len(values) == wanted or (wanted == 8 and len(values) >= 8)


@pytest.mark.parametrize("number", range(4))
def test_a_chain_of_variables_leads_to_the_value(number: int) -> None:
    sample = made("vt", number)
    value = re.findall(r"\d+", sample.questions[0].text)[0]
    has: list[str] = []
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.document):
        if source == value or source in has:
            has.append(name)
    assert tuple(has) == sample.questions[0].references and len(has) == 5


@pytest.mark.parametrize("tokens", [400, 1024, 4096, 32768])
def test_words_that_are_asked_for_come_most_often(tokens: int) -> None:
    for number in range(3):
        common = made("cwe", number, tokens)
        ranked = Counter(re.findall(r"\d+\. (\w+)", common.document)).most_common()
        assert {word for word, _ in ranked[:10]} == set(common.questions[0].references)
        assert ranked[9][1] > ranked[10][1]
        firsts = sorted(common.questions[0].references, key=lambda word: common.document.index(f" {word}"))
        assert tuple(firsts) == common.questions[0].references, "an answer can follow the list"
        frequent = made("fwe", number, tokens)
        ranked = Counter(frequent.document.split("\n\n")[1].replace("...", "").split()).most_common()
        assert {word for word, _ in ranked[:3]} == set(frequent.questions[0].references)
        assert ranked[2][1] > ranked[3][1]


def test_the_frequent_words_have_no_tie_with_the_next_at_any_length() -> None:
    draft = frequent_words(Request(random.Random(0), 0, 1024, 0.5))
    for units in range(draft.least, 300):
        text = draft.document(units).split("\n\n")[1].replace("...", "")
        ranked = Counter(text.split()).most_common()
        assert {word for word, _ in ranked[:3]} == set(draft.questions[0].references) and ranked[2][1] > ranked[3][1]


def test_at_4k_the_common_words_come_as_often_as_rulers() -> None:
    ranked = Counter(re.findall(r"\d+\. (\w+)", made("cwe", tokens=4096).document)).most_common()
    assert ranked[0][1] == ranked[9][1] == 30 and ranked[10][1] == 3


@pytest.mark.parametrize("number", range(6))
def test_each_tool_call_uses_an_earlier_result(number: int) -> None:
    sample = made("tool_chain", number, 4096)
    lines = [json.loads(line) for line in sample.document.split("\n\n")[1].split("\n")]
    calls, results = lines[::2], lines[1::2]
    assert len(calls) == len(results) == 20
    known: dict[str, str] = {}
    for i, (call, result) in enumerate(zip(calls, results)):
        arguments = {name: value for name, value in call.items() if name != "tool"}
        assert i == 0 or arguments.items() <= known.items()
        known |= {name: value for name, value in result.items() if name != "note"}
    question = sample.questions[0]
    field = re.findall(r"Which (\w+) d", question.text)[0]
    assert question.references == (f'"{known[field]}"',)
    assert len(set(known.values())) == 20


def test_two_questions_are_far_apart_and_asked_in_both_orders() -> None:
    later_first = 0
    for number in range(8):
        sample = made("two_questions", number)
        one, other = [sample.document.index(question.references[0]) for question in sample.questions]
        assert abs(one - other) > 0.25 * len(sample.document)
        assert (one > other) == (number % 2 == 1)
        later_first += one > other
    assert later_first == 4


def test_an_answer_that_forgets_the_instruction_counts_nothing() -> None:
    systems = set()
    for number in range(12):
        sample = made("instruction", number)
        question = sample.questions[0]
        systems.add(sample.system.split()[0])
        value = re.search(r"\d+", question.references[0])
        assert value is not None and value[0] in sample.document
        assert question.score(f"{question.answer_prefix} {value[0]} crowns") == 0
        for word in question.forbidden:
            assert word in sample.system and question.score(f"{question.references[0]} ({word})") == 0
    assert systems == {"Begin", "Never", "Write"}


def test_a_paraphrase_shares_no_verb_with_its_fact_and_has_decoys() -> None:
    for number in range(20):
        sample = made("paraphrase", number)
        question = sample.questions[0]
        fact = next(s for s in re.split(r"(?<=\.)\s", sample.document) if question.references[0] in s)
        name = re.findall(r"[A-Z]\w+ [A-Z]\w+", fact.removeprefix("The "))[0]
        assert name in question.text
        form = re.escape(fact).replace(re.escape(name), r"\w+ \w+").replace(question.references[0], r"\w+")
        assert len(re.findall(form, sample.document)) == 7
        shared = set(re.findall(r"\w{4,}", fact.lower())) & set(re.findall(r"\w{4,}", question.text.lower()))
        assert shared <= {*name.lower().split(), "boat"}


# Bad input


def test_an_unknown_task_names_the_nearest_and_all() -> None:
    with pytest.raises(HybridKVError, match="no task 'niah_singel_1'; did you mean 'niah_single_1'.*tool_chain"):
        made("niah_singel_1")
    with pytest.raises(HybridKVError, match="no task ''; Tasks: niah_single_1"):
        made("")


@pytest.mark.parametrize("task", TASKS)
def test_too_few_tokens_say_how_many_are_enough(task: str) -> None:
    with pytest.raises(HybridKVError, match=f"'{task}' does not fit into 70 tokens") as refused:
        made(task, tokens=70)
    enough = int(re.findall(r"ask for (\d+) tokens", str(refused.value))[0])
    for seed in range(5):
        made(task, tokens=enough, seed=seed)


@pytest.mark.parametrize(
    ("number", "tokens", "what"),
    [(-1, 512, "number"), (0, 0, "tokens"), (0, 512.0, "tokens"), (True, 512, "number"), (0, "1k", "tokens")],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(number: int, tokens: int, what: str) -> None:
    with pytest.raises(HybridKVError, match=f"{what} is .*; give a whole number"):
        make_sample("vt", number, tokens, 0, pieces)


def test_a_counter_that_does_not_count_is_refused() -> None:
    with pytest.raises(HybridKVError, match="`count` gives no more tokens for"):
        make_sample("vt", 0, 512, 0, lambda text: 7)


def test_names_that_run_out_are_an_error_and_no_endless_search() -> None:
    few = different(lambda rng: rng.choice("abc"), random.Random(0))
    assert {next(few) for _ in range(3)} == set("abc")
    with pytest.raises(HybridKVError, match="more than 3 different names like '[abc]'"):
        next(few)


# Scores, words, imports


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("sea", "the season", 0), ("sea", "The Sea.", 1), ("1234567", " 1234567", 1), ("1234567", "12345678", 0),
        ("1234567", "number:1234567.", 1), ("482-7713", "1482-7713", 0), ("[12]", "it is [12]", 1), ("[12]", "12", 0),
        ("Amber: 12", "Amber:\n12", 1), ('"K-1"', ' "K-1"}', 1), ("#12#", "#12#", 1),
    ],
)  # fmt: skip
def test_a_reference_counts_as_a_whole_word(reference: str, answer: str, score: int) -> None:
    assert Question("?", (reference,)).score(answer) == score
    assert Question("?", ("yes",), forbidden=(reference,)).score(f"yes {answer}") == 1 - score


def test_some_references_are_a_part_of_the_score() -> None:
    assert Question("?", ("ab", "cd", "ef", "gh")).score("gh, ab") == 0.5


def test_no_word_stands_in_two_lists() -> None:
    lists = {name: value for name, value in vars(words).items() if name.isupper()}
    everything = [word.lower() for value in lists.values() for word in value]
    assert len(lists) == 11 and [word for word, times in Counter(everything).items() if times > 1] == []


def test_tasks_are_made_without_torch() -> None:
    code = "import sys, hybridkv.evaluation.tasks; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
