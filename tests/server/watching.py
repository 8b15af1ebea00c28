"""A reader of the feed of a server's cache, and what it knows."""

import base64
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from server.running import Running, until


class Reader:
    """One connection to /v1/cache/events. `known` is what its events say together."""

    def __init__(self, server: Running, room: int | None = None, **headers: str) -> None:
        """`room`: bytes that the system takes for it while it does not read."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.connection = server.connect()
        if room is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        self.connection.sendall(f"GET /v1/cache/events HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
        self._file = self.connection.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers: dict[str, str] = {}
        while line := self._file.readline().decode().strip():
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = value
        self.known: dict[str, Any] = {}
        self.seen = b""  # all that came
        self._events = self._read() if self.status == 200 else iter(())

    def _read(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        rest = b""
        while size := int(self._file.readline(), 16):  # the end is a 0: nothing at all is a connection that was cut
            rest += self._file.read(size)
            self._file.readline()
            while b"\n\n" in rest:
                event, _, rest = rest.partition(b"\n\n")
                self.seen += event
                fields = dict(line.partition(": ")[::2] for line in event.decode().splitlines())
                if "data" in fields:
                    yield fields["event"], fields["id"], json.loads(fields["data"])

    def next(self) -> tuple[str, str, dict[str, Any]]:
        """The next event (its name, id and data), which is taken into `known`."""
        name, identity, data = next(self._events)
        assert (name == "snapshot") == ("server" in data) and data, name
        self.known = taken(self.known, data)
        return name, identity, data

    def until(self, true: Any) -> None:
        """Read until something holds of what is known."""
        while not true(self.known):
            self.next()

    def close(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def taken(known: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """What is known with an event more: a snapshot replaces it, a delta changes it."""
    if "server" in data:
        return {**data, "map": {name: _cells(found) for name, found in data["map"].items()}}
    for name in ("engine", "kinds"):
        known[name] = data.get(name, known[name])
    for number, row in data.get("requests", {}).items():
        if row is None:
            del known["requests"][number]
        else:
            known["requests"][number] = row
    known["events"] += data.get("events", [])
    for name, change in data.get("map", {}).items():
        if isinstance(change, dict):
            known["map"][name] = _cells(change)
            continue
        cells = known["map"][name]["cells"]
        for at, part in change:
            piece = base64.b64decode(part)
            cells[at : at + len(piece)] = piece
    return known


def _cells(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "cells": bytearray(base64.b64decode(found["cells"]))}


def snapshot(server: Running, **headers: str) -> dict[str, Any]:
    """What /v1/cache says, in a reader's form."""
    status, _, found = server.ask("GET", "/v1/cache", headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert status == 200, found
    return taken({}, found)


def ended_row(server: Running, name: str) -> dict[str, Any]:
    """The row of a request that has ended, by its x-request-id, once it is in the picture."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        rows = snapshot(server)["requests"].values()
        found[:] = [row for row in rows if row.get("request") == name and row["state"] == "ended"]
        return bool(found)

    until(look)
    return found[0]
