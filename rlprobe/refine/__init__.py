"""Tensors of the suspects only, to say more exactly what is wrong with them."""
