# The two commands of the README are `make demo` and `make test`; both build their own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# Byte-code is kept, also where the shell says that Python shall not: packages come without (see
# .dev), and each of some hundred processes would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

# An environment and its packages, all at once, by uv in a third of pip's time. uv does not read how pip
# is set up: where only that knows of an index, pip installs, below what uv says. Modules are compiled
# where they are first imported: most of these packages' never are.
define environment
	test -e $(1)/bin/python || $(PYTHON) -m venv $(1)
	{ $(1)/bin/python -m pip install -q --disable-pip-version-check uv && UV_SYSTEM_CERTS=1 $(1)/bin/uv \
	  pip install -q --python $(1)/bin/python --cache-dir $(1)/.uv $(2); } || \
	  $(1)/bin/python -m pip install -q --no-compile --disable-pip-version-check $(2)
	rm -rf $(1)/.uv
	touch $(1)/.installed
endef

.PHONY: demo test test-all test-torch test-triton transformers thorough-torch outside lint walks numba unit avx2 kernels thorough wheel bench gpu gallery lessons slides site links look lite reproduce clean

demo: $(VENV)/.installed
	$(BIN)/flashsim study demo --out out

# Format, lint, types, the wheel installed elsewhere, and the suite with coverage. Lint takes a core:
# meanwhile another builds the wheel and compiles what tests would wait for: the CPU engine in float32
# and L2's loops.
test: $(VENV)/.dev
	$(MAKE) --jobs=$(JOBS) --output-sync lint wheel walks
	$(MAKE) unit

# More kernels made into machine code, too, as in CI; and the products of cases, which CI runs where
# it has the time.
test-all: test kernels thorough

# mypy sees the packages as they are installed: backends and viz inside flashsim. What it keeps of an
# unchanged module saves a second run half a minute. prose.py reads pages and docstrings: long
# sentences, banned phrases, terms without a link to the glossary.
lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/tools/prose.py
	rm -rf build/types && mkdir -p build/types/flashsim
	ln -s $(CURDIR)/flashsim/* $(CURDIR)/backends $(CURDIR)/viz build/types/flashsim/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/$(VENV)/mypy

walks: $(VENV)/.dev
	$(KERNELS) $(BIN)/python -c "import flashsim; print(flashsim.warm()); \
	  flashsim.l2.curves(flashsim.count(flashsim.Problem(64, head_dim=16)))" > $(VENV)/walks.log

# Where tests keep compiled code. `walks` optimises the L2 model's loops, and the CPU engine's kernels
# for float32 as for a user; test-torch and site load them. In `unit` LLVM does not optimise other
# types, narrow vectors and emulated units, which takes it 40 s; `make avx2` and `make numba` do.
# Users' own compiled kernels lie elsewhere.
KERNELS = NUMBA_CACHE_DIR=$(CURDIR)/$(VENV)/numba

# The CPU engine on the oldest Numba that setup.cfg allows and on the newest, each in an environment
# of its own; `test` has what pip takes by itself.
NUMBA := 0.61.0 0.68.1
numba: $(NUMBA:%=numba-%)

numba-%: $(VENV)-numba-%/.installed
	OMP_NUM_THREADS=1 $(VENV)-numba-$*/bin/python -m pytest -n $(JOBS) tests/engines/test_primitives.py \
	  tests/engines/test_panels.py tests/engines/test_cpu_engine.py tests/engines/test_cpu_cache.py

$(VENV)-numba-%/.installed: setup.cfg pyproject.toml
	$(call environment,$(VENV)-numba-$*,-e .[test] numba==$*)

# One BLAS thread for each of the $(JOBS) test processes: more of them fight over the cores. They take
# whole files, the longest first (tests/conftest.py).
PYTEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
  --no-loadscope-reorder

unit: $(VENV)/.dev
	$(KERNELS) FLASHSIM_UNOPTIMISED=1 $(PYTEST) --covered 97.5

# All tests that run the CPU engine, as on a CPU with AVX2 alone, on an x86 that has more. NumPy's
# BLAS, too: budgets of tests come from its errors.
HASWELL = OPENBLAS_CORETYPE=Haswell NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c
avx2: $(VENV)/.dev
	$(HASWELL) $(BIN)/flashsim study warm > $(VENV)/avx2.log
	$(HASWELL) $(PYTEST) tests/engines tests/api tests/problem/test_precision.py \
	  tests/studies/test_agreement.py tests/studies/test_softmax_matmul.py

kernels: $(VENV)/.dev
	$(PYTEST) -m kernels tests/backends tests/engines

thorough: $(VENV)/.dev
	$(PYTEST) -m thorough

# The bridges to PyTorch, transformers and JAX, which are large: in an environment of their own.
# Elsewhere these tests skip.
test-torch: $(VENV)-torch/.installed
	$(KERNELS) OMP_NUM_THREADS=1 $(VENV)-torch/bin/python -m pytest -n $(JOBS) tests/api/bridges \
	  tests/api/test_hosts.py tests/own_kernels/test_triton_libraries.py \
	  tests/own_kernels/test_graded_libraries.py \
	  'tests/api/test_docs.py::test_blocks_run[docs/guides/in_your_model.md]' \
	  'tests/api/test_docs.py::test_blocks_run[docs/guides/pallas.md]' \
	  'tests/api/test_docs.py::test_blocks_run[docs/guides/watch.md]' \
	  tests/api/test_docs.py::test_blocks_that_import_torch_run

