# Needs make, and Python >= 3.10 with venv and pip. Everything else goes into .venv; nothing outside it is touched.

# python3.11 may be a shim that does not run, so ask it instead of looking for it. Another one: make PY=python3.12 ...
PY ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
CLIENTS_PIP = $(CLIENTS_VENV)/bin/python -m pip --quiet --disable-pip-version-check
NEW_PIP := pip>=25.1# the first that installs dependency groups
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
CLIENTS_VENV ?= .venv-clients
CLIENTS_READY := $(CLIENTS_VENV)/.ready
TORCHRUN = $(BIN)/torchrun --standalone --nproc-per-node 2
TRAIN = $(TORCHRUN) examples/train_text.py --verify --overwrite
DEMO = --out runs/demo --layers 4 --dim 256 --heads 4 --hidden 688 --steps 80 $(DEMO_ARGS)
# Ranks with memory of their own, which is given back at once: then a rank's resident memory is that of the plan.
DEMO_ENV = COMPOSABLE_FSDP_TIMELINE=runs/demo-timeline COMPOSABLE_FSDP_SHARED_MEMORY=0 MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536

# Several ranks share the cores of one machine: one thread each, or they fight over them.
export OMP_NUM_THREADS ?= 1
# A rank that waits must leave its core to the others: OpenMP threads spin by default.
export OMP_WAIT_POLICY ?= passive

# Each process of a test would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo demo-short quantized elastic test test-torch true-device test-fast plugins check format docs behaviours upstream errors front-page bench bench-quick gpu clients suites release clean

FOR_USERS := install|demo|docs|test|test-fast

help: ## list the targets
	@list() { sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | grep -E $$1 '^($(FOR_USERS))\|' \
		| while IFS='|' read -r target text; do printf '  %-12s %s\n' "$$target" "$$text"; done; }; \
	list; echo; echo 'For maintainers:'; list -v

# torch comes first, by itself, so that no later package can have another torch installed. The demo needs less than the
# rest: with $(READY) it is there already.
$(READY): WHAT = '.[checkpoint]' --group dev --group clients
$(DEMO_READY): WHAT = . --group demo
$(READY) $(DEMO_READY): pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PY=/path/to/python")'
	@echo "installing into $(VENV); the first time this takes some minutes"
	$(PY) -m venv $(VENV)
	$(PIP) install '$(NEW_PIP)'
	$(PIP) install -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(PIP) install -c constraints.txt -e $(WHAT)
	@touch $@ $(if $(filter $(READY),$@),$(DEMO_READY))

install: $(READY) ## make .venv with torch, the package and its tools

demo: $(DEMO_READY) ## train a small model on real text on 2 ranks, check it, plan it and draw its timeline (DEMO_ARGS=...)
	rm -rf runs/demo-timeline
	$(DEMO_ENV) $(TRAIN) $(DEMO)
	$(BIN)/python examples/plan_text.py --ranks 2 $(DEMO)
	$(BIN)/composable-fsdp timeline runs/demo-timeline
	@echo
	@echo 'Shown: training on two ranks with the losses of an unsharded run, a resume, a plan of its memory, its timeline.'
	@echo 'Files: checkpoints in runs/demo, the timeline in runs/demo-timeline.'
	@echo 'Programs: examples/train_text.py, examples/plan_text.py.'
	@echo 'Next: docs/quickstart.md shards a model of your own.'

demo-short: $(DEMO_READY) ## the same in few steps
	$(TRAIN) --out runs/demo-short --steps 60 $(DEMO_ARGS)

quantized: $(READY) ## train that model with parameters and gradients encoded, and compare (QUANTIZED_ARGS=...)
	$(TORCHRUN) examples/quantized_text.py --overwrite --out runs/quantized $(QUANTIZED_ARGS)

elastic: $(READY) ## train that model while ranks are killed at random, and compare with a run without (ELASTIC_ARGS=...)
	$(TORCHRUN) --max-restarts 20 --monitor-interval 0.2 examples/elastic_text.py --overwrite $(ELASTIC_ARGS)

test: $(READY) ## run the tests, two at a time (with TEST_ARGS=..., only pytest with these)
	$(BIN)/python -m pytest $(or $(TEST_ARGS),-n 2 --dist worksteal --durations 25)

# A venv of its own, outside of the repository, with any release of torch, for which no configuration of pip counts: it may
# pin or cap torch. Tests of packages that are not there are skipped.
TORCH_VENV ?= $(or $(TMPDIR),/tmp)/composable-fsdp-torch-$(VERSION)
TORCH_PIP = PIP_CONFIG_FILE=/dev/null XDG_CONFIG_DIRS=/nonexistent $(TORCH_VENV)/bin/python -m pip --quiet --disable-pip-version-check
test-torch: ## run the tests with another torch: VERSION=2.15.0, with several gigabytes of CUDA libraries (TEST_ARGS=...)
	@test -n '$(VERSION)' || { echo 'which torch? make test-torch VERSION=2.15.0'; exit 1; }
	$(PY) -m venv $(TORCH_VENV)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo 'torch==$(VERSION)' >> $(TORCH_VENV)/constraints.txt
	$(TORCH_PIP) install '$(NEW_PIP)' torch==$(VERSION)
	$(TORCH_PIP) install -c $(TORCH_VENV)/constraints.txt -e '.[checkpoint]' --group dev
	PATH=$(TORCH_VENV)/bin:$$PATH $(TORCH_VENV)/bin/python -m pytest $(or $(TEST_ARGS),-n 2 --dist worksteal --durations 25)

