# `make demo` and `make test` need nothing but Python 3.11 or newer with its venv module, Linux, and a network for the first run.

SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.stamps/ready

.PHONY: help venv versions etcd rdma-vm demo test test-all test-rdma sim matrix failures lint bench bench-all bench-answers bench-engines bench-master bench-router bench-scale soak wheel clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo        two SGLang servers (CPU) share one KV-cache pool on this machine; KEEP=1 leaves them running"
	@echo "                 PD=1: a prefill and a decode server behind a router instead, several chats, with a plot; 6 minutes"
	@echo "make test        the tests, some with real SGLang servers: under 30 minutes on two cores"
	@echo "                 PYTEST_ARGS='-m \"not e2e and not slow\"' leaves those out"
	@echo "make test-all    lint, wheel, then every test: more model families, SGLang releases and administrators"
	@echo "make test-rdma   those over RDMA, in a virtual machine with devices in software: up to 10 minutes; RDMA_PARTS=\"bindings\""
	@echo "make matrix      every test, and docs/support-matrix.md from those that passed"
	@echo "make lint        ruff check, ruff format --check, mypy --strict"
	@echo "make sim         simulated clusters in trouble; SEEDS=1:1000, SIM_ARGS='--minutes 60'"
	@echo "make bench       what moves pages, against its ceilings; MOONCAKE=PYTHON, one that has mooncake-transfer-engine, compares,"
	@echo "                 and so do LMCACHE=PYTHON, one that has lmcache, and NIXL=PYTHON, one that has nixl, and Redis and Valkey,"
	@echo "                 whose servers are in PATH; BENCH_ARGS=models MODEL=llama-3-70b: pages of one model"
	@echo "make bench-all   all sections of all benchmarks, and which targets were met; QUICK=1 with few rounds and small sizes"
	@echo "make bench-master  the master's; MOONCAKE=PYTHON, one that has mooncake-transfer-engine, compares with it"
	@echo "make bench-router  what the router adds to a request and what it saves, beside sglang-router where that is installed"
	@echo "make bench-answers every answer of SGLang servers (CPU) on a pool that evicts against one without any cache, token by"
	@echo "                 token; BENCH_ARGS='--requests 10000' or '--requests 10000 --minutes 60'"
	@echo "make bench-engines chats of several rounds: no HiCache, HiCache, and HiCache with each L3 that runs here; with a plot"
	@echo "make bench-scale   one shard of a cluster of 1,000 nodes: messages, bytes and CPU a second"
	@echo "make failures    the tests of faults, and docs/failures.md from those that passed"
	@echo "make soak        a cluster at full load for 20 minutes: does anything grow? BENCH_ARGS='--cold DIR': with cold tiers there,"
	@echo "                 whose disk is written and read all the time"
	@echo "make venv        only make $(VENV), 3 GB; demo and test do it when it is missing"
	@echo "make clean       remove what was built, logs and caches; distclean: $(VENV) too"
	@echo
	@echo "PYTHON=python3   the Python that makes $(VENV)"
	@echo "TORCH_INDEX=URL  where to look for torch besides the usual index: https://download.pytorch.org/whl/cpu has the"
	@echo "                 CPU build, which is gigabytes smaller than the one on PyPI"

venv: $(READY)

$(READY): requirements/sglang-cpu.txt pyproject.toml tools/setup_venv.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/setup_venv.sh $(VENV)
	@touch $@

demo: $(READY)
	@$(PY) -m hicache_mooncake.cli demo --workdir .demo $(if $(filter-out 0,$(PD)),--pd) $(if $(filter-out 0,$(KEEP)),--keep) $(if $(MODEL),--model "$(MODEL)")

# Other SGLang releases, without their dependencies: tests/sglang/test_versions.py imports their interface.
VERSIONS := 0.5.9 0.5.14 0.5.20 0.5.21 0.5.22

versions: $(VERSIONS:%=$(VENV)/.stamps/sglang-%)

$(VENV)/.stamps/sglang-%: $(READY)
	@echo "sglang $*, for the tests against its interface"
	@$(PY) -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target $(VENV)/sglang-$* sglang==$* \
		2> >(grep -v 'Location .* is ignored' >&2)
	@touch $@

# A real etcd for the tests of discovery and election. They are skipped, with the reason, where it cannot be had.
etcd: $(READY)
	@tools/get_etcd.sh $(VENV) || true

# QEMU and a kernel for the tests over RDMA. They are skipped, with the reason, where it cannot be had.
rdma-vm: $(READY)
	@tools/get_rdma_vm.sh $(VENV) || true

# Two at a time, since half of the time is waiting. What fails is run once more, alone: on a loaded machine a test with real
# processes and deadlines can fail for that. Both runs are shown, and the second one decides.
TEST_WORKERS ?= 2

test: $(READY) versions etcd
	@$(PY) -m pytest -m "not slow" -n $(TEST_WORKERS) --no-loadscope-reorder $(PYTEST_ARGS); \
	status=$$?; if [ $$status -ne 1 ]; then exit $$status; fi; \
	printf '\n== What failed is run again, alone ==\n\n'; \
	exec $(PY) -m pytest -m "not slow" --last-failed --last-failed-no-failures none $(PYTEST_ARGS)

test-all: lint wheel versions etcd rdma-vm
	$(PY) -m pytest $(PYTEST_ARGS)

test-rdma: $(READY) rdma-vm
	@RDMA_PARTS="$(RDMA_PARTS)" $(PY) -m pytest tests/rdma -s $(PYTEST_ARGS)

matrix: $(READY) versions
	HICACHE_MATRIX=docs/support-matrix.json $(PY) -m pytest tests/sglang tests/e2e $(PYTEST_ARGS)
	$(PY) -m tools.support_matrix

failures: $(READY) etcd
	HICACHE_FAILURES=docs/failures.json $(PY) -m pytest $$($(PY) -m tests.faults.elsewhere) $(PYTEST_ARGS)
	$(PY) -m tools.failures

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

SEEDS ?= 1:200

sim: $(READY)
	@$(PY) -m hicache_mooncake.testing.sim --seeds $(SEEDS) $(SIM_ARGS)

BENCH_PEERS = $(if $(MOONCAKE),--mooncake "$(MOONCAKE)") $(if $(LMCACHE),--lmcache "$(LMCACHE)") $(if $(NIXL),--nixl "$(NIXL)")

bench: $(READY)
	@$(PY) -m benchmarks.quick $(BENCH_PEERS) $(if $(MODEL),--model "$(MODEL)") $(BENCH_ARGS)

bench-all: $(READY)
	@$(PY) -m benchmarks.everything $(BENCH_PEERS) $(if $(filter-out 0,$(QUICK)),--quick) $(BENCH_ARGS)

bench-master: $(READY)
	@$(PY) -m benchmarks.master $(if $(MOONCAKE),--mooncake "$(MOONCAKE)") $(BENCH_ARGS)

bench-router: $(READY)
	@$(PY) -m benchmarks.router $(BENCH_ARGS)

bench-answers: $(READY)
	@$(PY) -m benchmarks.answers $(BENCH_ARGS)

bench-engines: $(READY)
	@$(PY) -m benchmarks.engines $(BENCH_ARGS)

bench-scale: $(READY)
	@$(PY) -m benchmarks.scale $(BENCH_ARGS)

soak: $(READY)
	@$(PY) -m benchmarks.soak $(BENCH_ARGS)

wheel: $(READY)
	$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
