"""Below which share of a tensor's norm a distance of two sketches says nothing.

Every sketch carries the error of its own summation, so that sketches of equal tensors differ too.
By how much depends on how alike the two were made; each case has its floor here, and nowhere else.
No numpy: comparing is not to wait for its import.
"""

from __future__ import annotations

import math

#: One sketch: its accumulation error. Measured on a CPU against fp64, with AVX-512, AVX2 and no
#: vector instructions: the largest of 80 tensors of each of ten sizes from 1e3 to 1e7 elements
#: (normal, and uniform in 0.5 to 1.5) was 1.66e-7, at 1e5; a tenth is added.
ACCUMULATION = 1.8e-7
#: Two sketches of one device: both carry that error, each its own, and it adds in the square. What
#: lies below is written down as this, with the reason that no difference was seen.
UNSEEN = math.sqrt(2.0) * ACCUMULATION
#: Two devices' sketches of one tensor: the same, rounded up to one digit, as the figure above was
#: measured on CPUs and another device may sum in another order.
DEVICES = 3e-7
#: Sketches put together from shards, each side cut in its own way: every shard has an error of its
#: own norm, and P of them add up to sqrt(P) times one sketch's at the most (Cauchy-Schwarz), on
#: either side. This is what two sides of 64 shards come to, rounded up.
SHARDED = 3e-6
