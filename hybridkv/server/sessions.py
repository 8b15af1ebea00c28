"""Conversations that clients name: each one's cache stays for its next turn, and survives the server.

A name (`prompt_cache_key`, or the header x-session-id) chooses within a salt; it is no secret. A named conversation
goes on in its own cache, what was evicted from it included, if the new prompt begins with all of its tokens. Where it
does not, the cache is given up, and the prompt begins with what others have read, as any other.

Named conversations are held where that is worth something: where entries are evicted, or where there is a folder to
save them in. When the server is told to end it saves those that were used in the last hour, latest first, as far as the
time goes; the next one restores a conversation when it is first named.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from hybridkv.cache.store import Store
from hybridkv.engine.engine import Engine
from hybridkv.engine.storing import load_request, save_request
from hybridkv.errors import HybridKVError
from hybridkv.llm import LLM
from hybridkv.request import Request
from hybridkv.server.events import Sharing
from hybridkv.server.problems import ApiError, bad

MOST = 1024  # conversations with a name
RECENT = 3600.0  # seconds; those that are saved at the end
PREFIX = "served-"  # of their names in the store
ACTIONS = ("save", "restore", "fork", "forget")

log = logging.getLogger("hybridkv.server")
Name = tuple[bytes, str]  # salt, and what the client calls it


@dataclass
class Named:
    """A conversation, as its last request left it."""

    request: Request
    to_disk: bool = True
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """All named conversations of a server. `add` runs on the engine's thread, all else on others."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._found = llm, OrderedDict[Name, Named]()
        self._lock = threading.Lock()
        self._restoring: dict[Name, threading.Lock] = {}
        self._on_disk = {each.name for each in llm.store.saved()} if llm.store is not None else set()
        self._unreadable = set[str]()  # those that could not be restored: a turn does not try them again

    # ---- requests

    def add(
        self, engine: Engine, tokens: list[int], params: Any, eviction: Any, sharing: Sharing, how: dict
    ) -> Request:
        """A request of a client, in its conversation if it names one."""
        name = (sharing.salt, sharing.conversation)
        worth = self._llm.store is not None or engine.resolve_eviction(eviction) is not None
        with self._lock:
            before = self._found.get(name)
        busy = before is not None and not before.request.finished
        if not sharing.conversation or params.n > 1 or sharing.cache is False or busy or not worth:
            return engine.add(tokens, params, eviction=eviction, **how)
        after = None
        if before is not None and before.request in engine.scheduler.held:
            position = engine.manager.position(before.request.key)
            after = before.request if before.request.tokens[:position] == tokens[:position] else None
        request = engine.add(tokens, params, hold=True, after=after, eviction=eviction, **how)
        for lost in self._remember(name, Named(request, sharing.to_disk)):
            if lost is not after:
                engine.let_go(lost)
        return request

    def _remember(self, name: Name, named: Named) -> list[Request]:
        """Requests that lose their name by it: the one that had this name, and those of the oldest conversations."""
        with self._lock:
            before = self._found.pop(name, None)
            gone = [] if before is None else [before.request]
            self._found[name] = named
            while len(self._found) > MOST:
                gone.append(self._found.popitem(last=False)[1].request)
            return gone

    def _is_here(self, name: Name) -> bool:
        """Whether the conversation is being written, or its cache is held. Called with the lock."""
        named = self._found.get(name)
        return named is not None and (not named.request.finished or self._is_held(named.request))

    def _is_held(self, request: Request) -> bool:
        return request in tuple(self._llm.engine.scheduler.held)  # a copy: the engine's thread changes it

    # ---- on the disk

    def file_name(self, name: Name) -> str:
        """What it is called in the store."""
        return PREFIX + hashlib.sha256(name[0] + b"\0" + name[1].encode("utf-8", "surrogatepass")).hexdigest()[:40]

    def restore(self, sharing: Sharing, again: bool = False) -> str | None:
        """A conversation that is on the disk, and not here, comes back; returns why it does not: it is read again then.

        again: it is tried also where it could not be restored before.
        """
        name = (sharing.salt, sharing.conversation)
        file = self.file_name(name)
        with self._lock:
            if not sharing.conversation or file not in self._on_disk or self._is_here(name):
                return None
            lock = self._restoring.setdefault(name, threading.Lock())
        with lock:  # one of several requests that name it does it
            with self._lock:
                known = file in self._on_disk and (again or file not in self._unreadable)
                if not known or self._is_here(name):
                    return None
                before = self._found.get(name)
            try:
                request = load_request(self._llm.owner, self._store(), file, self._key(name))[0]
            except HybridKVError as problem:
                log.warning("a saved conversation is read again: %s", problem)
                with self._lock:
                    self._unreadable.add(file)
                return str(problem)
            if request is not None:
                with self._lock:
                    changed = self._found.get(name) is not before or file not in self._on_disk
                self._drop([request] if changed else self._remember(name, Named(request)))
            return None

    @property
    def saves(self) -> bool:
        """Whether there is a folder, and a conversation that may go there."""
        with self._lock:
            return self._llm.store is not None and any(each.to_disk for each in self._found.values())

    def save_recent(self, until: float) -> int:
        """Save what was used lately, latest first, until then (time.monotonic()); returns how many were."""
        with self._lock:
            listed = list(reversed(self._found.items()))
        done = 0
        for name, named in listed if self._llm.store is not None else ():
            now = time.monotonic()
            if now > until or now - named.used > RECENT or not named.to_disk or not named.request.finished:
                continue
            if not self._is_held(named.request):  # what is on the disk of it stays
                continue
            try:
                self._save(name, named)
                done += 1
            except HybridKVError as problem:
                log.warning("a conversation was not saved: %s", problem)
        return done

    def _save(self, name: Name, named: Named) -> None:
        save_request(self._llm.owner, self._store(), self.file_name(name), named.request, {}, self._key(name))
        with self._lock:
            self._on_disk.add(self.file_name(name))
            self._unreadable.discard(self.file_name(name))

    def _store(self) -> Store:
        if self._llm.store is None:
            raise bad("this server has no folder to save in; start it with --disk-cache DIR")
        return self._llm.store

    def _key(self, name: Name) -> dict[str, str]:
        return self._llm.cache_key(salt=hashlib.sha256(name[0]).hexdigest() if name[0] else "")

    # ---- for clients

    def listed(self, salt: bytes) -> list[dict[str, Any]]:
        """The conversations of a salt, latest first."""
        with self._lock:
            mine = [(name[1], each) for name, each in reversed(self._found.items()) if name[0] == salt]

        def words(engine: Engine) -> list[dict[str, Any]]:
            manager, held, found = engine.manager, set(engine.scheduler.held), []
            for name, each in mine:
                request, there = each.request, each.request in held
                where = "given up" if not there else "frozen" if request.key in manager.frozen else "slot"
                if there and where == "frozen" and manager.frozen[request.key].exported is not None:
                    where = "host"
                cached = manager.position(request.key) if there else 0
                where = where if request.finished else "running"
                found.append({"name": name, "tokens": len(request.tokens), "cached_tokens": cached, "where": where})
            return found

        return self._llm.owner.run(words)

    def act(self, salt: bytes, action: str, name: str, to: str | None) -> dict[str, Any]:
        """Save, restore, fork or forget a conversation; or ApiError."""
        key = (salt, name)
        if action == "forget":
            self._forget(key)
            return {"name": name, "forgotten": True}
        problem = self.restore(Sharing(salt, conversation=name), again=True) if action == "restore" else None
        with self._lock:
            named, here = self._found.get(key), self._is_here(key)
        if problem is not None:
            raise ApiError(409, f"the conversation cannot be restored: {problem}", param="name")
        if named is None:
            raise ApiError(404, "there is no conversation of that name", param="name")
        if not named.request.finished:
            raise ApiError(409, "the conversation's last answer is still being written", param="name")
        if not here:
            status, why = (404, ", and it was not saved") if action == "restore" else (409, "")
            said = f"the conversation's cache was given up{why}; its next turn reads it again"
            raise ApiError(status, said, param="name")
        if action == "save":
            if not named.to_disk:
                said = "the conversation came with store: false, and never goes to the disk; send a turn without that"
                raise ApiError(409, said, param="name")
            self._save(key, named)
        elif action == "fork":
            if not to:
                raise bad("to: it is missing: what the fork is called", "to")
            fork = self._llm.owner.run(lambda engine: engine.fork_held(named.request))
            self._drop(self._remember((salt, to), Named(fork, named.to_disk)))
        return {"name": to if action == "fork" else name, "tokens": len(named.request.tokens)}

    def _forget(self, key: Name) -> None:
        """On all tiers at once."""
        file = self.file_name(key)
        with self._lock:
            named = self._found.pop(key, None)
            on_disk = file in self._on_disk
            self._on_disk.discard(file)
            self._unreadable.discard(file)
        if named is not None:
            self._llm.owner.run(lambda engine: engine.abort(named.request))
            self._llm.forget(key[0], named.request.tokens)
        if on_disk:
            self._store().remove(file)
        if named is None and not on_disk:
            raise ApiError(404, "there is no conversation of that name", param="name")

    def _drop(self, requests: list[Request]) -> None:
        if requests:
            self._llm.owner.run(lambda engine: [engine.let_go(request) for request in requests])

    def close(self) -> None:
        """Give all of them back."""
        with self._lock:
            requests = [each.request for each in self._found.values()]
            self._found.clear()
        if not self._llm.owner.closed:
            self._drop(requests)
