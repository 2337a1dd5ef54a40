# `make help` lists the targets. Everything is installed in VENV, which PYTHON creates.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PACKAGES := dags operators tasks estimator infra
# What Horovod's build imports; the lock file has the versions.
BUILD_TOOLS := torch setuptools packaging cloudpickle psutil pyyaml cffi
# Test files run in parallel, the longest first (tests/conftest.py).
BESIDE := -n logical --dist loadfile --no-loadscope-reorder
WORKERS := $(shell expr $$(nproc) + 1)
# Debian packages that tests need; `make setup-system` installs them.
SYSTEM_PACKAGES := iverilog postgresql redis-server openssh-server chromium openssh-client iproute2 \
	podman runc iptables netavark slurmctld slurmd slurm-client munge
# `make images`: podman or docker, the image that all begin with, the index of torch's builds (PyPI's
# brings CUDA; for CPUs https://download.pytorch.org/whl/cpu), and more options of the runtime's `build`.
RUNTIME := $(shell command -v podman || command -v docker)
BASE := docker.io/library/python:3.11-slim-bookworm
TORCH_INDEX :=
BUILD_OPTIONS :=
RETRIES := -o Acquire::Retries=3

.PHONY: help setup setup-system run test test-all test-with test-gpu images image-base stack-secrets links lint docs pictures bench clean

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(READY) ## install everything into .venv

# Horovod compiles for minutes: its wheel is built in parallel with the other installs, and cached.
$(READY): infra/requirements.lock pyproject.toml infra/horovod.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo >&2 "trainwright needs \
	Python 3.11 to 3.13, and $(PYTHON) is $$($(PYTHON) -V 2>&1 || true); name another: make setup PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) 2>/dev/null || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	&& $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	@echo "installing torch and what the build of Horovod needs"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c infra/requirements.lock $(BUILD_TOOLS)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@set -m; $(BIN)/python -m trainwright.infra.horovod --wheel & build=$$!; set +m; \
	trap 'kill -- -$$build 2>/dev/null' EXIT; trap 'exit 130' INT TERM; \
	echo "installing the packages of infra/requirements.lock"; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r infra/requirements.lock \
	| grep --line-buffered -E '^(Downloading|Installing|Successfully|ERROR)' | cut -c1-100; \
	test $${PIPESTATUS[0]} = 0 && wait $$build
	@$(BIN)/python -m trainwright.infra.horovod
	@touch $@

setup-system: ## install the Debian packages that test-all needs (as root)
	@dpkg -s $(SYSTEM_PACKAGES) >/dev/null 2>&1 || { apt-get $(RETRIES) update -q \
	&& apt-get $(RETRIES) install -y -q --no-install-recommends $(SYSTEM_PACKAGES); }

run: setup ## train the digits example, all steps, through Airflow
	$(BIN)/trainwright run dags/jobs/digits.yaml

test: setup ## run the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow" $(BESIDE) $(OPTIONS)

# Many tests wait for processes, so there is a worker more than cores. Those that fail beside others on a busy machine
# run once more, alone; tests/failed_first.py names those that pass then.
test-all: setup setup-system ## run all tests; a test that is skipped fails
	$(BIN)/python -m pytest --no-skips --durations 60 $(BESIDE) -n $(WORKERS) \
	|| $(BIN)/python -m pytest --no-skips --last-failed --last-failed-no-failures none

# In a fresh environment of its own. pip may report conflicts with pins of the lock file: that is the test.
test-with: ## run TESTS with other versions: make test-with PYTHON=python3.12 WITH='torch==2.11.*' TESTS=tests/estimator
	rm -rf build/test-with
	$(MAKE) setup VENV=build/test-with
	@test -z "$(WITH)" || build/test-with/bin/python -m pip install --progress-bar off $(foreach one,$(WITH),'$(one)')
	@build/test-with/bin/python -m trainwright.infra.horovod
	build/test-with/bin/python -m pytest -m "not slow" $(BESIDE) $(TESTS)

