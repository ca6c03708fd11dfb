"""The embedded inference engine: one process that speaks the routes of vLLM 0.32 which this project uses.

    python engine.py --model DIR --port 8001 [--key-file F] [--max-context 4096] [--max-running 64]

It serves any Hugging Face causal language model directory on a CPU or one CUDA device: render (messages -> ids),
generate (ids -> sampled ids, log-probs at the sampling temperature, weight versions), derender (ids -> message, tool
calls, reasoning), pause, sleep, weights replaced in place. Left out: tensor parallelism, quantization, top-k log-probs,
stop strings, penalties, grammars, images; a request for one of them is a 400, never ignored.

    uvicorn's event loop                          the model thread (owns model, KV memory, every running request)
    generate ── submit(waiting.append) ─────────> joins the running batch at the next step
    pause, sleep, weights ── submit(function) ──> runs between two steps; the route awaits its result
    Request.changed  <── one wake-up a step ───── new tokens of streamed requests, and finished ones

One step computes all running requests in one forward of the transformers model: the new tokens of all rows are packed
into one sequence, and our attention function (registered with transformers) writes their keys and values into the rows'
slots and lets every row attend to its own. A finished row's KV is kept as a prefix that later prompts copy. Models that
the packed step cannot run (linear attention, sinks, soft caps) are found by a probe at the start and get one cache and
one forward for each request: slower, without prefix reuse, the same answers.

Axes: N new tokens, packed; R rows; V vocabulary; H heads; K kv heads; T tokens of a row; D head dimension.
"""

import asyncio
import contextlib
import ctypes
import hmac
import json
import os
import random
import re
import socket
import sys
import threading
import time
from bisect import bisect, insort
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import jinja2
import orjson
import torch
import tyro
import uvicorn
from pydantic import BaseModel, Field, ValidationError, validate_call
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

PREFILL_TOKENS = 512  # prompt tokens in one step: what running replies, and a pause, have to wait for
PREFIX_BYTES = 1 << 30  # memory for the KV of finished requests


# ---- sampled text -> message

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)  # the last one's end may be missing, as in vLLM
FUNCTION = re.compile(r"<function=([^>\n]+)>\s*(.*)</function>", re.S)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.S)


def json_or_text(text: Any) -> Any:
    """The value that `text` is the JSON of, or what was given."""
    try:
        return orjson.loads(text)  # strict: neither NaN nor lone surrogates
    except ValueError:
        return text


def parse_call(text: str, tools: list[dict]) -> dict:
    """One tool call, in Hermes JSON or Qwen XML. ValueError if it is broken or cut off."""
    if xml := FUNCTION.fullmatch(text):
        (name, inner), found = xml.groups(), PARAMETER.findall(xml[2])
        schemas = [tool["function"].get("parameters") or {} for tool in tools if tool["function"]["name"] == name]
        types = {key: schema.get("type") for s in schemas for key, schema in s.get("properties", {}).items()}
        # XML has only text: it is read as the JSON that the tool's schema asks for.
        arguments = {k: v if types.get(k, "string") == "string" else json_or_text(v) for k, v in found}
        call = {"name": name, "arguments": None if PARAMETER.sub("", inner) else arguments}
    else:
        call = orjson.loads(text)
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            return {"id": f"call_{os.urandom(12).hex()}", "type": "function", "function": function}
    raise ValueError("a tool call is a name and an object of arguments")


def parse_reply(text: str, tools: list[dict], thinks: bool, opened: bool) -> dict:
    """A chat message. `thinks`: the template knows <think>; `opened`: the prompt already ended with it."""
    reasoning, content, calls = None, text, []
    if thinks and ((begun := text.lstrip()).startswith("<think>") or opened):
        thought = begun.removeprefix("<think>") if begun.startswith("<think>") else text
        reasoning, _, content = thought.partition("</think>")
    if tools:
        with contextlib.suppress(ValueError):  # a broken call stays in the content, where the harness sees it
            calls = [parse_call(body.strip(), tools) for body in CALL.findall(content)]
    if calls:
        content = content.partition("<tool_call>")[0] or None
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}


# ---- requests and sampling


