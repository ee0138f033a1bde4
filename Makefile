# Everything runs inside .venv, with the versions in constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.metastable-installed

.PHONY: setup demo test test-slow smoke lint docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "metastable needs Python 3.11 or newer, found %s" % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/metastable compare --data toy:two-modes --methods cd,pcd,jarzynski --out runs/demo --overwrite
	$(BIN)/python scripts/picture.py runs/demo --out runs/demo/two-modes.png

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow

smoke: setup
	rm -rf runs/smoke
	for name in path-planning lasa push-t; do \
		$(BIN)/metastable reproduce $$name --scale smoke --out runs/smoke/$$name || exit 1; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py
	$(BIN)/basedpyright --level error src

docs: setup
	$(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) site runs
