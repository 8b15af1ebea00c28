"""Save a conversation, go on with it as if in another process, and fork it: one past, two continuations.

python examples/sessions.py [MODEL]      a folder or .gguf file that can chat; without one, the small embedded model
"""

import sys
import tempfile
from pathlib import Path

from hybridkv import LLM, Conversation, SamplingParams


def main(model: str | None = None, questions: tuple[str, ...] = (), tokens: int = 24) -> dict[str, str]:
    first, second, other = questions or ("Name a colour.", "And another one?", "Name an animal instead.")
    params = SamplingParams(max_tokens=tokens)
    llm = LLM(model, max_requests=3, max_context=512)
    talk = Conversation(llm, "Answer in a few words.", params)
    print(f"you       {first}\nmodel     {''.join(talk.send(first))!r}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "talk.session"
        talk.save(path)  # messages, tokens and cache
        print(f"saved     {path.stat().st_size / 2**20:.2f} MiB")
        loaded = Conversation.load(llm, path, params)  # another process could do this, with the same model

    fork = talk.fork()  # shares all that was computed; copied only where one of both writes
    found = {}
    for name, each, question in (("stayed", talk, second), ("loaded", loaded, second), ("fork", fork, other)):
        found[name] = "".join(each.send(question))
        assert each.last is not None
        reused = each.last.stats["cached_tokens"]
        print(f"{name:9} {question} -> {found[name]!r}   {reused:.0f} of {each.last.prompt_tokens} tokens were there")
    for each in (talk, loaded, fork):
        each.close()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
