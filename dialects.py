"""API dialects: what a harness sends becomes one chat request, and one completion becomes what it expects back.

    body --Dialect.ask--> Ask (chat messages, function tools, limits, wishes) --> gateway --> completion
    completion --Dialect.reply--> the plain body;   --Stream: start, text*, ping*, finish | fail--> the same as SSE
A completion, whatever the dialect: {"name", "created", "model", "message": {"content", "reasoning", "tool_calls"},
"finish": "stop" | "length" | "tool_calls" | "stop_string", "stop_string", "usage": {"prompt", "sampled"}}. All ids are
made from its name, so that a replay has the same bytes.

Chat messages are rebuilt from what they say: the echo of a reply is the same message in every dialect, whatever an SDK
adds to it. What is wrong in a body raises ApiError(400) that names the field; what is right and yet not followed
(forced tools, grammars, hosted tools, ...) is named in Ask.overridden, to be counted. Pure: no I/O. A body is JSON
that orjson has read and can write again.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

JSON = dict[str, Any]
Kind = Literal["content", "reasoning"]


class ApiError(Exception):
    """What a client is told, in its own dialect. `status` >= 500: the machinery's fault, never the harness's."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Ask:
    """What a harness asked, whatever its dialect."""

    body: JSON  # as sent
    messages: list[JSON] = field(default_factory=list)  # chat messages; none for completions
    tools: list[JSON] = field(default_factory=list)  # chat function tools
    prompt: str | list[int] | None = None  # completions: text or ids
    stream: bool = False
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    sampling: JSON = field(default_factory=dict)  # what the harness wished for, by vLLM's names
    extra: JSON = field(default_factory=dict)  # what else the chat template may need
    overridden: list[str] = field(default_factory=list)  # wishes that are not followed
    named: dict[str, JSON] = field(default_factory=dict)  # Responses: the item that a call of a function tool becomes


# ---- reading


NAMES = {str: "a string", list: "a list", dict: "an object", int: "an integer", float: "a number", bool: "a boolean"}
TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")  # kinds of parts
ROLES = ("system", "developer", "user", "assistant", "tool")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty")
IGNORED = ("logit_bias", "logprobs", "top_logprobs", "structured_outputs", "min_tokens", "ignore_eos", "stop_token_ids",
           "bad_words", "context_management", "max_tool_calls")
SINGLE = dict.fromkeys(("n", "best_of"), "send parallel requests, each is a sample of its own")
MOST = 50_000  # items of a list: more would take all calls' time
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Node(dict[str, Any]):
    """An object of a body, which knows where it stands; what is asked of it has the right type."""

    def __init__(self, value: JSON, where: str = "") -> None:
        super().__init__(value)
        self.where = where

    def wrong(self, name: str, problem: str, code: str = "invalid_value") -> ApiError:
        return ApiError(400, f"{self.where}{name} {problem}", code)

    def of(self, name: str, *kinds: type, need: bool = False) -> Any:
        """Its `name`, of one of these JSON types; None where it is null or missing, unless there is `need` of it."""
        value = self.get(name)
        if type(value) not in kinds and (need or value is not None):
            wanted, found = " or ".join(map(NAMES.get, kinds)), NAMES.get(type(value), "null or missing")
            raise self.wrong(name, f"must be {wanted}, but is {found}", "invalid_type")
        return value

    def node(self, name: str, need: bool = False) -> "Node":
        return Node(self.of(name, dict, need=need) or {}, f"{self.where}{name}.")

    def nodes(self, name: str) -> "list[Node]":
        values, nodes = self.of(name, list) or (), []
        if len(values) > MOST:
            raise self.wrong(name, f"has {len(values)} items, at most {MOST} are taken", "array_above_max_length")
        for at, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.wrong(f"{name}[{at}]", "must be an object", "invalid_type")
            nodes.append(Node(value, f"{self.where}{name}[{at}]."))
        return nodes

    def said(self) -> str:
        """The text of a part of a message."""
        if (kind := self.of("type", str)) not in TEXTS:
            raise self.wrong(f"type {str(kind)[:40]!r}", "is not supported: it reads text only", "unsupported_content")
        return self.of("refusal" if kind == "refusal" else "text", str, need=True)

    def text(self, name: str) -> str:
        """The text of a string, of a list of parts, of null."""
        if isinstance(self.get(name), list):
            return joined(*(part.said() for part in self.nodes(name)))
        return self.of(name, str, list) or ""


