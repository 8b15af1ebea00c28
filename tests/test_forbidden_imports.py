"""Model files are data: nothing in the package can run code that came with one. Nor does it need transformers: one file
of the benchmarks runs beside it where it is installed.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hybridkv"

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "transformers"}
CALLS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec",
    "torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "runpy.run_path",
}  # fmt: skip
PEERS = {PACKAGE / "bench" / name for name in ("peers.py", "peers_v4.py")}  # may import transformers, inside functions
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}  # forbidden unless they are literally False


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; "" for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def findings(source: str) -> list[str]:
    tree, found, full = ast.parse(source), [], {}  # full: local name -> what it stands for
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []  # (imported, local)
        if isinstance(node, ast.Import):
            names = [(a.name, a.asname or a.name.split(".")[0]) for a in node.names]
            full.update({local: name if a.asname else local for (name, local), a in zip(names, node.names)})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{a.name}", a.asname or a.name) for a in node.names]
            full.update({local: name for name, local in names})
        for name, _ in names:
            if name.split(".")[0] in MODULES or name in CALLS:
                found.append(f"line {node.lineno}: imports {name}")  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            head, _, rest = dotted(node).partition(".")
            name = full.get(head, head) + (f".{rest}" if rest else "")
            if name in CALLS:
                found.append(f"line {node.lineno}: uses {name}")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in KEYWORDS and not off:
                    found.append(f"line {node.lineno}: passes {keyword.arg}")
    return found


def test_the_package_runs_no_code_from_files_and_does_not_import_transformers() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 10, "the package was not found"
    found = [
        f"{path.relative_to(PACKAGE.parent)} {finding}"
        for path in paths
        for finding in findings(path.read_text())
        if path not in PEERS or "imports transformers" not in finding
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "import marshal",
        "def f():\n    import transformers",
        "from transformers.models.llama import modeling_llama",
        "import torch\ntorch.load('x')",
        "import torch as t\nload = t.load",
        "from torch import load",
        "import yaml\nyaml.load('x')",
        "eval('1')",
        "run = exec",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import os\nos.system('ls')",
    ],
)
def test_a_forbidden_use_is_found(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nmodel.eval()\ntorch.compile(f)",
        "import re\nre.compile('x')",
        "import yaml\nyaml.safe_load('x')",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from safetensors.torch import load_file",
    ],
)
def test_ordinary_code_is_not_reported(source: str) -> None:
    assert findings(source) == []
