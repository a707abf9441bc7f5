"""What a client is told when something is wrong: OpenAI's error object, and which exception comes to which."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from klero.errors import Fault, KleroError, ParameterError, QueueFullError, RequestError

RETRY_AFTER = "1"
MOST_FAULTS = 64
INVALID, SERVER = "invalid_request_error", "server_error"
NO_NAMES: Mapping[str, str] = {}
RULES: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "is not known here; leave it out",
    "string_type": "must be a text",
    "string_too_short": "is too short; the least length is {min_length}",
    "string_too_long": "is too long; the greatest length is {max_length}",
    "string_pattern_mismatch": "must match {pattern}",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
}
"""What is said of each of pydantic's faults: its own words are for those who write Python, and tell no way out."""
_ENGINE_NAME = re.compile(r"^request-[0-9a-f]+-[0-9]+: ")  # what AsyncLLM calls a request, which the client never said


class Unreadable:
    """Stands in a body where it says what means nothing: no field takes it. shown: how it was written; rule: why."""

    def __init__(self, shown: str, rule: str) -> None:
        self.rule = rule
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


class ApiError(Exception):
    """An answer that is an error. status: of HTTP. param: the field at fault. code: for programs. headers: to send.

    detail: what the server's own log may say of it, and the client is not told.
    """

    def __init__(
        self, status: int, message: str, kind: str = INVALID, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None, detail: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, kind, param, code
        self.headers, self.detail = dict(headers or {}), detail

    def body(self) -> dict[str, Any]:
        """The object as OpenAI's clients read it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request breaks a rule."""
    return ApiError(400, message, INVALID, param, code)


def refusal_of(faults: Iterable[Fault], names: Mapping[str, str] = NO_NAMES) -> ApiError:
    """400 that tells every fault (of very many the first), by the names that the body has for the fields; param is the
    first's.
    """
    renamed = [Fault(names.get(fault.field, fault.field), fault.value, _rule_of(fault)) for fault in faults]
    told = list(dict.fromkeys(_told(fault) for fault in renamed[:MOST_FAULTS]))
    if len(renamed) > MOST_FAULTS:
        told.append(f"and {len(renamed) - MOST_FAULTS} more faults")
    return bad_request("; ".join(told), renamed[0].field)


def _told(fault: Fault) -> str:
    """A fault in words; without the value, where the body has none that could be shown."""
    return f"{fault.field}: {fault.rule}" if fault.value is None else str(fault)


def _rule_of(fault: Fault) -> str:
    return fault.value.rule if isinstance(fault.value, Unreadable) else fault.rule


def unauthorized() -> ApiError:
    """401: no key, or a wrong one."""
    message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
    return ApiError(401, message, INVALID, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def model_not_found(name: str) -> ApiError:
    """404: another model than the one that is served."""
    return ApiError(404, f"model={name!r:.80}: is not served here; GET /v1/models tells what is", INVALID, "model",
                    "model_not_found")  # fmt: skip


def not_found() -> ApiError:
    """404: no such path."""
    return ApiError(404, "there is nothing at this path; /openapi.json lists what there is", INVALID, None, "not_found")


def method_not_allowed(allow: str) -> ApiError:
    """405. allow: the methods that the path takes, as its header says them."""
    return ApiError(405, f"this path takes {allow}", INVALID, None, "method_not_allowed", {"Allow": allow})


def too_slow(seconds: float) -> ApiError:
    """408. seconds: in which a body must be sent. The connection is closed, as the rest may come at any time."""
    return ApiError(408, f"the body was not sent within {seconds:g} s", headers={"Connection": "close"})


def not_json(header: str, value: str, way: str) -> ApiError:
    """415. header, value: by which the body is no plain JSON; way: what to send instead."""
    return ApiError(415, f"{header}: {value!r:.60}; {way}")


def too_large(limit: int) -> ApiError:
    """413. limit: of a body, in bytes."""
    return ApiError(413, f"the body is larger than {limit} bytes; ask for less in one request", INVALID, None,
                    "body_too_large")  # fmt: skip


def queue_full() -> ApiError:
    """429: as many requests wait or run as may."""
    message = "as many requests wait as may; ask again later"
    return ApiError(429, message, "rate_limit_error", None, "queue_full", {"Retry-After": RETRY_AFTER})


def internal(detail: str | None = None, message: str | None = None) -> ApiError:
    """500: nobody's fault but the server's. message: what of it the client may read."""
    shown = message or "the server could not do this; its log says why"
    return ApiError(500, shown, SERVER, None, "internal_error", detail=detail)


def unavailable(why: str = "the server is not ready") -> ApiError:
    """503: loading, draining, or its engine has ended."""
    return ApiError(503, f"{why}; ask again later", SERVER, None, "unavailable", {"Retry-After": RETRY_AFTER})


def error_of(error: BaseException, names: Mapping[str, str] = NO_NAMES) -> ApiError:
    """What a client is told of an exception. names: fields of SamplingParams, as the body spelled them.

    Only what klero says of a request is repeated; of anything else the server's log has to speak.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        return refusal_of(error.faults, names)
    if isinstance(error, ValidationError):
        return refusal_of(faults_of(error), names)
    if isinstance(error, QueueFullError):
        return queue_full()
    if isinstance(error, RequestError):
        if isinstance(error.__cause__, KleroError):  # the engine has ended, which is no fault of the request
            return unavailable("the engine has ended")
        return bad_request(_ENGINE_NAME.sub("", str(error)))
    return internal()


def faults_of(error: ValidationError) -> list[Fault]:
    """What is wrong with a body, each fault under its path, such as messages[0].role."""
    faults = []
    for one in error.errors(include_url=False):
        value = None if one["type"] == "missing" else one["input"]
        faults.append(Fault(_path(one["loc"]), value, rule_of(one)))
    return faults


def rule_of(error: ErrorDetails) -> str:
    """The rule that one of pydantic's faults breaks; of those that klero raised, their own text."""
    said, context = RULES.get(error["type"]), error.get("ctx", {})
    if said is None or "rule" in context:  # which is of one that was told already, in a list
        return error["msg"].removeprefix("Value error, ")
    return said.format_map(context)


def _path(places: tuple[int | str, ...]) -> str:
    """A place in a body, as one would write it; long names are cut."""
    path = ""
    for place in places:
        path += f"[{place}]" if isinstance(place, int) else f".{place:.64}" if path else f"{place:.64}"
    return path