def joined(*texts: str | None, by: str = "\n") -> str:
    return by.join(filter(None, texts))


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # spaced as tool-call parsers write it


def assistant(content: Any, reasoning: str | None = "", calls: list[JSON] | None = None) -> JSON:
    # Engines and harnesses disagree about the name of the reasoning: both.
    thought = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content} | thought | ({"tool_calls": calls} if calls else {})


def called(identity: str | None, name: str, arguments: str) -> JSON:
    return {"id": identity or "", "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def in_turns(pieces: list[JSON], join: bool) -> list[JSON]:
    """Chat messages of one thing each, put together: the assistant's reasoning, text and calls in a row are one
    message, and what is out of this order begins another. With `join`, texts in a row are one and empty ones none."""
    messages, last = [], 3
    for piece in pieces:
        role, rank = piece["role"], 2 if "tool_calls" in piece else 0 if "reasoning" in piece else 1
        if len(piece) == 2 and not piece["content"] and (join or role == "assistant"):
            continue  # it says nothing
        if messages and role == messages[-1]["role"] != "tool" and last <= rank and (join or not last == rank == 1):
            content, reasoning = (joined(messages[-1].get(key), piece.get(key)) for key in ("content", "reasoning"))
            calls = messages[-1].get("tool_calls", []) + piece.get("tool_calls", [])
            piece = assistant(content, reasoning, calls) | {"role": role}
            messages.pop()
        messages.append(piece)
        last = rank
    return messages


def function(name: str, description: str | None, parameters: JSON | None) -> JSON:
    return {"type": "function", "function": {"name": name, "description": description or "",
                                             "parameters": parameters or {"type": "object", "properties": {}}}}


def as_object(arguments: str) -> JSON:
    """A call's arguments where only an object will do; what the model wrote is kept, whatever it is."""
    try:
        value = orjson.loads(arguments or "{}")
        orjson.dumps([[[[[[[[value]]]]]]]])  # deeper nesting can be read than written, and the reply is around it
    except (ValueError, TypeError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


# ---- what dialects share


# Some clients take these for ends of lines.
SEPARATORS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\u0085\u2028\u2029"]


def sse(data: JSON, event: str = "") -> bytes:
    line = orjson.dumps(data)
    for character, escaped in SEPARATORS:
        line = line.replace(character, escaped)
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + line + b"\n\n"


class Dialect:
    writer: "type[Stream]"
    limits: tuple[str, ...] = ("max_tokens",)
    stops = "stop"
    refused: dict[str, str] = {}  # what cannot be ignored, unless it is 1, and what to do instead

    def ask(self, body: JSON) -> Ask:
        """ApiError 400: what is wrong with the body."""
        node = Node(body)
        ask = Ask(body, stream=node.of("stream", bool) or False)
        for name, instead in {**SINGLE, **self.refused}.items():
            if (value := body.get(name)) and not (type(value) is int and value == 1):
                raise node.wrong(name, f"is not supported: {instead}", "unsupported_parameter")
        for name in self.limits:
            if (limit := node.of(name, int)) is not None and limit < 1:
                raise node.wrong(name, "must be at least 1")
            ask.max_tokens = ask.max_tokens or limit
        stop = node.of(self.stops, str, list) or []
        ask.stop = [stop] if isinstance(stop, str) else stop
        if not all(isinstance(one, str) and one for one in ask.stop):
            raise node.wrong(self.stops, "must be strings that are not empty", "invalid_type")
        node.of("stream_options", dict)
        ask.sampling = {name: body[name] for name in SAMPLING if node.of(name, int, float) is not None}
        ask.overridden = [name for name in IGNORED if body.get(name)]
        self.read(ask, node)
        return ask

    def stream(self, ask: Ask, head: JSON) -> "Stream":
        return self.writer(self, ask, head)

    def error(self, error: ApiError) -> JSON:
        return {"error": {"message": error.message, "type": self.fault(error), "param": None, "code": error.code}}

    def fault(self, error: ApiError) -> str:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
                 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
        return kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")

    def order(self, ask: Ask, messages: list[JSON]) -> None:
        """One system message, first: templates refuse another. What a later one says is said as the user."""
        system = [message["role"] in ("system", "developer") for message in messages]
        first = [*system, False].index(False)
        begin = joined(*(Node(message).text("content") for message in messages[:first]), by="\n\n")
        ask.messages = [{"role": "system", "content": begin}] * bool(first) + [
            {"role": "user", "content": message["content"]} if moved else message
            for message, moved in zip(messages[first:], system[first:], strict=True)]
        ask.overridden += ["system_moved"] * sum(system[first:])
        if not messages:
            raise ApiError(400, "there are no messages", "invalid_value")

    def functions(self, ask: Ask, tools: list[Node], *kinds: str | None) -> Iterator[Node]:
        """Those that the harness has itself; others, of the API's own servers, are left out."""
        for tool in tools:
            if (kind := tool.get("type")) in kinds:
                yield tool
            else:
                known = isinstance(kind, str) and re.fullmatch(r"\w{1,40}", kind, re.ASCII)
                ask.overridden.append(f"tool_{kind if known else 'unknown'}")

    def choose(self, ask: Ask, node: Node, effort: Any, grammar: Any) -> None:
        """The wishes that every chat dialect has. Forced calls and grammars would falsify the log-probs."""
        choice, parallel = node.get("tool_choice"), node.of("parallel_tool_calls", bool)
        if isinstance(choice, dict):
            parallel, choice = False if choice.get("disable_parallel_tool_use") else parallel, choice.get("type")
        if ask.tools:
            ask.extra = {"tool_choice": "none" if choice == "none" else "auto"}
            ask.extra |= {"parallel_tool_calls": parallel} if parallel is not None else {}
        ask.extra |= {"reasoning_effort": effort} if effort in EFFORTS else {}
        ask.overridden += ["tool_choice"] * (choice not in (None, "auto", "none"))
        ask.overridden += ["reasoning_effort"] * (effort not in (None, *EFFORTS))
        ask.overridden += ["response_format"] * bool(grammar and grammar != {"type": "text"})

    def blocks(self, ask: Ask, completion: JSON, status: str) -> list[JSON]:
        """The blocks of a reply that has them."""
        name, message = completion["name"], completion["message"]
        said = [self.block(name, kind, message[kind], status) for kind in ("reasoning", "content") if message.get(kind)]
        return said + [self.call(ask, f"{name}_{at}", sent) for at, sent in enumerate(message.get("tool_calls") or ())]


EMPTY = {"message": {}, "finish": None, "stop_string": None, "usage": {"prompt": 0, "sampled": 0}}


class Stream:
    """Writes one reply as SSE, each text as soon as it is there; `finish` sends the rest."""

    def __init__(self, dialect: Any, ask: Ask, head: JSON) -> None:
        self.dialect, self.ask, self.head = dialect, ask, head | EMPTY
        self.sent: dict[str, list[str]] = {"reasoning": [], "content": []}
        self.mismatch = False  # what was sent is not what the reply begins with

    def text(self, kind: Kind, delta: str) -> bytes:
        late = kind == "reasoning" and delta and self.sent["content"]  # reasoning comes first, or not at all
        self.mismatch |= bool(late)
        if late or not delta:
            return b""
        self.sent[kind].append(delta)
        return self.delta(kind, delta)

    def finish(self, completion: JSON) -> bytes:
        rest = b""
        for kind in ("reasoning", "content"):
            whole, sent = completion["message"].get(kind) or "", "".join(self.sent[kind])
            self.mismatch |= not whole.startswith(sent)
            rest += self.text(kind, whole[len(sent):]) if whole.startswith(sent) else b""
        return rest + self.end(completion)

    def fail(self, error: ApiError) -> bytes:
        return sse(event := self.dialect.error(error), event.get("type", ""))


# ---- chat completions, completions


class ChatStream(Stream):
    def chunk(self, delta: JSON, finish: str | None = None) -> bytes:
        return sse(self.dialect.body(self.head, [self.dialect.choice(delta, finish, "delta")], True))

    def start(self) -> bytes:
        return self.chunk({"role": "assistant", "content": ""})

    def ping(self) -> bytes:
        return self.chunk({"content": ""})

    def delta(self, kind: Kind, delta: str) -> bytes:
        keys = ("content",) if kind == "content" else ("reasoning", "reasoning_content")
        return self.chunk(dict.fromkeys(keys, delta))

    def end(self, completion: JSON) -> bytes:
        calls = completion["message"].get("tool_calls") or ()
        events = [self.chunk({"tool_calls": [{"index": at, **sent}]}) for at, sent in enumerate(calls)]
        events.append(self.chunk({}, completion["finish"]))
        if (self.ask.body.get("stream_options") or {}).get("include_usage"):
            usage = self.dialect.reply(self.ask, completion)["usage"]
            events.append(sse(self.dialect.body(self.head, [], True) | {"usage": usage}))
        return b"".join([*events, b"data: [DONE]\n\n"])


class Chat(Dialect):
    writer, limits = ChatStream, ("max_completion_tokens", "max_tokens")
    prefix, objects = "chatcmpl", ("chat.completion", "chat.completion.chunk")
    refused = {"functions": "send 'tools'", "audio": "this model writes text"}

    def read(self, ask: Ask, node: Node) -> None:
        self.order(ask, [self.message(message) for message in node.nodes("messages")])
        for tool in self.functions(ask, node.nodes("tools"), "function", None):
            tool.node("function", need=True).of("name", str, need=True)
            ask.tools.append(dict(tool))
        self.choose(ask, node, node.get("reasoning_effort"), node.get("response_format"))
        if wishes := node.of("chat_template_kwargs", dict):
            ask.extra["chat_template_kwargs"] = wishes

    def message(self, message: Node) -> JSON:
        content, calls = message.text("content"), []
        if isinstance(message.get("content"), list) and len(message["content"]) > 1:  # templates join parts as they do
            content = [{"type": "text", "text": part.said()} for part in message.nodes("content")]
        if (role := message.get("role")) not in ROLES:
            raise message.wrong("role", f"must be one of {', '.join(ROLES)}")
        if role != "assistant":
            kept = {key: message.of(key, str) for key in ("name", "tool_call_id") if message.get(key)}
            return {"role": role, "content": content} | kept
        for sent in message.nodes("tool_calls"):
            inner = sent.node("function", need=True)
            name, arguments = inner.of("name", str, need=True), inner.of("arguments", str) or ""
            calls.append(called(sent.of("id", str), name, arguments))
        return assistant(content, message.of("reasoning", str) or message.of("reasoning_content", str), calls)

    def choice(self, said: Any, finish: str | None, key: str) -> JSON:
        return {"index": 0, key: said, "logprobs": None, "finish_reason": "stop" if finish == "stop_string" else finish}

    def body(self, head: JSON, choices: list[JSON], chunk: bool) -> JSON:
        return {"id": f"{self.prefix}-{head['name']}", "object": self.objects[chunk], "created": head["created"],
                "model": head["model"], "choices": choices}

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        content, reasoning, calls = map(completion["message"].get, ("content", "reasoning", "tool_calls"))
        said = assistant(content or (None if reasoning or calls else ""), reasoning, calls)
        choice, usage = self.choice(said, completion["finish"], "message"), completion["usage"]
        return self.body(completion, [choice], False) | {"usage": {
            "prompt_tokens": usage["prompt"], "completion_tokens": usage["sampled"],
            "total_tokens": usage["prompt"] + usage["sampled"]}}


class Completions(Chat):
    limits, prefix, objects = ("max_tokens",), "cmpl", ("text_completion", "text_completion")
    refused = {"suffix": "it writes from left to right", "echo": "the prompt is yours"}

    def read(self, ask: Ask, node: Node) -> None:
        prompt = node.of("prompt", str, list, need=True)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not prompt or isinstance(prompt, list) and not all(type(one) is int and 0 <= one < 2**31 for one in prompt):
            raise node.wrong("prompt", "must be one text, or the ids of one, and not empty: send several in parallel")
        ask.prompt = prompt
        self.choose(ask, node, None, node.get("response_format"))

    def choice(self, said: JSON, finish: str | None, key: str) -> JSON:
        text = (said.get("reasoning") or "") + (said.get("content") or "")
        return super().choice(text, finish if finish in ("length", None) else "stop", "text")


# ---- replies of blocks: reasoning, then content, then calls


class BlockStream(Stream):
    index, kind, empty, status = -1, None, {}, "in_progress"  # of the last block; the open text, as begun; of the reply

    def block(self, text: str) -> JSON:
        return self.dialect.block(self.head["name"], self.kind, text, self.status)

    def event(self, kind: str, **data: Any) -> bytes:
        return sse({"type": kind, **data}, kind)

    def delta(self, kind: Kind, delta: str) -> bytes:
        if kind == self.kind:
            return self.says(self.empty, delta)
        ended, self.kind, self.index = self.close(), kind, self.index + 1
        self.empty = self.block("")
        return ended + self.begin(self.empty) + self.says(self.empty, delta)

    def close(self) -> bytes:
        event = self.ended(self.block("".join(self.sent[self.kind]))) if self.kind else b""
        self.kind = None
        return event

    def end(self, completion: JSON) -> bytes:
        final = self.dialect.reply(self.ask, completion)
        self.status = final.get("status")
        events = [self.close()]
        for block in final[self.dialect.key]:
            if "name" in block:  # a call
                self.index, said = self.index + 1, block.get("arguments", block.get("input"))
                said = said if isinstance(said, str) else written(said)
                events += [self.begin(block), self.says(block, said), self.ended(block)]
        return b"".join([*events, self.over(final)])


# ---- responses


EVENTS = {"reasoning": "response.reasoning_text", "message": "response.output_text",
          "function_call": "response.function_call_arguments", "custom_tool_call": "response.custom_tool_call_input"}
SAYS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field that holds what a call says
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesStream(BlockStream):
    number = -1

    def event(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return super().event(kind, sequence_number=self.number, **data)

    def on(self, item: JSON, event: str, **data: Any) -> bytes:
        part = {"content_index": 0} if "content" in item else {}
        logprobs = {"logprobs": []} if event.startswith("response.output_text") else {}
        return self.event(event, item_id=item["id"], output_index=self.index, **part, **data, **logprobs)

    def start(self) -> bytes:
        return self.event("response.created", response=self.dialect.reply(self.ask, self.head)) + self.ping()

    def ping(self) -> bytes:
        return self.event("response.in_progress", response=self.dialect.reply(self.ask, self.head))

    def begin(self, item: JSON) -> bytes:
        part = item.get("content", [None])[0]
        begun = {**item, "status": "in_progress", SAYS.get(item["type"], "content"): [] if part else ""}
        added = self.event("response.output_item.added", output_index=self.index, item=begun)
        return added + (self.on(item, "response.content_part.added", part=part) if part else b"")

    def says(self, item: JSON, delta: str) -> bytes:
        return self.on(item, f"{EVENTS[item['type']]}.delta", delta=delta)

    def ended(self, item: JSON) -> bytes:
        part, done = item.get("content", [None])[0], f"{EVENTS[item['type']]}.done"
        said = {"text": part["text"]} if part else {key: item[key] for key in ("name", SAYS[item["type"]])}
        ends = self.on(item, done, **said) + (self.on(item, "response.content_part.done", part=part) if part else b"")
        return ends + self.event("response.output_item.done", output_index=self.index, item=item)

    def over(self, final: JSON) -> bytes:
        return self.event(f"response.{final['status']}", response=final)

    def fail(self, error: ApiError) -> bytes:
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        return self.over(self.dialect.reply(self.ask, self.head) | failed)


class Responses(Dialect):
    writer, limits, key = ResponsesStream, ("max_output_tokens",), "output"
    refused = {"background": "stream the reply", "prompt": "send 'instructions' and 'input'"} | dict.fromkeys(
        ("previous_response_id", "conversation"), "nothing is stored, send the whole conversation as 'input'")

    def read(self, ask: Ask, node: Node) -> None:
        for tool in self.functions(ask, node.nodes("tools"), "function", "custom", "namespace"):
            name = {"namespace": tool.of("name", str, need=True)} if tool["type"] == "namespace" else {}
            for one in self.functions(ask, tool.nodes("tools"), "function", "custom") if name else [tool]:
                self.tool(ask, one, name)
        given, instructions = node.of("input", str, list, need=True), node.text("instructions")
        items = node.nodes("input") if isinstance(given, list) else [Node({"role": "user", "content": given})]
        pieces = [{"role": "system", "content": instructions}] * bool(instructions) + list(map(self.piece, items))
        self.order(ask, in_turns(pieces, join=False))
        self.choose(ask, node, node.node("reasoning").get("effort"), node.node("text").get("format"))

    def tool(self, ask: Ask, tool: Node, space: JSON) -> None:
        own, about, form = tool.of("name", str, need=True), tool.of("description", str) or "", tool.node("format")
        if form.get("type") == "grammar":  # not enforced, but the model may read it
            ask.overridden.append("tool_grammar")
            about += f"\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
        # Chat templates know no namespaces: a function's name begins with its own.
        name, custom = joined(space.get("namespace"), own, by="__"), tool["type"] == "custom"
        ask.named[name] = {"type": "custom_tool_call" if custom else "function_call", "name": own, **space}
        ask.tools.append(function(name, about, CUSTOM if custom else tool.of("parameters", dict)))

    def piece(self, item: Node) -> JSON:
        kind, role = item.of("type", str) or "message", item.get("role")
        if kind == "reasoning":
            return assistant("", item.text("content") or item.text("summary"))
        if kind == "message" and role in ROLES[:4]:
            return {"role": role, "content": item.text("content")}
        if kind in ("function_call_output", "custom_tool_call_output"):
            return {"role": "tool", "content": item.text("output"), "tool_call_id": item.of("call_id", str, need=True)}
        if kind not in SAYS:
            raise item.wrong(f"type {kind[:60]!r}", f"with role {role!r} is not supported", "unsupported_content")
        name = joined(item.of("namespace", str), item.of("name", str, need=True), by="__")
        said = item.of(SAYS[kind], str, need=True)
        arguments = said if kind == "function_call" else written({"input": said})
        return assistant("", "", [called(item.of("call_id", str, need=True), name, arguments)])

    def block(self, name: str, kind: Kind, text: str, status: str) -> JSON:
        if kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{name}", "summary": [],
                    "content": [{"type": "reasoning_text", "text": text}]}
        return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status,
                "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}

    def call(self, ask: Ask, name: str, sent: JSON) -> JSON:
        full, said = sent["function"]["name"], sent["function"]["arguments"]
        item = {"type": "function_call", "name": full, "call_id": sent["id"], "status": "completed"}
        item |= ask.named.get(full, {})
        if item["type"] == "function_call":
            return item | {"id": f"fc_{name}", "arguments": said}
        given = as_object(said).get("input")
        return item | {"id": f"ctc_{name}", "input": given if isinstance(given, str) else said}

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        """Of a completion without a finish: that it is in progress."""
        body, name, finish = ask.body, completion["name"], completion["finish"]
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        prompt, sampled = completion["usage"]["prompt"], completion["usage"]["sampled"]
        return {"id": f"resp_{name}", "object": "response", "created_at": completion["created"], "status": status,
                "error": None, "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
                "instructions": body.get("instructions"), "metadata": {}, "model": completion["model"],
                "output": self.blocks(ask, completion, status), "tool_choice": body.get("tool_choice") or "auto",
                "tools": body.get("tools") or [], "parallel_tool_calls": body.get("parallel_tool_calls", True),
                "usage": {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
                          "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                          "output_tokens_details": {"reasoning_tokens": 0}}}


# ---- Anthropic messages


class MessagesStream(BlockStream):
    def start(self) -> bytes:
        return self.event("message_start", message=self.dialect.reply(self.ask, self.head))

    def ping(self) -> bytes:
        return self.event("ping")

    def begin(self, block: JSON) -> bytes:
        empty = {"signature": ""} if "signature" in block else {"input": {}} if "input" in block else {}
        return self.event("content_block_start", index=self.index, content_block=block | empty)

    def says(self, block: JSON, delta: str) -> bytes:
        key = block["type"]
        kind, key = ("input_json_delta", "partial_json") if key == "tool_use" else (f"{key}_delta", key)
        return self.event("content_block_delta", index=self.index, delta={"type": kind, key: delta})

    def ended(self, block: JSON) -> bytes:
        signed = {"type": "signature_delta", "signature": block.get("signature")}
        event = self.event("content_block_delta", index=self.index, delta=signed) if "signature" in block else b""
        return event + self.event("content_block_stop", index=self.index)

    def over(self, final: JSON) -> bytes:
        stop = {key: final[key] for key in ("stop_reason", "stop_sequence")}
        return self.event("message_delta", delta=stop, usage=final["usage"]) + self.event("message_stop")


class Messages(Dialect):
    writer, stops, key = MessagesStream, "stop_sequences", "content"

    def read(self, ask: Ask, node: Node) -> None:
        if (system := node.text("system")).startswith("x-anthropic-billing-header"):  # differs in each request
            ask.overridden.append("billing_header")
            system = system.partition("\n")[2]
        for tool in self.functions(ask, node.nodes("tools"), "custom", None):
            about, schema = tool.of("description", str), tool.of("input_schema", dict)
            made = function(tool.of("name", str, need=True), about, schema)
            if tool.get("defer_loading"):  # not in the prompt until a tool_reference shows it there
                ask.named[made["function"]["name"]] = made
            else:
                ask.tools.append(made)
        messages = [{"role": "system", "content": system}] * bool(system)
        for message in node.nodes("messages"):
            if message.get("role") not in ("user", "assistant", "system"):
                raise message.wrong("role", "must be user, assistant or system")
            said = message.of("content", str, list, need=True)
            blocks = message.nodes("content") if isinstance(said, list) else [Node({"type": "text", "text": said})]
            messages += in_turns([self.piece(ask, message["role"], block) for block in blocks], join=True)
        self.order(ask, messages)
        config, thinking = node.node("output_config"), node.node("thinking")
        ask.overridden += ["thinking_budget"] * bool(thinking.get("budget_tokens"))
        effort = "none" if thinking.get("type") == "disabled" else config.get("effort")
        self.choose(ask, node, effort, config.get("format") or node.get("output_format"))

    def piece(self, ask: Ask, role: str, block: Node) -> JSON:
        if (kind := block.get("type")) in ("thinking", "redacted_thinking"):
            ask.overridden += [kind] * (kind != "thinking")
            return assistant("", block.of("thinking", str))
        if kind == "tool_use":
            identity, name = block.of("id", str, need=True), block.of("name", str, need=True)
            return assistant("", "", [called(identity, name, written(block.of("input", dict) or {}))])
        if kind != "tool_result":
            return {"role": role, "content": block.said()}
        identity, parts = block.of("tool_use_id", str, need=True), block.get("content")
        result = block.text("content") if not isinstance(parts, list) else joined(
            *(self.shown(ask, part) for part in block.nodes("content")))
        if block.get("is_error") and "error" not in result.lower():  # chat has no flag for it; most harnesses say it
            result = f"Error: {result}"
        return {"role": "tool", "content": result, "tool_call_id": identity}

    def shown(self, ask: Ask, part: Node) -> str:
        """The text of a tool result's part. A tool_reference is the definition of a tool that was not shown so far."""
        if part.get("type") != "tool_reference":
            return part.said()
        name = part.of("tool_name", str, need=True)
        return written(ask.named.get(name) or {"tool_name": name})

    def block(self, name: str, kind: Kind, text: str, status: str) -> JSON:
        return {"type": "text", "text": text} if kind == "content" else {
            "type": "thinking", "thinking": text, "signature": f"sig_{name}"}

    def call(self, ask: Ask, name: str, sent: JSON) -> JSON:
        return {"type": "tool_use", "id": sent["id"], "name": sent["function"]["name"],
                "input": as_object(sent["function"]["arguments"])}

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        stop = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_string": "stop_sequence"}
        prompt, sampled = completion["usage"]["prompt"], completion["usage"]["sampled"]
        return {"id": f"msg_{completion['name']}", "type": "message", "role": "assistant", "model": completion["model"],
                "content": self.blocks(ask, completion, ""), "stop_reason": stop.get(completion["finish"]),
                "stop_sequence": completion.get("stop_string"),
                "usage": {"input_tokens": prompt, "output_tokens": sampled}}

    def error(self, error: ApiError) -> JSON:
        message = error.message
        if error.code == "context_length_exceeded":  # in the words that clients look for
            limit, asked = [*map(int, re.findall(r"\d+", message)), 0, 0][:2]
            message = f"prompt is too long: {f'{asked} tokens > {limit} maximum' if asked > limit else message}"
        return {"type": "error", "error": {"type": self.fault(error), "message": message}}


DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": Chat(), "/v1/completions": Completions(),
                                "/v1/responses": Responses(), "/v1/messages": Messages()}