class Sampling(BaseModel, strict=True, extra="forbid"):
    """vLLM's sampling parameters. The last four are not honoured: they have the value that changes nothing."""

    max_tokens: int = Field(1 << 31, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)  # under 1e-5: argmax, as in vLLM
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # under 1: off
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: Literal[0] | None = 0  # the sampled tokens' own, which are always there
    min_p: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)
    frequency_penalty: float = Field(0, ge=0, le=0)
    repetition_penalty: float = Field(1, ge=1, le=1)


class GenerateBody(BaseModel, strict=True):
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Sampling()
    stream: bool = False
    request_id: str | None = None


class Request:
    """One generation. Made by the event loop; once submitted, all but `cancelled` is written by the model thread.

    ids: prompt, then what was sampled; prompt: its number of tokens; limit: len(ids) at which it ends by length;
    versions: spans of sampled tokens; row: its slot while it runs, else -1; cached: tokens whose KV is computed;
    kv: that KV once finished, like a slot's; of a model that cannot run packed: its cache.
    """

    def __init__(self, ids: list[int], sampling: Sampling, stop: Iterable[int] = (), max_context: int = 1 << 31,
                 stream: bool = False) -> None:
        self.ids, self.prompt, self.limit = [*ids], len(ids), min(len(ids) + sampling.max_tokens, max_context)
        self.sampling, self.stop, self.stream = sampling, {*stop}, stream
        self.changed, self.cancelled, self.finish, self.error = asyncio.Event(), False, None, ""
        self.logprobs, self.versions = [], []
        self.row, self.cached, self.kv = -1, 0, None

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

    def known_ids(self) -> list[int]:
        """Its place among the prefixes, which does not change while it runs."""
        return self.ids[:self.prompt] if self.row >= 0 else self.ids


def sample(logits_RV: torch.Tensor, requests: list[Request], rng: random.Random) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob in the distribution it was drawn from (after temperature, top_k and top_p).

    A seeded request draws from (seed, position) alone: the batch around it does not matter, and a generation that was
    aborted and is continued draws what it would have drawn.
    """
    device, params = logits_RV.device, [r.sampling for r in requests]
    greedy = [p.temperature < 1e-5 for p in params]
    scales = [[1.0 if argmax else p.temperature] for p, argmax in zip(params, greedy, strict=True)]
    scores_RV = logits_RV.float() / torch.tensor(scales, device=device)
    if limited := [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]:
        scores_RV[limited] = restrict(scores_RV[limited], [params[i] for i in limited])
    logprobs_RV = scores_RV.log_softmax(-1)
    cdf_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    seeds = [(r.sampling.seed, len(r.ids)) for r in requests]
    draws = [[(rng if seed is None else random.Random(f"{seed}.{at}")).random()] for seed, at in seeds]
    points_R1 = torch.tensor(draws, dtype=torch.float64, device=device) * cdf_RV[:, -1:]
    ids_R1 = torch.searchsorted(cdf_RV, points_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
    if any(greedy):
        ids_R1[greedy] = scores_RV[greedy].argmax(-1, keepdim=True)
    return ids_R1[:, 0].tolist(), logprobs_RV.gather(1, ids_R1)[:, 0].tolist()


def restrict(scores_RV: torch.Tensor, params: list[Sampling]) -> torch.Tensor:
    """top_k, then top_p of what is left, in vLLM's order: the rest gets -inf."""
    ordered_RV, order_RV = scores_RV.sort(-1, descending=True)
    rank_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    k_R1 = torch.tensor([[p.top_k if p.top_k > 0 else len(rank_V)] for p in params], device=scores_RV.device)
    p_R1 = torch.tensor([[p.top_p] for p in params], device=scores_RV.device)
    ordered_RV = ordered_RV.masked_fill(rank_V >= k_R1, -torch.inf)
    probs_RV = ordered_RV.softmax(-1)
    better_RV = probs_RV.cumsum(-1) - probs_RV  # probability of all better tokens
    ordered_RV = ordered_RV.masked_fill((better_RV >= p_R1) & (rank_V > 0), -torch.inf)
    return torch.empty_like(ordered_RV).scatter_(1, order_RV, ordered_RV)


# ---- the model and its packed step


