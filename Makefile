# make demo, make test, make lint: each makes the virtual environment that it needs, once, and then is fast.
#
#   PYTHON=/path/to/python   use that environment; nothing is installed into it but haloconv itself, in place
#   BASE_PYTHON=python3.12   what to make environments with
#   VENV=.venv               where to make them (also VENV_LINT, VENV_213)
#   ARGS="..."               passed on to pytest or to the example

VENV ?= .venv
VENV_LINT ?= .venv-lint
VENV_213 ?= .venv-213
BASE_PYTHON ?= python3
NPROC ?= 2
ARGS ?=

ifdef PYTHON
PY := $(PYTHON)
PY_LINT := $(PYTHON)
else
PY := $(VENV)/bin/python
PY_LINT := $(VENV_LINT)/bin/python
endif
ifdef PYTHON_213
PY_213 := $(PYTHON_213)
else
PY_213 := $(VENV_213)/bin/python
endif

export BASE_PYTHON
SANITIZED := build/sanitize
.DEFAULT_GOAL := help
.PHONY: help demo demo-short test test-long test-213 test-kernels lint format build wheel audit sanitize \
    sanitize-short fuzz zoo bench-check report mutation mutation-short \
    fakes fake-mutation clean distclean env env-lint env-213

help:
	@echo 'make demo       trains a ConvNet on images split over $(NPROC) processes, and unsplit'
	@echo 'make test       the test suite'
	@echo 'make test-long  the same with the whole grid of every rule on 1 to 4 processes, and every long form'
	@echo 'make lint       ruff, clang-format, clang-tidy, gcc -Werror, the rules of the repository'
	@echo 'make format     lets ruff and clang-format rewrite the files'
	@echo 'make build      builds the extension into python/haloconv'
	@echo 'make wheel      dist/haloconv-*.whl'
	@echo 'make audit      that wheel: does it keep to the two stable ABIs?'
	@echo 'make test-213   that wheel on torch 2.13.0: what of the core of the suite another torch can change'
	@echo 'make test-kernels   the core of the suite, its halos moved by the CUDA kernels on the host'
	@echo 'make fakes      the long form of the tests of the NCCL transport, on a stand-in for NCCL and CUDA'
	@echo 'make fake-mutation   takes the safeguards of that transport away: do those tests notice each?'
	@echo 'make sanitize   the core of the suite under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make fuzz       the random tests with many more examples'
	@echo 'make zoo        whole published models on 2 and 3 processes against their unsplit selves'
	@echo 'make bench-check  PASS or FAIL for each speed target, over five runs of the benchmarks'
	@echo 'make report     docs/report.md: what this machine can measure, beside what was published'
	@echo 'make mutation   breaks the rule on purpose, in many ways: do tests notice each?'
	@echo 'make clean      removes what was built; make distclean the virtual environments too'

demo: build
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) \
	    examples/train_convnext.py $(ARGS)

demo-short: ARGS += --steps 15
demo-short: demo

test: build
	$(PY) -m pytest $(ARGS)

test-long: export HALOCONV_LONG = 1
test-long: test

build: env
	@$(PY) .ci/build_in_place.py

wheel: env
	@rm -rf build/lib* build/bdist* dist
	$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

audit: wheel
	$(PY) .ci/audit.py dist/haloconv-*.whl

# The wheel is the very binary that `make test` runs, and nothing is built for the older torch. What is marked own is
# left out: the integers and loops of that binary are the same under any torch.
test-213: build wheel env-213
	$(PY_213) -m pip install --quiet --no-deps --force-reinstall dist/haloconv-*.whl
	@cmp python/haloconv/_C.abi3.so "$$($(PY_213) -c \
	    'import importlib.util as u; print(u.find_spec("haloconv").submodule_search_locations[0])')/_C.abi3.so"
	$(PY_213) -m pytest -m "core and not own" $(ARGS)

# Every halo through the bodies of the CUDA kernels, which run on the host for that.
test-kernels: build
	HALOCONV_CUDA_LIBRARY=$(CURDIR)/$$($(PY) tests/hostkernels.py build/hostkernels) $(PY) -m pytest -m core $(ARGS)

# What needs no card of the NCCL transport; `make test` has a short form.
fakes: build
	HALOCONV_LONG=1 $(PY) -m pytest tests/test_fakes.py tests/test_wire.py $(ARGS)

fake-mutation: env
	$(PY) tests/fake_mutation.py $(ARGS)

lint: env-lint
	@$(PY_LINT) .ci/lint.py

format: env-lint
	@$(PY_LINT) .ci/lint.py --fix

sanitize: env
	@PY=$(PY) BUILD=$(SANITIZED) .ci/sanitize $(ARGS)

# The failing n-th calls and 18 ranks take long there, and so does what is Python over the same C: `make sanitize` has them.
PYTHON_TESTS := adaptive harness info losses missing norms padding parallelize parallelize_training pointwise pooling \
    randomness rearranging reductions resizing shard_states unfolding
sanitize-short: export HALOCONV_QUICK = 1
sanitize-short: export HALOCONV_FUZZ_CASES = 100
sanitize-short: ARGS += --deselect tests/test_ops_memory.py::test_every_libtorch_call_may_fail \
    --deselect tests/test_convolution_fuzz.py::test_50_cubed_on_3x3x2 \
    $(PYTHON_TESTS:%=--ignore tests/test_%.py)
sanitize-short: sanitize

fuzz: build
	HALOCONV_FUZZ_CASES=5000 $(PY) -m pytest --timeout 7200 tests/test_convolution_fuzz.py tests/test_plan.py $(ARGS)

bench-check: build
	$(PY) benchmarks/check.py $(ARGS)

report: build
	$(PY) benchmarks/report.py $(ARGS)

zoo: build
	OMP_NUM_THREADS=1 $(PY) tests/zoo.py $(ARGS)

mutation: build
	$(PY) tests/mutation.py $(ARGS)

mutation-short: ARGS += --quick
mutation-short: mutation

clean:
	rm -rf build dist python/*.egg-info python/haloconv/*.so .pytest_cache .ruff_cache .hypothesis
	find python tests examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-lint .venv-213 .venv*.lock

# Does nothing where the environment is ready, and nothing at all with PYTHON=.
env:
ifndef PYTHON
	@.ci/venv $(VENV) requirements.txt
endif

env-lint:
ifndef PYTHON
	@.ci/venv $(VENV_LINT) requirements-lint.txt
endif

env-213:
ifndef PYTHON_213
	@.ci/venv $(VENV_213) requirements-213.txt
endif
