"""Several ranks (FSDP2 over gloo) against one process: updates, checkpoints, exports. The other ranks are real processes."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3_5Config, Qwen3_5ForCausalLM,
                          Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig)

import trainer
from bench.vllm_cpu import make_tiny_model
from config import Config
from trainer import Offload, Policy, Ranks, checkpoints, newest_checkpoint, split_rows, start_ranks
from trajectory import Sample
from vllm_control import Children, Engines

SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
          "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True}
MODELS = ("qwen3-tied", "qwen3-untied", "llama", "qwen3.5")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models of each kind, one directory each."""
    root = tmp_path_factory.mktemp("models")
    make_tiny_model(root / "qwen3-tied", **SHAPE)
    make_tiny_model(root / "qwen3-untied", tied=False, **SHAPE)
    torch.manual_seed(1)
    for name, model in [("llama", LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))),
                        ("qwen3.5", Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **HYBRID)))]:
        shutil.copytree(root / "qwen3-tied", root / name)
        (root / name / "model.safetensors").unlink()
        for key, p in model.named_parameters():  # heads that remember: the gradients of others are rounding errors, which
            if key.endswith(("A_log", "dt_bias")):  # AdamW would make as large as the rest
                p.data.uniform_(-2, 0)
        model.bfloat16().save_pretrained(root / name)  # as released weights are
    return root


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Children(tmp_path_factory.mktemp("ranks")) as children:
        ranks = start_ranks(Config(name="x", ranks=request.param), children)
        yield ranks
        ranks.close()
        for child in children.children.values():
            assert child.process.wait(30) == 0, child.last_words()


def rollouts(seed: int, count: int = 7) -> tuple[list[Sample], list[float]]:
    """Ragged rows, one to three a rollout, with several trained stretches; an advantage for each. Every other rollout is
    of the version `seed`."""
    draw, rows, advantages = random.Random(seed), [], []
    for number in range(count):
        advantage = draw.uniform(-1, 1)
        for _ in range(draw.randint(1, 3)):
            mask = [False] * draw.randint(1, 20)
            for _ in range(draw.randint(1, 3)):
                mask += [True] * draw.randint(1, 12) + [False] * draw.randint(0, 9)
            ids = [draw.randrange(3, 320) for _ in mask]
            rows.append(Sample(ids, mask, [draw.uniform(-6, -5) if m else 0.0 for m in mask],
                               [seed + number % 2 if m else -1 for m in mask], rollout=f"r{number}"))
            advantages.append(advantage)
    return rows, advantages


def settings(model: Path, **more: object) -> Config:
    return Config(**{"name": "x", "model": str(model), "lr": 2e-4, "temperature": 0.8, "threads": 1, "device": "cpu",
                     "micro_batch_tokens": 128} | more)


def trained(policy: Policy, steps: range = range(3)) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    metrics = [policy.train([rollouts(step)], step)[0] for step in steps]
    return metrics, {name: tensor.clone() for name, tensor in policy.weights().items()}


def assert_equal(one: tuple, other: tuple) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        for name in ("loss", "grad_norm", "entropy_mean", "ratio_mean", "tokens", "lr"):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-7), name
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        apart = (other[1][name] - value).norm() / value.norm()
        assert apart < 1e-5, (name, apart)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_one_process(models: Path, ranks: Ranks, name: str) -> None:
    alone = trained(Policy(settings(models / name), str(models / name), Ranks()))
    together = Policy(settings(models / name, activation_checkpointing="on"), str(models / name), ranks)
    assert_equal(alone, trained(together))
    assert ("lm_head.weight" in together.weights()) == (name in ("qwen3-untied", "llama"))  # tied stays tied


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_and_packing_change_nothing(models: Path, name: str) -> None:
    results = []
    for tokens, packs in [(100_000, True), (60, True), (128, False), (1, False)]:
        policy = Policy(settings(models / name, micro_batch_tokens=tokens), str(models / name), Ranks())
        assert policy.packs == (name != "qwen3.5")
        policy.packs = policy.packs and packs
        results.append(trained(policy))
    for result in results[1:]:
        assert_equal(results[0], result)


def test_the_export_has_the_trained_weights(models: Path, tmp_path: Path, ranks: Ranks) -> None:
    for name in MODELS:
        policy = Policy(settings(models / name), str(models / name), ranks)
        _, weights = trained(policy, range(1))
        policy.probe()  # a forward alone
        policy.save(tmp_path / name / "step-000001", 2, {})
        policy.train([rollouts(1)], 1)  # what is being written is of before
        policy.finish_saving()
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-000001")
        for key, value in exported.named_parameters():
            torch.testing.assert_close(value.detach(), weights[key], atol=0, rtol=0)
        if name in ("qwen3-tied", "qwen3.5"):
            assert exported.get_output_embeddings().weight is exported.get_input_embeddings().weight


