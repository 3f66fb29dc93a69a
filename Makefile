# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
PY := .venv/bin/python
PYTEST := $(PY) -m pytest

.PHONY: help setup page demo up test test-slow shuffled chaos soak watch failpoints test-gpu golden pictures fuzz audit check format bench docs docs-serve clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.ready ## make .venv with everything, and the page if there is a Node
	@$(PY) dashboard/build.py --try

page: .venv/.ready ## build the page, if its sources have changed
	@$(PY) dashboard/build.py

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,dev,docs]'
	@touch $@

demo: setup ## train a network on real digits and watch it, then stop; ends by itself
	@$(PY) examples/demo.py

up: setup ## start the service and keep it until Ctrl-C
	@.venv/bin/glasshouse up

test: setup ## all tests but the slow ones
	$(PYTEST) tests/unit tests/contract tests/soak -n 2 -m "not slow and not gpu"
	$(PYTEST) tests/integration tests/security -n 4 --dist worksteal -m "not slow and not gpu"
	$(PYTEST) tests/acceptance -n 4 --dist loadfile -m "not slow and not gpu"
	$(PY) dashboard/build.py test
	$(PYTEST) tests/page -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: setup ## the long ones: real data, full optimizers, more deaths of workers
	$(PYTEST) tests -m slow

shuffled: setup ## the fast tests in another order; SHUFFLE=7
	SHUFFLE=$(or $(SHUFFLE),1) $(PYTEST) tests/unit tests/contract -n 2 -m "not slow and not gpu"

chaos: setup ## kill everything at random for a good while, on both databases
	CHAOS_KILLS=200 CHAOS_JOBS=300 $(PYTEST) tests/chaos -m slow -s

soak: setup ## an hour of use with 100 streaming clients and faults all the time; MINUTES=60
	$(PY) -m tests.soak --minutes $(or $(MINUTES),60) --save soak

watch: setup ## half an hour of a job with 20 events a second in three tabs of a real browser; MINUTES=30
	$(PY) -m tests.page.watching --minutes $(or $(MINUTES),30) --save page

failpoints: setup ## kill, fail and halt at every failpoint; FAILPOINTS_DATABASE=postgresql
	$(PYTEST) tests/integration/worker/test_failpoints.py tests/integration/api/test_failpoints.py \
	  -n 3 -m "slow or not slow"

test-gpu: setup ## what needs a CUDA device
	$(PYTEST) tests/gpu -m gpu

pictures: setup ## take the pictures of the page that are in the documentation anew; look at them
	SCREENSHOTS=docs/images $(PYTEST) tests/page -n 2 --dist loadfile -m "not slow and not gpu"

golden: setup ## write anew what the commands print; read the difference
	RENEW_GOLDEN=1 $(PYTEST) tests/acceptance/test_command_line.py

fuzz: setup ## the whole OpenAPI document with many more values; FUZZ_EXAMPLES=50
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),50) $(PYTEST) tests/security/test_fuzz.py

audit: setup ## known holes of the dependencies, and their licences
	$(PY) .ci/audit.py

check: setup ## format, lint, types (of the page, too), import rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) .ci/twins.py --check
	.venv/bin/pyright --pythonpath $(PY)
	.venv/bin/lint-imports
	$(PY) dashboard/build.py check

format: setup ## rewrite the code in house style
	$(PY) .ci/twins.py
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: setup ## the figures of the documentation, as ratios measured side by side
	$(PY) -m bench

docs: setup ## the site of the documentation in build/site; a link that leads nowhere fails
	.venv/bin/zensical build --strict --clean

docs-serve: setup ## the same at http://127.0.0.1:8000, built again at each change
	.venv/bin/zensical serve --dev-addr 127.0.0.1:8000

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .cache build dist
	rm -rf dashboard/.node dashboard/node_modules dashboard/dist dashboard/dist-test