class Part:
    """Rows that compute equally many tokens (n) of one forward: all those of one token, or one that reads its prompt.

    rows: their slots; tokens: their part of the packed sequence; positions_Rn: each token's place in its row.
    """

    def __init__(self, rows: list[int], tokens: slice, positions_N: torch.Tensor, longest: int) -> None:
        # Neighbouring slots are a view, which costs nothing; any other choice is copied.
        neighbours = range(rows[0], rows[0] + len(rows))
        self.rows = slice(neighbours.start, neighbours.stop) if rows == [*neighbours] else rows
        self.tokens, self.positions_Rn, self.longest = tokens, positions_N[tokens].view(len(rows), -1), longest
        self.masks = {}

    def mask(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor:
        """[R, 1, groups * n, longest]: 0 where a query may look, else -inf; made once for all layers."""
        if window not in self.masks:
            own = self.positions_Rn.repeat(1, groups)[:, None, :, None]
            at = torch.arange(self.longest, device=like.device)
            hidden = (at > own) | (at <= own - (window or 1 << 30))
            self.masks[window] = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self.masks[window]


def packed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
                     scaling: float | None = None, sliding_window: int | None = None, packed: Any = None,
                     **rest: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D].

    packed: (KV memory, parts, row and position of each token). The heads that share keys are queries side by side.
    """
    (heads, _, dim), kv_heads = query.shape[1:], key.shape[1]
    kv, parts, rows_N, positions_N = packed
    keys, values = kv[module.layer_idx]
    keys[rows_N, :, positions_N] = key[0].transpose(0, 1)
    values[rows_N, :, positions_N] = value[0].transpose(0, 1)
    out, groups = [], heads // kv_heads
    for part in parts:
        rows, n = part.positions_Rn.shape
        asked = query[0, :, part.tokens].reshape(kv_heads, groups, rows, n, dim).permute(2, 0, 1, 3, 4)
        got = scaled_dot_product_attention(
            asked.reshape(rows, kv_heads, groups * n, dim), keys[part.rows, :, :part.longest],
            values[part.rows, :, :part.longest], part.mask(sliding_window, groups, query), scale=scaling)
        out.append(got.reshape(rows, kv_heads, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(rows * n, heads, dim))
    return torch.cat(out)[None], None


AttentionInterface.register("packed", packed_attention)


class Model:
    """Weights, KV memory of the running rows (grown by doubling), and the forward. Knows nothing of requests' lives."""

    def __init__(self, path: str, device: str) -> None:
        self.device, self.loaded, dtype = device, True, torch.float32 if device == "cpu" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).to(device).eval()
        for p in self.model.parameters():
            p.data = p.data.clone()  # in memory of its own, which sleep can free, and not in pages of the file
        self.kv = torch.empty((0, 2, 0, 0, 0, 0), dtype=dtype, device=device)  # [layers, 2, R, K, T, D]
        self.packs = self.probe()

    @torch.inference_mode()
    def probe(self) -> bool:
        """Whether the packed step gives what the model's own forward gives; else requests run one by one."""
        native, vocabulary = self.model.config._attn_implementation, self.model.config.get_text_config().vocab_size
        request, got = Request([random.Random(i).randrange(vocabulary) for i in range(40)], Sampling()), []
        wanted = self.model(input_ids=torch.tensor([request.ids], device=self.device), use_cache=True)
        try:  # boundary: whatever an unknown architecture does in here, it can run unpacked
            layers = wanted.past_key_values.layers
            ((_, heads, _, dim),) = {kv.shape for layer in layers for kv in (layer.keys, layer.values)}  # one shape
            self.kv, request.row = self.kv.new_empty((len(layers), 2, 0, heads, 0, dim)), 0
            self.model.set_attn_implementation("packed")
            for end in (20, 39, 40):
                got.append(self.packed([(request, end)]).log_softmax(-1))
                request.cached = end
            apart = (torch.cat(got) - wanted.logits[0, [19, 38, 39]].log_softmax(-1)).abs().mean().item()
            if not apart < (1e-4 if self.device == "cpu" else 0.1):
                raise ValueError(f"its log-probs are off by {apart:.2g}")
        except Exception as error:
            print(f"engine: this model runs request by request, without prefix reuse: {error}"[:300], flush=True)
            self.model.set_attn_implementation(native)
            return False
        finally:
            self.free_kv()
        return True

    def grow(self, rows: int, tokens: int) -> None:
        have_rows, have_tokens = self.kv.shape[2], self.kv.shape[4]
        if rows > have_rows or tokens > have_tokens:
            more_rows = max(1 << (rows - 1).bit_length(), have_rows) - have_rows
            more_tokens = max(1 << (tokens - 1).bit_length(), have_tokens, 256) - have_tokens
            # With zeros: what a mask hides is multiplied by 0, so that no NaN may be there.
            self.kv = pad(self.kv, (0, 0, 0, more_tokens, 0, 0, 0, more_rows))

    def free_kv(self) -> None:
        self.kv = self.kv[:, :, :0, :, :0].clone()

    def slot(self, row: int, tokens: int | None = None) -> torch.Tensor:
        """A view of the KV of one row's first tokens (None: all), [layers, 2, 1, K, T, D]."""
        return self.kv[:, :, row:row + 1, :, :tokens]

    def forward(self, work: list[tuple[Request, int]]) -> torch.Tensor:
        """work: (request, end) computes ids[cached:end], single tokens first; logits [R, V] at each end."""
        return self.packed(work) if self.packs else torch.cat([self.alone(*one) for one in work])

    def packed(self, work: list[tuple[Request, int]]) -> torch.Tensor:
        self.grow(max(r.row for r, _ in work) + 1, max(end for _, end in work))
        tokens = [(r.ids[t], r.row, t) for r, end in work for t in range(r.cached, end)]
        ids_N, rows_N, positions_N = torch.tensor(tokens, device=self.device).T.contiguous()
        counts, parts, stop = [end - r.cached for r, end in work], [], 0
        singles = counts.count(1)
        for group in filter(None, [work[:singles], *([one] for one in work[singles:])]):
            start, stop = stop, stop + sum(end - r.cached for r, end in group)
            parts.append(Part([r.row for r, _ in group], slice(start, stop), positions_N, max(end for _, end in group)))
        lasts_R = torch.tensor(counts, device=self.device).cumsum(0) - 1
        return self.model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False,
                          logits_to_keep=lasts_R, packed=(self.kv, parts, rows_N, positions_N)).logits[0]

    def alone(self, request: Request, end: int) -> torch.Tensor:
        """One request over its own cache; logits [1, V]."""
        request.kv = request.kv or DynamicCache(config=self.model.config)
        ids = torch.tensor([request.ids[request.cached:end]], device=self.device)
        return self.model(input_ids=ids, past_key_values=request.kv, logits_to_keep=1).logits[:, -1]

    def sleep(self, level: str) -> None:
        """KV memory goes; at level 2 that of the weights too (at level 1 they stay where they are)."""
        self.free_kv()
        if level == "2":
            self.loaded = False
            for p in self.model.parameters():
                p.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # else glibc keeps what was freed

    def wake(self) -> None:
        """Memory for the weights is back; after level 2 it holds anything until `load`."""
        for p in self.model.parameters():
            p.untyped_storage().resize_(p.nbytes)

    def load(self, path: str) -> None:
        """Replaces the weights in place by those of the *.safetensors in `path`; checks all before it writes any."""
        given = {name.replace("model.language_model.", "model.", 1): t  # as a vision-language model names its text part
                 for f in sorted(Path(path).glob("*.safetensors")) for name, t in load_file(f).items()}
        shapes = {name: t.shape for name, t in self.model.state_dict().items()}
        wrong = [name for name, _ in self.model.named_parameters() if name not in given]  # tied weights: once
        wrong += [name for name, t in given.items() if shapes.get(name) != t.shape]
        if wrong:
            raise HTTPException(400, f"weights_path={path!r} does not fit: missing, unknown or of another shape: "
                                     f"{', '.join(wrong[:3])} ({len(wrong)} in all)")
        self.model.load_state_dict(given, strict=False)
        self.loaded = True