def test_a_checkpoint_of_any_number_of_ranks_goes_on_with_any_other(models: Path, tmp_path: Path, ranks: Ranks) -> None:
    for name in MODELS:
        one = Policy(settings(models / name), str(models / name), Ranks())
        wanted = trained(one, range(3))
        first = Policy(settings(models / name), str(models / name), ranks)
        trained(first, range(2))
        first.save(tmp_path / name / "step-000002", 2, {"scheduler": {"version": 2}})
        first.finish_saving()
        for these in (Ranks(), ranks):
            resumed = Policy(settings(models / name), str(tmp_path / name / "step-000002"), these)
            assert resumed.load(tmp_path / name / "step-000002")["scheduler"] == {"version": 2}
            metrics, weights = trained(resumed, range(2, 3))
            assert_equal((wanted[0][2:], wanted[1]), (metrics, weights))
        alone = Policy(settings(models / name), str(models / name), Ranks())
        trained(alone, range(2))
        alone.save(tmp_path / name / "alone" / "step-000002", 2, {})
        alone.finish_saving()
        resumed = Policy(settings(models / name), str(tmp_path / name / "alone" / "step-000002"), ranks)
        resumed.load(tmp_path / name / "alone" / "step-000002")
        metrics, weights = trained(resumed, range(2, 3))
        assert_equal((wanted[0][2:], wanted[1]), (metrics, weights))


def test_killed_in_the_middle_of_a_save_the_older_checkpoint_loads(models: Path, tmp_path: Path) -> None:
    directory, model = tmp_path / "runs" / "x" / "checkpoints", str(models / "qwen3-tied")
    config = settings(models / "qwen3-tied", runs_dir=str(tmp_path / "runs"), resume=True)
    policy = Policy(config, model, Ranks())
    for step in (1, 2, 3):
        policy.train([rollouts(step)], step - 1)
        policy.save(directory / f"step-{step:06d}", 2, {"scheduler": {"version": step}})
    policy.finish_saving()
    assert [path.name for path in checkpoints(directory)] == ["step-000002", "step-000003"]
    states = torch.get_rng_state(), random.getstate()
    pid = os.fork()
    if pid == 0:  # dies with everything written but the last file
        trainer.torch.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        policy.writer = ThreadPoolExecutor(1)
        policy.save(directory / "step-000004", 2, {})
        policy.finish_saving()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and (directory / "step-000004.writing").exists()
    (config.run_dir / "metrics.jsonl").touch()
    found = newest_checkpoint(config)
    assert found == directory / "step-000003"
    torch.manual_seed(7), random.seed(7)
    assert Policy(config, str(found), Ranks()).load(found)["scheduler"] == {"version": 3}
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    policy.save(directory / "step-000004", 2, {"scheduler": {"version": 4}})  # over what the killed one left
    policy.finish_saving()
    assert sorted(path.name for path in directory.iterdir()) == ["step-000003", "step-000004"]


def test_the_text_of_a_vision_language_checkpoint_is_trained_and_pushed(models: Path, tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=SHAPE | HYBRID, vision_config=vision, tie_word_embeddings=True))
    shutil.copytree(models / "qwen3.5", tmp_path / "whole")
    whole.save_pretrained(tmp_path / "whole")
    config = settings(tmp_path / "whole", runs_dir=str(tmp_path), engine="embedded", max_running=4)
    policy = Policy(config, config.model, Ranks())
    texts = {name for name in load_file(tmp_path / "whole" / "model.safetensors") if ".visual." not in name}
    assert {name.replace("model.", policy.base, 1) for name in policy.shards} == texts  # as vLLM expects them
    policy.train([rollouts(0)], 0)
    with Children(tmp_path / "output") as children:
        policy.engines = Engines(config, "cpu", children)
        policy.engines.start()
        policy.engines.wait_ready()
        engines = policy.engines
        for step in ("step-000001", "step-000002"):
            engines.pause()
            engines.sleep()
            assert policy.push(1)[0] and engines.resume(1, policy.probe())["probe_gap"] < 1e-4
            policy.save(tmp_path / step, 1, {})
            policy.finish_saving()
            policy = Policy(config, str(tmp_path / step), Ranks())  # a resumed run reads a text model
            policy.engines = engines


