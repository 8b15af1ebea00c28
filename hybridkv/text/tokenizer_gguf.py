"""The tokenizer in a GGUF file's metadata (`tokenizer.ggml.*`): byte-level BPE ("gpt2"), SentencePiece BPE ("llama").

Every list, id and merge is checked before the `tokenizers` package sees it. `pretokenizers.py` has the rules that
divide the text into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from hybridkv.errors import ModelFileError, UnsupportedModel
from hybridkv.text.pretokenizers import rule_for
from hybridkv.text.tokenizer import Tokenizer, check_vocabulary, guarded

MAX_PIECE_CHARS = 256  # of a SentencePiece token: every division in two is tried; SentencePiece's own limit is 16
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

# Control tokens that end a turn or a text, whatever ids the file declares.
END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
    | {"<end_of_turn>", "</s>", "<EOT>", "<eos>", "<｜end▁of▁sentence｜>"}
)

_WHERE = "GGUF tokenizer"


def read_metadata(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file's keys; None: the file says that it has none."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"the GGUF file's tokenizer.ggml.model is {str(kind)[:100]!r}; "
            "'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) are read. "
            "Give token ids instead of text, or use the model as a Hugging Face folder."
        )
    tokens = _strings(metadata, "tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    check_vocabulary(vocab, len(tokens), _WHERE)
    if len(vocab) != len(tokens):
        second = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelFileError(
            f"{_WHERE}: token {tokens[second][:100]!r} is there twice, as {second} and {vocab[tokens[second]]}"
        )

    ids = {name: _gguf_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
    if kind == "llama":  # SentencePiece's own numbers, where the file leaves them out
        for name, token, default in (("unknown", "<unk>", 0), ("bos", "<s>", 1), ("eos", "</s>", 2)):
            if ids[name] is None and vocab.get(token) == default:
                ids[name] = default
    types = _gguf_types(metadata, vocab, {i for i in ids.values() if i is not None})
    control = {i for i, t in enumerate(types) if t in (CONTROL, UNKNOWN)}
    build, add_bos = (_byte_bpe if kind == "gpt2" else _sentencepiece_bpe)(metadata, vocab, types, ids["unknown"])

    mark = "\0"  # begins no token: control tokens get names that no text can spell
    while any(token.startswith(mark) for token in tokens):
        mark += "\0"

    def finished(special: bool) -> Backend:
        added = control if special else set()
        added = added | {i for i, t in enumerate(types) if t == USER_DEFINED}
        with guarded(f"{_WHERE} cannot be built", ModelFileError):
            backend = build({} if special else {tokens[i]: f"{mark}{i}" for i in control})
            backend.add_tokens(
                [AddedToken(tokens[i], special=i in control, normalized=False) for i in sorted(added) if tokens[i]]
            )
        return backend

    eos_ids = {i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None}
    eos_ids |= {i for i in control if tokens[i] in END_OF_TURN}
    bos, eos = ids["bos"], ids["eos"]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        finished(special=True),
        lambda: finished(special=False),
        before=[bos] if bos is not None and _flag(metadata, "add_bos_token", add_bos) else [],
        after=[eos] if eos is not None and _flag(metadata, "add_eos_token", False) else [],
        bos_id=bos,
        eos_ids=sorted(eos_ids),
        eos_id=eos,
        chat_template=template if isinstance(template, str) else None,
    )


Build = Callable[[dict[str, str]], Backend]  # new names for some tokens -> a tokenizer of the `tokenizers` package


def _byte_bpe(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], unknown: int | None
) -> tuple[Build, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    rule = rule_for(None if name is None else str(name))
    merges: list[tuple[str, str]] = []
    for line in _strings(metadata, "merges"):
        left, _, right = line.partition(" ")
        if not left or not right or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(
                f"{_WHERE}: merge {len(merges)} is {line[:100]!r}, which names a token that is not in the vocabulary"
            )
        merges.append((left, right))

    def build(renamed: dict[str, str]) -> Backend:
        kept = merges
        if renamed:
            kept = [(a, b) for a, b in merges if renamed.keys().isdisjoint((a, b, a + b))]
        names = {renamed.get(token, token): i for token, i in vocab.items()}
        backend = Backend(models.BPE(vocab=names, merges=kept, ignore_merges=rule.ignore_merges))
        backend.normalizer = rule.normalizer()
        backend.pre_tokenizer = rule.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend

    return build, rule.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], unknown: int | None
) -> tuple[Build, bool]:
    """SentencePiece has scores where BPE has merges: the pair whose joined token scores best is merged first.

    Every way to divide a token in two becomes a merge. The best score comes first; equal ones are in the order of
    Hugging Face's converter. (SentencePiece takes the leftmost of equal ones, so it may divide runs such as "aaaaa"
    otherwise.)
    """
    scores = _numbers(metadata, "scores", len(vocab))
    tokens = list(vocab)
    ordinary = {token for token, i in vocab.items() if types[i] == NORMAL}
    if any(len(token) > MAX_PIECE_CHARS for token in ordinary):
        raise ModelFileError(f"{_WHERE}: a SentencePiece token has more than {MAX_PIECE_CHARS} characters")
    missing = [f"<0x{b:02X}>" for b in range(256) if f"<0x{b:02X}>" not in vocab]
    if missing and unknown is None:
        raise ModelFileError(
            f"{_WHERE}: byte token {missing[0]} is missing and there is no unknown token to stand for it"
        )
    ranked: list[tuple[float, int, int, int, int, str, str]] = []
    for token in ordinary:
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in ordinary and right in ordinary:
                score = scores[vocab[token]]
                ranked.append((-score, -len(left), -len(right), vocab[token], vocab[left], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    prefix = _flag(metadata, "add_space_prefix", True)

    def build(renamed: dict[str, str]) -> Backend:
        names = {renamed.get(token, token): i for token, i in vocab.items()}
        unk = None if unknown is None else renamed.get(tokens[unknown], tokens[unknown])
        backend = Backend(models.BPE(vocab=names, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
        space = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefix else [space])
        join = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*join, decoders.Strip(" ", 1, 0)] if prefix else join)
        return backend

    return build, True


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ModelFileError(f"{_WHERE}: tokenizer.ggml.{name} is missing")
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ModelFileError(f"{_WHERE}: tokenizer.ggml.{name} must be a list of strings")
    return list(value)


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> list[float]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise ModelFileError(f"{_WHERE}: tokenizer.ggml.{name} must be a list of {count} numbers")
    numbers = (value.tolist() if hasattr(value, "tolist") else list(value)) if len(value) == count else []
    if len(value) != count or not all(isinstance(v, (int, float)) and v == v for v in numbers):
        raise ModelFileError(
            f"{_WHERE}: tokenizer.ggml.{name} has {len(value)} entries for {count} tokens, or not all are numbers"
        )
    return numbers


def _gguf_types(metadata: Mapping[str, Any], vocab: dict[str, int], declared: set[int]) -> list[int]:
    """The type of each token. `declared`: the control tokens of a file that gives no types."""
    count = len(vocab)
    if metadata.get("tokenizer.ggml.token_type") is None:
        types = [CONTROL if i in declared else NORMAL for i in range(count)]
    else:
        found = _numbers(metadata, "token_type", count)
        for i, kind in enumerate(found):
            if isinstance(kind, float) and not kind.is_integer():
                raise ModelFileError(f"{_WHERE}: tokenizer.ggml.token_type of token {i} is {kind}, not a whole number")
        types = [int(kind) for kind in found]
    for name in END_OF_TURN:
        i = vocab.get(name)
        if i is not None and _is_mistyped(name, types[i]):
            types[i] = CONTROL
    return types


def _is_mistyped(name: str, kind: int) -> bool:
    """Whether a token that ends a turn was not written as a control token, as some converters do. llama.cpp overrides
    the type too. Left as they are: ordinary tokens whose name may also be a piece of text, such as </s>.
    """
    return kind == USER_DEFINED or (kind == NORMAL and name.startswith(("<|", "<｜")))


def _gguf_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value: Any = metadata.get(key)
    if hasattr(value, "item"):  # a numpy number
        value = value.item()
    if value is None or value in (-1, 2**32 - 1):  # both are written for "none"
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise ModelFileError(f"{_WHERE}: {key} is {str(value)[:100]}, outside the vocabulary of {count} tokens")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}")
    return default if value is None else bool(value)
