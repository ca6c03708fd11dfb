"""The built-in small model: a Qwen3 of under a million parameters that two CPU cores make in about two minutes.

It exists so that the whole loop can be run, read and tested with no GPU and no model hub. The result is an ordinary
Hugging Face directory: own byte-level BPE, Qwen3 architecture with tied embeddings, a chat template with tools in
Qwen's style (Hermes JSON calls), and a warm start on scripted demonstrations that the caller provides.

    names + demonstrations -> tokenizer -> repeated random tokens   copying sharpens (induction heads), some 10 s
                                        -> good demonstrations      copying of names it never saw, and the format
                                        -> bad demonstrations       the behaviour that reinforcement learning improves

The order matters: a model that copies badly can only memorise under reinforcement learning, and bad demonstrations
too early keep copying from forming. Budgeted by steps, not seconds, so that a seed gives the same weights on any load.

`ensure()` is called by recipes: it makes the model once and keeps it in $HARNESSED_CACHE (default ~/.cache/harnessed),
under a name that hashes all it was made from. It is written aside and renamed: two at once, or a kill, leave no half.
"""

import hashlib
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Conversation = list[dict]
Demonstrations = Callable[[random.Random, bool], Conversation]  # (source of randomness, badly?) -> messages
Row = tuple[list[int], list[bool]]  # ids, and which of them are trained

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# A capitalized name is one piece, hyphens and apostrophes included, so that BPE alone decides how it splits; digits
# stand alone; punctuation sticks together (JSON's `": {"` is one token) but leaves the space to the word that follows.
PIECES = r" ?\p{Lu}[\p{L}\p{M}'’\-]*| ?\p{L}+|\p{N}| ?[^\p{L}\p{N}]*[^\p{L}\p{N} ]| +"

# Append-only: a conversation's rendering is a prefix of its continuation's, so that a rollout stays one training row.
CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' }}
{%- if tools %}
<tools>
{% for tool in tools %}{{ (tool.function or tool) | tojson }}
{% endfor %}</tools>{% endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments
 if call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

# Steps and sizes of the warm start; ARCHITECTURE and these are part of the cache's name.
VOCABULARY, ROWS, LEARNING_RATE = 1024, 16, 3e-3
PHASES = {"repeats": 200, "good": 650, "bad": 100}
ARCHITECTURE = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                    intermediate_size=192, max_position_embeddings=4096, tie_word_embeddings=True,
                    initializer_range=0.05, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt on `texts`. Chat markers in them are tokens, never material for merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL + MARKERS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    marker = re.compile("|".join(map(re.escape, SPECIAL + MARKERS)))
    plain = [part for text in texts for part in marker.split(text)]
    tokenizer.train_from_iterator(plain, trainer)
    # Markers are ordinary text when decoded: a tool-call parser must see them.
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=CHAT_TEMPLATE, model_max_length=4096,
                                   clean_up_tokenization_spaces=False)


