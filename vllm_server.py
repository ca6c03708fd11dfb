"""vLLM's own server with what a run needs of it: a key on every route, right tied weights, an end with its parent.

    python vllm_server.py --key-file F [--die-with-parent] --model M --port P [any other flag of `vllm serve`]

It runs in the interpreter that has vLLM and imports nothing else of ours; `vllm_control.py` starts it. vLLM's own
--api-key covers only some routes, and not those that replace weights, which unpickle what they are sent.
"""

import argparse
import hmac
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse

KEY_FILE = "HARNESSED_ENGINE_KEY_FILE"  # names the file: the key itself is in no environment and no command line
FLAGS = ["--middleware", "vllm_server.AskKey", "--worker-extension-cls", "vllm_server.TiedReload", "--enable-scale-out",
         "--logprobs-mode", "processed_logprobs"]  # log-probs at the sampling temperature


class AskKey:
    """ASGI middleware, outermost: 401 for whatever does not carry the run's engine key."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app, self.token = app, read_key(os.environ[KEY_FILE])

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.token):
            await self.app(scope, receive, send)
        else:
            error = {"message": "the engine's key is missing or wrong", "code": 401}
            await JSONResponse({"error": error}, 401)(scope, receive, send)


def read_key(path: str) -> bytes:
    if not (key := Path(path).read_text().strip()):
        raise ValueError(f"the key file {path} is empty")
    return b"Bearer " + key.encode()


class TiedReload:
    """Worker extension. The CPU backend computes with packed copies of weights; after reload_weights that of an output
    layer which is the embedding is still the old one."""

    def reload_tied_weights(self, weights_path: str) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        for module in self.get_model().modules():  # type: ignore[attr-defined]
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)


def keep_tools_as_sent() -> None:
    """vLLM would show a tool that came without description with `"description": null`. Here it stays as it came."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    dump = ChatCompletionToolsParam.model_dump
    ChatCompletionToolsParam.model_dump = lambda self, **given: dump(self, **{"exclude_unset": True} | given)


def end_with(parent: int) -> None:
    """Kills the whole process group, engine core and workers too, once `parent` is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--key-file", required=True)
    parser.add_argument("--die-with-parent", action="store_true")
    ours, theirs = parser.parse_known_args(arguments)
    read_key(ours.key_file)  # before vLLM takes half a minute
    if ours.die_with_parent:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    here = str(Path(__file__).resolve().parent)
    os.environ.update({KEY_FILE: os.path.abspath(ours.key_file), "VLLM_SERVER_DEV_MODE": "1",  # opens the RL routes
                       "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))})
    keep_tools_as_sent()
    sys.argv = ["vllm", *FLAGS, *theirs]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
