# Each of demo, test and check works alone on a fresh clone: it makes .venv first.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLAN_STAMP := $(VENV)/.installed-plan
# Test processes. A test file stays on one, so compiled functions are shared within it.
WORKERS ?= 2
PYTEST := $(BIN)/pytest
PARALLEL := -n $(WORKERS) --dist loadfile
PROMPT ?= The sun rises over

# Nothing outside the clone decides what is imported or shown.
unexport PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export IPYTHONDIR := $(CURDIR)/.cache/ipython
export JUPYTER_PREFER_ENV_PATH := 1
export JUPYTER_PLATFORM_DIRS := 1
# Compiled programs are kept between test processes and runs: a repeated run spends about a third
# of the processor time. With a size limit jax locks the folder, so processes can share it.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_COMPILATION_CACHE_MAX_SIZE ?= 2000000000
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.2

.PHONY: help demo test check check-plan env lint types notebooks quick all-tests format constraints clean
help:
	@echo "make demo         generate text from the shipped checkpoint"
	@echo "make test         lint, types, notebooks and the quick tests (what CI runs)"
	@echo "make check        the same with the slow tests"
	@echo "make check-plan   the tests that compile for GPUs without one (adds CUDA's compiler to .venv)"
	@echo "make lint, types, notebooks, quick, all-tests    one stage alone"
	@echo "make format       let ruff fix what it can"
	@echo "make constraints  renew constraints.txt from what installs today"
	@echo "make clean        remove the environment, caches and builds"

demo: $(STAMP)
	@start=$$SECONDS; \
	$(BIN)/k3jax generate nano "$(PROMPT)" --max-new-tokens 300 --temperature 0.8 --seed 1; \
	echo "== demo $$((SECONDS - start)) s" >&2

test:
	@scripts/run-stages lint types notebooks quick

check:
	@scripts/run-stages lint types notebooks all-tests

# No other target installs the extra, and without it they skip these tests; here a skipped one is a failure.
check-plan: $(PLAN_STAMP)
	@mkdir -p .cache
	@$(PYTEST) tests/mesh/test_plan_report.py tests/mesh/test_plan_schedule.py tests/pallas/test_device_less.py --durations=5 | tee .cache/check-plan
	@if grep -q "^SKIPPED" .cache/check-plan; then echo "check-plan: a test was skipped" >&2; exit 1; fi

# jax's CUDA plugin must be of jaxlib's version, which constraints.txt pins.
$(PLAN_STAMP): $(STAMP)
	@echo "== installing the extra plan into $(VENV)"
	@version=$$($(BIN)/python -c "from importlib.metadata import version; print(version('jaxlib'))"); \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[plan]" \
		"jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	@touch $@

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@start=$$SECONDS; \
	rm -f $@; \
	if ! $(BIN)/python -c "import pip" 2>/dev/null; then \
		python="$(PYTHON)"; \
		if [ -z "$$python" ]; then python=$$(scripts/find-python); fi; \
		echo "== making $(VENV) with $$python"; \
		"$$python" -m venv --clear $(VENV); \
	fi; \
	echo "== installing k3jax and its development tools into $(VENV) (minutes, the first time)"; \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"; \
	touch $@; \
	echo "== environment $$((SECONDS - start)) s"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/pyright --pythonpath $(BIN)/python

notebooks: $(STAMP)
	@mkdir -p "$(IPYTHONDIR)" "$(MPLCONFIGDIR)"
	@if compgen -G "notebooks/*.ipynb" >/dev/null; then $(PYTEST) --nbmake notebooks --durations=5; \
	else echo "no notebooks"; fi

quick: $(STAMP)
	@$(PYTEST) $(PARALLEL) -m "not slow" --durations=10

all-tests: $(STAMP)
	@$(PYTEST) $(PARALLEL) --durations=25

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The scratch environment is made without constraints; what it resolves to becomes the pins.
constraints: $(STAMP)
	@rm -rf .cache/constraints-venv
	@$(BIN)/python -m venv .cache/constraints-venv
	@.cache/constraints-venv/bin/python -m pip install --quiet --editable ".[dev]"
	@.cache/constraints-venv/bin/python -m pip freeze --all --exclude-editable --exclude pip > .cache/pins
	@{ echo "# What \`make\` installs, pinned. Renew with \`make constraints\`."; cat .cache/pins; } > constraints.txt
	@rm -rf .cache/constraints-venv .cache/pins

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist .dev/*.egg-info
	find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +
