"""Is anything that was recorded blind? Each quantity of an aligned target, disturbed by itself.

A finished alignment that is aligned is copied, one quantity that the target recorded is disturbed,
and the copy is judged. Either the judgement changes, or the diagnosis had said before that this
quantity is not judged, and why. What is neither is **silent**: a divergence there would read as
agreement.
"""
