# `make demo` and `make test` do everything on a fresh machine that has Python 3.11 or later.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
SEEDS ?= 200
TRITON ?= 3.6.0
WORKERS ?= $(shell expr $$(nproc) + 2)

BIN := $(VENV)/bin
KERNELS := $(wildcard src/tenuto/kernels/native/*.h src/tenuto/kernels/native/*.cpp bench/*.cpp)
STAMP := $(VENV)/.installed
RAY := $(VENV)-ray
OTHER_TRITON := $(VENV)-triton-$(TRITON)

# The tests start hundreds of processes, which should not each compile everything again.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: demo test test-ray test-triton test-unprivileged coverage check docs bench bench-peers sim clean

demo: $(STAMP)
	$(BIN)/tenuto pull
	$(BIN)/tenuto demo --model $(MODEL) $(if $(KEEP),--keep)

# `pytest` alone runs in one process. Here there is one a core, and two more, since some tests wait for servers; in each one
# thread of torch: more would only wait for each other. The model is fetched before, so that they do not all fetch it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

test: check
	$(BIN)/tenuto pull
	$(PYTEST) --durations 10

# On Ray, in an environment of its own on top of the other: it is large, and nothing else needs it.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -q tests/ray --durations 5

# The kernels for GPUs compiled by another version of Triton, also in an environment of its own.
test-triton: $(OTHER_TRITON)/.installed
	$(OTHER_TRITON)/bin/python -m pytest -q tests/kernels/gpu/test_compiled.py

# What depends on who runs it and where files may be: as a user without a name, and without a home directory.
test-unprivileged: $(STAMP)
	unshare --user --map-user=12345 --map-group=12345 env -u HOME $(PYTEST) \
		tests/base tests/cli tests/kernels/test_native_build.py tests/memory tests/models/test_store.py tests/runtime \
		tests/serve/test_session_files.py tests/session

# Without the tests that speak to other processes or compare the real model: they would be slow, and show little.
coverage: $(STAMP)
	$(BIN)/tenuto pull
	$(PYTEST) --cov=tenuto --ignore tests/serve --ignore tests/cli --ignore tests/numerics --ignore tests/sim \
		--ignore tests/test_examples.py --ignore tests/docs --ignore tests/test_demo.py

check: docs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/clang-format --dry-run --Werror $(KERNELS)
	$(BIN)/mypy --num-workers auto
	$(BIN)/python -m pytest -q tests/test_layers.py

# The site of the pages, in site/. It takes about five seconds, and fails on dead links and missing anchors.
docs: $(STAMP)
	$(BIN)/zensical build --strict --clean

bench: $(STAMP)
	$(BIN)/python -m bench

# The scripts in bench/install fetch or build the others; one that is not there is left out.
bench-peers: $(STAMP)
	$(BIN)/tenuto pull
	$(BIN)/python -m bench.peers --out docs/benchmarks.md

sim: $(STAMP)
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

clean:
	rm -rf $(VENV) $(RAY) $(VENV)-triton-* build dist site .cache .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples -name __pycache__ -prune -exec rm -rf {} +

# Made anew, not updated: a dependency that is no longer declared must not linger.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tenuto needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV); the first time this downloads PyTorch and takes a few minutes."
	$(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[test,dev,bench,docs]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # what pip does with one core; files for later Pythons fail
	@touch $@

# An environment at $(1) that has its own packages before those of $(VENV).
define on_top
	$(BIN)/python -m venv --clear $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tenuto.pth"
endef

$(RAY)/.installed: $(STAMP)
	$(call on_top,$(RAY))
	PIP_CONSTRAINT=constraints.txt $(RAY)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[ray]'
	@touch $@

$(OTHER_TRITON)/.installed: $(STAMP)
	$(call on_top,$(OTHER_TRITON))
	$(OTHER_TRITON)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check triton==$(TRITON)
	@touch $@
