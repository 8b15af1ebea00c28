"""A tokenizer for the tiny models: one token for each printable ASCII character, and two control tokens. 97 in all."""

import json
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _vocab() -> dict[str, int]:
    characters = iter("\u0120" + "".join(map(chr, range(0x21, 0x7F))))  # the first one is how byte level writes a space
    return {"<s>": BOS, "</s>": EOS, **{next(characters): i for i in range(97) if i not in (BOS, EOS)}}


def add_to_gguf(writer: GGUFWriter, template: str) -> None:
    """The same as keys of a GGUF file, but with the token "he" in the place of "~": a file has a merge at least."""
    vocab = {"he" if token == "~" else token: i for token, i in _vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([TokenType.CONTROL if i in (BOS, EOS) else TokenType.NORMAL for i in range(len(vocab))])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(template)


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    vocab = _vocab()
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
