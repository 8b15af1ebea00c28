"""Gated DeltaNet: convolution and delta rule."""
