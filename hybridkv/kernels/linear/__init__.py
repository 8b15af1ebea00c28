"""Products with weights: plain, FP8 and in GGUF's formats, for one row of x, for few and for many.

Letters: T rows of x   N rows of W, which are outputs   K columns of W, which are inputs   BT, BN, BK their tiles
S columns side by side (gemv), stages of a ring (skinny)   R rows of a packed matrix that are interleaved
"""
