"""Sessions over ranks: each rank's part of a held cache joined on rank 0, and a whole one cut for every rank.

Bytes go through the host. A whole session is that of one cache of all heads (cache/shards.py), but it names the model
of these ranks: whoever takes it in gives it its own name (session.py: as_own).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridkv.cache.buffers import Buffers, check_head, parse_head
from hybridkv.cache.heads import HeadCounts, Shard
from hybridkv.cache.schema import CacheSchema
from hybridkv.cache.session import Session
from hybridkv.cache.shards import cut_session, join_sessions
from hybridkv.eviction_record import EvictionRecord
from hybridkv.parallel.group import Group

LENGTH = 8  # bytes that say how long a head is
PIECE = 64 << 20  # bytes that one exchange sends, which has the group's seconds to end in


@dataclass(frozen=True)
class WholeCache:
    """What the ranks' caches are parts of."""

    schema: CacheSchema
    counts: HeadCounts

    def joined(self, group: Group, part: Session) -> Session:
        """The session that all ranks' parts make, on rank 0; on the others their own part."""
        own = _flat(part.to_buffers())
        longest = int(group.all_gather(torch.tensor([len(own)])).max())
        own = torch.nn.functional.pad(own, (0, longest - len(own)))
        whole = torch.empty((group.size, longest) if group.rank == 0 else 0, dtype=torch.uint8)
        for a in range(0, longest, PIECE):
            for rank, piece in enumerate(group.gather(own[a : a + PIECE]) or ()):
                whole[rank, a : a + PIECE] = piece
        if group.rank:
            return part
        parts = [Session.from_buffers(_buffers(each)) for each in whole]
        return join_sessions(parts, self.schema, self.counts)

    def cut(self, group: Group, session: Session | None) -> Session:
        """This rank's part of a session that rank 0 has."""
        if session is not None:
            data = _flat(session.to_buffers())
            group.broadcast(torch.tensor([len(data)]))
        else:
            data = torch.empty(int(group.broadcast(torch.zeros(1, dtype=torch.int64))), dtype=torch.uint8)
        for piece in data.split(PIECE):
            group.broadcast(piece)
        whole = Session.from_buffers(_buffers(data))  # on rank 0 too: what is wrong with it is wrong on all
        part = cut_session(whole, self.schema, self.counts, Shard(group.rank, group.size))
        known = {at: _known_everywhere(part.evictions[at], record) for at, record in whole.evictions.items()}
        return replace(part, evictions=known)


def _known_everywhere(part: EvictionRecord, whole: EvictionRecord) -> EvictionRecord:
    return EvictionRecord(part.lists(), part.lengths, np.asarray(whole.counts()))


def _flat(buffers: Buffers) -> Tensor:
    head = buffers.head_bytes
    first = torch.frombuffer(bytearray(len(head).to_bytes(LENGTH, "little") + head), dtype=torch.uint8)
    return torch.cat([first, *buffers.parts])


def _buffers(data: Tensor) -> Buffers:
    """Of what `_flat` made; what stands behind it is not looked at."""
    at = LENGTH + int.from_bytes(bytes(data[:LENGTH].tolist()), "little")
    head, parts = parse_head(bytes(data[LENGTH:at].tolist())), []
    for form in check_head(head):
        parts.append(data[at : at + form.nbytes].clone())  # in memory of its own, so that it may have any dtype
        at += form.nbytes
    return Buffers(head, parts)


def group_fingerprint(group: Group, own: str) -> str:
    """64 characters: names the model whose parts all ranks have, by what names each part."""
    mine = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
    found = group.all_gather(mine)
    return hashlib.sha256(bytes(found.flatten().tolist())).hexdigest()
