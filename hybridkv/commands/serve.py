"""`hybridkv serve`: a model behind HTTP, for clients of OpenAI and Anthropic."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Exit, Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import with_options
from hybridkv.commands.options import ModelOptions
from hybridkv.commands.reuse_options import TurnReuseOptions
from hybridkv.config import EngineConfig, parse_bytes
from hybridkv.errors import HybridKVError

if TYPE_CHECKING:
    from hybridkv.llm import LLM
    from hybridkv.server.run import Server

SERVER, LIMITS, ROLE = "Server", "Limits", "Prompts read by another server"
KEY_VARIABLE = "HYBRIDKV_API_KEY"
MOST_REPLICAS = 64


@with_options
def serve(
    *,
    host: Annotated[
        str,
        Option(
            "--host",
            metavar="ADDRESS",
            help="where to listen; others than this machine need a key",
            rich_help_panel=SERVER,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, Option("--port", metavar="N", help="where to listen; 0: any that is free", rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        Option(
            "--api-key",
            metavar="KEY",
            help=f"a key that clients must send; repeatable; {KEY_VARIABLE} or --api-key-file hide it from other users",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        str | None,
        Option(
            "--api-key-file",
            metavar="FILE",
            help="keys, one a line",
            rich_help_panel=SERVER,
            autocompletion=completion.any_file,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        Option(
            "--alias",
            "--served-model-name",
            metavar="TEXT",
            help="what clients call the model; repeatable; * stands for anything; the name of its file",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        Option(
            "--allowed-host",
            metavar="TEXT",
            help="a name by which clients may call this server, besides localhost and addresses; *: any; repeatable",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        Option(
            "--allowed-origin",
            metavar="URL",
            help="a web page's origin that may ask, such as http://localhost:3000; repeatable",
            rich_help_panel=SERVER,
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        Option(
            "--tool-format",
            metavar="NAME",
            help="how the model writes calls: hermes, qwen_xml, llama, dsml or plain; as its chat template says",
            rich_help_panel=SERVER,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        Option(
            "--temperature",
            metavar="X",
            min=0.0,
            max=1e4,
            help="of requests that name none, as agents' do; 0 takes the likeliest token; the model's own, or 1",
            rich_help_panel=SERVER,
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        Option(
            "--document",
            metavar="FILE",
            help="one that hybridkv compress wrote; requests go on from it by the file's name; repeatable",
            rich_help_panel=SERVER,
            autocompletion=completion.any_file,
        ),
    ] = None,
    log_json: Annotated[bool, Option("--log-json", help="log lines as JSON", rich_help_panel=SERVER)] = False,
    metrics_prefix: Annotated[
        str,
        Option("--metrics-prefix", metavar="TEXT", help="of names at /metrics, such as vllm:", rich_help_panel=SERVER),
    ] = "hybridkv_",
    queue: Annotated[
        int, Option("--queue", metavar="N", help="answers that may wait for their turn", rich_help_panel=LIMITS)
    ] = 128,
    queue_timeout: Annotated[
        float,
        Option("--queue-timeout", metavar="SECONDS", help="that they may wait; 0: for ever", rich_help_panel=LIMITS),
    ] = 60.0,
    request_timeout: Annotated[
        float,
        Option(
            "--request-timeout", metavar="SECONDS", help="that a request may take; 0: for ever", rich_help_panel=LIMITS
        ),
    ] = 600.0,
    shutdown_timeout: Annotated[
        float,
        Option(
            "--shutdown-timeout",
            "--drain",
            metavar="SECONDS",
            help="for answers to come to their end, and conversations to be saved, when the server is told to end",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    host_cache: Annotated[
        str | None,
        Option(
            "--host-cache",
            metavar="SIZE",
            help="memory on the host for caches that wait to be used again; a quarter of what is free, 1GiB on a CPU",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    keep_preempted: Annotated[
        bool,
        Option(
            "--keep-preempted",
            help="answers that make room for others wait in the host's memory, and are not computed again",
            rich_help_panel=LIMITS,
        ),
    ] = False,
    disk_cache: Annotated[
        str | None,
        Option(
            "--disk-cache",
            metavar="DIR",
            help="where named conversations are saved when the server ends, and found by the next one",
            rich_help_panel=SERVER,
            autocompletion=completion.any_file,
        ),
    ] = None,
    disk_size: Annotated[
        str | None,
        Option("--disk-size", metavar="SIZE", help="that all of these may take there", rich_help_panel=LIMITS),
    ] = None,
    role: Annotated[
        str,
        Option(
            "--role",
            metavar="NAME",
            help="both, or of several servers: prefill reads prompts for others, decode writes their answers",
            rich_help_panel=ROLE,
        ),
    ] = "both",
    kv_host: Annotated[
        str,
        Option(
            "--kv-host",
            metavar="ADDRESS",
            help="where other servers fetch what was read; of a private network: it is not encrypted",
            rich_help_panel=ROLE,
        ),
    ] = "127.0.0.1",
    kv_port: Annotated[
        int | None,
        Option(
            "--kv-port",
            metavar="N",
            help="the same; 0: any that is free. With --role both nothing is sent without it",
            rich_help_panel=ROLE,
        ),
    ] = None,
    kv_peer: Annotated[
        list[str] | None,
        Option(
            "--kv-peer",
            metavar="HOST:PORT",
            help="from which prompts may be fetched; without API keys HOST will do; repeatable",
            rich_help_panel=ROLE,
        ),
    ] = None,
    kv_memory: Annotated[
        str,
        Option("--kv-memory", metavar="SIZE", help="of requests that wait to be fetched", rich_help_panel=ROLE),
    ] = "4GiB",
    kv_transport: Annotated[
        str,
        Option(
            "--kv-transport",
            metavar="NAME",
            help="tcp, or nixl: from memory to memory, by RDMA (extra: nixl); on both servers",
            rich_help_panel=ROLE,
        ),
    ] = "tcp",
    replicas: Annotated[
        int,
        Option(
            "--replicas",
            metavar="N",
            help="servers, each with cards of its own, at the next ports behind a router (extra: replicas)",
            rich_help_panel=SERVER,
        ),
    ] = 1,
    model: ModelOptions,
    reuse: TurnReuseOptions,
) -> None:
    """Serve a model over HTTP, for clients of OpenAI (chat completions, completions) and Anthropic (messages).

    Ctrl-C or SIGTERM lets running answers come to their end; a second one ends at once.
    """
    from hybridkv.commands.serve_replicas import serve_replicas
    from hybridkv.server.settings import ServerSettings

    if not 1 <= replicas <= MOST_REPLICAS:
        raise BadParameter(f"--replicas must be from 1 to {MOST_REPLICAS}, not {replicas}")
    _refuse_many_whole(model.tp)
    keys = _keys(api_key or [], api_key_file)
    try:
        settings = ServerSettings(
            host=host,
            port=port,
            api_keys=keys,
            names=tuple(alias or ()),
            allowed_hosts=tuple(allowed_host or ()),
            allowed_origins=tuple(allowed_origin or ()),
            queue=queue,
            queue_seconds=queue_timeout,
            request_seconds=request_timeout,
            shutdown_seconds=shutdown_timeout,
            metrics_prefix=metrics_prefix,
            log_json=log_json,
            tool_format=tool_format,
            role=role,
            kv_host=kv_host,
            kv_port=kv_port,
            kv_peers=tuple(kv_peer or ()),
            kv_bytes=parse_bytes(kv_memory, "--kv-memory") or 0,
            kv_transport=kv_transport,
        )
    except HybridKVError as problem:
        raise BadParameter(_in_options(str(problem))) from None
    # oneDNN keeps a kernel for every number of rows that a CPU has met, 1,024 of them: some 200 MiB more for no speed.
    # It looks at this when torch first computes something
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    documents = _documents(document or [])
    cache = model.cache()
    reuse.config()  # refused before anything is loaded
    try:
        from hybridkv.server.documents import load_documents
        from hybridkv.server.record import log_to_stderr
        from hybridkv.server.run import Server
        from hybridkv.server.warm import capture_graphs
    except ModuleNotFoundError as problem:
        if (problem.name or "").split(".")[0] == "hybridkv":
            raise
        raise HybridKVError(f"serving needs {problem.name}: pip install 'hybridkv[server]'") from None
    if replicas > 1:
        code = serve_replicas(replicas, settings, model, host_cache, disk_cache)
        raise Exit(code)

    def load() -> LLM:
        kept: dict[str, Any] = {"host_cache": host_cache, "keep_preempted": keep_preempted}
        kept |= {"disk_cache": disk_cache, "disk_size": disk_size}
        llm = model.open(EngineConfig.max_requests, cache, reuse, **kept)
        if llm.ranks is not None:
            llm.ranks.end_process()
        if temperature is not None:
            llm.sampling_defaults["temperature"] = temperature
        load_documents(llm, documents)
        capture_graphs(llm)  # while /health still says loading: no client waits for them
        return llm

    log_to_stderr()
    if _follows():
        load()  # comes back on rank 0 alone, which listens
    server = Server(settings)
    server.run(load, _say_ready)
    server.service.llm.close()
    if server.service.fatal is not None:  # whoever starts servers again is to see it
        raise HybridKVError(server.service.fatal)
    if server.stopped_by == signal.SIGINT:
        raise Exit(130)


def _rank() -> tuple[int, int]:
    """(rank, size) of this process, if something like torchrun has started it as one of several."""
    from hybridkv.parallel.group import torchrun_place

    return torchrun_place() or (0, 1)


def _follows() -> bool:
    """Whether another process is rank 0 of the model: it has the port, and takes the requests."""
    return _rank()[0] > 0


def _refuse_many_whole(tp: int) -> None:
    """Several processes that were started as ranks, and of which each would open the whole model."""
    rank, size = _rank()
    if tp == 1 and size > 1:
        raise HybridKVError(
            f"this is process {rank} of {size} (RANK and WORLD_SIZE, as torchrun sets them), and each would open the "
            f"whole model: share it with --tp {size}, or serve it in each without these variables"
        )


def _documents(paths: list[str]) -> dict[str, str]:
    """Files by the names of documents, or BadParameter."""
    found: dict[str, str] = {}
    for path in paths:
        name = Path(path).stem
        if not Path(path).is_file():
            raise BadParameter(f"--document: there is no file {path!r}; hybridkv compress writes one")
        if name in found:
            raise BadParameter(f"--document: {path!r} and {found[name]!r} would both be called {name!r}; rename one")
        found[name] = path
    return found


def _in_options(text: str) -> str:
    """What is wrong, by the names of the options."""
    names = {"an API key": "--api-key", "kv_host": "--kv-host", "kv_port": "--kv-port", "role must": "--role must"}
    names |= {"kv_peers": "--kv-peer", "kv_transport": "--kv-transport"}
    for name, option in names.items():
        text = text.replace(name, option)
    return text if "--kv-host" in text else text.replace("host ", "--host ", 1)


def _say_ready(server: Server) -> None:
    """The address, and a command that asks."""
    name, address = server.service.names[0], server.address
    key = f" -H 'authorization: Bearer ${KEY_VARIABLE}'" if server.settings.api_keys else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    with suppress(OSError):  # whoever started it does not read: it serves all the same
        print(f"serving {name} at {address} (context of {server.service.context} tokens)")
        print(f"curl {address}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'")
        sys.stdout.flush()


def _keys(given: list[str], path: str | None) -> tuple[str, ...]:
    found = list(given)
    if key := os.environ.get(KEY_VARIABLE):
        found.append(key)
    if path is not None:
        from hybridkv.commands.prompts import read_text

        listed = [line.strip() for line in read_text(path, "--api-key-file").splitlines() if line.strip()]
        if not listed:
            raise BadParameter(f"--api-key-file: {path!r} has no key")
        found += listed
    return tuple(found)
