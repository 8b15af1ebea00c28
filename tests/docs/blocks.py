"""Commands and code in the documents, by a convention that readers do not notice.

    ```sh        a command a line; what follows # is a comment
    ```console   lines after "$ " are commands, the lines below one are what it prints; "..." stands for anything
    ```python    code; the blocks of a page are one script
    ```text      anything else

A line `<!-- not run: REASON -->` before a block says why it is not run, and `<!-- typed: ONE LINE | ANOTHER -->` what
its commands read from standard input.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from install.building import ROOT, project_files

BLOCK = re.compile(
    r"^(?:<!-- (?:not run: (?P<why>[^\n]+?)|typed: (?P<typed>[^\n]+?)) -->\n+)?```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = ("$", "hybridkv", "python", "pip", "make", "git", "cat", "echo", "cd", "source", ".venv/bin", ".ci/")
INLINE = re.compile(r"`(?:\.venv/bin/)?hybridkv ([a-z-][^`\n]*)`")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str  # sh, console, python, text or nothing
    body: str
    why: str | None = None  # it is not run
    typed: str = ""  # what its commands read

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Command:
    text: str
    shown: list[str] = field(default_factory=list)  # what the page says that it prints; nothing: not said


def pages() -> list[str]:
    """All documents of the project."""
    return [name for name in project_files() if name.endswith(".md")]


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    assert text.count("\n```") % 2 == 0, f"{page}: a block is not closed"
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("kind")) + 1
        typed = "".join(f"{line}\n" for line in match["typed"].split(" | ")) if match["typed"] else ""
        found.append(Block(page, line, match["kind"], match["body"], match["why"], typed))
    return found


def commands_of(block: Block) -> list[Command]:
    """The commands of a `sh` or `console` block, each with what it should print."""
    found: list[Command] = []
    joined = block.body.replace("\\\n", "")
    for line in joined.splitlines():
        if block.kind == "console":
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif found:
                found[-1].shown.append(line)
        elif line.strip() and not line.startswith("#"):
            found.append(Command(line))
    return found


def looks_like_a_command(block: Block) -> bool:
    return any(line.split(" ")[0].startswith(PROGRAMS) for line in block.body.splitlines() if line.strip())


def matches(shown: list[str], printed: str) -> bool:
    """Line by line, spaces at the end aside. "..." stands for anything within a line; alone, for any lines."""
    text = "\n".join(line.rstrip() for line in shown).strip("\n")
    parts = [re.escape(part) for part in text.split("...")]
    return (
        re.fullmatch("(?s:.*?)".join(parts), "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n"))
        is not None
    )


def inline_commands(page: str) -> list[str]:
    """`hybridkv plan --json` in the middle of a sentence: what comes after the program's name."""
    text = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return INLINE.findall(text)


def commands_not_run(page: str) -> list[str]:
    """The same of blocks that are not run."""
    found = [command.text for block in blocks_of(page) if block.why for command in commands_of(block)]
    return [text.removeprefix("hybridkv ") for text in found if text.startswith("hybridkv ")]


def script_of(page: str, blocks: list[Block]) -> str:
    """The Python blocks of a page as one script whose line numbers are the page's."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - len(lines)) + block.body.splitlines()
    return "\n".join(lines) + "\n"


def here(path: Path) -> str:
    return str(path.relative_to(ROOT))
