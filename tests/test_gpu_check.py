"""bench/gpu_check.py as it runs where there is no GPU: its steps, its figures, and what it says when something is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.vllm_cpu import ROOT

SECTIONS = ["machine", "engine", "trainer", "cycle", "speed", "long_row", "hybrid"]


def checked(tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess, dict[tuple[str, str], list[str]]]:
    """What it printed, and its table: (section, what) -> value, unit, bar, verdict."""
    done = subprocess.run([sys.executable, "bench/gpu_check.py", "--tiny"], cwd=ROOT, capture_output=True, text=True, timeout=240,
                          env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""} | environment)
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines()[1:-1]]
    return done, {(row[0], " ".join([row[1], *([row[3]] if len(row) > 3 and row[3].endswith("/s") else [])])): row[2:] for row in rows}


def number(table: dict, section: str, what: str) -> float:
    return float(table[section, what][0].replace(",", ""))


def test_the_very_same_steps_on_a_cpu(tmp_path: Path) -> None:
    done, table = checked(tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("all is right\n"), done.stdout + done.stderr[-3000:]
    assert list(dict.fromkeys(section for section, _ in table)) == SECTIONS
    value = lambda section, what: number(table, section, what)  # noqa: E731
    for section in ("trainer", "hybrid"):
        assert 0 < value(section, "log-probs away from CPU float32, mean") <= value(section, "log-probs away from CPU float32, most") < 1e-3
        assert 0.9999 < value(section, "gradient: cosine with CPU float32") < 1.00001
        assert 0.999 < value(section, "gradient: the worst parameter's cosine") < 1.00001
        assert value(section, "gradient: norm over that of CPU float32") == pytest.approx(1, abs=1e-3)
    parameters = value("machine", "parameters")
    assert 700_000 < parameters < 800_000
    assert value("cycle", "push") == pytest.approx(2 * parameters / 1e9, rel=0.01) and value("cycle", "push GB/s") > 0
    # Weights of bfloat16 were pushed: near the trainer's, and not the same.
    assert 1e-4 < value("cycle", "probe: engine's log-probs away from the trainer's") < 0.02
    assert 1e-4 < value("cycle", "sampler: log-probs away from it, most") < 0.1
    assert value("cycle", "sampler: mean of exp(trainer - sampler)") == pytest.approx(1, abs=0.01)
    assert value("cycle", "weights that the update changed") == 1 and value("cycle", "offload: what is left in the storages") == 0
    assert value("cycle", "restore GB/s") > 0 and value("cycle", "offload, beside the probe GB/s") > 0
    for section, tokens in (("speed", 16 * 64), ("long_row", 2048)):
        assert value(section, "tokens of the update") == tokens > value(section, "trained tokens of the update") > tokens / 4
        assert value(section, "update tokens/s") > 0 and value(section, "update TFLOP/s") > 0 and value(section, "gradient norm") > 0
    assert value("hybrid", "checkpoint: weights apart after one more update") < 1e-6
    unknown = {what for (_, what), row in table.items() if row[0] == "n/a"}
    assert unknown == {"bfloat16 matrix product TFLOP/s", "memory that the sleeping engine gave back", "restore: weights are there", "MFU",
                       "offload: left on the GPU after the push", "peak memory: first update", "peak memory: update", "peak memory: push",
                       "peak memory: a row of 2048 tokens"}
    assert sum(value(section, "seconds in all") for section in SECTIONS) < 120


def test_an_engine_that_does_not_start_costs_only_what_needs_it(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no uvicorn here')\n")
    done, table = checked(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout.endswith("1 wrong\n"), done.stdout + done.stderr[-3000:]
    failed = [what for _, what in table if "FAILED" in what]
    assert len(failed) == 1 and "no uvicorn here" in failed[0] and "Traceback" not in done.stdout + done.stderr
    assert list(dict.fromkeys(section for section, _ in table)) == SECTIONS
    assert number(table, "cycle", "restore GB/s") > 0 and ("cycle", "push") not in table
    assert number(table, "long_row", "update tokens/s") > 0


def test_sections_that_need_a_failed_one_say_so(tmp_path: Path) -> None:
    """The policy cannot be made: the engine is checked all the same, and what needs a policy names the reason."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text("import torch, trainer\ndef full(*_): raise OSError('no space left')\ntrainer.Policy.__init__ = full\n")
    done, table = checked(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    failed = {section: what for section, what in table if "FAILED" in what}
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "no space left" in failed["trainer"] and "no space left" in failed["hybrid"]
    assert all("needs the trainer" in failed[section] for section in ("cycle", "speed", "long_row")) and "engine" not in failed


def test_a_wrong_value_is_told() -> None:
    from bench import gpu_check

    table = gpu_check.Table()
    table.run("one", lambda: [table.add("right", 1.0, most=2), table.add("much", 3.0, most=2), table.add("nothing", float("nan"), least=0),
                              table.add("unknown", None, least=5)])
    assert [row[5] for row in table.rows] == ["ok", "WRONG", "WRONG", "", ""] and table.wrong == 2
    table.run("two", lambda: torch.ones(2) @ torch.ones(3))
    assert table.wrong == 3 and table.rows[-2][1].startswith("FAILED: RuntimeError: ")
