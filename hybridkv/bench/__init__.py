"""Benchmarks that anyone can repeat: `hybridkv bench NAME`, or without typer `python -m hybridkv.bench NAME`.

Every one prints a table as it goes and one JSON line last.

    kernels    every op alone, beside its torch form, what else is installed, and the floor
    decode     engine steps of a model with random weights: by context, by batch, with and without a budget
    prefill    whole prompts: seconds, tokens a second, peak memory
    eviction   what choosing and moving survivors costs, part by part
    capacity   how many requests are resident in a fixed amount of memory
    load       many requests at once and as they arrive: throughput, waiting, mixed steps, beside the counted floor
    sessions   a conversation put away and brought back: without a slot, on the host, on the disk
    ranks      one rank of a model over several GPUs, its sums left out; a group of one against none
    v4_kernels every op of DeepSeek-V4 alone
    v4_model   DeepSeek-V4 end to end on a few layers, beside transformers

Nothing is timed before its result has been compared with the reference.
"""
