"""DeepSeek-V4 at Flash's widths on the GPU beside transformers: layers of each kind, every format of the cache."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from numerics import rel_rms
from tiny_v4 import YARN
from torch import Tensor

from hybridkv.cache import KVCacheManager
from hybridkv.checkpoint.in_memory import InMemory
from hybridkv.checkpoint.loader import Loader
from hybridkv.config import CacheConfig
from hybridkv.engine.engine import Engine
from hybridkv.models import FAMILIES, cache_schema
from hybridkv.models.config import ModelConfig

pytestmark = pytest.mark.gpu
VOCAB, TOKENS, TOPK = 4096, 700, 64
RATIOS = [0, 4, 128, 4]


@pytest.fixture(scope="module", autouse=True)
def full_products() -> Any:
    """Transformers' f32 products are f32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=VOCAB, num_hidden_layers=len(RATIOS), n_routed_experts=8, compress_ratios=RATIOS, index_topk=TOPK,
        num_hash_layers=1, rope_scaling=YARN, max_position_embeddings=1 << 20, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = DeepseekV4ForCausalLM(config).eval()
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("sinks", "position_bias")):
            p.data.normal_()
        elif name.endswith(("base", "e_score_correction_bias")):
            p.data.normal_(0, 0.3)
        elif name.endswith("tid2eid"):
            p.data.copy_(torch.rand(p.shape[0], 8, device="cuda").topk(p.shape[1]).indices)
        elif p.ndim >= 2 and p.is_floating_point():
            p.data.mul_(2.0)  # the start of 0.02 leaves every softmax flat
    return model


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def reference(theirs: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0].float()


@pytest.fixture(scope="module")
def their_error(theirs: Any, tokens: list[int], reference: Tensor) -> float:
    """What bfloat16 costs transformers itself."""
    with torch.inference_mode():
        half = copy.deepcopy(theirs).to(torch.bfloat16)
        got = half(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0].float()
    assert rel_rms(reference, got) > 1e-3, "bfloat16 was not used"
    return rel_rms(reference, got)


@pytest.fixture(scope="module")
def logits(theirs: Any, tokens: list[int]) -> Callable[..., Tensor]:
    """`logits(dtype, kv)`: ours, the first 640 tokens in chunks of 256 and the rest one by one through graphs."""

    @cache
    def run(dtype: torch.dtype, kv: str, index: str = "auto") -> Tensor:
        config = ModelConfig.from_dict(theirs.config.to_dict())
        loader = Loader(InMemory(theirs.state_dict()), torch.device("cuda"), dtype)
        model = FAMILIES[config.architecture].load(config, loader)
        loader.finish()
        schema = cache_schema(config, CacheConfig(kv_dtype=kv, index_dtype=index), dtype)
        engine = Engine(model, KVCacheManager(schema, schema.pool_pages(1, 1024), 1, 1024, "cuda"), step_tokens=512)
        out = engine.score(tokens, prefill=640, chunk=256)
        assert engine.runner.graphs is not None and engine.runner.graphs.captured, "no step was captured"
        return out

    return run


def test_float32_is_transformers(logits: Callable, reference: Tensor) -> None:
    got = logits(torch.float32, "f32")
    gaps = (got - reference).abs().amax(1) / reference.abs().max()
    # two index scores, or two experts, may be as good as equal: then the other one is picked, and later tokens see it
    assert (gaps < 1e-4).float().mean() > 0.95, f"{gaps.quantile(0.95):.1e}"
    assert torch.equal(got.argmax(1)[gaps < 1e-4], reference.argmax(1)[gaps < 1e-4])


@pytest.mark.parametrize(
    ("kv", "index", "worst"),
    [
        ("bf16", "auto", 1.3),  # rounding of the stored rows is as coarse as that of all other activations
        ("fp8", "bf16", 2.5),  # an entry has 2.7 % of error, a bf16 activation 0.2 %, averaged by the softmax
        ("fp8", "fp8", 2.5),
        ("fp8", "mxfp4", 3.0),  # other entries may be chosen
        ("fp8", "nvfp4", 3.0),
    ],
)
def test_narrow_formats_stay_near(
    kv: str, index: str, worst: float, their_error: float, logits: Callable, reference: Tensor
) -> None:
    """Errors are measured in those that transformers itself makes in bfloat16."""
    got = logits(torch.bfloat16, kv, index)
    assert got.isfinite().all()
    assert rel_rms(reference, got) < worst * their_error, f"{rel_rms(reference, got):.3f}, theirs {their_error:.3f}"
