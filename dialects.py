"""API dialects: what a harness sends becomes one chat request, and one completion becomes what it expects back.

    body --Dialect.ask--> Ask (chat messages, function tools, limits, wishes) --> gateway --> completion
    completion --Dialect.reply--> the plain body;   --Stream: start, text*, ping*, finish | fail--> the same as SSE
A completion, whatever the dialect: {"name", "created", "model", "message": {"content", "reasoning", "tool_calls"},
"finish": "stop" | "length" | "tool_calls" | "stop_string", "stop_string", "usage": {"prompt", "sampled"}}. All ids are
made from its name, so that a replay has the same bytes. Chat messages are rebuilt from what they say, so that an echo
of a reply is one and the same message in every dialect, whatever its SDK adds.

Pure: no I/O. What is wrong in a body raises ApiError(400) naming the field; what is right but not followed (forced
tools, grammars, hosted tools, ...) is named in Ask.overridden, to be counted.
"""

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
    names: dict[str, JSON] = field(default_factory=dict)  # Responses: how a call of a chat function tool is written


# ---- reading bodies


NAMES = {str: "a string", list: "a list", dict: "an object", int: "an integer", float: "a number", bool: "a boolean",
         type(None): "missing"}
TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "summary_text": "text", "reasoning_text": "text",
         "refusal": "refusal"}  # the field of each kind of part that holds its text
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty")
IGNORED = ("logit_bias", "logprobs", "top_logprobs", "structured_outputs", "guided_json", "guided_regex",
           "guided_choice", "guided_grammar", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words",
           "context_management", "max_tool_calls")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def get(body: JSON, name: str, *kinds: type, where: str = "", need: bool = False) -> Any:
    """body[name], of one of the JSON types `kinds`; None where it is null or missing, unless there is `need` of it."""
    value = body.get(name)
    if (value is not None or need) and type(value) not in kinds:
        wanted = " or ".join(NAMES[kind] for kind in kinds)
        raise ApiError(400, f"{where}{name} must be {wanted}, but is {NAMES[type(value)]}", "invalid_type")
    return value


def objects(body: JSON, name: str, where: str = "") -> list[JSON]:
    items = get(body, name, list, where=where) or []
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise ApiError(400, f"{where}{name}[{at}] must be an object, but is {NAMES[type(item)]}", "invalid_type")
    return items


def texts(body: JSON, name: str, where: str = "") -> list[str]:
    """The texts of body[name]: null, a string or a list of parts."""
    if not isinstance(body.get(name), list):
        return [get(body, name, str, list, where=where) or ""]
    found = []
    for at, part in enumerate(objects(body, name, where)):
        here, kind = f"{where}{name}[{at}]", get(part, "type", str, where=f"{where}{name}[{at}].")
        if kind not in TEXTS:
            raise ApiError(400, f"{here}: parts of type {kind!r} are not supported here: this model reads text, no "
                                "images, audio or files", "unsupported_content")
        found.append(get(part, TEXTS[kind], str, where=f"{here}.", need=True))
    return found


def joined(body: JSON, name: str, where: str = "") -> str:
    return "\n".join(part for part in texts(body, name, where) if part)


def assistant(content: str | list[JSON], reasoning: str, calls: list[JSON]) -> JSON:
    # Engines and templates disagree about the name of the reasoning: both.
    thought = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    return {"role": "assistant", "content": content, **thought, **({"tool_calls": calls} if calls else {})}


