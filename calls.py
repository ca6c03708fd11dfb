"""One model call: its tokens and text as they are sampled, and the history that its prompt continues.

Between the gateway, which does all input and output, and the pure rules of trajectory.py. No I/O of its own, no clock.

    Vocabulary  what is needed of the model's tokenizer
    Text        the text of a call so far: what of it can be streamed, where a stop string ends it
    Attempt     the token sequences and conversations of one attempt: what does a prompt continue, and with which ids?
    Call        one request, all that the engine sampled for it, and who waits for it
"""

import asyncio
import contextlib
import functools
import hashlib
import re
import time
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tokenizers import Tokenizer, decoders, pre_tokenizers

from dialects import DIALECTS, JSON, Ask, Dialect
from trajectory import after_reply, continued

MAX_BRANCHES = 8  # cached token sequences of one attempt; what continues an older one is only stored less compactly
STREAM_ABOVE = 256  # plain calls for more tokens than this stream from the engine, so that its death loses few
MARKERS = ("<tool_call>", "<think>", "</think>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")  # of a parser's matter


def unpacked(ids: bytes) -> list[int]:
    return array("i", ids).tolist()


def address(before: bytes, message: JSON) -> bytes:
    """Of a conversation that goes on with `message`, taken by its meaning: harnesses send the same back with null for
    "", in parts or whole, with other spaces in tool arguments, or without the reasoning."""
    said: Any = message
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        content = message.get("content") or ""
        content = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        said = {**message, "content": content}
        if message["role"] == "assistant":
            said = [content, [(call["function"]["name"], orjson.loads(call["function"]["arguments"]))
                              for call in message.get("tool_calls") or ()]]
    return blake2b(before + orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def common_ids(a: bytes, b: bytes) -> int:
    """Number of leading int32 ids that two sequences share."""
    same, differ = 0, min(len(a), len(b)) + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        same, differ = (middle, differ) if a[same:middle] == b[same:middle] else (same, middle)
    return same // 4


class Vocabulary:
    """What the gateway must know of the model's tokenizer."""

    def __init__(self, model: str) -> None:
        file = Path(model, "tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(model)
        added, decoder = self.tokenizer.get_added_tokens_decoder(), repr(self.tokenizer.decoder)
        self.spelling = Spelling({index: token for token, index in self.tokenizer.get_vocab().items()})
        if "ByteLevel" in decoder:  # ids spell bytes, each written as one character
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            for index, token in added.items():
                self.spelling[index] = "".join(part for part, _ in level.pre_tokenize_str(token.content))
        elif "▁" not in decoder:  # unknown: what its tokens spell together may depend on their borders
            self.spelling = None
        self.special = {index for index, token in added.items() if token.special}
        self.markers = {*MARKERS, *(token.content for token in added.values())}


class Spelling(dict[int, str]):
    def __missing__(self, index: int) -> str:
        return f"\0{index}\0"  # an id beyond the tokenizer's, which a padded embedding may sample


class Text:
    """The text of a call as it is sampled: what of it can be streamed, and where a stop string ends it."""

    def __init__(self, vocabulary: Vocabulary, stop: list[str], ids: list[int]) -> None:
        self.vocabulary, self.stop, self.decoder = vocabulary, stop, decoders.DecodeStream(skip_special_tokens=True)
        self.taken_back = [*vocabulary.markers, *stop]
        self.marker = re.compile("|".join(map(re.escape, self.taken_back)))
        self.longest = max(map(len, self.taken_back))
        self.text, self.safe, self.held = "", 0, False
        self.add(ids)

    def add(self, ids: list[int]) -> tuple[int, str]:
        """-> how many of the ids, and the stop string that is complete with the last of these ("": none)."""
        for at, token in enumerate(ids):
            self.held |= token in self.vocabulary.special
            begin = len(self.text) - self.longest
            self.text += self.decoder.step(self.vocabulary.tokenizer, token) or ""
            for stop in self.stop:
                if self.text.find(stop, max(0, begin)) >= 0:
                    return at + 1, stop
        return len(ids), ""

    def readable(self) -> int:
        """Length of the text before the first marker or stop string, or what may become one, or white space at the end
        (which parsers strip)."""
        if not self.held:
            found = self.marker.search(self.text, self.safe)
            end, self.held = found.start() if found else len(self.text), bool(found)
            tails = (self.text[max(self.safe, end - size):end] for size in range(self.longest - 1, 0, -1))
            end -= next((len(tail) for tail in tails if any(mark.startswith(tail) for mark in self.taken_back)), 0)
            self.safe += len(self.text[self.safe:end].rstrip())
        return self.safe


@dataclass(eq=False)
class Attempt:
    """A running attempt: its open calls, and what the log holds of it: the token sequences that no later turn
    continues, by their last turn, with the turns that end in them; the conversations; retries that are due."""

    owner: tuple[str, int] = ("", 0)  # rollout, attempt
    engine: str = ""  # URL of the one that it stays with
    calls: int = 0
    turns: int = 0
    open: "dict[Call, None]" = field(default_factory=dict)  # also those that wait for a client that has left
    branches: dict[int, tuple[bytes, dict[int, int]]] = field(default_factory=dict)  # ids, {end: turn}
    replies: dict[bytes | None, int] = field(default_factory=dict)  # the address of a reply -> its turn
    openings: set[bytes] = field(default_factory=set)  # addresses of first messages
    failed: Counter[bytes] = field(default_factory=Counter)  # requests that got an error and nothing sampled

    async def cancel(self) -> None:
        """Ends the open calls, and returns when their turns are logged."""
        for call in self.open:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self.open), return_exceptions=True)

    def parent(self, ids: bytes) -> tuple[int, bool, int]:
        """How many ids a sequence shares with a known one, whether these are all of it, and its last turn."""
        common = ((common_ids(known, ids), at) for at, (known, _) in self.branches.items())
        return max(((same, 4 * same == len(self.branches[at][0]), at) for same, at in common), default=(0, True, -1))

    def add(self, turn: int, ids: bytes, place: tuple[int, bool, int], reply: bytes | None, opening: bytes) -> None:
        """A logged turn. `place`: its parent, as above."""
        shared, whole, parent = place
        ends = self.branches[parent][1] if self.branches else {}
        if whole:
            self.branches.pop(parent, None)
        elif len(self.branches) >= MAX_BRANCHES:
            del self.branches[next(iter(self.branches))]
        self.branches[turn] = ids, {end: at for end, at in ends.items() if end <= shared} | {len(ids) // 4: turn}
        self.openings.add(opening)
        self.turns += 1
        self.replies[reply] = turn

    def splice(self, prompt: bytes, addresses: list[bytes], opening: bytes, mode: str,
               spelling: Spelling | None) -> tuple[bytes, str | None]:
        """The prompt, with sampled ids where `mode` allows; and why it continues no earlier turn to its end."""
        inside, best, drift, ids = False, (0, 0, 0), False, array("i", prompt)
        for turn, (known, ends) in self.branches.items():
            same = common_ids(known, prompt)
            if 4 * same == len(known):
                return prompt, None
            inside |= same == len(ids)
            best = max([best, *((end, end, turn) for end in ends if end <= same)])
            if spelling and same:
                end, position = continued(ids, array("i", known), same, ends, spelling)
                if end > best[0] and position and mode != "exact":
                    best, drift = (end, position, turn), False
                elif end > best[0]:
                    drift = True
        echoed = next((self.replies[address] for address in reversed(addresses) if address in self.replies), None)
        template = echoed is not None
        for turn, (known, ends) in self.branches.items():
            for end, at in ends.items():
                if at == echoed and end <= best[0]:
                    template = False
                elif at == echoed and mode == "messages":
                    if position := after_reply(ids.tolist(), unpacked(known[:4 * end])):
                        best, template, drift = (end, position, turn), False, False
        end, position, turn = best
        known, _ = self.branches.get(turn, (b"", {}))
        prompt = known[:4 * end] + prompt[4 * position:]
        if 4 * end == len(known) or not self.branches:
            return prompt, None
        return prompt, ("drift" if drift else "template" if template else "branch" if end or inside
                        else "compaction" if opening in self.openings else "new_conversation")


@dataclass(eq=False)
class Call:
    """One model call and all that is known of its tokens."""

    attempt: Attempt
    path: str  # the route, which is the dialect
    ask: Ask
    digest: bytes  # of what is asked for
    name: str
    sampling: JSON
    max_tokens: int
    room: int  # tokens that the context has; once the prompt is known, what it has left
    model: str = ""  # the engine's name for it
    messages: list[JSON] = field(default_factory=list)  # with the tools at their head
    addresses: list[bytes] = field(default_factory=list)  # of the conversation after each message
    opening: bytes = b""  # of its first message
    prompt: bytes = b""  # its ids, each an int32
    fork: str | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    part: int = 0  # where the current engine request began in `ids`
    finish: str = ""
    stop_string: str | None = None  # which ended it
    message: JSON | None = None
    text: Text | None = None
    channel: str = ""  # what plain text is, content or reasoning; "": unknown before the end
    started_at: float = field(default_factory=time.time)
    turn: tuple[int, int, int, int] | None = None  # logged: its index, parent, shared ids, sampled tokens
    news: list[str] = field(default_factory=list)  # what is still to be counted
    readers: set[asyncio.Event] = field(default_factory=set)
    task: "asyncio.Task[JSON]" = field(init=False)

    @functools.cached_property
    def prompt_ids(self) -> orjson.Fragment:
        """For the engine, which is sent it twice."""
        return orjson.Fragment(orjson.dumps(unpacked(self.prompt)))

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.path]

    @property
    def chat(self) -> JSON:
        """What of the request the engine gets."""
        tools = {"tools": self.ask.tools} if self.ask.tools else {}
        return {"model": self.model, "messages": self.ask.messages, **tools, **self.ask.extra, "max_tokens": 1}

    @property
    def head(self) -> JSON:
        """What a reply and each event of its stream begin with."""
        model = str(self.ask.body.get("model") or "policy")
        return {"name": self.name, "created": int(self.started_at), "model": model}

    def address(self) -> None:
        """Sets the addresses of the conversation after each of its messages; its tools are the first one."""
        self.messages = ([{"tools": self.ask.tools}] if self.ask.tools else []) + self.ask.messages
        self.addresses = list(accumulate(self.messages, address, initial=b""))[1:]
        self.opening = self.addresses[min(len(self.addresses) - 1, bool(self.ask.tools))] if self.addresses else b""

    def completion(self) -> JSON:
        """The reply before it is put in a dialect. Tool calls that were cut off by the length are no finished ones."""
        called = self.finish == "stop" and (self.message or {}).get("tool_calls")
        finish = "stop_string" if self.stop_string else "tool_calls" if called else self.finish
        return {**self.head, "message": self.message, "finish": finish, "stop_string": self.stop_string,
                "usage": {"prompt": len(self.prompt) // 4, "sampled": len(self.ids)}}

    def failed(self) -> bool:
        """Whether it has ended, without a reply."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def notify(self) -> None:
        for wake in self.readers:
            wake.set()

    def continuation(self) -> JSON:
        """The engine request that goes on from the prompt and the ids kept so far."""
        self.part = len(self.ids)
        sampling = {key: value for key, value in self.sampling.items() if value is not None}
        if "seed" in sampling:  # its own for each call, or a group would be n equal rollouts
            sampling["seed"] = zlib.crc32(f"{sampling['seed']}/{self.name}/{self.part}".encode())
        return {"model": self.model, "token_ids": unpacked(self.prompt) + self.ids if self.ids else self.prompt_ids,
                "stream": bool(self.text) or self.max_tokens > STREAM_ABOVE,
                "sampling_params": {**sampling, "max_tokens": self.max_tokens - self.part, "logprobs": 0}}

    async def receive(self, response: aiohttp.ClientResponse, version: int) -> None:
        """Keeps what the engine sampled. `version`: of the weights, where the engine does not say."""
        if response.content_type != "text/event-stream":
            return self.keep(orjson.loads(await response.read())["choices"][0], version)
        async for line in response.content:
            if line.startswith(b"data: {"):
                self.keep(orjson.loads(line[6:])["choices"][0], version)
                self.notify()
                if self.stop_string:
                    return response.close()  # which ends it at the engine

    def keep(self, choice: JSON, version: int) -> None:
        ids, finish = choice.get("token_ids") or [], choice.get("finish_reason")
        if self.text:
            size, self.stop_string = self.text.add(ids[:-1] if finish == "stop" else ids)  # the last ended the turn
        self.ids += ids
        self.logprobs += [item.get("logprob") for item in (choice.get("logprobs") or {}).get("content") or ()]
        self.versions += [version] * len(ids)
        for span in choice.get("weight_versions") or ():
            if str(span["version"]).isdigit():
                start, end = self.part + span["start"], min(self.part + span["end"], len(self.ids))
                self.versions[start:end] = [int(span["version"])] * (end - start)
        if self.stop_string:
            self.finish, size = "stop", len(self.ids) - len(ids) + size
            del self.ids[size:], self.logprobs[size:], self.versions[size:]
        elif finish and finish != "abort":
            self.finish = finish
        elif len(self.ids) >= self.max_tokens:
            self.finish = "length"
