"""Advantages, token weights, policy loss: worked examples, field cases, a plain float reference, and invariance."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage import ADVANTAGES, IMPORTANCES, RATIOS, WEIGHTS, group_advantages, policy_loss, summarize, token_weights

torch.set_num_threads(1)
finite = st.floats(-100, 100, allow_subnormal=False)


# Advantages


def slow_advantages(rewards: list[float], groups: list[Any], method: str) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups):
        members = [r for r, g in zip(rewards, groups) if g == group]
        mean = math.fsum(members) / len(members)
        if len(set(members)) == 1:
            result.append(0.0)
        elif method == "grpo":
            result.append((reward - mean) / math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members)))
        elif method == "rloo":
            result.append(reward - (math.fsum(members) - reward) / (len(members) - 1))
        else:
            result.append((reward - mean) / (mean if method == "maxrl" else 1))
    return result


def test_each_method_on_one_group() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 1.0], ["a"] * 5
    expect = {
        "grpo": [0.4 / 0.24**0.5, -0.6 / 0.24**0.5],
        "dr_grpo": [0.4, -0.6],
        "rloo": [0.5, -0.75],
        "maxrl": [0.4 / 0.6, -1.0],
    }
    for method, (good, bad) in expect.items():
        assert group_advantages(rewards, groups, method).tolist() == pytest.approx(
            [good, bad, bad, good, good], rel=1e-6
        )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 3)), min_size=1, max_size=20), st.sampled_from(ADVANTAGES)
)
def test_advantages_equal_the_slow_reference(pairs: list[tuple[float, int]], method: str) -> None:
    rewards, groups = [round(r, 3) for r, _ in pairs], [g for _, g in pairs]
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), method)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(slow_advantages(rewards, groups, method), rel=1e-5, abs=1e-6)
    named = group_advantages(rewards, [f"task {g}" for g in groups], method)
    assert torch.equal(named, got)  # ids may be anything


def test_groups_do_not_mix_and_order_does_not_matter() -> None:  # 17: both data sets have a task 0
    rewards, groups = [1.0, 5.0, 0.0, 5.0], [("math", 0), ("code", 0), ("math", 0), ("code", 0)]
    assert group_advantages(rewards, groups).tolist() == [1, 0, -1, 0]
    assert group_advantages([1.0, 5.0, 0.0, 5.0], ["0"] * 4).tolist() != [1, 0, -1, 0]


@pytest.mark.parametrize("method", ADVANTAGES)
def test_equal_rewards_are_exactly_zero(method: str) -> None:  # 18, 19
    for value in (0.7, 0.1, -3.3, 1e30, 0.0):
        for count in (1, 2, 7):
            rewards = torch.full((count,), value, dtype=torch.float32)
            assert group_advantages(rewards, [0] * count, method).tolist() == [0.0] * count


@pytest.mark.parametrize("method", ADVANTAGES)
def test_a_group_of_one_is_zero_beside_others(method: str) -> None:  # 19
    assert group_advantages([5.0, 1.0, 0.0], ["alone", "b", "b"], method)[0] == 0


@pytest.mark.parametrize("method", ADVANTAGES)
def test_close_rewards_still_differ(method: str) -> None:  # 22
    assert (group_advantages([1.000, 1.001], [0, 0], method) != 0).all()


def test_grpo_is_the_same_at_any_scale() -> None:
    for scale in (1e-300, 1e-30, 1.0, 1e30, 1e150):
        assert group_advantages([scale, 0.0], [0, 0]).tolist() == pytest.approx([1.0, -1.0])


def test_a_mixed_group_with_one_success_pushes_the_others_down() -> None:  # 16
    assert group_advantages([0.0, 1.0, 1.0], [0, 0, 0])[0] < 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, bad], [0, 0])


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="grpo, dr_grpo, rloo, maxrl"):
        group_advantages([0.0], [0], "ppo")
    with pytest.raises(ValueError, match=r"\[R\]"):
        group_advantages([0.0, 1.0], [0])
    with pytest.raises(ValueError, match="maxrl divides by the mean reward, which is -0.5 in group 'g'"):
        group_advantages([-1.0, 0.0], ["g", "g"], "maxrl")
    with pytest.raises(ValueError, match="overflow"):
        group_advantages([1e200, 0.0], [0, 0], "dr_grpo")
    assert group_advantages([], []).tolist() == []


# Weights


def test_the_worked_example() -> None:
    """A (reward 1) in rows of 3, 2, 1; B (reward 0) in one of 6: each token weighs 1/12; the same if A were one row."""
    assert token_weights([3, 2, 1, 6], ["A", "A", "A", "B"]).tolist() == pytest.approx([1 / 12] * 4)
    assert token_weights([6, 6], ["A", "B"]).tolist() == pytest.approx([1 / 12] * 2)
    assert group_advantages([1.0, 0.0], [0, 0], "dr_grpo").tolist() == [0.5, -0.5]


def test_each_normalization() -> None:
    tokens, rollouts = [4, 0, 2, 0], ["a", "a", "b", "c"]  # c has nothing to train: R is 2
    expect = {
        "rollout_mean": [1 / 8, 0, 1 / 4, 0],
        "token_mean": [1 / 6, 0, 1 / 6, 0],
        "constant": [1 / 2, 0, 1 / 2, 0],
    }
    for method, weights in expect.items():
        got = token_weights(tokens, rollouts, method)
        assert got.dtype == torch.float32 and got.tolist() == pytest.approx(weights)
    assert token_weights(tokens, rollouts, "constant", horizon=100).tolist() == pytest.approx([1 / 200, 0, 1 / 200, 0])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=15))
def test_weights_add_up(rows: list[tuple[int, int]]) -> None:
    tokens, rollouts = [t for t, _ in rows], [r for _, r in rows]
    active = {r for t, r in rows if t}
    for method in ("rollout_mean", "token_mean"):
        weights = token_weights(torch.tensor(tokens, dtype=torch.long), rollouts, method)
        assert (weights.double() * torch.tensor(tokens)).sum() == pytest.approx(1.0 if active else 0.0, rel=1e-6)
    weights = token_weights(tokens, torch.tensor(rollouts, dtype=torch.long))
    for rollout in active:
        share = sum(w * t for w, t, r in zip(weights.tolist(), tokens, rollouts) if r == rollout)
        assert share == pytest.approx(1 / len(active), rel=1e-6)


def test_nothing_to_train_weighs_nothing() -> None:
    for method in WEIGHTS:
        assert token_weights([0, 0], ["a", "b"], method).tolist() == [0, 0]
        assert token_weights([], [], method).tolist() == []


def test_wrong_rows_are_refused() -> None:
    for tokens, rollouts, settings_ in (
        ([1], [], {}),
        ([-1], ["a"], {}),
        ([1], ["a"], {"horizon": 0.0}),
        ([1], ["a"], {"method": "mean"}),
    ):
        with pytest.raises(ValueError):
            token_weights(tokens, rollouts, **settings_)


# Policy loss


def slow_loss(
    batch: dict[str, list[float]],
    rows: list[int],
    *,
    ratio: str,
    importance: str,
    cap: float = 2.0,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = 3.0,
    kl_coef: float = 0.0,
) -> float:
    """The formulas in plain floats, one token at a time."""

    def mean_of_row(values: list[float], row: int) -> float:
        members = [value for value, r in zip(values, rows) if r == row]
        return sum(members) / len(members)

    total = 0.0
    differences = [new - old for new, old in zip(batch["logprobs"], batch["old"])]
    gaps = [old - sampled for old, sampled in zip(batch["old"], batch["sampled"])]
    for i, row in enumerate(rows):
        r = math.exp(mean_of_row(differences, row) if ratio == "gspo" else differences[i])
        advantage = batch["advantages"][i]
        objective = min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = max(objective, dual * advantage)
        correction = math.exp(mean_of_row(gaps, row) if importance == "sequence" else gaps[i])
        if importance in ("token", "sequence"):
            correction = min(correction, cap)
        elif importance == "none":
            correction = 1.0
        elif not 1 / cap <= correction <= cap:
            correction = 0.0
        loss = -correction * objective
        if kl_coef:
            x = batch["reference"][i] - batch["logprobs"][i]
            loss += kl_coef * (math.exp(x) - 1 - x)
        total += batch["weights"][i] * loss
    return total


def random_batch(size: int, seed: int = 0, spread: float = 0.6) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(size, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(3, size, generator=generator, dtype=torch.float64) * spread
    batch = {
        "logprobs": old + noise[0],
        "old": old,
        "sampled": old + noise[1],
        "reference": old + noise[2],
        "advantages": torch.randn(size, generator=generator, dtype=torch.float64),
        "weights": torch.rand(size, generator=generator, dtype=torch.float64) / max(size, 1),
    }
    return batch, torch.randint(0, 4, (size,), generator=generator).sort().values * 7 + 3  # any integers


def loss_of(
    batch: dict[str, torch.Tensor], rows: torch.Tensor | None, **more: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return policy_loss(
        batch["logprobs"], batch["old"], batch["sampled"], batch["advantages"], batch["weights"], rows=rows, **more
    )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_loss_equals_the_slow_reference(ratio: str, importance: str, kl_coef: float) -> None:
    for seed in range(8):
        batch, rows = random_batch(30, seed)
        got, _ = loss_of(
            batch, rows, ratio=ratio, importance=importance, kl_coef=kl_coef, ref_logprobs=batch["reference"]
        )
        plain = {name: value.tolist() for name, value in batch.items()}
        assert got.item() == pytest.approx(
            slow_loss(plain, rows.tolist(), ratio=ratio, importance=importance, kl_coef=kl_coef)
        )


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_any_split_of_rows_gives_the_same_gradient(ratio: str, importance: str) -> None:
    batch, rows = random_batch(60, 3)
    batch = {name: value.float() for name, value in batch.items()}
    theta = torch.zeros(60, requires_grad=True)

    def gradient(parts: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        metrics = []
        for index in parts:
            part = {name: value[index] for name, value in batch.items()} | {
                "logprobs": batch["logprobs"][index] + theta[index]
            }
            loss, metric = loss_of(
                part, rows[index], ratio=ratio, importance=importance, kl_coef=0.1, ref_logprobs=part["reference"]
            )
            loss.backward()
            metrics.append(metric)
        result, theta.grad = theta.grad, None
        assert result is not None
        return result, summarize(metrics)

    whole, metrics = gradient([torch.arange(60)])
    unique = rows.unique().tolist()
    for parts in ([[r] for r in unique], [unique[:1], unique[1:], []], [list(reversed(unique))]):
        split, same = gradient(
            [
                torch.cat([torch.empty(0, dtype=torch.long), *((rows == r).nonzero()[:, 0] for r in part)])
                for part in parts
            ]
        )
        assert torch.allclose(split, whole, rtol=1e-5, atol=1e-9)
        assert same == pytest.approx(metrics, rel=1e-5)


def test_how_a_rollout_is_cut_into_rows_does_not_matter() -> None:
    """The worked example through to the gradient: A as rows of 3, 2, 1 or as one row of 6."""
    gradients = []
    for tokens, rollouts in (([3, 2, 1, 6], ["A", "A", "A", "B"]), ([6, 6], ["A", "B"])):
        row_of = torch.repeat_interleave(torch.tensor(tokens))
        advantages = torch.tensor([0.5 if rollouts[row] == "A" else -0.5 for row in row_of])
        logprobs = torch.full((12,), -1.0, requires_grad=True)
        loss, _ = policy_loss(
            logprobs, logprobs.detach(), logprobs.detach(), advantages, token_weights(tokens, rollouts)[row_of]
        )
        loss.backward()
        gradients.append(logprobs.grad)
    assert torch.allclose(gradients[0], torch.tensor([-0.5 / 12] * 6 + [0.5 / 12] * 6))
    assert torch.equal(gradients[0], gradients[1])


def one_token(new: float, advantage: float, old: float = 0.0, sampled: float = 0.0, **more: Any) -> tuple[float, float]:
    """Loss of one token of weight 1, and its gradient with respect to the log-prob."""
    logprobs = torch.tensor([new], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.tensor([old]), torch.tensor([sampled]), torch.tensor([advantage]), torch.ones(1), **more
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


def test_clipping_by_hand() -> None:
    log = math.log
    assert one_token(log(1.1), 2.0) == pytest.approx((-2.2, -2.2))
    assert one_token(log(1.5), 2.0) == pytest.approx((-2.56, 0))  # clipped at 1.28: no gradient
    assert one_token(log(0.5), 2.0) == pytest.approx((-1.0, -1.0))  # worse than before: not clipped
    assert one_token(log(0.5), -2.0) == pytest.approx((1.6, 0))  # clipped at 0.8
    assert one_token(log(1.5), -2.0) == pytest.approx((3.0, 3.0))
    assert one_token(log(5.0), -2.0) == pytest.approx((6.0, 0))  # dual clip: at most 3 |A|
    assert one_token(log(5.0), -2.0, dual_clip=None) == pytest.approx((10.0, 10.0))


def test_importance_is_applied_after_clipping_and_has_no_gradient() -> None:
    log = math.log
    assert one_token(log(1.5), 2.0, sampled=log(1 / 1.5)) == pytest.approx((-2.56 * 1.5, 0))
    assert one_token(0.0, 1.0, sampled=log(1 / 1.5)) == pytest.approx((-1.5, -1.5))
    assert one_token(0.0, 1.0, sampled=log(1 / 4)) == pytest.approx((-2.0, -2.0))  # truncated at 2
    assert one_token(0.0, 1.0, sampled=log(4)) == pytest.approx((-0.25, -0.25))  # from below: not truncated
    assert one_token(0.0, 1.0, sampled=log(1 / 4), importance="mask") == (0, 0)
    assert one_token(0.0, 1.0, sampled=log(4), importance="mask") == (0, 0)
    assert one_token(0.0, 1.0, sampled=log(1 / 4), importance="none") == pytest.approx((-1.0, -1.0))
    batch, rows = random_batch(10)
    for name in ("old", "sampled", "advantages", "weights", "reference"):
        batch[name].requires_grad_()
    batch["logprobs"].requires_grad_()
    loss_of(batch, rows, ref_logprobs=batch["reference"], kl_coef=0.1)[0].backward()
    assert [name for name, value in batch.items() if value.grad is not None] == ["logprobs"]


def test_sequence_ratios_are_length_normalised_per_row() -> None:
    log_two = math.log(2)
    logprobs = torch.tensor([2 * log_two, 0.0, 0.0], requires_grad=True)
    old = torch.zeros(3)
    loss, metrics = policy_loss(
        logprobs, old, old, torch.ones(3), torch.ones(3), rows=torch.tensor([5, 5, 2]), ratio="gspo", clip_high=3.0
    )
    assert loss.item() == pytest.approx(-(2 + 2 + 1)) and metrics["ratio_max"].item() == pytest.approx(2)
    loss, metrics = policy_loss(
        old,
        old,
        -logprobs.detach(),
        torch.ones(3),
        torch.ones(3),
        rows=torch.tensor([5, 5, 2]),
        importance="sequence",
        importance_cap=10,
    )
    assert loss.item() == pytest.approx(-(2 + 2 + 1)) and metrics["importance_sum"].item() == pytest.approx(5)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    batch, rows = random_batch(20)
    for ratio in RATIOS:
        logprobs = batch["old"].clone().requires_grad_()
        weights = batch["weights"] if ratio == "token" else torch.full((20,), 0.05, dtype=torch.float64)
        advantages = batch["advantages"] if ratio == "token" else rows.double()  # of the row
        loss, metrics = policy_loss(logprobs, batch["old"], batch["old"], advantages, weights, rows=rows, ratio=ratio)
        loss.backward()
        assert torch.allclose(logprobs.grad, -weights * advantages)
        assert metrics["ratio_sum"].item() == pytest.approx(20) and metrics["ratio_clipped_sum"] == 0


def test_nothing_to_train_gives_zero_with_finite_gradients() -> None:  # 20
    for ratio in RATIOS:
        for importance in IMPORTANCES:
            parameter = torch.ones(3, requires_grad=True)
            empty = (parameter * 2)[torch.zeros(3, dtype=torch.bool)]
            none = torch.empty(0)
            loss, metrics = policy_loss(
                empty,
                none,
                none,
                none,
                none,
                rows=torch.empty(0, dtype=torch.long),
                ratio=ratio,
                importance=importance,
                ref_logprobs=none,
                kl_coef=1.0,
            )
            loss.backward()
            assert loss.item() == 0 and parameter.grad is not None and parameter.grad.tolist() == [0, 0, 0]
            summary = summarize([metrics])
            assert all(math.isfinite(value) for value in summary.values()) and summary["tokens"] == 0
    assert summarize([]) == {"ess": 0.0}


def test_what_is_not_trained_is_selected_away_not_multiplied_by_zero() -> None:  # 20: [1, NaN, 3] under [1, 0, 1] is 4
    values, mask = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True), torch.tensor([True, False, True])
    chosen = values[mask]
    loss, _ = policy_loss(chosen, chosen.detach(), chosen.detach(), -chosen.detach(), torch.ones(2))
    loss.backward()
    assert loss.item() == 4 and values.grad is not None and values.grad[1] == 0 and values.grad.isfinite().all()


def test_extreme_log_ratios_stay_finite_and_nan_is_not_hidden() -> None:
    for ratio in RATIOS:
        for importance in IMPORTANCES:
            logprobs = torch.tensor([0.0, -500.0, -1.0], requires_grad=True)
            loss, metrics = policy_loss(
                logprobs,
                torch.tensor([-500.0, 0.0, -1.0]),
                torch.tensor([0.0, -900.0, -1.0]),
                torch.tensor([1.0, -1.0, 1.0]),
                torch.ones(3),
                rows=torch.tensor([0, 1, 2]),
                ratio=ratio,
                importance=importance,
                dual_clip=None,
            )
            loss.backward()
            assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
            assert all(math.isfinite(value) for value in summarize([metrics]).values())
    broken = torch.tensor([float("nan"), 0.0])
    for importance in ("token", "mask", "none"):
        assert policy_loss(broken, broken, torch.zeros(2), torch.ones(2), torch.ones(2), importance=importance)[
            0
        ].isnan()
    loss, metrics = policy_loss(broken, torch.zeros(2), torch.zeros(2), torch.ones(2), torch.ones(2))
    assert math.isnan(summarize([metrics, metrics])["ratio_max"])


@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=8))
def test_the_loss_is_finite_for_all_finite_numbers(tokens: list[tuple[float, float, float]]) -> None:
    logprobs, old, sampled = torch.tensor(tokens).T
    loss, metrics = policy_loss(logprobs, old, sampled, torch.ones(len(tokens)), torch.ones(len(tokens)))
    assert loss.isfinite() and all(math.isfinite(value) for value in summarize([metrics]).values())
    assert metrics["mismatch_kl_sum"] >= 0 and metrics["approx_kl_sum"] >= 0


def test_metrics_by_hand() -> None:
    log = math.log
    batch = [
        torch.tensor(values)
        for values in ([log(2.0), 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, log(1 / 4), 0.0], [1.0, 1.0, -1.0])
    ]
    _, metrics = policy_loss(*batch, torch.ones(3), importance_cap=2.0)
    got = summarize([metrics])
    expect = {
        "tokens": 3,
        "ratio_mean": 4 / 3,
        "ratio_max": 2,
        "ratio_clipped_mean": 1 / 3,
        "dual_clipped_mean": 0,
        "approx_kl_mean": (1 - log(2)) / 3,
        "mismatch_kl_mean": (3 - log(4)) / 3,
        "logprob_gap_mean": log(4) / 3,
        "logprob_gap_max": log(4),
        "importance_mean": 4 / 3,
        "importance_max": 2,
        "importance_outside_mean": 1 / 3,
        "ess": 16 / (3 * 6),
    }
    assert got == pytest.approx(expect, rel=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    logprobs = torch.full((4,), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.full((4,), -1.001), torch.full((4,), -1.001), torch.ones(4), torch.ones(4))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(-4 * math.exp(0.001), rel=1e-5)


def test_wrong_settings_are_refused() -> None:
    one = torch.zeros(1)
    for more, message in (
        ({"ratio": "ppo"}, "token, gspo"),
        ({"importance": "tis"}, "token, sequence, mask, none"),
        ({"ratio": "gspo"}, "rows"),
        ({"importance": "sequence"}, "rows"),
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"importance_cap": 0.5}, "importance_cap"),
        ({"rows": torch.zeros(2)}, r"\[N\]"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(one, one, one, one, one, **more)