thorough-torch: $(VENV)-torch/.installed
	OMP_NUM_THREADS=1 $(VENV)-torch/bin/python -m pytest -n $(JOBS) -m thorough tests/api/bridges

$(VENV)-torch/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv --upgrade-deps $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install -q --no-compile --disable-pip-version-check -e .[bridges] \
	  torch==2.13.0 triton==3.9.0
	touch $@

# The oldest version of transformers that setup.cfg allows, before the packages of test-torch, which has
# the newest.
TRANSFORMERS := 5.4.0
transformers: $(VENV)-torch/.installed
	$(VENV)-torch/bin/python -m pip install -q --no-compile --disable-pip-version-check --upgrade \
	  --target $(VENV)-transformers transformers==$(TRANSFORMERS)
	PYTHONPATH=$(CURDIR)/$(VENV)-transformers OMP_NUM_THREADS=1 $(VENV)-torch/bin/python -m pytest \
	  -n $(JOBS) tests/api/bridges/test_hugging_face.py

# Kernels in Triton, which needs no GPU, on the oldest version that setup.cfg allows and on the newest.
TRITON := 3.6.0 3.9.0
test-triton: $(TRITON:%=triton-%)

triton-%: $(VENV)-triton-%/.installed
	OMP_NUM_THREADS=1 $(VENV)-triton-$*/bin/python -m pytest -n $(JOBS) tests/own_kernels \
	  'tests/api/test_docs.py::test_blocks_run[docs/guides/triton.md]'

$(VENV)-triton-%/.installed: setup.cfg pyproject.toml
	$(call environment,$(VENV)-triton-$*,-e .[triton] pytest pytest-xdist hypothesis triton==$*)

# Other people's tests of attention, on the CPU (OUTSIDE=--gpu: on CUDA); writes docs/notebooks/outside.md.
outside: $(VENV)-torch/.installed
	$(VENV)-torch/bin/python -m pip install -q --disable-pip-version-check einops
	PYTHONPATH=tests/tools $(VENV)-torch/bin/python -m outside $(OUTSIDE)

wheel: $(VENV)/.dev
	$(BIN)/python tests/tools/wheel.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/costs.py
	$(BIN)/python benchmarks/cpu.py

# On a GPU, with CuPy and .[test] in PYTHON's environment: tests, sanitizer, seeded bugs, times.
gpu:
	$(PYTHON) tests/tools/gpu_check.py $(STAGES) --out out/gpu

# Published numbers, recomputed: paper, ours, why they differ.
reproduce: $(VENV)/.installed
	$(BIN)/flashsim study reproduce all

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	touch $@

# What .installed holds, and the rest.
$(VENV)/.dev: setup.cfg pyproject.toml
	$(call environment,$(VENV),-e .[dev])
	touch $@

# Every figure of docs/guides/gallery.md (page.png needs Chromium).
gallery: $(VENV)/.dev
	$(BIN)/python docs/gallery.py

# docs/lessons/ run: notebooks in out/lessons, or slides, light and dark, in out/slides.
lessons: $(VENV)/.dev
	$(BIN)/python docs/lessons/lessons.py notebooks

slides: $(VENV)/.dev
	$(BIN)/python docs/lessons/lessons.py slides

# All pages, lessons run, players and API, in out/site: index.html is the first, and needs no server and
# no network. Then its links inside; `make links` asks the servers of the others, `make look` opens
# every page in Chromium.
site: $(VENV)/.dev
	$(BIN)/python docs/site/stage.py build/site/source
	$(KERNELS) $(BIN)/sphinx-build -q -b html -c docs/site -n -W --keep-going -j $(JOBS) build/site/source out/site
	$(BIN)/python docs/site/links.py out/site

links: site
	$(BIN)/python docs/site/links.py out/site --external

look: site
	$(BIN)/python docs/site/look.py out/site

# JupyterLite with our own wheel and the lessons: docs/guides/in_the_browser.md.
lite: $(VENV)/.dev $(VENV)-lite/.installed
	rm -rf build/lite out/lite
	$(BIN)/python -m build -q --wheel --no-isolation --outdir build/lite/pypi .
	$(BIN)/python docs/site/lite.py build/lite
	cd build/lite && $(CURDIR)/$(VENV)-lite/bin/jupyter lite build --contents contents \
	  --output-dir $(CURDIR)/out/lite

$(VENV)-lite/.installed: setup.cfg
	$(PYTHON) -m venv $(VENV)-lite
	$(VENV)-lite/bin/python -m pip install -q --disable-pip-version-check "jupyterlite-core >= 0.8" \
	  "jupyterlite-pyodide-kernel >= 0.8" "jupyter-server >= 2"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-torch $(VENV)-lite $(VENV)-numba-* $(VENV)-triton-* out build dist *.egg-info
