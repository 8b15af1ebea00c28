"""Tensor parallelism: one model over several processes, each with its part of every layer and of the cache.

    shard     which rank of how many; the config of a rank; the sizes that are refused
    cuts      which part of every tensor a rank holds, as a table
    group     the processes, and what they send each other
    layers    products, embedding, head and experts that hold a part
    loader    tensors taken out of a checkpoint, cut
    random_part  a part with random weights, for benchmarks
    block_parts  parts of matrices that are codes with block scales
    rank_bytes  what a rank's weights take
    events    what rank 0 tells the others
    signs     their exit codes and signals
    launch    ranks are started, watched and ended

docs/tensor_parallel.md says when it helps.
"""
