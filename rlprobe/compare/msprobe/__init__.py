"""msprobe's own comparison table, computed as msprobe does."""
