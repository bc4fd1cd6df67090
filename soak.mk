# make soak [MINUTES=n] [SEED=n]   kills, bit flips, concurrency, faults and fuzz on stores and
#                                  results for so long; figures at the end, non-zero on any loss.
#                                  Without MINUTES the short form that make test runs.
#
# Included by the Makefile.

.PHONY: soak

soak: $(STAMP)
	SOAK_MINUTES=$(MINUTES) SOAK_SEED=$(SEED) pytest -q tests/soak $(PYTEST_ARGS)
