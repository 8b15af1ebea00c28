"""What the README and the page about serving show is run against a server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs import blocks
from server.running import SECONDS, Running

PAGES = ("README.md", "docs/serving.md", "docs/structured.md")
ADDRESS = "http://127.0.0.1:8000"
FOUND = [block for page in PAGES for block in blocks.blocks_of(page) if block.why == "needs a running server"]
CURL = [c.text for block in FOUND if block.kind == "sh" for c in blocks.commands_of(block) if c.text.startswith("curl")]
SCRIPTS = [block.body for block in FOUND if block.kind == "python"]


@pytest.mark.parametrize("command", CURL, ids=lambda text: text.split()[2])
def test_commands_are_answered(smol: Running, command: str) -> None:
    text = command.replace(ADDRESS, smol.address)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "error" not in json.loads(done.stdout), done


def test_code_runs(smol: Running, tmp_path: Path) -> None:
    assert len(SCRIPTS) == 2 and len(CURL) >= 4
    (tmp_path / "page.py").write_text("\n".join(SCRIPTS).replace(ADDRESS, smol.address))
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "budget" in done.stdout
    assert any(f"text {why}" in done.stdout for why in ("max_tokens", "end_turn")), "the answer is drawn, and may end"
