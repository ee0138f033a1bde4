"""A few processes of one group, each with the same work."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["metastable.api", "metastable.estimator", "lightning_fabric"])


def _meeting(rank: int, count: int, ports: Any) -> dist.TCPStore:
    """A store that the first process holds, at a port that is its own from the first moment."""
    if rank == 0:
        held = dist.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
        for _ in range(count - 1):
            ports.put(held.port)
        return held
    return dist.TCPStore("127.0.0.1", ports.get(), count, is_master=False)


def _child(
    rank: int, count: int, ports: Any, answer: Connection, work: Callable[..., Any], args: Any, named: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # several of them share no GPU
    if count > 1:
        met, most = _meeting(rank, count, ports), timedelta(seconds=60)
        dist.init_process_group("gloo", store=met, rank=rank, world_size=count, timeout=most)
    try:
        answer.send_bytes(pickle.dumps(work(*args, **named)))
    except BaseException as error:
        traceback.print_exc()
        answer.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
    finally:
        if count > 1 and rank > 0:
            dist.destroy_process_group()


def on(count: int, work: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
    """What `work` returns in each of so many processes; the text of what it raised, None of one that died."""
    ports = CONTEXT.SimpleQueue()
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(count)]
    started = [
        CONTEXT.Process(
            target=_child, args=(rank, count, ports, pipes[rank][1], work, args, named), daemon=True
        )
        for rank in range(count)
    ]
    for process, (_, answer) in zip(started, pipes, strict=True):
        process.start()
        answer.close()
    answers: list[Any] = [None] * count
    left = {asked: rank for rank, (asked, _) in enumerate(pipes)}
    while left:
        for asked in wait(list(left)):
            rank = left.pop(asked)  # pyright: ignore
            try:
                answers[rank] = pickle.loads(asked.recv_bytes())  # pyright: ignore
            except EOFError:
                answers[rank] = None
    for process in started:
        process.join()
    return answers
