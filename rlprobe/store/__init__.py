"""Runs kept as content-addressed objects, published whole or not at all.

Layout: ``{store}/objects/sha256/ab/{digest}``, ``{store}/runs/{key}/manifest.json`` with the tree
it describes, ``{store}/alignments/{name}.json``. Nothing here needs torch.
"""
