"""Maps botocore's errors to ObjectStoreError with messages that say what to do."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from pilotlight.core.object_store.errors import (
    ObjectChanged,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
)

_MISSING = ("404", "NoSuchKey", "NotFound")
_TRANSIENT = (
    "SlowDown",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
)


def error_for_status(url: str, status: int, code: str, said: str) -> ObjectStoreError:
    """The error for a response with `status`, S3's `code` and message."""
    if code == "NoSuchBucket":
        return ObjectStoreError(
            f"{url}: the bucket does not exist ({code}): create it, or correct the setting"
        )
    if status == 404 or code in _MISSING:
        return ObjectNotFound(f"{url} is missing")
    if status == 412:
        return ObjectChanged(f"{url} was replaced by another version")
    if status in (401, 403):
        return ObjectStoreError(
            f"{url}: access refused ({code or status}: {said}). The credentials need permission "
            f"to get, put, list and delete; "
            "without permission to list, S3 also returns this for a missing object"
        )
    if status >= 500 or status in (408, 429) or code in _TRANSIENT:
        return ObjectStoreUnavailable(
            f"{url}: the store is temporarily unavailable ({status} {code}: {said})"
        )
    return ObjectStoreError(f"{url}: the store refused ({status} {code}: {said})")


def error_for_client_error(url: str, error: ClientError) -> ObjectStoreError:
    """The error for botocore's ClientError."""
    detail = error.response.get("Error", {})
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return error_for_status(
        url, status, str(detail.get("Code", "")), str(detail.get("Message", ""))
    )


def error_for_transport(url: str, error: BotoCoreError | OSError | Exception) -> ObjectStoreError:
    """The error for a failure other than an error response."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return ObjectStoreError(
            f"{url}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            f"AWS_PROFILE"
        )
    return ObjectStoreUnavailable(
        f"{url}: no valid response: {error}. Check the endpoint (AWS_ENDPOINT_URL) and the network"
    )
