"""Rows joined by sample: key data and per-token sketches, whatever batches they were computed in.

Micro-batch splits, data-parallel sizes, row order and padding differ between two runs that do the
same work; the tokens of a sample do not. Nothing here is joined by position alone.
"""
