# Two commands for a newcomer: `make up` (run Weir) and `make test` (check it). Everything else serves these.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# cpu keeps gigabytes of CUDA packages away; cuda takes PyTorch's default build.
TORCH ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
UP_FLAGS ?=
PYTEST_FLAGS ?=

.PHONY: up test check setup setup-dev golden long chaos compose-test bench-sim gpu triton-oldest format proto proto-baseline constraints clean

up: setup ## Start a local stack with a real small model; Ctrl-C ends it.
	$(BIN)/weir up $(UP_FLAGS)

# The model's forward passes want the machine for themselves; on two cores stacks run two at a time, and all else three:
# many of these tests wait.
test: check model ## Everything that CI runs.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not golden and not stack" \
		--ignore tests/guard --ignore tests/golden $(PYTEST_FLAGS)
	$(BIN)/python -m pytest -m "not golden" tests/golden $(PYTEST_FLAGS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "stack and not golden and not long" \
		--ignore tests/golden $(PYTEST_FLAGS)

check: setup-dev ## Format, lint, types, guard tests.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/baseline.binpb
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/python -m pytest tests/guard $(PYTEST_FLAGS)

golden: setup-dev model ## The long exactness runs.
	$(BIN)/python -m pytest -m golden -s $(PYTEST_FLAGS)

long: setup-dev model ## Stack tests that take long: outages, rolling restarts.
	$(BIN)/python -m pytest -m long $(PYTEST_FLAGS)

MINUTES ?= 10
SEED ?= 1
CHAOS_OUT ?= build/chaos.md
chaos: setup-dev model ## Streams amid faults for MINUTES, from SEED; the report goes to CHAOS_OUT, logs beside it.
	mkdir -p $(dir $(CHAOS_OUT))
	$(BIN)/python -m tests.chaos.run --minutes $(MINUTES) --seed $(SEED) --out $(CHAOS_OUT) --keep-logs build/chaos-logs

compose-test: setup-dev ## The stack of compose/ in real containers; needs root. build/containers keeps images for the next run.
	$(BIN)/python -m tests.containers

bench-sim: setup ## Experiments on the simulator, in full; traces from WEIR_TEST_DATA.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sim --size full --out shared/docs/results

PART ?=
gpu: ## Tests and figures of the GPU path by the python3 on the PATH; six files go to $OUT (./out). PART=step: one part.
	PYTHONPATH=shared $(PYTHON) -m benchmarks.gpu --part "$(PART)"

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

setup: $(VENV)/.installed
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

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
ifeq ($(TORCH),cpu)
	$(BIN)/pip install -q --no-deps -c constraints.txt --index-url $(TORCH_CPU_INDEX) --retries 1 torch \
		|| $(BIN)/pip install -q -c constraints.txt torch
endif
	$(BIN)/pip install -q -c constraints.txt -e '.[plots,training,worker]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build
