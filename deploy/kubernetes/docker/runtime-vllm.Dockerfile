# What language models run in: an image with vLLM for the cluster's GPUs, and the launcher beside it.
#
#   docker build --file deploy/kubernetes/docker/runtime-vllm.Dockerfile \
#     --build-arg BASE=registry.example/vllm@sha256:<64 hex digits> --tag registry.example/pilotlight/runtime-vllm .
#
# BASE: vLLM in the site-packages of `python3` (3.11 or newer, with pip), by digest. Nothing that it has is changed: its versions bind ours,
# and where they cannot, the build fails. The result goes into cluster.images.vllm of platform.yaml.
ARG BASE

FROM ${BASE} AS base
ARG BASE
RUN printf '%s' "$BASE" | grep -Eq '@sha256:[0-9a-f]{64}$' \
    || { echo "BASE=$BASE names no digest: write image@sha256:<64 hex digits>" >&2; exit 1; }

FROM base AS runtime-vllm
USER 0:0
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY activator activator
COPY snapshotter snapshotter
COPY weight_cache weight_cache
COPY functions functions
RUN python3 -c 'import vllm' \
    && python3 -m pip freeze --all | grep -E '^[A-Za-z0-9._-]+==' > /tmp/base.txt \
    && awk -F '==' 'function key(n) { n = tolower(n); gsub(/[-_.]+/, "-", n); return n } \
       NR == FNR { has[key($1)] = 1; print; next } /^[A-Za-z0-9]/ && !(key($1) in has) { sub(/ *\\$/, ""); print }' /tmp/base.txt requirements.lock > /tmp/constraints.txt \
    && PIP_CONSTRAINT=/tmp/constraints.txt python3 -m pip install --no-cache-dir --disable-pip-version-check '.[worker]' \
    && rm -rf /src/* /tmp/base.txt /tmp/constraints.txt
ENV PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8
WORKDIR /
USER 65532:65532
ENTRYPOINT ["pilotlight-launcher"]