true-device: $(READY) ## build a device that is not the CPU, by g++, and test training on it
	TRUE_DEVICE=1 $(BIN)/python -m pytest tests/ranks/test_true_device.py

plugins: $(READY) ## run the tests without each plugin, and print a table; takes hours (PLUGINS_ARGS="ForwardOrder --tests tests/unit")
	$(BIN)/python -m tests.plugin_table $(PLUGINS_ARGS)

test-fast: $(READY) ## run the tests that start no other process (TEST_ARGS=...)
	$(BIN)/python -m pytest -m "not multiprocess" $(TEST_ARGS)

check: $(READY) ## lint, format, types, layering
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layering.py

format: $(READY) ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY) ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -E -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(READY) ## run all benchmarks, then make benchmarks/RESULTS.md; takes hours on an idle machine (BENCH_ARGS=...)
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

bench-quick: $(READY) ## small forms of all benchmarks, into runs/bench-quick: do they run?
	$(BIN)/python benchmarks/run_all.py --quick $(BENCH_ARGS)

gpu: $(READY) ## check the library on this machine's GPUs, and write a report (GPU_ARGS="--device simulated" without one)
	$(BIN)/python benchmarks/gpu_report.py $(GPU_ARGS)

# A venv of its own, since these libraries narrow each other's versions; torch first and alone, and still there after.
$(CLIENTS_READY): pyproject.toml constraints.txt clients/constraints.txt
	$(PY) -m venv $(CLIENTS_VENV)
	$(CLIENTS_PIP) install '$(NEW_PIP)'
	$(CLIENTS_PIP) install -c constraints.txt $$(grep '^torch==' constraints.txt)
	@$(CLIENTS_VENV)/bin/python -m pip freeze | grep '^torch==' > $(CLIENTS_VENV)/torch-first
	$(CLIENTS_PIP) install -c constraints.txt -c clients/constraints.txt -e '.[checkpoint]' --group clients-all
	@$(CLIENTS_VENV)/bin/python -m pip freeze | grep '^torch==' | diff $(CLIENTS_VENV)/torch-first - \
		|| { echo "a client had another torch installed"; exit 1; }
	@touch $@

clients: $(CLIENTS_READY) ## run other libraries' programs on torch's FSDP2 and on ours, and compare (CLIENTS_ARGS=...)
	$(CLIENTS_VENV)/bin/python clients/run_all.py $(CLIENTS_ARGS)

SUITES_READY := $(CLIENTS_VENV)/.ready-suites
$(SUITES_READY): $(CLIENTS_READY) clients/suites-requirements.txt
	$(CLIENTS_PIP) install -c constraints.txt -c clients/constraints.txt -r clients/suites-requirements.txt
	$(CLIENTS_PIP) install --no-deps axolotl==0.19.0
	@$(CLIENTS_VENV)/bin/python -m pip freeze | grep '^torch==' | diff $(CLIENTS_VENV)/torch-first - \
		|| { echo "a suite had another torch installed"; exit 1; }
	@touch $@

suites: $(SUITES_READY) ## run other projects' tests of torch's FSDP2 on it and on ours, and compare (SUITES_ARGS=...)
	$(CLIENTS_VENV)/bin/python clients/suites.py $(SUITES_ARGS)

upstream: $(READY) ## compare public names, parameters and defaults with the installed torch's FSDP2, and write the page
	$(BIN)/python -m tests.helpers.upstream

front-page: $(READY) ## write the figures of the documentation's front page, from the newest results
	$(BIN)/python benchmarks/front_page.py

errors: $(READY) ## write docs/errors.md, the index of errors, from the code
	$(BIN)/python -m tests.helpers.error_index

release: ## build wheel and sdist, check them, install each in a clean environment, and run examples/first.py there
	rm -rf dist build/release
	$(PY) -m venv build/release/tools
	build/release/tools/bin/python -m pip --quiet install '$(NEW_PIP)'
	build/release/tools/bin/python -m pip --quiet install --group release
	build/release/tools/bin/python -m build
	build/release/tools/bin/twine check --strict dist/*
	cp examples/first.py build/release
	@set -e; for file in dist/*; do \
		env=build/release/$${file##*.}; echo "installing $$file"; $(PY) -m venv $$env; \
		$$env/bin/python -m pip --quiet install $$(grep '^torch==' constraints.txt); \
		$$env/bin/python -m pip --quiet install $$file; \
		(cd build/release; env -u PYTHONPATH $(CURDIR)/$$env/bin/torchrun --standalone --nproc-per-node 2 first.py); \
		(cd build/release; env -u PYTHONPATH $(CURDIR)/$$env/bin/composable-fsdp --version); \
	done

behaviours: $(READY) ## run the tests, then say which rows of tests/behaviours.toml they show
	$(BIN)/python -m pytest -q --behaviours $(TEST_ARGS)

clean: ## remove caches and build output; .venv and runs/ stay
	rm -rf build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . \( -path './$(VENV)' -o -path './$(CLIENTS_VENV)' \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
