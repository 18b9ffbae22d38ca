# make compare: set up and run the main job.   make test: set up and run the tests.   make test-all: the whole grid too.   make demo: run the twenty lines of examples.
# make docs: build the site into build/docs.   make help: every target.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
ARGS ?=
WORKERS ?= 3
GPU_PYTHON ?= 3.12
CAPABILITIES ?= default avx2
TORCH ?= torch==2.13.0
VERSIONS ?= oldest
STUB := PYTHONPATH=tests
# Bytecode is kept even where the environment forbids it: every worker and a hundred processes import the same files.
TESTING := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := compare
.PHONY: help compare demo docs test promises test-all form lint types pytest coverage bits canaries verdict bench bench-cuda cuda-costs bench-study bench-watch bench-audit bench-compiled methods-table gpu gpu-wheels launches storm mutations clean

# each target and its duration, from its own echo line
help:
	@echo "make help: at once; the list is here"
	@sed -n '/make help/d;s/^\t@echo "\(make .*\)"$$/\1/p' Makefile

compare: $(VENV)/.study
	@echo "make compare: about 7 minutes of one core; result: results/digits/report.html"
	$(PY) -m headwise compare $(ARGS)

demo: $(VENV)/.demo
	@echo "make demo: seconds; result here"
	$(PY) docs/twenty_lines.py

# Every warning is an error. -E -a: every page is read and run again, because its content comes from the code.
docs: $(VENV)/.docs
	@echo "make docs: 3 minutes of one core, and installing; result: build/docs/index.html"
	OMP_NUM_THREADS=1 $(PY) -m sphinx -E -a -n -W --keep-going -q -c docs/site docs build/docs $(ARGS)
	$(PY) docs/site/check_links.py build/docs

# every promise once; the linter and the type checker fill the time in which tests wait for processes
test: $(VENV)/.test
	@echo "make test: form, types, every promise once: 10 to 15 minutes; result here"
	$(MAKE) -j3 lint types promises

promises: $(VENV)/.test
	@echo "make promises: make test without form: 10 to 15 minutes; result here"
	$(MAKE) pytest ARGS='-m "not grid" $(ARGS)'

test-all: form pytest
	@echo "make test-all: the whole grid, longer than make test; result here"

# the linter and the type checker use one core each
form: $(VENV)/.test
	@echo "make form: lint and types side by side: a minute or two; result here"
	$(MAKE) -j2 lint types

lint: $(VENV)/.test
	@echo "make lint: form and generated pages: a minute or two; result here"
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) docs/check.py

types: $(VENV)/.test
	@echo "make types: all packages: a minute or two; result here"
	$(PY) -m mypy

pytest: $(VENV)/.test
	@echo "make pytest: the tests that ARGS leaves: tens of minutes; result here"
	$(TESTING) $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15 $(ARGS)

# which lines make test does not run, in the processes that it starts too
coverage: $(VENV)/.test
	@echo "make coverage: lines: tens of minutes; result: build/coverage/index.html"
	$(PIP) install -c $(CONSTRAINTS) pytest-cov
	$(TESTING) $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not grid" --cov --cov-report term --cov-report html $(ARGS)

# make test runs the machine's best instructions; the others must give the same bits.
bits: $(VENV)/.test
	@echo "make bits: one round for each instruction set: minutes each; result here"
	for capability in $(CAPABILITIES); do \
		echo "ATEN_CPU_CAPABILITY=$$capability"; \
		ATEN_CPU_CAPABILITY=$$capability $(TESTING) $(PY) -m pytest -m bits -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) || exit 1; \
	done

# The private names of other libraries, which the other environments have in their newest versions. TORCH=torch==2.9.0
# takes the oldest torch, VERSIONS=newest TORCH=torch the newest of everything.
canaries:
	@echo "make canaries: the oldest versions allowed: two minutes; result here"
	test -x $(VENV)/$(VERSIONS)/bin/python || $(PYTHON) -m venv $(VENV)/$(VERSIONS)
	$(VENV)/$(VERSIONS)/bin/python -m pip --quiet --disable-pip-version-check install '$(TORCH)'
	$(VENV)/$(VERSIONS)/bin/python -m pip --quiet --disable-pip-version-check install '$(TORCH)' -r requirements/canaries.txt \
		$(if $(filter oldest,$(VERSIONS)),-c requirements/oldest.txt,--upgrade)
	PYTHONPATH=src:verdict/src OMP_NUM_THREADS=1 $(VENV)/$(VERSIONS)/bin/python -m pytest -m canary tests/test_borders.py $(ARGS)

# the tests of headwise-verdict where neither torch nor headwise is installed
verdict:
	@echo "make verdict: verdict tests without torch: a minute, and installing; result here"
	test -x $(VENV)/verdict/bin/python || $(PYTHON) -m venv $(VENV)/verdict
	$(VENV)/verdict/bin/python -m pip --quiet --disable-pip-version-check install -c $(CONSTRAINTS) -e verdict -r requirements/verdict.txt
	cd verdict && PYTHONPATH= OMP_NUM_THREADS=1 ../$(VENV)/verdict/bin/python -m pytest -m "not grid" -rs $(ARGS)

