"""Dialects: the official clients read every reply, and every body becomes the chat request that it means.

The clients are the real ones, sync and async; their transport is replaced by the few lines of `Served`, which do what
the gateway does with a dialect.
"""

import asyncio
import itertools
import json
from typing import Any

import anthropic
import httpx
import httpx2  # the anthropic client's own
import openai
import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as some
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from dialects import DIALECTS, ApiError, Ask, assistant

JSON = dict[str, Any]
CHAT, TEXT, RESPONSES, MESSAGES = DIALECTS
PLAIN = dict(zip(DIALECTS, (ChatCompletion, Completion, Response, Message), strict=True))
EVENT = {path: TypeAdapter(kind) for path, kind in zip(
    DIALECTS, (ChatCompletionChunk, Completion, ResponseStreamEvent, RawMessageStreamEvent), strict=True)}
BODIES: dict[str, JSON] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, TEXT: {"model": "m", "prompt": "hi"},
    RESPONSES: {"model": "m", "input": "hi", "tools": [{"type": "custom", "name": "patch"}]},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}}
LAST = {CHAT: "[DONE]", TEXT: "[DONE]", RESPONSES: "response.completed", MESSAGES: "message_stop"}
every_dialect = pytest.mark.parametrize("path", DIALECTS)


def call(at: int, name: str, arguments: Any) -> JSON:
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}


def completion(content: str | None = "", reasoning: str | None = None, calls: Any = (), finish: str = "",
               stop_string: str | None = None) -> JSON:
    message = {"content": content, "reasoning": reasoning, "tool_calls": list(calls)}
    return {"name": "n1", "created": 7, "model": "m", "message": message, "stop_string": stop_string,
            "finish": finish or ("tool_calls" if calls else "stop"), "usage": {"prompt": 11, "sampled": 5}}


CALLS = [call(1, "ls", {"path": "ä"}), call(2, "patch", {"input": "*** Begin\n+ä"}), call(3, "now", {})]
REPLIES = {
    "text": completion("Grüße, 世界 \u2028 and \x85 👋"), "nothing": completion(None),
    "thought": completion(None, "hm"), "thought, said": completion("yes", "well\n\nhm"),
    "calls": completion(None, None, CALLS), "everything": completion("I look.", "think", CALLS),
    "cut": completion('{"cmd":"ls', "think", finish="length"),
    "stopped": completion("a b", finish="stop_string", stop_string="END"),
    "broken arguments": completion(None, None, [call(at, name, text) for at, (name, text) in enumerate(
        [("ls", '{"a":'), ("ls", "[1]"), ("ls", ""), ("patch", "raw"), ("patch", '{"input": 3}'),
         ("ls", '{"a":' * 300 + "1" + "}" * 300)])])}


def ask(path: str, **body: Any) -> Ask:
    """Through bytes, as from a harness."""
    return DIALECTS[path].ask(orjson.loads(orjson.dumps({**BODIES[path], **body})))


def streamed(path: str, done: JSON, cuts: Any = (), **body: Any) -> bytes:
    """The stream of a reply, cut into pieces of these lengths, then whatever is left at once."""
    stream, cuts = DIALECTS[path].stream(ask(path, **body | {"stream": True}), done), iter(cuts)
    written = stream.start()
    for kind in ("reasoning", "content"):
        text = done["message"][kind] or ""
        while text and (size := next(cuts, 0)):
            written += stream.text(kind, text[:size]) + stream.ping()
            text = text[size:]
        if text:
            break  # the rest comes with the end
    written += stream.finish(done)
    assert not stream.mismatch
    return written


def events(stream: bytes) -> list[JSON]:
    """Of an SSE stream; its last line may be [DONE]."""
    assert stream.endswith(b"\n\n")
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines())  # by any separator that Python knows
        assert set(lines) <= {"event", "data"}
        found.append(lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]))
        assert "event" not in lines or lines["event"] == found[-1]["type"]
    return found


