"""Every public class, function and method says what it is, and the names a user begins with explain every argument."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hybridkv

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))
import api  # noqa: E402

MODULES = api.public_files()


def is_explained_by_a_base(module: str, name: str) -> bool:
    """A method that does what a base class says it does: Knorm.score is Policy.score."""
    holder, _, method = name.rpartition(".")
    found = importlib.import_module(module)
    for part in filter(None, holder.split(".")):
        found = getattr(found, part)
    bases = found.__mro__[1:] if isinstance(found, type) else ()
    return any(inspect.getdoc(vars(base).get(method)) for base in bases if method in vars(base))


def undocumented(module: str, source: str) -> list[str]:
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [module]
    for name, node in api.definitions(tree.body):
        if not ast.get_docstring(node) and not is_explained_by_a_base(module, name):
            found.append(f"{module}.{name}")
    return found


def test_every_public_name_has_a_docstring() -> None:
    assert len(MODULES) > 40, "the package was not found"
    missing = [name for module, path in MODULES.items() for name in undocumented(module, path.read_text())]
    assert missing == []


def test_a_missing_docstring_is_found() -> None:
    source = '"""A file."""\ndef untold(): ...\nclass HybridKVError:\n    """Told."""\n    def untold(self): ...'
    wrong = ["hybridkv.errors.untold", "hybridkv.errors.HybridKVError.untold"]
    assert undocumented("hybridkv.errors", source) == wrong
    assert undocumented("hybridkv.errors", "x = 1") == ["hybridkv.errors"]


@pytest.mark.slow
def test_every_public_name_is_on_the_api_pages(tmp_path: Path) -> None:
    """What `make docs` does; a warning of the generator is an error there."""
    api.build(tmp_path)
    assert api.missing(tmp_path) == []
    (tmp_path / "hybridkv" / "llm.html").write_text("")
    assert "hybridkv.llm.LLM.chat" in api.missing(tmp_path)


# ---- arguments


def callables(name: str) -> Iterator[tuple[str, Callable, str]]:
    """The public calls of a name of `hybridkv`: what to call it, the function, and the text that must explain it."""
    found = getattr(hybridkv, name)
    if issubclass(found, Exception):
        return
    yield name, found, inspect.getdoc(found) or ""
    for method, function in inspect.getmembers(found, inspect.isfunction):
        if not method.startswith("_"):
            about = inspect.getdoc(function) or ""
            # "see `generate` for the arguments", or `LLM.generate`
            named = re.findall(r"`(?:(\w+)\.)?(\w+)`", about)
            there = [(getattr(hybridkv, holder, None) if holder else found, other) for holder, other in named]
            about += "".join(inspect.getdoc(getattr(holder, other, None)) or "" for holder, other in there)
            yield f"{name}.{method}", function, about


def unexplained(function: Callable, about: str) -> list[str]:
    """Arguments that the text does not name, as `argument` or as `argument: ...`."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return [name for name in names if f"`{name}`" not in about and not re.search(rf"\b{name}: ", about)]


@pytest.mark.parametrize("name", hybridkv.__all__)
def test_help_explains_every_argument(name: str) -> None:
    missing = {call: left for call, function, about in callables(name) if (left := unexplained(function, about))}
    assert missing == {}


def test_an_unexplained_argument_is_found() -> None:
    def call(first: int, second: int) -> None: ...

    assert unexplained(call, "Does `first`.") == ["second"]
    assert unexplained(call, "Args:\n    first: one\n    second: two") == []
