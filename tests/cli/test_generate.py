"""`hybridkv generate`: prompts, answers, options, and what a budget kept."""

import io
import json
import sys
from pathlib import Path

import pytest

from cli.commands import LONG, TINY, Run
from hybridkv import LLM, SamplingParams
from hybridkv.commands import display, options
from hybridkv.config import CacheConfig
from hybridkv.eviction import Pyramid, SnapKV, find_policy


def test_an_answer_is_the_one_that_the_library_gives(run: Run, folder: Path, llm: LLM) -> None:
    [expected] = llm.generate([llm.encode_chat([{"role": "user", "content": "Hello"}])], SamplingParams(max_tokens=12))
    code, out, err = run("generate", "Hello", "-m", folder, *TINY, "--max-tokens", 12)
    assert (code, out) == (0, expected.text + "\n")
    assert err.startswith(f"[read {expected.prompt_tokens} tokens at ") and "wrote 12 tokens" in err and "KV" in err


def test_a_prompt_comes_from_an_argument_a_file_or_standard_input(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("Hello")
    common = ("-m", folder, *TINY, "--max-tokens", 6)
    outs = [
        run("generate", "Hello", *common)[1],
        run("generate", "--prompt-file", tmp_path / "prompt", *common)[1],
        run("generate", "-", *common, stdin=b"Hello")[1],
        run("generate", "--prompt-file", "-", *common, stdin=b"Hello")[1],
    ]
    assert len(set(outs)) == 1 and outs[0].strip()


def test_raw_leaves_the_template_out_and_system_goes_in(run: Run, folder: Path, llm: LLM) -> None:
    common = ("-m", folder, *TINY, "--max-tokens", 1, "--json")
    raw = json.loads(run("generate", "Hello", "--raw", *common)[1])
    assert raw["prompt_tokens"] == len(llm.encode("Hello"))
    with_system = json.loads(run("generate", "Hello", "--system", "Be kind", *common)[1])
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    assert with_system["prompt_tokens"] == len(llm.encode_chat(messages))


def test_json_is_one_object_with_log_probabilities(run: Run, folder: Path) -> None:
    arguments = ("-m", folder, *TINY, "--max-tokens", 5, "--json", "--logprobs", 2, "--ignore-eos")
    code, out, err = run("generate", "Hello", *arguments)
    found = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert found["generated_tokens"] == len(found["token_ids"]) == len(found["logprobs"]) == 5
    assert found["finish_reason"] == "length" and found["stats"]["kv_bytes_kept"] > 0
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in found["logprobs"])


