# Everything is made from the files here: `make test` on a bare machine with Python 3.11 or newer needs no other step.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install quickstart test lint format bench torture slurm-deps compiler-deps clean

install: $(STAMP)

# torch comes first and pinned, so that no other package can ask for a newer (and much larger) one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, found $$($(PYTHON) --version 2>&1); try make PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "error: cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	@echo "installing into $(VENV): torch first, then all the rest; two minutes or so"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)
	@echo "installed; now: . $(BIN)/activate"

# Options go into ARGS: make quickstart ARGS="--train.seed=2 --train.run_dir=runs/tiny_2"
quickstart: install
	$(BIN)/dist-tfm quickstart $(ARGS)

test: install
	$(BIN)/pytest tests/

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --external-sources slurm/*.sbatch launch/*.sh benchmarks/gpu.sh .ci/run

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/loader_throughput.py --json benchmarks/results/loader_throughput.json
	$(BIN)/python benchmarks/loader_peers.py --setup
	$(BIN)/python benchmarks/loader_peers.py --json benchmarks/results/loader_peers.json
	$(BIN)/python benchmarks/plan_quality.py --json benchmarks/results/plan_quality.json
	$(BIN)/python benchmarks/prepare_speed.py --json benchmarks/results/prepare_speed.json
	$(BIN)/python benchmarks/train_throughput.py --setup
	$(BIN)/python benchmarks/train_throughput.py --against torch,fairseq,eole --json benchmarks/results/train_throughput.json
	$(BIN)/python benchmarks/train_throughput.py --against torch,eole --parts against --dtypes bf16 --train.kernels=native \
		--json benchmarks/results/train_throughput_native.json
	$(BIN)/python benchmarks/parallel_overhead.py --json benchmarks/results/parallel_overhead.json
	$(BIN)/python benchmarks/decode_throughput.py --setup
	$(BIN)/python benchmarks/decode_throughput.py --against huggingface --json benchmarks/results/decode_throughput.json
	$(BIN)/python benchmarks/fused_projections.py --rounds 11 --json benchmarks/results/fused_projections.json
	$(BIN)/python benchmarks/tiny_trials.py --json benchmarks/results/tiny_trials.json
	$(BIN)/python benchmarks/step_costs.py --json benchmarks/results/step_costs.json
	$(BIN)/python benchmarks/attention_lengths.py --json benchmarks/results/attention_lengths.json \
		--plot docs/figures/attention_lengths.svg
	$(BIN)/python benchmarks/layer_complexity.py --json benchmarks/results/layer_complexity.json \
		--plot docs/figures/layer_complexity.svg
	$(BIN)/python benchmarks/table3.py --json benchmarks/results/table3.json
	$(BIN)/python benchmarks/depth.py --json benchmarks/results/depth.json
	$(BIN)/python benchmarks/tables.py

# Kills real training jobs at random moments, at length (the short version is part of `make test`).
torture: install
	$(BIN)/python tests/integration/torture.py --kills 20

# What tests need beside Python packages (Debian, Ubuntu): $(1) the commands, $(2) their packages.
define packages
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for name in $(1); do command -v $$name >/dev/null || missing=1; done; \
	if [ -z "$$missing" ]; then \
		echo "installed: $(1)"; \
	elif ! command -v apt-get >/dev/null; then \
		echo "error: $(1) are needed: install them with your package manager"; exit 2; \
	elif [ "$$(id -u)" != 0 ]; then \
		echo "error: root is needed; type: sudo apt-get install --no-install-recommends $(2)"; exit 2; \
	else \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2); \
	fi
endef

# tests/slurm runs a cluster of its own: nothing is started, and nothing outside of a test's folder is used. Without it
# these tests are skipped.
slurm-deps:
	$(call packages,slurmctld slurmd munged sbatch srun,slurmctld slurmd slurm-client munge)

# tests/unit/test_kernels.py compiles what train.kernels=native runs; without it these tests are skipped.
compiler-deps:
	$(call packages,g++,g++ libc6-dev)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