def encode(tokenizer: PreTrainedTokenizerFast, messages: Conversation, tools: list[dict]) -> Row:
    """Ids of a conversation, and which of them the assistant wrote (its end-of-turn included)."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    parts = re.split(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", text, flags=re.DOTALL)  # odd ones: replies
    encoded = [tokenizer.backend_tokenizer.encode(part).ids for part in parts]
    return sum(encoded, []), [index % 2 == 1 for index, ids in enumerate(encoded) for _ in ids]


# -------------------------------------------------------------------------------------------------------- warm start


def repeated_tokens(rng: random.Random, vocabulary: int) -> Row:
    """Random tokens, a stretch of them again and again: only copying predicts the repeats, which alone are trained."""
    block = [rng.randrange(len(SPECIAL), vocabulary) for _ in range(rng.randint(2, 24))]
    ids = (block * 32)[:64]
    return ids, [index >= len(block) for index in range(len(ids))]


def wire(model: Qwen3ForCausalLM) -> None:
    """Initial weights that lean towards copying (an induction head), which else takes most of a training this short.

    First layer: one head of each key-value group looks one (two, ...) tokens back. A component that all embeddings
    share makes its queries and keys constant; the rotary angle between them peaks at the wanted distance. Second layer:
    one head looks for a token whose predecessor was the current one (its queries are what the first layer makes of such
    a predecessor, seen through its keys) and passes on what stands there. All is trained like any other weight.
    """
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    width, size, fast = model.config.hidden_size, model.config.head_dim, 4  # the fastest 4 rotary frequencies
    angles = model.model.rotary_emb.inv_freq[:fast]

    def heads(projection: torch.nn.Linear) -> torch.Tensor:  # the first head of each group: (groups, head_dim, H)
        return projection.weight.view(model.config.num_key_value_heads, -1, size, width)[:, 0]

    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.1)[:, 0] = 1.0
        first.q_norm.weight.fill_(2.0)
        first.k_norm.weight.fill_(2.0)
        for group, (queries, keys) in enumerate(zip(heads(first.q_proj), heads(first.k_proj))):
            queries.zero_(), keys.zero_()
            keys[:fast, 0] = 1.0
            queries[:fast, 0] = torch.cos(angles * (group + 1))
            queries[size // 2 : size // 2 + fast, 0] = -torch.sin(angles * (group + 1))
        for projection in (first.v_proj, second.k_proj, second.v_proj):
            heads(projection)[0, :, 0] = 0.0  # the shared component says nothing about a token
        seen = first.o_proj.weight[:, :size] @ heads(first.v_proj)[0]  # (H, H): a predecessor in the stream
        heads(second.q_proj)[0] = heads(second.k_proj)[0] @ seen
        second.o_proj.weight[:, :size] = 8.0 * heads(second.v_proj)[0].T


def rows_of_phase(phase: str, steps: int, tokenizer: PreTrainedTokenizerFast, demonstrations: Demonstrations,
                  tools: list[dict], rng: random.Random) -> Iterator[list[Row]]:
    """`steps` batches of rows; rows of like length share a batch, since padding is computed too."""
    for start in range(0, steps, 10):
        many = ROWS * min(10, steps - start)
        if phase == "repeats":
            rows = [repeated_tokens(rng, len(tokenizer)) for _ in range(many)]
        else:
            rows = [encode(tokenizer, demonstrations(rng, phase == "bad"), tools) for _ in range(many)]
        rows.sort(key=lambda row: len(row[0]))
        batches = [rows[i : i + ROWS] for i in range(0, many, ROWS)]
        rng.shuffle(batches)
        yield from batches


def row_loss(model: Qwen3ForCausalLM, rows: list[Row]) -> torch.Tensor:
    """Mean cross entropy of the masked tokens. Padding is on the right, where a causal model does not see it."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])  # (B, T)
    mask = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])[:, 1:]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[mask]  # (N, H): logits only where they are trained
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][mask])


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, demonstrations: Demonstrations,
               tools: list[dict], rng: random.Random, report: Callable[[str], None]) -> None:
    """Train `model` in place, phase by phase, with one AdamW and one schedule: warm-up, then down to a tenth."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05},
                                   {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}],
                                  lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    total, step, average, started = sum(PHASES.values()), 0, 0.0, time.monotonic()
    for phase, steps in PHASES.items():
        for rows in rows_of_phase(phase, steps, tokenizer, demonstrations, tools, rng):
            step += 1
            rate = LEARNING_RATE * min(1.0, step / 30) * (0.55 + 0.45 * math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = row_loss(model, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average += (loss.item() - average) / min(step, 20)
            if step % 10 == 0 or step == total:
                left = (time.monotonic() - started) / step * (total - step)
                report(f"small model: warm start {step}/{total} ({phase}) loss {average:.3f}, {left:.0f} s left")


def make(directory: Path, names: list[str], demonstrations: Demonstrations, tools: list[dict], seed: int,
         report: Callable[[str], None]) -> None:
    """Tokenizer, weights and warm start, saved into `directory`."""
    rng = random.Random(seed)
    sample = [demonstrations(rng, False) for _ in range(2000)]
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    texts = [bare.apply_chat_template(messages, tools=tools, tokenize=False) for messages in sample]
    tokenizer = build_tokenizer(texts + [f" {name}" for name in names] * 10)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # on any machine: the order of sums, and so the weights, depend on it
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                             pad_token_id=tokenizer.pad_token_id, **ARCHITECTURE))
        wire(model)
        warm_start(model, tokenizer, demonstrations, tools, rng, report)
    torch.set_num_threads(threads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def ensure(names: list[str], demonstrations: Demonstrations, tools: list[dict], seed: int = 0,
           report: Callable[[str], None] = lambda line: print(f"\r{line}", end="", flush=True)) -> Path:
    """The directory of the small model, made on first use.

    `names` are the proper names the tokenizer learns (training entities only: held-out ones must stay unseen);
    `demonstrations(rng, bad)` gives one conversation. What these return for a fixed seed is part of the cache's name,
    as is this file, so that a change of either makes a new model and never serves an old one.
    """
    probe = [demonstrations(random.Random(i), bad) for i in range(20) for bad in (False, True)]
    settings = json.dumps([probe, tools, names, seed, ARCHITECTURE, PHASES, torch.__version__], sort_keys=True)
    made_from = Path(__file__).read_bytes() + settings.encode()
    cache = Path(os.environ.get("HARNESSED_CACHE") or Path.home() / ".cache" / "harnessed")
    final = cache / f"small-{hashlib.sha256(made_from).hexdigest()[:12]}"
    if not final.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            own = tempfile.TemporaryDirectory(dir=cache, prefix="making-")
        except OSError as error:
            raise ValueError(f"HARNESSED_CACHE is {cache}: cannot write there ({error}); name another") from None
        with own as aside:
            make(Path(aside) / "model", names, demonstrations, tools, seed, report)
            try:
                os.rename(Path(aside) / "model", final)
            except OSError:  # another process was faster; its model is the same
                if not final.exists():
                    raise
        report(f"small model: {final}\n")
    return final
