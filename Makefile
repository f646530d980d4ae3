# What people run. Everything that is installed goes into $(CACHE), outside of the checkout.
SHELL := /bin/bash
CACHE := $(or $(ROLLOUTFLEET_CACHE),$(HOME)/.cache/rolloutfleet)
export ROLLOUTFLEET_CACHE := $(CACHE)
DEV := $(CACHE)/dev-$(shell sha256sum tests/requirements.txt | cut -c1-10)
ROUTER := $(CACHE)/router-$(shell sha256sum images/router/requirements.txt | cut -c1-10)
PYTHON := $(DEV)/bin/python
CLUSTER := tests/cluster/cluster
export PYTHONPATH := operator:tests
export PYTHONDONTWRITEBYTECODE := 1

ARGS ?=

.PHONY: help quickstart down test bench-recovery bench-router bench-samples bench-scale bench-update chaos lint unit e2e generate format with-engine tools dev images up status api-server browser
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

quickstart: tools dev ## from a bare machine to trained steps: cluster, operator, fleet, training
	@$(PYTHON) docs/examples/quickstart.py

down: ## remove the local cluster and all that belongs to it
	@bash $(CLUSTER) down

test: tools dev $(ROUTER)/complete ## all tests: lint, types, layers, unit, end to end on a real cluster
	@bash tests/run.sh

lint: dev ## ruff, mypy --strict, import-linter
	@$(DEV)/bin/ruff check operator tests docs && $(DEV)/bin/ruff format --check operator tests docs
	@$(DEV)/bin/mypy operator tests/unit tests/e2e tests/bench tests/chaos tests/api_server tests/browser tests/with_engine
	@$(DEV)/bin/lint-imports

unit: dev ## unit and property tests, no cluster
	@$(PYTHON) -m pytest -n 3 --dist worksteal tests/unit

browser: tools dev ## the page of samples in a headless Chromium with live data; no cluster
	@$(PYTHON) -m pytest tests/browser

api-server: tools dev ## the operator against a real API server: it dies at each of its calls; no cluster
	@$(PYTHON) -m pytest tests/api_server

with-engine: tools dev $(ROUTER)/complete ## the agent on one real SGLang server, its memory and its samples, no cluster (6 minutes)
	@bash $(CLUSTER) engine-env && . tests/cluster/common.sh && \
	  ENGINE=$$ENGINE MODELS=$$MODELS ROUTER_PYTHON=$(ROUTER)/bin/python $(PYTHON) -m pytest tests/with_engine

e2e: tools dev $(ROUTER)/complete ## end-to-end tests; uses KUBECONFIG if set, else the local cluster
	@bash tests/run.sh e2e

bench-recovery: dev ## seconds from a fault to each step of recovery, real engines, on the running cluster; ARGS="--only kill"
	@KUBECONFIG=$${KUBECONFIG:-/var/lib/rolloutfleet-cluster/admin.kubeconfig} $(PYTHON) -m bench.recovery $(ARGS)

chaos: dev ## random faults on a fleet under load, on the running cluster with its images loaded; ARGS="--minutes 60 --stand-ins --seed 7"
	@KUBECONFIG=$${KUBECONFIG:-/var/lib/rolloutfleet-cluster/admin.kubeconfig} $(PYTHON) -m chaos $(ARGS)

bench-router: tools dev $(ROUTER)/complete ## the real router in front of engines that refuse, die, hang and vanish (root, 10 minutes)
	@PYTHONPATH=operator:tests ROUTER_PYTHON=$(ROUTER)/bin/python $(PYTHON) -m bench.router

bench-update: tools dev ## what a weight update costs beside the same sequence by hand, real engines, no cluster (10 minutes); ARGS="--engines 1,2"
	@bash tests/cluster/cluster engine-env
	@. tests/cluster/common.sh && ENGINE_PYTHON=$$ENGINE/bin/python $(PYTHON) -m bench.update $(ARGS)

bench-samples: tools dev $(ROUTER)/complete ## what collecting samples costs beside bare requests, real engines, no cluster (10 minutes); ARGS="--only real"
	@bash tests/cluster/cluster engine-env
	@. tests/cluster/common.sh && ENGINE_PYTHON=$$ENGINE/bin/python ROUTER_PYTHON=$(ROUTER)/bin/python $(PYTHON) -m bench.samples $(ARGS)

bench-scale: tools dev ## measure the operator with 100 and 1000 fleets of stand-ins; ARGS="--only paced_100"
	@bash tests/bench/scale/run.sh $(ARGS)

generate: dev ## crds/ and the API reference from the models
	@$(PYTHON) -m rolloutfleet.api.crdgen crds && $(PYTHON) -m rolloutfleet.api.refgen docs/reference/api.md
	@$(DEV)/bin/ruff format -q operator tests docs

format: dev ## format and fix what can be fixed
	@$(DEV)/bin/ruff format operator tests docs && $(DEV)/bin/ruff check --fix operator tests docs

tools: ## Debian packages, Kubernetes binaries, uv
	@bash $(CLUSTER) tools

images: tools ## container images, those that changed
	@bash $(CLUSTER) images

up: tools images ## the local cluster alone
	@bash $(CLUSTER) engine-env && bash $(CLUSTER) up

status: ## what runs
	@bash $(CLUSTER) status

# Named by what they are made from: a newer file of the same content must not take them from under others' feet.
$(ROUTER)/complete:
	@bash $(CLUSTER) tools
	@bash $(CLUSTER) environment $(ROUTER) images/router/requirements.txt --no-deps

dev: $(DEV)/complete
$(DEV)/complete:
	@bash $(CLUSTER) tools
	@bash $(CLUSTER) environment $(DEV) tests/requirements.txt
