"""Imports inside the package go down one list. Also imports inside functions and under TYPE_CHECKING count."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hybridkv"

# each may import itself and what stands before it; "" is hybridkv/__init__.py, the public face
ORDER = (
    "errors", "files", "config", "dtypes", "cards", "overrides", "text", "eviction_record", "request", "kernels",
    "devices", "cache", "eviction", "embedded", "checkpoint", "models", "planner", "parallel", "engine", "answers",
    "document", "prefix", "ranks", "settings", "weight_choice", "sizing", "prompts", "opening", "cache_key", "warming",
    "asking", "llm", "follower", "saved", "conversation", "async_llm", "", "evaluation",
    "report", "server", "bench", "commands", "cli", "__main__",
)  # fmt: skip
# these stand beside the cache, not on top of it
LEAVES = {"text": {"errors", "files"}, "embedded": {"errors", "config"}}


def place(module: str) -> str:
    """`hybridkv.cache.pools` -> `cache`; `hybridkv` -> the public face."""
    return module.split(".")[1] if "." in module else ""


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module of the package that the source imports, by its full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hybridkv")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")
                parent = parent[: len(parent) - node.level + int(is_package)]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            if base.split(".")[0] != "hybridkv":
                continue
            for alias in node.names:
                # `from hybridkv import llm` names a module, `from hybridkv import LLM` something of the public face
                named = base == "hybridkv" and (
                    (PACKAGE / f"{alias.name}.py").exists() or (PACKAGE / alias.name).is_dir()
                )
                yield f"{base}.{alias.name}" if named else base


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    here, wrong = place(module), []
    for target in imports(source, module, is_package):
        there = place(target)
        if there not in ORDER:
            wrong.append(f"{module} imports {target}, which has no place in ORDER")
        elif here in LEAVES and there != here and there not in LEAVES[here]:
            wrong.append(f"{module} imports {target}; {here} may import {sorted(LEAVES[here])} only")
        elif ORDER.index(there) > ORDER.index(here):
            wrong.append(f"{module} imports {target}, which stands above it")
    return wrong


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_every_module_has_a_place_in_the_order() -> None:
    without = {place(module) for module, _ in modules()} - set(ORDER)
    assert not without, f"give these a place in ORDER: {sorted(without)}"


def test_imports_go_down_the_order_only() -> None:
    assert len(modules()) > 10, "the package was not found"
    wrong = [
        w for module, path in modules() for w in wrong_imports(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hybridkv.kernels.attention.append", "from hybridkv.cache.pools import PagedPool"),
        ("hybridkv.kernels.attention.append", "from ...cache.pools import PagedPool"),
        ("hybridkv.cache.pools", "import hybridkv.engine.engine"),
        ("hybridkv.cache.pools", "def f():\n    from hybridkv import llm"),
        ("hybridkv.engine.engine", "from hybridkv import LLM"),
        ("hybridkv.text.chat", "from hybridkv.cache import schema"),
        ("hybridkv.llm", "from hybridkv.nowhere import x"),
    ],
)
def test_an_import_that_goes_up_is_found(module: str, source: str) -> None:
    assert wrong_imports(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "hybridkv.cache.pools",
            "from hybridkv.kernels.attention.append import append\nimport torch\nfrom .schema import CacheSchema",
        ),
        ("hybridkv.text.chat", "from hybridkv.errors import RequestError\nfrom .tokenizer import Tokenizer"),
        ("hybridkv.cli", "from hybridkv import LLM, errors"),
    ],
)
def test_an_import_that_goes_down_is_fine(module: str, source: str) -> None:
    assert wrong_imports(source, module) == []
