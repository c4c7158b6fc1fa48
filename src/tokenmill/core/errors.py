"""Every error a caller can meet, as one tree.

The gateway maps the tree to HTTP in one place (`gateway/errors.py`); the CLI prints `str(error)` and exits
with status 1. A message says what was wrong, the value, the limit, and what to do. Our own broken invariants
are asserts, never one of these.
"""

from __future__ import annotations


class TokenmillError(Exception):
    """Base of all errors that are meant for the caller.

    `param` names the offending setting or request field, `code` is a stable machine-readable word.
    """

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(TokenmillError):
    """The request cannot be served as it stands; sending it again unchanged will fail again."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit into the model's context."""

    code = "context_length_exceeded"


class KVBudgetTooSmall(InvalidRequest):
    """The sequence could never fit into the KV pool, however empty, or into its own budget."""

    code = "kv_budget_exceeded"


class ConfigError(InvalidRequest):
    """A setting is unknown, out of range, or contradicts another."""

    code = "invalid_config"


class NotBuiltYet(ConfigError):
    """The setting is known but the capability behind it does not exist in this version."""

    code = "not_built_yet"


class AuthenticationError(TokenmillError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(TokenmillError):
    """No model of that name is known or served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RouteNotFound(TokenmillError):
    """No such path."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(TokenmillError):
    """The path exists, but not for this HTTP method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(TokenmillError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(TokenmillError):
    """The request body is larger than the server accepts."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(TokenmillError):
    """The body is not JSON by its content type."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Unavailable(TokenmillError):
    """The server is loading, draining, or its engine is down; the same request may succeed later."""

    status = 503
    type = "service_unavailable"
    code = "unavailable"


class EngineDied(Unavailable):
    """The engine process ended while the request was in flight."""

    code = "engine_died"


class ModelFileError(TokenmillError):
    """A model file is damaged, truncated, hostile, or of a kind that is not understood."""

    status = 500
    type = "model_file_error"
    code = "model_file"


class UnknownArchitecture(ModelFileError):
    """The file names an architecture that is not implemented."""

    code = "unknown_architecture"


class CalibrationError(ModelFileError):
    """The calibration beside a model is damaged, of a newer version, or of another model."""

    code = "calibration"


class ModelBroken(TokenmillError):
    """The model's numbers have left what floats can hold, so that there is no next token."""

    status = 500
    type = "model_error"
    code = "model_broken"

    @classmethod
    def at_next_token(cls) -> ModelBroken:
        return cls("the model gives no finite number for the next token: its file is damaged, or is not of the architecture that it names")


class CatalogueError(TokenmillError):
    """A model could not be fetched, verified or stored."""

    status = 500
    type = "catalogue_error"
    code = "catalogue"


class KernelError(TokenmillError):
    """The requested kernel variant does not exist or this CPU cannot run it, or its threads cannot be had."""

    status = 500
    type = "kernel_error"
    code = "kernel"
