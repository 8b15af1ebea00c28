# Everything a clone needs is made on demand: `make demo` on a fresh machine builds .venv, fetches the small model and runs it.
# A stamp file says which set of packages .venv holds; it is made again when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
RANKS  := tests/parallel tests/engine/test_many_moves.py tests/test_llm_ranks.py tests/test_store_ranks.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-ranks test-replicas test-ray test-nixl test-long test-old-cpu test-interrupts test-install docs lint bench clean

help:
	@echo "make demo    build the environment if needed, then run the demo with the embedded model"
	@echo "make test    run the tests (JOBS=$(JOBS) processes, one thread each)"
	@echo "make test-slow   run the tests that make test leaves out: crowds, storms, endurance"
	@echo "make test-long   run the tests that have a longer form, in that form"
	@echo "make test-ranks   run the long tests of several ranks, and of requests that move"
	@echo "make test-replicas   run two servers behind vllm-router: one is killed, one is drained, all are drained"
	@echo "make test-ray   run the tests of replicas under Ray Serve, in an environment of their own (0.5 GB more)"
	@echo "make test-nixl   run the tests of what goes from server to server by NIXL, too, in an environment of their own (0.4 GB more)"
	@echo "make test-interrupts   interrupt an engine at two thousand lines"
	@echo "make test-old-cpu   run the tests of numbers as a CPU without AVX-512 would"
	@echo "make test-install   install the built wheel with all it needs into a fresh environment, and try it"
	@echo "make docs    the API as web pages, from the docstrings, into build/api"
	@echo "make lint    ruff check, ruff format --check, pyrefly"
	@echo "make bench   measure speed on this machine's GPU (ARGS='--model-shape tiny': on a CPU, to see that it runs)"
	@echo "make clean   remove caches and $(VENV)"
	@echo "PYTHON=python3.12 make ... picks another interpreter (3.11 or newer)"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "hybridkv needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." ; \
	  echo "Name another one: PYTHON=python3.12 make $(MAKECMDGOALS)" ; exit 1 ; }
	@echo "== making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing hybridkv and what it runs on (about 1 GB with the CPU build of torch, more with CUDA; a minute or more)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing hybridkv with its test and lint tools (about 2 GB with the CPU build of torch; a minute or more)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.stamp-run $@

demo: $(VENV)/.stamp-run
	@$(BIN)/hybridkv demo

# The model is fetched before the workers start, so that they never fetch it at the same time.
test: $(VENV)/.stamp-dev
	@$(BIN)/python -m hybridkv.embedded
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" --durations=20 --durations-min=1 $(ARGS)

test-slow: $(VENV)/.stamp-dev
	@$(BIN)/python -m hybridkv.embedded
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow --ignore tests/install --durations=20 --durations-min=1 $(ARGS)

# All configurations of compiled kernels, all pairs of parameters, more random examples: tests/support/long_form.py.
test-long: $(VENV)/.stamp-dev
	HYBRIDKV_LONG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long $(ARGS)

test-ranks: $(VENV)/.stamp-dev
	@$(BIN)/python -m hybridkv.embedded
	HYBRIDKV_LONG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long --durations=20 --durations-min=1 $(RANKS) $(ARGS)

# In one process, for the tests go on from each other.
test-replicas: $(VENV)/.stamp-dev
	HYBRIDKV_REPLICAS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/test_replicas.py $(ARGS)

# Ray is half a gigabyte: it lies in an environment of its own, which sees the packages of the other.
$(VENV)-ray/.stamp: $(VENV)/.stamp-dev
	@$(BIN)/python -m venv $(VENV)-ray
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VENV)-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth
	@$(VENV)-ray/bin/python -m pip install --quiet -c constraints.txt 'ray[serve]==2.60.0'
	@touch $@

test-ray: $(VENV)-ray/.stamp
	OMP_NUM_THREADS=1 $(VENV)-ray/bin/python -m pytest tests/ray_serve $(ARGS)

# NIXL, likewise. The tests are those of TCP, by both, and what NIXL alone can do wrong.
$(VENV)-nixl/.stamp: $(VENV)/.stamp-dev
	@$(BIN)/python -m venv $(VENV)-nixl
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VENV)-nixl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth
	@$(VENV)-nixl/bin/python -m pip install --quiet -c constraints.txt nixl
	@$(VENV)-nixl/bin/python -c 'import nixl._api'
	@touch $@

test-nixl: $(VENV)-nixl/.stamp
	@$(BIN)/python -m hybridkv.embedded
	OMP_NUM_THREADS=1 $(VENV)-nixl/bin/python -m pytest tests/cache/test_nixl_agents.py tests/cache/test_shelves.py tests/server/test_transfers.py $(ARGS)

# Libraries pick their products by what the CPU can do. Here they do without AVX-512; test_old_cpu.py checks that they did.
# What is run again is what those libraries compute: products, softmax and its sums, norms, conversions between formats,
# whole models, and engines whose answers are compared with other products (alone and together, cold and reused). Left
# out is what computes nothing whose bits could differ: configs, pages, lists, copies, refusals, what is compiled for a
# GPU; and crowds, storms, moves and interrupts, whose steps multiply as those above do.
OLD_CPU := OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FBGEMM_ENABLE_INSTRUCTIONS=AVX2
NUMBERS := tests/test_old_cpu.py tests/test_exact.py \
  $(addprefix tests/kernels/,attention formats gdn linear moe sampling v4 test_activation.py test_exact_ops.py test_norm.py test_rope.py) \
  $(patsubst %,tests/kernels/eviction/test_%.py,key_difference peak peak_pool score standing) \
  $(patsubst %,tests/models/test_%.py,cpu_forms deepseek_v4 deepseek_v4_quantised deepseek_v4_released gguf_parity packed_models parity qwen3 smollm2 state_dtype v4_stream) \
  $(patsubst %,tests/eviction/test_%.py,capture decode_after_eviction end_to_end fp8_needles known_sums policies scores) \
  $(patsubst %,tests/cache/test_%.py,compressed_layer compressed_layer_rounding compressed_reads layer_handle) \
  $(patsubst %,tests/engine/test_%.py,batching compressed copying prompt_logprobs replay reuse reuse_v4 sampler)

test-interrupts: $(VENV)/.stamp-dev
	HYBRIDKV_INTERRUPTS=24 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/engine/test_interrupts.py -k any_line $(ARGS)

test-old-cpu: $(VENV)/.stamp-dev
	@$(BIN)/python -m hybridkv.embedded
	$(OLD_CPU) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(NUMBERS) $(ARGS)

test-install: $(VENV)/.stamp-dev
	@$(BIN)/python -m hybridkv.embedded
	HYBRIDKV_CLEAN_INSTALL=1 $(BIN)/python -m pytest tests/install $(ARGS)

docs: $(VENV)/.stamp-dev
	@$(BIN)/python docs/api.py build/api

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

bench: $(VENV)/.stamp-dev
	@$(BIN)/hybridkv bench $(or $(BENCH),all) $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-ray $(VENV)-nixl build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
