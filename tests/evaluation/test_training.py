"""The small hybrid's training: a pass that is transformers' own, on turns as the chat template writes them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from hybridkv.evaluation.tasks import TASKS
from hybridkv.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "hybridkv" / "data" / "tiny-hybrid"


@pytest.fixture(scope="module", autouse=True)
def tools() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


def test_the_pass_is_transformers_own() -> None:
    import tiny_hybrid_model as tools

    transformers.logging.set_verbosity_error()
    model = tools.new_model(tools.model_config(vocab=300, hidden=128, mlp=96, end=0), seed=0)
    for p in model.parameters():  # norms that begin at zero would hide a mistake
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    run = tools.Pass(model, tools.torch_rule(), compiled=False)
    ids = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(2))
    assert tools.difference(model, run, ids) < 1e-4
    model.model.layers[0].linear_attn.dt_bias.data += 1  # both see it
    assert tools.difference(model, run, ids) < 1e-4


def test_turns_are_written_as_the_chat_template_writes_them() -> None:
    import tiny_hybrid_data as tools

    writer = tools.Writer(FOLDER / "tokenizer.json", "test")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for task in ("instruction", "two_questions", "tool_chain"):
        sample = writer.sample(task, 600)
        assert sample is not None
        asked = sample.questions[0]
        piece, _ = writer.first_turn(sample, asked.text)
        piece.add(writer.answer(asked, list(TASKS).index(task)))
        system = [{"role": "system", "content": sample.system}] if sample.system else []
        said = asked.answer_prefix + tools.answer_text(asked)
        turns = [
            *system,
            {"role": "user", "content": f"{sample.document}\n\n{asked.text}"},
            {"role": "assistant", "content": said},
        ]
        assert piece.ids == tokenizer.apply_chat_template(turns)["input_ids"]
        assert Tokenizer.from_folder(FOLDER).encode(sample.document) == writer.encode(sample.document)


def test_a_text_has_the_tokens_of_its_parts() -> None:
    """A document is read and cut before the question is known; the answer follows a prefix that is given."""
    import tiny_hybrid_data as tools

    writer = tools.Writer(FOLDER / "tokenizer.json", "test")
    for left, right in (("in Tamworth.", "\n\nWhich one?"), ("number is", " 12345."), ('{"id":', ' "K-1"}')):
        assert writer.encode(left) + writer.encode(right) == writer.encode(left + right)


def test_an_answer_in_another_order_is_right() -> None:
    import tiny_hybrid_data as tools

    words = [[5, 6], [7], [8, 9]]
    said = [{token} for token in (8, 9, 1, 5, 6, 1, 7, 2, 0)]
    assert tools.in_any_order(said, words) == [{5, 7, 8}, {9}, {1}, {5, 7}, {6}, {1}, {7}, {2}, {0}]
