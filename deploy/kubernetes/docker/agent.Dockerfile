# The node agent: snapshotter and weight cache, with CRIU. Both run as root: directories and sockets belong to tenants' users.
#
#   docker build --file deploy/kubernetes/docker/agent.Dockerfile \
#     --build-arg BASE=registry.example/python@sha256:<64 hex digits> --tag registry.example/pilotlight/node .
#
# BASE: Debian 12 with Python 3.11 as `python` (venv and pip included), by digest. CRIU is built from the source of a later suite, which apt
# verifies (scripts/install-criu); the packages of Debian are those of the day on which the image is built.
ARG BASE

FROM ${BASE} AS base
ARG BASE
RUN printf '%s' "$BASE" | grep -Eq '@sha256:[0-9a-f]{64}$' \
    || { echo "BASE=$BASE names no digest: write image@sha256:<64 hex digits>" >&2; exit 1; }

FROM base AS criu
COPY scripts/install-criu scripts/apt-install /src/scripts/
RUN CI=1 /src/scripts/install-criu

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
       --constraint requirements.lock --build-constraint requirements.lock '.[node,worker]'

FROM base AS agent
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
       debootstrap iproute2 libbsd0 libnet1 libnl-3-200 libprotobuf-c1 libuuid1 nftables \
    && rm -rf /var/lib/apt/lists/*
COPY --from=criu /usr/local/sbin/criu /usr/local/sbin/criu
COPY --from=criu /usr/local/share/pilotlight /usr/local/share/pilotlight
COPY --from=build /opt/pilotlight /opt/pilotlight
ENV PATH=/opt/pilotlight/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN criu --version
WORKDIR /
USER 0:0
ENTRYPOINT ["python", "-m", "snapshotter"]
