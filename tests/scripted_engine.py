"""engine.py with a script in place of a model: what a test's function wants to say is what gets sampled.

All but the sampler is engine.py's own: render with a chat template, parsing of tool calls and reasoning, streams,
pause, abort, weight versions. `say(text)` gets the prompt as text, up to and with the assistant's header, and returns
the text of the reply. It is sampled in ids that no tokenizer would give (tokens split at random, markers spelled out,
characters cut between their bytes), so that a re-rendered history never has the sampled ids by chance. Each token's
log-prob is unique: rows can be compared with `sampled`, token for token. A generation that goes on from kept ids says
the rest of what it had begun.

    with Scripted(directory, say) as engine: engine.url, engine.tokenizer_dir, engine.sampled
"""

import itertools
import random
import socket
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine import Api, Engine, Request, create_app

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
HEADER = "<|im_start|>assistant\n"

# In the manner of Qwen3's: Hermes calls; the reasoning of replies before the last question is stripped; a system
# message anywhere but at the beginning is an error. A line break that the reply had before its first call is doubled.
CHAT_TEMPLATE = """\
{%- set ns = namespace(asked=0) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' }}
{%- if tools %}# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{% endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
<tool_response>
{{ message.content }}
</tool_response>{{ '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.reasoning_content and loop.index0 > ns.asked -%}
{{ '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'user' -%}
<|im_start|>user
{{ message.content }}<|im_end|>
{% elif not loop.first -%}
{{ raise_exception('a ' + message.role + ' message must be at the beginning') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def make_tokenizer(directory: Path, vocabulary: int = 8192) -> PreTrainedTokenizerFast:
    """A byte-level BPE, learnt in seconds on what every machine has: the standard library's sources."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    texts = [path.read_text("utf-8", "ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    bpe.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False)
    tokenizer.save_pretrained(directory)
    return tokenizer


class ScriptedEngine(Engine):
    """Samples what `say` says, a token of each running request a step."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, say: Callable[[str], str], delay: float = 0.0) -> None:
        config = SimpleNamespace(vocab_size=len(tokenizer), get_text_config=lambda: config)
        super().__init__(SimpleNamespace(loaded=True, model=SimpleNamespace(config=config, generation_config=None)))
        self.version, self.tokenizer, self.say, self.delay = "0", tokenizer, say, delay  # delay: seconds a step
        self.vocabulary, self.header = tokenizer.get_vocab(), tokenizer.encode(HEADER)
        self.sampled: list[tuple[float, int, str]] = []  # (log-prob, id, version) of every token, in the order sampled
        self.plans: dict[Request, list[int]] = {}

    def odd_ids(self, text: str, rng: random.Random) -> list[int]:
        """Ids that decode to `text`, and are not the tokenizer's."""
        markers, ids = set(MARKERS), []
        pieces = self.tokenizer.convert_ids_to_tokens(self.tokenizer.encode(text))[::-1]
        while pieces:
            piece = pieces.pop()
            at = rng.randrange(len(piece))
            if at and rng.random() < (0.3 if piece in markers else 0.6):
                if piece in markers or {piece[:at], piece[at:]} <= self.vocabulary.keys():
                    pieces += [piece[at:], piece[:at]] if piece not in markers else [*piece[::-1]]
                    continue
            ids.append(self.vocabulary[piece])
        return ids

    def plan(self, request: Request) -> list[int]:
        """What is left to say after the request's ids."""
        ids, size = request.ids, len(self.header)
        start = next(i for i in range(len(ids) - size, -1, -1) if ids[i:i + size] == self.header) + size
        prompt = self.tokenizer.decode(ids[:start])
        whole = self.odd_ids(self.say(prompt), random.Random(prompt)) + [self.tokenizer.eos_token_id]
        said = len(ids) - start
        assert ids[start:] == whole[:said], "the prompt's end is not what was said"
        return whole[said:]

    def compute(self) -> None:
        time.sleep(self.delay)
        self.running += self.waiting
        self.waiting.clear()  # in place: the event loop's `waiting.append` may be on its way
        for request in self.running[:]:
            if request not in self.plans:
                self.plans[request] = self.plan(request)
            token = self.plans[request].pop(0)
            self.sampled.append((-(len(self.sampled) + 1) / 1024, token, self.version))
            request.append(token, *self.sampled[-1][::2])
            self.touched += [request] if request.stream else []
            if request.finish or request.cancelled:
                self.finish(request, request.finish or "abort")

    def finish(self, request: Request, reason: str) -> None:
        request.finish = reason
        self.touched.append(request)
        self.plans.pop(request, None)
        if request in self.running:
            self.running.remove(request)

    def forget(self) -> None:
        """There is no KV."""


class Scripted:
    """The engine on a port of its own, in a thread."""

    def __init__(self, directory: Path, say: Callable[[str], str], delay: float = 0.0, context: int = 200_000) -> None:
        self.tokenizer_dir, self.tokenizer = directory, make_tokenizer(directory)
        self.engine = ScriptedEngine(self.tokenizer, say, delay)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        app = create_app(Api(self.engine, self.tokenizer, "scripted", context))
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def __enter__(self) -> "Scripted":
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
