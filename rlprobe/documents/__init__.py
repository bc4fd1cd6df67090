"""YAML, JSON and npy from files that anybody may have written, read within limits.

Alignments, the vendor's collector YAML, matching rules, msprobe's config.json, manifests, indices
of bundles, results: what is refused raises :class:`~rlprobe.documents.limits.DocumentError`, whose
message gives the place. The caller says which file it was, and raises its own kind of error.
"""
