"""What a user gets from the built project: all files, the command, the model's answer, and types."""

import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hybridkv
from install.building import ROOT, Distribution, Environment, build, call, install, project_files

pytestmark = pytest.mark.slow  # make test-install runs these, make test-slow leaves them to it
# A user's script. With `Any` in place of a type, assert_type fails; the last line must be an error.
SCRIPT = """
from typing import assert_type
from hybridkv import LLM, SamplingParams

llm = LLM(max_requests=2)
assert_type(llm, LLM)
answer = llm.generate(["one", "two"], SamplingParams(max_tokens=3))[0]
assert_type(answer.text, str)
assert_type(answer.token_ids, list[int])
llm.generate("one", no_such_argument=1)
"""
MYPY = """
[mypy]
python_executable = {python}
cache_dir = {cache}
[mypy-torch.*,numpy.*,jinja2.*,tokenizers.*,gguf.*,safetensors.*,triton.*,rich.*,typer.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def environment(dist: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install(dist.wheel, tmp_path_factory.mktemp("install"))


def test_the_source_archive_holds_the_whole_project(dist: Distribution) -> None:
    with tarfile.open(dist.archive) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in project_files() if name not in inside] == []


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(dist: Distribution) -> None:
    with zipfile.ZipFile(dist.wheel) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == {name for name in project_files() if name.startswith("hybridkv/")}
    assert {"hybridkv/py.typed", "hybridkv/data/petrel_log.txt"} <= inside


def test_the_metadata_promise_only_what_is_there(dist: Distribution) -> None:
    with zipfile.ZipFile(dist.wheel) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == hybridkv.__version__
    extras = {"gpu", "hub", "server", "structured", "replicas", "ray", "nixl", "otel", "plot", "docs", "dev"}
    assert set(metadata.get_all("Provides-Extra") or ()) == extras
    assert f"## [{hybridkv.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_installed_package_is_the_wheel(environment: Environment) -> None:
    code = "import hybridkv, importlib.metadata as m; print(hybridkv.__file__, m.version('hybridkv'))"
    file, version = environment.run("python", "-c", code).split()
    assert Path(file).is_relative_to(environment.packages)
    assert version == hybridkv.__version__


def test_the_command_runs_from_a_bare_folder(environment: Environment) -> None:
    assert environment.run("hybridkv", "--version") == f"hybridkv {hybridkv.__version__}\n"
    assert "attention pages" in environment.run("hybridkv", "plan", "--model", "Qwen3.5-27B")
    answer = environment.run("hybridkv", "generate", "What is the capital of France?", "--max-tokens", 8)
    assert "Paris" in answer
    assert list(environment.bare.iterdir()) == [], "a command left something behind"


def check_types(environment: Environment, folder: Path) -> str:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "mypy.ini").write_text(MYPY.format(python=environment.bin / "python", cache=folder / "cache"))
    return call(sys.executable, "-m", "mypy", "script.py", folder=folder).stdout


def test_a_script_is_checked_against_the_types_of_the_installed_package(
    environment: Environment, tmp_path: Path
) -> None:
    said = check_types(environment, tmp_path)
    assert "script.py:10: error: Unexpected keyword argument" in said
    assert "Found 1 error in 1 file" in said, said


def test_without_the_marker_there_are_no_types(environment: Environment, tmp_path: Path) -> None:
    marker = environment.packages / "hybridkv" / "py.typed"
    marker.rename(marker.with_name("away"))
    try:
        said = check_types(environment, tmp_path)
    finally:
        marker.with_name("away").rename(marker)
    assert "missing library stubs or py.typed marker" in said
    assert "no_such_argument" not in said
