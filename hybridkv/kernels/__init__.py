"""One op per file: what it computes, the plain-torch reference, faster forms, and the one public function that picks.

Letters used for shapes throughout:
    T tokens of a step   B requests   H query heads   G KV heads   D head dim   N pages   P entries per page
    C conv channels      K key dim    V value dim     R rotary pairs
"""
