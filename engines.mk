# make engines   a real vLLM under real verl on this CPU, in an environment of its own (300 MB more):
#                the clean runs and planted faults of the engine alone (some minutes), those that
#                make test leaves out among them
#
# Included by the Makefile.

.PHONY: engines

engines: $(STAMP)
	pytest -q tests/engines $(PYTEST_ARGS)
