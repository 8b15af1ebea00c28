"""The options that say what prompts leave behind for others."""

from __future__ import annotations

import pytest
from typer import BadParameter

from hybridkv.commands.reuse_options import ReuseOptions, TurnReuseOptions
from hybridkv.config import ReuseConfig
from hybridkv.errors import HybridKVError


def test_options_become_settings() -> None:
    assert ReuseOptions().config() == ReuseConfig()
    assert ReuseOptions(reuse=False).config() is None
    assert ReuseOptions(checkpoints="2GiB", checkpoint_every=4096).config() == ReuseConfig("2GiB", 4096)
    assert ReuseOptions(checkpoints="0").config() == ReuseConfig(0)
    assert ReuseOptions(checkpoint_dtype="bf16").config() == ReuseConfig(checkpoint_dtype="bf16")


def test_next_turns_are_read_ahead_where_there_are_some() -> None:
    assert TurnReuseOptions().config() == TurnReuseOptions(warm=True).config() == ReuseConfig(warm=True)
    assert TurnReuseOptions(warm=False, checkpoints="2GiB").config() == ReuseConfig("2GiB")
    assert TurnReuseOptions(reuse=False).config() is TurnReuseOptions(reuse=False, warm=False).config() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ReuseOptions(checkpoints="much"), "--checkpoints: checkpoints must be a size in bytes"),
        (ReuseOptions(checkpoint_every=-1), "--checkpoint-every: every must be"),
        (
            ReuseOptions(checkpoint_dtype="int8"),
            "--checkpoint-dtype: checkpoint_dtype must be auto or bf16, not 'int8'",
        ),
        (ReuseOptions(reuse=False, checkpoints="1GiB"), "--no-reuse"),
        (ReuseOptions(reuse=False, checkpoint_dtype="bf16"), "--checkpoint-dtype .* --no-reuse"),
        (TurnReuseOptions(reuse=False, warm=True), "--warm .* --no-reuse rules out"),
    ],
)
def test_what_makes_no_sense_is_refused(options: ReuseOptions, words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        options.config()


def test_rows_follow_from_bytes() -> None:
    MIB = 1 << 20
    assert ReuseConfig().rows(0, 10**10, cpu=False) == 0, "no state, no checkpoints"
    assert ReuseConfig().rows(147 * MIB, 80 << 30, cpu=False) == 16
    assert ReuseConfig().rows(147 * MIB, 24 << 30, cpu=False) == 8
    assert ReuseConfig().rows(MIB, 10**12, cpu=True) == 64 and ReuseConfig().rows(100 * MIB, 10**12, cpu=True) == 10
    assert ReuseConfig("1GiB").rows(100 * MIB, 1, cpu=False) == 10 and ReuseConfig(0).rows(MIB, 1, cpu=False) == 0
    with pytest.raises(HybridKVError, match="a checkpoint takes 104857600 bytes, '50MiB' were given"):
        ReuseConfig("50MiB").rows(100 * MIB, None, cpu=False)
