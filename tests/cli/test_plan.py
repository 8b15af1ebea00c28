"""`hybridkv plan` as a person uses it: any card, any form of weights, without torch, and what it suggests fits."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
from long_form import spread
from qwen_fp8 import fp8_model
from qwen_mxfp4 import mxfp4_model
from v4_released import released_model

from hybridkv import LLM
from hybridkv.cards import CARDS, CONTEXT, HEADROOM, PUBLISHED, find_card, plain
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
        ("6000 Ada", "RTX 6000 Ada"), ("tesla t4", "T4"), ("RTX4090 24GB", "RTX 4090"), ("L4 24GB", "L4"),
        ("RTX 3080 10GB", "RTX 3080"), ("3080 12gb", "RTX 3080 12GB"), ("a10080gb", "A100 80GB"),
    ],
)  # fmt: skip
def test_a_card_may_be_spelled_loosely(spelled: str, name: str) -> None:
    assert find_card(spelled).name == name


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("NVIDIA H100 PCIe", "H100 80GB"), ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"), ("NVIDIA A100 80GB PCIe", "A100 80GB"), ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200 96GB"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"), ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ],
)  # fmt: skip
def test_the_names_that_nvidia_smi_and_torch_print_are_known(printed: str, name: str) -> None:
    assert find_card(printed).name == name


@pytest.mark.parametrize(
    ("size", "mib"), [("24GB", 24576), ("24GiB", 24576), ("24 g", 24576), ("24576MiB", 24576), ("24564 MiB", 24564)]
)
def test_a_size_is_a_card(size: str, mib: int) -> None:
    assert (find_card(size).mib, find_card(size).capability) == (mib, (0, 0))


@pytest.mark.parametrize(
    ("typed", "said", "unsaid"),
    [
        ("NVIDIA A100-SXM-64GB", "near it are A100 40GB, A100 80GB;", "A10,"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "near it are RTX 4090;", "A"),
        ("24", "if it is a size, write 24GB", "near"),
        ("0GB", "has no memory", "near"),
        ("MI300X", "known are, for example", "near"),
    ],
)
def test_a_card_that_is_not_known_is_named_as_typed(
    typed: str, said: str, unsaid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A laptop's GPU has less memory than the card whose name it has; an A100 of another size is another card."""
    error = plan(capsys, "Qwen3-8B", "--card", typed, code=2)
    assert repr(typed) in error and said in error and unsaid not in error.split(";", 1)[1]


def test_cards_are_plausible_and_each_finds_itself() -> None:
    names = [card.name for card in CARDS]
    assert len(set(names)) == len(names) >= 40 and set(names) > PUBLISHED
    for card in CARDS:
        assert find_card(card.name) == card and find_card(plain(card.name)) == card
        assert card.nominal == (card.name not in PUBLISHED)
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
    assert by_kv["bf16"]["longest_context"] > 65000 and by_kv["fp8"]["longest_context"] > 120000
    assert (by_kv["bf16"]["most_requests"], by_kv["fp8"]["most_requests"]) == (1, 3)
    for choice in found["choices"]:
        parts = ("cache", "workspace", "checkpoint", "staging")
        assert choice["total_bytes"] == found["weights_bytes"] + sum(choice[f"{part}_bytes"] for part in parts)
        assert choice["checkpoint_bytes"] == choice["checkpoints"] * found["checkpoint_bytes_each"]
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
    "Qwen3.5-9B --card T4 --weights q4_k --context 8k",
    "Qwen3.5-9B --card 3060 --weights fp8 --context 8k",
    "Qwen3.5-9B --card 3060 --weight-dtype fp8 --context 8k",
    "Llama-3.1-8B --card 3090 --kv-dtype fp8 --context 8k",
    "Qwen3.5-27B --card 3090 --kv-dtype fp8 --context 64k --requests 2",
    "Qwen3.5-27B --card 24564MiB --context 32k",
    "Qwen3.5-35B-A3B --card 4090 --weights q4_k --context 8k",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", DO_NOT_FIT)
def test_every_suggestion_fits_when_it_is_run_as_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    out = " ".join(plan(capsys, *words).split())
    found = numbers(capsys, *words)
    refused = "fp8" in words and "--kv-dtype" in words
    assert found["fits"] is False and ("Not possible" if refused else "Does not fit") in out and "  0 0 0" not in out
    if not found["suggestions"]:
        assert "Nothing near it fits." in out and words[0].startswith("DeepSeek")  # no card here holds 530 GiB
    for suggestion in found["suggestions"]:
        assert suggestion in out
        program, _, rest = suggestion.partition(" plan ")
        assert program.endswith("hybridkv")
        again = numbers(capsys, *shlex.split(rest))
        assert again["fits"] is True and again["model"] == found["model"]
        assert "capability" not in (again["weights_why"] or ""), "a form that the card has no kernels for"
        assert not ("--kv-dtype" in rest and again["choices"][0]["refused"])


