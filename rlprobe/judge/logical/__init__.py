"""One record per module and stage, where the sides are laid out otherwise.

Micro-batches of other sizes, ranks that share samples out otherwise, packed rows against padded
ones, tensor- and pipeline-parallel shards, FSDP against Megatron: record against record nothing can
be compared. Records by coordinates (:mod:`rlprobe.coordinates`) are the same in every layout. Here
those of all ranks of a side are added up to the whole tensor, and a row of each stands in place of
the rows of single calls, as if the whole stage had been one call of one process.

Ranks that hold the same tokens and features are replicas and count once: of several that differ,
the one that is farthest from the benchmark is judged, so that a fault of one replica alone is seen.
"""
