# Everything a fresh machine with Python 3.11, 3.12 or, with ENGINE=0.19, 3.13 needs; `make help` lists it.
PYTHON ?= python3
# Which megatron-core, of requirements/engine-*.txt. The default is that of the lock file.
ENGINE ?= 0.16
VENV ?= .venv$(if $(filter-out 0.16,$(ENGINE)),-engine-$(ENGINE))
# Of `make test-ranks`: an environment with another engine, where there is one.
OTHER_VENV ?= .venv
# Of `make serve-check`: vLLM's environment, 3.5 GB.
SERVE_VENV ?= .venv-serve
RUN ?= runs/quickstart
# Keys of the quickstart to set, as in OVERRIDES="train.num_steps=60 checkpoint.every_steps=50".
OVERRIDES ?=
# Data-parallel ranks of the quickstart: one per core, up to the eight sequences of a batch.
RANKS ?= $(shell cores=$$(nproc); echo $$(( cores >= 8 ? 8 : cores >= 4 ? 4 : cores >= 2 ? 2 : 1 )))
# Of `make mutants`: where mistakes are planted (one or more of kernels, megamem, parallel, pretrain), how many in each, and which; RETRY=1 tries the survivors once more.
PACKAGE ?= kernels megamem parallel pretrain
SAMPLE ?= 60
SEED ?= 1
# Sequences of 4096 tokens per step, of models timed on one GPU.
BENCH_BATCH ?= 8
# Processes that share the tests: one more than CI's cores, as those of Slurm mostly wait, and ranks wait for each other.
WORKERS ?= 3
# Of long lists of cases, a third or so that is another every week, or all; or the number of a week whose share is to be run again.
CASES ?= $(shell echo $$(( $$(date +%s) / 604800 )))

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-lab lint pytest test-more test-ranks serve-check check-plan mutants lock bench-gpu gpu-check clean
.NOTPARALLEL:

BIN := $(VENV)/bin
INSTALL := requirements/install.sh "$(PYTHON)" "$(VENV)" "$(ENGINE)"
TEST_EXTRAS := dev,gpu,tracking
# Some of every way in which ranks are started, and of what they do.
RANK_TESTS := tests/unit/test_devices.py lab/tests/unit/test_engine.py tests/distributed/test_launch.py tests/distributed/test_groups.py tests/distributed/test_sharded_bank.py \
  tests/distributed/test_kinds_layouts.py tests/distributed/test_layouts.py tests/distributed/test_optimizer_groups.py \
  tests/distributed/test_latent_attention.py tests/distributed/test_kv_cache.py tests/integration/test_launchers.py \
  tests/integration/test_resume.py tests/integration/test_engines.py
# Not te, which compiles for the torch that is there.
LOCK := UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --python-platform linux --extra dev --extra gpu --extra tracking --extra deepspeed --extra mutants --extra hf pyproject.toml
TOKENIZER := data/stdlib-4096.json
DATA := data/stdlib
# Whether the corpus is that of the dense model's recorded losses: every Python has sources of its own.
IS_RECORDED = "$(BIN)/megamem" data inspect "$(DATA)" | grep "validation .* 629,351 bytes of text" >/dev/null
PYTEST := MEGAMEM_WEEK=$(filter-out all,$(CASES)) "$(BIN)/python" -m pytest
# A file's tests stay together, as what they share is made once; files in their order, in which the long ones come first.
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help:  ## this list
	@echo "make TARGET [PYTHON=python3.11] [VENV=.venv] [ENGINE=0.19]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 14

