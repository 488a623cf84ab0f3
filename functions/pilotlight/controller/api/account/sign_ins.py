"""Routes for signing in from the command line by an issuer (the device flow). They need no key, for
they are how a person gets one."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from pilotlight.controller.api.account.api_keys import KeyCreated, created
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, RequestId, require_disk_space
from pilotlight.controller.database.audit_trail import client_address
from pilotlight.controller.database.transactions import in_write
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.sign_in import keys
from pilotlight.controller.sign_in.issuers import Identity
from pilotlight.controller.sign_in.keys import Means

router = APIRouter(prefix="/v1", tags=["keys"])
OPEN: dict[str, Any] = {"security": []}
"""Of the OpenAPI document: these operations need no key."""
MAX_NAME = 40
MAX_CODE = 100


class DeviceSignInRequest(Body):
    """`issuer`: a name in section `issuers` of platform.yaml; null: the only one."""

    issuer: Annotated[str | None, Field(max_length=MAX_NAME)] = None


class DeviceSignInBegun(Body):
    """A pending sign-in. The person opens `verification_uri` and types `user_code`, or opens
    `verification_uri_complete`, if there is one. Meanwhile send `code` to
    `/v1/device-sign-ins:redeem`, each `interval_s` seconds."""

    code: str
    issuer: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str | None
    expires_at: float
    interval_s: float


class DeviceSignInRedemption(Body):
    """The `code` of a pending sign-in."""

    code: Annotated[str, Field(max_length=MAX_CODE)]


class DeviceSignInState(Body):
    """`pending`: ask again in `interval_s` seconds. `signed_in`: `key` has the key's text, shown
    only once, which ends at its `expires_at`; `tenant` is the name of its tenant."""

    status: Literal["pending", "signed_in"]
    interval_s: float | None = None
    tenant: str | None = None
    key: KeyCreated | None = None


@router.post("/device-sign-ins", status_code=201, openapi_extra=OPEN)
async def begin_device_sign_in(context: Ctx, body: DeviceSignInRequest) -> DeviceSignInBegun:
    """Begin to sign in by an issuer. Anybody may; few can be pending for one address."""
    begun = await context.devices.begin(body.issuer, address=client_address(), now=context.clock())
    return DeviceSignInBegun(
        code=begun.code,
        issuer=begun.issuer,
        user_code=begun.user_code,
        verification_uri=begun.page,
        verification_uri_complete=begun.whole_page,
        expires_at=begun.until,
        interval_s=begun.interval_s,
    )


@router.post("/device-sign-ins:redeem", openapi_extra=OPEN)
async def redeem_device_sign_in(
    context: Ctx, request: RequestId, body: DeviceSignInRedemption
) -> DeviceSignInState:
    """Exchange a sign-in to which the person has agreed for an API key, once."""
    await require_disk_space(context)
    found = await context.devices.poll(body.code, now=context.clock())
    if not isinstance(found, Identity):
        return DeviceSignInState(status="pending", interval_s=found)
    create = partial(keys.create, identity=found, means=Means.COMMAND_LINE, request=request)
    key = created(await in_write(context.store, create), keys.actor_of(found))
    return DeviceSignInState(status="signed_in", tenant=found.tenant, key=key)
