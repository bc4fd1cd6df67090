"""Gate, noise floor, first divergence and cause: from measured differences to a verdict."""
