"""Training against inference within one run: the same prompt tokens through both models.

The log-prob stage runs whole sequences, padded or packed; the inference engine's prefill runs
prompts, one or many at a time. Which position of one is which of the other follows from the token
ids and positions that both recorded, never from their order alone. Only prompt tokens are compared:
a response's tokens go through the engine one by one.
"""
