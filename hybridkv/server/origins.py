"""What a request says of itself before anybody believes it: the form of its target, the name that it came by, headers
that stand there twice, and pages of other origins that were allowed (CORS).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import unquote

from starlette.types import Scope

from hybridkv.server.problems import ApiError, bad
from hybridkv.server.settings import LOOPBACK, MAX_HEADERS, ServerSettings

# what is decided by them must not depend on which of two is read
SINGLE = (b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-length", b"x-request-id")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(/[^?#]*)?", re.IGNORECASE)
_NAMES = re.compile(r"[A-Za-z0-9_, -]{0,1000}")


def settle_target(scope: Scope) -> None:
    """A target with a host in it (`GET http://localhost/health`) names a path, and its host is the one that counts."""
    found = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return
    path = found[2] or b"/"
    scope["raw_path"], scope["path"] = path, unquote(path.decode("ascii", "replace"))
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"host"] + [(b"host", found[1])]


def own_names(settings: ServerSettings) -> Callable[[str | None], bool]:
    """Whether a Host header is a name of this server. DNS can make any other name lead here, and the pages of that name
    would be of this server's origin.

    At a public address clients also come by addresses, which DNS cannot take, by the machine's name, and, old ones,
    without a Host; no browser does.
    """
    names = {*LOOPBACK, settings.host.lower(), *map(str.lower, settings.allowed_hosts)}
    public = not settings.is_loopback
    if public:
        names.add(socket.gethostname().lower())

    def is_own(host: str | None) -> bool:
        if "*" in names or (public and host is None):
            return True
        name = _without_port(host or "")
        return name in names or (public and _is_address(name))

    return is_own


def _without_port(host: str) -> str:
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_head(scope: Scope) -> None:
    """A version that is spoken, headers within their limit (h11 has one for those in pieces), and none that decides
    something twice; or ApiError.
    """
    if scope["http_version"] not in ("1.0", "1.1"):
        raise ApiError(505, "HTTP/1.1 is spoken here", headers={"connection": "close"})
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADERS:
        raise bad(f"the request's line and headers have more than {MAX_HEADERS} bytes")
    counts = Counter(name for name, _ in scope["headers"])
    if twice := [name for name in SINGLE if counts[name] > 1]:
        raise bad(f"the header {twice[0].decode()} was sent more than once")


def is_preflight(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Whether a browser asks if a page may ask."""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def cross_origin_headers(
    headers: Mapping[str, str], allowed: tuple[str, ...], preflight: bool = False
) -> list[tuple[bytes, bytes]]:
    """What an answer to a page of another origin needs; nothing if that was not allowed."""
    origin = headers.get("origin")
    if origin is None or origin not in allowed:
        return []
    found = {"access-control-allow-origin": origin, "vary": "origin", "access-control-expose-headers": "x-request-id"}
    if preflight:
        asked = headers.get("access-control-request-headers", "")
        found |= {"access-control-allow-methods": "GET, POST", "access-control-max-age": "600"}
        found["access-control-allow-headers"] = asked if _NAMES.fullmatch(asked) else ""
        if headers.get("access-control-request-private-network") == "true":  # a public page, this machine
            found["access-control-allow-private-network"] = "true"
    return [(name.encode(), value.encode("latin-1")) for name, value in found.items()]