def call(name: str, arguments: str, identity: str | None) -> JSON:
    return {"id": identity or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def function(name: str, description: str | None, parameters: JSON | None) -> JSON:
    return {"type": "function", "function": {"name": name, "description": description or "",
                                             "parameters": parameters or {"type": "object", "properties": {}}}}


def hosted(kind: Any) -> str:
    """What a tool that only the API's own servers have is counted as."""
    return f"tool_{kind}" if isinstance(kind, str) and re.fullmatch(r"\w{1,40}", kind, re.ASCII) else "tool_unknown"


def as_object(arguments: str) -> JSON:
    """A call's arguments where only an object will do; what the model wrote is kept, whatever it is."""
    try:
        value = orjson.loads(arguments or "{}")
        orjson.dumps([[[[[[[[value]]]]]]]])  # deeper nesting can be read than written, and the reply is around it
    except (ValueError, TypeError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def ordered(messages: list[JSON], ask: Ask) -> list[JSON]:
    """One system message, first: templates refuse another. A later one says what it says as the user's."""
    system, rest = [], []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            rest.append(message)
        elif not rest:
            system.append(joined(message, "content"))
        else:
            rest.append({"role": "user", "content": message["content"]})
            ask.overridden.append("system_moved")
    if not rest and not system:
        raise ApiError(400, "there are no messages", "invalid_value")
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}] * bool(system) + rest


# ---- what dialects share


def sse(data: JSON, event: str = "") -> bytes:
    return (f"event: {event}\n".encode() if event else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


class Dialect:
    limits: tuple[str, ...] = ("max_tokens",)
    stops = "stop"
    refused: dict[str, str] = {}  # fields that would be silently ignored, and what to do instead

    def ask(self, body: JSON) -> Ask:
        """ApiError 400: what is wrong with the body."""
        ask = Ask(body, stream=get(body, "stream", bool) or False)
        for name, instead in self.refused.items():
            if body.get(name):
                raise ApiError(400, f"{name} is not supported: {instead}", "unsupported_parameter")
        for name in self.limits:
            if (limit := get(body, name, int)) is not None and limit < 1:
                raise ApiError(400, f"{name} must be at least 1", "invalid_value")
            ask.max_tokens = ask.max_tokens or limit
        stop = get(body, self.stops, str, list) or []
        ask.stop = [stop] if isinstance(stop, str) else stop
        if not all(isinstance(one, str) and one for one in ask.stop):
            raise ApiError(400, f"{self.stops} must be strings that are not empty", "invalid_type")
        ask.sampling = {name: body[name] for name in SAMPLING if get(body, name, int, float) is not None}
        ask.overridden = [name for name in IGNORED if body.get(name)]
        self.read(ask, body)
        return ask

    def read(self, ask: Ask, body: JSON) -> None:
        raise NotImplementedError

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        raise NotImplementedError

    def stream(self, ask: Ask, head: JSON) -> "Stream":
        return self.writer(self, ask, head)

    def error(self, error: ApiError) -> JSON:
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
                429: "rate_limit_error"}.get(error.status, "invalid_request_error")
        kind = "server_error" if error.status >= 500 else kind
        return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}

    def choose(self, ask: Ask, choice: Any, parallel: bool | None, effort: Any, grammar: Any) -> None:
        """The wishes that every chat dialect has. Forced calls and grammars would falsify the log-probs."""
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in (None, "auto", "none"):
            ask.overridden.append("tool_choice")
        if ask.tools:
            ask.extra = {"tool_choice": "none" if kind == "none" else "auto"}
            ask.extra |= {"parallel_tool_calls": parallel} if parallel is not None else {}
        if effort in EFFORTS:
            ask.extra["reasoning_effort"] = effort
        elif effort is not None:
            ask.overridden.append("reasoning_effort")
        if grammar and (not isinstance(grammar, dict) or grammar.get("type") != "text"):
            ask.overridden.append("response_format")


class Stream:
    """Writes one reply as SSE. What `text` has sent is no longer asked for; `finish` sends the rest."""

    def __init__(self, dialect: Dialect, ask: Ask, head: JSON) -> None:
        self.dialect, self.ask, self.head, self.mismatch = dialect, ask, head, False
        self.sent: dict[str, list[str]] = {"reasoning": [], "content": []}

    def start(self) -> bytes:
        raise NotImplementedError

    def delta(self, kind: Kind, delta: str) -> bytes:
        raise NotImplementedError

    def end(self, completion: JSON) -> bytes:
        """Tool calls, terminal events, usage."""
        raise NotImplementedError

    def ping(self) -> bytes:
        raise NotImplementedError

    def text(self, kind: Kind, delta: str) -> bytes:
        if not delta:
            return b""
        self.sent[kind].append(delta)
        return self.delta(kind, delta)

    def finish(self, completion: JSON) -> bytes:
        events = []
        for kind in ("reasoning", "content"):
            whole, sent = completion["message"].get(kind) or "", "".join(self.sent[kind])
            late = kind == "reasoning" and len(whole) > len(sent) and self.sent["content"]
            if late or not whole.startswith(sent):
                self.mismatch = True
            else:
                events.append(self.text(kind, whole[len(sent):]))
        return b"".join([*events, self.end(completion)])

    def fail(self, error: ApiError) -> bytes:
        return sse(self.dialect.error(error))