bench: $(VENV)/.test
	@echo "make bench: attention on this processor: minutes; table here"
	$(PY) benchmarks/attention.py $(ARGS)

bench-cuda: $(VENV)/.test
	@echo "make bench-cuda: attention on a GPU: minutes; table here"
	$(PY) benchmarks/on_cuda.py $(ARGS)

# counted on fake tensors: needs no GPU
cuda-costs: $(VENV)/.test
	@echo "make cuda-costs: costs on a GPU, counted: minutes; writes docs/cuda_costs.md"
	$(STUB) $(PY) benchmarks/cuda_costs.py $(ARGS)

bench-study: $(VENV)/.test
	@echo "make bench-study: what a study costs: minutes; figures here"
	$(STUB) $(PY) benchmarks/study.py $(ARGS)

bench-watch: $(VENV)/.test
	@echo "make bench-watch: what watching costs: minutes; figures here"
	$(STUB) $(PY) benchmarks/watch.py $(ARGS)

bench-audit: $(VENV)/.test
	@echo "make bench-audit: what an audit costs: minutes; figures here"
	$(STUB) $(PY) benchmarks/audit.py $(ARGS)

bench-compiled: $(VENV)/.test
	@echo "make bench-compiled: compiled training steps: minutes; table here"
	$(PY) benchmarks/compiled.py $(ARGS)

# What a GPU is for, most important first, each part with its limit; the same command resumes. No installation where
# there is no $(VENV): the machine's own torch, with what `make gpu-wheels` made elsewhere. DRY=1: toy sizes, on the CPU.
gpu:
	@echo "make gpu: all that needs a GPU: minutes to hours; result: results/gpu"
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) benchmarks/on_a_gpu.py $(if $(DRY),--dry) $(ARGS)

# for the Python of that machine: make gpu-wheels GPU_PYTHON=3.12
gpu-wheels: $(VENV)/.torch
	@echo "make gpu-wheels: for a GPU machine without an index: a minute; result: wheels"
	$(PIP) download --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		$(foreach glibc,2_28 2_27 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 --platform any \
		-c $(CONSTRAINTS) -r requirements/gpu-wheels.txt -d wheels

# thirty launches of two processes in a row, by torchrun and by --processes: each must end with 0
launches: $(VENV)/.test
	@echo "make launches: thirty launches of two processes: long; result here"
	HEADWISE_LAUNCHES=30 OMP_NUM_THREADS=1 $(PY) -m pytest --timeout 3600 tests/study/test_several_processes.py -k in_a_row $(ARGS)

# a thousand kills of studies at random moments; ARGS="--kills 100 --kinds tuned,ray" for other storms
storm: $(VENV)/.test
	@echo "make storm: a thousand kills: hours; count here"
	OMP_NUM_THREADS=1 $(STUB) $(PY) tests/study/storm.py $(ARGS)

# places of the source that are broken one after another, to see that their tests fail; ARGS="results/ methods/" for some
mutations: $(VENV)/.test
	@echo "make mutations: some ninety broken programs: half an hour; list here"
	OMP_NUM_THREADS=1 $(PY) tests/mutations/run.py $(ARGS)

methods-table: $(VENV)/.test
	@echo "make methods-table: seconds; writes pages of docs/"
	$(PY) docs/methods_table.py
	$(PY) docs/catalogue.py
	$(PY) docs/citation.py
	$(PY) docs/quoted.py
	$(PY) docs/method_contract.py
	$(PY) docs/pictures.py

# torch first: a looser range would pull its CUDA build.
$(VENV)/.torch:
	@echo "setting up in $(VENV), once: minutes, and gigabytes of disk"
	$(PYTHON) -c "import sys; sys.exit('headwise needs Python 3.11 or newer: make PYTHON=python3.12 ...' if sys.version_info < (3, 11) else 0)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/.study: $(VENV)/.torch pyproject.toml verdict/pyproject.toml $(CONSTRAINTS)
	$(PIP) install -c $(CONSTRAINTS) -e verdict -e '.[study]'
	touch $@

$(VENV)/.demo: $(VENV)/.study
	$(PIP) install -c $(CONSTRAINTS) -e verdict -e '.[study,hf]'
	touch $@

# the site shows the papers' studies
$(VENV)/.docs: $(VENV)/.demo papers/pyproject.toml
	$(PIP) install -c $(CONSTRAINTS) -e verdict -e '.[docs]' -e papers
	touch $@

# Packages that break a user's imports go to a folder that only the tests have on their path (tests/tests_only.py).
$(VENV)/.test: $(VENV)/.demo papers/pyproject.toml requirements/test.txt requirements/test-no-deps.txt requirements/test-triton.txt
	$(PIP) install -c $(CONSTRAINTS) -e verdict -e '.[study,ray,slurm,hf,diffusers,tensorboard]' -e papers -r requirements/test.txt
	$(PIP) uninstall -y -r requirements/test-no-deps.txt
	rm -rf $(VENV)/tests-only
	$(PIP) install --no-deps --target $(VENV)/tests-only -r requirements/test-no-deps.txt
	rm -rf $(VENV)/triton-only
	$(PIP) install --no-deps --target $(VENV)/triton-only -r requirements/test-triton.txt
	touch $@

clean:
	rm -rf $(VENV) build dist docs/generated src/*.egg-info */src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
