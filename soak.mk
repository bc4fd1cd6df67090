# make soak [MINUTES=n] [SEED=n]   kills, bit flips, concurrency, faults and fuzz on stores and
#                                  results for so long; figures at the end, non-zero on any loss.
#                                  Without MINUTES the short form that make test runs; with
#                                  them also a kill at every call of a replacement, and of real
#                                  training in the middle.
#
# Included by the Makefile.

.PHONY: soak

KILLED := tests/unit/store/test_store_repair.py tests/e2e/test_kills.py

# Two processes in the long form, by whose shares of the minutes its tests go; none of its tests
# ends within the limit that others have.
soak: $(STAMP)
	SOAK_MINUTES=$(MINUTES) SOAK_SEED=$(SEED) pytest -q $(if $(MINUTES),-n 2 --timeout 0) \
	  tests/soak $(if $(MINUTES),$(KILLED)) $(PYTEST_ARGS)
