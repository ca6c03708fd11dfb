"""The gateway as a process, on its real log, before a scripted engine. Before real engines: test_gateway_vllm.

The engine below is not the thing under test: it renders and samples ids by a rule, so that every id can be checked.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from hypothesis import given, settings, strategies
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import calls
import gateway
import trajectory
from config import make_key, read_secret

ROOT = Path(__file__).resolve().parent.parent
EOS = 2


class ScriptedEngine:
    """Renders one id per character, samples prompt_length, prompt_length + 1, ... up to `length`, then EOS."""

    def __init__(self, port: int = 0) -> None:
        self.length, self.delay, self.version, self.seen, self.faults = 3, 0.0, "0", [], []
        self.aborted, self.context, self.running, self.sampled, self.tools = threading.Event(), 4096, 0, 0, None
        self.asleep, self.slipped = False, []  # paths that were asked for while asleep
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions/render", self.render, methods=["POST"]),
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/chat/completions/derender", self.derender, methods=["POST"]),
        ]
        app = Starlette(routes=routes)

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            if self.asleep:
                self.slipped.append(scope["path"])
                raise RuntimeError("asked while asleep")
            await app(scope, receive, send)

        self.server = uvicorn.Server(uvicorn.Config(guarded, port=port, log_level="critical", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self.aborted.set()
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": self.context}]})

    async def render(self, request: Request) -> JSONResponse:
        text = "".join(
            f"{m['role'][0]}:{m.get('content') or ''}{json.dumps(m['tool_calls']) if m.get('tool_calls') else ''};"
            for m in (await request.json())["messages"]
        )
        return JSONResponse({"token_ids": [1000 + ord(c) for c in text], "sampling_params": {"stop_token_ids": [EOS]}})

    async def generate(self, request: Request) -> Any:
        body = await request.json()
        self.seen.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if fault in (500, 400):
            return JSONResponse({"error": {"message": f"scripted {fault}"}}, fault)
        start = len(body["token_ids"])
        kept = next(
            i for i, token in enumerate(reversed(body["token_ids"])) if token >= 1000
        )  # ids that we sampled before
        end = min(self.length, kept + body["sampling_params"]["max_tokens"])

        async def sample() -> Any:
            self.running += 1
            try:
                for i in range(kept, end):
                    for _ in range(int(self.delay / 0.01)):
                        await asyncio.sleep(0.01)
                        if self.aborted.is_set():
                            yield [], "abort"
                        if self.aborted.is_set() or await request.is_disconnected():
                            return
                    self.sampled += 1
                    yield [EOS if i == self.length - 1 else start + i - kept], (
                        "stop" if i == self.length - 1 else "length" if i == end - 1 else None
                    )
            finally:
                self.running -= 1

        def choice(ids: list[int], finish: str | None, spans: bool = True) -> dict:
            return {
                "choices": [
                    {
                        "index": 0,
                        "token_ids": ids,
                        "finish_reason": finish,
                        "logprobs": {"content": [{"token_id": i, "logprob": -i / 1000} for i in ids]},
                        "weight_versions": [{"version": self.version, "start": 0, "end": 10**6}] if spans else None,
                    }
                ]
            }

        if body["stream"]:

            async def events() -> Any:
                at = 0
                async for ids, finish in sample():
                    if fault == "cut" and at == 2:
                        raise ConnectionError("scripted")
                    at += 1
                    yield f"data: {json.dumps(choice(ids, finish, finish is not None))}\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        every = [part async for part in sample()]
        return JSONResponse(choice([i for ids, _ in every for i in ids], every[-1][1] if every else "abort"))

    async def derender(self, request: Request) -> JSONResponse:
        body = await request.json()
        ids = body["generate_response"]["choices"][0]["token_ids"]
        message = {"role": "assistant", "content": " ".join(map(str, ids)), "tool_calls": []}
        if self.tools and body["chat_request"].get("tools"):
            message = {"role": "assistant", "content": None, "tool_calls": self.tools}
        return JSONResponse({"choices": [{"index": 0, "message": message}]})


class Server:
    """A gateway before `engine_url`, and an admin client: a process that can be killed and started again, or (faster) a
    thread of this one."""

    def __init__(self, run_dir: Path, engine_url: str, *flags: str, process: bool = False, **settings: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.run_dir, self.url, self.process, self.thread = run_dir, f"http://127.0.0.1:{self.port}", None, None
        self.command = [
            sys.executable,
            str(ROOT / "gateway.py"),
            "--run-dir",
            str(run_dir),
            "--engine-url",
            engine_url,
            "--port",
            str(self.port),
            "--engine-retry",
            "5",
            *flags,
        ]
        if process:
            self.start()
        else:
            self.thread = threading.Thread(
                target=self.serve,
                args=(gateway.GatewaySettings(run_dir, engine_url, **{"engine_retry": 5, **settings}),),
            )
            self.thread.start()
            self.wait_until_up()
        self.secret = read_secret(run_dir / "secret")
        self.admin = self.client(make_key(self.secret, "admin"))

    def serve(self, settings: gateway.GatewaySettings) -> None:
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(gateway.create_app(settings), port=self.port, log_level="critical")
        )
        self.uvicorn.run()

    def start(self) -> None:
        dead_end = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY")}
        with open(self.run_dir / "stderr", "ab") as stderr:
            self.process = subprocess.Popen(self.command, stderr=stderr, env=os.environ | dead_end)
        self.wait_until_up()

    def wait_until_up(self) -> None:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError("the gateway does not start")

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
        else:
            self.uvicorn.should_exit = self.uvicorn.force_exit = True
            self.thread.join()

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False)

    def post(self, path: str, expect: int = 200, **body: Any) -> dict:
        reply = self.admin.post(path, json=body)
        assert reply.status_code == expect, reply.text
        return reply.json()

    def get(self, path: str, **query: Any) -> dict:
        reply = self.admin.get(path, params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def turns(self, rollout: str) -> list[dict]:
        return self.get(f"/rollouts/{rollout}/turns")["turns"]

    def run(self, group: str, n: int = 1, **settings: Any) -> list[dict]:
        """Creates a group and claims it."""
        self.post("/rollouts", group=group, n=n, task={"id": group, "agent": {}, "verifier": {"answer": 1}}, **settings)
        return self.post("/claim", controller="test", max=n)["rollouts"]

    def wait(self, **wanted: Any) -> dict:
        for _ in range(500):
            if (state := self.get("/state")).items() >= wanted.items():
                return state
            time.sleep(0.02)
        raise AssertionError(f"{wanted} never came: {state}")


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.stop()


@pytest.fixture
def server(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Server]:
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", grace=0.3)
    yield server
    server.kill()


@pytest.fixture
def process(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Server]:
    """With proxy variables that lead nowhere."""
    server = Server(
        tmp_path, f"http://127.0.0.1:{engine.port}", "--max-body", "10000", "--max-open-calls", "16", process=True
    )
    yield server
    server.kill()


HTTP = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None))  # one for all: making one costs 0.1 s


def sdk(server: Server, key: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=HTTP, **{"max_retries": 0, **settings})


def ask(client: openai.OpenAI, *messages: Any, **settings: Any) -> Any:
    messages = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages or ("hi",)]
    return client.chat.completions.create(model="any-name", messages=messages, **settings)


# ---- model calls


def test_a_call_is_logged_token_for_token(server: Server, engine: ScriptedEngine) -> None:
    engine.version = "7"
    (rollout,) = server.run("g", sampling={"temperature": 0.5, "max_tokens": 50})
    reply = ask(sdk(server, rollout["agent_key"]))
    assert reply.choices[0].message.content == "5 6" and reply.choices[0].finish_reason == "stop"
    assert reply.model == "any-name" and reply.usage.prompt_tokens == 5 and reply.usage.completion_tokens == 3
    (turn,) = server.turns("g.0")
    assert turn["prompt_ids"] == [1000 + ord(c) for c in "u:hi;"] and turn["response_ids"] == [5, 6, EOS]
    assert turn["logprobs"] == [-0.005, -0.006, -0.002] and turn["versions"] == [7, 7, 7]
    assert turn["messages"] == [{"role": "user", "content": "hi"}] and turn["message"]["content"] == "5 6"
    assert turn["delivered"] and turn["finish_reason"] == "stop" and turn["index"] == 0
    sent = engine.seen[0]["sampling_params"]
    assert sent["temperature"] == 0.5 and sent["max_tokens"] == 50 and sent["top_k"] == -1 and sent["logprobs"] == 0
    assert sent["stop_token_ids"] == [EOS] and "seed" not in sent
    record = server.get("/rollouts/g.0")
    assert (record["calls"], record["turns"], record["sampled_tokens"]) == (1, 1, 3)


@pytest.mark.parametrize("tools", [False, True])
def test_stream_ends_in_done_and_concatenates_to_the_reply(server: Server, engine: ScriptedEngine, tools: bool) -> None:
    engine.tools = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for i in "ab"
    ]
    (rollout,) = server.run("g")
    settings = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]} if tools else {}
    chunks = list(
        ask(sdk(server, rollout["agent_key"]), stream=True, stream_options={"include_usage": True}, **settings)
    )
    assert chunks[-1].usage.completion_tokens == 3 and not chunks[-1].choices and len({c.id for c in chunks}) == 1
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == ("tool_calls" if tools else "stop")
    assert "".join(d.delta.content or "" for d in deltas) == ("" if tools else "5 6")
    calls = [call for d in deltas for call in d.delta.tool_calls or ()]
    assert [(c.index, c.id, c.function.arguments) for c in calls] == [
        (i, f"call_{x}", '{"a": 1}') for i, x in enumerate("ab")
    ][: 2 * tools]
    (turn,) = server.turns("g.0")
    assert (
        turn["response_ids"] == [5, 6, EOS]
        and turn["logprobs"] == [-0.005, -0.006, -0.002]
        and engine.seen[0]["stream"]
    )
    assert turn["tools"] == settings.get("tools")
    request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    raw = server.client(rollout["agent_key"]).post("/v1/chat/completions", json=request)
    assert raw.headers["content-type"].startswith("text/event-stream") and raw.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_is_durable_before_its_last_byte(process: Server, stream: bool) -> None:
    (rollout,) = process.run("g")
    reply = ask(sdk(process, rollout["agent_key"]), stream=stream)
    if stream:
        list(reply)
    process.kill()
    process.start()
    assert [turn["response_ids"] for turn in process.turns("g.0")] == [[5, 6, EOS]]
    ask(sdk(process, rollout["agent_key"]), "more")  # the rollout runs on, with the same key
    assert process.get("/state")["running"] == 1 and len(process.turns("g.0")) == 2


def test_kill_9_under_load_loses_nothing_acknowledged(process: Server) -> None:
    rollouts, got = process.run("g", n=8), {}

    def harness(rollout: dict) -> None:
        client, said = sdk(process, rollout["agent_key"], max_retries=8), got.setdefault(rollout["id"], [])
        for i in range(12):
            said.append(ask(client, f"{rollout['id']} {i}").choices[0].message.content)

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(harness, rollout) for rollout in rollouts]
        for _ in range(3):
            time.sleep(0.25)
            process.kill()
            process.start()
        for job in jobs:
            job.result()
    for rollout in rollouts:
        logged = [turn["message"]["content"] for turn in process.turns(rollout["id"]) if turn["message"]]
        assert len(got[rollout["id"]]) == 12 and len(logged) >= 12  # a reply lost on its way was asked for again
        asked = {turn["messages"][0]["content"] for turn in process.turns(rollout["id"])}
        assert asked == {f"{rollout['id']} {i}" for i in range(12)}


def test_parallel_identical_calls_are_samples_of_their_own(server: Server, engine: ScriptedEngine) -> None:
    (rollout,) = server.run("g", sampling={"seed": 5})
    with ThreadPoolExecutor(4) as pool:
        ids = {job.result().id for job in [pool.submit(ask, sdk(server, rollout["agent_key"])) for _ in range(4)]}
    assert len(ids) == 4 and [turn["index"] for turn in server.turns("g.0")] == [0, 1, 2, 3]
    assert len({body["sampling_params"]["seed"] for body in engine.seen}) == 4


def test_what_would_falsify_logprobs_is_overridden_and_counted(server: Server, engine: ScriptedEngine) -> None:
    (rollout,) = server.run("g", sampling={"temperature": 0.7, "max_tokens": 20})
    ask(
        sdk(server, rollout["agent_key"]),
        temperature=0.7,
        top_p=0.3,
        seed=4,
        max_tokens=9,
        frequency_penalty=1,
        tool_choice="required",
        response_format={"type": "json_object"},
        logprobs=True,
    )
    sent = engine.seen[0]["sampling_params"]
    assert sent["top_p"] == 1.0 and sent["frequency_penalty"] == 0.0 and sent["max_tokens"] == 9 and "seed" not in sent
    counts = server.get("/state")["counts"]
    names = ("top_p", "seed", "frequency_penalty", "tool_choice", "response_format", "logprobs")
    assert {name: counts.get(f"override_{name}") for name in names} == dict.fromkeys(names, 1)
    assert "override_temperature" not in counts  # the harness asked for what it got
    ask(sdk(server, rollout["agent_key"]), temperature=0)
    assert (
        server.get("/state")["counts"]["override_temperature"] == 1
        and engine.seen[1]["sampling_params"]["temperature"] == 0.7
    )


def test_context_overflow_is_the_dialects_own_400_and_truncates(server: Server, engine: ScriptedEngine) -> None:
    (rollout,) = server.run("g", context_limit=20)
    client = sdk(server, rollout["agent_key"], max_retries=3)
    ask(client), ask(client, "hello")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 20 tokens") as error:
        ask(client, "x" * 30)
    assert error.value.code == "context_length_exceeded" and error.value.type == "invalid_request_error"
    assert server.get("/rollouts/g.0")["truncated"] and len(engine.seen) == 2 and len(server.turns("g.0")) == 2
    server.post("/rollouts/g.0/reward", reward=1.0)
    server.post("/rollouts/g.0/report", attempt=1, status="succeeded")
    (record,) = server.get("/finished", after=0)["rollouts"]
    assert record["truncated"] and record["reward"] == 1.0 and record["turns"] == 2 and record["calls"] == 3


def test_max_tokens_is_clamped_to_the_context_left(server: Server, engine: ScriptedEngine) -> None:
    engine.length = 10
    (rollout,) = server.run("g", context_limit=9)
    reply = ask(sdk(server, rollout["agent_key"]), max_tokens=100)
    assert reply.choices[0].finish_reason == "length" and server.turns("g.0")[0]["response_ids"] == [5, 6, 7, 8]
    assert server.get("/rollouts/g.0")["truncated"] and engine.seen[0]["sampling_params"]["max_tokens"] == 4


def test_tool_call_cut_by_length_is_a_valid_reply(server: Server, engine: ScriptedEngine) -> None:
    engine.tools = [{"id": "c", "type": "function", "function": {"name": "sh", "arguments": '{"cmd":"ls'}}]
    (rollout,) = server.run("g")
    reply = ask(
        sdk(server, rollout["agent_key"]), max_tokens=2, tools=[{"type": "function", "function": {"name": "sh"}}]
    )
    assert (
        reply.choices[0].finish_reason == "length"
        and reply.choices[0].message.tool_calls[0].function.arguments == '{"cmd":"ls'
    )
    assert server.turns("g.0")[0]["response_ids"] == [5, 6]


@pytest.mark.parametrize("echo", ["", None])
def test_empty_and_null_content_are_one_row(server: Server, engine: ScriptedEngine, echo: str | None) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (rollout,) = server.run("g")
    first = {"role": "assistant", "content": echo, "tool_calls": [call]}
    client = sdk(server, rollout["agent_key"])
    ask(client, "hi", first)
    ask(client, "hi", first, {"role": "tool", "tool_call_id": "c", "content": "ok"})
    turns = server.turns("g.0")
    prompt = turns[0]["prompt_ids"]
    assert turns[1]["prompt_ids"][: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "send parallel requests"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image_url",
        ),
        ({"messages": []}, "no messages"),
        ({}, "no messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": True}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": "x"}], "stream_options": 5}, "stream_options"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not a valid JSON object"),
        (b'{"messages": [', "not a valid JSON object"),
        (b"\xff\xfe", "not a valid JSON object"),
        (b"[1]", "JSON object"),
        (b"", "not a valid JSON object"),
        (b'{"a": NaN}', "not a valid JSON object"),
        (b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}", "must be an object"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", '
            b'"parameters": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}}]}",
            "not a valid JSON object",
        ),
    ],
)
def test_bad_requests_are_clear(shared: Server, body: Any, says: str) -> None:
    reply = shared.client(shared.key).post(
        "/v1/chat/completions", content=body if isinstance(body, bytes) else json.dumps(body)
    )
    assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_limits(process: Server, engine: ScriptedEngine) -> None:
    engine.delay = 0.5
    (rollout,) = process.run("g")
    with pytest.raises(openai.APIStatusError) as error:
        ask(sdk(process, rollout["agent_key"]), "x" * 20000)
    assert error.value.status_code == 413
    chunked = process.client(rollout["agent_key"]).post("/v1/chat/completions", content=iter([b"x" * 6000] * 2))
    assert chunked.status_code == 413
    with ThreadPoolExecutor(20) as pool:
        jobs = [pool.submit(ask, client) for client in [sdk(process, rollout["agent_key"]) for _ in range(20)]]
        errors = [job.exception() for job in jobs]
    assert sorted(getattr(error, "status_code", 200) for error in errors) == [200] * 16 + [429] * 4
    assert all(error.response.headers["retry-after"] for error in errors if error)
    ask(sdk(process, rollout["agent_key"]))  # the places are free again


def test_odd_text_is_kept_as_it_is(server: Server) -> None:
    (rollout,) = server.run("g")
    text = "nul \0 line\u2028separator \U0001f600 \r\n"
    ask(sdk(server, rollout["agent_key"]), text)
    assert server.turns("g.0")[0]["messages"] == [{"role": "user", "content": text}]


def test_a_client_that_leaves_frees_the_engine_and_its_ids_are_kept(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 1000, 0.05
    (rollout,) = server.run("g")
    with pytest.raises(openai.APITimeoutError):
        ask(sdk(server, rollout["agent_key"], timeout=0.7))
    server.wait(in_flight=0)
    (turn,) = server.turns("g.0")
    assert turn["status"] == "aborted" and not turn["delivered"] and 1 <= len(turn["response_ids"]) < 20
    time.sleep(0.3)
    assert not engine.running


def test_calls_end_with_their_agent(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 1000, 0.05
    (rollout,) = server.run("g")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask, sdk(server, rollout["agent_key"]))
        server.wait(in_flight=1)
        time.sleep(0.3)
        server.post("/rollouts/g.0/agent_done", attempt=1, exit_status=-9, reason="timed out", output="x" * 10000)
        assert [turn["status"] for turn in server.turns("g.0")] == ["aborted"]  # logged before the answer
        assert isinstance(job.exception(), openai.AuthenticationError)


# ---- the engine's trouble, and holds


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_generation_goes_on_after_the_resume(server: Server, engine: ScriptedEngine, stream: bool) -> None:
    engine.length, engine.delay, engine.version = 12, 0.2, "1"
    (rollout,) = server.run("g", sampling={"max_tokens": 12})
    server.post("/resume", version=1)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            lambda: (
                list(ask(sdk(server, rollout["agent_key"]), stream=True))
                if stream
                else ask(sdk(server, rollout["agent_key"]))
            )
        )
        while engine.sampled < 4:
            time.sleep(0.01)
        assert server.post("/pause", lease=30)["in_flight"] == 1
        engine.aborted.set()
        server.wait(in_flight=0, held=1, paused=True)
        engine.aborted.clear()
        engine.version = "2"
        assert not job.done() and not server.turns("g.0")
        server.post("/resume", version=2)
        job.result(10)
    (turn,) = server.turns("g.0")
    assert (
        turn["response_ids"] == [*range(5, 16), EOS] and turn["finish_reason"] == "stop" and len(turn["logprobs"]) == 12
    )
    first, second = engine.seen
    kept = len(second["token_ids"]) - len(first["token_ids"])
    assert 0 < kept < 12 and second["token_ids"] == turn["prompt_ids"] + turn["response_ids"][:kept]
    assert second["sampling_params"]["max_tokens"] == 12 - kept
    assert turn["versions"] == [1] * kept + [2] * (12 - kept)


def test_200_held_calls_and_pause_still_answers(server: Server) -> None:
    rollouts = server.run("g", n=50)
    server.post("/pause", lease=600)
    with ThreadPoolExecutor(200) as pool:
        jobs = [pool.submit(ask, sdk(server, rollout["agent_key"])) for rollout in rollouts for _ in range(4)]
        server.wait(held=200, in_flight=0)
        for path in ("/pause", "/lease"):
            start = time.monotonic()
            server.post(path, lease=600)
            server.get("/state")
            assert time.monotonic() - start < 1
        time.sleep(0.5)
        held = server.get("/state")["held_seconds"]
        assert held > 0.5
        server.post("/resume", version=3)
        assert all(job.result(30).choices[0].message.content == "5 6" for job in jobs)
    after = server.get("/state")
    assert after["held_seconds"] < held + 1 and after["version"] == 3 and after["held"] == 0


def test_a_hold_survives_the_gateway_and_its_lease_ends(process: Server) -> None:
    (rollout,) = process.run("g")
    process.post("/resume", version=4)
    process.post("/lease", expect=409, lease=1)
    process.post("/pause", lease=2)
    process.kill()
    process.start()
    assert process.get("/state").items() >= {"paused": True, "version": 4, "running": 1}.items()
    with pytest.raises(openai.InternalServerError) as error:
        ask(sdk(process, rollout["agent_key"]))  # held for what is left of the lease
    assert error.value.status_code == 503 and error.value.response.headers["retry-after"]
    held = process.get("/state")["held_seconds"]
    assert 1.9 < held < 2.1  # an expired lease holds nothing
    process.post("/lease", lease=30)
    process.wait(held=0, paused=True)
    process.post("/resume", version=5)
    ask(sdk(process, rollout["agent_key"]))
    process.post("/rollouts/g.0/agent_done", attempt=1, exit_status=1, reason="", output="")
    assert process.post("/rollouts/g.0/report", attempt=1, status="failed", reason="exit 1")["status"] == "queued"


def test_a_request_that_hangs_in_a_paused_engine_is_taken_back(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 1, 60
    (rollout,) = server.run("g")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(ask, sdk(server, rollout["agent_key"]))
        server.wait(in_flight=1)
        time.sleep(0.2)
        server.post("/pause", lease=60)
        server.wait(in_flight=0, held=1)
        engine.delay = 0
        server.post("/resume", version=1)
        job.result(10)
    assert len(server.turns("g.0")) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_waited_for(server: Server, engine: ScriptedEngine, stream: bool) -> None:
    (rollout,) = server.run("g")
    ask(sdk(server, rollout["agent_key"]), stream=stream)
    engine.stop()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(lambda: list(ask(sdk(server, rollout["agent_key"]), "again", stream=stream)))
        time.sleep(0.5)
        assert not job.done()
        engine.__init__(engine.port)
        job.result(10)
    assert server.turns("g.0")[-1]["status"] == "delivered"


def test_a_cut_stream_keeps_its_ids_and_goes_on(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.faults = 6, ["cut"]
    (rollout,) = server.run("g", sampling={"max_tokens": 6})
    ask(sdk(server, rollout["agent_key"]), stream=True).close()
    list(ask(sdk(server, rollout["agent_key"]), "two", stream=True))
    turn = server.turns("g.0")[-1]
    assert turn["response_ids"][-1] == EOS and len(turn["response_ids"]) == 6 and turn["status"] == "delivered"


def test_an_engine_that_stays_away_makes_the_rollout_lost_not_failed(server: Server, engine: ScriptedEngine) -> None:
    rollout, other = server.run("g", n=2, max_attempts=2)
    engine.faults = [500] * 1000
    with pytest.raises(openai.InternalServerError) as error:
        ask(sdk(server, rollout["agent_key"]))
    assert error.value.status_code == 503 and error.value.code == "engine_unavailable"
    for attempt, status in ((1, "queued"), (2, "failed")):  # the second time the harness fails without an error of ours
        server.post("/rollouts/g.0/agent_done", attempt=attempt, exit_status=1)
        assert (
            server.post("/rollouts/g.0/report", attempt=attempt, status="failed", reason="exit 1")["status"] == status
        )
        server.post("/claim", controller="test")
    server.post("/rollouts/g.1/agent_done", attempt=1, exit_status=1)
    server.post("/rollouts/g.1/report", attempt=1, status="failed", reason="exit 1")
    records = server.get("/finished", after=0)["rollouts"]
    assert [(r["id"], r["status"], r["reward"], r["attempts"]) for r in records] == [
        ("g.0", "failed", 0.0, 2),
        ("g.1", "failed", 0.0, 1),
    ]


def test_the_engines_own_400_reaches_the_harness(server: Server, engine: ScriptedEngine) -> None:
    (rollout,) = server.run("g")
    engine.faults = [400]
    with pytest.raises(openai.BadRequestError, match="scripted 400"):
        ask(sdk(server, rollout["agent_key"]))


# ---- rollouts


def test_creation_is_idempotent_and_claims_are_in_order(server: Server) -> None:
    body = {"group": "b", "n": 2, "task": {"id": "t", "agent": {"x": [1, "\u2028"]}, "verifier": {}}, "kind": "eval"}
    for _ in range(2):
        assert server.post("/rollouts", **body) == {"group": "b", "rollouts": ["b.0", "b.1"]}
    server.post("/rollouts", expect=409, **body | {"n": 3})
    server.post("/rollouts", **body | {"group": "a"})
    claimed = [server.post("/claim", controller="c", max=n)["rollouts"] for n in (1, 2, 5, 5)]
    assert [[r["id"] for r in part] for part in claimed] == [["b.0"], ["b.1", "a.0"], ["a.1"], []]
    assert claimed[0][0]["task"] == body["task"] and claimed[0][0]["attempt"] == 1 and claimed[0][0]["timeout"] == 600
    adopted = server.post("/adopt", controller="c")["rollouts"]
    assert [r["id"] for r in adopted] == ["b.0", "b.1", "a.0", "a.1"] and adopted[0]["agent_key"] == claimed[0][0][
        "agent_key"
    ]
    assert not server.post("/adopt", controller="another")["rollouts"]
    listed = server.get("/rollouts", limit=3)
    assert [(r["id"], r["status"]) for r in listed["rollouts"]] == [(r, "running") for r in ("b.0", "b.1", "a.0")]
    rest = server.get("/rollouts", after=listed["next"])
    assert [r["id"] for r in rest["rollouts"]] == ["a.1"] and rest["next"] is None


def test_long_polls_wake(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        start = time.monotonic()
        claim = pool.submit(server.post, "/claim", controller="c", max=1, wait=20)
        end = pool.submit(server.get, "/finished", after=0, wait=20)
        time.sleep(0.3)
        server.post("/rollouts", group="g", n=1, task={"id": "t"})
        assert claim.result()["rollouts"][0]["id"] == "g.0"
        server.post("/rollouts/g.0/report", attempt=1, status="lost", reason="x")
        server.post("/claim", controller="c", max=1)
        server.post("/rollouts/g.0/reward", reward=0.5)
        server.post("/rollouts/g.0/report", attempt=2, status="succeeded")
        assert end.result()["rollouts"][0]["reward"] == 0.5 and time.monotonic() - start < 5
    assert server.get("/finished", after=1, wait=0.2) == {"rollouts": [], "seq": 1}


def test_a_claim_whose_controller_left_claims_nothing(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.admin.post("/claim", json={"controller": "c", "wait": 20}, timeout=0.3)
    server.post("/rollouts", group="g", n=1, task={"id": "t"})
    time.sleep(0.3)
    assert server.get("/state")["queued"] == 1


def test_lost_is_a_new_attempt_with_new_keys_and_turns(server: Server) -> None:
    (first,) = server.run("g", max_attempts=2)
    ask(sdk(server, first["agent_key"]))
    server.post("/rollouts/g.0/reward", reward=1)
    assert server.post("/rollouts/g.0/report", attempt=1, status="lost", reason="evicted")["status"] == "queued"
    (second,) = server.post("/claim", controller="c", max=9)["rollouts"]
    assert second["attempt"] == 2 and second["agent_key"] != first["agent_key"]
    for key in (first["agent_key"], first["verifier_key"]):
        assert server.client(key).get("/rollouts/g.0/turns").status_code in (401, 403)
    with pytest.raises(openai.AuthenticationError):
        ask(sdk(server, first["agent_key"]))
    late = server.post("/rollouts/g.0/report", attempt=1, status="succeeded")
    server.post("/rollouts/g.0/agent_done", attempt=1, exit_status=3)
    assert late == {"status": "running", "attempt": 2} and server.get("/rollouts/g.0")["exit_status"] is None
    assert server.turns("g.0") == [] and server.get("/rollouts/g.0")["reward"] is None
    ask(sdk(server, second["agent_key"]), "second")
    assert [turn["messages"][0]["content"] for turn in server.turns("g.0")] == ["second"]
    lost = {"attempt": 2, "status": "lost", "reason": "node gone"}
    for _ in range(2):  # the reply to the first was lost
        assert server.admin.post("/rollouts/g.0/report", json=lost).json()["status"] == "lost"
    page = server.get("/finished", after=0)
    assert [(r["status"], r["reward"], r["attempts"]) for r in page["rollouts"]] == [("lost", None, 2)] and page[
        "seq"
    ] == 1


@pytest.mark.parametrize(
    ("reward", "status", "on_failure", "becomes", "value"),
    [
        (0.25, "succeeded", "zero", "succeeded", 0.25),
        (0.25, "failed", "zero", "failed", 0.0),
        (0.25, "failed", "drop", "failed", None),
        (None, "succeeded", "zero", "failed", 0.0),
        (None, "succeeded", "drop", "failed", None),
        (None, "lost", "zero", "lost", None),
    ],
)
def test_outcomes(
    shared: Server, reward: float | None, status: str, on_failure: str, becomes: str, value: float | None
) -> None:
    group = f"out.{reward}.{status}.{on_failure}"
    shared.run(group, on_failure=on_failure, max_attempts=1)
    if reward is not None:
        shared.post(f"/rollouts/{group}.0/reward", reward=reward, metrics={"f1": 0.5})
    body = {"attempt": 1, "status": status, "reason": "why"}
    assert shared.admin.post(f"/rollouts/{group}.0/report", json=body).json()["status"] == becomes
    record = shared.get(f"/rollouts/{group}.0")
    assert record["status"] == becomes and record["reward"] == value and record["seq"]
    if status == "succeeded" and reward is None:
        assert record["reason"] == "verifier posted no reward"


def test_a_reward_is_given_once_and_is_a_number(server: Server) -> None:
    (rollout,) = server.run("g")
    verifier = server.client(rollout["verifier_key"])
    for bad in ("NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "null", "[1]"):
        reply = verifier.post("/rollouts/g.0/reward", content=f'{{"reward": {bad}}}')
        assert reply.status_code == 400, bad
    assert verifier.post("/rollouts/g.0/reward", json={"reward": 1, "metrics": {"f1": "x"}}).status_code == 400
    for value, status in ((0.5, 200), (0.5, 200), (0.6, 409)):
        assert (
            verifier.post("/rollouts/g.0/reward", json={"reward": value, "metrics": {"f1": 0.1}}).status_code == status
        )
    assert server.get("/rollouts/g.0").items() >= {"reward": 0.5, "metrics": {"f1": 0.1}}.items()
    assert verifier.post("/rollouts/g.0/events", json={"kind": "note", "data": {"x": 1}}).status_code == 200
    assert verifier.post("/rollouts/g.0/events", json={"kind": "note", "data": "x" * 300_000}).status_code == 413
    server.post("/rollouts/g.0/report", attempt=1, status="succeeded")
    assert verifier.post("/rollouts/g.0/reward", json={"reward": 0.5}).status_code == 401  # it died with its rollout
    server.post("/rollouts/g.0/reward", reward=0.5)


def test_every_key_opens_its_own_routes_only(process: Server) -> None:
    mine, other = process.run("g", n=2)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    admin_only = [
        ("POST", "/rollouts", {"group": "z", "n": 1, "task": {"id": "t"}}),
        ("GET", "/rollouts", None),
        ("POST", "/claim", {"controller": "c"}),
        ("POST", "/adopt", {"controller": "c"}),
        ("GET", "/finished", None),
        ("GET", "/state", None),
        ("POST", "/pause", {"lease": 0}),
        ("POST", "/lease", {"lease": 1}),
        ("POST", "/resume", {"version": 0}),
        ("POST", "/steps", {"step": 1}),
        ("POST", "/rollouts/g.0/agent_done", {"attempt": 7}),
        ("POST", "/rollouts/g.0/report", {"attempt": 7, "status": "lost"}),
    ]
    both = [
        ("GET", "/rollouts/g.0", None),
        ("GET", "/rollouts/g.0/turns", None),
        ("POST", "/rollouts/g.0/events", {"kind": "k"}),
        ("POST", "/rollouts/g.0/reward", {"reward": 1}),
    ]
    agent_only = [("POST", "/v1/chat/completions", chat), ("GET", "/v1/models", None)]
    admin = make_key(process.secret, "admin")
    keys = {
        "none": "",
        "garbage": "agent-g.0-1-" + "0" * 32,
        "unicode": "\xff\xe9",
        "admin": admin,
        "agent": mine["agent_key"],
        "verifier": mine["verifier_key"],
        "other": other["verifier_key"],
        "future": make_key(process.secret, "agent", "g.0", 2),
        "unknown": make_key(process.secret, "verifier", "nobody", 1),
        "foreign": make_key("0" * 64, "admin"),
        "longer": admin + "0",
        "forged": admin.replace("admin--0", "admin-g.0-0"),
    }
    wrong = {"none", "garbage", "unicode", "foreign", "longer", "forged"}
    for routes, opens in ((admin_only, {"admin"}), (both, {"admin", "verifier"}), (agent_only, {"agent"})):
        for method, path, body in routes:
            for name, key in keys.items():
                for header in (
                    {"authorization": b"bearer" + b" " * bool(key) + key.encode()},
                    {"x-api-key": key.encode()},
                ):
                    reply = httpx.request(method, process.url + path, json=body, headers=header, trust_env=False)
                    if name in wrong:
                        assert reply.status_code == 401, (name, path, reply.text)
                    elif name in opens:
                        assert reply.status_code in (200, 409), (name, path, reply.text)
                    else:
                        assert reply.status_code in (401, 403, 404), (name, path, reply.text)
                    if reply.status_code >= 400:
                        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{process.url}/health", trust_env=False).json() == {"ok": True}
    process.post("/rollouts/g.0/agent_done", attempt=1, exit_status=0)
    assert process.client(mine["agent_key"]).post("/v1/chat/completions", json=chat).status_code == 401
    assert process.client(mine["verifier_key"]).get("/rollouts/g.0/turns").status_code == 200
    assert (
        admin not in (process.run_dir / "stderr").read_text()
        and mine["agent_key"] not in (process.run_dir / "stderr").read_text()
    )


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/rollouts", {"group": "a-b", "n": 1, "task": {"id": "t"}}, "group"),
        ("/rollouts", {"group": "a", "n": 0, "task": {"id": "t"}}, "n:"),
        ("/rollouts", {"group": "a", "n": 1, "task": {}}, "task.id"),
        ("/rollouts", {"group": "a", "n": 1, "task": {"id": 3}}, "task.id"),
        (
            "/rollouts",
            {"group": "a", "n": 1, "task": {"id": "t"}, "sampling": {"temprature": 1}},
            "sampling.temprature",
        ),
        ("/rollouts", {"group": "a", "n": 1, "task": {"id": "t"}, "typo": 1}, "typo"),
        ("/claim", {"max": 1}, "controller"),
        ("/claim", {"controller": "c", "max": True}, "max"),
        ("/pause", {"lease": -1}, "lease"),
        ("/resume", {"version": 2**70}, "version"),
        ("/steps", {"step": 2**63}, "step"),
    ],
)
def test_wrong_settings_are_named(shared: Server, path: str, body: dict, says: str) -> None:
    reply = shared.admin.post(path, json=body)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]


# ---- the log


def test_ids_are_stored_once(process: Server, engine: ScriptedEngine) -> None:
    (rollout,) = process.run("g")
    client, said = sdk(process, rollout["agent_key"]), ["x" * 300]
    for i in range(30):
        ask(client, *said)
        if i % 10 == 5:
            ask(client, f"side {i}")  # a sub-agent
        said.append(f"more {i}")
    turns = process.turns("g.0")
    process.kill()
    with contextlib.closing(sqlite3.connect(process.run_dir / "gateway.sqlite")) as db:
        (stored,) = db.execute("SELECT sum(length(ids)) / 4 FROM turns").fetchone()
        (messages,) = db.execute("SELECT count(*) FROM messages").fetchone()
    longest = max(len(turn["prompt_ids"]) for turn in turns)
    assert stored < longest + 33 * 8 + 100 < sum(len(turn["prompt_ids"]) for turn in turns) / 5
    assert messages == 33  # each once, however many turns and rollouts begin with it; replies are with their turns
    process.start()
    ask(client, *said, "after the restart")
    again = process.turns("g.0")
    assert again[:-1] == turns and again[-1]["prompt_ids"][:longest] == max((t["prompt_ids"] for t in turns), key=len)
    pages = [process.get("/rollouts/g.0/turns", after=after, limit=10, messages=0) for after in (-1, 9, 19, 29)]
    assert [turn["prompt_ids"] for page in pages for turn in page["turns"]] == [turn["prompt_ids"] for turn in again]
    assert [page["next"] for page in pages] == [9, 19, 29, None] and "messages" not in pages[0]["turns"][0]
    samples, _ = trajectory.assemble([trajectory.Turn.from_record(turn) for turn in again])
    assert sum(sample.trained_tokens for sample in samples) == 3 * 34


@settings(max_examples=300, deadline=None)
@given(
    strategies.lists(strategies.lists(strategies.integers(0, 2), min_size=1, max_size=12), max_size=30), strategies.integers(1, 4)
)
def test_differences_restore_every_sequence(sequences: list[list[int]], most: int) -> None:
    def pack(ids: list[int]) -> bytes:
        return calls.array("i", ids).tobytes()

    attempt, stored, whole = calls.Attempt(), [], {}
    previous, calls.MAX_BRANCHES = calls.MAX_BRANCHES, most
    for index, ids in enumerate(sequences):
        known = [sequence for sequence, _ in attempt.branches.values()]
        slow = max((len(os.path.commonprefix([sequence, pack(ids)])) // 4 for sequence in known), default=0)
        shared, goes_on, parent = attempt.parent(pack(ids))
        attempt.add(index, pack(ids), (shared, goes_on, parent), None, b"")
        assert shared == slow and len(attempt.branches) <= most and attempt.branches[index][0] == pack(ids)
        assert goes_on == (not known or any(pack(ids[:shared]) == sequence for sequence in known))
        ends = attempt.branches[index][1]
        assert all(sequences[turn] == ids[:end] for end, turn in ends.items()) and ends[len(ids)] == index
        stored.append((parent, shared, pack(ids)[4 * shared :]))
    calls.MAX_BRANCHES = previous
    for index, (parent, shared, rest) in enumerate(stored):
        whole[index] = whole.get(parent, b"")[: 4 * shared] + rest
        assert whole[index] == pack(sequences[index])


# ---- odd input, the process


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for tests that cannot disturb each other."""
    engine = ScriptedEngine()
    server = Server(tmp_path_factory.mktemp("shared"), f"http://127.0.0.1:{engine.port}")
    server.key = server.run("shared")[0]["agent_key"]
    yield server
    server.kill()
    engine.stop()