class Served:
    """The gateway, as a client sees it: replies with `done`, or with `error`, in mid-stream if not `early`."""

    def __init__(self, done: JSON | None = None, error: ApiError | None = None, early: bool = True) -> None:
        self.done, self.error, self.early, self.asks = done or completion("hi"), error, early, []

    def answer(self, path: str, data: bytes) -> tuple[int, bytes]:
        dialect, body = DIALECTS[path], orjson.loads(data)
        try:
            self.asks.append(dialect.ask(body))
            if self.error and (self.early or not self.asks[-1].stream):
                raise self.error
        except ApiError as error:
            return error.status, orjson.dumps(dialect.error(error))
        if not self.asks[-1].stream:
            return 200, orjson.dumps(dialect.reply(self.asks[-1], self.done))
        if self.error:
            stream = dialect.stream(self.asks[-1], self.done)
            return 200, stream.start() + stream.text("content", "so f") + stream.fail(self.error)
        return 200, streamed(path, self.done, itertools.repeat(2), **body)

    def handler(self, library: Any) -> Any:
        def handle(request: Any) -> Any:
            status, body = self.answer(request.url.path, request.content)
            kind = "application/json" if body.startswith(b"{") else "text/event-stream"
            return library.Response(status, content=body, headers={"content-type": kind})
        return library.MockTransport(handle)

    def clients(self) -> tuple[openai.OpenAI, anthropic.Anthropic]:
        common = {"api_key": "k", "max_retries": 0}
        return (openai.OpenAI(**common, base_url="http://x/v1", http_client=httpx.Client(
                    transport=self.handler(httpx))),
                anthropic.Anthropic(**common, base_url="http://x", http_client=httpx2.Client(
                    transport=self.handler(httpx2))))


def create(path: str, served: Served, **more: Any) -> Any:
    client, claude = served.clients()
    method = {CHAT: client.chat.completions, TEXT: client.completions, RESPONSES: client.responses,
              MESSAGES: claude.messages}[path].create
    return method(**{**BODIES[path], **more})


def bare(value: Any) -> Any:
    """Without what the clients' helpers add (null fields, parsed arguments, indices)."""
    if isinstance(value, dict):
        dropped = ("parsed", "parsed_arguments", "parsed_output", "index")
        return {key: bare(one) for key, one in value.items() if key not in dropped and one is not None}
    return [bare(one) for one in value] if isinstance(value, list) else value


# ---- replies


@every_dialect
@pytest.mark.parametrize("name", REPLIES)
def test_replies_and_events_are_valid_by_the_clients_own_types_and_end_as_they_must(path: str, name: str) -> None:
    done = REPLIES[name]
    PLAIN[path].model_validate(DIALECTS[path].reply(ask(path), done), strict=True)
    stream = streamed(path, done, itertools.repeat(3))
    assert stream == streamed(path, done, itertools.repeat(3))  # a replay has the same bytes
    found = events(stream)
    for event in found[:-1] if path in (CHAT, TEXT) else found:
        if path == TEXT:  # the API's chunks have null here, its types do not
            event["choices"][0]["finish_reason"] = event["choices"][0]["finish_reason"] or "stop"
        if event.get("type") != "ping":  # the anthropic client knows it, its types do not
            EVENT[path].validate_python(event, strict=True)
    cut = path == RESPONSES and done["finish"] == "length"
    last = "response.incomplete" if cut else LAST[path]
    begun = [event["content_block"] for event in found if path == MESSAGES and event["type"] == "content_block_start"]
    assert not any(block.get(key) for block in begun for key in ("text", "thinking", "signature", "input"))
    kinds = [event if isinstance(event, str) else event.get("type") for event in found]
    assert kinds[-1] == last and kinds.count(last) == 1


