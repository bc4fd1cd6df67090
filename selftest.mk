# make selftest [ARGS=…]    plant every fault and benign change and print the score (some minutes)
# make selftest-quick       a few of them, as continuous integration does

# make curves               twenty real steps of training, a correct device and a late fault

.PHONY: selftest selftest-quick curves

selftest: $(STAMP)
	rlprobe selftest --json results/selftest/scores.json $(ARGS)

selftest-quick: $(STAMP)
	rlprobe selftest --quick --json results/selftest/quick.json $(ARGS)

curves: $(STAMP)
	pytest -m long tests/e2e/test_curves.py $(PYTEST_ARGS)