# ---- chat completions


class ChatStream(Stream):
    def chunk(self, choices: list[JSON], **more: Any) -> bytes:
        return sse({"id": f"chatcmpl-{self.head['name']}", "object": "chat.completion.chunk",
                    "created": self.head["created"], "model": self.head["model"], "choices": choices, **more})

    def choice(self, delta: JSON, finish: str | None = None) -> bytes:
        return self.chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])

    def start(self) -> bytes:
        return self.choice({"role": "assistant", "content": ""})

    def delta(self, kind: Kind, delta: str) -> bytes:
        keys = ("content",) if kind == "content" else ("reasoning_content", "reasoning")
        return self.choice(dict.fromkeys(keys, delta))

    def ping(self) -> bytes:
        return self.choice({"content": ""})

    def end(self, completion: JSON) -> bytes:
        reply = self.dialect.reply(self.ask, completion)
        choice = reply["choices"][0]
        calls = choice.get("message", {}).get("tool_calls") or []
        events = [self.choice({"tool_calls": [{"index": at, **one}]}) for at, one in enumerate(calls)]
        events.append(self.choice({}, choice["finish_reason"]))
        if (self.ask.body.get("stream_options") or {}).get("include_usage"):
            events.append(self.chunk([], usage=reply["usage"]))
        return b"".join([*events, b"data: [DONE]\n\n"])


class Chat(Dialect):
    limits, writer = ("max_completion_tokens", "max_tokens"), ChatStream
    refused = {"functions": "send 'tools'", "audio": "this model writes text only"}

    def read(self, ask: Ask, body: JSON) -> None:
        check_samples(body)
        ask.messages = ordered([self.message(message, f"messages[{at}].")
                                for at, message in enumerate(objects(body, "messages"))], ask)
        for at, tool in enumerate(objects(body, "tools")):
            if tool.get("type", "function") == "function":
                get(get(tool, "function", dict, where=f"tools[{at}].", need=True), "name", str,
                    where=f"tools[{at}].function.", need=True)
                ask.tools.append(tool)
            else:
                ask.overridden.append(hosted(tool["type"]))
        self.choose(ask, body.get("tool_choice"), get(body, "parallel_tool_calls", bool), body.get("reasoning_effort"),
                    body.get("response_format"))
        if wishes := get(body, "chat_template_kwargs", dict):
            ask.extra["chat_template_kwargs"] = wishes

    def message(self, message: JSON, where: str) -> JSON:
        role, parts = message.get("role"), texts(message, "content", where)
        content = [{"type": "text", "text": part} for part in parts] if len(parts) > 1 else "".join(parts)
        if role == "assistant":
            calls = []
            for at, sent in enumerate(objects(message, "tool_calls", where)):
                here = f"{where}tool_calls[{at}]."
                called = get(sent, "function", dict, where=here, need=True)
                arguments = get(called, "arguments", str, dict, where=here) or "{}"
                calls.append(call(get(called, "name", str, where=here, need=True),
                                  arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode(),
                                  get(sent, "id", str, where=here)))
            reasoning = [get(message, key, str, where=where) for key in ("reasoning_content", "reasoning")]
            return assistant(content, reasoning[0] or reasoning[1] or "", calls)
        if role not in ("system", "developer", "user", "tool"):
            raise ApiError(400, f"{where}role must be system, developer, user, assistant or tool", "invalid_value")
        return {"role": role, "content": content} | {
            key: message[key] for key in ("name", "tool_call_id") if get(message, key, str, where=where)}

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        message, finish = completion["message"], completion["finish"]
        reasoning, calls, content = message.get("reasoning"), message.get("tool_calls"), message.get("content")
        said = assistant(content or (None if reasoning or calls else ""), reasoning, calls)
        return {"id": f"chatcmpl-{completion['name']}", "object": "chat.completion", "created": completion["created"],
                "model": completion["model"], "usage": usage(completion), "choices": [{
                    "index": 0, "message": said, "logprobs": None,
                    "finish_reason": "stop" if finish == "stop_string" else finish}]}


