"""The public API as web pages, made by pdoc from the docstrings.

    python docs/api.py FOLDER

Public is every module that INTERNAL does not name, and in it every name without an underscore. A warning is an error
here, and so is a public name that is on no page.
"""

import ast
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc

PACKAGE = Path(__file__).parents[1] / "hybridkv"
# how things are done, not what a user calls; their files are documented for who reads them
INTERNAL = ("__main__", "bench", "checkpoint", "cli", "commands", "engine", "files", "follower", "kernels",
            "overrides", "parallel", "ranks", "report",
            "asking", "cache_key", "opening", "prompts", "settings", "sizing", "weight_choice",  # what LLM is made of
            "server.ray",  # which needs Ray to be imported; serving.md has what it takes
            "text.template_worker")  # fmt: skip
SHOWN_ALL_THE_SAME = ("engine.engine",)  # for programs that run the loop themselves


def public_files() -> dict[str, Path]:
    """Module name -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        hidden = any(name == inner or name.startswith(inner + ".") for inner in INTERNAL)
        if name in SHOWN_ALL_THE_SAME or not hidden:
            found[f"hybridkv.{name}".removesuffix(".")] = path
    return found


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(body: list[ast.stmt], before: str = "") -> Iterator[tuple[str, Definition]]:
    """Public classes, functions and methods: "LLM", "LLM.generate", ..."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield before + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{before}{node.name}.")


def names_of(module: str, path: Path) -> set[str]:
    """What has to be on the module's page: what its file defines, and what its __all__ promises."""
    promised = getattr(importlib.import_module(module), "__all__", None)
    defined = {name for name, _ in definitions(ast.parse(path.read_text()).body)}
    return defined if promised is None else set(promised)


def page_of(module: str) -> str:
    return module.replace(".", "/") + ".html"


def missing(folder: Path) -> list[str]:
    """Public names that their module's page does not have."""
    found = []
    for module, path in public_files().items():
        page = folder / page_of(module)
        text = page.read_text() if page.exists() else ""
        found += [f"{module}.{name}" for name in sorted(names_of(module, path)) if f'id="{name}"' not in text]
    return found


def build(folder: Path) -> None:
    """A page for each public module, the list of them, and what the search box reads."""
    found = {name: importlib.import_module(name) for name in public_files()}
    for module in found.values():  # some names come when first asked for, and pdoc sees only what is there
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))
    modules = {name: pdoc.doc.Module(module) for name, module in found.items()}
    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Couldn't import hybridkv.server.ray")  # pdoc tries what is not listed, too
        pages = {page_of(name): pdoc.render.html_module(module, modules) for name, module in modules.items()}
        pages |= {"index.html": pdoc.render.html_index(modules), "search.js": pdoc.render.search_index(modules)}
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) == 2 else "build/api")
    build(folder)
    if absent := missing(folder):
        sys.exit("not on the pages: " + ", ".join(absent))
    print(f"{folder / 'index.html'}: {len(public_files())} modules")


if __name__ == "__main__":
    main()
