# Two commands for a newcomer: `make run` and `make test`. Both need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
N      ?= 100000
BENCH_OUT ?= benchmarks/.build/result.jsonl
# The slowest tests, in a tier of their own so that `make test` stays below five minutes.
CRASHES := tests/operator/engine/test_crashes.py tests/operator/modeldeployment/test_crashes.py \
	tests/router/drivers/test_kubernetes_crashes.py
SLOW := $(CRASHES) tests/operator/engine/test_watching.py tests/router/core/test_mutants.py
# One more than there are cores: many tests wait for processes that they have started.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.made-run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "modelpool needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.made-test: $(VENV)/.made-run
	$(BIN)/pip install --quiet --constraint constraints.txt --group test
	@touch $@

$(VENV)/.made-lint: $(VENV)/.made-test
	$(BIN)/pip install --quiet --constraint constraints.txt --group lint
	@touch $@

.PHONY: run
run: $(VENV)/.made-run ## Play the demo: two simulated models take turns (ARGS=--once ends after it)
	$(BIN)/modelpool demo $(ARGS)

.PHONY: test
test: $(VENV)/.made-test ## Unit, property, simulation and socket tests (below five minutes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(SLOW:%=--ignore=%) $(ARGS)

.PHONY: test-slow
test-slow: $(VENV)/.made-test ## Operators and routers killed around every request, broken schedulers (some minutes)
	$(BIN)/python -m pytest -n auto $(SLOW) $(ARGS)

.PHONY: test-exhaustive
test-exhaustive: $(VENV)/.made-test ## The same kills at every read too, before, unanswered and after (an hour and more)
	MODELPOOL_EXHAUSTIVE=1 $(BIN)/python -m pytest -n auto $(CRASHES) $(ARGS)

.PHONY: check
check: $(VENV)/.made-lint ## Style, types, import contracts (generated pages are compared by make test)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m modelpool_api.schema --check

.PHONY: simulate
simulate: $(VENV)/.made-test ## Run N schedules of faults through the scheduler (N=1000000 for a night)
	$(BIN)/python tests/support/simulate.py --schedules $(N) --jobs 2 $(ARGS)

.PHONY: simulate-deployments
simulate-deployments: $(VENV)/.made-test ## Live 2,000 random lives of a ModelDeployment (five minutes on two idle cores)
	$(BIN)/python tests/support/mdep_walk.py --seeds 2000 --jobs 2 $(ARGS)

.PHONY: guards
guards: $(VENV)/.made-test ## Take away every guard of replacing replicas and see a scenario miss it
	$(BIN)/python tests/support/mdep_mutants.py $(ARGS)

.PHONY: model
model: ## Search the model of who may move the slot, and its mutants (ARGS=--quick; needs spin, gcc)
	@$(PYTHON) tests/model/run_model.py $(ARGS)

.PHONY: test-llama
test-llama: $(VENV)/.made-test ## The real llama-server with a real small model, where they are installed
	$(BIN)/python -m pytest -m llama tests/llama $(ARGS)

.PHONY: test-cluster
test-cluster: $(VENV)/.made-test ## A real Kubernetes control plane and Kueue (first: tests/cluster/build-assets.sh)
	$(BIN)/python -m pytest -m cluster $(or $(ARGS),tests/cluster)

.PHONY: cluster
cluster: $(VENV)/.made-test ## Leave such a cluster running; prints an export KUBECONFIG line
	@$(BIN)/python tests/cluster/harness.py up

.PHONY: cluster-down
cluster-down: $(VENV)/.made-test ## End the cluster of `make cluster`
	@$(BIN)/python tests/cluster/harness.py down

.PHONY: bench
bench: $(VENV)/.made-run ## Compare with nginx and vllm-router (two to three minutes; needs a C compiler)
	@$(BIN)/python benchmarks/native.py
	@-$(BIN)/python benchmarks/contenders.py install vllm-router
	$(BIN)/python benchmarks/run.py --short --contenders nginx vllm-router modelpool --rounds 3 --out $(BENCH_OUT)
	$(BIN)/python benchmarks/report.py $(BENCH_OUT)

.PHONY: bench-full
bench-full: $(VENV)/.made-run ## All peers, shapes, memory, start, counters, swaps (half an hour)
	@$(BIN)/python benchmarks/native.py
	@-$(BIN)/python benchmarks/contenders.py install vllm-router sglang-router litellm
	$(BIN)/python benchmarks/run.py --rounds 3 --out $(BENCH_OUT)
	$(BIN)/python benchmarks/hold.py --out $(BENCH_OUT).hold
	$(BIN)/python benchmarks/cold.py --out $(BENCH_OUT).cold
	$(BIN)/python benchmarks/instructions.py --out $(BENCH_OUT).instructions
	$(BIN)/python benchmarks/syscalls.py --out $(BENCH_OUT).syscalls
	$(BIN)/python benchmarks/swap.py --pages benchmarks/.build --out $(BENCH_OUT).swap $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER) --gguf $(GGUF))
	cat $(BENCH_OUT).* >> $(BENCH_OUT) && rm $(BENCH_OUT).*
	$(BIN)/python benchmarks/report.py $(BENCH_OUT)

.PHONY: gates
gates: $(VENV)/.made-run ## Counted costs per request against their baselines (ARGS=--write renews them)
	$(BIN)/python benchmarks/gates.py $(ARGS)

.PHONY: reference
reference: $(VENV)/.made-run ## Write the generated files again: configuration, metrics, JSON Schema, CRDs
	$(BIN)/python -m modelpool_router.settings.reference docs
	$(BIN)/python -m modelpool_router.telemetry.reference > docs/metrics.md
	$(BIN)/python -m modelpool_api.schema --write

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
