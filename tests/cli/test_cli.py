"""The command line: its start, help and defaults, mistakes, and the environment."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import hybridkv
from cli.commands import LONG, ROOT, TINY, Run, short_prompt
from hybridkv import LLM, SamplingParams, opening
from hybridkv.cli import main
from hybridkv.commands import declaring, demo, display, options
from hybridkv.commands.flag_words import in_flags
from hybridkv.commands.sampling_options import SamplingOptions
from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.overrides import overridden

# ---- start, help, defaults


def test_importing_the_command_line_does_not_import_torch() -> None:
    code = "import sys, hybridkv.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300).returncode == 0


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version") == (0, f"hybridkv {hybridkv.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(arguments: list[str], run: Run) -> None:
    code, out, err = run(*arguments)
    assert code == 0 and err == ""
    assert all(name in out for name in ("generate", "chat", "plan", "inspect", "demo", "eval"))


@pytest.mark.parametrize("command", ["generate", "chat", "plan", "inspect", "demo"])
def test_shared_options_have_the_same_names_everywhere(command: str, run: Run) -> None:
    _, out, _ = run(command, "--help")
    names = ["--model", "--device", "--dtype", "--kv-dtype", "--max-requests", "--context", "--memory"]
    names += [
        "--budget",
        "--window",
        "--recent",
        "--policy",
        "--scope",
        "--pooling",
        "--spread",
        "--bounded",
        "--first",
    ]
    names += ["--decode-every"]
    if command in ("generate", "chat"):
        names += ["--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed"]
        names += ["--stop", "--ignore-eos"]
    assert [name for name in names if name not in out] == []


def test_defaults_are_those_of_the_dataclasses() -> None:
    options_of = {f.name: f.default for group in (options.ModelOptions, SamplingOptions) for f in fields(group)}
    options_of["max_context"] = options_of.pop("context")
    checked = 0
    for config in (CacheConfig, EngineConfig, SamplingParams):
        for f in fields(config):
            if (
                f.name in options_of
                and f.name not in ("max_requests", "stop", "bad_words")
                and f.default is not MISSING
            ):
                assert options_of[f.name] == f.default, f.name
                checked += 1
    assert checked >= 10
    assert SamplingOptions().params() == SamplingParams()


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["plan"], ["inspect"], ["demo"], ["eval"], ["bench"]])
def test_help_has_a_short_name_and_says_nothing_behind_switches(command: list[str], run: Run) -> None:
    code, out, err = run(*command, "-h")
    assert (code, err) == (0, "") and out == run(*command, "--help")[1]
    assert "<bool>" not in out and "Show this message" not in out


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_groups_options_and_says_whose_the_defaults_are(command: str, run: Run) -> None:
    _, out, _ = run(command, "-h")
    panels = [line.split("─")[1].strip() for line in out.splitlines() if line.startswith("╭─ ")]
    own = ["Prompt", "Output"] if command == "chat" else ["Arguments", "Prompt", "Output"]
    assert panels == [*own, "Model", "Memory", "Keeping only the tokens that matter", "Sampling"]
    assert "the model's own, else 0" in " ".join(out.replace("│", " ").split())
    assert "as long as the context allows" in " ".join(out.replace("│", " ").split())


def test_paragraphs_of_help_flow() -> None:
    assert declaring.flowing("One\n    two.\n\n    Three\n    four.") == "One two.\n\nThree four."
    assert declaring.flowing("One.\n\n      code\n      more\n\n    End.") == "One.\n\n  code\n  more\n\nEnd."


def test_numbers_of_tokens_may_be_written_short(run: Run) -> None:
    assert [declaring.tokens(text) for text in ("32768", "32k", "32K", "1m", " 2k ")] == [
        32768,
        32768,
        32768,
        1 << 20,
        2048,
    ]
    code, out, _ = run("plan", "--context", "2k", "--json")
    assert code == 0 and '"context": 2048' in out
    assert options.ModelOptions(budget=100, policy="knorm").cache().policy == "knorm"


def test_names_may_be_written_in_capitals(run: Run, folder: Path) -> None:
    flags = ("--budget", 100, "--policy", "KNorm", "--kv-dtype", "BF16", "--device", "CPU", "--max-tokens", 2)
    code, _, err = run("generate", LONG, "-m", folder, "--raw", "--dtype", "float32", "--context", "1k", *flags)
    assert code == 0 and "kept 100 of " in err


def test_a_shape_that_is_no_file_is_told_its_hub_id(run: Run) -> None:
    code, _, err = run("generate", "hi", "--model", "qwen3.5-27b")
    assert code == 2 and "Qwen/Qwen3.5-27B" in err and "hybridkv[hub]" in err and err.count("\n") == 1


# ---- OpenMP


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        ("import hybridkv", {}, "10000"),
        ("import torch, hybridkv", {}, "None"),  # too late: libgomp has read its settings
        ("import hybridkv", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("import hybridkv", {"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(
    code: str, environment: dict[str, str], expected: str
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"PYTHONPATH": str(ROOT)} | environment
    code += "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert found.stdout.strip() == expected, found.stderr


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "bogus"),
        (["--bogus"], "--bogus"),
        (["generate", "hi", "--bogus"], "--bogus"),
        (["generate", "hi", "--max-tokens"], "--max-tokens"),
        (
            ["generate", "hi", "--max-tokens", "many"],
            "'--max-tokens': it takes a number of tokens such as 32768 or 32k",
        ),
        (["generate", "hi", "--seed", "many"], "'--seed': it takes a whole number, not 'many'"),
        (["generate", "hi", "--top-p", "most"], "'--top-p': it takes a number, not 'most'"),
        (["generate", "hi", "--context", "32q"], "it takes a number of tokens such as 32768 or 32k, not '32q'"),
        (["generate", "hi", "--logit-bias", "x"], "--logit-bias takes a token id and a number such as 17=-2.5"),
        (["generate", "hi", "--logit-bias", "17=1000"], "--logit-bias of token 17"),
        (["generate", "hi", "--n", "0"], "n must be"),
        (["generate", "hi", "--raw", "--no-think"], "--think"),
        (["generate", "hi", "--raw", "--tools", "x"], "--tools"),
        (["generate", "hi", "--tools", "no/such/file"], "--tools"),
        (["generate", "hi", "--template-arg", "x"], "KEY=VALUE"),
        (["generate", "hi", "--template-arg", "tools=1"], "--tools"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "hi", "--top-p", "2"], "--top-p"),
        (["generate", "hi", "--temperature", "nan"], "temperature"),
        (["generate", "hi", "--logprobs", "-1"], "logprobs"),
        (["generate"], "standard input holds no prompt"),
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
        (["generate", "hi", "--budget", "0"], "without --budget all are kept"),
        (["generate", "hi", "--budget", "-5"], "budget"),
        (["generate", "hi", "--budget", "some"], "--budget"),
        (["generate", "hi", "--budget", "10"], "recent"),
        (["generate", "hi", "--budget", "100", "--window", "0"], "window"),
        (["generate", "hi", "--budget", "100", "--recent", "-1"], "recent"),
        (["generate", "hi", "--budget", "100", "--decode-every", "-1"], "--decode-every"),
        (["generate", "hi", "--budget", "100", "--policy", "bogus"], "snapkv"),
        (["generate", "hi", "--budget", "100", "--policy", "peek:pooling=3"], "did you mean peak?"),
        (["generate", "hi", "--budget", "100", "--policy", "peak:poling=3"], "--policy: policy 'peak:poling=3'"),
        (["generate", "hi", "--budget", "100", "--policy", "peak:pooling=3", "--pooling", "5"], "there twice"),
        (["generate", "hi", "--budget", "100", "--first", "-1"], "first"),
        (["generate", "hi", "--budget", "100", "--first", "40"], "the 64 recent and the 40 first tokens"),
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
    assert in_flags(message) == shown


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


# ---- what a first run waits for


def test_kernels_that_are_compiled_are_shown_on_a_terminal_alone(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, and only there, a first run compiles for some seconds: it says so, and where that is kept."""
    asked = []

    def compiles(engine: object, progress: Callable[[int, int], None]) -> None:
        asked.append(engine)
        progress(1, 7)

    monkeypatch.setattr(opening, "precompile", compiles)
    monkeypatch.setattr(display, "kernel_folder", lambda: Path("/kept/here"))
    arguments = ("generate", "hi", "-m", folder, *TINY, "--max-tokens", 2)
    code, _, err = run(*arguments)
    assert code == 0 and len(asked) == 1 and "compiling" not in err
    terminal = StringIO()
    monkeypatch.setattr(
        display, "Console", lambda **_: Console(file=terminal, force_terminal=True, width=200, color_system=None)
    )
    assert run(*arguments)[0] == 0
    assert "compiling kernels, once on this machine (kept in /kept/here)" in terminal.getvalue()
