"""The official clients, sync and async, over every dialect and every error, before the gateway as a process.

Each call is made plain, streamed (events one by one) and, where the SDK has one, through its own streaming helper; all
must say what was sampled, and be logged as it was.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from bench.gateway import make_tokenizer
from scripted_engine import Scripted
from test_gateway import ScriptedEngine, Server

from config import make_key

CHAT, TEXT, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
DIALECTS, HOWS = (CHAT, TEXT, RESPONSES, MESSAGES), ("plain", "events", "helper")
SAYS = {
    "text": "Grüße, 世界 👋\u2028 and more.",
    "thought": "<think>hm, 世</think>yes",
    "calls": 'I look.\n<tool_call>\n{"name": "ls", "arguments": {"path": "ä b"}}\n</tool_call>\n<tool_call>\n'
             '{"name": "now", "arguments": {}}\n</tool_call>'}
SAID = {"text": (SAYS["text"], "", []), "thought": ("yes", "hm, 世", []),
        "calls": ("I look.", "", [("ls", {"path": "ä b"}), ("now", {})])}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
NAMES = ("ls", "now")
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    RESPONSES: [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES],
    MESSAGES: [{"name": name, "input_schema": SCHEMA} for name in NAMES]}
PROMPT = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"


def body(path: str, said: str, **more: Any) -> dict[str, Any]:
    messages, tools = [{"role": "user", "content": said}], {"tools": TOOLS[path]} if said == "calls" else {}
    return {"model": "m"} | tools | {
        CHAT: {"messages": messages}, TEXT: {"prompt": PROMPT % said}, RESPONSES: {"input": said},
        MESSAGES: {"messages": messages, "max_tokens": 900}}[path] | more


class Client:
    """The SDK of a dialect, sync or async behind one face: what it gives is awaited where it must be."""

    def __init__(self, url: str, path: str, sync: bool, key: str, **settings: Any) -> None:
        library = anthropic if path == MESSAGES else openai
        http = (library.DefaultHttpxClient if sync else library.DefaultAsyncHttpxClient)(trust_env=False)
        self.path, self.sync = path, sync
        settings = {"api_key": key, "http_client": http, "max_retries": 0, "timeout": 30} | settings
        make = getattr(library, "Async" * (not sync) + {anthropic: "Anthropic", openai: "OpenAI"}[library])
        self.sdk = make(base_url=url + "/v1" * (library is openai), **settings)
        self.resource = self.sdk.chat.completions if path == CHAT else getattr(self.sdk, path)

    def run(self, do: Callable[[], Any]) -> Any:
        async def whole() -> Any:
            async with self.sdk:
                return await do()
        return do() if self.sync else asyncio.run(whole())

    def ask(self, how: str, **sent: Any) -> Any:
        """The reply; for "events" the list of them."""
        last = {CHAT: "get_final_completion", RESPONSES: "get_final_response", MESSAGES: "get_final_message"}

        async def events() -> list[Any]:
            return [event async for event in await self.resource.create(stream=True, **sent)]

        async def helper() -> Any:
            async with self.resource.stream(**sent) as stream:
                return await getattr(stream, last[self.path])()

        def helper_sync() -> Any:
            with self.resource.stream(**sent) as stream:
                return getattr(stream, last[self.path])()
        return self.run({
            "plain": lambda: self.resource.create(**sent), "helper": helper_sync if self.sync else helper,
            "events": (lambda: list(self.resource.create(stream=True, **sent))) if self.sync else events}[how])


def meant(path: str, reply: Any) -> tuple[str, str, list, str, int, int]:
    """Text, reasoning, tool calls, reason of the end, prompt and sampled tokens of a whole reply."""
    if path in (CHAT, TEXT):
        choice, usage = reply.choices[0], reply.usage
        if path == TEXT:
            return choice.text, "", [], choice.finish_reason, usage.prompt_tokens, usage.completion_tokens
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        reasoning = getattr(choice.message, "reasoning_content", None) or ""
        said = choice.message.content or "", reasoning, calls, choice.finish_reason
        return *said, usage.prompt_tokens, usage.completion_tokens
    tokens = reply.usage.input_tokens, reply.usage.output_tokens
    if path == MESSAGES:
        blocks = reply.content
        return ("".join(block.text for block in blocks if block.type == "text"),
                "".join(block.thinking for block in blocks if block.type == "thinking"),
                [(block.name, block.input) for block in blocks if block.type == "tool_use"], reply.stop_reason, *tokens)
    reasoning = "".join(part.text for item in reply.output if item.type == "reasoning" for part in item.content or ())
    calls = [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]
    return reply.output_text, reasoning, calls, reply.status, *tokens


def joined(path: str, events: list[Any]) -> tuple[str, str, list, str]:
    """The same of single events, from their deltas."""
    if path == TEXT:
        return "".join(event.choices[0].text for event in events), "", [], events[-1].choices[0].finish_reason
    if path == CHAT:
        deltas = [event.choices[0].delta for event in events]
        calls: dict[int, list[str]] = {}
        for part in (part for delta in deltas for part in delta.tool_calls or ()):
            call = calls.setdefault(part.index, ["", ""])
            call[0], call[1] = call[0] + (part.function.name or ""), call[1] + (part.function.arguments or "")
        return ("".join(delta.content or "" for delta in deltas),
                "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
                [tuple(calls[index]) for index in sorted(calls)], events[-1].choices[0].finish_reason)
    if path == RESPONSES:
        said = {kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
                for kind in ("output_text", "reasoning_text", "function_call_arguments")}
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = meant(path, events[-1].response)
        assert final[:2] == (said["output_text"], said["reasoning_text"])
        assert "".join(arguments for _, arguments in final[2]) == said["function_call_arguments"]
        return final[:4]
    blocks: dict[int, list[str]] = {}
    for event in events:
        if event.type == "content_block_start":
            blocks[event.index] = [event.content_block.type, getattr(event.content_block, "name", ""), ""]
        elif event.type == "content_block_delta":
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            if event.delta.type != "signature_delta":
                blocks[event.index][2] += getattr(event.delta, field[event.delta.type])
    assert events[-1].type == "message_stop"
    return ("".join(text for kind, _, text in blocks.values() if kind == "text"),
            "".join(text for kind, _, text in blocks.values() if kind == "thinking"),
            [(name, text) for kind, name, text in blocks.values() if kind == "tool_use"], events[-2].delta.stop_reason)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    directory = tmp_path_factory.mktemp("sdk")

    def say(prompt: str) -> str:
        return next(text for name, text in SAYS.items() if prompt.rpartition("user\n")[2].startswith(name))
    with Scripted(directory, say) as engine:
        server = Server(directory, engine.url, "--max-body", "200000", "--max-open-calls", "4", "--keepalive", "0.2",
                        "--tokenizer", str(directory), process=True)
        yield SimpleNamespace(server=server, engine=engine)
        server.kill()


every_client = pytest.mark.parametrize(("path", "sync"), [(path, sync) for path in DIALECTS for sync in (True, False)])
ENDS = {CHAT: ("stop", "tool_calls", "length"), TEXT: ("stop", "stop", "length"),
        RESPONSES: ("completed", "completed", "incomplete"), MESSAGES: ("end_turn", "tool_use", "max_tokens")}
LIMIT = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}


def exists(path: str, how: str, said: str) -> bool:
    if path == TEXT:
        return how != "helper" and said in ("text", "cut")
    return (how, said) != ("helper", "cut") or path == MESSAGES  # openai's helpers raise for a reply that was cut


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(("path", "how", "said"), [
    (path, how, said) for path in DIALECTS for how in HOWS for said in [*SAYS, "cut"] if exists(path, how, said)])
def test_every_reply(site: Any, path: str, how: str, said: str, sync: bool) -> None:
    rollout, = site.server.run(f"{path.replace('/', '_')}.{sync}.{how}.{said}")
    before, more = len(site.engine.engine.sampled), {LIMIT.get(path, "max_tokens"): 2} if said == "cut" else {}
    if (how, path) == ("helper", CHAT):
        more["stream_options"] = {"include_usage": True}
    reply = Client(site.server.url, path, sync, rollout["agent_key"]).ask(
        how, **body(path, said if said in SAYS else "text", **more))
    text, reasoning, calls, end, *tokens = joined(path, reply) if how == "events" else meant(path, reply)
    turn, = site.server.turns(rollout["id"])
    sampled = site.engine.engine.sampled[before:]
    assert turn["response_ids"] == [token for _, token, _ in sampled] and turn["status"] == "delivered"
    assert turn["logprobs"] == [logprob for logprob, _, _ in sampled]
    assert not tokens or tokens == [len(turn["prompt_ids"]), len(sampled)]
    calls = [(name, json.loads(given) if isinstance(given, str) else given) for name, given in calls]
    if said == "cut":
        assert end == ENDS[path][2] and len(sampled) == 2 and SAYS["text"].startswith(text.rstrip("\ufffd")) and text
    else:
        assert (text, reasoning, calls) == SAID[said] and end == ENDS[path][said == "calls"]


@every_client
@pytest.mark.parametrize("how", ["plain", "events"])
@pytest.mark.parametrize(("fault", "status", "kind"), [
    ("context", 400, "BadRequestError"), ("body", 400, "BadRequestError"), ("key", 401, "AuthenticationError"),
    ("scope", 403, "PermissionDeniedError"), ("route", 404, "NotFoundError"), ("size", 413, ""),
    ("busy", 429, "RateLimitError"), ("paused", 503, "InternalServerError")])
def test_every_error(site: Any, path: str, sync: bool, how: str, fault: str, status: int, kind: str) -> None:
    server, library = site.server, anthropic if path == MESSAGES else openai
    group, limit = f"{path.replace('/', '_')}.{sync}.{how}.{fault}", 5 if fault == "context" else None
    rollout, = server.run(group, context_limit=limit)
    key = {"key": rollout["agent_key"][:-1] + "x", "scope": make_key(server.secret, "admin")}.get(
        fault, rollout["agent_key"])
    wrong = {name: "many" for name in ("max_tokens", "max_output_tokens")}
    client, sent = Client(server.url, path, sync, key), body(path, "text", extra_body=wrong if fault == "body" else {})
    route = client.resource.retrieve if path == RESPONSES else (
        client.resource.batches if path == MESSAGES else client.sdk.models).retrieve
    if fault == "size":
        sent["model"] = "m" * 300_000
    with ThreadPoolExecutor(5) as pool:
        if fault in ("busy", "paused"):
            server.post("/pause", lease=60 if fault == "busy" else 0)
        held = [pool.submit(Client(server.url, path, True, key).ask, how, **sent) for _ in range(4 * (fault == "busy"))]
        server.wait(held=len(held))
        try:
            with pytest.raises(getattr(library, kind or "APIStatusError")) as raised:
                client.run(lambda: route("x")) if fault == "route" else client.ask(how, **sent)
            late = held and pool.submit(Client(server.url, path, sync, key, max_retries=3).ask, how, **sent)
            time.sleep(0.3 if held else 0)
        finally:
            server.post("/resume", version=0)
        assert late == [] or late.result() and all(job.result() for job in held)
    error = raised.value
    assert error.status_code == status and ("retry-after" in error.response.headers) == (status in (429, 503))
    assert len(server.turns(rollout["id"])) == (5 if held else 0)
    if path == MESSAGES:
        names = {"context": "invalid_request_error", "body": "invalid_request_error", "key": "authentication_error",
                 "scope": "permission_error", "route": "not_found_error", "size": "request_too_large",
                 "busy": "rate_limit_error", "paused": "overloaded_error"}
        assert error.body["type"] == "error" and error.body["error"]["type"] == names[fault] == error.type
        assert fault != "context" or "prompt is too long" in error.message
    else:
        assert error.code == {"context": "context_length_exceeded", "key": "invalid_api_key"}.get(fault, error.code)


@every_client
def test_a_stream_that_breaks_is_an_error(tmp_path: Path, path: str, sync: bool) -> None:
    engine = ScriptedEngine()
    engine.length, engine.delay, engine.faults = 8, 0.02, ["cut", *[500] * 1000]
    make_tokenizer(tmp_path)
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", "--engine-retry", "0.3", "--tokenizer", str(tmp_path),
                    process=True)
    try:
        rollout, = server.run("g")
        client, got = Client(server.url, path, sync, rollout["agent_key"]), []
        sent = body(path, "hi", **{"prompt": [1001]} if path == TEXT else {})

        def read() -> None:
            for event in client.resource.create(stream=True, **sent):
                got.append(event)

        async def read_async() -> None:
            async for event in await client.resource.create(stream=True, **sent):
                got.append(event)
        if path == RESPONSES:  # its error is an event like others
            client.run(read if sync else read_async)
            failed = got[-1].response
            assert got[-1].type == "response.failed" and failed.error.code and failed.status == "failed"
        else:
            with pytest.raises(anthropic.APIError if path == MESSAGES else openai.APIError, match="kept failing"):
                client.run(read if sync else read_async)
        assert got
        turn, = server.turns("g.0")
        assert turn["status"] == "error" and len(turn["response_ids"]) == 2 and not turn["delivered"]
    finally:
        server.kill()
        engine.stop()


@pytest.mark.parametrize("sync", [True, False])
def test_models_and_count_tokens(site: Any, sync: bool) -> None:
    rollout, = site.server.run(f"models.{sync}")
    for path in (CHAT, MESSAGES):
        client = Client(site.server.url, path, sync, rollout["agent_key"])

        async def models() -> list[str]:
            return [model.id async for model in client.sdk.models.list()]
        listed = client.run((lambda: [model.id for model in client.sdk.models.list()]) if sync else models)
        assert listed == ["scripted"]
    sent = body(MESSAGES, "calls", system="Be brief.")
    reply = Client(site.server.url, MESSAGES, sync, rollout["agent_key"]).ask("plain", **sent)
    client = Client(site.server.url, MESSAGES, sync, rollout["agent_key"])
    del sent["max_tokens"]
    counted = client.run(lambda: client.sdk.messages.count_tokens(**sent))
    assert counted.input_tokens == reply.usage.input_tokens == len(site.server.turns(rollout["id"])[0]["prompt_ids"])
