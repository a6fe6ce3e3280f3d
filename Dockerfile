# Hone and its examples, as k8s/prime-rl runs them. For GPUs (torch's build for CUDA, from the lock):
#   docker build -t hone-rl:0.1.0 .
# for CPUs (a quarter of the size):
#   docker build -t hone-rl:0.1.0-cpu --build-arg TORCH=cpu .
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG TORCH=cuda
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# gcc: Triton compiles the launchers of its kernels where they run.
RUN apt-get update && apt-get install -y --no-install-recommends bash ca-certificates curl gcc git libc6-dev make procps tmux \
    && rm -rf /var/lib/apt/lists/* && pip install --no-cache-dir uv

WORKDIR /app
COPY . /app
RUN if [ "$TORCH" = cpu ]; then \
      uv export --locked --no-dev --no-hashes --extra forms -q > /tmp/all.txt \
      && uv venv -q \
      && uv pip install --index-url "$TORCH_CPU_INDEX" "$(grep -oE '^torch==[^ ;+]+' /tmp/all.txt)" \
      && grep -vE '^(torch|triton|nvidia|cuda)' /tmp/all.txt > /tmp/rest.txt && uv pip install -r /tmp/rest.txt; \
    else uv sync --locked --no-dev --extra forms; fi \
    && rm -rf "$HOME/.cache" /tmp/*.txt

# `uv run COMMAND` works for any user, without a network, and changes nothing here.
ENV PATH=/app/.venv/bin:$PATH UV_PROJECT=/app UV_NO_SYNC=1 UV_OFFLINE=1 UV_FROZEN=1 UV_CACHE_DIR=/tmp/uv-cache \
    PYTHONUNBUFFERED=1 HOME=/tmp
RUN chmod -R a+rX /app
USER 1000:1000
CMD ["hone", "--help"]
