"""How far apart two tensors are, element by element, in one blocked pass."""
