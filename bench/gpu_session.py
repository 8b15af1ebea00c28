"""All that needs a GPU, one thing after the other, in a given number of seconds: tests, memory checker, benchmarks.

    python bench/gpu_session.py 920 [--only 'tests|kernels'] [--out gpu_session]

Where a machine is lent for less, several calls do the same, on several machines if need be:

    python bench/gpu_session.py 600 --only 'tests|memcheck'
    python bench/gpu_session.py 240 --only 'kernels|v4_'
    python bench/gpu_session.py 360 --only 'decode|peers|prefill|eviction|capacity|load$|start'
    python bench/gpu_session.py 590 --only 'load_|exact|sessions_of_one|released$'
    python bench/gpu_session.py 350 --only 'ranks'

Tests alone cost the card little: give them a call of their own, since nothing may be timed beside them.

Each has a limit of its own, is asked to stop when it is reached (what it has measured by then counts), and writes a
log. The JSON lines of all benchmarks are added to results.jsonl. Needs no typer. The folder may be used again: what is
there is kept. Ends with a table of what ran, and 1 if something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GRACE = 8.0  # seconds between asking and ending
STARTING = 14.0  # seconds that a benchmark takes before its first row, and to end


class Step(NamedTuple):
    name: str
    seconds: float  # at most
    command: list[str]


def steps() -> list[Step]:
    """In order. The tests come first, in one call: starting their workers takes most of a minute, and what they compile
    is there for the rest.
    """
    here, many = sys.executable, str(min(12, os.cpu_count() or 1))
    workers = ["-n", many, "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    tests = [here, "-m", "pytest", "-v", "--durations=15", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu"]
    checker = f"compute-sanitizer --tool memcheck --error-exitcode 1 {shlex.quote(here)} tests/gpu/memcheck.py"
    all_runs = f'for i in 0 1 2 3 4 5 6 7; do {checker} $i & all="$all $!"; done'
    all_right = "for one in $all; do wait $one || exit 1; done"
    marked = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text(encoding="utf-8")]
    marked.sort(key=lambda path: path.name != "test_ranks.py")  # the longest ones begin first
    found = [Step("tests", 480, [*tests, *workers, *(str(p.relative_to(ROOT)) for p in marked)])]
    if shutil.which("compute-sanitizer"):
        found.append(Step("memcheck", 130, ["sh", "-c", f"{all_runs}; {all_right}"]))

    def bench(step: str, seconds: float, *more: str, name: str | None = None) -> None:
        command = [here, "-m", "hybridkv.bench", name or step, "--limit", str(seconds - STARTING), *more]
        found.append(Step(step, seconds, command))

    bench("v4_model", 70)
    parts = ["--weight-dtype", "released", "--ranks", "2,4,8", "--skip-peers", "--kv-dtype", "fp8"]
    bench("released_ranks", 110, *parts, "--contexts", "16384", name="v4_model")
    bench("kernels", 90, "--warm", "8")
    bench("v4_kernels", 55)
    bench("decode", 80, "--skip-peers")
    bench("peers", 95, "--only", "peers", "--peer-layers", "64", "--compiled-layers", "4,16", name="decode")
    bench("prefill", 85, "--chunk", "8192,4096", "--contexts", "16384,2048")
    bench("eviction", 25)
    bench("capacity", 25)
    bench("load", 120, "--model-shape", "0.8b", "--load", "0.4,0.8", "--seconds", "10", "--skip-peers")
    long = ["--model-shape", "4b", "--requests", "64", "--prompt-tokens", "6000:8000", "--answer-tokens", "128"]
    long += ["--budget", "2048", "--only", "offline", "--skip-peers"]
    for step in ("load_4b", "load_4b_again"):  # two runs must agree
        bench(step, 80, *long, name="load")
    bench("load_4b_reuse", 80, *long, "--reuse", name="load")
    bench("load_reuse", 60, "--model-shape", "0.8b", "--only", "offline", "--skip-peers", "--reuse", name="load")
    many = ["--layers", "16", "--requests", "256", "--prompt-tokens", "500:16384", "--answer-tokens", "100:512"]
    many += ["--spread", "log", "--budget", "2048", "--only", "clients", "--quick", "--skip-peers", "--reuse"]
    bench("load_clients", 120, *many, name="load")
    bench("decode_exact", 90, "--only", "exact", "--skip-peers", name="decode")
    bench("start", 75, "--model-shape", "0.8b")
    bench("reuse", 60)
    bench("sessions_of_one", 95, "--contexts", "4096", "--only", "sessions", name="reuse")
    bench("sessions", 45, "--contexts", "16384")
    bench("ranks", 125)
    bench("ranks_fp8", 105, "--weight-dtype", "fp8", "--kv-dtype", "fp8", "--only", "decode|prefill", name="ranks")
    released = ["--weight-dtype", "released", "--skip-peers", "--contexts", "16384", "--kv-dtype", "fp8"]
    bench("released", 100, *released, name="v4_model")
    bench("prefill_long", 45, "--contexts", "65536", "--skip-peers", name="prefill")
    return found


def run_step(step: Step, seconds: float, log: Path) -> tuple[int, float]:
    """(exit code, seconds). 124: it had to be stopped."""
    begin = time.monotonic()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            step.command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(seconds)
            return child.returncode, time.monotonic() - begin
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            return 124, time.monotonic() - begin
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and what it has started
            child.wait()


def json_line(log: Path) -> dict[str, object] | None:
    """The last one of a log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line[:1] == "{"]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, help="for everything")
    parser.add_argument("--only", default="", help="steps whose name matches: " + ", ".join(s.name for s in steps()))
    parser.add_argument("--out", type=Path, default=Path("gpu_session"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end, bad = time.monotonic() + given.seconds, 0
    for step in steps():
        if not re.search(given.only, step.name):
            continue
        left = min(step.seconds, end - time.monotonic() - GRACE)
        if left < STARTING:
            print(f"{step.name:12} left out: time is up", flush=True)
            continue
        log = given.out / f"{step.name}.log"
        code, took = run_step(step, left, log)
        found, last = json_line(log), log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        bad += code != 0
        if found is not None:
            with (given.out / "results.jsonl").open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            last = [f"{len(found.get('rows', []))} rows, {len(found.get('failures', []))} failed"]  # type: ignore[arg-type]
        print(
            f"{step.name:12} {'ok' if code == 0 else f'exit {code}':8} {took:6.0f} s   {''.join(last)[:120]}",
            flush=True,
        )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
