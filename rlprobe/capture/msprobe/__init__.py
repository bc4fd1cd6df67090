"""msprobe's own engine behind the same interface."""
