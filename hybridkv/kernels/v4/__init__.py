"""DeepSeek-V4: compressors and their state, the indexer, sparse attention, hyper-connections.

Letters: T tokens   B requests   S slots   H heads   D, c, C channels of a head or of an entry
r, ROPE rotated channels   N pages   P entries of a page   R rows of a ring (norm_rope: pairs that are
rotated)   m, M, ratio tokens of an entry   K chosen entries of a token (sparse), banks of a pool
(running_pool)   n streams (hyper_connections)
"""
