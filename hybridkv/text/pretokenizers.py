"""How the text is cut before byte-level BPE, by the name that a GGUF file gives it in `tokenizer.ggml.pre`.

A GGUF file carries the vocabulary and the merges but only a name for the cutting rule, so the rules are listed here.
A name that is not in the table is refused, because a wrong rule gives other token ids without any other sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from hybridkv.errors import UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL


@dataclass(frozen=True)
class Rule:
    """Cuts are made one after the other; what a pattern matches, and what lies between matches, become pieces."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the text is brought to Unicode form C first
    ignore_merges: bool = False  # a piece that is a token as it stands is not built from merges
    add_bos: bool = False  # when the file has no tokenizer.ggml.add_bos_token

    def normalizer(self) -> Any:
        """What is done to the text before it is cut; None: nothing."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> Any:
        """The cuts, and bytes as byte-level BPE spells them."""
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_gpt2 = Rule((_GPT2,))
_digits = Rule((r"\p{N}", _GPT2))  # every digit alone, then as GPT-2
_llama3 = Rule((_LLAMA3,), ignore_merges=True, add_bos=True)

RULES: dict[str, Rule] = {
    "gpt-2": _gpt2,
    "smollm": _digits,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": Rule((_QWEN2,), nfc=True),
    "qwen35": Rule((_QWEN35,), nfc=True),
}


def rule_for(name: str | None) -> Rule:
    """The rule of a name in `tokenizer.ggml.pre`; an unknown one is refused."""
    if name is None or name not in RULES:
        known = ", ".join(sorted(RULES))
        raise UnsupportedModel(
            f"the GGUF file's tokenizer.ggml.pre is {str(name)[:100]!r}; how such text is cut is known for: {known}. "
            "Use the model as a Hugging Face folder with its tokenizer.json, or give token ids instead of text."
        )
    return RULES[name]