def usage(completion: JSON) -> JSON:
    prompt, sampled = completion["usage"]["prompt"], completion["usage"]["sampled"]
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def check_samples(body: JSON) -> None:
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise ApiError(400, f"{name}={str(body[name])[:20]} is not supported: send parallel requests, each is a "
                                "sample of its own", "unsupported_parameter")
    get(body, "stream_options", dict)


# ---- completions


class CompletionsStream(ChatStream):
    def chunk(self, choices: list[JSON], **more: Any) -> bytes:
        return sse({"id": f"cmpl-{self.head['name']}", "object": "text_completion", "created": self.head["created"],
                    "model": self.head["model"], "choices": choices, **more})

    def choice(self, delta: JSON, finish: str | None = None) -> bytes:
        said = delta.get("content") or delta.get("reasoning") or ""
        return self.chunk([{"index": 0, "text": said, "logprobs": None, "finish_reason": finish}])


class Completions(Dialect):
    writer = CompletionsStream
    refused = {"suffix": "this model writes from left to right", "echo": "the prompt is not repeated"}

    def read(self, ask: Ask, body: JSON) -> None:
        check_samples(body)
        prompt = get(body, "prompt", str, list, need=True)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not prompt or isinstance(prompt, list) and not all(type(one) is int and 0 <= one < 2**31 for one in prompt):
            raise ApiError(400, "prompt must be one text or one list of token ids, not empty: send parallel requests "
                                "for several", "invalid_value")
        ask.prompt = prompt
        if body.get("response_format"):
            ask.overridden.append("response_format")

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        message, finish = completion["message"], completion["finish"]
        said = (message.get("reasoning") or "") + (message.get("content") or "")
        return {"id": f"cmpl-{completion['name']}", "object": "text_completion", "created": completion["created"],
                "model": completion["model"], "usage": usage(completion), "choices": [{
                    "index": 0, "text": said, "logprobs": None,
                    "finish_reason": "length" if finish == "length" else "stop"}]}


class BlockStream(Stream):
    """The reply as numbered blocks, one after another: reasoning, content, calls."""

    index, kind = -1, None  # of the last block; what the open one is

    def begin(self, block: JSON) -> bytes:
        raise NotImplementedError

    def block(self, kind: Kind, text: str) -> JSON:
        raise NotImplementedError

    def close(self, block: JSON) -> bytes:
        raise NotImplementedError

    def event(self, kind: str, **data: Any) -> bytes:
        return sse({"type": kind, **data}, kind)

    def open(self, kind: Kind | None, block: JSON) -> bytes:
        self.index, self.kind = self.index + 1, kind
        return self.begin(block)

    def close_text(self) -> bytes:
        kind, self.kind = self.kind, None
        return self.close(self.block(kind, "".join(self.sent[kind]))) if kind else b""

    def opened(self, kind: Kind) -> bytes:
        return b"" if kind == self.kind else self.close_text() + self.open(kind, self.block(kind, ""))


# ---- responses


