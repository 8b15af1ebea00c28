"""Products with weights, in every form that weights are stored in."""
