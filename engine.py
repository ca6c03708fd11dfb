"""The embedded inference engine: one process that speaks the routes of vLLM 0.32 which this project uses.

    python engine.py --model DIR --port 8001 [--key-file F] [--max-context 4096] [--max-running 64]

It serves any Hugging Face causal language model directory on a CPU or one CUDA device: render (messages -> ids),
generate (ids -> sampled ids, log-probs at the sampling temperature, weight versions), derender (ids -> message, tool
calls, reasoning), pause, sleep, weights replaced in place. Left out: tensor parallelism, quantization, top-k log-probs,
stop strings, penalties, grammars, images; a request for one of them is a 400, never ignored.

    uvicorn's event loop                          the model thread (owns model, KV memory, every running request)
    generate ── inbox: Request ─────────────────> joins the running batch at the next step
    pause, sleep, reload_weights ── inbox: call > runs between two steps; the route awaits its result
    Request.changed  <── one wake-up a step ───── new tokens of streamed requests, and finished ones

One step computes all running requests in one forward of the transformers model: the new tokens of all rows are packed
into one sequence, and our attention function (registered with transformers) writes their keys and values into the rows'
slots and lets every row attend to its own. A finished row's KV is kept as a prefix that later prompts copy. Models that
the packed step cannot run (linear attention, sinks, soft caps) are found by a probe at the start and get one cache and
one forward for each request: slower, without prefix reuse, the same answers.

Axes: N new tokens, packed; R rows; V vocabulary; H heads; K kv heads; T tokens of a row; D head dimension.
"""

import asyncio
import ctypes
import hmac
import json
import os
import queue
import random
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import jinja2
import orjson
import torch
import tyro
import uvicorn
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

BLOCK = 16  # tokens: prefixes are found and shared in whole blocks
GREEDY_BELOW = 1e-5  # temperatures under this mean argmax, as in vLLM
NUMBERS = {"max_tokens": (int, 1, 1 << 31), "temperature": (float, 0, 2), "top_p": (float, 1e-9, 1),
           "top_k": (int, -1, 1 << 31), "seed": (int, -1 << 63, 1 << 64)}
# Parameters that are not honoured, with the only value each may have: the one that changes nothing.
NEUTRAL = {"n": 1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "stop": [],
           "logit_bias": {}, "min_tokens": 0, "bad_words": [], "logprobs": 0, "structured_outputs": None,
           "prompt_logprobs": None}


class Refused(ValueError):
    """(message, status=400): what the caller asked for cannot be had."""


# ---- sampled text -> message


JSON = json.JSONDecoder(parse_constant=int)  # NaN and Infinity are no JSON: int("NaN") is a ValueError
SPACE = re.compile(r"\s*")
FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.S)


def parse_tool_calls(text: str, tools: list[dict]) -> tuple[str, list[dict]]:
    """Content before the first call, and the calls as {"name", "arguments": JSON text}; Hermes JSON and Qwen XML.

    ValueError if any call is broken or cut off: then the whole text is content.
    """
    start = position = text.find("<tool_call>")
    calls = []
    while position >= 0:
        body = SPACE.match(text, position + len("<tool_call>")).end()
        read = read_xml_call if text.startswith("<function=", body) else read_json_call
        name, arguments, end = read(text, body, tools)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("a tool call is a name and an object of arguments")
        end = SPACE.match(text, end).end()
        if end < len(text) and not text.startswith("</tool_call>", end):
            raise ValueError(f"expected </tool_call> at character {end}")
        name.encode()  # lone surrogates cannot be sent (UnicodeEncodeError is a ValueError); arguments can escape them
        encoded = json.dumps(arguments, ensure_ascii=False)
        calls.append({"name": name, "arguments": encoded if encoded.isprintable() else json.dumps(arguments)})
        position = text.find("<tool_call>", end)
    return (text[:start] if start >= 0 else text), calls


def read_json_call(text: str, start: int, tools: list[dict]) -> tuple[Any, Any, int]:
    call, end = JSON.raw_decode(text, start)
    return (call.get("name"), call.get("arguments"), end) if isinstance(call, dict) else (None, None, end)


def read_xml_call(text: str, start: int, tools: list[dict]) -> tuple[Any, Any, int]:
    head = FUNCTION.match(text, start)
    name, end, arguments = (head[1], head.end(), {}) if head else (None, start, {})
    schemas = [tool["function"].get("parameters") or {} for tool in tools if tool["function"].get("name") == name]
    types = {key: schema.get("type") for s in schemas for key, schema in (s.get("properties") or {}).items()}
    while part := PARAMETER.match(text, end):
        (key, value), end = part.groups(), part.end()
        try:  # XML has only text: read as the JSON that the tool's schema asks for, else it stays text
            plain = types.get(key, "string") == "string"
            arguments[key] = value if plain else JSON.decode(value.lower() if types[key] == "boolean" else value)
        except ValueError:
            arguments[key] = value
    if not text.startswith("</function>", end):
        raise ValueError(f"expected </function> at character {end}")
    return name, arguments, end + len("</function>")