# ---- the model thread


class Engine:
    """Continuous batching over one Model. All but `submit` runs in the model thread, one call after the other."""

    def __init__(self, model: Model, max_running: int = 64, seed: int = 0, threads: int = 1) -> None:
        self.model, self.max_running, self.rng, self.loop = model, max_running, random.Random(seed), None
        self.version, self.paused, self.asleep, self.stepping = "default", False, set(), False
        self.waiting, self.running, self.touched = [], [], []  # running[i].row == i; touched: for the event loop
        # known: running and stored requests, sorted by `known_ids`; stored: finished ones with their KV, oldest first.
        self.known, self.stored = [], []
        self.thread = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))

    def submit(self, function: Callable, *arguments: Any, **named: Any) -> asyncio.Future:
        """Calls `function` in the model thread between two steps."""
        self.loop = asyncio.get_running_loop()
        return asyncio.wrap_future(self.thread.submit(self.run, function, *arguments, **named))

    def run(self, function: Callable, *arguments: Any, **named: Any) -> Any:
        """In the model thread: a call, behind which (and all that wait) a step follows while there is work."""
        try:
            return function(*arguments, **named)
        finally:
            if self.touched:
                self.loop.call_soon_threadsafe(lambda done=self.touched: [request.changed.set() for request in done])
                self.touched = []
            halted = self.paused or self.asleep or not self.model.loaded
            if (self.running or self.waiting) and not halted and not self.stepping:
                self.stepping = True
                self.thread.submit(self.run, self.step)

    def step(self) -> None:
        self.stepping = False
        try:
            self.compute()
        except Exception as error:  # boundary: a failed step fails its requests, not the engine
            sys.excepthook(*sys.exc_info())
            self.forget()
            self.finish_all("error", f"the engine's step failed: {error}")

    @torch.inference_mode()
    def compute(self) -> None:
        for request in [r for r in self.running if r.cancelled]:
            self.finish(request, "abort")
        self.admit()
        work, budget = [], PREFILL_TOKENS if self.model.packs else sys.maxsize
        for request in self.running:
            if (todo := len(request.ids) - request.cached) > 1:
                todo = min(todo, budget)
                budget -= todo
            if todo:
                work.append((request, request.cached + todo))
        if not work:
            return
        work.sort(key=lambda one: one[1] - one[0].cached > 1)
        logits_RV = self.model.forward(work)
        for request, end in work:
            request.cached = end
        ready = [i for i, (request, end) in enumerate(work) if end == len(request.ids)]
        rows = [work[i][0] for i in ready]
        sampled = sample(logits_RV[ready], rows, self.rng) if rows else ((), ())
        for request, token, logprob in zip(rows, *sampled, strict=True):
            request.append(token, logprob, self.version)
            if request.finish:
                self.finish(request, request.finish)
            elif request.stream:
                self.touched.append(request)

    def admit(self) -> None:
        """Waiting requests join while there is room, each with the longest prefix that was computed before. One whose
        prefix is just being computed for another (a group's common prompt) waits for that."""
        later: list[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.pop(0)
            source, shared = self.nearest(request)
            if request.cancelled:
                self.finish(request, "abort")
            elif source and source.row >= 0 and source.cached < shared:
                later.append(request)
            else:
                request.row, request.cached = len(self.running), min(shared, source.cached) if source else 0
                self.running.append(request)
                self.model.grow(len(self.running), len(request.ids))
                if request.cached:
                    kept = source.kv if source.row < 0 else self.model.slot(source.row)
                    self.model.slot(request.row, request.cached)[:] = kept[..., :request.cached, :]
                if self.model.packs:
                    insort(self.known, request, key=Request.known_ids)
        self.waiting[:0] = later

    def nearest(self, request: Request) -> tuple[Request | None, int]:
        """The known request with the longest common prefix, and its length, the last token apart, which is computed to
        sample from. In sorted order it stands next to where this one would."""
        at = bisect(self.known, request.ids, key=Request.known_ids)
        near = self.known[max(at - 1, 0):at + 1]
        shared = [len(os.path.commonprefix([request.ids[:-1], other.ids])) for other in near]
        return max(zip(near, shared, strict=True), key=lambda pair: pair[1], default=(None, 0))

    def finish(self, request: Request, reason: str) -> None:
        """Ends it, keeps its KV as a prefix, and gives its slot to the last row, so that rows stay 0..R-1."""
        request.finish = reason
        self.touched.append(request)
        if (row := request.row) < 0:
            return
        last = self.running.pop()
        if request in self.known:
            self.known.remove(request)
        request.row, request.kv = -1, None
        if request.error:
            self.model.slot(row)[:] = 0  # it may hold NaN
        elif self.model.packs:
            request.kv = self.model.slot(row, request.cached).clone()
            self.stored.append(request)
            insort(self.known, request, key=Request.known_ids)
        if last is not request:
            self.model.slot(row, last.cached)[:] = self.model.slot(last.row, last.cached)
            last.row, self.running[row] = row, last
        while sum(stored.kv.nbytes for stored in self.stored) > PREFIX_BYTES:
            self.known.remove(self.stored.pop(0))

    def finish_all(self, reason: str, error: str = "") -> None:
        for request in [*self.running[::-1], *self.waiting]:
            request.error = error
            self.finish(request, reason)
        self.waiting.clear()

    def forget(self) -> None:
        """No KV is valid any more: kept prefixes go, running requests are computed again."""
        self.known.clear()
        self.stored.clear()
        self.model.free_kv()
        for request in self.running:
            request.row, request.cached, request.kv = -1, 0, None
        self.waiting[:0], self.running = self.running, []

    def pause(self, mode: Literal["abort", "keep"] = "abort") -> None:
        """abort: what is in flight comes back with what it has; keep: it stands still. Later requests wait."""
        self.paused = True
        if mode == "abort":
            self.finish_all("abort")

    def resume(self) -> None:
        self.paused = False

    def sleep(self, level: Literal["1", "2"] = "1") -> None:
        self.pause("abort")
        self.forget()
        self.asleep = {"weights", "kv_cache"}
        self.model.sleep(level)

    def wake(self, tags: set[Literal["weights", "kv_cache"]] = frozenset(("weights", "kv_cache"))) -> dict:
        if "weights" in self.asleep & tags:
            self.model.wake()
        self.asleep -= tags
        self.paused = self.paused and bool(self.asleep)
        return {"status": "sleeping" if self.asleep else "awake"}

    def rpc(self, method: Literal["reload_weights", "reload_tied_weights"],
            kwargs: dict[Literal["weights_path"], str]) -> None:
        if "weights" in self.asleep:
            raise HTTPException(409, "the weights are asleep: POST /wake_up?tags=weights first")
        self.model.load(kwargs["weights_path"])
        self.forget()

    def set_version(self, new_version: str) -> None:
        self.version = new_version


# ---- HTTP


class Api:
    """The routes that know the tokenizer."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str, max_context: int) -> None:
        self.engine, self.tokenizer, self.name, self.max_context = engine, tokenizer, name, max_context
        config, model = engine.model.model.config.get_text_config(), engine.model.model
        if max_context > (limit := getattr(config, "max_position_embeddings", max_context)):
            raise ValueError(f"--max-context {max_context}: this model's limit is {limit}")
        if not tokenizer.chat_template:
            raise ValueError("its tokenizer has no chat template; add a chat_template.jinja to the directory")
        self.vocabulary, eos = config.vocab_size, (model.generation_config or GenerationConfig()).eos_token_id
        self.eos = frozenset([*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]) - {None}
        self.thinks = "<think>" in tokenizer.chat_template

    def room(self, prompt: int) -> int:
        """Tokens that a reply may have."""
        if prompt >= self.max_context:
            raise HTTPException(400, f"This model's maximum context length is {self.max_context} tokens. However, your "
                                     f"prompt contains {prompt} input tokens. Please reduce its length.")
        return self.max_context - prompt

    async def render(self, body: dict, http: HttpRequest) -> Response:
        messages = [for_template(message) for message in body["messages"]]
        effort = body.get("reasoning_effort")
        wishes = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
        extra = {"add_generation_prompt": True} | wishes | (body.get("chat_template_kwargs") or {})
        tools = body.get("tools") or None
        ids = self.tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **extra)
        params = {name: body[name] for name in Sampling.model_fields if body.get(name) is not None}
        params |= {"max_tokens": min(params.get("max_tokens", self.max_context), self.room(len(ids))), "logprobs": 0}
        return answer({"model": self.name, "token_ids": ids, "sampling_params": params})

    async def generate(self, body: dict, http: HttpRequest) -> Response:
        given = GenerateBody.model_validate(body)
        if not 0 <= min(given.token_ids) <= max(given.token_ids) < self.vocabulary:
            raise HTTPException(400, f"token_ids must be from 0 to {self.vocabulary - 1}")
        self.room(len(given.token_ids))
        stop = {*given.sampling_params.stop_token_ids, *(() if given.sampling_params.ignore_eos else self.eos)}
        request = Request(given.token_ids, given.sampling_params, stop, self.max_context, given.stream)
        gone = asyncio.ensure_future(http.receive())  # the body is read: what comes next is the disconnect
        gone.add_done_callback(lambda _: setattr(request, "cancelled", True))
        await self.engine.submit(self.engine.waiting.append, request)
        events = self.events(request, given.request_id)
        if given.stream:
            return StreamingResponse(as_sse(events), media_type="text/event-stream")
        reply = await anext(events)
        return answer(reply, reply.get("error", {}).get("code", 200))

    async def events(self, request: Request, name: str | None) -> AsyncIterator[dict]:
        """What is new since the last event. A request that does not stream has one event, its reply."""
        sent, finish = 0, None
        while not finish:
            await request.changed.wait()
            request.changed.clear()
            finish, upto = request.finish, len(request.logprobs)  # in this order: then upto holds all its tokens
            if request.error:
                yield error_body(request.error, 500)
                return
            ids = request.ids[request.prompt + sent:request.prompt + upto]
            content = [{"token_id": i, "logprob": p} for i, p in zip(ids, request.logprobs[sent:upto], strict=True)]
            reason = ids[-1] if finish == "stop" and ids[-1] not in self.eos else None  # as vLLM: none at an eos
            yield {"request_id": name, "model": self.name, "choices": [{
                "index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish,
                "stop_reason": reason, "weight_versions": request.versions or None if finish else None}]}
            sent = upto

    async def derender(self, body: dict, http: HttpRequest) -> Response:
        reply, chat, prompt, choices = body["generate_response"], body["chat_request"], body.get("prompt_token_ids"), []
        opened = self.thinks and self.tokenizer.decode((prompt or [])[-8:]).rstrip().endswith("<think>")
        tools = chat.get("tools") or [] if chat.get("tool_choice") != "none" else []
        for choice in reply["choices"]:
            if not (ids := choice["token_ids"]):
                raise HTTPException(400, f"choice {choice['index']} has empty or null token_ids")
            text = self.tokenizer.decode(ids[:-1] if ids[-1] in self.eos else ids, skip_special_tokens=False)
            choices.append({"index": choice["index"], "message": parse_reply(text, tools, self.thinks, opened),
                            "finish_reason": choice.get("finish_reason")})
        return answer({"object": "chat.completion", "model": self.name, "choices": choices})


def for_template(message: dict) -> dict:
    """OpenAI's message as templates expect it (and vLLM gives it): text, never null; tool arguments as objects."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if unknown := [part.get("type") for part in content if not isinstance(part.get("text"), str)]:
            raise HTTPException(400, f"content parts of type {unknown[0]!r} are not supported: text only")
        content = "\n".join(part["text"] for part in content)
    message = message | {"content": content}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    for call in message.get("tool_calls") or []:
        call["function"]["arguments"] = json_or_text(call["function"].get("arguments") or "{}")
    return message


async def as_sse(events: AsyncIterator[dict]) -> AsyncIterator[bytes]:
    async for event in events:
        yield b"data: " + orjson.dumps(event) + b"\n\n"
    yield b"data: [DONE]\n\n"


def error_body(message: str, status: int) -> dict:
    kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def answer(content: dict, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def create_app(api: Api, key: str = "") -> Callable:
    """The ASGI application. With a key, every route asks for it: whoever can set weights owns the run."""
    engine = api.engine
    card = {"id": api.name, "object": "model", "created": 0, "owned_by": "harnessed", "max_model_len": api.max_context,
            "root": api.tokenizer.name_or_path}
    talk = {"/v1/chat/completions/render": api.render, "/v1/chat/completions/derender": api.derender,
            "/inference/v1/generate": api.generate}
    control: dict[str, Callable] = {
        "/pause": engine.pause, "/resume": engine.resume, "/sleep": engine.sleep, "/wake_up": engine.wake,
        "/reset_prefix_cache": engine.forget, "/collective_rpc": engine.rpc,
        "/update_weight_version": engine.set_version}
    state: dict[str, Callable[[], dict]] = {
        "/health": lambda: {}, "/v1/models": lambda: {"object": "list", "data": [card]},
        "/is_paused": lambda: {"is_paused": engine.paused},
        "/is_sleeping": lambda: {"is_sleeping": bool(engine.asleep)},
        "/load": lambda: {"server_load": len(engine.running) + len(engine.waiting)}}

    async def endpoint(http: HttpRequest) -> Response:
        given, path, query = http.headers.get("authorization", ""), http.url.path, http.query_params
        try:
            if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                raise HTTPException(401, "the engine's key is missing or wrong")
            if path in state:
                return answer(state[path]())
            body = orjson.loads(await http.body() or b"{}")
            if (model := body.get("model") or api.name) != api.name:
                raise HTTPException(404, f"The model `{model}` does not exist: this engine serves `{api.name}`.")
            if path in talk:
                return await talk[path](body, http)
            tags = {"tags": query.getlist("tags")} if "tags" in query else {}
            return answer(await engine.submit(validate_call(control[path]), **{**query, **tags, **body}) or {})
        except HTTPException as error:
            message, status = error.detail, error.status_code
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}={e['input']!r:.100}: {e['msg']}" for e in error.errors()]
            message, status = "; ".join(wrong), 400
        except (ValueError, LookupError, TypeError, AttributeError, jinja2.TemplateError, SafetensorError) as error:
            message, status = f"malformed request: {error!r}", 400
        return answer(error_body(message, status), status)

    return Starlette(routes=[Route(path, endpoint, methods=["POST"]) for path in talk | control]
                     + [Route(path, endpoint, methods=["GET"]) for path in state])


# ---- the process


def die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(model: str, port: int, host: str = "127.0.0.1", key_file: str = "", served_model_name: str = "",
         chat_template: str = "", max_context: int = 4096, max_running: int = 64, threads: int = 0, seed: int = 0,
         device: Literal["cpu", "cuda"] = "cpu", die_with_parent: bool = False) -> None:
    """The embedded inference engine: vLLM's routes over a transformers model.

    Args:
        model: directory of a Hugging Face causal language model
        port: port to listen on; 0 takes a free one and prints it
        host: address to listen on
        key_file: file with the key that every route then asks for
        served_model_name: name that requests use; the directory's name if empty
        chat_template: Jinja file in place of the model's own template
        max_context: tokens of prompt and reply together
        max_running: requests in one batch; more wait
        device: cpu computes in float32, cuda in bfloat16
        threads: CPU threads of the arithmetic; 0: one for models under 20M parameters, which more slow down, else all
        seed: seed for the sampling of requests that bring none
        die_with_parent: exit when the process that started this one is gone
    """
    if die_with_parent:
        threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)  # a pool beside the model thread's would make OpenMP give up spinning: 2x slower
    name = served_model_name or Path(model).resolve().name
    try:
        key = Path(key_file).read_text().strip() if key_file else ""
        listener = socket.create_server((host, port))
        if not (Path(model) / "config.json").is_file():
            raise ValueError("not a model directory (it must hold config.json, weights and a tokenizer)")
        tokenizer, loaded = AutoTokenizer.from_pretrained(model, local_files_only=True), Model(model, device)
        tokenizer.chat_template = Path(chat_template).read_text() if chat_template else tokenizer.chat_template
        small = sum(p.numel() for p in loaded.model.parameters()) < 20e6
        engine = Engine(loaded, max_running, seed, threads or (1 if small else os.cpu_count() or 1))
        app = create_app(Api(engine, tokenizer, name, max_context), key)
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
        sys.exit(f"engine: --host {host} --port {port} --model {model}: {' '.join(str(error).split())}")
    print(f"engine: {name} on http://{host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=120,
                                  timeout_graceful_shutdown=1)).run(sockets=[listener])
    os._exit(0)  # the model thread may be inside a forward


if __name__ == "__main__":
    tyro.cli(main)
