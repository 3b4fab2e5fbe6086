# make demo   a real answer in about two minutes          make test   everything that has to pass, in less than ten
#
# Needs python3 (3.11 or newer), pip, make and git. Everything is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
# The torch build: a requirement, a file or a URL; and more arguments for the pip that installs it, say
#   make demo TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
# Changing them needs `make clean` first.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Pins hold unless another torch is asked for.
CONSTRAINTS := $(if $(filter torch==2.13.0,$(TORCH)),-c constraints.txt)

PROMPT ?= Write f(xs): keep those over 7, keep the even ones, add 8 to each, return the count.
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo install test lint types imports fast slow test-slow wheel wheel-test clean

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/.installed  ## install, and watch the bundled model write an answer (PROMPT="..." for another one)
	@echo
	@echo '$$ refusion generate --live --compare "$(PROMPT)"'
	@$(BIN)/refusion generate --live --live-delay 0.8 --compare "$(PROMPT)"

install: $(VENV)/.installed  ## install the package into .venv

test: $(VENV)/.tested lint types imports fast  ## lint, types, import contracts and all fast tests

lint: $(VENV)/.tested
	$(BIN)/ruff check

types: $(VENV)/.tested
	$(BIN)/mypy

imports: $(VENV)/.tested
	$(BIN)/lint-imports

fast: $(VENV)/.tested
	$(BIN)/pytest -q -m "not slow"

test-slow: $(VENV)/.tested  ## the long tests
	$(BIN)/pytest -q -m slow

wheel: $(VENV)/.tested  ## build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --wheel

# A clean environment, with nothing of this folder but the wheel.
wheel-test: wheel  ## build the wheel, install it in a clean environment and generate with it
	rm -rf $(VENV)-wheel
	$(call make_venv,$(VENV)-wheel)
	$(VENV)-wheel/bin/python -m pip install -q $(TORCH_INDEX) "$(TORCH)"
	$(VENV)-wheel/bin/python -m pip install -q $(CONSTRAINTS) dist/*.whl
	cd $(VENV)-wheel && PYTHONPATH= bin/python -I "$(CURDIR)/tests/wheel_check.py"
	rm -rf $(VENV)-wheel

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) $(VENV)-wheel dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Some systems ship python3 without ensurepip; then pip of the system fills the environment.
define make_venv
$(PYTHON) -c 'import sys; sys.exit("refusion needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
$(PYTHON) -m venv $(1) || { $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install pip; }
endef

$(VENV)/.torch:
	$(call make_venv,$(VENV))
	$(BIN)/python -m pip install $(TORCH_INDEX) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install -q $(CONSTRAINTS) -e '.[test]'
	@touch $@