JSONS = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(), inner, max_size=3),
)
NAMES = strategies.sampled_from(
    [
        "messages",
        "role",
        "content",
        "tools",
        "stream",
        "n",
        "max_tokens",
        "group",
        "task",
        "id",
        "attempt",
        "status",
        "reward",
        "metrics",
        "sampling",
        "controller",
        "wait",
        "kind",
        "step",
        "lease",
        "tool_choice",
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    strategies.sampled_from(
        [
            "/v1/chat/completions",
            "/rollouts",
            "/claim",
            "/adopt",
            "/rollouts/shared.0/agent_done",
            "/steps",
            "/rollouts/shared.0/reward",
            "/rollouts/shared.0/events",
            "/rollouts/%00/report",
            "/lease",
        ]
    ),
    strategies.dictionaries(NAMES, JSONS, max_size=4).map(json.dumps).map(str.encode)
    | strategies.binary(max_size=60)
    | strategies.builds(
        lambda extra, message: json.dumps(
            {"messages": [{"role": "user", "content": "x", **message}], **extra}
        ).encode(),
        strategies.dictionaries(NAMES, JSONS, max_size=3),
        strategies.dictionaries(NAMES, JSONS, max_size=2),
    ),
)
def test_no_input_is_a_500(shared: Server, path: str, body: bytes) -> None:
    agent = path.startswith("/v1")
    if b'"wait"' not in body:
        reply = (shared.client(shared.key) if agent else shared.admin).post(path, content=body)
        assert reply.status_code in (200, 400, 401, 404, 409), (reply.status_code, reply.text, body)


@pytest.mark.parametrize(
    "query", ["after=x", "after=99999999999999999999", "limit=0", "wait=nan", "wait=inf", "wait=-1", "limit=1.5"]
)
def test_bad_queries(shared: Server, query: str) -> None:
    assert shared.admin.get(f"/finished?{query}").status_code == 400
    assert (
        shared.admin.get("/rollouts/%ff%00/turns").status_code == 404
        and shared.admin.delete("/state").status_code == 405
    )


def test_a_port_or_run_in_use_is_one_line_and_exit_2(process: Server, tmp_path: Path) -> None:
    command = process.command[:]
    taken = subprocess.run(
        [*command[:3], str(tmp_path / "x"), *command[4:]], capture_output=True, text=True, timeout=30
    )
    assert (
        taken.returncode == 2
        and "cannot listen" in taken.stderr
        and "--port" in taken.stderr
        and taken.stderr.count("\n") == 1
    )
    command[command.index("--port") + 1] = "0"
    twice = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert twice.returncode == 2 and "another gateway" in twice.stderr and twice.stderr.count("\n") == 1
    missing = subprocess.run(
        [*command[:3], str(tmp_path / "y"), *command[4:], "--engine-key-file", "/nowhere"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert missing.returncode == 2 and "/nowhere" in missing.stderr
    assert (process.run_dir / "secret").stat().st_mode & 0o777 == 0o600


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """By whatever that ends, if it started it as the trainer does."""
    command = [str(ROOT / "gateway.py"), "--run-dir", str(tmp_path), "--engine-url", "http://127.0.0.1:9"]
    code = f"""import os, pathlib, vllm_control
child = vllm_control.Children(pathlib.Path({str(tmp_path)!r})).start("gateway", {command!r})
while b"listening" not in child.log.read_bytes():
    pass
print(child.process.pid, flush=True)
os.kill(os.getpid(), 9)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == -9, done.stderr
    pid = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("still alive")
