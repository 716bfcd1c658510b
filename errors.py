"""Typed errors. Each names the field, file or layer at fault and says what to do.

`PeltonError` is the root: the CLI prints its message and exits with 2, the server answers with its HTTP
status. Anything that is not a `PeltonError` is a bug.
"""

from __future__ import annotations


class PeltonError(Exception):
    """Something that the user can act on; `str(error)` is one readable line."""


class BuildError(PeltonError):
    """The checkpoint cannot be compiled: says which file, tensor or layer, why, and what to do."""


class BundleError(PeltonError):
    """A bundle is missing, torn or built for something else: says built-with, found, and how to rebuild."""


class ConfigError(PeltonError):
    """Settings that cannot work, alone or together: names the setting and says what to do."""


class RequestError(PeltonError):
    """A request that cannot be served as asked (HTTP 400).

    `field` names the offending field as the user wrote it; `code` is a stable machine-readable word such as
    `context_length_exceeded`.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class EngineError(PeltonError):
    """A request failed inside the engine (HTTP 500); the others go on."""


class OverloadedError(PeltonError):
    """The server takes no new requests now: draining or its queue is full (HTTP 503)."""


class JobError(PeltonError):
    """A batch job that cannot start: says which line or path, and what to do."""