def parse_reply(text: str, tools: list[dict], thinks: bool, opened: bool) -> dict:
    """A chat message. `thinks`: the template knows <think>; `opened`: the prompt already ended with it."""
    reasoning, content, calls = None, text, []
    if thinks and (opened or text.lstrip().startswith("<think>")):
        reasoning, _, content = text.lstrip().removeprefix("<think>").partition("</think>")
    if tools:
        try:
            content, calls = parse_tool_calls(content, tools)
        except (ValueError, RecursionError):
            pass  # a broken call stays in the content, where the harness sees it
    named = [{"id": f"call_{os.urandom(12).hex()}", "type": "function", "function": call} for call in calls]
    content = content or (None if calls else "")
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": named}


# ---- requests and sampling


class Request:
    """One generation. Made by the event loop; once submitted, all but `cancelled` is written by the model thread.

    ids: prompt, then what was sampled; prompt: its number of tokens; limit: len(ids) at which it ends by length;
    top_k 0: off; versions: spans of sampled tokens; row: its slot while it runs; cached: tokens whose KV is computed,
    in the slot or, once finished, in `saved` [layers, 2, K, cached, D]; private: the cache of a model that cannot run
    packed; blocks: the hash of each whole block and all before it.
    """

    def __init__(self, ids: list[int], max_tokens: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
                 seed: int | None = None, stop: Iterable[int] = (), stream: bool = False, id: str = "") -> None:
        self.id, self.ids, self.prompt, self.limit = id, [*ids], len(ids), len(ids) + max_tokens
        self.stop, self.stream = {*stop}, stream
        self.temperature, self.top_p, self.top_k, self.seed = temperature, top_p, max(top_k, 0), seed
        self.changed, self.cancelled, self.finish, self.error = asyncio.Event(), False, None, ""
        self.logprobs, self.versions, self.blocks = [], [], []
        self.row, self.cached, self.saved, self.private = -1, 0, None, None

    def hash_blocks(self, upto: int) -> list[int]:
        for start in range(len(self.blocks) * BLOCK, upto - BLOCK + 1, BLOCK):
            self.blocks.append(hash((*self.blocks[-1:], *self.ids[start:start + BLOCK])))
        return self.blocks

    def append(self, token: int, logprob: float, version: str) -> None:
        if logprob != logprob:
            self.finish, self.error = "error", "the model's output is NaN: are its weights right?"
            return
        at = len(self.logprobs)
        if not self.versions or self.versions[-1]["version"] != version:
            self.versions.append({"version": version, "start": at})
        self.versions[-1]["end"] = at + 1
        self.ids.append(token)
        self.logprobs.append(logprob)  # last: the event loop reads as many tokens as there are log-probs
        self.finish = "stop" if token in self.stop else "length" if len(self.ids) >= self.limit else None


def sample(logits_RV: torch.Tensor, requests: list[Request], rng: random.Random) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob in the distribution it was drawn from (after temperature, top_k and top_p).

    A seeded request draws from (seed, position) alone: the batch around it does not matter, and a generation that was
    aborted and is continued draws what it would have drawn.
    """
    device, greedy = logits_RV.device, [r.temperature < GREEDY_BELOW for r in requests]
    scales = [[1.0 if argmax else r.temperature] for r, argmax in zip(requests, greedy, strict=True)]
    scores_RV = logits_RV.float() / torch.tensor(scales, device=device)
    if limited := [i for i, r in enumerate(requests) if r.top_k or r.top_p < 1]:
        scores_RV[limited] = restrict(scores_RV[limited], [requests[i] for i in limited])
    logprobs_RV = scores_RV.log_softmax(-1)
    cdf_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    draws = [[(rng if r.seed is None else random.Random(f"{r.seed}.{len(r.ids)}")).random()] for r in requests]
    points_R1 = torch.tensor(draws, dtype=torch.float64, device=device) * cdf_RV[:, -1:]
    ids_R1 = torch.searchsorted(cdf_RV, points_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
    if any(greedy):
        ids_R1[greedy] = scores_RV[greedy].argmax(-1, keepdim=True)
    return ids_R1[:, 0].tolist(), logprobs_RV.gather(1, ids_R1)[:, 0].tolist()


def restrict(scores_RV: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """top_k, then top_p of what is left, in vLLM's order: the rest gets -inf."""
    ordered_RV, order_RV = scores_RV.sort(-1, descending=True)
    rank_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    k_R1 = torch.tensor([[r.top_k or len(rank_V)] for r in requests], device=scores_RV.device)
    p_R1 = torch.tensor([[r.top_p] for r in requests], device=scores_RV.device)
    ordered_RV = ordered_RV.masked_fill(rank_V >= k_R1, -torch.inf)
    probs_RV = ordered_RV.softmax(-1)
    better_RV = probs_RV.cumsum(-1) - probs_RV  # probability of all better tokens
    ordered_RV = ordered_RV.masked_fill((better_RV >= p_R1) & (rank_V > 0), -torch.inf)
    return torch.empty_like(ordered_RV).scatter_(1, order_RV, ordered_RV)


# ---- the model and its packed step


