"""How numbers are stored in pages and weights."""
