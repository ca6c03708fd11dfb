"""The gateway as a process, on its real log, before a scripted engine; then before the embedded engine.

The engine below is not the thing under test: it renders and samples ids by a rule, so that every id can be checked.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from hypothesis import given, settings, strategies
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import gateway
import trajectory
from config import make_key, read_secret

ROOT = Path(__file__).resolve().parent.parent
EOS = 2


class ScriptedEngine:
    """Renders one id per character, samples prompt_length, prompt_length + 1, ... up to `length`, then EOS."""

    def __init__(self, port: int = 0) -> None:
        self.length, self.delay, self.version, self.seen, self.faults = 3, 0.0, "0", [], []
        self.aborted, self.context, self.disconnects, self.tools = threading.Event(), 4096, 0, None
        routes = [Route("/v1/models", self.models), Route("/v1/chat/completions/render", self.render, methods=["POST"]),
                  Route("/inference/v1/generate", self.generate, methods=["POST"]),
                  Route("/v1/chat/completions/derender", self.derender, methods=["POST"])]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="critical"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self.aborted.set()
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": self.context}]})

    async def render(self, request: Request) -> JSONResponse:
        text = "".join(f"{m['role'][0]}:{m.get('content') or ''}{json.dumps(m['tool_calls']) if m.get('tool_calls') else ''};"
                       for m in (await request.json())["messages"])
        return JSONResponse({"token_ids": [1000 + ord(c) for c in text], "sampling_params": {"stop_token_ids": [EOS]}})

    async def generate(self, request: Request) -> Any:
        body = await request.json()
        self.seen.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if fault in (500, 400):
            return JSONResponse({"error": {"message": f"scripted {fault}"}}, fault)
        start, many = len(body["token_ids"]), min(self.length, body["sampling_params"]["max_tokens"])

        async def sample() -> Any:
            for i in range(many):
                for _ in range(int(self.delay / 0.01)):
                    await asyncio.sleep(0.01)
                    if self.aborted.is_set():
                        yield [], "abort"
                        return
                    if await request.is_disconnected():
                        self.disconnects += 1
                        return
                yield [EOS if i == self.length - 1 else start + i], (
                    "stop" if i == self.length - 1 else "length" if i == many - 1 else None)

        def choice(ids: list[int], finish: str | None, spans: bool = True) -> dict:
            return {"choices": [{"index": 0, "token_ids": ids, "finish_reason": finish, "logprobs": {
                "content": [{"token_id": i, "logprob": -i / 1000} for i in ids]},
                "weight_versions": [{"version": self.version, "start": 0, "end": 10**6}] if spans else None}]}
        if body["stream"]:
            async def events() -> Any:
                at = 0
                async for ids, finish in sample():
                    if fault == "cut" and at == 2:
                        raise ConnectionError("scripted")
                    at += 1
                    yield f"data: {json.dumps(choice(ids, finish, finish is not None))}\n\n"
                yield "data: [DONE]\n\n"
            return StreamingResponse(events(), media_type="text/event-stream")
        every = [part async for part in sample()]
        return JSONResponse(choice([i for ids, _ in every for i in ids], every[-1][1] if every else "abort"))

    async def derender(self, request: Request) -> JSONResponse:
        body = await request.json()
        ids = body["generate_response"]["choices"][0]["token_ids"]
        message = {"role": "assistant", "content": " ".join(map(str, ids)), "tool_calls": []}
        if self.tools and body["chat_request"].get("tools"):
            message = {"role": "assistant", "content": None, "tool_calls": self.tools}
        return JSONResponse({"choices": [{"index": 0, "message": message}]})
