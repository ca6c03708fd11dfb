"""Nothing that is sent to the gateway breaks it (20,000 odd requests to all routes); no key of one scope opens another.

The gateway runs as a process, so that its HTTP server, its log and its file are the real ones. Requests begin as valid
ones, which are then damaged in up to three places.
"""

import contextlib
import http.client
import inspect
import itertools
import json
import random
import sqlite3
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from bench.gateway import make_tokenizer
from hypothesis import HealthCheck, given, settings, strategies
from starlette.requests import Request
from starlette.responses import Response
from test_gateway import EOS, ScriptedEngine, Server

import gateway
from config import make_key

REQUESTS = 20_000
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = {
    "model": "m", "max_tokens": 3, "stream": False, "stop_sequences": ["z"], "system": [{"type": "text", "text": "s"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                                          {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}]}
# What each route is sent: (method, path): (scopes that may, a valid body; None: a query)
ROUTES: dict[tuple[str, str], tuple[str, Any]] = {
    ("POST", "/v1/chat/completions"): ("agent", {
        "model": "m", "max_tokens": 3, "stream": False, "stream_options": {"include_usage": True}, "stop": ["z"],
        "temperature": 0.5, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto", "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"}]}),
    ("POST", "/v1/completions"): ("agent", {
        "model": "m", "prompt": "hi", "max_tokens": 3, "stop": "z", "stream": False}),
    ("POST", "/v1/responses"): ("agent", {
        "model": "m", "instructions": "i", "max_output_tokens": 3, "stream": False, "reasoning": {"effort": "low"},
        "tools": [{"type": "function", **TOOL}, {"type": "custom", "name": "g"}], "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "r"}]}),
    ("POST", "/v1/messages"): ("agent", MESSAGES),
    ("POST", "/v1/messages/count_tokens"): ("agent", MESSAGES),
    ("GET", "/v1/models"): ("agent", None),
    ("POST", "/rollouts"): ("admin", {
        "group": "fresh", "n": 1, "task": {"id": "t", "agent": {"a": [1]}, "verifier": {}}, "kind": "eval",
        "sampling": {"temperature": 0.5, "seed": 3}, "timeout": 5.0, "max_attempts": 2, "on_failure": "drop"}),
    ("GET", "/rollouts"): ("admin", None),
    ("POST", "/claim"): ("admin", {"controller": "fuzz", "max": 1, "wait": 0.0}),
    ("POST", "/adopt"): ("admin", {"controller": "fuzz"}),
    ("POST", "/rollouts/{id}/agent_done"): ("admin", {"attempt": 1, "exit_status": 0, "reason": "r", "output": "o"}),
    ("POST", "/rollouts/{id}/report"): ("admin", {"attempt": 1, "status": "succeeded", "reason": "r"}),
    ("GET", "/finished"): ("admin", None),
    ("GET", "/rollouts/{id}"): ("admin verifier", None),
    ("GET", "/rollouts/{id}/turns"): ("admin verifier", None),
    ("POST", "/rollouts/{id}/reward"): ("admin verifier", {"reward": 0.5, "metrics": {"f1": 0.5}}),
    ("POST", "/rollouts/{id}/events"): ("admin verifier", {"kind": "k", "data": {"x": [1]}}),
    ("POST", "/pause"): ("admin", {"lease": 0.01}),
    ("POST", "/lease"): ("admin", {"lease": 0.01}),
    ("POST", "/resume"): ("admin", {"version": 1}),
    ("POST", "/steps"): ("admin", {"step": 1, "phases": {"update": 1.5}, "rollouts": {"a.0": {"advantage": 0.5}}}),
    ("GET", "/state"): ("admin", None),
    ("GET", "/metrics"): ("admin", None),
    ("GET", "/health"): ("", None),
    ("GET", "/"): ("", None),
}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


STRANGE = [
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(10**30), 1e308, float("nan"), float("inf"), "", "\0",
    "\ud800", "\udfff\ud800", "\u2028\u2029\x85\x1e", "\ufeff", "\r\n\r\n", "a" * 70_000, [], {}, [[]], [None],
    {"": None}, {"\ud800": 1}, nested(50), nested(201), nested(400), "user", "developer", "assistant", {"type": "text"},
    {"type": "image_url"}, "{", "<tool_call>", "auto", "required", ["\0"] * 500]
VALUES = strategies.sampled_from(STRANGE) | strategies.text(max_size=12) | strategies.integers() | strategies.floats()
WHERE = strategies.integers(0, 99)  # which part of a body, which rollout, which byte
BROKEN = [
    b"", b"{", b"null", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 50_000, b"{}{}",
    b'{"a":1,"a":2}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\x00"}', b'{"a":1e999}', b"\x80" * 64,
    '{"messages":"\u2028"}'.encode()]
HOW = ["set", "set", "drop", "add", "wrap"]
KEYS = ["right"] * 14 + ["admin", "agent", "verifier", "", "\xff", "agent-f.0-1-" + "0" * 32, "a" * 9000]
PLACES = [""] * 20 + [  # for {id}; "": a rollout's
    "%00", "%ff", "..", "%2e%2e", "x" * 2000, "a%2fb", "%E2%80%A8", "f.0'--", "f.-1", "%20"]
BYTE = strategies.tuples(WHERE, strategies.integers(0, 255))
REQUEST = strategies.tuples(
    strategies.sampled_from(sorted(ROUTES)),
    strategies.lists(strategies.tuples(WHERE, strategies.sampled_from(HOW), VALUES), max_size=3),
    strategies.none() | strategies.none() | strategies.sampled_from(BROKEN) | BYTE,
    strategies.sampled_from(KEYS), strategies.sampled_from(PLACES), WHERE)


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) of a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from parts(value[key])


def damaged(body: Any, changes: list[tuple[int, str, Any]]) -> Any:
    body = json.loads(json.dumps(body))
    for where, how, value in changes:
        value = json.loads(json.dumps(value))  # of its own
        if not (places := list(itertools.islice(parts(body), 60))):
            return value
        container, key = places[where % len(places)]
        if how == "drop":
            del container[key]
        elif how == "add":
            container.update({"role": value}) if isinstance(container, dict) else container.append(value)
        else:
            container[key] = [container[key], value] if how == "wrap" else value
    return body


class AnyEngine(ScriptedEngine):
    """Reads no prompt, and samples the same ids after any."""

    async def render(self, request: Request) -> Response:
        ids = [300] * min(len(await request.body()), self.context + 1)
        return Response(json.dumps({"token_ids": ids}), media_type="application/json")

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        ids = [300, 301, EOS][: body["sampling_params"]["max_tokens"]]
        reply = json.dumps({"choices": [{
            "index": 0, "token_ids": ids, "finish_reason": "stop" if ids[-1] == EOS else "length",
            "logprobs": {"content": [{"token_id": i, "logprob": -i / 1000} for i in ids]}}]})
        if body["stream"]:
            return Response(f"data: {reply}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
        return Response(reply, media_type="application/json")


class Site(Server):
    """The gateway before an engine that takes anything, with many running rollouts, and one connection to it."""

    def begin(self) -> None:
        self.rollouts = [rollout for group in "fghi" for rollout in self.run(group, n=1000, max_attempts=2)]
        self.got: Counter[int] = Counter()
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def key(self, scope: str, place: int = 0) -> str:
        return make_key(self.secret, "admin") if scope == "admin" else self.rollouts[place][f"{scope}_key"]

    def send(self, method: str, path: str, body: bytes | None, key: str, **headers: str) -> tuple[int, str, bytes]:
        try:
            self.connection.request(method, path, body, {"authorization": f"Bearer {key}", **headers})
            reply = self.connection.getresponse()
            data = reply.read()
        except (http.client.HTTPException, OSError):
            self.connection.close()
            raise
        self.got[reply.status] += 1
        return reply.status, reply.headers.get("content-type", ""), data

    def check(self, answer: tuple[int, str, bytes], path: str) -> None:
        status, kind, data = answer
        assert status in (200, 400, 401, 403, 404, 405, 409, 413), answer
        if kind == "text/event-stream":
            for event in data.decode().strip().split("\n\n"):
                for line in event.split("\n"):
                    assert line.startswith("event: ") or json.loads(line.removeprefix("data: ").replace("[DONE]", "1"))
            last = {"/v1/messages": b'"message_stop"', "/v1/responses": b'"response.'}.get(path, b"data: [DONE]")
            assert last in data[data.rindex(b"data: "):], answer
        elif path != "/metrics" or status != 200:
            content = json.loads(data)
            assert kind == "application/json"
            if status != 200:
                assert content["error"]["message"] and ("type" in content) == path.startswith("/v1/messages"), answer

    def fuzz(self, route: tuple[str, str], changes: list, broken: Any, scope: str, rollout: str, place: int) -> None:
        (method, template), (scopes, body), sent = route, ROUTES[route], sum(self.got.values())
        place = 13 * (sent % 300) + place % 13
        path, data = template.replace("{id}", rollout or self.rollouts[place]["id"]), None
        if method == "POST":
            body = damaged(body, changes)
            if isinstance(body, dict) and template == "/claim":  # a poll may wait as long as it likes
                body.pop("wait", None)
            if template == "/rollouts" and isinstance(body, dict) and body.get("group") == "fresh":
                body["group"] = f"fresh{sent}"
            data = json.dumps(body).encode()
            if isinstance(broken, bytes):
                data = broken
            elif broken and data:
                at = broken[0] * len(data) // 100
                data = data[:at] + bytes([broken[1]]) + data[at + 1:]
        else:
            names = ["after", "limit", "messages", "wait_", "", "\u2028"]
            path += "?" + "&".join(f"{quote(names[where % 6])}={quote(str(value).encode(errors='surrogatepass')[:500])}"
                                   for where, _, value in changes)
        if scope == "right":
            scope = "agent" if scopes == "agent" else "admin"
        key = self.key(scope, place) if scope in ("admin", "agent", "verifier") else scope
        answer = self.send(method, path, data, key)
        self.check(answer, template)
        if answer[0] == 200 and template in ("/pause", "/lease"):
            assert self.send("POST", "/resume", b'{"version": 1}', self.key("admin"))[0] == 200

    def finish(self) -> None:
        """The log is one JSON object a line, and knows each refusal; then the gateway lives."""
        assert self.send("GET", "/state", None, self.key("admin"))[0] == 200
        lines = (self.run_dir / "stderr").read_bytes().split(b"\n")
        records = [json.loads(line) for line in lines[:-1]]
        assert not lines[-1] and all(isinstance(record["event"], str) for record in records)
        assert not [record for record in records if record["event"] == "internal_error"]
        refused = Counter(record["status"] for record in records if 400 <= record.get("status", 0) != 499)
        assert refused == {status: n for status, n in self.got.items() if status >= 400}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory, engine = tmp_path_factory.mktemp("fuzz"), AnyEngine()
    make_tokenizer(directory)
    site = Site(directory, f"http://127.0.0.1:{engine.port}", "--tokenizer", str(directory), "--max-body",
                str(11 * 2**20), process=True)
    site.begin()
    yield site
    site.kill()
    engine.stop()


@settings(max_examples=REQUESTS // 5, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=REQUEST)
def test_no_request_breaks_it(site: Site, sent: tuple) -> None:
    site.fuzz(*sent)


@pytest.mark.slow
def test_many_requests_do_not_break_it(site: Site) -> None:
    """The same damage, drawn faster than hypothesis does."""
    for seed in range(REQUESTS - sum(site.got.values())):
        rng = random.Random(seed)
        changes = [(rng.randrange(100), rng.choice(HOW), rng.choice(STRANGE)) for _ in range(rng.randrange(4))]
        broken = rng.choice([None] * 8 + [rng.choice(BROKEN), (rng.randrange(100), rng.randrange(256))])
        try:
            route, key, rollout = (rng.choice(choices) for choices in (sorted(ROUTES), KEYS, PLACES))
            site.fuzz(route, changes, broken, key, rollout, rng.randrange(100))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    site.finish()


def test_large_bodies(site: Site) -> None:
    """10 MB of anything is refused, and nobody else waits for it."""
    size, done, watch = 10 * 2**20, threading.Event(), site.client(site.key("admin"))
    said = b'{"role":"user","content":"x"}'
    many = {"messages": said, "input": said, "tools": b"{}", "prompt": b"7"}
    bodies = [*(b'{"messages":[%b],"%b":[%b]}' % (said, name.encode(), b",".join([item] * (size // (len(item) + 1))))
                for name, item in many.items()), b"[" * size, b'{"a":' * (size // 5), b"x" * size]
    text = b"x" * size
    chat = b'{"max_tokens":1,"messages":[{"role":"user","content":"%b"}]}'
    whole = {"/v1/responses": b'{"input":"%b"}', "/v1/completions": b'{"prompt":"%b"}'}

    def poll() -> float:
        slowest = 0.0
        while not done.wait(0.05):
            started = time.monotonic()
            assert watch.get("/state").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        return slowest

    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(poll)
        try:
            for path in (path for method, path in ROUTES if method == "POST" and path.startswith("/v1")):
                for body in [*bodies, whole.get(path, chat) % text]:
                    status = site.send("POST", path, body, site.key("agent", 999))[0]
                    assert status in (200, 400), (path, body[:80], status)
            for path, expected in (("/steps", 200), ("/rollouts/g.0/events", 413), ("/rollouts/g.0/reward", 413)):
                body = b'{"step":1,"kind":"k","data":"%b"}' % text
                assert site.send("POST", path, body, site.key("admin"))[0] == expected
            assert site.send("POST", "/v1/messages", b"x" * (12 * 2**20), site.key("agent", 999))[0] == 413
        finally:
            done.set()
        slowest = polled.result()
    site.finish()
    assert slowest < 3


ODD = ["\0", "\u2028\n\u2029\r", "\x1e\x85", "{\n}\n", "\U0010ffff\ufeff"]
TEXT = strategies.text(strategies.characters(codec="utf-8"), max_size=30) | strategies.sampled_from(ODD)
RECORD = strategies.recursive(
    TEXT | strategies.none() | strategies.integers(-(2**53), 2**53),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(TEXT, inner, max_size=3), max_leaves=6)


def test_records_read_back_equal_what_was_sent(site: Site) -> None:
    admin, key, sent = site.key("admin"), site.key("agent", 1999), []
    path, turns = f"/rollouts/{site.rollouts[1999]['id']}/turns", -1
    while page := site.get(path, after=turns)["turns"]:  # of the odd requests before
        turns = page[-1]["index"]
    while json.loads(site.send("POST", "/claim", b'{"controller":"drain","max":1000}', admin)[2])["rollouts"]:
        pass

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(said=TEXT.filter(bool), record=RECORD)
    def keep(said: str, record: Any) -> None:
        nonlocal turns
        messages = [{"role": "system", "content": said}, {"role": "user", "content": said + str(len(sent))}]
        reply = site.send("POST", "/v1/chat/completions", json.dumps({"messages": messages}).encode(), key)
        assert reply[0] == 200, reply
        turn, = site.get(path, after=turns)["turns"]
        assert turn["messages"] == messages and turn["index"] == (turns := turns + 1)
        task = {"id": said, "agent": {said: record}, "verifier": {"record": record}}
        site.post("/rollouts", group=f"kept{len(sent)}", n=1, task=task)
        assert site.post("/claim", controller=said)["rollouts"][0]["task"] == task
        site.post("/rollouts/i.5/events", kind=said, data=record)
        site.post("/steps", step=10**6 + len(sent), said=said, record=record, kept="here")
        sent.append((said, record))
    keep()
    site.connection.close()
    site.kill()
    with contextlib.closing(sqlite3.connect(site.run_dir / "gateway.sqlite")) as db:
        events = db.execute("SELECT kind, data FROM events WHERE rollout = 'i.5' ORDER BY rowid").fetchall()
        steps = db.execute("SELECT data FROM steps WHERE step >= 1e6 ORDER BY step").fetchall()
    assert [(kind, json.loads(zlib.decompress(data))) for kind, data in events][-len(sent):] == sent
    steps = [step for data, in steps if (step := json.loads(zlib.decompress(data))).get("kept") == "here"]
    assert [(step["said"], step["record"]) for step in steps] == sent
    site.start()
    site.finish()


def test_no_key_of_one_scope_opens_another(site: Site, tmp_path: Path) -> None:
    application = gateway.create_app(gateway.GatewaySettings(tmp_path, "http://127.0.0.1:9"))
    app = inspect.getclosurevars(application).nonlocals["app"]
    routes = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}
    assert routes | {("POST", path) for path in [*gateway.DIALECTS, "/v1/messages/count_tokens"]} == ROUTES.keys()
    mine, other, ended = site.run("k", n=3)
    site.post("/rollouts/k.2/report", attempt=1, status="failed")
    secret, admin = site.secret, site.key("admin")
    good = {"admin": admin, "agent": mine["agent_key"], "verifier": mine["verifier_key"]}
    bad = {
        "another's verifier": other["verifier_key"], "an ended one's agent": ended["agent_key"],
        "an ended one's verifier": ended["verifier_key"], "none": "", "foreign": make_key("0" * 64, "admin"),
        "next attempt": make_key(secret, "agent", "k.0", 2), "no attempt": make_key(secret, "verifier", "k.0", 0),
        "unknown": make_key(secret, "verifier", "nobody.0", 1), "longer": admin + "0", "shorter": admin[:-1],
        "upper": admin.upper(), "no scope": make_key(secret, "root"), "agent of nobody": make_key(secret, "agent"),
        "rescoped": mine["agent_key"].replace("agent", "admin"), "secret": secret}
    before = site.get("/rollouts/k.0"), site.get("/state")["version"]
    for opens in (False, True):  # what must not open comes first: it has changed nothing
        for (method, path), (scopes, body) in ROUTES.items():
            body = {**body, "attempt": 9} if "attempt" in (body or ()) else body
            data, path = json.dumps(body).encode() if body else None, path.replace("{id}", "k.0")
            for name, key in {**good, **bad}.items():
                if (not scopes or name in scopes.split()) == opens:
                    for headers in ({}, {"authorization": f"bearer {key}"}, {"authorization": "", "x-api-key": key}):
                        status = site.send(method, path, data, key, **headers)[0]
                        assert status in ((200, 409) if opens else (401, 403, 404)), (method, path, name, status)
        if not opens:
            assert (site.get("/rollouts/k.0"), site.get("/state")["version"]) == before
    assert site.get("/rollouts/k.0")["reward"] == 0.5
    site.finish()
