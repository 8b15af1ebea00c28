"""Scoring, choosing and moving the entries that survive an eviction.

A folder's letters, in shapes and in kernels:

    W   queries of the window        H   query heads      G   KV heads (streams)      R = H / G in score and pool_heads
    L   entries of the longest stream                     N   pages                   R   rows in select: streams
    D   channels of a head           P   entries of a page
    BW, BN, BD, BK   a program's queries, keys, channels, channels of one product

    score       attention that the window pays to each entry, per query head         score_hopper: its Hopper kernel
    select      scores of query heads to KV heads; the entries that survive          (kernels/topk.py: the search)
    compact     entries from one place to another, byte for byte
"""
