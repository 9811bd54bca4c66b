"""Which recomputations lift the working-set floor, compared with the floor of the problem that they leave."""

from __future__ import annotations

import random

import pytest
from problems import seeded_problems

from ssdtrain_fx.passes.planning.place_transfers import floor_bytes
from ssdtrain_fx.passes.planning.relieve_peak import find_floor_raisers
from ssdtrain_fx.passes.planning.remakes import Remake, with_remakes
from ssdtrain_fx.passes.planning.transfer_problem import TransferProblem


def random_sources(problem: TransferProblem, rng: random.Random) -> dict[int, tuple[int, ...]]:
    """Some storages are made from one or two that exist before them."""
    found: dict[int, tuple[int, ...]] = {}
    for position, movable in enumerate(problem.movables[1:], start=1):
        earlier = [other.idx for other in problem.movables[:position] if other.live_start <= movable.live_start]
        if earlier and rng.random() < 0.7:
            found[movable.idx] = tuple(rng.sample(earlier, min(len(earlier), rng.randint(1, 2))))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_recomputation_lifts_the_floor_if_the_problem_it_leaves_has_a_higher_one(seed: int) -> None:
    rng = random.Random(seed)
    answers: set[bool] = set()
    for problem in seeded_problems(30, min_movables=3, max_movables=8, max_positions=30):
        sources = random_sources(problem, rng)
        lifting = find_floor_raisers(problem, sources)
        for idx, read in sources.items():
            left = with_remakes(problem, [Remake(idx=idx, seconds=0.0, sources=read)])
            assert (idx in lifting) == (floor_bytes(left) > floor_bytes(problem)), (idx, read)
            answers.add(idx in lifting)
    assert answers == {False, True}