def test_forms_that_the_engine_does_not_hold_are_judged_as_it_holds_them(capsys: pytest.CaptureFixture[str]) -> None:
    """And what they would take is said."""
    for model, form, said in (
        ("Qwen3.5-35B-A3B", "q4_k", "the engine does not hold this model's experts in Q4_K yet"),
        ("Qwen3.5-35B-A3B", "mxfp4", "the engine does not hold this model's experts in mxfp4 yet"),
        ("DeepSeek-V4-Flash", "mxfp4", "the engine does not hold DeepSeek-V4 in mxfp4 yet"),
    ):
        plain = numbers(capsys, model, "--context", "8k")["weights_bytes"]
        found = numbers(capsys, model, "--weights", form, "--context", "8k")
        assert found["weights_asked_bytes"] < 0.4 * plain and 0.9 * plain < found["weights_bytes"] <= plain
        assert found["weights_why"] == said and len(found["notes"]) == 1 and said[1:] in found["notes"][0]
    assert not numbers(capsys, "Qwen3.5-35B-A3B", "--weights", "fp8", "--context", "8k")["notes"]


PACKED_WHY = "packed weights need compute capability 8.0, the T4 has 7.5"
FP8_WHY = "FP8 weights need compute capability 9.0, the RTX 4090 has 8.9"
KV_WHY = "KV fp8 needs compute capability 8.9, the RTX 3090 has 8.6"


