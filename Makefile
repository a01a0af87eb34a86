# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests. Both make .venv by themselves, once.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python

# Images of Python often set it; then each of the suite's children would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check types test-slow kernels kernels-layout kernel-table lint docs wheel wheels sanitize clean

demo: $(VENV)/installed
	$(RUN) -m tilewise demo

# A third of each grid a day, and at least one of each kind; of tests that take a second every second one; the rest is in `make test-slow`
# (tests/shared/sampled.py). All at once: TILEWISE_TEST_SHARE=1.
test test-slow: export TILEWISE_TEST_SHARE ?= 0.33

test: check
	$(RUN) -m pytest -n auto --dist worksteal

# What `make lint` would change; changes nothing.
check: $(VENV)/installed
	$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

types: $(VENV)/installed
	$(RUN) -c 'import basedpyright, mypy' 2>/dev/null || $(RUN) -m pip install -q -c constraints.txt basedpyright mypy
	@$(RUN) -m basedpyright & package=$$!; $(RUN) -m pytest tests/docs/test_types.py; blocks=$$?; wait $$package && exit $$blocks

test-slow: $(VENV)/installed
	$(RUN) -m pytest -m slow

# The table of compiled kernels, whose rows spare `make test` the compiler: where device code has changed. Resumes; up to an hour and a half for all.
kernel-table: $(VENV)/installed
	$(RUN) tools/gpu/kernel_table.py
	$(RUN) tools/triton_table.py

# The wheel of compiled kernels for H100 and H200, without a GPU, into dist/. A kernel a core at once, and it says how long the rest takes; resumes;
# 45 minutes of one core for all 635.
kernels: $(VENV)/installed
	$(RUN) tools/kernels_wheel.py dist

# A folder of names, for programs that load FlashAttention by the package `kernels`; prints the variable that makes them take it.
kernels-layout: $(VENV)/installed
	@$(RUN) tools/kernels_layout.py dist/kernels-layout

lint: $(VENV)/installed
	$(RUN) -m ruff format . && $(RUN) -m ruff check --fix .
	$(RUN) tools/sizes.py
	$(MAKE) types

docs: $(VENV)/installed
	$(RUN) -c 'import mkdocs, mathjax' 2>/dev/null || $(RUN) -m pip install -q -c constraints.txt -e '.[docs]'
	$(RUN) -m pytest tests/docs/test_site.py tests/docs/test_explore.py tests/docs/test_scripts.py
	$(RUN) -m tilewise report
	$(RUN) -m mkdocs build --strict

wheel: $(VENV)/installed
	$(RUN) tools/wheel.py dist

# Of both processors, the other one's by cross-compiling, each read by auditwheel.
wheels: $(VENV)/installed
	$(RUN) -m pip install -q auditwheel
	$(RUN) tools/wheel.py dist --machine x86_64,aarch64

sanitize: $(VENV)/installed
	PYTHON=$(RUN) tools/sanitize.sh

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tilewise needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: on Debian, apt-get install python3-venv"; exit 1; }
	$(RUN) -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