class Packed:
    """What the attention function must know of one forward: the tokens of decoding rows come first, one each.

    decodes: [(row, tokens in it, the new one included)]; prefills: [(row, first packed token, first position, end)].
    """

    def __init__(self, kv: torch.Tensor, decodes: list[tuple], prefills: list[tuple], rows_N: torch.Tensor,
                 positions_N: torch.Tensor) -> None:
        self.kv, self.prefills, self.rows_N, self.positions_N, self.masks = kv, prefills, rows_N, positions_N, {}
        self.rows, self.lengths = [row for row, _ in decodes], [length for _, length in decodes]

    def mask(self, name: Any, last: list | range, keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """[queries, keys]: 0 where a query whose own position is `last` may look, else -inf; one for all layers."""
        if (name, window) not in self.masks:
            own, at = torch.tensor(last, device=like.device)[:, None], torch.arange(keys, device=like.device)
            hidden = (at > own) | (at <= own - (window or 1 << 30))
            self.masks[name, window] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self.masks[name, window]


def packed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
                     scaling: float | None = None, sliding_window: int | None = None, packed: Packed | None = None,
                     **rest: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    (heads, tokens, dim), kv_heads, rows = query.shape[1:], key.shape[1], len(packed.rows)
    keys, values = packed.kv[module.layer_idx]
    keys[packed.rows_N, :, packed.positions_N] = key[0].transpose(0, 1)
    values[packed.rows_N, :, packed.positions_N] = value[0].transpose(0, 1)
    out = query.new_empty((tokens, heads, dim))
    if rows:
        longest = max(packed.lengths)
        # Rows 0..R-1 are a view, which costs nothing; any other choice is copied.
        chosen = slice(rows) if packed.rows == list(range(rows)) else packed.rows
        mask = packed.mask("decode", [n - 1 for n in packed.lengths], longest, sliding_window, query)[:, None, None]
        grouped = query[0, :, :rows].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
        out[:rows] = attend(grouped, keys[chosen, :, :longest], values[chosen, :, :longest], attn_mask=mask,
                            scale=scaling).reshape(rows, heads, dim)
    for row, first, start, end in packed.prefills:
        plain, stop = start == 0 and (sliding_window is None or end <= sliding_window), first + end - start
        mask = None if plain else packed.mask(row, range(start, end), end, sliding_window, query)
        out[first:stop] = attend(
            query[:, :, first:stop], keys[row, None, :, :end], values[row, None, :, :end], attn_mask=mask,
            is_causal=plain, scale=scaling, enable_gqa=heads != kv_heads)[0].transpose(0, 1)
    return out[None], None


AttentionInterface.register("packed", packed_attention)


class Model:
    """Weights, KV memory of the running rows (grown by doubling), and the forward. Knows nothing of requests' lives."""

    def __init__(self, path: str, device: str) -> None:
        self.path, self.device = path, device
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).to(device).eval()
        self.loaded, self.discarded = True, {}
        self.kv = torch.empty((0, 2, 0, 0, 0, 0), dtype=dtype, device=device)  # [layers, 2, R, K, T, D]
        self.packs = self.probe()

    @torch.inference_mode()
    def probe(self) -> bool:
        """Whether the packed step gives what the model's own forward gives; else requests run one by one."""
        native, vocabulary = self.model.config._attn_implementation, self.model.config.get_text_config().vocab_size
        ids = [random.Random(i).randrange(vocabulary) for i in range(40)]
        wanted = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=True)
        try:  # boundary: whatever an unknown architecture does in here, it can run unpacked
            layers = wanted.past_key_values.layers
            ((_, heads, _, dim),) = {kv.shape for layer in layers for kv in (layer.keys, layer.values)}  # one shape
            self.kv = self.kv.new_empty((len(layers), 2, 0, heads, 0, dim))
            self.model.set_attn_implementation("packed")
            got = torch.cat([self.packed([(0, ids, a, b)]) for a, b in ((0, 20), (20, 39), (39, 40))]).log_softmax(-1)
            apart = (got - wanted.logits[0, [19, 38, 39]].log_softmax(-1)).abs().mean().item()
            problem = "" if apart < (1e-4 if self.device == "cpu" else 0.1) else f"its log-probs are off by {apart:.2g}"
        except Exception as error:
            problem = " ".join(str(error).split())[:200]
        if problem:
            print(f"engine: this model runs request by request, without prefix reuse: {problem}", flush=True)
            self.model.set_attn_implementation(native)
        self.free_kv()
        return not problem

    def grow(self, rows: int, tokens: int) -> None:
        layers, _, have_rows, heads, have_tokens, dim = self.kv.shape
        if rows > have_rows or tokens > have_tokens:
            rows = max(have_rows, 1 << (rows - 1).bit_length())
            tokens = max(have_tokens, 256, 1 << (tokens - 1).bit_length())
            # Zeros: what a mask hides is multiplied by 0, so that no NaN may be there.
            grown = self.kv.new_zeros((layers, 2, rows, heads, tokens, dim))
            grown[:, :, :have_rows, :, :have_tokens] = self.kv
            self.kv = grown

    def free_kv(self) -> None:
        self.kv = self.kv[:, :, :0, :, :0].clone()

    def packed(self, work: list[tuple[int, list[int], int, int]]) -> torch.Tensor:
        """work: (row, ids, start, end) computes ids[start:end], single tokens first; logits [R, V] at each end."""
        self.grow(max(w[0] for w in work) + 1, max(w[3] for w in work))
        ids, rows, positions, decodes, prefills, lasts = [], [], [], [], [], []
        for row, all_ids, start, end in work:
            decodes += [(row, end)] if end - start == 1 else []
            prefills += [(row, len(ids), start, end)] if end - start > 1 else []
            ids += all_ids[start:end]
            rows += [row] * (end - start)
            positions += range(start, end)
            lasts.append(len(ids) - 1)
        ids_N, rows_N, positions_N, lasts_R = torch.tensor(ids + rows + positions + lasts, device=self.device).split(
            [len(ids)] * 3 + [len(lasts)])
        packed = Packed(self.kv, decodes, prefills, rows_N, positions_N)
        return self.model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, packed=packed,
                          logits_to_keep=lasts_R).logits[0]

    def alone(self, request: Request) -> torch.Tensor:
        """One request over its own cache; logits [1, V]."""
        request.private = request.private or DynamicCache(config=self.model.config)
        ids = torch.tensor([request.ids[request.cached:]], device=self.device)
        return self.model(input_ids=ids, past_key_values=request.private, logits_to_keep=1).logits[:, -1]

    def sleep(self, level: int) -> None:
        """KV memory goes; level 1 moves weights to the host, level 2 discards them, as vLLM."""
        self.free_kv()
        if level == 2:
            self.discarded = {name: p.shape for name, p in self.model.named_parameters()}
            for p in self.model.parameters():
                p.data = p.data.new_empty(0)
            self.loaded = False
        self.model.to("cpu")
        if self.device == "cuda":
            torch.cuda.empty_cache()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # else glibc keeps what was freed

    def wake(self) -> None:
        """Memory for the weights is back; after level 2 they are zeros until `load`."""
        for name, p in self.model.named_parameters():
            if name in self.discarded:
                p.data = torch.zeros(self.discarded[name], dtype=p.dtype, device=self.device)
        self.discarded = {}
        self.model.to(self.device)

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Replaces the weights in place by those of the *.safetensors in `path`; checks all before it writes any."""
        if self.discarded:
            raise Refused("the weights are asleep: POST /wake_up?tags=weights first", 409)
        try:
            given = {name: t for f in sorted(Path(path).glob("*.safetensors")) for name, t in load_file(f).items()}
        except (OSError, SafetensorError) as error:
            raise Refused(f"weights_path={path!r} cannot be read: {error}") from error
        target = self.model.state_dict(keep_vars=True)  # tied weights: two names, one tensor
        filled = {id(target[name]) for name in given if name in target}
        wrong = [f"{name} is missing" for name, tensor in target.items() if id(tensor) not in filled]
        wrong += [f"{n} is {'of another shape' if n in target else 'unknown'}" for n, t in given.items()
                  if n not in target or t.shape != target[n].shape]
        if wrong:
            raise Refused(f"weights_path={path!r} does not fit: {', '.join(wrong[:3])} ({len(wrong)} in all)")
        for name, tensor in given.items():
            target[name].copy_(tensor)
        self.loaded = True


# ---- the model thread


class Engine:
    """Continuous batching over one Model. All but `submit` and `call` runs in the model thread."""

    def __init__(self, model: Model, max_running: int = 64, prefix_bytes: int = 1 << 30, seed: int = 0,
                 threads: int = 1) -> None:
        self.model, self.max_running, self.prefix_bytes, self.threads = model, max_running, prefix_bytes, threads
        self.rng, self.version, self.loop, self.paused, self.asleep = random.Random(seed), "default", None, False, set()
        # inbox: Requests and (function, arguments, future); running[i].row == i; touched: for the event loop.
        self.inbox, self.waiting, self.running, self.touched = queue.SimpleQueue(), [], [], []
        self.blocks: dict[int, Request] = {}  # block hash -> the newest request that has its KV
        self.stored: dict[Request, int] = {}  # finished requests whose KV is kept -> bytes, least recently used first
        self.prefill_budget = 512  # tokens a step: adapted so that a step stays near a quarter of a second
        self.counts = {"prompt_tokens": 0, "reused_tokens": 0, "sampled_tokens": 0}
        self.thread = threading.Thread(target=self.run, name="model", daemon=True)

    def submit(self, request: Request) -> None:
        self.loop = asyncio.get_running_loop()
        self.inbox.put(request)

    async def call(self, function: Callable, *arguments: Any) -> Any:
        """Runs `function` in the model thread between two steps."""
        future: Future = Future()
        self.inbox.put((function, arguments, future))
        return await asyncio.wrap_future(future)

    def run(self) -> None:
        torch.set_num_threads(self.threads)
        while True:
            self.receive(wait=self.paused or not self.model.loaded or not (self.running or self.waiting))
            if not self.paused and self.model.loaded:
                try:
                    self.step()
                except Exception as error:  # boundary: a failed step fails its requests, not the engine
                    sys.excepthook(*sys.exc_info())
                    self.forget()
                    self.finish_all("error", f"the engine's step failed: {error}")
            if self.touched:
                self.loop.call_soon_threadsafe(lambda done=self.touched: [request.changed.set() for request in done])
                self.touched = []

    def receive(self, wait: bool) -> None:
        """Takes all that is in the inbox; if there is nothing else to do, waits for something."""
        while wait or not self.inbox.empty():
            wait, item = False, self.inbox.get()
            if isinstance(item, Request):
                self.waiting.append(item)
                continue
            function, arguments, future = item
            try:
                future.set_result(function(*arguments))
            except Exception as error:  # boundary: one control call; its route reports it
                if not isinstance(error, Refused):
                    sys.excepthook(*sys.exc_info())
                    error = Refused(f"{function.__name__} failed: {error!r}", 500)
                future.set_exception(error)

    @torch.inference_mode()
    def step(self) -> None:
        started = time.perf_counter()
        for request in [r for r in self.running if r.cancelled]:
            self.finish(request, "abort")
        self.admit()
        work = [(r, len(r.ids)) for r in self.running if len(r.ids) - r.cached == 1]
        budget = whole = self.prefill_budget if self.model.packs else sys.maxsize
        for request in self.running:
            if (todo := len(request.ids) - request.cached) > 1 and budget > 0:
                work.append((request, request.cached + min(todo, budget)))
                budget -= min(todo, budget)
        if not work:
            return
        logits_RV = self.model.packed([(r.row, r.ids, r.cached, end) for r, end in work]) if self.model.packs else (
            torch.cat([self.model.alone(r) for r, _ in work]))
        for request, end in work:
            self.computed(request, end)
        ready = [i for i, (r, end) in enumerate(work) if end == len(r.ids)]
        rows = [work[i][0] for i in ready]
        sampled = sample(logits_RV[ready], rows, self.rng) if ready else ((), ())
        for request, token, logprob in zip(rows, *sampled, strict=True):
            request.append(token, logprob, self.version)
            if request.finish:
                self.finish(request, request.finish)
            elif request.stream:
                self.touched.append(request)
        self.counts["sampled_tokens"] += len(ready)
        if whole - budget >= 256:
            rate = (whole - budget) / (time.perf_counter() - started)
            self.prefill_budget = int(min(max(rate / 4, 256), 8192))

    def computed(self, request: Request, end: int) -> None:
        """The row's KV reaches to `end`: its new whole blocks can be found by others."""
        for block in request.hash_blocks(end)[request.cached // BLOCK:end // BLOCK] if self.model.packs else ():
            self.blocks[block] = request
        request.cached = end

    def admit(self) -> None:
        """Waiting requests join while there is room, each with the longest prefix that was computed before. One whose
        next block is just being computed for another (a group's common prompt) waits for that."""
        coming = {block for r in self.running for block in r.blocks[r.cached // BLOCK:]}
        later: list[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.pop(0)
            if request.cancelled:
                self.finish(request, "abort")
                continue
            blocks = request.hash_blocks(len(request.ids) - 1) if self.model.packs else []
            known = next((n for n in range(len(blocks), 0, -1) if blocks[n - 1] in self.blocks), 0)
            if coming.intersection(blocks[known:known + 1]):
                later.append(request)
                continue
            coming.update(blocks[known:])
            request.row = len(self.running)
            self.running.append(request)
            self.model.grow(len(self.running), len(request.ids))
            if known:
                self.copy_prefix(self.blocks[blocks[known - 1]], request, known * BLOCK)
            self.counts["prompt_tokens"] += len(request.ids)
            self.counts["reused_tokens"] += request.cached
        self.waiting = later + self.waiting

    def copy_prefix(self, source: Request, request: Request, length: int) -> None:
        if source.ids[:length] != request.ids[:length]:
            return  # two prefixes of one hash
        kept = source.saved if source.row < 0 else self.model.kv[:, :, source.row]
        self.model.kv[:, :, request.row, :, :length] = kept[:, :, :, :length]
        self.computed(request, length)
        if source in self.stored:
            self.stored[source] = self.stored.pop(source)

    def finish(self, request: Request, reason: str) -> None:
        """Ends it, keeps its KV as a prefix, and gives its slot to the last row, so that rows stay 0..R-1."""
        request.finish = reason
        self.touched.append(request)
        if (row := request.row) < 0:
            return
        kv, last = self.model.kv, self.running.pop()
        request.row, request.private = -1, None
        if request.error:
            kv[:, :, row:row + 1] = 0  # it may hold NaN
            self.drop(request)
        elif self.model.packs:
            request.saved = kv[:, :, row, :, :request.cached].clone()
            self.stored[request] = request.saved.nbytes
        if last is not request:
            kv[:, :, row:row + 1, :, :last.cached] = kv[:, :, last.row:last.row + 1, :, :last.cached]
            last.row, self.running[row] = row, last
        while sum(self.stored.values()) > self.prefix_bytes:
            oldest = next(iter(self.stored))
            self.stored.pop(oldest)
            self.drop(oldest)

    def drop(self, request: Request) -> None:
        request.saved = None
        for block in request.blocks:
            if self.blocks.get(block) is request:
                del self.blocks[block]

    def finish_all(self, reason: str, error: str = "") -> None:
        for request in [*self.running[::-1], *self.waiting]:
            request.error = error
            self.finish(request, reason)
        self.waiting.clear()

    def forget(self) -> dict:
        """No KV is valid any more: kept prefixes go, running requests are computed again."""
        self.stored.clear()
        self.blocks.clear()
        self.model.free_kv()
        for request in self.running:
            request.row, request.cached, request.private = -1, 0, None
        self.waiting, self.running = self.running + self.waiting, []
        return {}

    def pause(self, mode: str) -> dict:
        """abort: what is in flight comes back with what it has; keep: it stands still. Later requests wait."""
        if mode not in ("abort", "keep"):
            raise Refused(f"mode={mode!r} must be abort or keep")
        self.paused = True
        if mode == "abort":
            self.finish_all("abort")
        return {"status": "paused"}

    def resume(self) -> dict:
        if self.asleep:
            raise Refused(f"{' and '.join(sorted(self.asleep))} asleep: POST /wake_up first", 409)
        self.paused = False
        return {"status": "resumed"}

    def sleep(self, level: str) -> dict:
        if level not in ("0", "1", "2"):
            raise Refused(f"level={level!r} must be 0, 1 or 2")
        self.pause("abort")
        if level != "0":
            self.forget()
            self.asleep = {"weights", "kv_cache"}
            self.model.sleep(int(level))
        return {"status": "sleeping", "level": int(level)}

    def wake(self, tags: list[str]) -> dict:
        if unknown := set(tags) - {"weights", "kv_cache"}:
            raise Refused(f"tags={sorted(unknown)} unknown: weights, kv_cache")
        if "weights" in self.asleep and (not tags or "weights" in tags):
            self.model.wake()
        self.asleep -= set(tags or self.asleep)
        if not self.asleep:
            self.resume()
        return {"status": "sleeping" if self.asleep else "awake", "tags": tags or None}

    def rpc(self, body: dict) -> dict:
        if body.get("method") != "reload_weights":
            raise Refused(f"method={body.get('method')!r} unknown: this engine has reload_weights")
        self.model.load((body.get("kwargs") or {}).get("weights_path") or self.model.path)
        self.forget()
        return {"results": [None]}

    def set_version(self, version: Any) -> dict:
        if not isinstance(version, str):
            raise Refused(f"new_version={version!r} must be a string")
        self.version = version
        return {"success": True, "new_version": version}


# ---- HTTP


class Api:
    """The routes that know the tokenizer."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str, max_context: int) -> None:
        self.engine, self.tokenizer, self.name, self.max_context = engine, tokenizer, name, max_context
        self.defaults = engine.model.model.generation_config or GenerationConfig()
        self.vocabulary = engine.model.model.config.get_text_config().vocab_size
        eos = self.defaults.eos_token_id
        self.eos = frozenset([*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]) - {None}
        self.thinks = "<think>" in tokenizer.chat_template

    def refuse_long(self, prompt: int) -> None:
        if prompt >= self.max_context:
            raise Refused(f"This model's maximum context length is {self.max_context} tokens. However, your prompt "
                          f"contains {prompt} input tokens, which leaves no room for output. Please reduce its length.")

    async def render(self, body: dict, http: HttpRequest) -> dict:
        messages = [for_template(message) for message in body["messages"]]
        extra = {"add_generation_prompt": body.get("add_generation_prompt", True)}
        extra |= body.get("chat_template_kwargs") or {}
        text = self.tokenizer.apply_chat_template(messages, tools=body.get("tools") or None, tokenize=False, **extra)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        self.refuse_long(len(ids))
        params = {name: getattr(self.defaults, name, None) for name in ("temperature", "top_p", "top_k")}
        params |= {name: body[name] for name in (*NUMBERS, *NEUTRAL, "stop_token_ids", "ignore_eos") if name in body}
        params["max_tokens"] = min(wanted or self.max_context, self.max_context - len(ids))
        params["logprobs"] = 0 if body.get("logprobs") else None
        return {"request_id": f"chatcmpl-{os.urandom(16).hex()}", "token_ids": ids, "model": self.name,
                "sampling_params": {name: value for name, value in params.items() if value is not None}}

    def to_request(self, body: dict) -> Request:
        ids, given = body.get("token_ids"), body.get("sampling_params") or {}
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < self.vocabulary for i in ids):
            raise Refused(f"token_ids must be a list of at least one integer from 0 to {self.vocabulary - 1}")
        self.refuse_long(len(ids))
        for name, (kind, low, high) in NUMBERS.items():
            if (value := given.get(name)) is None:
                continue
            if type(value) not in (int, float) or not low <= value <= high or kind(value) != value:
                raise Refused(f"sampling_params.{name}={value!r} must be {kind.__name__} from {low} to {high}")
        for name, neutral in NEUTRAL.items():
            if given.get(name) is not None and given[name] != neutral:
                raise Refused(f"sampling_params.{name}={given[name]!r} is not supported by this engine: leave it out")
        stop = [*(given.get("stop_token_ids") or ()), *(() if given.get("ignore_eos") else self.eos)]
        known = {name: given[name] for name in NUMBERS if given.get(name) is not None}
        known["max_tokens"] = min(self.max_context - len(ids), known.get("max_tokens", self.max_context))
        name = str(body.get("request_id") or os.urandom(16).hex())
        return Request(ids, **known, stop=stop, stream=bool(body.get("stream")), id=name)

    async def generate(self, body: dict, http: HttpRequest) -> Response | dict:
        request, show = self.to_request(body), (body.get("sampling_params") or {}).get("logprobs") is not None
        if not self.engine.model.loaded and not self.engine.asleep:
            raise Refused("sleep level 2 discarded the weights: POST /collective_rpc reload_weights first", 503)
        self.engine.submit(request)
        if request.stream:
            return StreamingResponse(self.stream(request, show), media_type="text/event-stream")

        def left(_: Any) -> None:
            request.cancelled = request.finish is None
            request.changed.set()

        gone = asyncio.ensure_future(http.receive())  # the body is read: what comes next is the disconnect
        gone.add_done_callback(left)
        try:
            await request.changed.wait()
        finally:
            gone.cancel()
        if request.error:
            raise Refused(request.error, 500)
        sampled, finish = len(request.logprobs), request.finish or "abort"
        return {"request_id": request.id, "model": self.name, "created": int(time.time()),
                "choices": [self.choice(request, 0, sampled, finish, show)], "usage": usage(request.prompt, sampled)}

    async def stream(self, request: Request, show: bool) -> AsyncIterator[bytes]:
        sent, finish = 0, None
        try:
            while finish is None:
                await request.changed.wait()
                request.changed.clear()
                finish, upto = request.finish, len(request.logprobs)  # in this order: then upto holds all its tokens
                event = error_body(request.error, 500) if request.error else {
                    "request_id": request.id, "choices": [self.choice(request, sent, upto, finish, show)]}
                yield b"data: " + orjson.dumps(event) + b"\n\n"
                sent = upto
            yield b"data: [DONE]\n\n"
        finally:
            request.cancelled = request.finish is None

    def choice(self, request: Request, start: int, end: int, finish: str | None, show: bool) -> dict:
        ids = request.ids[request.prompt + start:request.prompt + end]
        content = [{"token_id": i, "logprob": p} for i, p in zip(ids, request.logprobs[start:end], strict=True)]
        reason = ids[-1] if finish == "stop" and ids[-1] not in self.eos else None  # as vLLM: none at an eos
        return {"index": 0, "token_ids": ids, "logprobs": {"content": content} if show else None, "stop_reason": reason,
                "finish_reason": finish, "weight_versions": request.versions or None if finish else None}

    async def derender(self, body: dict, http: HttpRequest) -> dict:
        reply, chat, prompt = body["generate_response"], body.get("chat_request"), body.get("prompt_token_ids") or []
        if not isinstance(chat, dict):
            raise Refused("chat_request is required: tool calls and reasoning are parsed for the request they answer")
        opened = self.thinks and self.tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
        tools = chat.get("tools") or [] if chat.get("tool_choice") != "none" else []
        choices, sampled = [], 0
        for choice in reply["choices"]:
            if not (ids := list(choice["token_ids"] or ())):
                raise Refused(f"choice {choice['index']} has empty or null token_ids")
            sampled += len(ids)
            while ids and ids[-1] in self.eos:
                ids.pop()
            message = parse_reply(self.tokenizer.decode(ids, skip_special_tokens=False), tools, self.thinks, opened)
            entries = [entry | {"token": self.tokenizer.decode([entry["token_id"]]), "top_logprobs": []}
                       for entry in (choice.get("logprobs") or {}).get("content") or ()]
            choices.append({"index": choice["index"], "message": message, "finish_reason": choice.get("finish_reason"),
                            "logprobs": {"content": entries} if entries else None})
        counts = usage(body.get("prompt_tokens") or len(prompt), sampled)
        return {"id": reply.get("request_id"), "object": "chat.completion", "created": int(time.time()),
                "model": self.name, "choices": choices, "usage": counts}


def usage(prompt: int, sampled: int) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def for_template(message: dict) -> dict:
    """OpenAI's message as templates expect it (and vLLM gives it): text, never null; tool arguments as objects."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if unknown := [part.get("type") for part in content if not isinstance(part.get("text"), str)]:
            raise Refused(f"content parts of type {unknown[0]!r} are not supported: text only")
        content = "\n".join(part["text"] for part in content)
    message = message | {"content": content}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        functions = [call["function"] | {"arguments": as_object(call["function"].get("arguments"))} for call in calls]
        message["tool_calls"] = [call | {"function": f} for call, f in zip(calls, functions, strict=True)]
    return message


def as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        return arguments  # broken JSON goes to the template as the text it is


def error_body(message: str, status: int) -> dict:
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 409: "ConflictError"}
    kind = kinds.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def answer(content: dict, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def create_app(api: Api, key: str = "") -> Callable:
    """The ASGI application. With a key, every route asks for it: whoever can set weights owns the run."""
    engine = api.engine
    model = {"id": api.name, "object": "model", "created": 0, "owned_by": "harnessed", "max_model_len": api.max_context}
    chat, call = "/v1/chat/completions", engine.call
    posts: dict[str, Callable] = {
        f"{chat}/render": api.render, f"{chat}/derender": api.derender, "/inference/v1/generate": api.generate,
        "/pause": lambda body, http: call(engine.pause, http.query_params.get("mode", "abort")),
        "/resume": lambda body, http: call(engine.resume),
        "/sleep": lambda body, http: call(engine.sleep, http.query_params.get("level", "1")),
        "/wake_up": lambda body, http: call(engine.wake, http.query_params.getlist("tags")),
        "/reset_prefix_cache": lambda body, http: call(engine.forget),
        "/collective_rpc": lambda body, http: call(engine.rpc, body),
        "/update_weight_version": lambda body, http: call(engine.set_version, body.get("new_version"))}
    gets: dict[str, Callable[[], dict]] = {
        "/health": lambda: {}, "/v1/models": lambda: {"object": "list", "data": [model]},
        "/is_paused": lambda: {"is_paused": engine.paused},
        "/is_sleeping": lambda: {"is_sleeping": bool(engine.asleep)},
        "/load": lambda: {"server_load": len(engine.running) + len(engine.waiting), **engine.counts}}

    async def endpoint(http: HttpRequest) -> Response:
        try:
            given = http.headers.get("authorization", "").removeprefix("Bearer ") or http.headers.get("x-api-key", "")
            if key and not hmac.compare_digest(given.encode(), key.encode()):
                raise Refused("the engine's key is missing or wrong", 401)
            if http.method != "POST":
                return answer(gets[http.url.path]())
            body = orjson.loads(await http.body() or b"{}")
            if body.get("model", api.name) not in (None, api.name):
                raise Refused(f"The model `{body['model']}` does not exist: this engine serves `{api.name}`.", 404)
            result = await posts[http.url.path](body, http)
            return result if isinstance(result, Response) else answer(result)
        except Refused as error:
            message, status = (*error.args, 400)[:2]
            return answer(error_body(message, status), status)
        except (ValueError, TypeError, KeyError, AttributeError, jinja2.TemplateError) as error:  # one request
            return answer(error_body(f"malformed request: {error!r}", 400), 400)

    return Starlette(routes=[Route(path, endpoint, methods=["POST"]) for path in posts]
                     + [Route(path, endpoint, methods=["GET"]) for path in gets])


# ---- the process


def fail(message: str) -> None:
    print(f"engine: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def load(model: str, name: str, max_context: int, device: str) -> tuple[Model, Any, str]:
    """The model, its tokenizer and the name it is served by; ends the process with one clear line if it cannot."""
    if not (Path(model) / "config.json").is_file():
        fail(f"--model {model}: not a model directory (it must hold config.json, weights and a tokenizer)")
    if device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch sees no CUDA device; use --device cpu")
    torch.set_num_threads(1)  # a pool beside the model thread's would make OpenMP give up spinning: 2x slower
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if not tokenizer.chat_template:
            fail(f"--model {model}: its tokenizer has no chat template; add a chat_template.jinja to the directory")
        loaded = Model(model, device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        fail(f"--model {model}: {' '.join(str(error).split())}")
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", max_context)
    if max_context > limit:
        fail(f"--max-context {max_context}: this model's limit is {limit}")
    return loaded, tokenizer, name or Path(model).resolve().name


def main(model: str, port: int, host: str = "127.0.0.1", key_file: str = "", served_model_name: str = "",
         max_context: int = 4096, max_running: int = 64, device: Literal["cpu", "cuda"] = "cpu", threads: int = 0,
         seed: int = 0, prefix_gib: float = 1.0, die_with_parent: bool = False) -> None:
    """The embedded inference engine: vLLM's routes over a transformers model.

    Args:
        model: directory of a Hugging Face causal language model
        port: port to listen on; 0 takes a free one and prints it
        host: address to listen on
        key_file: file with the key that every route then asks for
        served_model_name: name that requests use; the directory's name if empty
        max_context: tokens of prompt and reply together
        max_running: requests in one batch; more wait
        device: cpu computes in float32, cuda in bfloat16
        threads: CPU threads of the arithmetic; 0: one for models under 20M parameters, which more slow down, else all
        seed: seed for the sampling of requests that bring none
        prefix_gib: memory for the KV of finished requests, GiB
        die_with_parent: exit when the process that started this one is gone
    """
    if die_with_parent:
        threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        key = Path(key_file).read_text().strip() if key_file else ""
        listener.bind((host, port))
    except OSError as error:
        fail(f"--host {host} --port {port} --key-file {key_file or 'none'}: {error}")
    loaded, tokenizer, name = load(model, served_model_name, max_context, device)
    small = sum(p.numel() for p in loaded.model.parameters()) < 20e6
    threads = threads or (1 if small else os.cpu_count() or 1)
    engine = Engine(loaded, max_running, int(prefix_gib * 2**30), seed, threads)
    app = create_app(Api(engine, tokenizer, name, max_context), key)
    engine.thread.start()
    print(f"engine: {name} on http://{host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=120,
                                  timeout_graceful_shutdown=1)).run(sockets=[listener])
    os._exit(0)  # the model thread may be inside a forward


if __name__ == "__main__":
    tyro.cli(main)
