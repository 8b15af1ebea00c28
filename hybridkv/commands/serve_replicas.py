"""`hybridkv serve --replicas N`: what each server is started with, and what is printed once they serve."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from hybridkv.commands.options import ModelOptions
from hybridkv.commands.serve import KEY_VARIABLE
from hybridkv.errors import HybridKVError
from hybridkv.server.replicas import Replicas, check_extra, choose_ports, deal_cards, get
from hybridkv.server.settings import ServerSettings


def serve_replicas(
    count: int, settings: ServerSettings, model: ModelOptions, host_cache: str | None, disk_cache: str | None
) -> int:
    """Serve until told to end; returns the exit status."""
    check_extra()
    if not settings.is_loopback:
        raise HybridKVError(
            f"host {settings.host}: the router adds and removes servers for whoever reaches it, without a key; serve "
            "at 127.0.0.1, with a proxy in front that lets the routes of clients through (docs/deploy/nginx.conf)"
        )
    if sys.argv[1:2] != ["serve"]:
        raise HybridKVError("replicas are started with the command line of this process, which is not hybridkv serve's")
    each = getattr(model, "tp", None) or 1
    cards = _cards() if model.device != "cpu" else []
    if cards and count * each > len(cards) and model.memory is None:
        raise HybridKVError(
            f"{count} replicas need {count * each} cards, and there are {len(cards)}; ask for fewer, or say with "
            "--memory what each may take of a card that it shares"
        )
    own = deal_cards(cards, count, each)
    if not cards and "OMP_NUM_THREADS" not in os.environ:  # cores are dealt out like cards
        own = [{"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))} for _ in range(count)]
    more: list[list[str]] = [[] for _ in range(count)]
    if cards and host_cache is None:
        more = [["--host-cache", str(_host_bytes(count))] for _ in range(count)]
    if disk_cache is not None:  # a folder has one writer
        more = [[*given, "--disk-cache", str(Path(disk_cache) / f"replica-{i}")] for i, given in enumerate(more)]
    ports = choose_ports(settings.port, count)
    found = Replicas(sys.argv[1:], own, ports, settings.shutdown_seconds, settings.allowed_origins, more)
    found.run(lambda running: _say_ready(running, settings))
    if found.stopped_by == signal.SIGINT:
        return 130
    return 0


def _cards() -> list[str]:
    """The cards that this process sees, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count()
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return listed[:count] or [str(i) for i in range(count)]


def _host_bytes(count: int) -> int:
    """What one of several servers may take of the host where nobody says: its part of what one alone would."""
    import torch

    from hybridkv.cache.tiers import default_limit

    return default_limit(torch.device("cuda")) // count


def _say_ready(running: Replicas, settings: ServerSettings) -> None:
    """The address, and a command that asks."""
    ports, key = running.ports, settings.api_keys[0] if settings.api_keys else None
    listed = get(ports.servers[0], "/v1/models", key)[1]
    name = listed["data"][0]["id"] if isinstance(listed, dict) and listed.get("data") else "the model"
    address = f"http://127.0.0.1:{ports.router}"
    header = f" -H 'authorization: Bearer ${KEY_VARIABLE}'" if key else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    with suppress(OSError):
        at = ", ".join(map(str, ports.servers))
        print(f"serving {name} at {address} (replicas at ports {at}; the router's metrics at {ports.metrics})")
        headers = f"-H 'content-type: application/json' -H 'x-session-id: hello'{header}"
        print(f"curl {address}/v1/chat/completions {headers} -d '{body}'")
        sys.stdout.flush()