SAYS = {"reasoning": ("response.reasoning_text", "text"), "message": ("response.output_text", "text"),
        "function_call": ("response.function_call_arguments", "arguments"),
        "custom_tool_call": ("response.custom_tool_call_input", "input")}  # event and field of what an item says
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesStream(BlockStream):
    number, status = 0, "completed"

    def event(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return super().event(kind, sequence_number=self.number - 1, **data)

    def response(self, status: str, **more: Any) -> JSON:
        return self.dialect.response(self.ask, self.head, status, []) | more

    def start(self) -> bytes:
        return self.event("response.created", response=self.response("in_progress")) + self.ping()

    def ping(self) -> bytes:
        return self.event("response.in_progress", response=self.response("in_progress"))

    def block(self, kind: Kind, text: str) -> JSON:
        return self.dialect.item(self.ask, self.head["name"], kind, text, self.status)

    def at(self, item: JSON) -> JSON:
        return {"item_id": item["id"], "output_index": self.index} | ({"content_index": 0} if "content" in item else {})

    def begin(self, item: JSON) -> bytes:
        if "content" not in item:
            begun = {**item, "status": "in_progress", SAYS[item["type"]][1]: ""}
            return self.event("response.output_item.added", output_index=self.index, item=begun)
        begun = {**item, "status": "in_progress", "content": []}
        added = self.event("response.output_item.added", output_index=self.index, item=begun)
        return added + self.event("response.content_part.added", **self.at(item), part=item["content"][0])

    def says(self, item: JSON, event: str, **data: Any) -> bytes:
        logprobs = {"logprobs": []} if item["type"] == "message" else {}
        return self.event(f"{SAYS[item['type']][0]}.{event}", **self.at(item), **data, **logprobs)

    def delta(self, kind: Kind, delta: str) -> bytes:
        return self.opened(kind) + self.says(self.block(kind, ""), "delta", delta=delta)

    def close(self, item: JSON) -> bytes:
        if "content" in item:
            part = item["content"][0]
            done = self.says(item, "done", text=part["text"])
            done += self.event("response.content_part.done", **self.at(item), part=part)
        else:
            key = SAYS[item["type"]][1]
            done = self.says(item, "done", **{key: item[key]}, name=item["name"])
        return done + self.event("response.output_item.done", output_index=self.index, item=item)

    def end(self, completion: JSON) -> bytes:
        final = self.dialect.reply(self.ask, completion)
        self.status = final["status"]
        events = [self.close_text()]
        for item in final["output"]:
            if "content" not in item:
                events.append(self.open(None, item) + self.says(item, "delta", delta=item[SAYS[item["type"]][1]]))
                events.append(self.close(item))
        return b"".join([*events, self.event(f"response.{final['status']}", response=final)])

    def fail(self, error: ApiError) -> bytes:
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        failed = self.response("failed", error={"code": code, "message": error.message})
        return self.event("response.failed", response=failed)


class Responses(Dialect):
    limits, writer = ("max_output_tokens",), ResponsesStream
    refused = {"previous_response_id": "nothing is stored, send the whole conversation as 'input'",
               "conversation": "nothing is stored, send the whole conversation as 'input'",
               "background": "stream the reply", "prompt": "send 'instructions' and 'input'"}

    def read(self, ask: Ask, body: JSON) -> None:
        for at, tool in enumerate(objects(body, "tools")):
            where = f"tools[{at}]."
            if tool.get("type") == "namespace":
                space = get(tool, "name", str, where=where, need=True)
                for inner in objects(tool, "tools", where):
                    self.tool(ask, inner, where, {"namespace": space})
            else:
                self.tool(ask, tool, where, {})
        messages = [{"role": "system", "content": joined(body, "instructions")}] if body.get("instructions") else []
        if isinstance(get(body, "input", str, list, need=True), str):
            messages.append({"role": "user", "content": body["input"]})
        else:
            self.items(messages, objects(body, "input"))
        ask.messages = ordered(messages, ask)
        get(body, "include", list)
        self.choose(ask, body.get("tool_choice"), get(body, "parallel_tool_calls", bool),
                    (get(body, "reasoning", dict) or {}).get("effort"), (get(body, "text", dict) or {}).get("format"))

    def tool(self, ask: Ask, tool: JSON, where: str, space: JSON) -> None:
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            return ask.overridden.append(hosted(kind))
        own, about = get(tool, "name", str, where=where, need=True), get(tool, "description", str, where=where) or ""
        parameters = CUSTOM if kind == "custom" else get(tool, "parameters", dict, where=where)
        form = get(tool, "format", dict, where=where) or {}
        if form.get("type") == "grammar":  # not enforced, but the model may read it
            ask.overridden.append("tool_grammar")
            about += f"\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
        name = self.flat(own, space)
        ask.names[name] = {"type": "custom_tool_call" if kind == "custom" else "function_call", "name": own, **space}
        ask.tools.append(function(name, about, parameters))

    def flat(self, name: str, space: JSON) -> str:
        """A namespace is the beginning of a function's name, for a chat template."""
        return f"{space['namespace']}__{name}" if space.get("namespace") else name

    def items(self, messages: list[JSON], items: list[JSON]) -> None:
        """Reasoning, a message and calls in a row become one assistant message; an item that would stand before what
        is there begins another."""
        last = 9
        for at, item in enumerate(items):
            where = f"input[{at}]."
            kind = get(item, "type", str, where=where) or "message"
            rank = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}.get(kind, 9)
            if kind == "message" and item.get("role") != "assistant":
                if item.get("role") not in ("user", "system", "developer"):
                    raise ApiError(400, f"{where}role must be user, assistant, system or developer", "invalid_value")
                messages.append({"role": item["role"], "content": joined(item, "content", where)})
                rank = 9
            elif kind in ("function_call_output", "custom_tool_call_output"):
                messages.append({"role": "tool", "content": joined(item, "output", where),
                                 "tool_call_id": get(item, "call_id", str, where=where, need=True)})
            elif rank == 9:
                raise ApiError(400, f"{where}type {kind[:100]!r} is not supported", "unsupported_content")
            else:
                if rank < last or rank == last == 1:
                    messages.append(assistant("", "", []))
                self.add(messages[-1], item, kind, where)
            last = rank

    def add(self, message: JSON, item: JSON, kind: str, where: str) -> None:
        if kind == "reasoning":
            reasoning = joined(item, "content", where) or get(item, "encrypted_content", str, where=where)
            message |= assistant("", reasoning or joined(item, "summary", where), [])
        elif kind == "message":
            message["content"] = joined(item, "content", where)
        else:
            space, name = {"namespace": get(item, "namespace", str, where=where)}, get(item, "name", str, where=where)
            said = get(item, SAYS[kind][1], str, where=where, need=True)
            arguments = said if kind == "function_call" else orjson.dumps({"input": said}).decode()
            message.setdefault("tool_calls", []).append(
                call(self.flat(name or "", space), arguments, get(item, "call_id", str, where=where, need=True)))

    def item(self, ask: Ask, name: str, kind: Kind, text: str, status: str) -> JSON:
        if kind == "content":
            return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status,
                    "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}
        # Clients that keep the conversation themselves echo this and may drop the text (Codex does): it is the text.
        kept = {"encrypted_content": text} if "reasoning.encrypted_content" in (ask.body.get("include") or ()) else {}
        return {"type": "reasoning", "id": f"rs_{name}", "summary": [],
                "content": [{"type": "reasoning_text", "text": text}], **kept}

    def call(self, ask: Ask, name: str, sent: JSON) -> JSON:
        called, arguments = sent["function"]["name"], sent["function"]["arguments"]
        known = ask.names.get(called) or {"type": "function_call", "name": called}
        item = {**known, "id": name, "call_id": sent["id"], "status": "completed"}
        if known["type"] == "function_call":
            return {**item, "id": f"fc_{name}", "arguments": arguments}
        written = as_object(arguments).get("input")
        return {**item, "id": f"ctc_{name}", "input": written if isinstance(written, str) else arguments}

    def response(self, ask: Ask, head: JSON, status: str, output: list[JSON]) -> JSON:
        body = ask.body
        return {"id": f"resp_{head['name']}", "object": "response", "created_at": head["created"], "status": status,
                "error": None, "incomplete_details": None, "instructions": body.get("instructions"), "metadata": {},
                "model": head["model"], "output": output, "parallel_tool_calls": body.get("parallel_tool_calls", True),
                "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [], "usage": None}

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        message, cut, name = completion["message"], completion["finish"] == "length", completion["name"]
        status = "incomplete" if cut else "completed"
        output = [self.item(ask, name, kind, message[kind], status) for kind in ("reasoning", "content")
                  if message.get(kind)]
        output += [self.call(ask, f"{name}_{at}", sent) for at, sent in enumerate(message.get("tool_calls") or ())]
        prompt, sampled = completion["usage"]["prompt"], completion["usage"]["sampled"]
        return self.response(ask, completion, status, output) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                      "output_tokens": sampled, "output_tokens_details": {"reasoning_tokens": 0},
                      "total_tokens": prompt + sampled}}


