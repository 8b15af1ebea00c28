"""The project built as a user or a packager would build it, and an environment that has only the result.

The wheel is made from the source archive, so what the archive lacks, the wheel lacks too. By default the environment
borrows all dependencies from the one that runs the tests; the source tree is not on its path. With
HYBRIDKV_CLEAN_INSTALL=1 pip installs them anew (`make test-install`).
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLEAN = os.environ.get("HYBRIDKV_CLEAN_INSTALL") == "1"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def call(*command: object, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command with nothing of this process's Python path, run in `folder`."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env=env | environment, text=True, capture_output=True, timeout=580
    )


def must(*command: object, folder: Path | None = None, **environment: str) -> str:
    """What the command prints; it has to succeed."""
    done = call(*command, folder=folder, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def project_files() -> list[str]:
    """What belongs to the project: what git knows, with files that are new and not ignored."""
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT)
    if listed.returncode == 0:
        return sorted(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())
    skipped = {".venv", "build", "dist", "__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache"}
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]  # an unpacked archive has no git
    return sorted(str(p) for p in found if not skipped & set(p.parts) and ".egg-info" not in str(p))


@dataclass(frozen=True)
class Distribution:
    archive: Path  # the source archive, .tar.gz
    wheel: Path


def build(folder: Path) -> Distribution:
    """The source archive of a copy of the tree, and the wheel of the unpacked archive."""
    copy, dist = folder / "copy", folder / "dist"
    for name in project_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    must(sys.executable, "-c", BUILD, "build_sdist", dist, folder=copy)
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    must(sys.executable, "-c", BUILD, "build_wheel", dist, folder=unpacked)
    (wheel,) = dist.glob("*.whl")
    return Distribution(archive, wheel)


@dataclass(frozen=True)
class Environment:
    folder: Path
    bare: Path  # an empty folder to run in

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder), "platbase": str(self.folder)}))

    def run(self, program: str, *arguments: object, **environment: str) -> str:
        return must(self.bin / program, *arguments, folder=self.bare, **environment)


def install(wheel: Path, folder: Path) -> Environment:
    made = Environment(folder / "environment", folder / "bare")
    made.bare.mkdir()
    if CLEAN:
        must(sys.executable, "-m", "venv", made.folder)
        must(made.bin / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        return made
    must(sys.executable, "-m", "venv", "--without-pip", made.folder)
    # a path file inside a folder that a path file names is not read: the tree installed for tests stays out
    (made.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", made.bin / "python", "install", "--quiet", "--no-index")
    must(*pip, "--no-deps", "--ignore-installed", wheel)
    return made
