"""The connections of ranks: who may be one, which answer counts, and what a silent one may not do."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import socket
import time

import msgspec
import numpy as np
import pytest

from manta.cluster.engine.ranks.rank_channel import AcceptLimits, Listener, RankChannel, RankHello, RankLost, connect
from manta.cluster.engine.ranks.rank_messages import Done, Output, PackedMasks, Ping, Sample
from manta.structured.frames import frame
from manta.structured.masks import LATE, NO_MASK, MaskBatch
from manta.workers.step import StepOutput
from tests.patience import PATIENCE_S


def test_of_masks_the_used_rows_travel() -> None:
    rows = np.arange(40, dtype=np.int32).reshape(10, 4)
    adjustments = {1: (np.array([3, 5], np.int32), np.array([0.5, -1.0], np.float32))}
    sent = msgspec.msgpack.encode(PackedMasks.of(MaskBatch(7, [4, NO_MASK, 9, LATE, 4], rows, adjustments)))
    received = msgspec.msgpack.decode(sent, type=PackedMasks).batch()
    assert received.step_id == 7
    assert received.slots == [0, NO_MASK, 1, LATE, 0]
    assert received.rows.tolist() == rows[[4, 9]].tolist()
    assert [each.tolist() for each in received.adjustments[1]] == [[3, 5], [0.5, -1.0]]


def test_strangers_do_not_become_ranks() -> None:
    """Neither by a wrong secret, nor by nonsense, nor by saying nothing."""
    listener = Listener("127.0.0.1", AcceptLimits(hello_s=0.2))
    place = (listener.address.host, listener.address.port)
    strangers = [socket.create_connection(place) for _ in range(4)]
    strangers[0].sendall(frame(msgspec.msgpack.encode(RankHello("wrong", 0, 1))))
    strangers[1].sendall(b"\xff" * 100)
    strangers[2].close()
    rank = connect(listener.address, 0)
    ((hello, connection),) = listener.accept(1)
    assert hello.pid == os.getpid()
    assert connection.getpeername() == rank.getsockname()


def test_a_rank_of_another_version_is_refused_by_name() -> None:
    listener = Listener("127.0.0.1", AcceptLimits(connect_s=PATIENCE_S))
    with socket.create_connection((listener.address.host, listener.address.port)) as other:
        other.sendall(frame(msgspec.msgpack.encode(RankHello(listener.address.secret, 1, 17, "0.0.1"))))
        with pytest.raises(RankLost, match=r"rank 1, process 17, is no rank of this engine: it is of Manta 0\.0\.1"):
            listener.accept(2)


def test_slow_or_many_strangers_block_no_rank() -> None:
    """A hello has one deadline as a whole, and the oldest of too many strangers goes."""
    listener = Listener("127.0.0.1", AcceptLimits(hello_s=0.5, max_unproven=8, connect_s=PATIENCE_S))
    place = (listener.address.host, listener.address.port)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, 1)
        with socket.create_connection(place) as dripping:
            for number in itertools.count():  # its hello claims a kilobyte, and would take as many drips
                try:
                    dripping.sendall(b"\0\4\0\0"[number : number + 1] or b"x")
                except OSError:
                    break
                assert number < 900
                time.sleep(0.05)
        listener.limits = msgspec.structs.replace(listener.limits, hello_s=PATIENCE_S)
        strangers = [socket.create_connection(place) for _ in range(30)]
        for stranger in strangers[: 30 - 8]:
            stranger.settimeout(PATIENCE_S)
            assert stranger.recv(1) == b"", "it gave way"
        rank = connect(listener.address, 0)
        ((hello, _),) = accepting.result(PATIENCE_S)
        assert hello.pid == os.getpid()
        rank.close()
    for stranger in strangers:
        stranger.close()


def test_the_latest_answer_of_a_rank_counts() -> None:
    """However many of them come at once."""
    listener = Listener("127.0.0.1")
    rank = connect(listener.address, 0)
    ranks = RankChannel(listener.accept(1))
    assert not ranks.owes(0)
    ranks.ask(Ping(), 0)
    ranks.ask(Sample(), 0)
    assert ranks.owes(0)
    answers = [msgspec.msgpack.encode(answer) for answer in (Done(), Output(StepOutput(7)))]
    rank.sendall(b"".join(map(frame, answers)))
    (answer,) = ranks.collect(5.0)
    assert isinstance(answer, Output)
    assert answer.output.step_id == 7
    assert not ranks.owes(0)
    rank.close()
    ranks.close()


def test_a_rank_that_reads_nothing_blocks_nobody() -> None:
    """A message larger than what the system keeps for it is sent as far as it goes."""
    listener = Listener("127.0.0.1")
    rank = connect(listener.address, 0)
    ranks = RankChannel(listener.accept(1))
    ranks.ask(Sample(PackedMasks(1, [0], bytes(1 << 24), 1, {})), 0)
    with pytest.raises(RankLost, match=r"ranks \[0\] did not answer within 0.1 s"):
        ranks.collect(0.1)
    rank.close()
    with pytest.raises(RankLost):
        ranks.collect(0.1)
    ranks.close()
