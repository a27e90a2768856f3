# Two commands do the work: `make train` and `make test`. Each sets up what it needs in .venv.
# PYTHON=python3.12 make test    another interpreter for a new .venv
# make test ARGS="tests/plan -x" any arguments for pytest; WORKERS=0 runs the tests in one process
# make test RERUNS=0             no second try: a test that fails once is run again, listed as RERUN and counted in the closing line
# make test DEVICE=cuda          tests/accelerator on a real device, one for each rank; without it they run on a simulated one

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes: each would compile all sources again

PYTHON ?= python3
WORKERS ?= 2
RERUNS ?= 1
ARGS ?=
DEVICE ?=
TRAIN ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs
PYODIDE := $(VENV)/pyodide/node_modules/pyodide
PYRIGHT := $(VENV)/pyright/node_modules/pyright
QUICK := $(addprefix tests/,plan schedules simulate lower show balance search batch run front stage faults regressions checkpoint comm cli \
	test_imports.py test_structure.py test_ops.py test_nest.py)

.PHONY: help train test quick lint types format soak fuzz bench coverage docs dist browser compiler pyodide pyright others clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

train: $(RUNS) ## train a small GPT with two pipelined processes, about two minutes; TRAIN="--steps 50" for options
	$(BIN)/penstock train $(TRAIN)

test: $(READY) browser compiler pyodide pyright $(if $(findstring --long,$(ARGS)),others) ## ruff, mypy and all tests; the tests run even if ruff or mypy complain
	@said=$$(mktemp); $(MAKE) lint >"$$said" 2>&1 & lint=$$!; status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --reruns $(RERUNS) --max-suite-reruns 3 --rerun-show-tracebacks \
		$(if $(DEVICE),tests/accelerator --device $(DEVICE)) $(ARGS) || status=$$?; \
	wait $$lint || { status=$$?; cat "$$said"; echo "make test: lint failed, see above"; }; \
	rm -f "$$said"; exit $$status

quick: $(READY) ## while you change something: ruff, mypy, the planning half, ranks as threads; under three minutes
	@$(MAKE) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m "not processes and not browser and not slow" $(QUICK) $(ARGS)

lint: $(READY) ## ruff check, ruff format --check, strict mypy
	@status=0; \
	$(BIN)/ruff check . || status=$$?; \
	$(BIN)/ruff format --check . || status=$$?; \
	$(BIN)/mypy || status=$$?; \
	exit $$status

format: $(READY) ## let ruff sort and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(READY) ## random faults and recoveries for SECONDS=60 from SEED=0; prints what it did, and how to do a failure again
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.soak --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0)

fuzz: $(READY) ## random models, schedules and options against a plain loop for SECONDS=60 from SEED=0; findings become scripts in build/fuzz
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(ARGS)

bench: $(READY) ## every program in benchmarks/, one after another
	@for program in $(sort $(wildcard benchmarks/*.py)); do echo "== $$program"; $(BIN)/python $$program; done

coverage: $(READY) browser compiler pyodide pyright $(if $(findstring --long,$(ARGS)),others) ## the tests again, with the share of lines and branches that they run; ends in build/coverage/
	@rm -rf build/coverage; mkdir -p build/coverage
	@status=0; OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadgroup $(ARGS) || status=$$?; \
	$(BIN)/coverage combine -q; $(BIN)/coverage html -q; $(BIN)/coverage report --format=total; \
	$(BIN)/coverage report --skip-covered | tail -n 40; exit $$status

dist: $(READY) ## a wheel and a source distribution, in dist/
	@rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build -q --no-isolation
	@ls -l dist

docs: $(READY) pyodide ## the site, in build/site/index.html; it opens without network. The gallery in docs/ is drawn anew
	$(BIN)/python docs/make_gallery.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html"

clean: ## remove what was made, except .venv
	rm -rf build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The environment: what training needs, and on top of it what the tests need. Torch comes first, and brings the setuptools
# that builds penstock: without build isolation nothing is fetched twice, and every version is that of constraints.txt.
$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("penstock needs Python 3.11 or later: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e .
	@touch $@

$(READY): $(RUNS) tests/package/oldest.txt
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test]'
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/oldest -r tests/package/oldest.txt
	@touch $@

# What runs with --long alone, in folders of their own: torchtitan, triton and Ray for two examples (1.6 GB), and the oldest versions of
# what the extras promise.
others: $(VENV)/others/.ready $(VENV)/oldest-extras/.ready
$(VENV)/others/.ready: $(READY) tests/examples/others.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/others -r tests/examples/others.txt
	@touch $@
$(VENV)/oldest-extras/.ready: $(READY) tests/package/oldest-extras.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/oldest-extras -r tests/package/oldest-extras.txt
	@touch $@

# Python for the browser, with which the planner page needs no server; where npm is. Its version is pinned here.
pyodide:
	@if [ -d $(PYODIDE) ]; then :; \
	elif command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV)/pyodide pyodide@314.0.7 \
		|| echo "pyodide could not be installed; the test that needs it will say so"; \
	else echo "no npm: the test of the page that needs pyodide will say so"; fi

# A second type checker for the programs of tests/typing, where npm is.
pyright:
	@if [ -d $(PYRIGHT) ]; then :; \
	elif command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(VENV)/pyright pyright@1.1.414 \
		|| echo "pyright could not be installed; the test that needs it will say so"; \
	else echo "no npm: the test that needs pyright will say so"; fi

# Debian's chromium, for the tests that open a page, where it may be installed.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } \
			>/tmp/penstock-chromium.log 2>&1 || echo "chromium could not be installed, see /tmp/penstock-chromium.log"; \
	else echo "no chromium, and no right to install it: the tests that open a page will say so"; fi

# A C++ compiler and ninja, which build the simulated accelerator of the tests, where they may be installed.
compiler:
	@if command -v g++ >/dev/null && command -v ninja >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing g++ and ninja"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends g++ ninja-build; } \
			>/tmp/penstock-compiler.log 2>&1 || echo "g++ could not be installed, see /tmp/penstock-compiler.log"; \
	else echo "no g++ or no ninja, and no right to install them: the tests of accelerators will say so"; fi
