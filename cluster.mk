# make cluster                 Slurm, images, two nodes, two sites: for real, on this machine
# make wheelhouse [ARCH=…]     wheels that the images install from (x86_64, aarch64)
# make images                  verl-cpu.sif and compare.sif from a local base, into images/
#
# Included by the Makefile.

ARCH ?= $(shell uname -m)

.PHONY: cluster wheelhouse images

cluster: $(STAMP)
	pytest -m cluster tests/cluster $(PYTEST_ARGS)

wheelhouse: $(STAMP)
	PYTHON=$(VENV)/bin/python containers/wheelhouse.sh $(ARCH)

images: $(STAMP)
	@mkdir -p images
	@cd tests/cluster && for name in verl-cpu compare; do \
	  sif=$$($(CURDIR)/$(VENV)/bin/python -m services.images $$name) && \
	  cp "$$sif" "$(CURDIR)/images/$$name.sif" && echo "images/$$name.sif"; done
