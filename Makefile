# make demo    a small project of its own: save a baseline, pass the same code, catch a commit that trains slower
# make test    lint, type-check, run the tests
# make package build the sdist and the wheel, and try them in an environment of their own: build/package
# make docs    build the documentation as a site: build/docs/index.html
# make clean   remove what these made: .venv, .demo, build, caches
#
# The first four set up .venv, once, with pip as this machine configures it. To have it otherwise, add to the command
# (another choice later sets .venv up anew):
#   PYTHON=python3.12                                       the interpreter, 3.10 or newer
#   TORCH=2.12.0                                            the version of torch, instead of constraints.txt's
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu        an index that has torch's CPU build (small), or
#   TORCH_INDEX=https://download.pytorch.org/whl/cu130      the build for one CUDA version; else pip's index decides

PYTHON = python3
TORCH =
TORCH_INDEX =

INSTALLED := .venv/installed-with
DOCS_INSTALLED := .venv/docs-installed
PIP := .venv/bin/pip install --quiet --quiet --disable-pip-version-check
TORCH_PIN := $(if $(TORCH),torch==$(TORCH),--constraint constraints.txt)
CHOICE := PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX=$(TORCH_INDEX)

.PHONY: help demo test package docs clean
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(INSTALLED)
	@.venv/bin/python examples/demo.py

# Tests start hundreds of interpreters. With PYTHONDONTWRITEBYTECODE set, each would compile this package anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pytest -n 4 --dist worksteal tests  # tests switch the locks off with which timed launches wait for each other

package: $(INSTALLED)
	.venv/bin/python .ci/package.py

docs: $(DOCS_INSTALLED)
	.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs build/docs
	@echo "The site is in build/docs: open build/docs/index.html"

clean:
	rm -rf .venv .demo .benchmarks .mypy_cache .pytest_cache .ruff_cache *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip would keep a torch of the same version from another index, so another choice starts from an empty folder.
ifneq ($(wildcard $(INSTALLED)),)
ifneq ($(CHOICE),$(shell cat $(INSTALLED)))
CLEAR := --clear
.PHONY: $(INSTALLED)
endif
endif

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up .venv: a minute or two, longer for a CUDA build of torch"
	@$(PYTHON) -m venv $(CLEAR) .venv
	@$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) $(TORCH_PIN) torch)
	@$(PIP) $(TORCH_PIN) --editable '.[dev]'
	@echo '$(CHOICE)' > $@

# For `make docs` alone: tests need none of it.
$(DOCS_INSTALLED): $(INSTALLED)
	@$(PIP) $(TORCH_PIN) --editable '.[docs]'
	@touch $@
