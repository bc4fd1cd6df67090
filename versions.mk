# make versions   the contract's cells on other versions of verl, each in an environment of its own over
#                 this one's (some minutes; verl 0.8.0, 0.9.0 and whatever is newest, besides 0.9.1)
#
# Included by the Makefile.

VERSIONS := 0.8.0 0.9.0 newest
VERSION_STAMPS := $(VERSIONS:%=.venv-verl-%/installed)

.PHONY: versions

versions: $(STAMP) $(VERSION_STAMPS)
	pytest -q --contract-table tests/contract/test_verl_versions.py $(PYTEST_ARGS)

# Each sees everything of the other environment, and has what differs before it.
.venv-verl-%/installed: requirements/verl-%.txt $(STAMP)
	@echo "Installing $< into $(@D)" >&2
	@rm -rf $(@D)
	@$(VENV)/bin/python -m venv --without-pip $(@D)
	@$(VENV)/bin/python -m pip --python $(@D)/bin/python install -qq --disable-pip-version-check \
	  --no-deps -r $<
	@echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/lib/python3.11/site-packages')" \
	  > $(@D)/lib/python3.11/site-packages/zz_beneath.pth
	@for name in rlprobe snakemake; do \
	  printf '#!/bin/sh\nexec %s/bin/python -m %s "$$@"\n' $(CURDIR)/$(@D) $$name \
	    > $(@D)/bin/$$name && chmod +x $(@D)/bin/$$name; done
	@touch $@

# make contract runs them too.
contract: $(VERSION_STAMPS)
