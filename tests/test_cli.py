"""The command line: what it prints, how it ends, and that a user's mistake is one line and exit code 2."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import IO

import pytest

import tiny
from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from hybridkv import LLM, SamplingParams
from hybridkv.cli import main
from hybridkv.commands import demo, display, options
from hybridkv.commands.chat import Interrupt
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.conversation import Conversation
from hybridkv.overrides import overridden

ROOT = Path(__file__).parents[1]
TINY = ("--device", "cpu", "--dtype", "float32", "--context", "512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of single characters and a chat template."""
    path = tmp_path_factory.mktemp("cli") / "tiny-llama"
    tiny.save("llama", path)
    write_tokenizer(path, TEMPLATE)
    return path


@pytest.fixture(scope="module")
def long_folder(folder: Path) -> Path:
    """The same model with a context that takes minutes to fill, for runs that are interrupted."""
    path = shutil.copytree(folder, folder.with_name("tiny-long"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 17}))
    return path


@pytest.fixture
def llm(folder: Path, open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(folder)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("plan", "--json", stdin=b"")` -> exit code, standard output, standard error."""

    def call(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as leaving:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return leaving.value.code, out, err  # type: ignore[return-value]

    return call


def process(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hybridkv.cli", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, text=True, errors="replace")


def of(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


# ---- start, help, defaults


def test_importing_the_command_line_does_not_import_torch() -> None:
    code = "import sys, hybridkv.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version") == (0, "hybridkv 0.1.0\n", "")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(arguments: list[str], run: Run) -> None:
    code, out, err = run(*arguments)
    assert code == 0 and err == ""
    assert all(name in out for name in ("generate", "chat", "plan", "inspect", "demo"))


@pytest.mark.parametrize("command", ["generate", "chat", "plan", "inspect", "demo"])
def test_shared_options_have_the_same_names_everywhere(command: str, run: Run) -> None:
    _, out, _ = run(command, "--help")
    names = ["--model", "--device", "--dtype", "--kv-dtype", "--max-requests", "--context", "--memory"]
    names += ["--budget", "--window", "--recent", "--policy", "--scope", "--pooling", "--spread", "--bounded"]
    names += ["--decode-every"]
    if command in ("generate", "chat"):
        names += ["--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed"]
        names += ["--stop", "--ignore-eos"]
    assert [name for name in names if name not in out] == []


def test_defaults_are_those_of_the_dataclasses() -> None:
    options_of = {f.name: f.default for group in (options.ModelOptions, options.SamplingOptions) for f in fields(group)}
    options_of["max_context"] = options_of.pop("context")
    checked = 0
    for config in (CacheConfig, EngineConfig, SamplingParams):
        for f in fields(config):
            if f.name in options_of and f.name not in ("max_requests", "stop") and f.default is not MISSING:
                assert options_of[f.name] == f.default, f.name
                checked += 1
    assert checked >= 10
    assert options.SamplingOptions().params() == SamplingParams()


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "bogus"),
        (["--bogus"], "--bogus"),
        (["generate", "hi", "--bogus"], "--bogus"),
        (["generate", "hi", "--max-tokens"], "--max-tokens"),
        (["generate", "hi", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "hi", "--top-p", "2"], "--top-p"),
        (["generate", "hi", "--temperature", "nan"], "temperature"),
        (["generate", "hi", "--logprobs", "-1"], "logprobs"),
        (["generate"], "--prompt-file"),
        (["generate", "hi", "--prompt-file", "x"], "--prompt-file"),
        (["generate", "--prompt-file", "no/such\nfile"], "--prompt-file"),
        (["generate", "--prompts-file", "/"], "--prompts-file"),
        (["generate", "hi", "--raw", "--system", "be kind"], "--system"),
        (["generate", "hi", "-m", "no/such/model"], "no/such/model"),
        (["generate", "hi", "--kv-dtype", "fp4"], "--kv-dtype"),
        (["generate", "hi", "--dtype", "float64"], "float64"),
        (["generate", "hi", "--device", "abacus"], "abacus"),
        (["generate", "hi", "--memory", "lots"], "lots"),
        (["generate", "hi", "--memory", "1MiB"], "1.0 MiB"),
        (["generate", "hi", "--context", "0"], "--context"),
        (["generate", "hi", "--max-requests", "0"], "--max-requests"),
        (["generate", "hi", "--budget", "0"], "budget"),
        (["generate", "hi", "--budget", "-5"], "budget"),
        (["generate", "hi", "--budget", "some"], "--budget"),
        (["generate", "hi", "--budget", "10"], "recent"),
        (["generate", "hi", "--budget", "100", "--window", "0"], "window"),
        (["generate", "hi", "--budget", "100", "--recent", "-1"], "recent"),
        (["generate", "hi", "--budget", "100", "--decode-every", "-1"], "--decode-every"),
        (["generate", "hi", "--budget", "100", "--policy", "bogus"], "snapkv"),
        (["generate", "hi", "--budget", "100", "--scope", "word"], "scope"),
        (["generate", "hi", "--budget", "100", "--pooling", "min"], "--pooling"),
        (["generate", "hi", "--budget", "100", "--policy", "knorm", "--pooling", "max"], "--pooling"),
        (["generate", "hi", "--budget", "100", "--spread", "thin"], "--spread"),
        (["generate", "hi", "--budget", "100", "--spread", "ada", "--scope", "layer"], "--scope head"),
        (["generate", "hi", "--policy", "bogus"], "bogus"),
        (["generate", "hi", "--policy", "knorm"], "--budget"),
        (["generate", "hi", "--bounded"], "--budget"),
        (["generate", "hi", "--decode-every", "64"], "--budget"),
        (["inspect"], "--prompt-file"),
        (["inspect", "hi", "--budget", "0"], "budget"),
        (["inspect", "hi", "--raw", "--system", "be kind"], "--system"),
        (["demo", "--budget", "0"], "budget"),
        (["demo", "-o", "no/such/folder/page.html"], "--output"),
        (["plan", "--budget", "0"], "budget"),
        (["plan", "-m", "Qwen9-1T"], "Qwen3.5-27B"),
        (["plan", "--context", "9999999"], "--context"),
        (["plan", "--requests", "0"], "--max-requests"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("hybridkv: error: ") and err.count("\n") == 1 and said in err


def test_an_unsupported_architecture_says_which_are_supported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for command in (["plan"], ["generate", "hi"]):
        (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        code, _, err = run(*command, "-m", tmp_path)
        assert code == 2 and err.count("\n") == 1 and "gpt2" in err
        assert "llama" in err and "qwen3_5" in err


def test_text_that_is_not_utf8_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"caf\xe9")
    code, _, err = run("generate", "--prompt-file", tmp_path / "prompt")
    assert code == 2 and "UTF-8" in err


@pytest.mark.parametrize(
    "problem", [MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory:\nyou tried 1 byte")]
)
def test_running_out_of_memory_is_one_line(problem: Exception, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LLM, *_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(LLM, "__init__", fail)
    code, _, err = run("generate", "hi")
    assert code == 2 and "out of memory" in err and "--context" in err and err.count("\n") == 1


def test_a_mistake_of_ours_is_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LLM, *_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LLM, "__init__", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["generate", "hi"])


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("use kv_dtype='bf16' or lower max_context", "use --kv-dtype bf16 or lower --context"),
        ("top_p must be above 0", "--top-p must be above 0"),
        ("use device='cpu'", "use --device cpu"),
        ("give more memory, the device is full", "give more memory, the device is full"),
        ("'/models/top_k/x.gguf': page_size='x'", "'/models/top_k/x.gguf': page_size='x'"),
    ],
)
def test_errors_speak_of_flags(message: str, shown: str) -> None:
    assert options.in_flags(message) == shown


# ---- generate


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
    assert code == 2 and "prompt 2" in err and err.count("\n") == 1


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


# ---- chat


def test_a_chat_gives_the_answers_of_a_conversation(run: Run, folder: Path, llm: LLM) -> None:
    talk = Conversation(llm, None, SamplingParams(max_tokens=8))
    expected = ["".join(talk.send(text)) for text in ("Hello", "And then?")]
    talk.close()
    stdin = b"Hello\nAnd then?\n/stats\n/reset\n/stats\nHello\n/exit\nnot read\n"
    code, out, _ = run("chat", "-m", folder, *TINY, "--max-tokens", 8, stdin=stdin)
    lines = out.splitlines()
    assert code == 0 and lines[:2] == expected
    assert lines[2].startswith("2 turns, ") and " 0 of " not in lines[2]
    assert lines[-2].startswith("0 turns, 0 of 512 tokens, 0 of ")
    assert lines[-1] == expected[0]


def test_a_piped_chat_that_outgrows_its_context_is_an_error(run: Run, folder: Path) -> None:
    code, _, err = run("chat", "-m", folder, *TINY, stdin=b"x" * 600 + b"\n")
    assert code == 2 and "--context" in err


def test_a_model_without_a_template_cannot_chat(run: Run, folder: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(folder, tmp_path / "plain")
    write_tokenizer(plain)
    code, _, err = run("chat", "-m", plain, *TINY)
    assert code == 2 and "chat template" in err


def test_the_first_interrupt_asks_and_the_second_leaves() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with Interrupt() as interrupt:
        assert not interrupt.asked


def test_an_interrupt_ends_the_answer_and_not_the_chat(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--max-tokens", 90000, "--ignore-eos")
    with process("chat", "-m", long_folder, *arguments) as chat:
        of(chat.stdin).write("Hello\n/stats\n/exit\n")
        of(chat.stdin).flush()
        first = of(chat.stdout).read(1)
        chat.send_signal(signal.SIGINT)
        rest, err = chat.communicate()
    assert first and chat.returncode == 0, err
    answer, _, stats = rest.rstrip("\n").rpartition("\n1 turns")  # a line on the answer's speed may follow
    stats = "1 turns" + stats
    assert answer.endswith(" ...") and len(answer) < 80000
    assert stats.startswith("1 turns, ")


def test_an_interrupt_stops_generate_with_130(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--max-tokens", 90000, "--ignore-eos")
    with process("generate", "Hello", "-m", long_folder, *arguments) as generate:
        assert of(generate.stdout).read(1)
        generate.send_signal(signal.SIGINT)
        _, err = generate.communicate()
    assert generate.returncode == 130 and "Traceback" not in err


def test_a_closed_pipe_is_a_quiet_end(long_folder: Path) -> None:
    arguments = ("--device", "cpu", "--dtype", "float32", "--context", 100000, "--max-tokens", 90000, "--ignore-eos")
    with process("generate", "Hello", "-m", long_folder, *arguments) as generate:
        assert of(generate.stdout).read(1)
        of(generate.stdout).close()
        err = of(generate.stderr).read()
    assert generate.returncode == 141 and err == ""


def test_a_poor_terminal_is_enough() -> None:
    with process("plan", LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii", COLUMNS="1", TERM="dumb") as plan:
        out, err = plan.communicate()
    assert plan.returncode == 0 and out and err == ""


# ---- demo


def test_the_document_comes_with_the_package() -> None:
    text = files("hybridkv").joinpath("data", demo.DOCUMENT).read_text(encoding="utf-8")
    assert len(text.split()) > 2000 and text.isascii()


def short_prompt(llm: LLM, text: str, question: str) -> list[int]:
    return llm.encode(text[:300]) + llm.encode(question)


def test_the_demo_reads_its_document_once_where_all_is_kept(
    run: Run, folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_prompt", short_prompt)
    page = tmp_path / "page.html"
    code, out, err = run("demo", "-m", folder, *TINY, "--budget", 100, "-o", page)
    assert code == 0, err
    text = files("hybridkv").joinpath("data", demo.DOCUMENT).read_text(encoding="utf-8")
    same = os.path.commonprefix([short_prompt(llm, text, question) for question in demo.QUESTIONS])
    words = " ".join(out.split())
    assert f"{len(same)} tokens were in the cache already" in words
    for question in demo.QUESTIONS:
        n = len(short_prompt(llm, text, question))
        assert f"{n} of {n}" in words and f"100 of {n}" in words
    assert str(page) in out.replace("\n", "") and "100 tokens a stream" in page.read_text()


def test_the_demo_at_a_budget_gives_the_librarys_answers(folder: Path, llm: LLM) -> None:
    cache = CacheConfig(kv_dtype="f32", budget=100, window=16, recent=16)
    tokens = llm.encode("The ship left the harbour at dawn. " * 8)
    params = SamplingParams(max_tokens=6)
    own = LLM(folder, device="cpu", dtype="float32", cache=cache, max_requests=1, max_context=512)
    row, page = demo.short_answer(demo.with_cache(llm, cache), options.ModelOptions(), "?", tokens, params)
    [expected] = own.generate([tokens], params)
    assert row.answer == page.answer == expected.text
    assert (row.kept, row.tokens) == (100, len(tokens))
    assert llm.engine.evictor is None and llm.cache_config.budget is None  # the first LLM is as it was


def test_the_demo_page_goes_elsewhere_if_the_folder_is_not_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYBRIDKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert demo.page_place(demo.PAGE) == Path(demo.PAGE)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert demo.page_place(demo.PAGE) == tmp_path / "cache" / demo.PAGE


# ---- eviction

LONG = "The ship left the harbour at dawn. " * 8  # 280 characters, a token each


def test_a_budget_says_what_was_kept(run: Run, folder: Path, llm: LLM) -> None:
    common = ("-m", folder, *TINY, "--kv-dtype", "f32", "--raw", "--max-tokens", 3)
    code, _, err = run("generate", LONG, *common, "--budget", 100)
    n, schema = len(llm.encode(LONG)), llm.manager.schema
    before, after = (display.human(schema.kv_bytes(tokens)) for tokens in (n, 100))
    assert code == 0 and f"kept 100 of {n} tokens a stream, KV {before} -> {after}" in err.splitlines()
    _, _, err = run("generate", LONG, *common, "--budget", 400)
    assert f"kept all {n} tokens a stream" in err
    _, _, err = run("generate", LONG, *common)
    assert "kept" not in err


def test_json_says_what_was_kept(run: Run, folder: Path, llm: LLM) -> None:
    flags = ("--budget", 100, "--raw", "--json", "--max-tokens", 3, "--spread", "pyramid")
    found = json.loads(run("generate", LONG, "-m", folder, *TINY, *flags)[1])["eviction"]
    n = len(llm.encode(LONG))
    assert found["tokens"] == n and 90 < found["kept_tokens"] <= 100
    assert found["bytes_before"] == llm.manager.schema.kv_bytes(n) > found["bytes_after"]


def test_several_prompts_say_what_was_kept_of_all(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(f"{LONG}\n{LONG}\n")
    _, _, err = run("generate", "--prompts-file", tmp_path / "prompts", "-m", folder, *TINY, "--budget", 100)
    assert "kept 100 of " in err and "each of 2 requests" in err


def test_eviction_flags_reach_the_cache(llm: LLM) -> None:
    from hybridkv.eviction.policies import Ada, Pyramid, SnapKV

    given = dict(
        budget=100, window=32, recent=16, scope="head", bounded=True, decode_every=8, kv_dtype="fp8", state_dtype="bf16"
    )
    expected = CacheConfig(**given)  # type: ignore[arg-type]
    assert options.ModelOptions(**given).cache() == expected  # type: ignore[arg-type]
    for spread, kind in (("ada", Ada), ("pyramid", Pyramid)):
        policy = options.ModelOptions(budget=100, pooling="max", spread=spread).cache().policy
        assert policy == kind(SnapKV(pooling="max"))
    assert options.ModelOptions(budget=100, policy="knorm").cache().policy == "knorm"
    assert options.ModelOptions().cache() == CacheConfig()


def test_a_chat_at_a_budget_goes_on(run: Run, folder: Path) -> None:
    stdin = f"{LONG}\nAnd then?\n/stats\n".encode()
    code, out, err = run("chat", "-m", folder, *TINY, "--budget", 100, "--max-tokens", 4, stdin=stdin)
    assert code == 0 and out.splitlines()[-2].startswith("2 turns, "), err


# ---- environment


def test_the_environment_overrides_flags_and_says_so(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDKV_BUDGET", "80")
    monkeypatch.setenv("HYBRIDKV_KV_DTYPE", "bf16")
    code, _, err = run("generate", LONG, "-m", folder, *TINY, "--raw", "--max-tokens", 2, "--budget", 200)
    assert code == 0 and "kept 80 of " in err
    assert err.count("HYBRIDKV_BUDGET=80 is in force") == err.count("HYBRIDKV_KV_DTYPE=bf16 is in force") == 1


def test_the_environment_reaches_the_demo(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_prompt", short_prompt)
    monkeypatch.setenv("HYBRIDKV_BUDGET", "90")
    code, out, err = run("demo", "-m", folder, *TINY, "--policy", "knorm", "-o", tmp_path / "page.html")
    assert code == 0 and "HYBRIDKV_BUDGET=90 is in force" in err and " 90 of " in out


def test_the_environment_can_switch_eviction_off(capsys: pytest.CaptureFixture[str]) -> None:
    evicting = CacheConfig(budget=100, bounded=True, decode_every=8)
    found = overridden(evicting, {"HYBRIDKV_BUDGET": "none"})
    assert found == CacheConfig() and "HYBRIDKV_BUDGET=none" in capsys.readouterr().err
    assert overridden(found, {"HYBRIDKV_BUDGET": "none"}) == found and capsys.readouterr().err == ""
    assert overridden(evicting, {"HYBRIDKV_BUDGET": " ", "HYBRIDKV_KV_DTYPE": ""}) is evicting


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BUDGET", "0"),
        ("BUDGET", "-1"),
        ("BUDGET", "lots"),
        ("BUDGET", "1" * 500),
        ("KV_DTYPE", "fp4"),
        ("BUDGET", "9"),
    ],
)
def test_nonsense_in_the_environment_is_one_line(
    variable: str, value: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HYBRIDKV_{variable}", value)
    code, _, err = run("generate", "hi", "-m", folder, *TINY)
    assert code == 2 and err.count("\n") == 1 and f"HYBRIDKV_{variable}" in err
