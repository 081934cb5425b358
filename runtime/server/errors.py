"""Errors as OpenAI's clients read them: an HTTP status, and one nested object."""

from collections.abc import Mapping
from typing import Any

from nibblelm.errors import EngineError, EngineFullError, NibbleLMError, SchemaError, printable
from nibblelm.request import GenerationOutput

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a request is answered with that cannot be served.

    param   the field of the request that is at fault
    code    OpenAI's name for the case, where it has one
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}"""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = printable(str(self))
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: NibbleLMError, param: str | None = None) -> ApiError:
    """What an error of the package means to a client: its own mistake, or the end of the engine."""
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_ended")
    if isinstance(error, SchemaError):
        named = next((name for name in ("regex", "grammar") if str(error).startswith(f"the {name} ")), None)
        return ApiError(422, str(error), param=param or named or "response_format", code="unsupported_schema")
    if isinstance(error, EngineFullError):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
    return ApiError(400, str(error), param=param)


def error_of(output: GenerationOutput) -> ApiError | None:
    """Why an output ended before its time, None if it did not: what it was to follow, or a mistake of the server's."""
    if output.error is None:
        return None
    if output.error_type == SchemaError.__name__:
        return as_api_error(SchemaError(output.error))
    return ApiError(500, output.error)
