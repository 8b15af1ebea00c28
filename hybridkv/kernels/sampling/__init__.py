"""Choosing the next token of many requests at once.

Letters: S rows that are sampled   V tokens of the vocabulary   P pieces of a row   G groups of neighbours

    noise      Philox numbers, Gumbel noise and weights, bit for bit the same on every device
    rows       what is asked of one row, and its table on the device
    sample     the definition, and the function that picks
    launch     the launches of the kernels; kernels: those over pieces of rows; finish: the one that ends each row
    log_sum    log-sum-exp of rows, for log probabilities
    mask       tokens that a grammar does not allow, -inf in chosen rows
"""
