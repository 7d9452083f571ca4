"""The error of a request that the gateway does not serve."""

from __future__ import annotations


class RefusedError(Exception):
    """Raised for a request that is not served. The client gets the message, in the form of its own API.

    Attributes:
        status: the HTTP status.
        message: what is wrong, and what to do.
        parameter: the parameter of the request that is to blame; None where it is none.
        code: a short name that clients compare, such as "context_length_exceeded"; None where there is none.
    """

    def __init__(
        self, message: str, *, status: int = 400, parameter: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.parameter, self.code = message, status, parameter, code
