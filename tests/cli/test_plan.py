"""`hybridkv plan` as a person uses it: any card, any form of weights, without torch, and what it suggests fits."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf

from hybridkv.cards import CARDS, CONTEXT, HEADROOM, find_card, plain
from hybridkv.cli import main
from hybridkv.models.known import KNOWN

HEAVY = ("torch", "triton", "transformers", "safetensors", "tokenizers", "jinja2")


def plan(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert leaving.value.code == code, out + err
    return out if code == 0 else err


def numbers(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    return json.loads(plan(capsys, *arguments, "--json"))


@pytest.mark.parametrize("what", ["name", "config.json", "gguf", "page"])
def test_nothing_heavy_is_imported(what: str, tmp_path: Path) -> None:
    """In a process of its own: a known name, a config, the header of a GGUF file, and the page."""
    model = "Qwen3.5-27B"
    if what == "config.json":
        model = str(tmp_path / "config.json")
        (tmp_path / "config.json").write_text(json.dumps(KNOWN["DeepSeek-V4-Flash"]))
    if what == "gguf":
        model = str(tiny_gguf.write_gguf_llama(tiny.build("llama3_rope"), tmp_path / "m.gguf", q8=True))
    flags = ["--html", "page.html"] if what == "page" else ["--card", "H200", "--requests", "4"]
    script = (
        "import sys; from hybridkv.cli import main\n"
        f"try: main({['plan', model, *flags]!r})\n"
        "except SystemExit as leaving: assert leaving.code == 0, leaving.code\n"
        f"found = sorted(m for m in {HEAVY!r} if m in sys.modules)\n"
        "assert not found, found"
    )
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("4090", "RTX 4090"), ("rtx4090", "RTX 4090"), ("RTX-4090", "RTX 4090"), ("GeForce RTX 4090", "RTX 4090"),
        ("h200", "H200"), ("H100", "H100 80GB"), ("H100 PCIe", "H100 80GB"), ("a100-40gb", "A100 40GB"),
        ("A100 80GB", "A100 80GB"), ("4060 ti 16gb", "RTX 4060 Ti 16GB"), ("RTX PRO 6000", "RTX PRO 6000"),
        ("6000 Ada", "RTX 6000 Ada"), ("tesla t4", "T4"),
    ],
)  # fmt: skip
def test_a_card_may_be_spelled_loosely(spelled: str, name: str) -> None:
    assert find_card(spelled).name == name


def test_cards_are_plausible_and_each_finds_itself() -> None:
    names = [card.name for card in CARDS]
    assert len(set(names)) == len(names) >= 40
    for card in CARDS:
        assert find_card(card.name) == card and find_card(plain(card.name)) == card
        size = re.search(r"(\d+)GB", card.name)
        assert 7 * 1024 < card.mib < 200 * 1024 and (size is None or abs(card.mib / 1024 / int(size[1]) - 1) < 0.05)


def test_a_size_as_a_card_is_in_gib_and_as_memory_is_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Owners of a 24 GB card mean 24 GiB; a limit of 24GB is 24e9 bytes."""
    card = numbers(capsys, "Qwen3.5-9B", "--card", "24GB", "--context", "8k")
    assert card["card"]["bytes"] == 24 << 30
    assert card["memory_bytes"] == int(((24 << 30) - CONTEXT) * HEADROOM) == (24 << 30) - card["reserve_bytes"]
    memory = numbers(capsys, "Qwen3.5-9B", "--memory", "24GB", "--context", "8k")
    assert memory["memory_bytes"] == 24 * 10**9 and memory["reserve_bytes"] == 0 and memory["card"] is None