@pytest.mark.parametrize("name", REPLIES)
def test_the_official_clients_accumulate_a_stream_to_the_plain_reply(name: str) -> None:
    served = Served(REPLIES[name])
    client, claude = served.clients()
    plain = {path: create(path, served).to_dict() for path in DIALECTS}
    with client.responses.stream(**BODIES[RESPONSES]) as stream:
        kinds = [event.type for event in stream]
        if kinds[-1] == "response.completed":
            assert bare(stream.get_final_response().to_dict()) == bare(plain[RESPONSES])
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    with claude.messages.stream(**BODIES[MESSAGES]) as stream:
        final = stream.get_final_message().to_dict()
    assert bare(final) == bare(plain[MESSAGES])
    assert not any(block.get("text") == "" for block in final["content"])
    with client.chat.completions.stream(**BODIES[CHAT], stream_options={"include_usage": True}) as stream:
        try:
            final = stream.get_final_completion().to_dict()
        except openai.LengthFinishReasonError as error:  # how the client tells of "length"
            final = error.completion.to_dict()
    said, ours = final["choices"][0].pop("message"), plain[CHAT]["choices"][0].pop("message")
    assert bare(said) | {"content": said["content"] or ""} == bare(ours) | {"content": ours["content"] or ""}
    assert bare(final) == bare(plain[CHAT])
    pieces = list(client.completions.create(**BODIES[TEXT], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == plain[TEXT]["choices"][0]["text"]


def test_the_async_clients_read_the_same() -> None:
    served = Served(REPLIES["everything"])

    async def read() -> tuple[Any, Any]:
        client = openai.AsyncOpenAI(api_key="k", base_url="http://x/v1", http_client=httpx.AsyncClient(
            transport=served.handler(httpx)))
        claude = anthropic.AsyncAnthropic(api_key="k", base_url="http://x", http_client=httpx2.AsyncClient(
            transport=served.handler(httpx2)))
        async with client.responses.stream(**BODIES[RESPONSES]) as responses:
            response = await responses.get_final_response()
        async with claude.messages.stream(**BODIES[MESSAGES]) as messages:
            return response, await messages.get_final_message()
    response, message = asyncio.run(read())
    assert bare(response.to_dict()) == bare(create(RESPONSES, served).to_dict())
    assert bare(message.to_dict()) == bare(create(MESSAGES, served).to_dict())


def heard(path: str, found: list[Any]) -> tuple[str, str]:
    """Reasoning and content, from the deltas alone."""
    said = {"reasoning": "", "content": ""}
    for event in found:
        if path in (CHAT, TEXT) and event != "[DONE]" and event.get("choices"):
            choice = event["choices"][0]
            said["reasoning"] += choice.get("delta", {}).get("reasoning_content", "")
            said["content"] += choice.get("delta", choice).get("content", choice.get("text", ""))
        elif path == RESPONSES and event["type"].endswith("_text.delta"):
            said["reasoning" if "reasoning" in event["type"] else "content"] += event["delta"]
        elif path == MESSAGES and event["type"] == "content_block_delta":
            said["reasoning"] += event["delta"].get("thinking", "")
            said["content"] += event["delta"].get("text", "")
    return said["reasoning"], said["content"]


@every_dialect
@given(reasoning=some.text(), content=some.text(), cuts=some.lists(some.integers(1, 9)), calls=some.sets(
    some.sampled_from(range(3))))
def test_deltas_in_any_split_concatenate_to_the_plain_reply(path: str, reasoning: str, content: str, cuts: list[int],
                                                           calls: set[int]) -> None:
    done = completion(content, reasoning, [CALLS[at] for at in calls])
    found = events(streamed(path, done, cuts))
    assert heard(path, found) == (("", reasoning + content) if path == TEXT else (reasoning, content))
    if path == RESPONSES:
        final = DIALECTS[path].reply(ask(path, stream=True), done)
        assert found[-1]["response"] == final
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == final["output"]


@every_dialect
def test_text_that_turns_out_to_be_another_is_not_repeated(path: str) -> None:
    for kind, sent in (("content", "Hello"), ("reasoning", "hm")):
        stream = DIALECTS[path].stream(ask(path, stream=True), completion())
        written = stream.start() + stream.text(kind, sent) + stream.finish(completion("Help", "no"))
        assert stream.mismatch and len("".join(heard(path, events(written)))) <= len(sent) + len("Help")
    late = DIALECTS[path].stream(ask(path, stream=True), completion())
    written = late.start() + late.text("content", "yes") + late.finish(completion("yes!", "after all"))
    assert late.mismatch and heard(path, events(written)) == ("", "yes!")


def test_how_replies_end_in_the_words_of_each_dialect() -> None:
    ways = [completion("x", finish=finish, stop_string="END" if finish == "stop_string" else None)
            for finish in ("stop", "length", "stop_string", "tool_calls")]
    said = {path: [dialect.reply(ask(path), done) for done in ways] for path, dialect in DIALECTS.items()}
    assert [reply["choices"][0]["finish_reason"] for reply in said[CHAT]] == ["stop", "length", "stop", "tool_calls"]
    assert [reply["status"] for reply in said[RESPONSES]] == ["completed", "incomplete", "completed", "completed"]
    assert said[RESPONSES][1]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(reply["stop_reason"], reply["stop_sequence"]) for reply in said[MESSAGES]] == [
        ("end_turn", None), ("max_tokens", None), ("stop_sequence", "END"), ("tool_use", None)]
    assert said[CHAT][0]["usage"] == {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    assert b'"usage"' not in streamed(CHAT, completion("x"))
    assert events(streamed(CHAT, completion("x"), stream_options={"include_usage": True}))[-2]["usage"]["prompt_tokens"]


def test_a_custom_tool_is_itself_in_the_prompt_the_stream_and_the_reply() -> None:
    tools = [{"type": "custom", "name": "patch", "description": "Edits.", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: hunk+"}}]
    asked, done = ask(RESPONSES, tools=tools), completion(None, None, [CALLS[1]])
    assert "Edits." in (about := asked.tools[0]["function"]["description"]) and "start: hunk+" in about
    assert asked.overridden == ["tool_grammar"]
    final = DIALECTS[RESPONSES].reply(asked, done)["output"]
    assert [(item["type"], item["call_id"], item["input"]) for item in final] == [
        ("custom_tool_call", "call_2", "*** Begin\n+ä")]
    found = events(streamed(RESPONSES, done, tools=tools))
    ids = {event.get("item_id") or event["item"]["id"] for event in found if "output_index" in event}
    assert ids == {final[0]["id"]} and found[-1]["response"]["output"] == final
    assert [event["delta"] for event in found if event["type"].endswith("input.delta")] == ["*** Begin\n+ä"]
    echo = ask(RESPONSES, input=[*final, {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"}])
    assert echo.messages == [assistant("", "", [CALLS[1] | {"function": {
        "name": "patch", "arguments": '{"input": "*** Begin\\n+ä"}'}}]),
        {"role": "tool", "content": "ok", "tool_call_id": "call_2"}]


def test_tools_in_a_namespace_are_called_by_it() -> None:
    inside = {"type": "function", "name": "close", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "agents", "tools": [inside, {"type": "namespace"}]}, inside]
    asked = ask(RESPONSES, tools=tools)
    assert [tool["function"]["name"] for tool in asked.tools] == ["agents__close", "close"]
    done = completion(None, None, [call(1, "agents__close", {}), call(2, "close", {})])
    final = DIALECTS[RESPONSES].reply(asked, done)
    assert [(item.get("namespace"), item["name"]) for item in final["output"]] == [("agents", "close"), (None, "close")]
    [echo] = ask(RESPONSES, input=final["output"], tools=tools).messages
    assert [sent["function"]["name"] for sent in echo["tool_calls"]] == ["agents__close", "close"]


@pytest.mark.parametrize("name", ["text", "thought, said", "calls", "everything"])
def test_an_echoed_reply_is_the_same_message_in_every_dialect(name: str) -> None:
    """What the SDKs give back when their own objects are sent: the conversation goes on where it was."""
    served, said = Served(REPLIES[name]), REPLIES[name]["message"]
    for echo in (ask(CHAT, messages=[create(CHAT, served).choices[0].message.to_dict()]),
                 ask(RESPONSES, input=[item.to_dict() for item in create(RESPONSES, served).output]),
                 ask(MESSAGES, messages=[create(MESSAGES, served).to_dict()])):
        assert echo.messages == [assistant(said["content"] or "", said["reasoning"], said["tool_calls"])]


# ---- errors


FAULTS = {400: ("BadRequestError",) * 2, 401: ("AuthenticationError",) * 2, 403: ("PermissionDeniedError",) * 2,
          404: ("NotFoundError",) * 2, 409: ("ConflictError",) * 2, 413: ("APIStatusError", "RequestTooLargeError"),
          429: ("RateLimitError",) * 2, 500: ("InternalServerError",) * 2,
          503: ("InternalServerError", "ServiceUnavailableError")}


@every_dialect
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", FAULTS)
def test_errors_are_the_exceptions_of_the_callers_sdk(path: str, stream: bool, status: int) -> None:
    sdk = (openai, anthropic)[path == MESSAGES]
    with pytest.raises(getattr(sdk._exceptions, FAULTS[status][path == MESSAGES]), match="it hurts") as caught:
        create(path, Served(error=ApiError(status, "it hurts", "some_code")), stream=stream)
    assert caught.value.status_code == status
    if sdk is openai:
        assert caught.value.code == "some_code" and caught.value.type.endswith(("_error", "_too_large"))
    else:
        assert caught.value.type == caught.value.body["error"]["type"]


def test_a_prompt_that_is_too_long_is_said_in_the_clients_words() -> None:
    error = ApiError(400, "This model's maximum context length is 40 tokens, but the messages have 55 tokens.",
                     "context_length_exceeded")
    for path in (CHAT, TEXT, RESPONSES):
        with pytest.raises(openai.BadRequestError) as caught:
            create(path, Served(error=error))
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 55 tokens > 40 maximum"):
        create(MESSAGES, Served(error=error))
    unknown = DIALECTS[MESSAGES].error(ApiError(400, "the context length!", "context_length_exceeded"))
    assert unknown["error"] == {"type": "invalid_request_error", "message": "prompt is too long: the context length!"}


@every_dialect
def test_a_stream_that_fails_never_looks_finished(path: str) -> None:
    served = Served(error=ApiError(503, "the engine is gone", "engine_unavailable"), early=False)
    found = events(served.answer(path, orjson.dumps(BODIES[path] | {"stream": True}))[1])
    assert "[DONE]" not in found and heard(path, found) == ("", "so f")
    assert LAST[path] not in [event.get("type") for event in found]
    if path == RESPONSES:  # its clients get an event
        last = list(create(path, served, stream=True))[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert (last.response.error.code, last.response.error.message) == ("engine_unavailable", "the engine is gone")
    else:
        with pytest.raises((openai.APIError, anthropic.APIError), match="the engine is gone"):
            list(create(path, served, stream=True))


# ---- asks


def test_chat_messages_are_what_they_say() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    sent = [{"role": "system", "content": "one"}, {"role": "developer", "content": parts},
            {"role": "user", "content": parts, "name": "u"}, {"role": "system", "content": "late"},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "reasoning_content": "hm",
             "tool_calls": [call(1, "f", "") | {"index": 0}]},
            {"role": "tool", "tool_call_id": "call_1", "content": [parts[0]]}, {"role": "assistant", "tool_calls": []}]
    asked = ask(CHAT, messages=sent)
    assert asked.messages == [
        {"role": "system", "content": "one\n\na\nb"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "u"},
        {"role": "user", "content": "late"}, assistant("", "hm", [call(1, "f", "{}")]),
        {"role": "tool", "content": "a", "tool_call_id": "call_1"}, assistant("")]
    assert asked.overridden == ["system_moved"]
    # Null or empty: one and the same turn of calls.
    both = [{"role": "assistant", "content": text, "tool_calls": [CALLS[0]]} for text in (None, "")]
    assert ask(CHAT, messages=both[:1]).messages == ask(CHAT, messages=both[1:]).messages
    with pytest.raises(ApiError, match=r"messages\[0\].content\[1\].type 'image_url' is not supported"):
        ask(CHAT, messages=[{"role": "user", "content": [parts[0], image]}])


def test_what_claude_code_sends() -> None:
    """System in the middle, thinking blocks, results of several blocks, tools of its own and hosted ones."""
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=81af2;"},
              {"type": "text", "text": "You are Claude.", "cache_control": {"type": "ephemeral"}},
              {"type": "text", "text": "Be brief."}]
    blocks = [{"type": "thinking", "thinking": "let me see", "signature": "s"}, {"type": "text", "text": "I look."},
              {"type": "redacted_thinking", "data": "x"},
              {"type": "tool_use", "id": "call_1", "name": "ls", "input": {}},
              {"type": "tool_use", "id": "call_2", "name": "ls", "input": {"p": "ä"}}]
    two = [{"type": "text", "text": text} for text in "ab"]
    results = [{"type": "tool_result", "tool_use_id": "call_1", "content": two},
               {"type": "text", "text": "now"}, {"type": "text", "text": ""}, {"type": "text", "text": "this"},
               {"type": "tool_result", "tool_use_id": "call_2", "content": "none", "is_error": True}]
    asked = ask(MESSAGES, system=system, stream=True, max_tokens=32000, thinking={"type": "adaptive"}, messages=[
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: none."}, {"role": "assistant", "content": blocks},
        {"role": "user", "content": results}], output_config={"effort": "high"}, stop_sequences=["END"], top_k=5,
        tools=[{"name": "ls", "description": "lists", "input_schema": {"type": "object", "properties": {"p": {}}}},
               {"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "any"},
        context_management={"edits": []}, metadata={"user_id": "u"})
    assert asked.messages == [
        {"role": "system", "content": "You are Claude.\nBe brief."}, {"role": "user", "content": "hi"},
        {"role": "user", "content": "Agents: none."},
        assistant("I look.", "let me see", [call(1, "ls", {}), call(2, "ls", '{"p": "ä"}')]),
        {"role": "tool", "content": "a\nb", "tool_call_id": "call_1"}, {"role": "user", "content": "now\nthis"},
        {"role": "tool", "content": "Error: none", "tool_call_id": "call_2"}]
    assert [tool["function"]["parameters"]["properties"] for tool in asked.tools] == [{"p": {}}]
    assert asked.extra == {"tool_choice": "auto", "reasoning_effort": "high"}
    assert (asked.stream, asked.max_tokens, asked.stop, asked.sampling) == (True, 32000, ["END"], {"top_k": 5})
    assert sorted(asked.overridden) == ["billing_header", "context_management", "redacted_thinking", "system_moved",
                                        "tool_choice", "tool_web_search_20250305"]
    assert ask(MESSAGES, thinking={"type": "disabled"}).extra == {"reasoning_effort": "none"}
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].content\[0\].type 'image'"):
        ask(MESSAGES, messages=[{"role": "user", "content": [results[0] | {"content": [{"type": "image"}]}]}])


def test_what_codex_sends() -> None:
    def said(role: str, *texts: str) -> JSON:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "id": "msg", "role": role, "content": [{"type": kind, "text": one} for one in texts]}

    def did(at: int) -> JSON:
        return {"type": "function_call", "id": f"fc{at}", "call_id": f"call_{at}", "name": "ls", "arguments": "{}"}

    def got(at: int) -> JSON:
        output = [{"type": "input_text", "text": "a"}]
        return {"type": "function_call_output", "call_id": f"call_{at}", "output": output}

    def thought(text: str, key: str = "content") -> JSON:
        return {"type": "reasoning", "id": "rs", "summary": [], key: [{"type": "summary_text", "text": text}]}

    def result(at: int) -> JSON:
        return {"role": "tool", "content": "a", "tool_call_id": f"call_{at}"}
    items = [said("developer", "You are Codex."), said("developer", "Skills.", "Permissions."), said("user", "hi"),
             thought("t1"), said("assistant", "I look."), did(1), did(2), got(1), got(2), thought(""),
             thought("t2", "summary"), did(3), said("assistant", "one"), said("assistant", "two"),
             {"role": "user", "content": "go on"}]
    asked = ask(RESPONSES, input=items, instructions="Base.", store=False, include=["reasoning.encrypted_content"],
                reasoning={"effort": "medium", "summary": "auto"}, text={"verbosity": "low"}, parallel_tool_calls=True,
                tool_choice="auto", prompt_cache_key="k", client_metadata={"a": "b"}, tools=[
                    {"type": "function", "name": "ls", "strict": False, "parameters": {"type": "object"}},
                    *({"type": kind} for kind in ("web_search", "local_shell", "tool_search"))])
    assert asked.messages == [
        {"role": "system", "content": "Base.\n\nYou are Codex.\n\nSkills.\nPermissions."},
        {"role": "user", "content": "hi"}, assistant("I look.", "t1", [call(1, "ls", {}), call(2, "ls", {})]),
        result(1), result(2), assistant("", "t2", [call(3, "ls", {})]), assistant("one"), assistant("two"),
        {"role": "user", "content": "go on"}]
    assert asked.overridden == ["tool_web_search", "tool_local_shell", "tool_tool_search"]
    assert asked.extra == {"tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "medium"}
    for wrong in ({"previous_response_id": "r"}, {"conversation": "c"}, {"background": True}, {"prompt": {"id": "p"}},
                  {"input": [{"type": "item_reference", "id": "x"}]}, {"input": []}, {"input": [{"role": "tool"}]},
                  {"input": [{"type": "compaction"}]}):
        with pytest.raises(ApiError) as caught:
            ask(RESPONSES, **wrong)
        named = "compaction|item_reference|messages|role|" + "|".join(wrong)
        assert caught.value.status == 400 and any(word in caught.value.message for word in named.split("|"))


def test_what_is_wished_for_and_not_followed_is_named() -> None:
    asked = ask(CHAT, tools=[{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {}},
                             {"type": {"a": 1}}], tool_choice={"type": "function", "function": {"name": "f"}},
                response_format={"type": "json_object"}, logit_bias={"1": 2}, logprobs=True, reasoning_effort="huge",
                temperature=0.1, seed=3, stop="END", max_tokens=9, max_completion_tokens=8, parallel_tool_calls=False,
                chat_template_kwargs={"enable_thinking": False})
    assert asked.overridden == ["logit_bias", "logprobs", "tool_custom", "tool_unknown", "tool_choice",
                                "reasoning_effort", "response_format"]
    assert asked.extra == {"tool_choice": "auto", "parallel_tool_calls": False,
                           "chat_template_kwargs": {"enable_thinking": False}}
    assert (asked.sampling, asked.stop, asked.max_tokens) == ({"temperature": 0.1, "seed": 3}, ["END"], 8)
    followed = ask(CHAT, response_format={"type": "text"}, tool_choice="none", logprobs=False, n=1, tools=[])
    assert not followed.overridden and not followed.extra
    assert ask(RESPONSES, text={"format": {"type": "json_schema"}}).overridden == ["response_format"]


@pytest.mark.parametrize("prompt", ["text", [1, 2], ["text"], [[1, 2]]])
def test_completions_take_one_prompt(prompt: Any) -> None:
    assert ask(TEXT, prompt=prompt).prompt in ("text", [1, 2]) and not ask(TEXT, prompt=prompt).messages
    for wrong in ([], [[]], ["a", "b"], [1, "a"], [-1], [True], None, 3, "", [["a"]]):
        with pytest.raises(ApiError, match="prompt"):
            ask(TEXT, prompt=wrong)


@every_dialect
@pytest.mark.parametrize(("name", "value"), [("n", 2), ("n", "1"), ("stream", "yes"), ("temperature", "hot"), (
    "stream_options", [])])
def test_what_is_wrong_is_named_and_one_reply_is_never_two(path: str, name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=name) as caught:
        ask(path, **{name: value})
    assert caught.value.status == 400
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=name):
        create(path, Served(), extra_body={name: value})


# ---- any body


TURNS = some.lists(some.tuples(some.sampled_from(["user", "assistant", "system"]), some.text(min_size=1)), min_size=1)


@given(turns=TURNS)
def test_a_conversation_keeps_its_order_and_its_texts(turns: list[tuple[str, str]]) -> None:
    plain = [{"role": role, "content": text} for role, text in turns]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    leading = [text for _, text in itertools.takewhile(lambda turn: turn[0] == "system", turns)]
    expected = [{"role": "system", "content": "\n\n".join(leading)}] * bool(leading) + [
        {"role": "user" if role == "system" else role, "content": text} for role, text in turns[len(leading):]]
    for messages in (plain, parts):
        for asked in (ask(CHAT, messages=messages), ask(RESPONSES, input=messages), ask(MESSAGES, messages=messages)):
            assert asked.messages == expected
            assert asked.overridden == ["system_moved"] * sum(role == "system" for role, _ in turns[len(leading):])


ATOMS = (some.none() | some.booleans() | some.integers(-(2**63), 2**64 - 1) | some.text(max_size=5)
         | some.floats(allow_nan=False, allow_infinity=False)
         | some.sampled_from(["text", "message", "user", "assistant", "function", "namespace", "tool"]))
KEYS = some.sampled_from(["type", "role", "content", "text", "name", "tools", "function", "input", "call_id", "id"])
ANYTHING = some.recursive(
    ATOMS, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(KEYS, inner), max_leaves=12)
HI = [{"type": "text", "text": "hi"}]
FULL: dict[str, JSON] = {
    CHAT: {"messages": [{"role": "user", "content": HI}, REPLIES["everything"]["message"] | {"role": "assistant"}],
           "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "stop": ["a"],
           "stream_options": {}},
    TEXT: {"prompt": [[1, 2]], "stop": "x", "n": 1},
    RESPONSES: {"instructions": "i", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "input": [
        {"role": "user", "content": HI}, {"type": "reasoning", "summary": HI},
        {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": HI}], "tools": [
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
    MESSAGES: {"system": HI, "thinking": {"type": "enabled", "budget_tokens": 3}, "tool_choice": {"type": "auto"},
               "output_config": {}, "tools": [{"name": "f", "input_schema": {}}], "messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"},
                                          {"type": "tool_use", "id": "i", "name": "n", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": HI}, *HI]}]}}


def broken(value: Any, draw: Any) -> Any:
    """The value, with something else in one of its places."""
    if not value or not isinstance(value, dict | list) or not draw(some.integers(0, 4)):
        return draw(ANYTHING)
    key = draw(some.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    copy = value.copy()
    copy[key] = broken(value[key], draw)
    return copy


@every_dialect
@settings(max_examples=300)
@given(data=some.data())
def test_any_object_is_an_ask_or_a_400(path: str, data: Any) -> None:
    body = broken(FULL[path], data.draw)
    body = orjson.loads(orjson.dumps(body if isinstance(body, dict) else FULL[path] | {"stop": body}))
    try:
        asked = DIALECTS[path].ask(body)
    except ApiError as error:
        assert error.status == 400 and error.message and orjson.dumps(DIALECTS[path].error(error))
    else:
        orjson.dumps([asked.messages, asked.tools, asked.extra, asked.sampling])
        assert asked.messages or asked.prompt
        for done in (REPLIES["everything"], REPLIES["cut"]):  # and whatever was asked can be answered
            orjson.dumps(DIALECTS[path].reply(asked, done))
            assert DIALECTS[path].stream(asked, done).finish(done)
