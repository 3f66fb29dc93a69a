# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
# The engine's tests that also run on the simulated accelerator in CI.
ON_ACCELERATOR := training evaluating skipped_steps shared_writing

.PHONY: help setup page demo up test test-quick test-slow shuffled chaos soak watch failpoints test-gpu test-accelerator golden pictures fuzz audit check format bench bench-gpu docs docs-serve clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.ready ## create .venv with everything, and build the dashboard if Node is available
	@$(PY) dashboard/build.py --try

page: .venv/.ready ## build the dashboard, if its sources have changed
	@$(PY) dashboard/build.py

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,dev,docs]'
	@touch $@

demo: setup ## train a network on real digits and watch it; stops by itself
	@$(PY) examples/demo.py

up: setup ## start the service and run it until Ctrl-C
	@.venv/bin/glasshouse up

test: setup ## all tests except the slow ones
	$(PYTEST) tests/unit tests/contract tests/soak -n 3 -m "not slow and not gpu"
	ENGINE_DEVICE=simulated $(PYTEST) tests/accelerator tests/gpu/test_cuda.py \
	  $(ON_ACCELERATOR:%=tests/unit/engine/test_%.py) -n 3 -m "not slow"
	$(PYTEST) tests/integration tests/security -n 4 --dist worksteal -m "not slow and not gpu"
	$(PYTEST) tests/acceptance -n 4 --dist loadfile -m "not slow and not gpu"
	$(PY) dashboard/build.py test
	$(PYTEST) tests/page -n 2 --dist loadfile -m "not slow and not gpu"

test-quick: setup ## the unit and contract tests that take less than a second each, for the inner loop
	$(PYTEST) tests/unit tests/contract -n 2 -m "not slow and not gpu and not long"

test-slow: setup ## the slow tests: real data, more killed workers, every limit of the API
	$(PYTEST) tests -m slow --ignore tests/accelerator
	ENGINE_DEVICE=simulated $(PYTEST) tests/accelerator -m slow

shuffled: setup ## the unit and contract tests in a random order; SHUFFLE=7 is the seed
	SHUFFLE=$(or $(SHUFFLE),1) $(PYTEST) tests/unit tests/contract -n 2 -m "not slow and not gpu"

chaos: setup ## kill processes at random for a long time, on both databases
	CHAOS_KILLS=200 CHAOS_JOBS=300 $(PYTEST) tests/chaos -m slow -s

soak: setup ## run for an hour with 100 streaming clients and constant faults; MINUTES=60
	$(PY) -m tests.soak --minutes $(or $(MINUTES),60) --save soak

watch: setup ## watch a job with 20 events per second in three browser tabs for 30 minutes; MINUTES=30
	$(PY) -m tests.page.watching --minutes $(or $(MINUTES),30) --save page

failpoints: setup ## die, fail and pause at every failpoint; FAILPOINTS_DATABASE=postgresql
	$(PYTEST) tests/integration/worker/test_failpoints.py tests/integration/api/test_failpoints.py \
	  -n 3 -m "slow or not slow"

test-gpu: setup ## the tests that need a CUDA device
	$(PYTEST) tests/gpu -m gpu

test-accelerator: setup ## all tests of the engine on a simulated accelerator (docs/concepts/devices.md)
	ENGINE_DEVICE=simulated $(PYTEST) tests/accelerator tests/gpu/test_cuda.py tests/unit/engine -n 3 \
	  -m "not slow"

pictures: setup ## update the screenshots in the documentation; review them
	SCREENSHOTS=docs/images $(PYTEST) tests/page -n 2 --dist loadfile -m "not slow and not gpu"
	$(PY) examples/gallery.py --pictures docs/images

golden: setup ## update the expected output of the commands; review the diff
	RENEW_GOLDEN=1 $(PYTEST) tests/acceptance/test_command_line.py

fuzz: setup ## fuzz every operation of the OpenAPI document with more values; FUZZ_EXAMPLES=50
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),50) $(PYTEST) tests/security/test_fuzz.py

audit: setup ## check dependencies for known vulnerabilities, and their licenses
	$(PY) .ci/audit.py

check: setup ## format, lint, types (also of the dashboard), import rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) .ci/twins.py --check
	.venv/bin/pyright --pythonpath $(PY)
	.venv/bin/lint-imports
	$(PY) dashboard/build.py check

format: setup ## format the code and generate the blocking client
	$(PY) .ci/twins.py
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: setup ## run the benchmarks of docs/reference/measured.md
	$(PY) -m bench

bench-gpu: setup ## compare training on an accelerator with a hand-written loop
	$(PY) -m bench training.accelerator --save accelerator

docs: setup ## build the documentation site in build/site; a broken link fails
	.venv/bin/zensical build --strict --clean

docs-serve: setup ## serve it at http://127.0.0.1:8000 and rebuild it at each change
	.venv/bin/zensical serve --dev-addr 127.0.0.1:8000

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .cache build dist
	rm -rf dashboard/.node dashboard/node_modules dashboard/dist dashboard/dist-test