# ---- Anthropic messages


class MessagesStream(BlockStream):
    def block(self, kind: Kind, text: str) -> JSON:
        if kind == "content":
            return {"type": "text", "text": text}
        return {"type": "thinking", "thinking": text, "signature": f"sig_{self.head['name']}"}

    def start(self) -> bytes:
        begun = {"id": f"msg_{self.head['name']}", "type": "message", "role": "assistant", "model": self.head["model"],
                 "content": [], "stop_reason": None, "stop_sequence": None,
                 "usage": {"input_tokens": 0, "output_tokens": 0}}
        return self.event("message_start", message=begun)

    def ping(self) -> bytes:
        return self.event("ping")

    def begin(self, block: JSON) -> bytes:
        empty = {"thinking": "", "signature": "", "text": "", "input": {}}
        begun = {key: empty.get(key, value) for key, value in block.items()}
        return self.event("content_block_start", index=self.index, content_block=begun)

    def block_delta(self, kind: str, **data: Any) -> bytes:
        return self.event("content_block_delta", index=self.index, delta={"type": kind, **data})

    def delta(self, kind: Kind, delta: str) -> bytes:
        key = "text" if kind == "content" else "thinking"
        return self.opened(kind) + self.block_delta(f"{key}_delta", **{key: delta})

    def close(self, block: JSON) -> bytes:
        signed = "signature" in block
        signature = self.block_delta("signature_delta", signature=block["signature"]) if signed else b""
        return signature + self.event("content_block_stop", index=self.index)

    def end(self, completion: JSON) -> bytes:
        final = self.dialect.reply(self.ask, completion)
        events = [self.close_text()]
        for block in final["content"]:
            if block["type"] == "tool_use":
                events.append(self.open(None, block))
                events.append(self.block_delta("input_json_delta", partial_json=orjson.dumps(block["input"]).decode()))
                events.append(self.close(block))
        stop = {key: final[key] for key in ("stop_reason", "stop_sequence")}
        events.append(self.event("message_delta", delta=stop, usage=final["usage"]))
        return b"".join([*events, self.event("message_stop")])

    def fail(self, error: ApiError) -> bytes:
        return sse(self.dialect.error(error), "error")


