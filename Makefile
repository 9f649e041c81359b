# Two commands matter: `make serve` and `make test`. The first use makes .venv and installs; later uses start at once.
#
#   make serve [MODEL=folder-or-hub-id] [PORT=8000] [CONFIG=file.yaml]
#   make test  [ARGS="tests/cli/test_cli.py -k check"]
#   make check [MODEL=...] [CONFIG=...]     can this model be served here?
#   make bench [ARGS="--workloads a,b"]     speed, start-up and memory
#   make gpu-check                          kernels, engine and speed on a CUDA GPU; needs no Ray
#   make prove                              the long tests too; interrupted, it goes on where it stopped
#   make fuzz [MINUTES=10] [SEED=1]         random cases against the plain engine; CASE=file runs one again
#   make fuzz ARGS=--http [MINUTES=10]     clients of all kinds, good and hostile, against a live server
#   make fuzz ARGS=--numbers [MINUTES=10]  extreme numbers in schemas, options and a model's files
#   make families                          a table of every decoder of transformers: served, or refused and why
#   make soak [MINUTES=30]                  memory and delays of a server under constant mixed load
#   make deaths [MINUTES=20]                processes die under streams: what their pauses consist of
#   make alerts                             which alerts fire and clear under injected faults, and when
#   make package [PACKAGE=folder]           sdist and wheel in .work/package/dist, tried in an empty environment
#   make lint | make clean | make constraints
#
# PYTHON picks another interpreter (3.11 or newer): make serve PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
# The versions with which the tests last passed. `make CONSTRAINTS= serve` takes the newest that pyproject.toml allows.
CONSTRAINTS := .ci/constraints.txt
# Keyed by what the files say, not by their dates, so that a fresh checkout of the same dependencies installs nothing.
STAMP := .venv/.installed-$(shell cat pyproject.toml $(CONSTRAINTS) | cksum | cut -d ' ' -f 1)
TORCH := $(shell sed -n 's/^ *"\(torch[^"]*\)",$$/\1/p' pyproject.toml)
PINNED := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PINNED)
PACKAGE := .work/package
LOG := .venv/install.log

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: serve test lint bench gpu-check prove families fuzz soak deaths alerts check clean install package constraints
.DEFAULT_GOAL := serve

# Tests start hundreds of processes. Where this is set, as in many containers, each would compile all its sources anew,
# and each of pytest's processes all tests.
test prove: export PYTHONDONTWRITEBYTECODE :=

# What these two print is to be pasted, so they are told how they were called.
serve check: export MANTA_UNDER_MAKE := 1

serve: $(STAMP)
	@exec $(BIN)/manta serve $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)') $(if $(CONFIG),--config '$(CONFIG)') $(ARGS)

# Four at a time keep two cores busy, because many tests wait for processes that they have started.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The environment is empty at first: nothing of the checkout or of .venv can stand in for what the wheel lacks. Beside
# the wheel, it gets a package of the index that has the name of a room.
package: $(STAMP)
	@mkdir -p $(PACKAGE) && rm -rf $(PACKAGE)/dist $(PACKAGE)/venv $(PACKAGE)/log
	@$(BIN)/python -m build --no-isolation --outdir $(PACKAGE)/dist . > $(PACKAGE)/log 2>&1 || { tail -20 $(PACKAGE)/log >&2; exit 1; }
	@$(PYTHON) -m venv $(PACKAGE)/venv
	@$(PACKAGE)/venv/bin/python -m pip --disable-pip-version-check install --quiet --quiet $(PINNED) '$(TORCH)'
	@$(PACKAGE)/venv/bin/python -m pip --disable-pip-version-check install --quiet --quiet $(PINNED) $(PACKAGE)/dist/*.whl cluster==1.4.1.post3
	@$(BIN)/python -m tests.installed $(PACKAGE)/venv
	@ls $(PACKAGE)/dist/*

# Without triton, because each build of torch names the one version that it takes, or none.
constraints: $(STAMP)
	@$(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//; /^triton==/d' > .ci/constraints.txt

check: $(STAMP)
	@$(BIN)/manta check $(if $(MODEL),'$(MODEL)') $(if $(CONFIG),--config '$(CONFIG)') $(ARGS)

bench: $(STAMP)
	@$(BIN)/manta bench $(ARGS)

# With GPU_PYTHON, an interpreter that has torch with CUDA and Manta's libraries, nothing is installed.
gpu-check: $(if $(GPU_PYTHON),,$(STAMP))
	@$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu_check $(ARGS)

prove: $(STAMP)
	MANTA_PROVE=1 $(BIN)/python -m pytest --timeout 1800 $(ARGS)

families: $(STAMP)
	@$(BIN)/python -m tests.families $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -m tests.fuzz $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(SEED),--seed '$(SEED)') $(if $(CASE),--case '$(CASE)') $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m benchmarks.soak $(if $(MINUTES),--minutes '$(MINUTES)') $(ARGS)

deaths: $(STAMP)
	@$(BIN)/python -m tests.serve.deaths $(if $(MINUTES),--minutes '$(MINUTES)') $(ARGS)

alerts: $(STAMP)
	@$(BIN)/python -m tests.telemetry.live_alerts $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .prove .fuzz .soak build *.egg-info

install: $(STAMP)

# torch goes first and alone: the pip of this machine decides which build it gets, and the rest is resolved against it.
$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) was not found. Manta needs Python 3.11 or newer: install it, or name one with PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), and Manta needs Python 3.11 or newer: name one with PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing Manta into .venv (once; this takes a few minutes) ..."
	@$(PYTHON) -m venv .venv || { echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv" >&2; exit 1; }
	@{ $(PIP) '$(TORCH)' && $(PIP) --editable '.[dev]'; } > $(LOG) 2>&1 || { tail -20 $(LOG) >&2; echo "make: the installation failed; all of pip's output is in $(LOG)" >&2; exit 1; }
	@rm -f .venv/.installed-*
	@touch $@