def test_several_prompts_get_the_answers_they_would_get_alone(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Hello\n\nAnother one\nA third prompt, longer\n")
    common = ("-m", folder, *TINY, "--max-tokens", 6, "--json")
    code, out, _ = run("generate", "--prompts-file", tmp_path / "prompts", *common)
    together = [json.loads(line)["token_ids"] for line in out.splitlines()]
    alone = [
        json.loads(run("generate", prompt, *common)[1])["token_ids"]
        for prompt in ("Hello", "Another one", "A third prompt, longer")
    ]
    assert code == 0 and together == alone


def test_a_prompt_that_is_too_long_is_named_by_its_line(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Hello\n" + "x" * 600)
    code, _, err = run("generate", "--prompts-file", tmp_path / "prompts", "-m", folder, *TINY)
    assert code == 2 and "line 2: " in err and err.count("\n") == 1


def test_sampling_options_reach_the_sampler(run: Run, folder: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=5, ignore_eos=True)
    [expected] = llm.generate([llm.encode("Hello")], params)
    flags = ("--max-tokens", 20, "--temperature", 1.5, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5)
    flags = (*flags, "--ignore-eos", "--raw")
    _, out, _ = run("generate", "Hello", "-m", folder, *TINY, *flags)
    assert out == expected.text + "\n"
    stop = expected.text[5:7]
    _, out, _ = run("generate", "Hello", "-m", folder, *TINY, *flags, "--stop", stop, "--stop", "never said")
    assert out == expected.text[: expected.text.index(stop)] + "\n"


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    display.say("a\x1b[2Jb\tc\n\x9b")
    assert sys.stdout.getvalue() == "a\ufffd[2Jb\tc\n\ufffd"  # type: ignore[attr-defined]


# ---- eviction


def test_a_budget_says_what_was_kept(run: Run, folder: Path, llm: LLM) -> None:
    common = ("-m", folder, *TINY, "--kv-dtype", "f32", "--raw", "--max-tokens", 3)
    code, _, err = run("generate", LONG, *common, "--budget", 100)
    n, schema = len(llm.encode(LONG)), llm.manager.schema
    before, after = (display.human(schema.kv_bytes(tokens)) for tokens in (n, 100))
    assert code == 0 and f"kept 100 of {n} tokens a stream by peak, KV {before} -> " in err
    _, _, err = run("generate", LONG, *common, "--budget", 100, "--policy", "snapkv:pooling=none")
    line = f"kept 100 of {n} tokens a stream by snapkv:pooling=none, KV {before} -> {after}"
    assert line in err.splitlines(), "where all streams are of one length, the bytes are those of 100 tokens"
    _, _, err = run("generate", LONG, *common, "--budget", 400)
    assert f"kept all {n} tokens a stream" in err
    _, _, err = run("generate", LONG, *common)
    assert "kept" not in err


def test_json_says_what_was_kept(run: Run, folder: Path, llm: LLM) -> None:
    flags = ("--budget", 100, "--raw", "--json", "--max-tokens", 3, "--spread", "pyramid")
    answer = json.loads(run("generate", LONG, "-m", folder, *TINY, *flags)[1])
    found, n = answer["eviction"], len(llm.encode(LONG))
    assert answer["policy"] == "peak:spread=pyramid"
    assert json.loads(run("generate", LONG, "-m", folder, *TINY, "--json", "--max-tokens", 1)[1])["policy"] is None
    assert found["tokens"] == n and 90 < found["kept_tokens"] <= 100
    assert found["bytes_before"] == llm.manager.schema.kv_bytes(n) > found["bytes_after"]


def test_several_prompts_say_what_was_kept_of_all(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(f"{LONG}\n{LONG}\n")
    _, _, err = run("generate", "--prompts-file", tmp_path / "prompts", "-m", folder, *TINY, "--budget", 100)
    assert "kept 100 of " in err and "each of 2 requests on average by peak, KV " in err


def test_eviction_flags_reach_the_cache(llm: LLM) -> None:
    given = dict(
        budget=100, window=32, recent=16, scope="head", bounded=True, decode_every=8, kv_dtype="fp8", state_dtype="bf16"
    )
    expected = CacheConfig(**given)  # type: ignore[arg-type]
    assert options.ModelOptions(**given).cache() == expected  # type: ignore[arg-type]
    asked = options.ModelOptions(budget=100, policy="snapkv", pooling="max", spread="pyramid", first=8).cache()
    assert asked.policy == "snapkv:pooling=max:spread=pyramid" and asked.first == 8
    assert find_policy(asked.policy) == Pyramid(SnapKV(pooling="max"))
    assert options.ModelOptions(budget=100, policy="knorm").cache().policy == "knorm"
    assert options.ModelOptions().cache() == CacheConfig()


def test_a_chat_at_a_budget_goes_on(run: Run, folder: Path) -> None:
    stdin = f"{LONG}\nAnd then?\n/stats\n".encode()
    code, out, err = run("chat", "-m", folder, *TINY, "--budget", 100, "--max-tokens", 4, stdin=stdin)
    *_, turns, speed, evicted = out.splitlines()
    assert code == 0 and turns.startswith("2 turns, ") and speed.startswith("last answer: 4 tokens"), err
    assert evicted.startswith("evicted: ") and " of 333 tokens a stream by peak, KV " in evicted
