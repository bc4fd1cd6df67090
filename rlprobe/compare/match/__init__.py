"""Which record of one side is which of the other."""
