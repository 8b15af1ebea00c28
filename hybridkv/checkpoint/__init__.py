"""Checkpoints: model files on disk, and how tensors are read from them."""
