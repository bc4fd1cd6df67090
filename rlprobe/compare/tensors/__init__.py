"""Tensor files read without torch, and the distance of two tensors in one blocked pass."""
