# The few verbs of this project. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup guest payload dist demo test check check-pythons integration peers fuzz fmt protos bench clean

PYTHON := .venv/bin/python

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## install what is missing: Debian packages (as root), the locked virtual environment, launchers in bin/
	@scripts/setup

guest: setup ## build the guest's kernel, initrd and root image into .build/guest, cached (GUEST="--suite bookworm --update")
	@$(PYTHON) -m guest.image build $(GUEST)

payload: setup guest ## what an image brings to a node, into .build/payload: wheels for every Python, the guest (docs/INSTALL.md)
	@$(PYTHON) -m scripts.dist payload .build/payload

dist: setup guest ## the files of a release, from the commit, into .build/dist (MACHINE=aarch64 for arm64 nodes; docs/RELEASES.md)
	@[ -z "$(MACHINE)" ] || [ "$(MACHINE)" = "$$(uname -m)" ] || scripts/setup arm64
	@[ -z "$(MACHINE)" ] || $(PYTHON) -m guest.image build --arch $(MACHINE)
	@MACHINE=$(MACHINE) $(PYTHON) -m scripts.dist all .build/dist

demo: setup guest ## run containers in virtual machines through a private containerd, and show what happens
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m integration.demo

test: setup guest ## everything on this Python: check with the slow tests, then the integration tests
	@scripts/setup test
	@$(PYTHON) -m guest.image build --suite bookworm --out .build/guest-bookworm
	@scripts/test

check: setup ## linters, types and unit tests but the slow ones: no root, no virtual machine
	@scripts/check

check-pythons: setup ## unit tests on the other supported Pythons, as far as this machine has them
	@scripts/check --pythons

integration: setup guest ## tests through a real containerd with real virtual machines (FILES="integration/test_exec.py" for some)
	@echo "==> integration tests"
	@scripts/integration $(FILES)

peers: setup guest ## what others wrote, and long runs: WHAT=forked, kubelet, conformance, ... (without a word: the list)
	@scripts/peers $(WHAT)

fmt: setup ## format and fix what ruff can
	@$(PYTHON) -m ruff format .
	@$(PYTHON) -m ruff check --fix .

protos: setup ## generate the protobuf modules from protos/**/*.proto
	@$(PYTHON) -m protos.generate

fuzz: setup ## look for inputs that break a parser, a minute for each (FUZZ="--seconds 600 cdi qmp" for some, longer)
	@$(PYTHON) -m tests.fuzz $(FUZZ)

bench: setup guest ## measure, print a table, write bench/results (BENCH="--peer SHIM" for ours beside another)
	@scripts/setup bench
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m bench $(BENCH)

clean: ## remove what the other verbs built: virtual environment, guest image, launchers, caches
	@rm -rf .venv .build bin .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
