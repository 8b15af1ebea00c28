"""Makes the small hybrid's tokenizer from generated samples and the project's documents.

    python tools/make_tiny_tokenizer.py hybridkv/data/tiny-hybrid

Byte-level BPE of 2048 tokens. A digit is a token of its own, a line end as well, and a space belongs to the word after
it; so a text that is cut before a space or a line end has the same tokens as its two parts. The same inputs give the
same file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tiny_hybrid_data import texts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 2048
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = r"\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def documents() -> Iterator[str]:
    """The project's prose."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield path.read_text(encoding="utf-8")
    yield (ROOT / "hybridkv/data/petrel_log.txt").read_text(encoding="utf-8")


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json into the folder that is given."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts("tokenizer", 1500, 40), *documents()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    text = "\n".join(texts("check", 300, 4))
    a_token = len(text) / len(tokenizer.encode(text).ids)
    print(f"{tokenizer.get_vocab_size()} tokens, {a_token:.2f} characters each in texts that it was not made from")


if __name__ == "__main__":
    main()
