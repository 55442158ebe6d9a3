"""The harness itself: a hang, a death or an error on one rank is a failure that says where, and the next case
works."""

import os
import time

import harness
import pytest
import torch
import torch.distributed as dist
from harness import RankFailure, raises_on_every_rank, run_ranks

pytestmark = pytest.mark.core


def total():
    one = torch.full((2,), float(dist.get_rank() + 1))
    dist.all_reduce(one)
    return one[0].item(), dist.get_rank(), torch.get_num_threads()


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)


def raise_on(*ranks):
    if dist.get_rank() in ranks:
        raise ValueError(f"wanted, rank {dist.get_rank()}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_run_with_one_thread_each(world):
    """Fails when the workers cannot start or cannot communicate: then no other distributed test means
    anything."""
    assert run_ranks(world, total) == [(world * (world + 1) / 2, rank, 1) for rank in range(world)]


def test_a_hang_names_the_case_and_the_stack():
    """Fails when a stuck rank would stop the whole run, or would not say where it is stuck."""
    with pytest.raises(
        RankFailure, match=r"hang_on\(1,\) on 2 ranks(.|\n)*rank 1 of 2: HANGS(.|\n)*in hang_on"
    ):
        run_ranks(2, hang_on, 1, timeout=2)
    assert run_ranks(2, total)[0][0] == 3


def test_a_dead_or_raising_rank_is_reported():
    """Fails when a rank's exit or exception is lost."""
    with pytest.raises(RankFailure, match="rank 0 of 2: died: ProcessDied: exit code 3"):
        run_ranks(2, die_on, 0)
    with pytest.raises(RankFailure, match="rank 1 of 2: error: ValueError: wanted, rank 1"):
        run_ranks(2, raise_on, 1)
    assert run_ranks(2, total)[0][0] == 3


def test_raises_on_every_rank_wants_every_rank():
    """Fails when an error on only one rank would pass for an error on all."""
    assert raises_on_every_rank(2, raise_on, 0, 1, match="wanted, rank {rank}") == [
        "wanted, rank 0",
        "wanted, rank 1",
    ]
    with pytest.raises(RankFailure, match="expected"):
        raises_on_every_rank(2, raise_on, 1)
    assert run_ranks(2, total)[0][0] == 3


def test_local_part_is_what_dtensor_holds():
    """Fails when the oracle's idea of who holds what isn't DTensor's."""
    assert run_ranks(4, compare_parts) == [True] * 4


def compare_parts():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = harness.mesh_of((2, 2))
    for shape in [(1, 5), (4, 4), (3, 9), (0, 2), (7, 1)]:
        whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
        for placements in [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0))]:
            theirs = distribute_tensor(whole, mesh, placements).to_local()
            assert torch.equal(theirs, harness.local_part(whole, mesh, placements)), (shape, placements)
    return True
