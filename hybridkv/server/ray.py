"""The server as a deployment of Ray Serve: replicas on many machines, more of them when there is more to do.

    serve run hybridkv.server.ray:app model=./Qwen3.5-4B replicas=2 budget=2048

Each replica is one model behind the same ASGI application as `hybridkv serve`. Ray's proxies choose by consistent hash
of x-session-id, so conversations keep their replica and its cache. Extra: ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

from ray import serve  # type: ignore
from ray.serve.config import AutoscalingConfig, RequestRouterConfig  # type: ignore
from starlette.types import ASGIApp, Receive, Scope, Send

from hybridkv.config import CacheConfig, EngineConfig
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.server.app import make_app
from hybridkv.server.service import Service
from hybridkv.server.settings import ServerSettings
from hybridkv.server.warm import capture_graphs

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
BUSY = 0.7  # of the slots: beyond it, autoscaling adds a replica
HEALTH_SECONDS = 5.0
CONSTRUCTED = "hybridkv.server.ray: the replica has no model"


@dataclass(frozen=True)
class Asked:
    """What `serve run` is given as name=value.

    Args:
        model: a folder or a file, on every machine at the same place.
        replicas: at the start.
        most: replicas at the most; more than `replicas` switches autoscaling on.
        name: what clients call the model; empty: as its file.
        context: tokens of the longest request; 0: as the model has it.
        requests: that one replica runs at once.
        budget: tokens that a request keeps; 0: all.
        device: auto, cpu or cuda.
        tp: GPUs that one replica's model is cut over, all on one machine; their processes are the replica's own.
        cpus: that a replica reserves.
        gpus: that it reserves; -1: one for each of `tp` unless device is cpu.
        drain: seconds that answers get when a replica ends.
        allowed_host: a name besides localhost by which clients call the proxies.
    """

    model: str
    replicas: int = 1
    most: int = 0
    name: str = ""
    context: int = 0
    requests: int = EngineConfig.max_requests
    budget: int = 0
    device: str = "auto"
    tp: int = 1
    cpus: float = 1.0
    gpus: float = -1.0
    drain: float = 30.0
    allowed_host: str = ""


def read(given: dict[str, Any]) -> Asked:
    """Values as `serve run` or a Serve config file has them; HybridKVError names the one that is wrong."""
    kinds: dict[str, type] = {"model": str} | {k: type(v) for k, v in vars(Asked("")).items()}
    if unknown := sorted(set(given) - set(kinds)):
        raise HybridKVError(f"{', '.join(unknown)}: there is no such argument; there are {', '.join(kinds)}")
    if not given.get("model"):
        raise HybridKVError("model=... is missing: a folder or a file")
    values = {}
    for name, value in given.items():
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise HybridKVError(f"{name}: {value!r} is no {kinds[name].__name__}") from None
    asked = Asked(**values)
    if min(asked.replicas, asked.requests, asked.tp) < 1 or 0 < asked.most < asked.replicas:
        raise HybridKVError("replicas, requests and tp must be 1 or more, and most not less than replicas")
    if asked.device != "cpu" and 0 <= asked.gpus < asked.tp > 1:
        raise HybridKVError(f"gpus={asked.gpus:g} is fewer than tp={asked.tp}: leave gpus out, or reserve one for each")
    return asked


class _Here:
    """The replica's application. Ray asks for it before there is a model; so it is looked up at each request."""

    app: ASGIApp | None = None


async def here(scope: Scope, receive: Receive, send: Send) -> None:
    """This process' server as an ASGI application."""
    if scope["type"] == "lifespan":  # Ray waits for both answers
        for stage in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{stage}.complete"})
        return
    if _Here.app is None:
        raise RuntimeError(CONSTRUCTED)
    await _Here.app(scope, receive, send)


def build() -> ASGIApp:
    """What Ray calls in the process of a replica for its application."""
    return here


@serve.deployment(name="hybridkv")
@serve.ingress(build)
class Replica:
    """One model, and what Ray asks it besides requests."""

    def __init__(self, asked: Asked) -> None:
        key = os.environ.get("HYBRIDKV_API_KEY")
        hosts = (asked.allowed_host,) if asked.allowed_host else ()
        self._settings = ServerSettings(
            api_keys=(key,) if key else (),
            names=(asked.name,) if asked.name else (),
            allowed_hosts=hosts,
            shutdown_seconds=asked.drain,
        )
        cache = CacheConfig(budget=asked.budget) if asked.budget else None
        llm = LLM(asked.model, device=asked.device, cache=cache, max_requests=asked.requests,
                  max_context=asked.context or None, tp=asked.tp)  # fmt: skip
        if llm.ranks is not None:
            llm.ranks.end_process()  # Ray starts another
        capture_graphs(llm)
        self._service = Service(self._settings)
        self._service.open(llm)
        _Here.app = make_app(self._service)

    def check_health(self) -> None:
        """Ray asks every few seconds; one that raises is replaced."""
        status = self._service.status
        if status != "ok":
            raise RuntimeError(self._service.fatal or f"the server is {status}")

    async def __del__(self) -> None:
        """Ray has waited for the answers that ran. Named conversations are saved where there is a folder for them."""
        until = time.monotonic() + self._settings.shutdown_seconds
        self._service.draining = True
        await asyncio.to_thread(self._service.sessions.save_recent, until)
        await asyncio.to_thread(self._service.sessions.close)
        self._service.close()
        self._service.llm.close()


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application of `serve run hybridkv.server.ray:app name=value ...`; names are those of Asked."""
    asked = read(arguments)
    gpus = asked.gpus if asked.gpus >= 0 else 0.0 if asked.device == "cpu" else float(asked.tp)
    options: dict[str, Any] = {
        "max_ongoing_requests": asked.requests,
        "request_router_config": RequestRouterConfig(request_router_class=ROUTER),
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": asked.drain,
        "ray_actor_options": {"num_cpus": asked.cpus, "num_gpus": gpus},
    }
    if asked.most > asked.replicas:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=asked.replicas, max_replicas=asked.most, target_ongoing_requests=BUSY * asked.requests
        )
    else:
        options["num_replicas"] = asked.replicas
    return Replica.options(**options).bind(asked)  # type: ignore
