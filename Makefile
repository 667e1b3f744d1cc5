# Two commands for a newcomer: `make up` (run Weir) and `make test` (check it). Everything else serves these.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# cpu keeps gigabytes of CUDA packages away; cuda takes PyTorch's default build.
TORCH ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
UP_FLAGS ?=
PYTEST_FLAGS ?=
# Else each of some thousand short processes compiles all of Weir, and each worker of pytest rewrites every test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up test check setup setup-dev golden long chaos fuzz compose-test bench-sim sbom gpu triton-oldest format proto proto-baseline constraints clean

up: setup ## Start a local stack with a real small model; Ctrl-C ends it.
	$(BIN)/weir up $(UP_FLAGS)

test: setup-dev model lint ## Everything that CI runs.
	$(MAKE) --no-print-directory -j 2 types together
	$(MAKE) --no-print-directory computing
	$(MAKE) --no-print-directory simulated
	$(MAKE) --no-print-directory stacks

check: lint types ## Format, lint, types, guard tests.
	$(BIN)/python -m pytest tests/guard $(PYTEST_FLAGS)

.PHONY: lint types together stacks computing simulated
lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/baseline.binpb

types: setup-dev # A core for a minute and a half, which tests leave free while they wait.
	nice $(BIN)/mypy

# On two cores stacks run two at a time, and all else five: many of these tests wait. What only computes and has limits
# of time wants a core a worker, so it runs beside nothing; Triton's interpreter and compiler have none to speak of, and
# come first, for what others leave while they wait.
# Each worker of pytest imports every test of what it is given, so stacks are looked for only where there are some
# (tests/guard knows where).
PARALLEL := --dist loadfile --no-loadscope-reorder
WORKERS ?= 5
STACK_WORKERS ?= 2
STACKS := tests/hosts tests/golden/test_split_golden.py tests/attacks tests/chaos tests/metrics tests/e2e
TRITON := tests/kernels/test_triton_interpreter.py tests/kernels/test_triton_compile.py
COMPUTING := tests/golden $(filter-out $(TRITON),$(wildcard tests/kernels/test_*.py))
SIMULATED := tests/simulation
APART := not golden and not stack and not long
# Files of which all is long are not even imported.
ONLY_LONG = $(addprefix --ignore=,$(shell grep -rlE --include='*.py' '^pytestmark = .*mark\.long' tests))
# Pytest rewrites every test when it first imports it: in one process, as four would do the same at the same time.
REWRITTEN = $(wildcard tests/unit/*/__pycache__/*-pytest-*.pyc)
together: setup-dev
	$(if $(REWRITTEN),,-$(BIN)/python -m pytest -q --collect-only tests > /dev/null)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PARALLEL) -m "$(APART)" $(addprefix --ignore=,$(COMPUTING) $(SIMULATED)) $(TRITON) tests $(PYTEST_FLAGS)

computing: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PARALLEL) -m "$(APART)" $(COMPUTING) $(PYTEST_FLAGS)

simulated: setup-dev # It runs worlds on two cores itself.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(APART)" $(SIMULATED) $(PYTEST_FLAGS)

stacks: setup-dev
	$(BIN)/python -m pytest -n $(STACK_WORKERS) $(PARALLEL) -m "stack and not golden and not long" $(ONLY_LONG) $(STACKS) $(PYTEST_FLAGS)

golden: setup-dev model ## The long exactness runs.
	$(BIN)/python -m pytest -m golden -s $(PYTEST_FLAGS)

long: setup-dev model ## What takes long: outages, rolling restarts, tuning on a stack, more examples, more GPUs and models to compile kernels for.
	$(BIN)/python -m pytest -m long $(PYTEST_FLAGS)

MINUTES ?= 10
ATHERIS := atheris==3.0.0
SEED ?= 1
CHAOS_OUT ?= build/chaos.md
chaos: setup-dev model ## Streams amid faults for MINUTES, from SEED; the report goes to CHAOS_OUT, logs beside it.
	mkdir -p $(dir $(CHAOS_OUT))
	$(BIN)/python -m tests.chaos.run --minutes $(MINUTES) --seed $(SEED) --out $(CHAOS_OUT) --keep-logs build/chaos-logs

FUZZ_TARGET ?=
fuzz: setup-dev ## Hostile bytes for every reader for MINUTES together, guided by coverage; findings go to build/fuzz.
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/pip install -q $(ATHERIS)
	nice $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ_TARGET:%=--target %)

SEEDS ?= 10000
FROM ?= 1
.PHONY: simulate-faults
simulate-faults: setup-dev ## Whole stacks on virtual time amid faults, SEEDS of them from FROM; stories of those that failed.
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --from $(FROM)

PART ?=
compose-test: setup-dev ## Stacks of compose/ in real containers (PART: stack, tls, two-hosts, chart); needs root. build/containers keeps images.
	$(BIN)/python -m tests.containers $(PART:%=--part %)

.PHONY: chart-renders
chart-renders: setup-dev ## What the chart of compose/kubernetes comes to with its values files, for tests/kubernetes.
	$(BIN)/python -m tests.kubernetes.renew

bench-sim: setup ## Experiments on the simulator, in full; traces from WEIR_TEST_DATA.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sim --size full --out shared/docs/results

SBOM ?= build/sbom.json
sbom: setup ## What is installed in .venv, as CycloneDX, in SBOM.
	mkdir -p $(dir $(SBOM))
	$(BIN)/python -m weir.runtime.sbom > $(SBOM)

gpu: ## Tests and figures of the GPU path by the python3 on the PATH; six files go to $OUT (./out). PART=step: one part.
	PYTHONPATH=shared $(PYTHON) -m benchmarks.gpu --part "$(PART)"

.PHONY: compiled
compiled: setup-dev ## Weir with a compiled scheduling core in build/compiled; PYTHONPATH=build/compiled uses it. Needs a C compiler.
	rm -rf build/compiled # its library has another name each time
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(BIN)/pip install -q --no-deps --no-build-isolation --target build/compiled .

OLDEST_TRITON := 3.6.0
triton-oldest: setup-dev ## The oldest Triton that Weir takes, beside the installed one, for tests/kernels (190 MB).
	$(BIN)/pip install -q --no-deps --upgrade --target build/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)

.PHONY: prometheus
prometheus: build/prometheus/usr/bin/promtool ## Debian's Prometheus and promtool for tests/metrics, unpacked, not installed.

build/prometheus/usr/bin/promtool:
	rm -rf build/prometheus
	mkdir -p build/prometheus/package
	cd build/prometheus/package && apt-get download -q prometheus
	dpkg -x build/prometheus/package/prometheus_*.deb build/prometheus

.PHONY: valkey
valkey: build/valkey/.unpacked ## Debian's Valkey, or its Redis where it has none, for tests of page tiers, unpacked, not installed.

build/valkey/.unpacked:
	rm -rf build/valkey
	mkdir -p build/valkey/package
	cd build/valkey/package && { apt-get download -q valkey-server valkey-tools 2>/dev/null || apt-get download -q redis-server redis-tools; }
	cd build/valkey/package && apt-get download -q libjemalloc2 liblzf1
	for package in build/valkey/package/*.deb; do dpkg -x $$package build/valkey || exit 1; done
	touch $@

.PHONY: model
model: setup ## The built-in model, in the model cache.
	$(BIN)/weir pull smollm2-135m

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup-dev ## Generate shared/weir/wire/v1 from proto/.
	$(BIN)/python proto/generate.py

proto-baseline: setup-dev ## On release: what `make check` compares the protocol with from here on.
	$(BIN)/buf build proto --exclude-source-info -o proto/baseline.binpb

constraints: setup-dev
	( head -n 1 constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//' ) > constraints.new
	mv constraints.new constraints.txt

# With the tools where another goal wants them: one call of pip instead of two.
WITHOUT_TOOLS := up setup model bench-sim sbom
setup: $(VENV)/$(if $(filter-out $(WITHOUT_TOOLS),$(or $(MAKECMDGOALS),up)),.installed-dev,.installed)
setup-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), sys.version' \
		|| { echo "Weir needs Python 3.11 or later; $(PYTHON) is older. Name another: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		rm -rf $(VENV); \
		echo "The venv module of $(PYTHON) is incomplete; installing the system's package python3-venv."; \
		if [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -y -q python3-venv; \
		else sudo apt-get update -q && sudo apt-get install -y -q python3-venv; fi; \
		$(PYTHON) -m venv $(VENV); }

# Bytecode comes with the first import: most of these packages' 260 MB of source are never imported.
PIP_INSTALL := $(BIN)/pip install -q --no-compile -c constraints.txt
# In a quarter of pip's time, but it knows no settings of pip: where packages come from another index, pip installs.
UV_INSTALL := UV_SYSTEM_CERTS=1 UV_HTTP_RETRIES=1 $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt
HAS_OWN_INDEX = $(BIN)/pip config list | grep -q '[.]index-url='
USER_EXTRAS := plots,training,worker

define install
	$(if $(filter cpu,$(TORCH)),$(PIP_INSTALL) --no-deps --index-url $(TORCH_CPU_INDEX) --retries 1 torch || $(PIP_INSTALL) torch)
	{ ! $(HAS_OWN_INDEX) && $(PIP_INSTALL) uv && $(UV_INSTALL) -e '.[$(1)]'; } || $(PIP_INSTALL) -e '.[$(1)]'
endef

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(call install,$(USER_EXTRAS))
	touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml constraints.txt
	$(call install,dev)
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) dist build
