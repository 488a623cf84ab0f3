# What functions without an image of their own run in: Python, the packages that a worker needs, the launcher.
#
#   docker build --file deploy/kubernetes/docker/runtime.Dockerfile \
#     --build-arg BASE=registry.example/python@sha256:<64 hex digits> --tag registry.example/pilotlight/runtime .
#
# BASE: Python 3.11 as `python` (venv and pip included), by digest. The result goes into cluster.runtime_image of platform.yaml.
ARG BASE

FROM ${BASE} AS base
ARG BASE
RUN printf '%s' "$BASE" | grep -Eq '@sha256:[0-9a-f]{64}$' \
    || { echo "BASE=$BASE names no digest: write image@sha256:<64 hex digits>" >&2; exit 1; }

FROM base AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY activator activator
COPY snapshotter snapshotter
COPY weight_cache weight_cache
COPY functions functions
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_CACHE=1
RUN sed -n '/^uv==/,/[^\\]$/p' requirements.lock > /tmp/uv.lock \
    && python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r /tmp/uv.lock \
    && python -m venv --without-pip /opt/pilotlight \
    && /opt/build/bin/uv pip install --python /opt/pilotlight/bin/python --compile-bytecode \
       --constraint requirements.lock --build-constraint requirements.lock '.[worker]'

FROM base AS runtime
COPY --from=build /opt/pilotlight /opt/pilotlight
ENV PATH=/opt/pilotlight/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8
WORKDIR /
USER 65532:65532
ENTRYPOINT ["pilotlight-launcher"]
