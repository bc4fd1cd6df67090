"""Stand-in for slime: the names that rlprobe's hooks rely on, and no more."""
