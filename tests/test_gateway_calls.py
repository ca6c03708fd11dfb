"""Calls that outlive their connection: retries that join, replay or continue, streams as they are sampled, stop strings,
and prompts that take back the ids that were sampled. The engine is scripted (see test_gateway), the rest is real."""

import asyncio
import contextlib
import json
import resource
import sqlite3
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from test_gateway import EOS, ScriptedEngine, Server, ask, engine, sdk  # noqa: F401  the fixture
from tokenizers import Tokenizer, decoders, models

from calls import Attempt, Text, Vocabulary, address
from trajectory import Turn, assemble

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for the scripted engine's ids: id 7 is the word "7"."""
    directory = tmp_path_factory.mktemp("words")
    Tokenizer(models.WordLevel({str(i): i for i in range(2000)}, unk_token="0")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def server(tmp_path: Path, engine: ScriptedEngine, words: Path) -> Iterator[Server]:
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", grace=0.5, tokenizer=str(words), max_open_calls=4)
    yield server
    server.kill()


@pytest.fixture
def process(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Server]:
    process = Server(tmp_path, f"http://127.0.0.1:{engine.port}", process=True)
    yield process
    process.kill()


def leave(server: Server, key: str, after: float, **body: Any) -> None:
    """A client that hangs up."""
    url, headers = f"{server.url}{CHAT}", {"authorization": f"Bearer {key}"}
    with contextlib.suppress(httpx.ReadTimeout):
        with httpx.stream("POST", url, json=HI | body, headers=headers, timeout=after, trust_env=False):
            time.sleep(after)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- retries


@pytest.mark.parametrize("stream", [False, True])
def test_who_comes_back_in_time_joins_the_call(server: Server, engine: ScriptedEngine, stream: bool) -> None:
    engine.length, engine.delay = 8, 0.05
    (rollout,) = server.run("g")
    leave(server, rollout["agent_key"], 0.15, stream=stream)
    reply = server.client(rollout["agent_key"]).post(CHAT, json=HI | {"stream": stream})
    assert "5 6 7 8 9 10 11" in (reply.text if not stream else text_of(reply.text)) and engine.sampled == 8
    (turn,) = server.turns("g.0")
    assert turn["response_ids"] == [5, 6, 7, 8, 9, 10, 11, EOS] and turn["status"] == "delivered"
    assert server.get("/rollouts/g.0")["calls"] == 1


def test_a_retry_may_have_another_order_and_another_form(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 8, 0.05
    (rollout,) = server.run("g")
    leave(server, rollout["agent_key"], 0.2, stream=True, model="m", metadata={"a": 1, "b": 2})
    body = b'{"metadata": {"b": 2, "a": 1}, "model": "m", "messages": [{"content": "hi", "role": "user"}]}'
    reply = server.client(rollout["agent_key"]).post(CHAT, content=body)
    assert reply.json()["choices"][0]["message"]["content"] == "5 6 7 8 9 10 11" and len(server.turns("g.0")) == 1


def test_who_comes_back_late_continues_from_the_log(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 8, 0.2
    (rollout,) = server.run("g")
    leave(server, rollout["agent_key"], 0.3, stream=True)
    until(lambda: [turn["status"] for turn in server.turns("g.0")] == ["aborted"])
    kept = server.turns("g.0")[0]["response_ids"]
    assert 0 < len(kept) < 8 and not server.turns("g.0")[0]["delivered"] and engine.running == 0
    engine.delay = 0.0
    reply = server.client(rollout["agent_key"]).post(CHAT, json=HI | {"stream": True})
    assert engine.seen[-1]["token_ids"][-len(kept):] == kept  # from where it was
    assert engine.seen[-1]["sampling_params"]["max_tokens"] + len(kept) == engine.seen[0]["sampling_params"]["max_tokens"]
    (turn,) = server.turns("g.0")
    assert turn["response_ids"][: len(kept)] == kept and turn["response_ids"][-1] == EOS and turn["delivered"]
    assert len(turn["logprobs"]) == len(turn["versions"]) == len(turn["response_ids"])
    assert text_of(reply.text) == " ".join(map(str, turn["response_ids"][:-1]))
    assert server.get("/rollouts/g.0")["sampled_tokens"] == len(turn["response_ids"])


def test_a_reply_nobody_came_back_for_is_not_trained(server: Server, engine: ScriptedEngine) -> None:
    engine.delay = 0.1
    (rollout,) = server.run("g")
    leave(server, rollout["agent_key"], 0.25)
    until(lambda: [turn["status"] for turn in server.turns("g.0")] == ["aborted"])
    (turn,) = server.turns("g.0")
    assert turn["response_ids"][-1] == EOS and assemble([Turn.from_record(turn)])[1]["undelivered"] == 1


def test_a_retry_replays_and_a_new_request_samples(process: Server) -> None:
    (rollout,) = process.run("g")
    client = process.client(rollout["agent_key"])
    first = client.post(CHAT, json=HI).json()
    assert client.post(CHAT, json=HI, headers=RETRY).json() == first and len(process.turns("g.0")) == 1
    process.kill()
    process.start()
    assert client.post(CHAT, json=HI, headers=RETRY).json() == first and len(process.turns("g.0")) == 1
    assert client.post(CHAT, json=HI).json()["id"] != first["id"] and len(process.turns("g.0")) == 2


def test_a_stray_role_does_not_make_requests_equal(server: Server) -> None:
    (rollout,) = server.run("g")
    client, stray = server.client(rollout["agent_key"]), {"role": "assistant"}
    for text in ("one", "another"):
        body = {"messages": [{"role": "user", "content": text}], **stray}
        assert client.post(CHAT, json=body, headers=RETRY).status_code == 200
    assert [turn["messages"][0]["content"] for turn in server.turns("g.0")] == ["one", "another"]


def test_equal_meaning_is_not_the_same_reply(server: Server, engine: ScriptedEngine) -> None:
    """Rollouts of a group say the same under other ids of tool calls: each keeps, and is replayed, its own."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    replies = []
    for index, rollout in enumerate(server.run("g", n=2)):
        engine.tools = [{"id": f"call_{index}", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        client = server.client(rollout["agent_key"])
        first = client.post(CHAT, json=HI | {"tools": tools}).json()
        assert client.post(CHAT, json=HI | {"tools": tools}, headers=RETRY).json() == first
        replies.append(first["choices"][0]["message"]["tool_calls"][0]["id"])
        assert server.turns(rollout["id"])[0]["message"]["tool_calls"][0]["id"] == f"call_{index}"
    assert replies == ["call_0", "call_1"]


def test_after_a_crash_what_nothing_continued_is_replayed_once(process: Server, tmp_path: Path) -> None:
    """The turn is logged, its reply was never written: the next such request gets it, and the one after it does not."""
    (rollout,) = process.run("g")
    client = process.client(rollout["agent_key"])
    first = client.post(CHAT, json=HI).json()
    process.kill()
    with sqlite3.connect(tmp_path / "gateway.sqlite") as log:  # as the crash before the last byte leaves it
        log.execute("UPDATE turns SET status = 'ok'")
    log.close()
    process.start()
    assert client.post(CHAT, json=HI).json() == first
    assert client.post(CHAT, json=HI).json() != first
    assert [turn["status"] for turn in process.turns("g.0")] == ["delivered", "delivered"]


def test_a_retry_beside_its_own_open_call_joins_and_a_parallel_sample_does_not(server: Server, engine: ScriptedEngine) -> None:
    engine.delay = 0.15
    (rollout,) = server.run("g")
    client, replies = server.client(rollout["agent_key"]), []

    def post(**headers: str) -> None:
        replies.append(client.post(CHAT, json=HI, headers=headers).json()["id"])

    threads = [threading.Thread(target=post), threading.Thread(target=post), threading.Thread(target=post, kwargs=RETRY)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert len(replies) == 3 and len(set(replies)) == 2 and len(server.turns("g.0")) == 2


def test_the_retry_of_a_refused_call_takes_no_other_calls_sample(server: Server, engine: ScriptedEngine) -> None:
    """Four samples of one request are open, the fifth gets 429 and comes again: five samples."""
    engine.delay = 0.2
    (rollout,) = server.run("g")
    client = server.client(rollout["agent_key"])
    threads = [threading.Thread(target=client.post, args=(CHAT,), kwargs={"json": HI}) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.seen) == 4)
    refused = client.post(CHAT, json=HI)
    assert refused.status_code == 429 and refused.headers["retry-after"] and refused.json()["error"]["code"] == "too_many_calls"
    for thread in threads:
        thread.join()
    assert client.post(CHAT, json=HI, headers=RETRY).status_code == 200 and len(server.turns("g.0")) == 5


def test_a_call_that_got_503_goes_on_when_it_comes_again(tmp_path: Path, engine: ScriptedEngine, words: Path) -> None:
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", engine_retry=0.0, tokenizer=str(words))
    try:
        (rollout,) = server.run("g")
        engine.length, engine.faults = 6, ["cut", 500, 500, 500]
        with pytest.raises(openai.APIError):
            list(ask(sdk(server, rollout["agent_key"]), stream=True))
        (turn,) = server.turns("g.0")
        assert turn["response_ids"] == [5, 6] and turn["status"] == "error" and "engine" in turn["error"]
        engine.faults = []
        chunks = list(ask(sdk(server, rollout["agent_key"]), stream=True))
        (turn,) = server.turns("g.0")
        assert engine.seen[-1]["token_ids"][-2:] == [5, 6] and turn["response_ids"][:2] == [5, 6] and turn["delivered"]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == " ".join(map(str, turn["response_ids"][:-1]))
    finally:
        server.kill()


# ---- streams


def text_of(events: str) -> str:
    """What the chunks of a chat stream say."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_text_is_sent_as_it_is_sampled(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 6, 0.1
    (rollout,) = server.run("g")
    arrivals = []
    for chunk in ask(sdk(server, rollout["agent_key"]), stream=True):
        if chunk.choices[0].delta.content:
            arrivals.append((time.monotonic(), engine.sampled))
    assert len(arrivals) >= 4 and arrivals[0][1] < 6 and arrivals[-1][0] - arrivals[0][0] > 0.25


class Thinker(ScriptedEngine):
    """What it says is reasoning, unless it was asked for none. Its prompts do not show which."""

    async def derender(self, request: Request) -> JSONResponse:
        body = await request.json()
        kind = "content" if body["chat_request"].get("reasoning_effort") == "none" else "reasoning"
        text = " ".join(map(str, body["generate_response"]["choices"][0]["token_ids"]))
        return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", kind: text}}]})


def test_plain_text_is_streamed_as_what_was_asked_for(tmp_path: Path, words: Path) -> None:
    engine = Thinker()
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", tokenizer=str(words))
    try:
        (rollout,) = server.run("g")
        for effort, said in (("high", ("5 6", "")), ("none", ("", "5 6")), ("high", ("5 6", ""))):
            stream = ask(sdk(server, rollout["agent_key"]), stream=True, reasoning_effort=effort)
            deltas = [chunk.choices[0].delta for chunk in stream]
            reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
            assert (reasoning, "".join(delta.content or "" for delta in deltas)) == said
        assert "stream_mismatch" not in server.get("/state")["counts"]
    finally:
        server.kill()
        engine.stop()


def test_stop_strings_end_the_sample_also_across_a_pause(server: Server, engine: ScriptedEngine) -> None:
    engine.length, engine.delay = 9, 0.1
    (rollout,) = server.run("g")
    replies = []
    thread = threading.Thread(target=lambda: replies.append(ask(sdk(server, rollout["agent_key"]), stop=["6 7", "nope"])))
    thread.start()
    until(lambda: engine.sampled == 2)  # "5 6": the seam is inside the stop string
    server.post("/pause", lease=60)
    engine.aborted.set()
    until(lambda: server.get("/state")["in_flight"] == 0)
    engine.aborted.clear()
    engine.version = "1"
    server.post("/resume", version=1)
    thread.join()
    assert replies[0].choices[0].message.content == "5 " and replies[0].choices[0].finish_reason == "stop"
    (turn,) = server.turns("g.0")
    assert turn["response_ids"] == [5, 6, 7] and turn["versions"] == [0, 0, 1] and len(turn["logprobs"]) == 3
    until(lambda: engine.running == 0)  # it samples on for nobody


def test_markers_and_unfinished_text_wait(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, " ": 1, "<": 2, "tool_call>": 3, "b": 4, "Ã": 5, "©": 6}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(Vocabulary(str(tmp_path)), ["ab"], [])
    seen = []
    for token in (4, 0, 0, 1, 5, 6, 2, 4, 2, 3, 4):
        text.add([token])
        seen.append(text.text[:text.readable()])
    assert seen == ["b", "b", "ba", "baa", "baa", "baa é", "baa é"] + 4 * ["baa é<b"]
    assert text.add([0, 4]) == (2, "ab")


# ---- splice

FIRST, THEN = {"role": "user", "content": "q"}, {"role": "user", "content": "more"}
SPELL = {1: "q", 2: "<eot>", 3: "he", 4: "llo", 5: "hel", 6: "lo", 7: "m", 8: "x"}


def history(mode: str, prompt: list[int], messages: list[dict]) -> tuple[list[int], str | None]:
    """A prompt after one turn: [q <eot>] -> [he llo <eot>], the message "hello"."""
    attempt, addresses = Attempt(), [address(b"", FIRST)]
    reply = address(addresses[0], {"role": "assistant", "content": "hello", "reasoning": "hm", "tool_calls": []})
    known = array("i", [1, 2, 3, 4, 2]).tobytes()
    attempt.add(0, known, attempt.parent(known), reply, addresses[0])
    now = []
    for message in messages:
        now.append(address(now[-1] if now else b"", message))
    packed, fork = attempt.splice(array("i", prompt).tobytes(), now, now[0] if now else b"", mode, SPELL)
    return array("i", packed).tolist(), fork


def test_history_takes_the_sampled_ids_where_the_mode_allows() -> None:
    said = [FIRST, {"role": "assistant", "content": "hello"}, THEN]
    same_text, rewritten = [1, 2, 5, 6, 2, 7, 2], [1, 2, 8, 2, 7, 2]
    assert history("exact", [1, 2, 3, 4, 2, 7, 2], said) == ([1, 2, 3, 4, 2, 7, 2], None)
    assert history("exact", same_text, said) == (same_text, "drift")
    for mode in ("tokens", "messages"):
        assert history(mode, same_text, said) == ([1, 2, 3, 4, 2, 7, 2], None)
    for mode in ("exact", "tokens"):
        assert history(mode, rewritten, said) == (rewritten, "template")
    assert history("messages", rewritten, said) == ([1, 2, 3, 4, 2, 7, 2], None)
    edited = [FIRST, {"role": "assistant", "content": "edited"}, THEN]
    assert history("messages", rewritten, edited) == (rewritten, "compaction")
    assert history("tokens", [7, 2], [THEN]) == ([7, 2], "new_conversation")
    assert history("tokens", [1, 2], [FIRST]) == ([1, 2], "branch")  # the same question again: another sample


@pytest.mark.parametrize("other, same", [
    ({"content": "a\nb"}, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
    ({"content": None, "reasoning": "r"}, {"content": ""}),
    ({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}]},
     {"tool_calls": [{"id": "2", "type": "function", "function": {"arguments": '{"b":2,"a":1}', "name": "f"}}], "refusal": None})])
def test_what_harnesses_send_back_means_the_same(other: dict, same: dict) -> None:
    assert address(b"", {"role": "assistant", **other}) == address(b"", {"role": "assistant", **same})
    assert address(b"", {"role": "assistant", **other}) != address(b"", {"role": "assistant", **same, "content": "x"})


# ---- held


ASKED = {CHAT: HI, "/v1/completions": {"prompt": [1007, 1008]}, "/v1/responses": {"input": "hi"},
         "/v1/messages": {**HI, "max_tokens": 50}}
PINGS = {CHAT: '"delta":{"content":""}', "/v1/completions": '"text":""', "/v1/responses": "event: response.in_progress",
         "/v1/messages": "event: ping"}
LAST = {CHAT: "[DONE]", "/v1/completions": "[DONE]", "/v1/responses": "event: response.completed",
        "/v1/messages": "event: message_stop"}


@pytest.mark.parametrize("path", ASKED)
def test_held_calls_hear_something_in_their_dialect(tmp_path: Path, engine: ScriptedEngine, words: Path, path: str) -> None:
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", keepalive=0.1, tokenizer=str(words))
    try:
        (rollout,) = server.run("g")
        replies: dict[bool, str] = {}
        server.post("/pause", lease=60)

        def post(stream: bool) -> None:
            client = server.client(rollout["agent_key"])
            client.timeout = 0.5  # an idle time-out that would end an unfed client
            replies[stream] = client.post(path, json={**ASKED[path], "stream": stream}).text

        threads = [threading.Thread(target=post, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        assert not replies and server.get("/state")["held"] == 2
        server.post("/resume", version=1)
        for thread in threads:
            thread.join()
        assert replies[True].count(PINGS[path]) >= 5 and replies[True].rstrip().partition(LAST[path])[1]
        assert replies[False].startswith("    ") and json.loads(replies[False])["model"] == "policy"
    finally:
        server.kill()


def test_1000_held_streams_and_the_trainer_is_answered(process: Server) -> None:  # 24
    keys = [rollout["agent_key"] for rollout in process.run("g", n=20)]
    process.post("/pause", lease=600)

    async def stream(session: aiohttp.ClientSession, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(process.url + CHAT, json=HI | {"stream": True}, headers=headers) as reply:
            return await reply.text()

    async def main() -> tuple[float, list[str]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            streams = [asyncio.create_task(stream(session, keys[i % 20])) for i in range(1000)]
            await asyncio.to_thread(process.wait, held=1000)
            slowest = 0.0
            for path in ("/lease", "/pause") * 3:
                started = time.monotonic()
                await asyncio.to_thread(process.post, path, lease=600)
                await asyncio.to_thread(process.get, "/state")
                slowest = max(slowest, time.monotonic() - started)
            await asyncio.to_thread(process.post, "/resume", version=1)
            return slowest, await asyncio.gather(*streams)

    slowest, replies = asyncio.run(main())
    assert slowest < 1 and all(reply.endswith("data: [DONE]\n\n") for reply in replies)
    assert process.get("/state")["counts"]["call_ok"] == 1000


def test_no_request_slips_through_while_the_engine_sleeps(server: Server, engine: ScriptedEngine) -> None:
    """Callers throughout, plain and streamed, in three dialects, over 30 turns of the trainer."""
    engine.length, engine.delay, over, replies = 6, 0.01, threading.Event(), []
    ask = {"model": "m", "max_tokens": 50}
    requests = [(CHAT, ask | HI), ("/v1/messages", ask | HI), ("/v1/responses", {"model": "m", "input": "hi"})]

    def calls(key: str, number: int) -> None:
        (path, body), client = requests[number % 3], server.client(key)
        while not over.is_set():
            replies.append(client.post(path, json=body | {"stream": number % 2 == 0}, headers={"x-api-key": key}))

    callers = [threading.Thread(target=calls, args=(rollout["agent_key"], i)) for rollout in server.run("g", n=4)
               for i in range(3)]
    for caller in callers:
        caller.start()
    for version in range(1, 31):
        time.sleep(0.03)
        server.post("/pause", lease=30)
        engine.aborted.set()
        server.wait(in_flight=0)
        engine.asleep = True
        time.sleep(0.03)
        engine.asleep, engine.version = False, str(version)
        engine.aborted.clear()
        server.post("/resume", version=version)
    over.set()
    for caller in callers:
        caller.join()
    assert engine.slipped == [] and len(replies) > 100 and all(reply.status_code == 200 for reply in replies)
    turns = [turn for i in range(4) for turn in server.turns(f"g.{i}")]
    assert len(turns) == len(replies)
    assert all(len(turn["response_ids"]) == 6 == len(turn["versions"]) for turn in turns)
    assert len({version for turn in turns for version in turn["versions"]}) > 20


def test_a_plain_reply_that_was_begun_and_fails_breaks_off(tmp_path: Path, engine: ScriptedEngine) -> None:
    """Its status was said to be 200: only a broken connection makes a client try again."""
    server = Server(tmp_path, f"http://127.0.0.1:{engine.port}", keepalive=0.1)
    try:
        (rollout,) = server.run("g")
        server.post("/pause", lease=0.5)
        with pytest.raises(httpx.RemoteProtocolError):
            server.client(rollout["agent_key"]).post(CHAT, json=HI)
        refused = server.client(rollout["agent_key"]).post(CHAT, json=HI)  # the trainer is gone
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "pause_expired"
        server.post("/resume", version=1)
        assert server.client(rollout["agent_key"]).post(CHAT, json=HI, headers=RETRY).status_code == 200
    finally:
        server.kill()


# ---- the log


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_is_a_503_and_leaves_no_half_turn(process: Server, tmp_path: Path, engine: ScriptedEngine, stream: bool) -> None:
    (rollout,) = process.run("g")
    client, engine.context = sdk(process, rollout["agent_key"]), 100_000
    ask(client, "before")
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))  # no room for more
    for _ in range(3):
        with pytest.raises(openai.APIError) as error:  # a stream that had begun ends in its dialect's error
            list(ask(client, "x" * 20_000, stream=stream))
        assert "log cannot be written" in str(error.value)
        assert stream or error.value.status_code == 503 and error.value.code == "store_unavailable"
    assert process.admin.get("/health").status_code == 200
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ask(client, "after")
    process.kill()
    process.start()
    assert [turn["messages"][0]["content"] for turn in process.turns("g.0")] == ["before", "after"]
    assert sqlite3.connect(f"file:{tmp_path}/gateway.sqlite?immutable=1", uri=True).execute(
        "PRAGMA integrity_check").fetchone() == ("ok",)


def test_64k_tokens_are_read_in_50_ms(server: Server, engine: ScriptedEngine) -> None:
    """A rollout of 64 turns with 1,000 tokens each, as the trainer reads it."""
    (rollout,) = server.run("g", sampling={"max_tokens": 30})
    client, messages, engine.context = sdk(server, rollout["agent_key"]), [], 100_000
    for _ in range(64):
        messages.append({"role": "user", "content": "x" * 970})
        messages.append({"role": "assistant", "content": ask(client, *messages).choices[0].message.content})
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        page = server.admin.get("/rollouts/g.0/turns", params={"messages": 0}).content
        seconds.append(time.perf_counter() - started)
    assert len(json.loads(page)["turns"]) == 64 and len(json.loads(page)["turns"][-1]["prompt_ids"]) > 60_000
    assert min(seconds) < 0.5, seconds  # all prompts in full: 2M ids; one turn (the last) below
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        page = server.admin.get("/rollouts/g.0/turns", params={"after": 62, "messages": 0}).content
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05, seconds