def test_the_27b_in_q4_k_on_a_24_gb_card(capsys: pytest.CaptureFixture[str]) -> None:
    """The question that every reader has."""
    found = numbers(capsys, "Qwen3.5-27B", "--weights", "q4_k", "--card", "RTX 4090", "--context", "32k")
    assert found["weights_bytes"] / 2**30 == pytest.approx(16.2, abs=0.05)
    assert found["context"] == 32768 and found["fits"] is True and not found["suggestions"]
    by_kv = {choice["kv_dtype"]: choice for choice in found["choices"]}
    assert by_kv["bf16"]["longest_context"] > 65536 and by_kv["fp8"]["longest_context"] > 120000
    assert by_kv["bf16"]["most_requests"] == 2
    for choice in found["choices"]:
        assert choice["total_bytes"] == found["weights_bytes"] + choice["cache_bytes"] + choice["workspace_bytes"]
        longest = choice["longest_context"]
        for context, fits in ((longest, True), (longest + 64, False)):
            flags = ("--context", context, "--kv-dtype", choice["kv_dtype"])
            again = numbers(capsys, "Qwen3.5-27B", "--weights", "q4_k", "--card", "4090", *flags)
            assert again["fits"] is fits


DO_NOT_FIT = [
    "Qwen3.5-27B --card 4090 --context 32k",
    "Qwen3.5-27B --card 3090 --context 32k --requests 4",
    "Qwen3.5-27B --card 24GB --weights q4_k --context 256k",
    "Qwen3.5-27B --card 4090 --weights q4_k --context 64k --requests 3 --budget 1024 --window 32",
    "Qwen3-8B --card T4 --context 16k",
    "Llama-3.3-70B --card H100 --context 32k",
    "Llama-3.3-70B --card 8GB",
    "Qwen3.5-35B-A3B --card 5090 --context 64k",
    "DeepSeek-V4-Flash --card H200 --context 128k",
    "Qwen3.5-9B --memory 18GiB --context 128k --kv-dtype bf16",
    "Qwen3.5-4B --memory 12GiB --device cpu --dtype float32 --context 32k",
]


@pytest.mark.parametrize("command", DO_NOT_FIT)
def test_every_suggestion_fits_when_it_is_run_as_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    out = " ".join(plan(capsys, *words).split())
    found = numbers(capsys, *words)
    assert found["fits"] is False and "Does not fit" in out and "  0 0 0" not in out
    if not found["suggestions"]:
        assert "Nothing near it fits." in out and words[0].startswith("DeepSeek")  # no card here holds 530 GiB
    for suggestion in found["suggestions"]:
        assert suggestion in out
        program, _, rest = suggestion.partition(" plan ")
        assert program.endswith("hybridkv")
        again = numbers(capsys, *shlex.split(rest))
        assert (
            again["fits"] is True
            and again["model"] == found["model"]
            and not any("engine" in n for n in again["notes"])
        )


def test_forms_that_the_engine_does_not_hold_are_planned_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    for model, form, said in (
        ("Qwen3.5-35B-A3B", "q4_k", "does not hold this model's experts in Q4_K yet"),
        ("Qwen3.5-35B-A3B", "mxfp4", "does not hold this model's experts in mxfp4 yet"),
        ("DeepSeek-V4-Flash", "mxfp4", "does not hold DeepSeek-V4 in mxfp4 yet"),
    ):
        found = numbers(capsys, model, "--weights", form, "--context", "8k")
        assert found["weights_bytes"] < 0.4 * numbers(capsys, model, "--context", "8k")["weights_bytes"]
        assert len(found["notes"]) == 1 and said in found["notes"][0]
    assert not numbers(capsys, "Qwen3.5-35B-A3B", "--weights", "fp8", "--context", "8k")["notes"]
    assert "no FP8" in numbers(capsys, "Qwen3-8B", "--card", "3090", "--context", "8k")["notes"][0]
    [note] = numbers(capsys, "Qwen3-8B", "--card", "4090", "--weights", "fp8", "--context", "8k")["notes"]
    assert "keeps the weights in bf16" in note


WIDE = [
    "", "--card 4090", "--weights fp8 --card H100", "--weight-dtype fp8",
    "--weight-dtype fp8 --device cpu --memory 64GiB", "--requests 64 --budget 512",
]  # fmt: skip


