"""A reward model over HTTP, against a real server; and what its scores become: normalised, clipped, weighted."""

from __future__ import annotations

import json
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megaflow.config.schema import RewardConfig, RewardFunctionConfig, RewardModelConfig
from megaflow.rewards.model import ModelReward, RunningMoments
from megaflow.rewards.pool import RewardPool
from megaflow.rewards.remote import RemoteScorer
from megaflow.types import LostError, PreflightError, Prompt, Sample


class Server(ThreadingHTTPServer):
    """Answers with `reply(request number, body)`: (status, what to send)."""

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.bodies, self.lock = reply, [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            number = len(self.server.bodies)
        status, answer = self.server.reply(number, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet."""


def lengths(number: int, body: dict) -> tuple[int, dict]:
    return 200, {"scores": [len(response) for response in body["responses"]]}


def samples(*texts: str) -> list[Sample]:
    made = [Sample(Prompt(f"x:{i}", [1], f"question {i}", {"number": i}), i, 0, None, None, "stop", 0, text=t) for i, t in enumerate(texts)]
    for s in made:
        s.num_response = 3
    return made


def model(url: str, **settings) -> RewardModelConfig:
    return RewardModelConfig(where="remote", url=url, **{"timeout_s": 5.0, "retries": 3, "backoff_s": 0.01, **settings})


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_texts_travel_in_batches_and_scores_come_back_in_order():
    texts = ["a" * n for n in (5, 1, 4, 2, 3, 9, 7)]
    with Server(lengths) as server:
        assert RemoteScorer(model(server.url, batch=2, concurrency=3)).scores(samples(*texts)) == [5, 1, 4, 2, 3, 9, 7]
    assert sorted(len(body["responses"]) for body in server.bodies) == [1, 2, 2, 2]
    first = next(body for body in server.bodies if body["responses"][0] == "aaaaa")
    assert first == {"prompts": ["question 0", "question 1"], "responses": ["aaaaa", "a"], "answers": [{"number": 0}, {"number": 1}]}


def test_a_service_that_comes_back_is_waited_for_longer_each_time(caplog):
    def reply(number, body):
        return lengths(number, body) if number > 3 else ((503, 429, 500)[number - 1], {"error": "busy"})

    with Server(reply) as server:
        start = time.monotonic()
        assert RemoteScorer(model(server.url, backoff_s=0.05)).scores(samples("ab")) == [2]
        assert time.monotonic() - start > 0.05 + 0.1 + 0.2
    waits = [record.getMessage().rpartition(" in ")[2] for record in caplog.records]
    assert waits == ["0.05 s", "0.1 s", "0.2 s"] and "status 503" in caplog.text and "busy" in caplog.text


def test_one_that_stays_down_ends_the_run_with_what_to_do():
    with Server(lengths) as server:
        url = server.url
    with pytest.raises(LostError) as error:  # nobody listens there now
        RemoteScorer(model(url, retries=2)).scores(samples("a"))
    assert error.value.exit_code == 5
    assert f"reward.model.url={url}: no answer after 3 tries" in str(error.value) and "refused" in str(error.value)
    assert "run the same command again" in str(error.value)


def test_a_service_that_hangs_is_cut_off():
    hold = threading.Event()

    def reply(number, body):
        hold.wait(5)
        return lengths(number, body)

    with Server(reply) as server:
        start = time.monotonic()
        with pytest.raises(LostError, match=r"no answer within reward.model.timeout_s=0.2"):
            RemoteScorer(model(server.url, timeout_s=0.2, retries=1)).scores(samples("a"))
        assert time.monotonic() - start < 3
        hold.set()
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"detail": "no such model"}), "refused with status 404.*no such model"),
        ((200, b"<html>"), "expected.*1 numbers.*<html>"),
        ((200, {"score": [1]}), "expected.*scores"),
        ((200, {"scores": [1, 2]}), "got 2 numbers"),
        ((200, {"scores": ["high"]}), "high"),
        ((200, b'{"scores": [NaN]}'), "the number nan"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(answer, message):
    with Server(lambda number, body: answer) as server, pytest.raises(PreflightError, match=message):
        RemoteScorer(model(server.url)).scores(samples("a"))
    assert len(server.bodies) == 1, "tried again, though the service has answered"


def test_running_moments_are_those_of_all_numbers_together():
    numbers = [3.0, -1.0, 4.0, 1.5, 1e6, 2.0, 2.0]
    moments = RunningMoments()
    for part in (numbers[:1], numbers[1:4], [], numbers[4:]):
        moments.add(part)
    assert moments.mean == pytest.approx(statistics.fmean(numbers), rel=1e-12)
    assert moments.std == pytest.approx(statistics.pstdev(numbers), rel=1e-12)


def test_shares_are_normalised_over_the_run_then_clipped_then_weighted():
    reward = ModelReward(RewardModelConfig(weight=0.5, normalize=True, clip=1.2))
    assert reward.shares([2.0], learn=True) == [0.0], "one number has no spread"
    second = reward.shares([4.0, 9.0], learn=True)  # of 2, 4 and 9: mean 5, std sqrt(26/3)
    assert second == pytest.approx([0.5 * -1 / (26 / 3) ** 0.5, 0.5 * 1.2])
    assert reward.shares([5.0], learn=False) == [0.0] and reward.moments.count == 3
    resumed = ModelReward(reward.config)
    resumed.load_state_dict(json.loads(json.dumps(reward.state_dict())))
    assert resumed.shares([4.0], learn=True) == reward.shares([4.0], learn=True)


def test_the_reward_is_the_functions_and_the_models_share():
    functions = [RewardFunctionConfig("format", weight=2.0, options={"pattern": "abc"})]
    with Server(lengths) as server, RewardPool(RewardConfig(functions, workers=1, model=model(server.url, weight=0.1, clip=3.0))) as pool:
        made = samples("abc", "aaaaaaa")
        scored = pool.score(made)
        assert [s.reward for s in made] == pytest.approx([2.0 + 0.3, 0.0 + 0.3])
        assert [s.parts["model"] for s in scored] == [3, 7] and list(scored[0].parts) == ["format", "model"]
    with Server(lengths) as server, RewardPool(RewardConfig([], workers=1, model=model(server.url))) as alone:
        made = samples("abc")
        alone.score(made)
        assert (made[0].reward, made[0].reward_parts) == (3.0, {"model": 3.0})
