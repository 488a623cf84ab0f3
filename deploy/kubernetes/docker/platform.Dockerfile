# The controller and the activator: one image each (--target controller, --target activator), which differ in their entrypoint only.
#
#   docker build --file deploy/kubernetes/docker/platform.Dockerfile --target controller \
#     --build-arg BASE=registry.example/python@sha256:<64 hex digits> --tag registry.example/pilotlight/controller .
#
# BASE: Debian with Python 3.11 as `python` (venv and pip included), by digest. Docker's `python` images are built with
# --enable-optimizations; the build says so of an interpreter that is not, because each call costs it 5 to 12 % more CPU.
# EXTRAS: `server,k8s,predictions` for functions with prediction logs (pyarrow and duckdb, some 240 MB installed).
ARG BASE

FROM ${BASE} AS base
ARG BASE
RUN printf '%s' "$BASE" | grep -Eq '@sha256:[0-9a-f]{64}$' \
    || { echo "BASE=$BASE names no digest: write image@sha256:<64 hex digits>" >&2; exit 1; }

FROM base AS build
ARG EXTRAS=server,k8s
RUN python -c 'import sys, sysconfig; sys.exit("--enable-optimizations" not in str(sysconfig.get_config_var("CONFIG_ARGS")) and sys.base_prefix != "/usr")' \
    || echo "WARNING: the Python of BASE was built without --enable-optimizations" >&2
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
       --constraint requirements.lock --build-constraint requirements.lock ".[${EXTRAS}]"

FROM base AS platform
COPY --from=build /opt/pilotlight /opt/pilotlight
ENV PATH=/opt/pilotlight/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532

FROM platform AS controller
ENTRYPOINT ["python", "-m", "pilotlight.controller"]

FROM platform AS activator
ENTRYPOINT ["python", "-m", "activator"]
