"""Attention over paged keys and values.

A folder's letters, in shapes and in kernels:

    T   tokens (queries) of a step          B   requests              N   pages, or page ids of a stream
    H   query heads                         G   KV heads              GROUP = H / G
    D   channels of a head                  P   entries of a page     R   rotary pairs; rows of a log-sum-exp buffer
    BM, BN, BD, BT   a program's query rows, keys, channels, tokens

Prefixes in kernels: i_ an index, o_ offsets, m_ a mask, p_ pointers, b_ a block of numbers.

    inputs      norm, rope and storing, before attention       append       storing alone
    prefill     chunks of prompts                              prefill_plan, prefill_kernel, prefill_hopper
    decode      one token for each request                     decode_tuning, decode_kernel
    exact       both, with bits that do not depend on others   exact_kernel
    tile        one tile in torch                              tile_kernel: in Triton
    dequantise  pages as dense bf16 tiles                      launch: pages and tables as kernel arguments
"""
