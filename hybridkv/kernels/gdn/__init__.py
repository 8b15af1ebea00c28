"""Gated DeltaNet: causal convolution, gated delta rule and output norm, for decode steps and for prompts.

Letters: T tokens   B requests   Hk, Hv key and value heads   K, V their dims   C channels of the convolution, or the 64
tokens of a chunk   W width of the convolution   N chunks
"""
