# The few verbs of this project. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup guest payload demo test test-forked check check-pythons integration kubelet conformance nerdctl soak fuzz fmt protos bench clean

PYTHON := .venv/bin/python

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## install what is missing: Debian packages (as root), the locked virtual environment, launchers in bin/
	@scripts/setup

guest: setup ## build the guest's kernel, initrd and root image into .build/guest, cached (GUEST="--suite bookworm --update")
	@$(PYTHON) -m guest.image build $(GUEST)

payload: setup guest ## what an image brings to a node, into .build/payload: wheels for every Python, the guest (docs/KUBERNETES.md)
	@scripts/payload

demo: setup guest ## run containers in virtual machines through a private containerd, and show what happens
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m integration.demo

test: setup guest ## everything: check with the slow tests, check-pythons and, beside them, the integration tests
	@scripts/setup test
	@scripts/test

test-forked: setup guest ## all integration tests with shims forked by a zygote; `make test` has some of them so
	@scripts/integration --forked $(FILES)

check: setup ## linters, types and unit tests but the slow ones: no root, no virtual machine
	@scripts/check

check-pythons: setup ## unit tests on the other supported Pythons, as far as this machine has them
	@scripts/check --pythons

integration: setup guest ## tests through a real containerd with real virtual machines (FILES="integration/test_exec.py" for some)
	@echo "==> integration tests"
	@scripts/integration $(FILES)

kubelet: setup guest ## pods through a real kubelet and API server, which Go builds the first time (CONTAINERD, CRI, FILES as above)
	@scripts/setup kubelet
	@$(PYTHON) -m integration.kubernetes.peers
	@$(PYTHON) -m integration.kubernetes.helm
	@$(PYTHON) -m integration.kubernetes.image
	@KUBELET=1 scripts/integration $(or $(FILES),integration/kubernetes$(if $(filter crio,$(CRI)),/test_pods.py))

conformance: setup guest ## critest and containerd's suite for CRI on containerd 2.3, or with CRI=crio critest on CRI-O, with runc and with pyshim (CONFORMANCE="--handler pykata --focus exec" for some)
	@CONTAINERD=2.3 $(PYTHON) -m integration.framework.releases
	@[ "$(CRI)" != crio ] || $(PYTHON) -m integration.framework.crio
	@$(PYTHON) -m integration.conformance.critest
	@[ "$(CRI)" = crio ] || $(PYTHON) -m integration.conformance.cri_integration
	@CONTAINERD=2.3 $(PYTHON) -m integration.framework.enclosure $(PYTHON) -m integration.conformance $(CONFORMANCE)

nerdctl: setup guest ## nerdctl's verbs on containerd 2.3 with pyshim and with runc; Go builds it the first time
	@scripts/setup nerdctl
	@$(PYTHON) -m integration.framework.nerdctl
	@NERDCTL=1 CONTAINERD=2.3 scripts/integration integration/test_nerdctl.py

fmt: setup ## format and fix what ruff can
	@$(PYTHON) -m ruff format .
	@$(PYTHON) -m ruff check --fix .

protos: setup ## generate the protobuf modules from protos/**/*.proto
	@$(PYTHON) -m protos.generate

soak: setup guest ## many pods together, many rounds, 280 pods that lose a part at random moments (SIZE="PODS CONTAINERS ROUNDS")
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m integration.framework.cri_soak $(or $(SIZE),20 3 2)
	@PYSHIM_SOAK_ROUNDS=500 $(PYTHON) -m pytest -q -s tests/unit/failpoints/test_soak.py
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m bench.stub_rounds
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m bench.stub_rounds --forked
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m integration.framework.soak $(or $(LOSSES),\
	    --shim 200 --vmm 20 --virtiofsd 20 --frozen 20 --agent 20 --pods 50 --rounds 50)

fuzz: setup ## look for inputs that break a parser, a minute for each (FUZZ="--seconds 600 cdi qmp" for some, longer)
	@$(PYTHON) -m tests.fuzz $(FUZZ)

bench: setup guest ## measure, print a table, write bench/results (BENCH="--peer SHIM" for ours beside another)
	@scripts/setup bench
	@$(PYTHON) -m integration.framework.enclosure $(PYTHON) -m bench $(BENCH)

clean: ## remove what the other verbs built: virtual environment, guest image, launchers, caches
	@rm -rf .venv .build bin .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
