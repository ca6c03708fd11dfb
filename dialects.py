"""API dialects: what a harness sends becomes one chat request, and one chat completion becomes what it expects back.

Chat completions only, so far. Completions, responses and Anthropic messages get their own `*_request`, `*_reply`,
`*_chunk` and `*_error` here; the gateway sees one chat request and one chat completion whatever the dialect.

    harness body --chat_request--> checked chat request -> gateway -> chat completion --chat_reply--> JSON or SSE
Pure functions: no I/O, no state. User input that is wrong raises ApiError with a message for the harness.
"""

from typing import Any

import orjson

ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
               404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told, in its own dialect. `status` >= 500: the machinery's fault, never the harness's."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def chat_error(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def chat_request(body: dict[str, Any]) -> dict[str, Any]:
    """The body itself, checked where the engine's own message would be unclear, late, or a crash."""
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "'messages' must be a non-empty list")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{at}] must be an object with a string 'role'")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise ApiError(400, f"messages[{at}].content must be a string, a list of parts or null")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "refusal"):
                raise ApiError(400, f"messages[{at}].content: only text parts are supported, not {kind!r}: "
                                 "this model reads no images, audio or files")
            if not isinstance(part.get(kind), str):
                raise ApiError(400, f"messages[{at}].content: a {kind} part needs a string {kind!r}")
    if body.get("n") not in (None, 1):
        raise ApiError(400, f"n={body['n']!r} is not supported: send parallel requests, each is a sample of its own")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ApiError(400, "'tools' must be a list of objects")
    if not isinstance(body.get("stream"), bool | None):
        raise ApiError(400, "'stream' must be a boolean")
    if not isinstance(body.get("stream_options"), dict | None):
        raise ApiError(400, "'stream_options' must be an object")
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None and (type(body[name]) is not int or body[name] < 1):
            raise ApiError(400, f"{name!r} must be a positive integer")
    return body


def chat_completion(head: dict[str, Any], message: dict[str, Any], finish: str, prompt: int,
                    sampled: int) -> dict[str, Any]:
    """`message` as the engine parsed it, {} if it had nothing to parse; `prompt`, `sampled`: tokens. Tool calls that
    were cut off by the length are no finished ones."""
    said = {key: value for key, value in message.items() if value not in (None, [])}
    finish = "tool_calls" if said.get("tool_calls") and finish == "stop" else finish
    return {**head, "object": "chat.completion", "choices": [{
        "index": 0, "logprobs": None, "finish_reason": finish,
        "message": {"role": "assistant", "content": None if said else "", **said}}], "usage": {
            "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}}


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def chat_chunk(head: dict[str, Any], delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return sse({**head, "object": "chat.completion.chunk", "choices": [choice]})


def chat_reply(completion: dict[str, Any], request: dict[str, Any]) -> bytes:
    """The reply's body; in a stream, what follows the first, empty delta: deltas that concatenate to the message."""
    if not request.get("stream"):
        return orjson.dumps(completion)
    head = {key: completion[key] for key in ("id", "created", "model")}
    choice, events = completion["choices"][0], []
    for key in ("reasoning_content", "reasoning", "content"):
        if choice["message"].get(key):
            events.append(chat_chunk(head, {key: choice["message"][key]}))
    for index, call in enumerate(choice["message"].get("tool_calls") or ()):
        events.append(chat_chunk(head, {"tool_calls": [{**call, "index": index}]}))
    events.append(chat_chunk(head, {}, choice["finish_reason"]))
    if (request.get("stream_options") or {}).get("include_usage"):
        events.append(sse({**head, "object": "chat.completion.chunk", "choices": [], "usage": completion["usage"]}))
    return b"".join([*events, b"data: [DONE]\n\n"])
