# make align    run the alignment of CONFIG on this machine and say where its page is
# make test     the whole test suite; a real vLLM among them, in .venv-engines
# make test-fast  the quick part of tests/unit
# make contract the collector's contract on real verl, as a table
# make contract-core  its cells that CI runs
# make families what make test leaves out of tests/unit and tests/workflow
# make lint     formatting, types, workflow, what is generated
# make cluster, soak, selftest, engines, versions, wheelhouse, images: see the .mk files
#
# The first call installs the pinned environment into .venv; later ones see that nothing changed.

CONFIG ?= config/config.yaml
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Another one for each architecture that shares this directory: VENV=.venv-$(uname -m)
VENV   ?= .venv
LOCK   := requirements/lock.txt
# Another lock or another pyproject is another file, so that what is installed is never stale.
STAMP  := $(VENV)/installed-$(shell cat $(LOCK) pyproject.toml hatch_build.py rlprobe.pth | sha256sum | cut -c1-16)

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# make tells small letters from capitals: `config=FILE` would align another file without a word.
ifeq ($(origin config),command line)
$(error config=$(config) sets nothing; write CONFIG=$(config))
endif

.PHONY: align test test-fast families contract contract-core lint install
.DEFAULT_GOAL := align

align: $(STAMP)
	@workflow/align "$(CONFIG)"

# Processes that share two cores gain nothing by threads of their own: they wait for each other.
test test-fast families: export POLARS_MAX_THREADS = 1
test test-fast families: export OMP_NUM_THREADS = 1
# The six processes of the tests keep what they compile, rewritten assertions too, for each other.
test test-fast: export PYTHONDONTWRITEBYTECODE =

# Six processes on two cores: a third of the long tests' time is waiting for a framework or a Slurm.
test: $(STAMP)
	pytest -n 6 --no-loadscope-reorder -m "not contract and not long" $(PYTEST_ARGS)

test-fast: $(STAMP)
	pytest -n 2 -m "not slow and not contract and not long" tests/unit $(PYTEST_ARGS)

families: $(STAMP)
	pytest -n 2 -m long tests/unit tests/workflow $(PYTEST_ARGS)

# Every option, mode, trainer and version; exits non-zero when a cell fails.
contract: $(STAMP)
	pytest -q --contract-table tests/contract tests/unit/test_verl_megatron.py \
	  tests/unit/test_slime_megatron_names.py $(PYTEST_ARGS)

# Mock modes, V1, LoRA, two ranks, a user's own script, Ray's job server: what CI runs of it.
contract-core: $(STAMP)
	pytest -q --contract-table tests/contract/test_modes.py tests/contract/test_own_script.py \
	  tests/contract/test_job_server.py tests/contract/test_versions.py \
	  tests/contract/test_trainers.py -k "not test_trainers or lora or two_ranks or v1" $(PYTEST_ARGS)

# Types twice: as developed here, and as the oldest Python of a vendor's image sees them.
lint: $(STAMP)
	ruff check .
	ruff format --check .
	mypy
	mypy --python-version 3.10 --no-warn-return-any --no-warn-unused-ignores rlprobe
	snakefmt --check Snakefile workflow
	snakemake --lint
	rlprobe config schema | diff -u workflow/schemas/alignment.schema.json -
	rlprobe config reference | diff -u docs/configuration.md -

install: $(STAMP)

$(STAMP):
	@workflow/install "$(PYTHON)" $(VENV) $(LOCK)
	@rm -f $(VENV)/installed-*
	@touch $@

-include cluster.mk selftest.mk soak.mk engines.mk versions.mk