# A virtual environment over PYTHON's packages, with its own torch: nothing is installed in PYTHON, and no network is needed.
test-gpu: links ## run the tests that need a GPU, by PYTHON; WHEELS=FOLDER has packages that it lacks
	@rm -rf build/test-gpu && $(PYTHON) -m venv --without-pip build/test-gpu
	@site=$$(build/test-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	&& { $(PYTHON) -c 'import sys; print(*(one for one in sys.path if one.endswith("-packages")), sep="\n")'; \
	echo $(CURDIR)/build/lint; } > $$site/test-gpu.pth \
	&& { test -z "$(WHEELS)" || $(PYTHON) -m pip install -q --no-index --no-deps --target $$site $(WHEELS)/*.whl; }
	timeout 480 build/test-gpu/bin/python -m pytest -rA --durations 0 $(or $(TESTS),tests/gpu) -o norecursedirs=

images: ## build the container images trainwright-train and trainwright-airflow, from BASE
	@test -n "$(RUNTIME)" || { echo >&2 "make images needs podman or docker"; exit 1; }
	@for role in train airflow; do $(RUNTIME) build $(BUILD_OPTIONS) --build-arg BASE=$(BASE) --build-arg TORCH_INDEX=$(TORCH_INDEX) \
	-f infra/images/$$role.Containerfile -t trainwright-$$role . || exit; done

stack-secrets: ## write secrets of the whole stack (compose, Kubernetes) to infra/stack/secrets, once
	@test -e infra/stack/secrets || $(PYTHON) infra/stack_secrets.py infra/stack/secrets

image-base: ## as root: make a BASE from Debian's packages, where there is no registry: localhost/trainwright-base
	@rm -rf build/image-base && mkdir -p build
	debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm build/image-base
	rm -rf build/image-base/var/cache/apt/archives/*.deb build/image-base/var/lib/apt/lists/*
	tar -C build/image-base -c . | $(RUNTIME) import - localhost/trainwright-base
	rm -rf build/image-base

# Packages in folders with their import names, as mypy, import-linter and an uninstalled tree need them.
links:
	@mkdir -p build/lint/trainwright && for p in $(PACKAGES); do ln -sfn ../../../$$p build/lint/trainwright/$$p; done

lint: setup links ## run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/lint $(BIN)/mypy -p trainwright.estimator -p trainwright.tasks -p trainwright.operators
	MYPYPATH=build/lint:docs/generator $(BIN)/mypy docs/generator/*.py
	PYTHONPATH=build/lint $(BIN)/lint-imports

docs: setup ## build the manual into build/site; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f .mkdocs.yml

pictures: setup ## make the manual's pictures from a run on this machine, with Debian's Chromium
	$(BIN)/python docs/pictures/make.py

bench: setup ## measure some of the figures of docs/benchmarks.md; as root, Slurm too
	@for file in tests/benchmarks/*.py tests/benchmarks/estimator/step_time.py tests/benchmarks/estimator/memory.py \
	tests/benchmarks/estimator/learning.py tests/benchmarks/estimator/speed.py tests/benchmarks/validate/gate.py tests/benchmarks/validate/drift.py tests/benchmarks/planner/exactness.py \
	tests/benchmarks/planner/laws.py tests/benchmarks/planner/scale.py tests/benchmarks/planner/carried_out.py tests/benchmarks/train/search_lr.py \
	tests/benchmarks/train/adaptive_batch.py tests/benchmarks/train/hosts.py \
	"tests/benchmarks/train/against_ddp.py --rounds 2" "tests/benchmarks/train/changing_speeds.py --rounds 1" \
	"tests/benchmarks/train/recording.py --blocks 6" "tests/benchmarks/train/unlike_speeds.py --rounds 2" \
	tests/benchmarks/train/joint_batch.py "tests/benchmarks/train/recovery.py 5" \
	"tests/benchmarks/train/recovery.py 4 3 torch --hosts 0.5 0.5 0.5" \
	"tests/benchmarks/train/checkpoint.py --checkpoints 8" "tests/benchmarks/train/checkpoint.py --store s3 --apart" \
	tests/benchmarks/train/store_away.py "tests/benchmarks/train/launcher_killed.py 3" \
	"tests/benchmarks/train/changing_quotas.py 2" "tests/benchmarks/train/busy_machine.py 3" tests/benchmarks/train/containers.py \
	$(if $(filter 0,$(shell id -u)),tests/benchmarks/train/slurm_faults.py) "tests/benchmarks/train/time_to_target.py --rounds 2" \
	tests/benchmarks/export/onnx_families.py tests/benchmarks/export/int8.py tests/benchmarks/export/circuits.py; do \
	echo "== $$file"; $(BIN)/python $$file || exit; done

clean: ## remove .venv, builds and caches of this tree; stored runs are kept
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
