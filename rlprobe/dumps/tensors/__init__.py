"""Tensors from files of other people's making, without torch."""
