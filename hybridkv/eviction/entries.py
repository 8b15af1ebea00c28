"""What a resident request's streams hold, as policies read it: lengths, last queries, positions of entries."""

from __future__ import annotations

import numpy as np
import torch

from hybridkv.cache import KVCacheManager
from hybridkv.cache.step import upload
from hybridkv.eviction.sizes import STREAMS
from hybridkv.request import Request


def mean_length(request: Request, manager: KVCacheManager) -> float:
    """Entries of the request's streams on average: heads and layers may share a budget unevenly.

    Over ranks it is of the streams of all of them, which the record of the last eviction knows.
    """
    everywhere = lengths_everywhere(request, manager.position(request.key))
    if everywhere is not None:
        return float(everywhere.sum() / everywhere.size)
    return float(manager.tables[STREAMS].lengths[manager.slot_of[request.key]].mean())


def lengths_everywhere(request: Request, position: int) -> np.ndarray | None:
    """[layers, all G] entries of the streams of all ranks at a position; None: no record has them."""
    at = max((at for at in request.evictions if at <= position), default=None)
    everywhere = None if at is None else request.evictions[at].everywhere
    return None if at is None or everywhere is None else everywhere + (position - at)


def is_alike(request: Request) -> bool:
    """Whether the heads of a layer hold equally many entries, on all ranks."""
    return all(record.alike for record in request.evictions.values())


def queries_at(buffers: torch.Tensor, buffer: int, at: torch.Tensor) -> torch.Tensor:
    """[W, layers, ...] of positions `at`, from buffers [layers, B, W, ...] in which position p lies in row p mod W."""
    words, dtype = buffers, buffers.dtype
    if buffers.shape[-1] * buffers.element_size() % 8 == 0 and buffers.is_contiguous() and not buffers.storage_offset():
        words = buffers.view(torch.int64)  # a copy takes as long as it has numbers, whatever their size
    return words[:, buffer].transpose(0, 1).index_select(0, at % buffers.shape[2]).view(dtype)


def positions(slot: int, manager: KVCacheManager) -> torch.Tensor:
    """[streams, L] absolute position of every entry of a slot, on the device; -1 past a stream's length."""
    lengths, past = manager.tables[STREAMS].lengths[slot], manager.compactions.get(slot)
    entry = torch.arange(int(lengths.max(initial=0)), device=manager.device)
    found = entry.expand(len(lengths), -1)
    if past is not None and STREAMS in past.kept:
        kept = past.kept[STREAMS]
        counts = np.array([len(each) for each in kept])
        old = np.full((len(kept), int(counts.max())), -1, np.int64)
        old[np.arange(old.shape[1]) < counts[:, None]] = np.concatenate(kept)
        sent = upload([counts, old.ravel()], manager.device)
        device_counts = sent[: len(kept), None]
        survivors = sent[len(kept) :].view(old.shape)[:, : len(entry)]
        survivors = torch.nn.functional.pad(survivors, (0, len(entry) - survivors.shape[1]))
        later = found - device_counts + past.position
        found = torch.where(entry < device_counts, survivors, later)
    if (lengths < len(entry)).any():
        found = torch.where(entry < upload([lengths], manager.device)[:, None], found, -1)
    return found
