"""What an evaluation may be asked: a mistake is told in one line, with what there is."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from eval_records import SETTINGS

from hybridkv.errors import HybridKVError
from hybridkv.evaluation.settings import ON_CPU, ON_GPU, EvalSettings, policy_name
from hybridkv.evaluation.tasks import RULER, TASKS

WRONG = [
    ({"tasks": ("niah_singl_1",)}, "no task 'niah_singl_1' (is niah_single_1 meant?)"),
    ({"tasks": ("zzz",)}, "choose from niah_single_1, "),
    ({"tasks": ()}, "no task"),
    ({"tasks": ("vt", "cwe", "vt")}, "task vt is named twice"),
    ({"policies": ("snapvk",)}, "is snapkv meant?"),
    ({"policies": ("full", "snapkv")}, "the full cache is always measured"),
    ({"policies": ("snapkv", "snapkv")}, "policy snapkv is named twice"),
    ({"policies": ("peak:pooling",)}, "'pooling' is not a setting"),
    ({"policies": ("peak:",)}, "not a setting"),
    ({"policies": ()}, "no policy"),
    ({"ratios": (0.5,)}, "above 1 and at most 1024, not 0.5"),
    ({"ratios": (1,)}, "the full cache is always measured"),
    ({"ratios": (float("nan"),)}, "not nan"),
    ({"ratios": (2, 2.0)}, "ratio 2 is named twice"),
    ({"ratios": (True,)}, "not True"),
    ({"ratios": ()}, "no ratio"),
    ({"lengths": (64,)}, "from 128 to 1048576, not 64"),
    ({"lengths": (1024.5,)}, "not 1024.5"),
    ({"modes": ("sen",)}, "is seen meant?"),
    ({"modes": ("seen", "seen")}, "mode seen is named twice"),
    ({"samples": 0}, "samples must be a whole number from 1"),
    ({"seed": -1}, "seed must be a whole number"),
    ({"divergence": -1}, "divergence must be"),
    ({"kv_dtypes": ("fp9",)}, "no kv_dtype 'fp9'"),
    ({"kv_dtypes": ("auto", "fp8")}, "auto stands for one of the others"),
    ({"state_dtypes": ("fp8",)}, "no state_dtype 'fp8'"),
    ({"dtype": "int8"}, "no dtype 'int8'"),
    ({"max_requests": 0}, "max_requests must be"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_mistake_is_one_line_that_says_what_there_is(change: dict, said: str) -> None:
    with pytest.raises(HybridKVError) as caught:
        replace(SETTINGS, **change).check()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_asked_where_nothing_is_said_is_good() -> None:
    for size in ({}, ON_CPU, ON_GPU):
        assert EvalSettings(**size).check().samples >= 1
    assert len(RULER) == 11 and set(RULER) < set(TASKS)
    assert ON_GPU["samples"] >= 100 and set(ON_GPU["tasks"]) == set(TASKS)


def test_settings_survive_json_and_their_digest_names_them() -> None:
    found = EvalSettings.from_json(json.loads(json.dumps(SETTINGS.as_json() | {"of_a_later_version": 1})))
    assert found == SETTINGS and found.digest() == SETTINGS.digest()
    assert replace(SETTINGS, ratios=(2.0, 4.0, 8.0)).digest() == SETTINGS.digest()
    assert replace(SETTINGS, memory="1GiB").digest() == SETTINGS.digest()
    others = [{"seed": 1}, {"ratios": (2, 4)}, {"policies": ("knorm",)}, {"exact": True}, {"samples": 3}]
    assert len({replace(SETTINGS, **other).digest() for other in others} | {SETTINGS.digest()}) == len(others) + 1


def test_the_name_in_a_policys_text() -> None:
    assert [policy_name(text) for text in ("peak", "peak:pooling=15:spread=all")] == ["peak", "peak"]


def test_settings_need_neither_torch_nor_numpy() -> None:
    code = "import sys, hybridkv.commands.evaluate; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
