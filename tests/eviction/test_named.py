"""Policies as texts: every setting by its name, mistakes with what there is, and what `auto` stands for."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import tiny

from engine.driving import run
from hybridkv.config import POLICY_NAMES, UNEVEN_POLICIES, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.eviction import POLICIES, Ada, All, Pyramid, SnapKV
from hybridkv.eviction.named import AUTO, SPREADS, find_policy, resolved_name
from hybridkv.eviction.policies import Heads, KeyDiff, Leverage, Peak, Random, Streaming
from hybridkv.eviction.sizes import max_held_tokens
from hybridkv.eviction.spread import Spread

SAY = SamplingParams(max_tokens=4, ignore_eos=True)
PEAK, HEADS = POLICIES["peak"](), POLICIES["heads"]()
assert isinstance(PEAK, All) and isinstance(HEADS, All)


@pytest.mark.parametrize(
    ("text", "policy"),
    (
        ("peak", PEAK),
        ("peak:pooling=31", replace(PEAK, policy=Peak(pooling=31))),
        ("peak:values=no:pooling=1", replace(PEAK, policy=Peak(pooling=1, values=False))),
        ("peak:values=true", PEAK),
        ("peak:ahead=15:behind=0:decay=1:strength=2.5", replace(PEAK, policy=Peak(15, 0, 1.0, 2.5))),
        ("peak:heads=0:layers=1", replace(PEAK, policy=Peak(heads=0.0), layers=1.0)),
        ("peak:spread=even", Peak()),
        ("heads:heads=2:pooling=1", replace(HEADS, policy=Heads(1, 2.0))),
        ("heads:layers=0", replace(HEADS, layers=0.0)),
        ("heads:spread=all:layers=0.25", All(Heads(), layers=0.25)),
        ("peak:spread=ada:floor=0.5", Ada(Peak(), floor=0.5)),
        ("peak:floor=0.5:spread=all", All(Peak(), floor=0.5)),  # whichever comes first
        ("snapkv", SnapKV("avg", 5)),
        ("snapkv:pooling=none", SnapKV("none")),
        ("snapkv:pooling=max:kernel=7:spread=layer", Ada(SnapKV("max", 7))),
        ("snapkv:spread=pyramid:steepness=4", Pyramid(SnapKV(), steepness=4.0)),
        ("keydiff:pooling=15", KeyDiff(15)),
        ("leverage:values=yes", Leverage(values=True)),
        ("streaming:sinks=8", Streaming(8)),
        ("random:seed=7", Random(7)),
    ),
)
def test_a_text_is_the_policy_with_these_settings(text: str, policy: object) -> None:
    assert find_policy(text) == policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_field_is_a_setting(name: str) -> None:
    other = {int: "3", float: "0.375", str: "max"}  # a good value of each kind that is nobody's default
    policy = POLICIES[name]()
    parts = [(policy.policy, "")] if isinstance(policy, Spread) else [(policy, "")]
    parts += [(spread(Peak()), f":spread={how}") for how, spread in SPREADS.items() if how != "even"]
    for part, before in parts:
        for f in fields(part):
            if f.name != "policy":
                was = getattr(part, f.name)
                value = "2" if f.name == "steepness" else other.get(type(was), "no" if was else "yes")
                found = find_policy(f"{name}{before}:{f.name}={value}")
                holder = found if hasattr(found, f.name) else found.policy  # type: ignore[attr-defined]
                is_now = getattr(holder, f.name)
                want = value == "yes" if isinstance(was, bool) else type(was)(value)
                assert is_now == want != was


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("peek", r"'peek' is unknown \(did you mean peak\?\); choose auto, peak, "),
        ("zzz", r"'zzz' is unknown; choose auto, peak, "),
        ("expected", "'expected' is unknown"),
        ("", "'' is unknown"),
        (
            "peak:poling=3",
            r"no setting 'poling' \(did you mean pooling\?\); it has ahead, .*pooling, .*, spread, floor, layers",
        ),
        ("knorm:x=1", "no setting 'x'; it has spread"),
        ("knorm:floor=0.1", "no setting 'floor'"),  # even: nothing is shared
        ("peak:pooling", "settings are written name:setting=value, not 'pooling'"),
        ("peak:", "settings are written name:setting=value, not ''"),
        ("peak:pooling=", "pooling takes a whole number, not ''"),
        ("peak:pooling=wide", "pooling takes a whole number, not 'wide'"),
        ("peak:pooling=4", "pooling must be an odd number of neighbours from 1 .* not 4"),
        ("peak:pooling=129", "from 1 .none. to 127, not 129"),
        ("peak:pooling=3:pooling=5", "pooling is there twice"),
        ("peak:spread=all:spread=even", "spread is there twice"),
        ("peak:values=perhaps", "values takes yes or no, not 'perhaps'"),
        ("peak:floor=much", "floor takes a number, not 'much'"),
        ("peak:floor=1.5", "floor must be a part of the even share, from 0 to 1, not 1.5"),
        ("peak:floor=nan", "from 0 to 1, not nan"),
        ("peak:spread=wide", "spread is even, layer, ada, all, pyramid, not 'wide'"),
        ("peak:spread=pyramid:steepness=0", "steepness must be 1 .even. or more, not 0"),
        ("peak:layers=1.5", "layers must be a part of the even share, from 0 to 1, not 1.5"),
        ("peak:layers=-0.1", "layers must be .* from 0 to 1, not -0.1"),
        ("heads:layers=nan", "from 0 to 1, not nan"),
        ("peak:spread=pyramid:layers=0.5", "no setting 'layers'"),  # nothing is shared there
        ("peak:ahead=-1", "may spread to 126 entries, not to -1 ahead and "),
        ("peak:behind=-1", "may spread to 126 entries, not to .* ahead and -1 behind"),
        ("peak:ahead=127:behind=0", "not to 127 ahead and "),
        ("peak:ahead=1e2", "ahead takes a whole number, not '1e2'"),
        ("peak:decay=0", "decay must be above 0 and at most 1 .* not 0.0"),
        ("peak:decay=1.01", "decay must be .* not 1.01"),
        ("peak:decay=nan", "decay must be .* not nan"),
        ("peak:strength=-1", "strength must be from 0 .* to 1e6, not -1.0"),
        ("peak:strength=inf", "strength must be from 0 .* to 1e6, not inf"),
        ("peak:strength=nan", "strength must be .* not nan"),
        ("peak:heads=-1", "heads must be a power from 0 .* to 8, not -1.0"),
        ("heads:heads=9", "heads must be a power from 0 .* to 8, not 9.0"),
        ("heads:heads=nan", "heads must be .* not nan"),
        ("heads:pooling=2", "pooling must be an odd number of neighbours"),
        ("snapkv:pooling=5", "pooling must be none, avg or max"),
        ("peak:policy=knorm", "no setting 'policy'"),
        ("x" * 500, "'x{80}' is unknown"),
    ),
)
def test_a_mistake_says_what_there_is(text: str, says: str) -> None:
    with pytest.raises(HybridKVError, match=says):
        find_policy(text)


def test_an_unknown_name_is_refused_with_the_settings_already() -> None:
    for make in (EvictionConfig, CacheConfig):
        with pytest.raises(HybridKVError, match=r"'peek' is unknown \(did you mean peak\?\)"):
            make(budget=64, policy="peek:pooling=3")
    assert set(POLICY_NAMES) == {"auto", *POLICIES}


def test_auto_stands_for_one_policy_where_the_question_was_read_and_another_where_not() -> None:
    assert find_policy("auto", seen=True) == find_policy(AUTO["seen"])
    assert find_policy("auto", seen=False) == find_policy(AUTO["unseen"])
    assert find_policy("auto:pooling=31", seen=True) == find_policy(f"{AUTO['seen']}:pooling=31")
    assert resolved_name("auto:pooling=31", True) == f"{AUTO['seen']}:pooling=31"
    assert resolved_name("auto", False) == AUTO["unseen"]
    assert resolved_name("snapkv:pooling=max", False) == "snapkv:pooling=max"
    assert resolved_name(Pyramid(SnapKV()), True) == "Pyramid(SnapKV)"


@pytest.mark.parametrize("scope", ("layer", "global"))
def test_where_streams_have_one_list_a_name_alone_means_even_budgets(scope: str, evicting: Callable) -> None:
    assert find_policy("auto", scope=scope) == Peak()
    assert find_policy("peak:pooling=31", scope=scope) == Peak(pooling=31)
    for text in ("peak:spread=layer", "peak:floor=0.5", "snapkv:spread=all"):  # asked for by name: told, not dropped
        with pytest.raises(HybridKVError, match=f"scope '{scope}' keeps one list .* use scope='head'"):
            evicting("llama", budget=48, policy=text, scope=scope)
    engine = evicting("llama", budget=48, scope=scope)
    request = engine.add(tiny.token_ids(100), SAY)
    run(engine)
    assert request.error is None and (request.evictions[100].counts() == 48).all()


def test_settings_that_one_of_autos_policies_lacks_are_told_before_a_prompt_is_read(evicting: Callable) -> None:
    """A bounded prompt is cut by both: a setting that only one has would fail half way."""
    with pytest.raises(HybridKVError, match=r"no setting 'values'"):
        evicting("llama", budget=48, bounded=True, policy="auto:values=no")
    assert find_policy("auto:values=no") == find_policy(f"{AUTO['seen']}:values=no")


@pytest.mark.parametrize(
    ("policy", "name"),
    (("auto", AUTO["seen"]), ("snapkv:pooling=none", "snapkv:pooling=none"), (Ada(SnapKV()), "Ada(SnapKV)")),
    ids=("auto", "text", "object"),
)
def test_a_request_says_by_which_policy_it_was_cut(policy: object, name: str, evicting: Callable) -> None:
    engine = evicting("llama", budget=48, policy=policy)
    long, short = engine.add(tiny.token_ids(100), SAY, hold=True), engine.add(tiny.token_ids(30), SAY)
    run(engine)
    assert long.policy == name and short.policy is None
    assert engine.fork_held(long).policy == name
    later = engine.add(long.tokens + [1, 2], SAY, after=long)
    run(engine)
    assert later.cached_tokens and later.policy == name, "the turn goes on in a cache that was cut"


def test_a_bounded_prompt_is_cut_as_unseen_until_its_end(evicting: Callable) -> None:
    engine = evicting("llama", budget=48, bounded=True)
    request, found = engine.add(tiny.token_ids(200), SAY), []
    while not engine.idle:
        engine.step()
        found.append(request.policy)
    assert list(dict.fromkeys(found)) == [AUTO["unseen"], AUTO["seen"]]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_plan_knows_which_names_spread_unevenly(name: str) -> None:
    """Without torch it cannot ask the policy, so the names are listed; here the list is held against the policies."""
    uneven = any(find_policy(name, seen).spread is not None for seen in (True, False))
    assert uneven == (name in UNEVEN_POLICIES)
    more = {spread: max_held_tokens(EvictionConfig(96, policy=f"{name}:spread={spread}", bounded=True), 64, 16)
            for spread in ("even", "layer", "all", "pyramid")}  # fmt: skip
    assert more == {"even": 160, "layer": 176, "all": 176, "pyramid": 176}
    assert max_held_tokens(EvictionConfig(96, policy=name, bounded=True), 64, 16) == (176 if uneven else 160)
