# make selftest [ARGS=…]    plant every fault and benign change and print the score (some minutes)
# make selftest-quick       a few of them, as continuous integration does

# make stories              three divergences from alignment to a reproducer that exits 3
# make curves               twenty real steps of training, a correct device and a late fault
# make layouts              layouts against layouts, clean and with planted faults: the table (half an hour)

.PHONY: selftest selftest-quick curves layouts stories

selftest: $(STAMP)
	rlprobe selftest --json results/selftest/scores.json $(ARGS)

selftest-quick: $(STAMP)
	rlprobe selftest --quick --json results/selftest/quick.json $(ARGS)

layouts: $(STAMP)
	python tests/e2e/layouts.py --directory results/layouts --json results/layouts/table.json $(ARGS)

curves: $(STAMP)
	pytest -m long tests/e2e/test_curves.py $(PYTEST_ARGS)

# From a divergence to a folder that exits 3: across two sites, in the optimizer, in backward.
stories: $(STAMP)
	pytest -q -m long tests/e2e/test_stories.py tests/e2e/test_refine.py $(PYTEST_ARGS)
