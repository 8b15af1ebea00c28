"""What cannot be sampled by is refused in words, whoever asks: LLM, AsyncLLM or the command line. The next request is
served, and nothing of the refused one is left.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from many_callers import ASK, open_tiny, settle

from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, AsyncLLM, SamplingParams
from hybridkv.cli import main
from hybridkv.errors import RequestError

NAN, INF = float("nan"), float("inf")
# what is asked for, and what the answer says: the setting, what it may be, what it is
BAD: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {97: 1.0}}, r"token id 97 of logit_bias .* vocabulary of 97: .* 0 to 96"),
    ({"logit_bias": {5: 1.0, 2**31: 1.0}}, r"token id 2147483648 of logit_bias .* vocabulary of 97"),
    ({"logit_bias": {-1: 1.0}}, "token id of logit_bias must be a whole number from 0"),
    ({"logit_bias": {"5": 1.0}}, "token id of logit_bias must be a whole number"),
    ({"logit_bias": {5: NAN}}, "logit_bias of token 5 must be a number from -100 to 100, not nan"),
    ({"logit_bias": {5: INF}}, "logit_bias of token 5 must be a number from -100 to 100, not inf"),
    ({"logit_bias": dict.fromkeys(range(16385), 0.0)}, "logit_bias takes at most 16384 tokens, 16385 were given"),
    ({"logit_bias": [5]}, "logit_bias must map token ids to numbers"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a number from 0.001 to 1000, not 0.0"),
    ({"repetition_penalty": -1.5}, "repetition_penalty must be a number from 0.001 to 1000, not -1.5"),
    ({"repetition_penalty": NAN}, "repetition_penalty must be .* not nan"),
    ({"repetition_penalty": INF}, "repetition_penalty must be .* not inf"),
    ({"repetition_penalty": 1e30}, r"repetition_penalty must be .* not 1e\+30"),
    ({"presence_penalty": 2.5}, "presence_penalty must be a number from -2 to 2, not 2.5"),
    ({"presence_penalty": NAN}, "presence_penalty must be a number from -2 to 2, not nan"),
    ({"frequency_penalty": -2.01}, "frequency_penalty must be a number from -2 to 2, not -2.01"),
    ({"temperature": -0.5}, "temperature must be a number from 0 to 10000, not -0.5"),
    ({"temperature": INF}, "temperature must be a number from 0 to 10000, not inf"),
    ({"top_k": -1}, "top_k must be a whole number from 0 to 2147483648, not -1"),
    ({"top_p": 0.0}, r"top_p must be above 0 \(1 keeps all tokens\)"),
    ({"top_p": 1.5}, "top_p must be a number from 0 to 1, not 1.5"),
    ({"top_p": NAN}, "top_p must be a number from 0 to 1, not nan"),
    ({"min_p": -0.1}, "min_p must be a number from 0 to 1, not -0.1"),
    ({"min_p": 2}, "min_p must be a number from 0 to 1, not 2"),
    ({"seed": -1}, "seed must be a whole number from 0 to 9223372036854775807, not -1"),
    ({"seed": 2**63}, "seed must be a whole number from 0 to 9223372036854775807, not 9223372036854775808"),
    ({"seed": 2**64}, "seed must be a whole number from 0 to 9223372036854775807, not 18446744073709551616"),
    ({"bad_words": ("",)}, "bad_words takes at most 1024 texts of 1 to 1024 characters, not spaces alone"),
    ({"bad_words": (" ",)}, "bad_words takes at most 1024 texts of 1 to 1024 characters, not spaces alone"),
    ({"bad_words": ("x",) * 1025}, "bad_words takes at most 1024 texts"),
    ({"stop": ("",)}, "stop takes at most 16 texts of 1 to 1024 characters"),
    ({"stop": ("x",) * 17}, "stop takes at most 16 texts of 1 to 1024 characters"),
    ({"stop": ("x" * 1025,)}, "stop takes at most 16 texts of 1 to 1024 characters"),
    ({"stop_token_ids": (97,)}, "token id 97 of stop_token_ids .* vocabulary of 97: .* 0 to 96"),
    ({"stop_token_ids": tuple(range(1025))}, "stop_token_ids takes at most 1024 ids, 1025 were given"),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with open_tiny("llama", tmp_path_factory.mktemp("bad")) as opened:
        yield opened


def name(ask: object) -> str:
    return repr(ask)[:40]


@pytest.mark.parametrize(("ask", "words"), BAD, ids=name)
def test_bad_sampling_is_refused_and_the_next_request_is_served(llm: LLM, ask: dict[str, Any], words: str) -> None:
    want = llm.generate(prompt(9), ASK)[0].token_ids
    with pytest.raises(RequestError, match=words) as problem:
        llm.generate([prompt(9), prompt(30), prompt(5)], [ASK, SamplingParams(**ask, max_tokens=3), ASK])
    assert len(str(problem.value)) < 200
    assert llm.generate(prompt(9), ASK)[0].token_ids == want
    settle(llm)
    assert_nothing_held(llm.engine)


def test_a_task_is_told_the_same_and_the_next_one_is_served(llm: LLM) -> None:
    async def main() -> None:
        served = AsyncLLM(llm)
        [good] = await served.generate(prompt(9), ASK)
        for ask, words in BAD:
            running = asyncio.create_task(served.generate(prompt(9), ASK))
            with pytest.raises(RequestError, match=words):
                await served.generate([prompt(9), prompt(5)], SamplingParams(**ask))
            with pytest.raises(RequestError, match=words):
                async for _ in served.stream(prompt(9), SamplingParams(**ask)):
                    pass
            assert (await running)[0].token_ids == good.token_ids

    asyncio.run(main())
    settle(llm)
    assert_nothing_held(llm.engine)


FLAGS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p",
         "min_p", "seed", "bad_words", "stop")  # fmt: skip


def as_flags(ask: dict[str, Any]) -> list[str]:
    ((field, value),) = ask.items()
    if isinstance(value, dict):
        return [f"--logit-bias={token}={bias}" for token, bias in value.items()]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{field.replace('_', '-')}={each}" for each in values]


def on_the_command_line(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(["generate", *map(str, arguments), "--device", "cpu", "--dtype", "float32"])
    return leaving.value.code  # type: ignore[return-value]


def test_the_command_line_says_it_in_one_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for ask, _ in BAD:
        ((field, value),) = ask.items()
        if field not in FLAGS or isinstance(value, list) or (isinstance(value, dict) and "5" in value):
            continue  # what cannot be said there
        if len(value if isinstance(value, dict | tuple) else ()) > 1024:
            continue
        code = on_the_command_line("Hello", "-m", llm.path, "--max-tokens", 3, *as_flags(ask))
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") and err.count("\n") == 1, (ask, err)
        assert field in err.replace("-", "_") and "Traceback" not in err, (ask, err)


def test_a_line_of_a_file_is_named(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ask in ({"logit_bias": {"97": 1}}, {"logit_bias": {"9" * 5000: 1}}, {"top_p": 7}, {"repetition_penalty": 0}):
        lines = [{"prompt": "Hello"}, {"prompt": "Bye", **ask}]
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code = on_the_command_line("--prompts-file", tmp_path / "p.jsonl", "-m", llm.path, "--max-tokens", 3)
        out, err = capsys.readouterr()
        assert (code, out) == (2, "") and err.count("\n") == 1 and "line 2: " in err, (ask, err)
