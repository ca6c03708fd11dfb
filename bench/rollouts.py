"""CPU time that a local rollout costs before its first model call: python bench/rollouts.py [--rollouts 200]

Runs the controller as a user does (a process of its own, warm fork) with a Python harness that makes an openai client
and one call, to a stand-in for the gateway. When a call arrives, the stand-in reads from /proc what the harness's
process and its keeper have used, building and sending the request included. The fork server's share is what it used in
the run, for each of its forks (two a rollout, the second for the verifier). The controller's is all that it used, from
claim to report, since what comes after the call cannot be told apart: so the total is an upper bound.
Exit status 1 if the median total is over 20 ms.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

LIMIT_MS = 20.0
REPLY = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [
    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}]}


def harness(task: dict, workdir: Path) -> None:
    from openai import OpenAI

    reply = OpenAI().chat.completions.create(model=os.environ["MODEL_NAME"], user=str(os.getpid()), messages=[
        {"role": "system", "content": "Answer."}, {"role": "user", "content": task["answer"]}])
    (workdir / "result" / "answer").write_text(reply.choices[0].message.content)


def cpu_ms(pid: int) -> float:
    """CPU time of a process of one thread so far, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


def verify(task: dict, workdir: Path, turns: list[dict]) -> float:
    return float((workdir / "result" / "answer").read_text() == task["verifier"]["answer"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--max-running", type=int, default=16, help="at once")
    options = parser.parse_args()
    from test_controller import Bench, FakeGateway, children, until  # not above: the forks need none of it

    class MeasuringGateway(FakeGateway):
        used: list[tuple[float, float]] = []  # ms of CPU of (harness, keeper) when the call arrived

        def answer(self, path: str, body: dict) -> dict:
            if not path.startswith("/v1"):
                return super().answer(path, body)
            pid = int(body["user"])
            keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            self.used.append((cpu_ms(pid), cpu_ms(keeper)))
            return REPLY

    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), MeasuringGateway())
        controller = bench.start("--preload", "rollouts", "--max-running", str(options.max_running))
        until(lambda: "rollouts at once" in (bench.run_dir / "log").read_text())
        server, = children(controller.pid)
        before, start = (cpu_ms(controller.pid), cpu_ms(server)), time.monotonic()
        rollouts = [bench.add("rollouts:harness", "rollouts:verify") for _ in range(options.rollouts)]
        records = [bench.record(rollout) for rollout in rollouts]
        seconds = time.monotonic() - start
        after = cpu_ms(controller.pid), cpu_ms(server)
        bench.stop()
    failed = [record["report"]["reason"] for record in records if record["report"]["status"] != "succeeded"]
    assert not failed, failed
    controller_ms, fork_ms = (after[0] - before[0]) / options.rollouts, (after[1] - before[1]) / options.rollouts / 2
    used = bench.gateway.used
    rows = {"harness process": [harness for harness, _ in used], "its keeper": [keeper for _, keeper in used],
            "fork server (mean)": [fork_ms], "controller, whole rollout (mean)": [controller_ms],
            "total": (totals := [harness + keeper + fork_ms + controller_ms for harness, keeper in used])}
    print(f"{options.rollouts} rollouts, {options.max_running} at once, {seconds:.1f} s; CPU ms up to the first call:")
    for name, values in rows.items():
        p99 = sorted(values)[int(0.99 * len(values))]
        print(f"  {name:32}  median {statistics.median(values):6.2f}   p99 {p99:6.2f}")
    sys.exit(statistics.median(totals) > LIMIT_MS)


if __name__ == "__main__":
    main()
