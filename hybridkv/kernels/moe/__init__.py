"""Mixtures of experts: routers, grouped products, the shared expert.

Letters: T tokens   E experts   k, K experts of a token   D model width   I inner width of an expert   M pairs (token,
choice)
"""
