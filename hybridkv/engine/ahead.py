"""Reading ahead: a bounded prompt is evicted before its question has been read, so the question is looked at first.

The prompt's last tokens run once after what is held so far. Their queries say what matters; their entries are never
part of the past, and state and query buffer go back to what they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.request import Request

if TYPE_CHECKING:
    from hybridkv.engine.engine import Engine


def evict_after_step(engine: Engine, request: Request, wait: bool = True) -> None:
    """Evict the request if that is due after the step that was committed. Pages of what is read ahead are reserved.

    `wait`: as in Evictor.after_step.
    """
    evictor, manager = engine.evictor, engine.manager
    if evictor is None:
        return
    ahead = evictor.read_ahead(request, manager)
    if not ahead:
        evictor.after_step(request, manager, wait=wait)
        return
    end = request.prompt_tokens
    with manager.trial(request.key):
        step = manager.prepare_forward([(request.key, ahead)])
        engine.runner.hidden(engine.runner.inputs([request.tokens[end - ahead : end]], [ahead - 1], step))
        evictor.after_step(request, manager, ahead, wait)
