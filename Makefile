# make setup   .venv with the tailbound command, system packages from apt-packages.txt; nothing when all is there
# make demo    train a real model over a lossy lab, beside Gloo
# make test    the tests, in TEST_PROCESSES=2 processes (make lint: ruff, mypy, clang-format, generated files, prose)
# make thorough   make test, and what it leaves out: all of long series, examples, benchmarks
# make mutants break pure modules in one small place at a time, a test must notice each; MODULES=transport.steps
# make soak    tries at random for MINUTES=10: faults, hostile packets (also under sanitizers), training whose ranks come and go
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
EXTRAS := torch,test,prometheus,examples,dev
LABORATORY := host_lib/tailbound_lab
OUT ?= out
MINUTES ?= 10
TEST_PROCESSES ?= 2
C_SOURCES = $(filter-out ebpf/wire.h ebpf/abi.h host_lib/core/records.h,$(wildcard ebpf/*.[ch] xdp_programs/*.[ch] host_lib/core/*.[ch]))

.PHONY: help setup packages demo test thorough soak mutants lint format generate wheel bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# The stamp is trusted only if the command in this very folder still starts: a virtual environment cannot be moved.
setup: packages
	@if ! grep -qsF '$(CURDIR)/$(VENV)/' $(BIN)/tailbound || ! $(BIN)/tailbound --version >/dev/null 2>&1; then \
		rm -f $(STAMP); \
	fi
	@$(MAKE) --no-print-directory --silent $(STAMP)

packages:
	@missing=(); \
	for name in $$(sed 's/#.*//' apt-packages.txt); do \
		[[ "$$(dpkg-query -W -f '$${db:Status-Status}' "$$name" 2>/dev/null)" == installed ]] || missing+=("$$name"); \
	done; \
	if (($${#missing[@]} == 0)); then exit 0; fi; \
	if ((EUID != 0)) || ! command -v apt-get >/dev/null; then \
		echo "[1/3] System packages that are missing: $${missing[*]}" >&2; \
		echo "      Without gcc nothing runs, without the others there is no XDP. To install them (Debian's names):" >&2; \
		echo "      sudo apt-get update && sudo apt-get install --no-install-recommends -y $${missing[*]}" >&2; \
		exit 0; \
	fi; \
	echo "[1/3] System packages: $${missing[*]}"; \
	quiet=-q; [[ ! -t 1 ]] || quiet=; \
	apt-get update $$quiet; \
	DEBIAN_FRONTEND=noninteractive apt-get install $$quiet -y --no-install-recommends "$${missing[@]}"

$(STAMP): pyproject.toml $(LABORATORY)/pyproject.toml constraints.txt apt-packages.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: give another, make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make virtual environments: sudo apt-get install python3-venv" >&2; exit 1; }
	@if ! grep -qsF '$(CURDIR)/$(VENV)/' $(BIN)/pip; then \
		echo "[2/3] Virtual environment: $(VENV)"; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); fi
	@echo "[3/3] Python packages into $(VENV): PyTorch is the largest, a minute or two"
	@quiet=-q; [[ ! -t 1 ]] || quiet=; \
		$(BIN)/python -m pip install --disable-pip-version-check $$quiet -c constraints.txt -e '.[$(EXTRAS)]' -e './$(LABORATORY)[demo]'
	@$(BIN)/tailbound --version
	@$(BIN)/tailbound doctor --warm
	@echo "The command is $(BIN)/tailbound; after '. $(BIN)/activate' it is tailbound."
	@touch $@

demo: setup
	$(BIN)/tailbound demo --out $(OUT)/demo

test: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --durations=20 --durations-min=2

thorough: setup
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --thorough

soak: setup
	cd tests && PYTHONPATH=.:tables:worlds:jobs ../$(BIN)/python -m soak --minutes $(MINUTES) $(if $(PARTS),--parts $(PARTS))

mutants: setup
	cd tests && ../$(BIN)/python -m mutation.run $(MODULES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd tests && ../$(BIN)/python -m generate --check
	$(BIN)/python tests/prose.py
	clang-format-14 --dry-run --Werror $(C_SOURCES)

# Puts sources into the form that lint asks for.
format: setup
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .
	clang-format-14 -i $(C_SOURCES)

# Files derived from the schema, the table of settings and citations of rules; they are committed.
generate: setup
	cd tests && ../$(BIN)/python -m generate

# Kernel programs and the C library are built into it, so that nodes need no compiler.
wheel: setup
	cd tests && ../$(BIN)/python -m generate.objects
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps -w dist .

bench: setup
	mkdir -p $(OUT)/bench
	$(BIN)/tailbound bench kernel --json $(OUT)/bench/kernel.json
	$(BIN)/tailbound bench codec --json $(OUT)/bench/codec.json
	$(BIN)/tailbound bench allreduce --vs gloo --json $(OUT)/bench/allreduce.json
	$(BIN)/tailbound bench allreduce --vs gloo --wire --json $(OUT)/bench/allreduce-wire.json
	$(BIN)/tailbound bench tail --json $(OUT)/bench/tail.json
	$(BIN)/tailbound bench train --json $(OUT)/bench/train.json

clean:
	rm -rf build dist $(OUT) host_lib/tailbound/_objects .pytest_cache .mypy_cache .ruff_cache .hypothesis host_lib/*.egg-info $(LABORATORY)/build $(LABORATORY)/*.egg-info
	find host_lib tests -name __pycache__ -type d -prune -exec rm -rf {} +
