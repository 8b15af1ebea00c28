"""OpenAI's and Anthropic's clients for node against a server that runs: chat, streams, calls of functions.

    python scripts/node_clients.py                                # hybridkv serve at http://127.0.0.1:8000
    python scripts/node_clients.py --url http://127.0.0.1:9000

Not part of continuous integration: it needs node, npm and npm's registry. The clients are installed in a temporary
folder, or in --at, where they stay for the next time. A key is taken from HYBRIDKV_API_KEY.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

CLIENTS = ("openai@6.49.0", "@anthropic-ai/sdk@1.10.0")
PROGRAM = Path(__file__).with_suffix(".mjs")


def install(at: Path) -> None:
    """Both clients under this folder, and nothing elsewhere; their install scripts are not run."""
    at.mkdir(parents=True, exist_ok=True)
    (at / "package.json").write_text("{}")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error", *CLIENTS]
    subprocess.run(command, cwd=at, check=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="where the server answers; without /v1")
    options.add_argument("--at", type=Path, metavar="FOLDER", help="where the clients are, or are to be, installed")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at = asked.at or Path(folder)
        if not (at / "node_modules").exists():
            install(at)
        print(
            f"node {subprocess.check_output(['node', '--version'], text=True).strip()}, {', '.join(CLIENTS)}",
            flush=True,
        )
        key = os.environ.get("HYBRIDKV_API_KEY") or "any"
        done = subprocess.run(["node", str(PROGRAM), str(at.resolve()), asked.url.rstrip("/"), key])
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