quickstart:  ## train, evaluate and sample a small memory model on this machine; again: resume, or say that it is finished
	@$(INSTALL)
	@echo "1/7 A tokenizer of 4096 ids from the sources of Python's standard library: $(TOKENIZER)"
	@if [ -e $(TOKENIZER) ]; then echo "It is there already."; \
	  else "$(BIN)/megamem" data tokenizer python-stdlib --vocab-size 4096 --output $(TOKENIZER); fi
	@echo "2/7 The same sources as token ids, one document in twenty held out: $(DATA)"
	@# Another Python has other sources, and prepare would refuse to write over what is there.
	@if [ -e $(DATA)/manifest.json ]; then echo "It is there already."; \
	  else "$(BIN)/megamem" data prepare python-stdlib --tokenizer $(TOKENIZER) --validation-fraction 0.05 --output $(DATA); fi
	@echo "3/7 Training configs/quickstart.yaml on $(RANKS) data-parallel ranks of this machine. Ctrl-C saves; make quickstart goes on from there."
	@"$(BIN)/megamem" train configs/quickstart.yaml --nproc $(RANKS) train.micro_batch_size=$$(( $(RANKS) > 2 ? 8 / $(RANKS) : 4 )) --run-dir "$(RUN)" $(OVERRIDES)
	@echo "4/7 The last ten steps again, from the same checkpoint, on tensor 2 x pipeline 2 with the tables split over two ranks each: losses differ by rounding alone, or it says where they part."
	@"$(BIN)/megamem" replay "$(RUN)" parallel.tensor=2 parallel.pipeline=2 parallel.memory=2
	@echo "5/7 Evaluating on all held-out documents, with the memory and without"
	@"$(BIN)/megamem" eval "$(RUN)" --ablate
	@if $(IS_RECORDED); then said='1.8468, as recorded'; else said='recorded for the library of Python 3.11.7, which this is not'; fi; \
	  printf '  %-30s %s: %s\n' 'dense, of equal FLOPs' "$$said" 'megamem train configs/quickstart_dense.yaml --nproc 2'
	@echo "6/7 What the model writes after 'def __init__(self'"
	@"$(BIN)/megamem" generate "$(RUN)" --prompt 'def __init__(self'
	@echo "7/7 Loss against tokens, beside the dense model's, and how evenly each table is read"
	@"$(BIN)/megamem" plot "$(RUN)" $$(if $(IS_RECORDED); then echo docs/quickstart_dense.jsonl; fi)
	@echo
	@echo "Everything is in $(RUN). To go on from here: source $(VENV)/bin/activate, then megamem --help"

test:  ## lint and types of all, and the product's suite with this week's share of long lists of cases; CASES=all takes every one
	@$(INSTALL) $(TEST_EXTRAS)
	@# Lint takes one core for a minute, beside the tests, and says all at once what it found.
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	  { lint=0; $(MAKE) --no-print-directory lint >"$$log" 2>&1 || lint=$$?; echo; cat "$$log"; exit $$lint; } & \
	  lint=0; tests=0; $(MAKE) --no-print-directory pytest || tests=$$?; wait $$! || lint=$$?; \
	  if [ $$lint != 0 ]; then echo "make test: lint failed, see among the lines of the tests" >&2; fi; \
	  exit $$(( lint + tests ))

lint:  ## ruff, mypy, and the direction of imports
	@$(INSTALL) $(TEST_EXTRAS)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/lint-imports" --no-cache --no-logo

pytest:  ## the product's suite alone, as make test
	@$(INSTALL) $(TEST_EXTRAS)
	$(PYTEST) -p tests.every_test_collected $(SPREAD)

test-lab:  ## the whole suite of the laboratory
	@$(INSTALL) $(TEST_EXTRAS)
	$(PYTEST) -p tests.every_test_collected lab/tests $(SPREAD)

test-more:  ## what make test leaves out, with this week's share likewise (CASES=all takes every one): kernels built for every generation of GPUs, a run of stages killed twenty times, lm-eval on an exported model, which the oldest and the newest transformers load, vLLM where make serve-check installed it, the largest models' initial outputs, the C++ kernels under sanitizers, DeepSpeed's optimizer and the mistakes of make mutants, which are installed for it
	@$(INSTALL) $(TEST_EXTRAS),deepspeed,mutants
	PATH="$(abspath $(BIN)):$$PATH" MEGAMEM_BUILD_FOR=all MEGAMEM_DEEPSPEED=required MEGAMEM_KILLS=20 MEGAMEM_COSTLY=1 MEGAMEM_VLLM_PYTHON=$(wildcard $(abspath $(SERVE_VENV))/bin/python) $(PYTEST) $(SPREAD) -k "costly or builds or deepspeed or mutants or killed or engine or (socket and vllm)" \
	  tests/integration/test_stages.py tests/unit/kernels/test_kernel_builds.py tests/unit/test_host_adamw.py tests/unit/test_mutants.py tests/unit/kernels/test_kernels_sanitized.py tests/distributed/test_value_offload.py \
	  tests/integration/test_huggingface_folder.py tests/unit/test_initialisation_of_configs.py tests/distributed/test_serving_engine.py tests/integration/test_serve.py tests/integration/test_front_page.py

