"""Scoring, choosing and moving the entries that survive an eviction.

A folder's letters, in shapes and in kernels:

    W   queries of the window        H   query heads      G   KV heads (streams)      R = H / G in score, pool_heads
    L   entries of the longest stream                     N   pages                   R   rows in select: streams
    D   channels of a head           P   entries of a page
    BW, BN, BD, BK   a program's queries, keys, channels, channels of one product

    score          attention that the window pays to each entry, per query head         score_hopper: its Hopper kernel
    peak           the most that any query pays to it, per KV head                      (the kernels of score)
    value_norms    the length of each entry's value
    key_difference how far each key points from the others                              (page_rows: both read by it)
    peak_pool      peaks spread to their neighbours, floored and weighted
    peak_mix       peaks of all streams, standings and norms in one score
    select         scores of query heads to KV heads; the entries that survive          (kernels/topk.py: the search)
    select_shared  the entries that survive where streams share a budget                select_sizes: bytes of both
    raise_kept     scores of entries that stay for sure, above all others
    compact        entries from one place to another, byte for byte
    to_front       survivors to the front of their own pages, from lists on the device
"""
