"""Reading what was dumped: record tables, dump.json, tensors, key data. Nothing here compares."""
