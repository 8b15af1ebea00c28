"""A tokenizer whose tokens are single bytes and some pairs, with whatever tags are asked for as tokens of their own."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hybridkv.text.tokenizer import Tokenizer

END = "</s>"
PAIRS = ('"}', '":', "</", "\n<", ">\n", "th", "}}")


def byte_tokenizer(*tags: str) -> Tokenizer:
    """The end token has id 0."""
    letters = {byte: letter for letter, byte in _alphabet().items()}
    vocab = {END: 0} | {letters[byte]: 1 + byte for byte in range(256)}
    merges = [tuple(letters[byte] for byte in pair.encode()) for pair in PAIRS]
    vocab |= {"".join(pair): 257 + i for i, pair in enumerate(merges)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return Tokenizer(backend, lambda: backend, eos_ids=[0], eos_id=0)


def _alphabet() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