class Messages(Dialect):
    writer, stops = MessagesStream, "stop_sequences"

    def read(self, ask: Ask, body: JSON) -> None:
        system = texts(body, "system")
        if system and system[0].startswith("x-anthropic-billing-header"):  # another one in each request
            ask.overridden.append("billing_header")
            system[0] = system[0].partition("\n")[2]
        messages = [{"role": "system", "content": "\n".join(filter(None, system))}] if any(system) else []
        for at, message in enumerate(objects(body, "messages")):
            role, where = message.get("role"), f"messages[{at}]."
            if role not in ("user", "assistant", "system"):
                raise ApiError(400, f"{where}role must be user, assistant or system", "invalid_value")
            if not isinstance(message.get("content"), list):
                messages.append({"role": role, "content": joined(message, "content", where)})
            elif role == "assistant":
                messages.append(self.said(ask, objects(message, "content", where), where))
            else:
                messages += self.told(role, objects(message, "content", where), where)
        ask.messages = ordered(messages, ask)
        for at, tool in enumerate(objects(body, "tools")):
            if tool.get("type") in (None, "custom"):
                name, about = (get(tool, key, str, where=f"tools[{at}].", need=key == "name")
                               for key in ("name", "description"))
                ask.tools.append(function(name, about, get(tool, "input_schema", dict, where=f"tools[{at}].")))
            else:
                ask.overridden.append(hosted(tool["type"]))
        choice, config = get(body, "tool_choice", dict) or {}, get(body, "output_config", dict) or {}
        thinking = get(body, "thinking", dict) or {}
        ask.overridden += ["thinking_budget"] * bool(thinking.get("budget_tokens"))
        self.choose(ask, choice.get("type"), False if choice.get("disable_parallel_tool_use") else None,
                    "none" if thinking.get("type") == "disabled" else config.get("effort"),
                    config.get("format") or body.get("output_format"))

    def said(self, ask: Ask, blocks: list[JSON], where: str) -> JSON:
        reasoning, content, calls = [], [], []
        for block in blocks:
            kind = block.get("type")
            if kind == "thinking":
                reasoning.append(get(block, "thinking", str, where=where, need=True))
            elif kind == "redacted_thinking":
                ask.overridden.append("redacted_thinking")
            elif kind == "tool_use":
                given = orjson.dumps(get(block, "input", dict, where=where) or {}).decode()
                calls.append(call(get(block, "name", str, where=where, need=True), given,
                                  get(block, "id", str, where=where, need=True)))
            else:
                content += texts({"content": [block]}, "content", where)
        return assistant("\n".join(filter(None, content)), "\n".join(filter(None, reasoning)), calls)

    def told(self, role: str, blocks: list[JSON], where: str) -> list[JSON]:
        """Tool results and what is said between them, in their order."""
        messages: list[JSON] = []
        for block in blocks:
            if block.get("type") == "tool_result":
                result = joined(block, "content", where)
                # Chat has no flag for it, so that it is said; most harnesses do themselves.
                failed = block.get("is_error") and "error" not in result.lower()
                messages.append({"role": "tool", "content": "Error: " * bool(failed) + result,
                                 "tool_call_id": get(block, "tool_use_id", str, where=where, need=True)})
                continue
            said = texts({"content": [block]}, "content", where)[0]
            if said and messages and messages[-1]["role"] == role:
                messages[-1]["content"] += "\n" + said
            elif said:
                messages.append({"role": role, "content": said})
        return messages or [{"role": role, "content": ""}]

    def reply(self, ask: Ask, completion: JSON) -> JSON:
        message, head = completion["message"], self.stream(ask, completion)
        content = [head.block(kind, message[kind]) for kind in ("reasoning", "content") if message.get(kind)]
        content += [{"type": "tool_use", "id": sent["id"], "name": sent["function"]["name"],
                     "input": as_object(sent["function"]["arguments"])} for sent in message.get("tool_calls") or ()]
        stop = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_string": "stop_sequence"}
        return {"id": f"msg_{completion['name']}", "type": "message", "role": "assistant", "model": completion["model"],
                "content": content, "stop_reason": stop[completion["finish"]],
                "stop_sequence": completion["stop_string"] if completion["finish"] == "stop_string" else None,
                "usage": {"input_tokens": completion["usage"]["prompt"],
                          "output_tokens": completion["usage"]["sampled"]}}

    def error(self, error: ApiError) -> JSON:
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
                429: "rate_limit_error", 503: "overloaded_error"}.get(error.status, "invalid_request_error")
        message = error.message
        if error.code == "context_length_exceeded":  # in the words that clients look for, with the numbers if we know
            limit, asked = [*map(int, re.findall(r"\d+", message)), 0, 0][:2]
            message = f"{asked} tokens > {limit} maximum" if asked > limit else message
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {
            "type": "api_error" if error.status >= 500 and error.status != 503 else kind, "message": message}}


DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": Chat(), "/v1/completions": Completions(),
                                "/v1/responses": Responses(), "/v1/messages": Messages()}


# ---- OLD INTERFACE, until the gateway has moved (delete all below)


ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
               404: "not_found_error", 409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error"}


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
