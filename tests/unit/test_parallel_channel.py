"""The weight channel between two real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from megaflow.parallel.channel import Channel, ChannelEnd, ChannelError, tell_lost
from megaflow.parallel.shared_memory import EndLost

CONSUMER = """
import json, sys, time, torch
from megaflow.parallel.channel import ChannelEnd
from megaflow.parallel.digest import digest
end = ChannelEnd(json.loads(sys.argv[1]))
mode, count = sys.argv[2], int(sys.argv[3])
end.begin()
sums, digests = [], []
for i in range(count):
    data = end.receive()
    if mode == "fail" and i == 1:
        end.fail("ValueError: no room")
        sys.exit(0)
    time.sleep(0.01)   # slower than the producer: a buffer that is filled too early would be read wrong
    sums.append(int(data[:1000].sum()))
    digests.append(digest(data[:1000]))
    if i == count - 1:
        end.report_digests(torch.stack(digests))
    end.acknowledge()
print(json.dumps(sums))
"""


def start(channel: Channel, mode: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", CONSUMER, json.dumps(channel.descriptor()), mode, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_buckets_arrive_whole_and_in_order_through_two_buffers():
    channel = Channel(1000, 9, torch.device("cpu"), timeout_s=60)
    for _ in range(2):  # a second sync over the same channel
        channel.begin()
        consumer = start(channel, "read", 9)
        expected = []
        for i in range(9):
            buffer = channel.acquire(1000)
            buffer.fill_(i + 1)
            expected.append(1000 * (i + 1))
            channel.publish()
        digests = channel.finish()
        assert json.loads(consumer.communicate(timeout=60)[0]) == expected
        assert len(set(digests.tolist())) == 9


def test_the_consumers_error_reaches_the_producer():
    channel = Channel(1000, 1, torch.device("cpu"), timeout_s=60)
    channel.begin()
    consumer = start(channel, "fail", 9)
    with pytest.raises(ChannelError, match="ValueError: no room"):
        for _ in range(9):
            channel.acquire(1000)
            channel.publish()
        channel.finish()
    consumer.wait(timeout=60)


def test_a_dead_consumer_is_noticed_at_once():
    channel = Channel(8, 1, torch.device("cpu"), timeout_s=60)
    channel.begin()

    def gone():
        raise ChannelError("engine 3 died")

    channel.check_peer = gone
    channel.publish()
    with pytest.raises(ChannelError, match="engine 3 died"):
        channel.finish()


def test_silence_ends_with_the_time_limit():
    channel = Channel(8, 1, torch.device("cpu"), timeout_s=0.2)
    channel.begin()
    channel.publish()
    with pytest.raises(ChannelError, match="waited 0 s for the engine"):
        channel.finish()


def test_a_dead_producer_is_noticed():
    code = (
        "import json, torch\nfrom megaflow.parallel.channel import Channel\n"
        "print(json.dumps(Channel(8, 1, torch.device('cpu'), 60.0).descriptor()), flush=True)\ninput()"
    )
    producer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end = ChannelEnd(json.loads(producer.stdout.readline()))
    producer.kill()
    producer.wait()
    with pytest.raises(ChannelError, match="is gone"):
        end.receive()


def test_buckets_go_on_when_the_engine_is_lost_and_the_end_tells():
    """They come through collectives: a rank that left the stream would hang the others."""
    channel = Channel(1000, 1, torch.device("cpu"), timeout_s=60)
    channel.begin()
    tell_lost(channel.descriptor())
    for _ in range(5):
        channel.acquire(1000)
        channel.publish()
    with pytest.raises(EndLost, match="its engine is lost"):
        channel.finish()
    channel.begin()
    channel.acquire(1000)
    assert channel.given_up is None, "forgotten with the next load"
