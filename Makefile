# make setup: the commands, in .venv.   make report: the capacity report of one scenario as a PDF.   make test: the tests.   make lab: the cockpit and the notebooks, live.
# make test-all: with every scenario, attack, lesson and browser test.
# LAB_OPTIONS: for JupyterLab, such as LAB_OPTIONS='--no-browser --port=8899'.
PYTHON ?= python3
SCENARIO ?= chat-70b
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# uv installs in seconds what takes pip a minute. It is kept for other clones, and without it, or where it can't reach
# what pip's configuration names, such as a mirror, pip installs.
UV_HOME := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headroom/uv
UV := $(UV_HOME)/bin/uv
install = { $(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt $(1) \
    || { echo "uv could not install $(1), pip does" >&2; $(PIP) $(1); }; }

.PHONY: setup report test test-all mutants lab fit cohort accuracy pools lessons dev clean

setup: .venv/ready

report: .venv/ready
	$(BIN)/headroom report $(SCENARIO)

lab: .venv/ready
	$(BIN)/headroom lab notebooks $(LAB_OPTIONS)

test: .venv/ready-dev
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# Whatever `make test` takes a sample of, in full, and what only maintainers run: before an issue is resolved.
test-all: .venv/ready-dev accuracy
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m '' tests

# Which small faults, planted one at a time, the quick tests that reach their places notice: about an hour.
mutants: .venv/ready-dev
	$(BIN)/python tests/maintenance/mutants.py $(MUTANTS)

# All engines' step costs, fitted to catalogs/validation/measured_runs.csv: half an hour on two cores.
fit: .venv/ready
	PYTHONPATH=tests/maintenance $(BIN)/python -m fits.catalog_writer

# The pinned cohort of measured runs, predicted anew: after a fit, or a change that is meant to move it.
cohort: .venv/ready
	PYTHONPATH=tests/maintenance $(BIN)/python -m fits.cohort

# How right the predictions are, by group and with every point, as a page of its own.
accuracy: .venv/ready
	$(BIN)/jupyter nbconvert --log-level WARN --to html --execute --no-input \
	    --output-dir reports --output accuracy tests/maintenance/accuracy.ipynb

# What pools of prefill and decode cost beside the step costs, fitted to catalogs/validation/pools.csv: some minutes.
pools: .venv/ready
	PYTHONPATH=tests/maintenance $(BIN)/python -m fits.pool_cost_fit

# After a change in the physics: the lessons' committed outputs anew, to be read before they are committed.
lessons: .venv/ready-dev
	$(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False \
	    notebooks/learn/*.ipynb
	sed -i '/"application\/vnd.jupyter.widget-view+json"/,/}/d' notebooks/learn/*.ipynb  # identities of controls

dev: .venv/ready-dev

$(UV):
	@{ $(PYTHON) -m venv $(UV_HOME) && $(UV_HOME)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt uv; } || echo "uv is not to be had here" >&2

# The simulator compiles for half a minute, while the rest is installed.
.venv/ready: pyproject.toml constraints.txt | $(UV)
	@test -x $(BIN)/python || $(UV) venv --quiet --seed --python $(PYTHON) .venv || $(PYTHON) -m venv .venv
	@$(call install,--editable .)
	@$(BIN)/python -m planner.simulator & compiling=$$!; \
	    $(call install,--editable '.[all]'); installed=$$?; \
	    wait $$compiling && exit $$installed
	@touch $@

.venv/ready-dev: .venv/ready
	@$(call install,--editable '.[dev]')
	@touch $@

clean:
	rm -rf .venv