test-ranks:  ## a short quickstart and tests that start ranks, for another engine, interpreter or build of torch, as in ENGINE=0.19 PYTHON=python3.12; runs go on with the engine of OTHER_VENV and back
	@$(MAKE) --no-print-directory quickstart RUN=runs/short-$(notdir $(VENV)) OVERRIDES="train.num_steps=60 checkpoint.every_steps=50"
	@$(INSTALL) $(TEST_EXTRAS)
	MEGAMEM_OTHER_PYTHON=$(wildcard $(abspath $(OTHER_VENV))/bin/python) $(PYTEST) $(SPREAD) $(RANK_TESTS)

serve-check:  ## exported models in vLLM beside the trained ones: 32 requests at once, token by token. The first time it installs vLLM for CPUs into SERVE_VENV (3.5 GB)
	@$(INSTALL) $(TEST_EXTRAS)
	@# vLLM's companions come built for CUDA, and break its import. Complete when the import works.
	@if ! "$(SERVE_VENV)/bin/python" -c 'from vllm import LLM' 2>/dev/null; then \
	  echo "Installing requirements/serve.txt into $(SERVE_VENV): some three minutes."; \
	  "$(PYTHON)" -m venv --clear "$(SERVE_VENV)"; \
	  "$(SERVE_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r requirements/serve.txt; \
	  "$(SERVE_VENV)/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	MEGAMEM_VLLM_PYTHON="$(abspath $(SERVE_VENV))/bin/python" "$(BIN)/python" -m pytest tests/distributed/test_serving_engine.py tests/integration/test_serve.py

check-plan:  ## of every configuration, dry-run as on a GPU: what megamem plan predicts, beside what is counted; what passes between host and GPU in every command, beside its budget
	@$(INSTALL) $(TEST_EXTRAS)
	@"$(BIN)/python" -m lab.maintenance.check_plan --workers $(WORKERS)

mutants:  ## plant single mistakes in PACKAGE, one at a time, and print those that no test notices; goes on where it stopped (docs/dev/testing.md)
	@$(INSTALL) $(TEST_EXTRAS),mutants
	@"$(BIN)/python" -m tests.mutants $(PACKAGE) --sample $(SAMPLE) --seed $(SEED) $(if $(RETRY),--retry)

lock:  ## after a change of pyproject.toml's packages: resolve requirements/lock.txt again, keeping the versions in it; UPGRADE=NAME moves one, UPGRADE=all every one. Needs uv
	@command -v uv >/dev/null || { echo "make lock: uv is not there: pip install uv" >&2; exit 2; }
	$(LOCK) --python-version 3.11 $(if $(UPGRADE),$(if $(filter all,$(UPGRADE)),--upgrade,--upgrade-package $(UPGRADE))) -o requirements/lock.txt
	@echo "The same packages must do for Python 3.12:"
	diff <(grep == requirements/lock.txt) <($(LOCK) --python-version 3.12 -c requirements/lock.txt | grep ==)

bench-gpu:  ## the memory kernels and retrieval on this machine's GPU: tests and speed; then where a step's time goes. PYTHON must have a CUDA build of torch, and Triton
	"$(PYTHON)" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make bench-gpu: this machine has no GPU that torch can use")'
	"$(PYTHON)" -m pytest -q tests/gpu lab/tests/gpu
	"$(PYTHON)" -m lab bench kernels --shapes 227m 1b shard --rounds 20 --compile-naive
	for size in 227m_1.2b 1b_7b; do \
	  "$(PYTHON)" -m lab bench step configs/ultramemv2/$$size.yaml train.global_batch_size=$(BENCH_BATCH) --pair --nproc 1; done

gpu-check:  ## order of streams, seconds as predicted and measured, kernels beside a copy, bits of a resumed run; then what this machine's GPUs compute, beside its CPU: one page, gpu-check.md, in 20 minutes. PYTHON must have a CUDA build of torch, Triton and megatron-core
	@"$(PYTHON)" -c 'import importlib.util as i, sys; none = [name for name in ("torch", "triton", "megatron", "pydantic") if i.find_spec(name) is None]; none and sys.exit(f"make gpu-check: {sys.executable} has no " + ", ".join(none) + ": install what is missing (pip install -e .[gpu] keeps a torch that will do), or name another Python, as in make gpu-check PYTHON=.venv/bin/python")'
	"$(PYTHON)" -m lab gpu-check

clean:  ## remove the environment and caches; data/ and runs/ stay
	rm -rf "$(VENV)" "$(VENV)-old" .mutants build dist *.egg-info lab/build lab/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
