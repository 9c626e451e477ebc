# Every target sets up its own virtual environment: a fresh clone needs a Python and `make`, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# torch is pinned in constraints.txt, so every install goes through it: a bare torch brings gigabytes of CUDA.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# setuptools prints a box of advice about editable installations; it does not concern this project.
NO_ADVICE := ignore:Editable installation

.PHONY: venv demo test peers packages nightly soak mutants check format bench gpu docs site site-serve wheels clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	    "Python 3.11 to 3.13 is needed, this is %d.%d: try make PYTHON=python3.12" % v)'
	@echo "Setting up $(VENV) with torch, JAX and the test tools, at the versions in constraints.txt."
	@echo "This is done once. It takes one to three minutes, most of it downloads, and 3 GB of disk."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) pip setuptools
	@PYTHONWARNINGS='$(NO_ADVICE)' $(INSTALL) --no-build-isolation --editable '.[torch,jax,testing,viz,large,cuda]' --group dev
	@touch $@
	@echo "$(VENV) is ready."

# Three minutes. Everything, several times each (8 minutes): make demo DEMO=--full
demo: $(READY)
	@$(BIN)/python -m planner demo $(DEMO)

# Two processes, for two cores: most of the time goes into JAX's compiler, which uses one.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations=40 $(TESTS)

# The einsum tests that NumPy, opt_einsum, torch and JAX ship, with planner in the place of what they test.
peers: $(READY)
	$(BIN)/python tests/peers $(TESTS)

# Models of other packages, trained with and without planner.patch(). PACKAGES names models in torch, or adds an option,
# and JAX_PACKAGES does so for models in JAX.
# They are installed beside the venv, without what they ask for: that would bring another torch.
EXTRA := $(VENV)/packages
packages: $(READY)
	@$(INSTALL) --no-deps --target $(EXTRA) --upgrade --requirement tests/peers/packages.txt
	PYTHONPATH=$(EXTRA) OMP_NUM_THREADS=1 $(BIN)/python tests/peers/packages.py $(PACKAGES)
	PYTHONPATH=$(EXTRA) OMP_NUM_THREADS=1 $(BIN)/python tests/peers/jax_packages.py $(JAX_PACKAGES)

nightly: $(READY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest $(TESTS)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python tests/peers
	$(MAKE) site wheels packages
	PYTHONPATH=$(EXTRA) OMP_NUM_THREADS=1 $(BIN)/python tests/peers/packages.py --tests

# The faults alone, at length: hours. SOAK names tests, or passes pytest an option.
soak: $(READY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --durations=0 tests/faults tests/test_hostile.py $(SOAK)

# Mutants without a verdict are judged, two at a time; the table is printed. All of them once more: MUTANTS="--again all".
mutants: $(READY)
	$(INSTALL) --group mutants
	PYTHONPATH=. $(BIN)/python -m tests.mutants $(MUTANTS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p planner
	$(BIN)/python -m pytest --quiet tests/test_imports.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m planner.bench $(BENCH)

# On a machine with a card, by its own Python (torch, triton, jax, absl-py, numpy and opt_einsum): nothing is installed.
# Each result is written to the folder OUT as it comes. GPU="--seconds 540 --part torch" is a part of it. Then
# `python -m planner.bench.card --adopt FOLDER` takes over the tiles and rates.
OUT ?= docs/benchmarks
gpu:
	PYTHONPATH=. $(PYTHON) -m planner.bench.card --out $(OUT) $(GPU)

# The figures on these pages are measured: build them on a machine with nothing else to do.
docs: $(READY)
	$(BIN)/python docs/build.py

# The site, with every example run while it is built, links checked, and every warning an error.
SITE := build/site
site: $(READY)
	@$(INSTALL) --group site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs $(SITE)
	$(BIN)/python docs/check_links.py $(SITE)
	@echo "The site is in $(SITE): open $(SITE)/index.html, or make site-serve."

site-serve: site
	$(BIN)/python -m http.server --directory $(SITE) --bind 127.0.0.1 8000

# The wheel and the sdist, built and checked, and installed with each extra into a new environment for each Python.
PYTHONS ?= python3.11 python3.12 python3.13
wheels: $(READY)
	@$(INSTALL) --group wheels
	PYTHONWARNINGS='$(NO_ADVICE)' $(BIN)/python -m build --no-isolation --outdir build/wheels .
	$(BIN)/twine check --strict build/wheels/*
	$(BIN)/check-wheel-contents build/wheels/*.whl
	$(BIN)/python tests/clean_installs.py build/wheels $(PYTHONS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
