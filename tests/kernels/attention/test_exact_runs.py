"""attention_exact on Hopper GPUs: how queries are put together."""

import pytest

from hybridkv.kernels.attention.exact import HOPPER_SPLIT as SPLIT
from hybridkv.kernels.attention.exact import exact_runs


@pytest.mark.parametrize("room", (1, 7, 100, 10**6))
def test_every_query_runs_once_in_order_where_there_is_room(room: int) -> None:
    lengths, starts = [1, 5 * SPLIT, 3, SPLIT, SPLIT + 1, 0], [0, 1, 40, 43, 44, 90, 90]
    runs = exact_runs(lengths, starts, room)
    assert [(b, i) for run in runs for b, first, last in run for i in range(first, last)] == [
        (b, i) for b in range(6) for i in range(starts[b], starts[b + 1])
    ]
    for run in runs:
        queries = sum(last - first for _, first, last in run)
        splits = max(-(-lengths[b] // SPLIT) for b, _, _ in run)
        assert queries * splits <= room or queries == 1
    assert len(runs) == 1 or room < 10**6
