"""Grounds on which a difference is not held against the target, one file each."""
