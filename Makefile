# make report: the capacity report of one scenario as a PDF.   make test: the tests.   make lab: the notebooks, live.
PYTHON ?= python3
SCENARIO ?= chat-70b
BIN := .venv/bin

.PHONY: report test lab lessons dev clean

report: .venv/ready
	$(BIN)/planner report $(SCENARIO)

lab: .venv/ready
	$(BIN)/jupyter lab --notebook-dir=notebooks

test: .venv/ready-dev
	$(BIN)/pytest

# After a change in the physics: the lessons' committed outputs anew, to be read before they are committed.
lessons: .venv/ready-dev
	$(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False notebooks/learn/*.ipynb

dev: .venv/ready-dev

.venv/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv
