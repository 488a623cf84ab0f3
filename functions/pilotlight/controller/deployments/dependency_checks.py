"""Checks of a deploy's dependencies: everything that its specs refer to must exist and belong to
the tenant. Runs before anything changes; errors name what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.registry import images
from pilotlight.controller.release import argument_schemas
from pilotlight.controller.scheduling import schedules
from pilotlight.controller.volumes import volumes
from pilotlight.controller.weights import blobs
from pilotlight.errors import InvalidInput, TooLarge
from pilotlight.spec.function import PUBLIC, FunctionSpec
from pilotlight.spec.identifiers import require_name
from pilotlight.spec.pricing import Rates, is_any_gpu
from pilotlight.spec.record_json import canonical_json, from_json, to_json
from pilotlight.validation.guard_patterns import patterns_of
from snapshotter.engines import check_environment_name
from snapshotter.linux.egress_policy import EgressPolicy
from snapshotter.types import VISIBLE_DEVICES
from weight_cache import manifest
from weight_cache.errors import ManifestInvalid
from weight_cache.manifest import Manifest

MAX_FUNCTIONS = 1000
MAX_NAMED_AT_ONCE = 1000
"""Digests per query: databases limit the number of parameters of a statement."""
_NO_GPU = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that show no GPU."""
MAX_SPEC_BYTES = 524_288
"""A spec is sent in launch frames of at most 8 MiB and kept by every activator."""


def parse_specs(app: str, functions: Sequence[Mapping[str, Any]]) -> list[FunctionSpec]:
    """Parse the specs of a deploy and check each one by itself. Raises InvalidInput naming function
    and key."""
    require_name("app", app)
    if not 1 <= len(functions) <= MAX_FUNCTIONS:
        raise InvalidInput(
            f"a deploy must have 1 to {MAX_FUNCTIONS} functions, not {len(functions)}",
            parameter="functions",
        )
    specs = [from_json(FunctionSpec, body, f"functions[{i}]") for i, body in enumerate(functions)]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise InvalidInput(f"function {spec.name!r} is declared twice", parameter="functions")
        seen.add(spec.name)
        _check(spec)
        if spec.guard is not None:
            patterns_of(canonical_json(to_json(spec.guard)))  # they compile
    schedules.check_schedules(specs)
    return specs


def check_dependencies(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    specs: Sequence[FunctionSpec],
    manifests: Mapping[str, Manifest],
    bundle_max_bytes: int,
) -> None:
    """Raise InvalidInput for the first missing blob, image or secret; TooLarge for a bundle over
    its limit.

    `manifests`: those that `check_weights` read. A manifest uploaded since then counts as missing,
    because its files were not checked. Called in the transaction that adds the references, so blobs
    released since `check_weights` are found missing here."""
    for digest, found in manifests.items():
        check_files(sql, tenant=tenant, digest=digest, named=found)
    sizes = blobs.sizes(sql, tenant=tenant, digests={spec.bundle for spec in specs})
    there = {*sizes, *manifests}
    built = images.built(sql, tenant=tenant, digests={spec.image for spec in specs if spec.image})
    for spec in specs:
        wanted = [
            ("blob", "bundle", spec.bundle),
            *(("blob", f"weights {w.name!r}", w.manifest) for w in spec.weights),
        ]
        for kind, role, digest in wanted:
            if digest not in there:
                raise InvalidInput(
                    f"function {spec.name!r}: {role} {digest} was not uploaded",
                    function=spec.name,
                    missing={kind: digest},
                )
        if sizes[spec.bundle] > bundle_max_bytes:
            message = (
                f"function {spec.name!r}: its bundle has {sizes[spec.bundle]} bytes: at "
                f"most {bundle_max_bytes}"
            )
            raise TooLarge(message, limit_bytes=bundle_max_bytes)
        if spec.image and spec.image not in built:
            raise InvalidInput(
                f"function {spec.name!r}: image {spec.image} was not built",
                function=spec.name,
                missing={"image": spec.image},
            )
    check_secrets(sql, tenant=tenant, environment=environment, specs=specs)


def check_secrets(
    sql: sa.Connection, *, tenant: str, environment: str, specs: Sequence[FunctionSpec]
) -> None:
    """Raise InvalidInput for the first secret that the environment does not have."""
    secrets = _secrets(
        sql,
        tenant=tenant,
        environment=environment,
        names={name for spec in specs for name in spec.secrets},
    )
    for spec in specs:
        for name in spec.secrets:
            if name not in secrets:
                hint = f"create it with: pilotlight secret set {name} VARIABLE -e {environment}"
                message = (
                    f"function {spec.name!r}: there is no secret {name!r} in environment "
                    f"{environment!r}; {hint}"
                )
                raise InvalidInput(message, function=spec.name, missing={"secret": name})
    _check_volumes(sql, tenant=tenant, environment=environment, specs=specs)


def _check_volumes(
    sql: sa.Connection, *, tenant: str, environment: str, specs: Sequence[FunctionSpec]
) -> None:
    there = volumes.names(sql, tenant=tenant, environment=environment)
    for spec in specs:
        for volume in spec.volumes:
            if volume.name not in there:
                raise InvalidInput(
                    f"function {spec.name!r}: there is no volume {volume.name!r} in environment "
                    f"{environment!r}; create it with: pilotlight volume create {volume.name} -e "
                    f"{environment}, or pass create_if_missing=True",
                    function=spec.name,
                    missing={"volume": volume.name},
                )


def check_fallbacks(caller: Principal, *, app: str, specs: Sequence[FunctionSpec]) -> None:
    """Raise Forbidden for the first variant, fallback or guard that the key does not have access
    to: calls would run it on behalf of the key."""
    for spec in specs:
        for name in (
            *(variant.function for variant in spec.variants),
            *(rung.function for rung in spec.fallback),
            *((spec.guard.function.partition(".")[0],) if spec.guard is not None else ()),
        ):
            if name:
                place, _, function = name.rpartition("/")
                caller.require_function(place or app, function)


def check_prices(specs: Sequence[FunctionSpec], rates: Rates) -> None:
    """Raise InvalidInput for the first GPU kind without a price: calls of such a function could not
    be billed. `any` needs a list with at least one."""
    for spec in specs:
        for gpu in spec.resources.gpu:
            if gpu not in rates.gpu_s and not (is_any_gpu(gpu) and rates.gpu_s):
                there = ", ".join(sorted(rates.gpu_s)) or "none"
                raise InvalidInput(
                    f"function {spec.name!r}: gpu = {gpu!r} has no price in list "
                    f"{rates.version!r}, which has {there}: "
                    f"use one of these, or ask the operator to add prices.gpu_s.{gpu} to "
                    f"platform.yaml, with a new prices.version",
                    function=spec.name,
                    parameter="gpu",
                )


def check_egress(specs: Sequence[FunctionSpec], egress: EgressPolicy | None) -> None:
    """Raise InvalidInput for the first function that requests networks which the operator does not
    allow.

    `egress`: None if functions have no network of their own.
    """
    for spec in specs:
        if spec.egress and egress is None:
            why = (
                "functions on this platform have no network of their own "
                "(snapshotter.function_network), so the operator defines what they can reach"
            )
            raise InvalidInput(
                f"function {spec.name!r}: egress: {why}; remove it",
                function=spec.name,
                parameter="egress",
            )
        try:
            _ = egress is None or egress.requested(spec.egress)
        except ValueError as e:
            message = (
                f"function {spec.name!r}: {e}. All functions can reach the internet; ask the "
                f"operator for more"
            )
            raise InvalidInput(message, function=spec.name, parameter="egress") from e


def check_access(sql: sa.Connection, specs: Sequence[FunctionSpec]) -> None:
    """Raise InvalidInput for the first tenant in `access` that does not exist: a tenant created
    later under that name would get access."""
    missing = tenants.unknown_names(
        sql, {name for spec in specs for name in spec.access} - {PUBLIC}
    )
    for spec in specs:
        for name in spec.access:
            if name in missing:
                raise InvalidInput(
                    f"function {spec.name!r}: access: there is no tenant {name!r}",
                    function=spec.name,
                    parameter="access",
                )


def check_weights(
    sql: sa.Connection, files: blobs.BlobStore, *, tenant: str, specs: Sequence[FunctionSpec]
) -> dict[str, Manifest]:
    """Return the existing manifests of the specs by digest, after checking that the tenant owns all
    files that they list. Raises InvalidInput.

    Reads megabytes, in an application thread, without holding a lock.
    """
    named = {w.manifest for spec in specs for w in spec.weights}
    there = sorted(blobs.sizes(sql, tenant=tenant, digests=named))
    return {digest: check_manifest(sql, files, tenant=tenant, digest=digest) for digest in there}


