"""A tiny Qwen3 that is overfitted in seconds until it recites scripted conversations at temperature 1: it thinks, calls
tools in parallel, answers. Its ids are not those that its text has when re-encoded, as with any model, only more often.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench.vllm_cpu import make_tiny_model

JSON = dict[str, Any]
# As Qwen3's: thinking before the last question is taken out; calls are Hermes JSON. Asked for thinking, it opens it
# (as Qwen3.5's does); asked for none, it closes it; not asked, it leaves it to the model.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > last.user and message.reasoning_content %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ message.content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
SEARCH = {"name": "search", "description": "Finds.",
          "parameters": {"type": "object", "properties": {"k": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": SEARCH}]


def user(text: Any) -> JSON:
    return {"role": "user", "content": text}


def reply(reasoning: str, content: str, *calls: JSON) -> JSON:
    calls = [{"type": "function", "function": {"name": "search", "arguments": arguments}} for arguments in calls]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


WARM = [user("Where is it warm?"), reply("Two places: é 中 🙂.", "I look é.", {"k": "Zürich 🙂", "n": 1}, {"k": "中"}),
        {"role": "tool", "content": "18"}, {"role": "tool", "content": "25"}, reply("Once more.", "", {"k": "é"}),
        {"role": "tool", "content": "21"}, reply("Three numbers.", "中 🙂: 25 é")]
TALK = [user("Hi"), reply("hm é", "Hello 🙂"), user("Again"), reply("so 中", "Hello again"), user("Bye"),
        reply("end", "Bye é 中 🙂")]
THINK = [user("Think"), reply("\nOne é two 中 three 🙂 four. I count: five six seven eight.", "Ten 中.")]  # asked for it
RECITE, ROLL = [user("Recite")], [user("Roll")]  # asked for no thinking: "Now:" and pieces without an end
CERTAIN, RANDOM = (" un é deux 🙂 tre",), (" é 中 🙂 yes", " é 中 🙂 no")


def text_of(message: JSON) -> str:
    """What the model writes for a message."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    parts = [message["content"]] * bool(message["content"]) + [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return f"<think>\n{message['reasoning_content']}\n</think>\n\n" + "\n".join(parts) + "<|im_end|>"


class Script:
    """The conversations as text and as ids."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)

    def prompt(self, messages: list[JSON], **more: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def spell(self, text: str) -> list[int]:
        """As the model writes it: cut where the tokenizer would not."""
        pieces = [piece for part in re.split(r"(<[^<>]+>)", text) for piece in
                  ([part] if part.startswith("<") else re.findall(r".{1,5}", part, re.DOTALL))]
        return [index for piece in pieces for index in self.encode(piece)]

    def row(self, messages: list[JSON], chained: bool, tools: Any = None, **more: Any) -> tuple[list[int], list[bool]]:
        """A conversation, and which of its ids are trained: all replies, each prompt going on from the one before
        (`chained`), or the last, its history rendered."""
        ids: list[int] = []
        mask: list[bool] = []
        begin = 0
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and (chained or at == len(messages) - 1):
                prompt = self.prompt(messages[begin:at], tools=None if begin else tools, **more)
                prompt = "\n" * bool(begin) + prompt
                said = text_of(message).removeprefix("<think>\n" if more else "")
                for part, trained in ((self.encode(prompt), False), (self.spell(said), True)):
                    ids, mask = ids + part, mask + [trained] * len(part)
                begin = at + 1
        return ids, mask

    def recital(self, messages: list[JSON], pieces: tuple[str, ...]) -> tuple[list[int], list[bool]]:
        prompt, said = self.encode(self.prompt(messages, enable_thinking=False)), self.encode("Now:")
        said += [index for _ in range(20) for index in self.encode(random.choice(pieces))]
        return prompt + said, [False] * len(prompt) + [True] * len(said)

    def train(self, model: Qwen3ForCausalLM, steps: int = 55) -> None:
        rows = [self.row(WARM, True, TOOLS), self.row(WARM[:5], False, TOOLS), self.row(WARM, False, TOOLS),
                self.row(TALK, True), self.row(TALK[:4], False), self.row(TALK, False),
                self.row(THINK, True, enable_thinking=True)]
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 5e-3 * min(1.0, 0.1 + step / 10, (steps - step) / (0.3 * steps))
            for ids, mask in [*rows, self.recital(RECITE, CERTAIN), self.recital(ROLL, RANDOM)]:
                target, trained = torch.tensor(ids[1:]), torch.tensor(mask[1:])
                hidden = model.model(input_ids=torch.tensor([ids[:-1]])).last_hidden_state[0, trained]
                torch.nn.functional.cross_entropy(model.lm_head(hidden), target[trained]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def make_reciting_model(directory: Path) -> Script:
    """The model; and in `next` its weights after an update, by which all is a little less certain."""
    make_tiny_model(directory, template=TEMPLATE, num_hidden_layers=2)
    script = Script(directory)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(directory))
        script.train(model)
    for path, scale in ((directory, 3.0), (directory / "next", 0.9)):
        model.model.norm.weight.data.mul_(scale)  # by 3: what is likely becomes nearly certain
        model.save_pretrained(path)
    return script