@pytest.mark.parametrize(
    ("flags", "card", "why", "fits"),
    [
        (["Qwen3.5-9B", "--weights", "q4_k"], "T4", PACKED_WHY, False),
        (["Qwen3-1.7B", "--weights", "q8_0"], "T4", PACKED_WHY, True),
        (["Qwen3-8B", "--weights", "fp8"], "4090", FP8_WHY, True),
        (["Qwen3-8B", "--weight-dtype", "fp8"], "4090", FP8_WHY, True),
        (["Qwen3-14B", "--weights", "fp8"], "4090", FP8_WHY, False),
    ],
)
def test_weights_without_kernels_on_a_card_are_judged_in_bf16(
    flags: list[str], card: str, why: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All numbers are those of a plan in bf16, and the verdict says why in its own sentence."""
    common = ("--card", card, "--context", "8k")
    found, plain = numbers(capsys, *flags, *common), numbers(capsys, flags[0], *common)
    assert found["weights_why"] == why and found["weights_asked_bytes"] < found["weights_bytes"]
    same = ("weights_bytes", "memory_bytes", "fits", "choices", "buys")
    assert {name: found[name] for name in same} == {name: plain[name] for name in same} and found["fits"] is fits
    out = " ".join(plan(capsys, *flags, *common).split())
    verdict = re.search(r"(Fits|Does not fit)[^:]*: [^()]*\(([^()]*)\)", out)
    assert verdict and (verdict[1] == "Fits") is fits and verdict[2] == why and "weights bf16" in out


def test_a_gguf_file_is_not_packed_on_a_card_without_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_gguf.write_gguf_llama(tiny.build("llama3_rope"), tmp_path / "m.gguf", q8=True)
    packed, bare = (numbers(capsys, path, "--context", "64", "--card", card) for card in ("A10", "T4"))
    plain = numbers(capsys, path, "--context", "64", "--card", "T4", "--weight-dtype", "plain")
    assert packed["dtype"] == "packed" and packed["weights_why"] is None and bare["weights_why"] == PACKED_WHY
    assert bare["weights_bytes"] == plain["weights_bytes"] > packed["weights_bytes"] == bare["weights_asked_bytes"]


@pytest.mark.parametrize("make", [fp8_model, mxfp4_model, released_model], ids=["qwen", "mxfp4", "deepseek"])
def test_codes_of_a_folder_are_kept_on_a_gpu(
    make: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `auto` keeps them: what is planned is what a model in codes takes. Not on a CPU, and not on an old card."""
    make(tmp_path)
    there = ("--context", "64")
    codes, plain, cpu, old, by_name = (
        numbers(capsys, tmp_path, *there, *flags)
        for flags in ((), ("--weight-dtype", "plain"), ("--device", "cpu"), ("--card", "T4"), ("--weights", "released"))
    )
    assert codes["dtype"] == by_name["dtype"] == "released" != plain["dtype"] == cpu["dtype"] == "bfloat16"
    llm = LLM(tmp_path, "cpu", "bfloat16", max_requests=1, max_context=64, weight_dtype="released", reuse=None)
    assert codes["weights_bytes"] == by_name["weights_bytes"] < 0.8 * plain["weights_bytes"]
    assert abs(llm.model.nbytes - codes["weights_bytes"]) < 0.2 * codes["weights_bytes"]
    assert old["weights_bytes"] == plain["weights_bytes"] and old["weights_asked_bytes"] == codes["weights_bytes"]
    assert old["weights_why"] == PACKED_WHY


def test_a_model_that_is_released_in_codes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    (note,) = numbers(capsys, "DeepSeek-V4-Flash", "--context", "8k")["notes"]
    assert "in FP8 and FP4, the weights are 145.3 GiB (--weights released)" in note
    assert not numbers(capsys, "Qwen3.5-27B", "--context", "8k")["notes"]


def test_kv_fp8_is_refused_where_the_engine_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    """`devices.check_fp8_cache` raises on such a card."""
    common = ("Llama-3.1-8B", "--card", "3090", "--context", "8k")
    asked = numbers(capsys, *common, "--kv-dtype", "fp8")
    [choice] = asked["choices"]
    assert asked["fits"] is choice["fits"] is False and choice["refused"] == KV_WHY and not asked["buys"]
    assert choice["longest_context"] == choice["most_requests"] == 0
    out = " ".join(plan(capsys, *common, "--kv-dtype", "fp8").split())
    assert f"Not possible on RTX 3090: {KV_WHY}." in out and "Fits" not in out
    kept = [words for words in map(shlex.split, asked["suggestions"]) if "RTX 3090" in words]
    assert kept and all(words[words.index("--kv-dtype") + 1] == "bf16" for words in kept)
    every = numbers(capsys, *common)
    by_kv = {found["kv_dtype"]: found for found in every["choices"]}
    assert (
        every["fits"] is True and by_kv["fp8"] == choice and by_kv["bf16"]["fits"] and every["notes"] == [KV_WHY + "."]
    )
    assert {buy["kv_dtype"] for buy in every["buys"]} == {"f32", "bf16"}
    assert "refused" in plan(capsys, *common)
    for card in ("4090", "24GB"):  # one that has FP8, and one of which it is not known
        assert numbers(capsys, "Llama-3.1-8B", "--card", card, "--kv-dtype", "fp8", "--context", "8k")["fits"] is True


def test_what_cards_can_do_is_what_the_kernels_ask_for() -> None:
    """The list is without torch; these are the kernels' own conditions."""
    from hybridkv.cards import FP8_KV, FP8_WEIGHTS, PACKED_WEIGHTS
    from hybridkv.kernels import backend
    from hybridkv.kernels.formats.kv_format import KV_FORMATS
    from hybridkv.kernels.linear import fp8, packed

    assert KV_FORMATS["fp8"].capability == FP8_KV
    for file, keeps, least in ((backend, fp8.keeps_codes, FP8_WEIGHTS), (packed, packed.keeps_packed, PACKED_WEIGHTS)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(file, "HAS_TRITON", True)
            patched.setattr(file, "COMPILED", True)
            for capability in sorted({card.capability for card in CARDS}):
                patched.setattr(file, "capability", lambda device, found=capability: found)
                assert keeps(torch.device("cuda", 0), torch.bfloat16) == (capability >= least)


WIDE = [
    "", "--card 4090", "--weights fp8 --card H100", "--weight-dtype fp8",
    "--weight-dtype fp8 --device cpu --memory 64GiB", "--requests 64 --budget 512",
]  # fmt: skip


@spread("model, arguments", ("Qwen3.5-27B", "DeepSeek-V4-Pro", "SmolLM2-135M-Instruct"), WIDE)
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


def test_no_number_is_cut_in_a_narrow_window(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, card in (("80", "9999GB"), ("60", "4090"), ("40", "T4")):
        monkeypatch.setenv("COLUMNS", columns)
        out = plan(capsys, "Qwen3.5-9B", "--card", card, "--weights", "q8_0")
        assert "…" not in out and "entries" in out and "workspace" in out


def test_names_of_models_are_known_as_hubs_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, "meta-llama/Meta-Llama-3-8B-Instruct")
    assert (found["model"], found["context"]) == ("Llama-3-8B", 8192)
    assert numbers(capsys, "Qwen/Qwen3-Next-80B-A3B-Thinking", "--context", "8k")["model"] == "Qwen3-Next-80B-A3B"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Qwen3.5-28B"], "did you mean Qwen3.5-27B"),
        (["Qwen/Qwen3-8B-FP8"], "did you mean Qwen3-8B?"),
        (["Qwen3.5-27B-Q4_K_M.gguf"], "did you mean Qwen3.5-27B?"),
        (["Qwen3-4B-Instruct-2507"], "did you mean Qwen3-4B?"),
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
        (["Qwen3.5-9B", "--weights", "mxfp4"], "a form of experts, and Qwen3.5-9B has none"),
        (["Qwen3.5-9B", "--html", "--json"], "give one of them"),
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


def test_checkpoints_in_bf16_take_half_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 48 layers of 48 x 128 x 128 numbers and of a convolution of 3 x 10,240 in bf16."""
    words = ("Qwen3.5-27B", "--card", "H200", "--context", "32k", "--checkpoints", "2GiB")
    found, wide = numbers(capsys, *words, "--checkpoint-dtype", "bf16"), numbers(capsys, *words)
    each = 48 * (48 * 128 * 128 * 2 + 3 * 10_240 * 2)
    assert found["checkpoint_bytes_each"] == each and wide["checkpoint_bytes_each"] == each + 48 * 48 * 128 * 128 * 2
    assert [(c["checkpoints"], c["checkpoint_bytes"]) for c in found["choices"]] == [(27, 27 * each)] * 3
    assert [c["checkpoints"] for c in wide["choices"]] == [13] * 3 and found["notes"] == wide["notes"]
    for a, b in zip(found["choices"], wide["choices"], strict=True):
        assert a["total_bytes"] - b["total_bytes"] == a["checkpoint_bytes"] - b["checkpoint_bytes"]
        assert a["state_bytes"] == b["state_bytes"], "requests compute in f32"
    out = " ".join(plan(capsys, *words, "--checkpoint-dtype", "bf16").split())
    assert "checkpoints x 27 2.0 GiB" in out and "Checkpoints: 27 x 74.8 MiB in bf16" in out
    ranks = numbers(capsys, *words, "--checkpoint-dtype", "bf16", "--tp", 2)
    assert ranks["checkpoint_bytes_each"] == each // 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("Qwen3-8B",), "the model has no Gated DeltaNet state"),
        (("DeepSeek-V4-Flash",), "the model has no Gated DeltaNet state"),
        (("Qwen3.5-27B", "--state-dtype", "bf16"), "its recurrent state is stored in bf16 already"),
    ],
)
def test_checkpoints_that_cannot_be_narrower_are_told(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (*words, "--context", "8k", "--kv-dtype", "bf16")
    found, plain = numbers(capsys, *asked, "--checkpoint-dtype", "bf16"), numbers(capsys, *asked)
    note = f"checkpoint_dtype='bf16' changes nothing: {why}."
    assert found["notes"] == [*plain["notes"], note] and note not in plain["notes"]
    assert found["choices"] == plain["choices"]


def test_exact_mode_has_no_rounded_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    error = plan(capsys, "Qwen3.5-27B", "--exact", "--checkpoint-dtype", "bf16", code=2)
    assert "leave out checkpoint_dtype='bf16', or exact" in " ".join(error.split())


def test_it_says_what_reuse_takes_and_what_the_host_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of the 27B model, worked out by hand: 64 KiB a token in bf16, 32.5 in fp8, 146.8 MiB a state."""
    words = ("Qwen3.5-27B", "--card", "H200", "--context", 80000, "--host-cache", "16GiB")
    found, out = numbers(capsys, *words), " ".join(plan(capsys, *words).split())
    assert [choice["checkpoints"] for choice in found["choices"]] == [16] * 3
    assert found["checkpoint_bytes_each"] / 2**20 == pytest.approx(146.8, abs=0.05)
    assert found["staging_bytes"] == 128 << 20 and found["host_cache_bytes"] == 16 << 30
    holds = {(k["kv_dtype"], k["budget"]): k["conversations"] for k in found["host_holds"]}
    assert (holds["bf16", None], holds["fp8", None], holds["fp8", 2048]) == (3, 6, 77)
    assert "16.0 GiB on the host hold 3 conversations of 80000 tokens (bf16), 6 (fp8), or 77 of 2048 kept" in out
    assert "Checkpoints: 16 x 146.8 MiB" in out and "reuse staging 128.0 MiB" in out
    off = numbers(capsys, *words[:5], "--no-reuse", "--host-cache", "0")
    [bare, full] = [next(c for c in each["choices"] if c["kv_dtype"] == "bf16") for each in (off, found)]
    assert bare["checkpoints"] == bare["staging_bytes"] == 0 and not any(k["conversations"] for k in off["host_holds"])
    assert full["total_bytes"] - bare["total_bytes"] == full["checkpoint_bytes"] + full["staging_bytes"]
    error = plan(capsys, *words, "--no-reuse", "--checkpoints", "1GiB", code=2)
    assert "--no-reuse rules out" in error
    assert "host_cache" in plan(capsys, *words[:5], "--host-cache", "much", code=2)
