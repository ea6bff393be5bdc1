"""Errors of requests, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hal.errors import BatchError, CheckpointError, ClosedError, ConfigError, HalError, ModelError
from hal.generation.sampling_params import GRAMMARS

INVALID, FAILED = "invalid_request_error", "server_error"


class ApiError(HalError):
    """A request that is not answered.

    Args:
        status: the HTTP status.
        problem: what was asked, and what is wrong with it.
        remedy: what to do.
        param: the name of the request's field.
        code: a word for programs.
    """

    def __init__(
        self, status: int, problem: str, remedy: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(problem, remedy)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = INVALID if self.status < 500 else FAILED
        message = f"{self.problem}: {self.remedy}"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: HalError, fields: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """Return the error for what a check of the request raised.

    Args:
        error: the error.
        fields: the request's fields for parameters of another name.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BatchError | CheckpointError | ConfigError | ModelError):
        field = error.key if error.key is None else fields.get(error.key, error.key)
        problem = error.problem if field == error.key else f"{field}: {error.problem}"
        return ApiError(400, problem, error.remedy, param=field)
    return failed(error)


def failed(error: HalError) -> ApiError:
    """Return the error for what running the request raised. Only a grammar may turn out to be wrong then."""
    if isinstance(error, ApiError):
        return error
    status = 503 if isinstance(error, ClosedError) else 400 if error.key in GRAMMARS else 500
    return ApiError(status, error.problem, error.remedy)
