"""Modal's names of errors: `except pilotlight.exception.FunctionTimeoutError:`.

Each is a class of `pilotlight.errors`; `TimeoutError` is the builtin one, which `FunctionCall.get`
raises when its own `timeout` has passed."""

from __future__ import annotations

from builtins import TimeoutError

from pilotlight.errors import Conflict as AlreadyExistsError
from pilotlight.errors import Conflict as ConflictError
from pilotlight.errors import DeadlineExceeded as FunctionTimeoutError
from pilotlight.errors import Forbidden as PermissionDeniedError
from pilotlight.errors import FunctionRaised as ExecutionError
from pilotlight.errors import InvalidInput as InvalidError
from pilotlight.errors import NotFound as NotFoundError
from pilotlight.errors import NotFound as OutputExpiredError
from pilotlight.errors import PilotlightError as Error
from pilotlight.errors import RemoteError
from pilotlight.errors import TooLarge as RequestSizeError
from pilotlight.errors import TooManyRequests as ResourceExhaustedError
from pilotlight.errors import Unauthenticated as AuthError
from pilotlight.errors import Unavailable as ConnectionError
from pilotlight.errors import Unavailable as ServiceError
from pilotlight.sdk.decorator_metadata import PilotlightWarning as DeprecationError

__all__ = [
    "AlreadyExistsError",
    "AuthError",
    "ConflictError",
    "ConnectionError",
    "DeprecationError",
    "Error",
    "ExecutionError",
    "FunctionTimeoutError",
    "InvalidError",
    "NotFoundError",
    "OutputExpiredError",
    "PermissionDeniedError",
    "RemoteError",
    "RequestSizeError",
    "ResourceExhaustedError",
    "ServiceError",
    "TimeoutError",
]