@pytest.mark.parametrize("arguments", WIDE)
@pytest.mark.parametrize("model", ["Qwen3.5-27B", "DeepSeek-V4-Pro", "SmolLM2-135M-Instruct"])
def test_everything_is_readable_at_80_columns(
    model: str, arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if model.startswith("DeepSeek") and ("budget" in arguments or "weight-dtype" in arguments):
        return
    monkeypatch.setenv("COLUMNS", "80")
    lines = plan(capsys, model, *arguments.split()).splitlines()
    assert "…" not in "".join(lines)
    assert max(len(line) for line in lines if " plan " not in line) <= 80
    assert {"layers", "streams", "entries", "pages"} <= set(lines[2].split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Qwen3.5-28B"], "did you mean Qwen3.5-27B"),
        (["Qwen/Qwen3-30B-A3B"], "family qwen3_moe, which hybridkv does not run"),
        (["Qwen3-8B", "--card", "RTX 4095"], "near it are RTX 4090"),
        (["Qwen3-8B", "--card", "???"], "or give its size (24GB), or --memory"),
        (["Qwen3-8B", "--card", "4090", "--memory", "8GiB"], "leave out --memory, or --card"),
        (["Qwen3-8B", "--card", "4090", "--device", "cpu"], "does not go with"),
        (["Qwen3-8B", "--weights", "q4_k_m"], "a mixture of formats"),
        (["Qwen3-8B", "--weights", "int3"], "choose bf16, f32, fp8, q8_0"),
        (["Qwen3-8B", "--weights", "q4_k", "--device", "cpu"], "on a CPU weights are bf16 or f32"),
        (["Qwen3-8B", "--weights", "q4_k", "--exact"], "exact mode"),
        (["Qwen3-8B", "--weights", "q4_k", "--dtype", "float32"], "leave out --dtype"),
        (["Qwen3-8B", "--context", "32x"], "such as 32768 or 32k"),
        (["Qwen3-8B", "--context", "0"], "--context"),
        (["Qwen3-8B", "--context", "64k"], "40960"),
        (["Qwen3-8B", "--device", "tpu"], "use auto, cpu or cuda"),
        (["Qwen3-8B", "Qwen3-4B"], "one model"),
        (["DeepSeek-V4-Pro", "--budget", "512"], "never evicts"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = plan(capsys, *arguments, code=2)
    assert said in error and error.count("\n") == 1


def test_defaults_do_not_depend_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 on a GPU that is not here; a CPU only where it is asked for; the model named either way."""
    found = numbers(capsys, "Qwen3.5-27B", "--context", "16k")
    assert found["dtype"] == "bfloat16" and found["device"] == "cuda"
    assert found == numbers(capsys, "--model", "Qwen/Qwen3.5-27B", "--context", 16384, "--device", "cuda")
    cpu = numbers(capsys, "Qwen3.5-0.8B", "--context", "16k", "--device", "cpu")
    tied = 248320 * 1024 * 2  # its head is a second copy on a CPU
    gpu = numbers(capsys, "Qwen3.5-0.8B", "--context", "16k")
    assert cpu["dtype"] == "bfloat16" and cpu["weights_bytes"] == gpu["weights_bytes"] + tied


def test_a_budget_is_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("Qwen3.5-27B", "--weights", "q4_k", "--card", "4090", "--context", "64k", "--requests", 2)
    kept = numbers(capsys, *common, "--kv-dtype", "bf16", "--budget", 2048)
    whole = numbers(capsys, *common, "--kv-dtype", "bf16")
    [cut], [full] = kept["choices"], whole["choices"]
    assert full["fits"] is False and cut["kv_bytes"] < full["kv_bytes"] and kept["budget"] == 2048
    [buy] = [b for b in whole["buys"] if b["budget"] == 2048 and not b["bounded"]]
    assert (cut["longest_context"], cut["most_requests"]) == (buy["longest_context"], buy["most_requests"])
    assert (cut["kv_bytes"], cut["kv_bytes_held"]) == (buy["peak_bytes"], buy["held_bytes"])
    assert sum(s["bytes"] for s in cut["states"]) == cut["state_bytes"] > full["state_bytes"]