def check_manifest(
    sql: sa.Connection, files: blobs.BlobStore, *, tenant: str, digest: str
) -> Manifest:
    """Return a manifest that the tenant owns, together with all files that it lists. Raises
    InvalidInput; Unavailable when the store does not answer.

    Without this check, a tenant could read another tenant's file if it knows the digest.
    """
    size_bytes = blobs.sizes(sql, tenant=tenant, digests=[digest]).get(digest)
    if size_bytes is None:
        raise InvalidInput(f"weights {digest} were not uploaded", missing={"blob": digest})
    if size_bytes > manifest.MAX_MANIFEST_BYTES:
        raise InvalidInput(
            f"weights {digest} are not a manifest: they have {size_bytes} bytes, and a manifest at "
            f"most {manifest.MAX_MANIFEST_BYTES}",
            parameter="weights",
        )
    try:
        found = manifest.parse(files.load(digest, max_bytes=manifest.MAX_MANIFEST_BYTES))
    except ManifestInvalid as e:
        raise InvalidInput(f"weights {digest} are not a manifest: {e}", parameter="weights") from e
    check_files(sql, tenant=tenant, digest=digest, named=found)
    return found


def check_files(sql: sa.Connection, *, tenant: str, digest: str, named: Manifest) -> None:
    """Raise InvalidInput when the tenant does not own a manifest or a file that it lists."""
    wanted = [digest, *sorted(named.blobs())]
    for begin in range(0, len(wanted), MAX_NAMED_AT_ONCE):
        part = wanted[begin : begin + MAX_NAMED_AT_ONCE]
        owned = blobs.sizes(sql, tenant=tenant, digests=part)
        if missing := next((name for name in part if name not in owned), None):
            raise InvalidInput(
                f"weights {digest}: their file {missing} was not uploaded",
                missing={"blob": missing},
            )


def _check(spec: FunctionSpec) -> None:
    where = f"function {spec.name!r}"
    blobs.check_digest(spec.bundle, f"{where}: bundle")
    if spec.image is not None:
        blobs.check_digest(spec.image, f"{where}: image")
    if spec.container_image is not None:
        raise InvalidInput(
            f"{where}: container_image is set by the platform: remove it",
            parameter="container_image",
        )
    _check_visible_devices(spec)
    if spec.engine is not None:
        try:
            check_environment_name(spec.engine.environment)
        except ValueError as e:
            raise InvalidInput(f"{where}: {e}", parameter="environment") from e
    names = [w.name for w in spec.weights]
    for weights in spec.weights:
        require_name("weights", weights.name)
        blobs.check_digest(weights.manifest, f"{where}: weights {weights.name!r}")
    if len(set(names)) != len(names):
        raise InvalidInput(f"{where}: two weights share a name", parameter="weights")
    if len({m.name for m in spec.methods}) != len(spec.methods):
        raise InvalidInput(f"{where}: two methods share a name", parameter="methods")
    for method in spec.methods:
        if method.schema is not None:
            argument_schemas.check_schema(
                method.schema, f"{where}: schema of {method.name or spec.name!r}"
            )
        if method.returns is not None:
            argument_schemas.check_schema(
                method.returns, f"{where}: schema of the result of {method.name or spec.name!r}"
            )
    if (size := len(canonical_json(to_json(spec)))) > MAX_SPEC_BYTES:
        raise InvalidInput(
            f"{where}: its spec has {size} bytes: at most {MAX_SPEC_BYTES}", parameter="functions"
        )


def _check_visible_devices(spec: FunctionSpec) -> None:
    """Raise InvalidInput for an own choice of GPUs. Without `gpu` the values that show no GPU, as
    the platform's does, are accepted."""
    value = spec.env.get(VISIBLE_DEVICES)
    if value is None or (not spec.resources.gpu and value in _NO_GPU):
        return
    advice = (
        "remove it from env and the image"
        if spec.resources.gpu
        else 'request GPUs with gpu="…" instead, or remove it'
    )
    raise InvalidInput(
        f"function {spec.name!r}: env: {VISIBLE_DEVICES} = {value!r}: the platform sets it to the "
        f"GPUs that each instance is granted: {advice}",
        function=spec.name,
        parameter="env",
    )


def _secrets(sql: sa.Connection, *, tenant: str, environment: str, names: set[str]) -> set[str]:
    table = tables.secrets
    query = sa.select(table.c.name).where(
        table.c.tenant == tenant, table.c.environment == environment, table.c.name.in_(names)
    )
    return set(sql.execute(query).scalars())
