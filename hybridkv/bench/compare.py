"""The same benchmark on another commit, and the two side by side.

The other tree is a git worktree in a temporary folder. It is measured by this tree's benchmark code, so that both are
measured alike; cases whose ops it does not have are left out. Trees that lack what this code is built on are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hybridkv
from hybridkv.bench.options import BenchOptions
from hybridkv.errors import HybridKVError

PACKAGE = Path(hybridkv.__file__).parent
# what measures; put over the other tree's own
MEASURING = ("bench", "models/random_weights.py")
NEEDED = "cache/query_buffers.py"  # what the other tree must have: older caches are built in another way


def repository() -> Path:
    """The git checkout that this package is imported from."""
    root = PACKAGE.parent
    if shutil.which("git") is None:
        raise HybridKVError("--base compares with another commit and needs git, which is not installed")
    found = git(root, "rev-parse", "--show-toplevel", check=False)
    if found is None or Path(found).resolve() != root.resolve():
        raise HybridKVError(
            f"--base compares with another commit and needs a git checkout; hybridkv is imported from {root}"
        )
    return root


def git(root: Path, *arguments: str, check: bool = True) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode and check:
        raise HybridKVError(f"git {arguments[0]} failed: {done.stderr.strip().splitlines()[-1]}")
    return None if done.returncode else done.stdout.strip()


@contextmanager
def worktree(root: Path, ref: str) -> Iterator[Path]:
    commit = git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", check=False)
    if commit is None:
        raise HybridKVError(f"--base: there is no commit {ref!r} in {root}")
    with tempfile.TemporaryDirectory(prefix="hybridkv-base-") as folder:
        path = Path(folder) / "tree"
        git(root, "worktree", "add", "--detach", str(path), commit)
        try:
            yield path
        finally:
            git(root, "worktree", "remove", "--force", str(path), check=False)


def run_base(name: str, options: BenchOptions, ref: str) -> dict[str, Any]:
    """The result of a benchmark on another commit, in a process of its own."""
    root = repository()
    with worktree(root, ref) as tree:
        if not (tree / "hybridkv" / NEEDED).is_file():
            raise HybridKVError(
                f"--base {ref}: that commit has no hybridkv/{NEEDED}, which this benchmark needs; measure it with its "
                "own benchmark"
            )
        for part in MEASURING:
            source, target = PACKAGE / part, tree / "hybridkv" / part
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        asked = asdict(replace(options, trace=None, skip_peers=True))
        code = "import sys; from hybridkv.bench.suite import run_json; run_json(*sys.argv[1:])"
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", code, name, json.dumps(asked)],
            cwd=tree, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise HybridKVError(f"--base {ref}: the benchmark does not run on that commit; its own words are above")
    return json.loads(lines[-1])


def side_by_side(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that both have, by op and case; the ratio is above 1 where ours is better."""
    key = ours["measure"]
    found = {(r["op"], r["case"]): r.get(key) for r in theirs["rows"]}
    rows = []
    for row in ours["rows"]:
        other, mine = found.get((row["op"], row["case"])), row.get(key)
        if other is None or mine is None:
            continue
        ratio = mine / other if key == "requests" else other / mine
        rows.append({"op": row["op"], "case": row["case"], "ours": mine, "base": other, "ratio": ratio})
    return rows


def print_comparison(rows: list[dict[str, Any]], ref: str, measure: str, missing: int) -> None:
    print(f"{'op':22} {'case':40} {measure:>10} {ref[:12]:>12} {'times':>7}")
    for r in rows:
        print(f"{r['op']:22} {r['case']:40} {r['ours']:10.4g} {r['base']:12.4g} {r['ratio']:7.2f}")
    if missing:
        print(f"{missing} rows have nothing to be compared with at {ref}")