def test_a_sliding_window_is_kept_in_packed_rows(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, **SHAPE, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    policy, (rows, _) = Policy(settings(tmp_path), str(tmp_path), Ranks()), rollouts(0)
    assert policy.packs and "sliding_attention" in policy.model.config.layer_types
    got = policy.logprobs(rows)[0].split([row.trained_tokens for row in rows])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for row, logprobs in zip(rows, got, strict=True):
        want = torch.log_softmax(plain(torch.tensor([row.ids])).logits[0, :-1] / 0.8, -1)
        want = want.gather(-1, torch.tensor(row.ids[1:])[:, None])[:, 0][torch.tensor(row.mask[1:])]
        torch.testing.assert_close(logprobs, want, atol=1e-5, rtol=0)


class Late:
    """A device whose side streams copy only once somebody waits for them: what may happen on a GPU at the worst."""

    def __init__(self) -> None:
        self.main, self.side = self.Stream(), self.Stream()

    class Stream(TorchFunctionMode):
        def __init__(self) -> None:
            self.copies = []

        def __torch_function__(self, function: Callable, types: object, arguments: tuple = (), named: dict | None = None) -> object:
            if function is not torch.Tensor.copy_:
                return function(*arguments, **(named or {}))
            self.copies.append(lambda: function(*arguments, **(named or {})))

        def wait_stream(self, other: "Late.Stream") -> None:
            while other.copies:
                other.copies.pop(0)()

    def stream(self, stream: "Late.Stream") -> "Late.Stream":
        return stream

    def current_stream(self) -> "Late.Stream":
        return self.main

    def synchronize(self) -> None:
        self.main.wait_stream(self.side)


def test_offloading_changes_nothing(models: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Turns of trainer and engine as on a GPU: storages are emptied under FSDP and the optimizer, and filled again."""
    name = "qwen3-untied"
    config = settings(models / name, kl_coef=0.1)
    alone, together = Policy(config, str(models / name), Ranks()), Policy(config, str(models / name), ranks)
    ranks.broadcast(("__setattr__", ("moves", True)))
    together.moves, together.moved.on = True, Late()
    together.moved.aside = together.moved.on.side
    storages = [tensor.untyped_storage() for tensor, _ in together.moved.sizes]
    assert len(storages) == 4 * len(together.shards)  # weights, two moments, the reference's weights
    for step in range(4):
        metrics = []
        for policy in (alone, together):
            policy.to_device()
            metrics.append(policy.train([rollouts(step), rollouts(step + 10)], step)[0])
        torch.testing.assert_close(together.probe(), alone.probe(), atol=1e-4, rtol=0)
        together.to_host()
        assert not any(storage.nbytes() for storage in storages)
        assert not together.push(step)[0]  # there are no engines: only the gathering
        wanted, got, pushed = alone.weights(), together.weights(), together.pushed  # the weights are read from host memory
        assert_equal((metrics[:1], wanted), (metrics[1:], got))
        assert all(torch.equal(pushed[key].to_local(), p.chunk(ranks.size)[0].bfloat16()) for key, p in got.items())
        together.free()
    together.save(tmp_path / "step-000004", 2, {})
    together.finish_saving()
    saved = together._state()
    together.to_device()
    for key, value in together._state().items():
        assert torch.equal(value.to_local(), saved[key].to_local())
    again = Policy(config, str(tmp_path / "step-000004"), Ranks())
    again.load(tmp_path / "step-000004")
    assert_equal(trained(again, range(4, 5)), trained(together, range(4, 5)))


def test_copies_that_come_late_are_waited_for() -> None:
    weights, moments = ([torch.full((4, 2), float(i)) for i in range(2)] for _ in range(2))
    moved = Offload(weights, moments)
    moved.on, views = Late(), [tensor[1:3] for tensor in weights + moments]
    moved.aside = moved.on.side
    for turn in range(3):
        moved.leave()
        assert moved.on.side.copies  # beside the probe, which reads the weights
        if turn == 1:  # no hand-over came of it, but another update
            moved.finish()
            for tensor in weights + moments:
                tensor += 100
        moved.offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in weights + moments)
        wanted = [float(i + 100 * (turn > 0)) for i in range(2)]
        assert [moved.content(tensor).unique().item() for tensor in weights + moments] == wanted * 2
        moved.restore()
        assert [tensor.unique().item() for tensor in weights] == wanted  # a forward may start
        assert len(moved.on.side.copies) == len(moments)  # while these are under way
        moved.finish()
        assert [view.unique().item() for view in views] == wanted * 2 and not moved.on.side.copies


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rows_are_split_evenly(size: int, packed: bool) -> None:
    draw = random.Random(size)
    for _ in range(100):
        lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 30))]
        batches = split_rows(lengths, size, 64, packed)
        assert len(batches) % size == 0 and sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            cost = sum(lengths[i] for i in batch) if packed else len(batch) * max([lengths[i] for i in batch], default=0)
            assert cost <= 64
