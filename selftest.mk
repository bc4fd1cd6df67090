# make selftest [ARGS=…]    plant every fault and benign change and print the score (some minutes)
# make selftest-quick       a few of them, as continuous integration does

.PHONY: selftest selftest-quick

selftest: $(STAMP)
	rlprobe selftest --json results/selftest/scores.json $(ARGS)

selftest-quick: $(STAMP)
	rlprobe selftest --quick --json results/selftest/quick.json $(ARGS)
