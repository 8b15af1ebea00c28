"""What a client is told when something fails, in the shape that its dialect expects."""

from __future__ import annotations

from typing import Any

MODEL_FAILED = "the model failed while it answered; the server's log has the reason under this request's id"

# Statuses after which a request may be sent again. A wrong one stays wrong. One that was in a step that failed may be
# what failed it, and would take the next replica's step with it; one that took too long would take as long again.
AGAIN = (409, 429, 503)

_OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: the HTTP status, as OpenAI's dialect has it.
        message: what was asked, what there is, what to change; never the input itself.
        code: a word that clients look for, such as context_length_exceeded.
        param: the field that it is about.
        headers: further ones of the answer.
        again: whether it helps to send the request again, here or to another replica; None: as AGAIN says.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        again: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        self.again = status in AGAIN if again is None else again

    def openai(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else _OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """Anthropic's error object."""
        status = 503 if self.anthropic_status == 529 else self.status
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if self.status >= 500 else "invalid_request_error")
        found: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": self.message}}
        return found if request_id is None else found | {"request_id": request_id}

    @property
    def anthropic_status(self) -> int:
        """Anthropic has 529 where a server is too busy or about to end."""
        return 529 if self.status == 503 or self.code == "queue_full" else self.status


class ClientGone(ApiError):
    """The client has closed its connection, or reads nothing; there is nobody to tell."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left")


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that its client has to change."""
    return ApiError(400, message, param=param, code=code)


def too_long(tokens: int, most: int) -> ApiError:
    """A prompt that leaves no room for an answer; in the words that clients look for."""
    message = f"prompt is too long: {tokens} tokens > {most} maximum; shorten it, or serve with a larger --context"
    return bad(message, "messages", "context_length_exceeded")


def busy(message: str, seconds: int) -> ApiError:
    """More is asked at once than is served; the client may ask again."""
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(seconds)})


def unavailable(message: str, seconds: int | None = None) -> ApiError:
    """The server cannot answer now: it loads, drains, or the engine is gone."""
    return ApiError(503, message, headers={} if seconds is None else {"retry-after": str(seconds)})
