# make selftest [ARGS=…]    plant every fault and benign change and print the score (some minutes)
# make selftest-quick       a few of them, as continuous integration does
# make blind-faults [SET=…]  faults written blind: the fifth set, or second to eighth (ten minutes)
# make stories              three divergences from alignment to a reproducer that exits 3
# make unjudged             41 changes of finished runs that could go unjudged in silence (two minutes)
# make curves               twenty real steps of training, a correct device and a late fault
# make layouts              layouts against layouts, clean and with planted faults: the table (half an hour)
# make e2e-long             all of tests/e2e and tests/slime that make test leaves out: two ranks under
#                           Ray and without, faults of one's own, saved rollouts, Megatron rejoined,
#                           slime refined, across two sites, by msprobe's configuration (half an hour)
# make real-shape           a model of 24 layers and 151,936 tokens: benign, and two faults (slow, 19 GiB)

.PHONY: selftest selftest-quick blind-faults unjudged curves layouts stories e2e-long real-shape

selftest: $(STAMP)
	rlprobe selftest --json results/selftest/scores.json $(ARGS)

selftest-quick: $(STAMP)
	rlprobe selftest --quick --json results/selftest/quick.json $(ARGS)

# The self-test says what falls short of its answers; what that is worth, score.py says.
SET ?= fifth
blind-faults: $(STAMP)
	rlprobe selftest --no-ray --faults tests/blind_faults/$(SET)/on_verl --pass refined \
	  --directory results/blind_faults/$(SET) --json results/blind_faults/$(SET).json $(ARGS); \
	code=$$?; python tests/blind_faults/score.py results/blind_faults/$(SET).json \
	  --answers tests/blind_faults/$(SET)/answers.yaml -o results/blind_faults/$(SET)_scores.json \
	&& exit $$code

layouts: $(STAMP)
	python tests/e2e/layouts.py --directory results/layouts --json results/layouts/table.json $(ARGS)
	python tests/e2e/layouts.py --experts --directory results/layouts/experts \
	  --json results/layouts/experts.json $(ARGS)
	python tests/e2e/layouts.py --precision bf16 --clean --directory results/layouts/bf16 \
	  --json results/layouts/bf16.json $(ARGS)

unjudged: $(STAMP)
	pytest -q -m long tests/e2e/test_unjudged.py $(PYTEST_ARGS)

curves: $(STAMP)
	pytest -m long tests/e2e/test_curves.py $(PYTEST_ARGS)

# From a divergence to a folder that exits 3: across two sites, in the optimizer, in backward.
stories: $(STAMP)
	pytest -q -m long tests/e2e/test_stories.py tests/e2e/test_refine.py $(PYTEST_ARGS)

# 24 layers, hidden 896, a vocabulary of 151,936, bf16: time, memory and disk (some 19 GiB of memory).
real-shape: $(STAMP)
	python tests/e2e/real_shape.py --directory results/real-shape --json results/real-shape.json

e2e-long: $(STAMP)
	pytest -m long tests/e2e tests/slime $(PYTEST_ARGS)
