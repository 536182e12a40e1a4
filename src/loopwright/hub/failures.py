"""What went wrong with a request to the Hub, in one sentence, and whether trying again may help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..args.secrets import masked_text

CAUSES = {
    400: "the Hub did not accept the request",
    401: "the token was refused: log in with `hf auth login`, or set hub_token to a token with write access",
    403: "this token may not write there: use a token with write access, or another hub_model_id",
    404: "there is no such repository or branch, or the token may not read it: check hub_model_id and hub_revision",
    409: "the branch was changed by another push at the same moment",
    412: "the branch was changed by another push at the same moment",
    413: "the Hub refused the size of the files: make them smaller, or request a larger limit",
    429: "too many requests",
    507: "the storage of the account is full: delete files there, or choose another hub_model_id",
}
"""Causes by the status of a response."""
MAY_PASS = (408, 409, 412, 425, 429, 500, 502, 503, 504)
"""Statuses of responses after which trying again may help."""


def status_of(error: BaseException) -> int | None:
    """The status of the response that an error, or one of its causes, is about."""
    for each in _chain(error):
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def may_pass(error: BaseException) -> bool:
    """Whether a request that failed with this error may succeed later: a lost connection, a busy server."""
    status = status_of(error)
    if status is not None:
        return status in MAY_PASS
    names = {name for each in _chain(error) for name in _names(each)}
    # The package's own errors for what is wrong here, not there; an upload may raise any other one.
    return not names & {"OfflineModeIsEnabled", "LocalTokenNotFoundError", "FileNotFoundError", "ValueError"}


def explained(error: BaseException, secret: str | None) -> str:
    """One sentence on the cause of a failed request, without secrets."""
    status = status_of(error)
    *_, last = _chain(error)
    shown = str(error if status is not None else last).strip() or type(last).__name__
    detail = masked_text(shown.splitlines()[0]).rstrip(".")
    if secret:
        detail = detail.replace(secret, "<masked>")
    if status is not None:
        return f"{CAUSES.get(status, 'the server reports an error')} (status {status}; {detail})"
    names = {name for each in _chain(error) for name in _names(each)}
    if "OfflineModeIsEnabled" in names:
        return "HF_HUB_OFFLINE is set, so nothing is sent: unset it"
    if "LocalTokenNotFoundError" in names:
        return "there is no token: log in with `hf auth login`, or set hub_token"
    if names & {"TransportError", "ConnectionError", "TimeoutError"}:
        return f"the connection failed ({type(last).__name__}: {detail})"
    return f"{type(last).__name__}: {detail}"


def _names(error: BaseException) -> Iterator[str]:
    return (kind.__name__ for kind in type(error).__mro__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the first cause last."""
    seen: Any = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
