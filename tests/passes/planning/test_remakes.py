"""Keep, offload or recompute, exactly: the program against brute force over all sets and all placements.

The oracle takes a set of recomputations out of the problem, and walks through the step once per placement. It shares
neither variables nor rows with the program.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from problems import random_problem
from test_solve_exactly import all_placements, peak_of, step_of

from ssdtrain_fx.passes.planning.remakes import Remake, with_remakes
from ssdtrain_fx.passes.planning.simulate import simulate
from ssdtrain_fx.passes.planning.solve_exactly import solve_exactly
from ssdtrain_fx.passes.planning.transfer_problem import Movable, TransferProblem

TOLERANCE = 2e-7
LIMITS = (0.0, 0.03, 0.15)
SEEDS = (0, 1, 3, 6, 7, 17, 28, 49, 55, 87, 88)


def tiny_problem(seed: int, *, plain: bool) -> tuple[TransferProblem, tuple[Remake, ...]]:
    """Two or three storages, some of which can be made from others.

    Args:
        plain: staging holds nothing and copies run beside compute, so that the program relaxes no rule.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, num_movables=2 + seed % 2, num_positions=8 + seed % 3)
    if plain:
        hardware = dataclasses.replace(problem.hardware, staging_bytes=0, copies_block_compute=False, reload_s=0.0)
        problem = dataclasses.replace(problem, hardware=hardware)
    remakes = [
        Remake(idx=movable.idx, seconds=problem.step_s * rng.choice([0.001, 0.02, 0.05]), sources=sources)
        for movable in problem.movables
        if (sources := tuple(_sources(rng, problem, movable))) or rng.random() < 0.5
    ]
    return problem, tuple(remakes)


def _sources(rng: random.Random, problem: TransferProblem, made: Movable) -> Iterator[int]:
    for movable in problem.movables:
        if movable.live_start < made.live_start and rng.random() < 0.7:
            yield movable.idx


def sets_without_chains(remakes: Sequence[Remake]) -> Iterator[tuple[Remake, ...]]:
    for count in range(len(remakes) + 1):
        for chosen in itertools.combinations(remakes, count):
            made = {one.idx for one in chosen}
            if all(made.isdisjoint(one.sources) for one in chosen):
                yield chosen


def least_peak(problem: TransferProblem, remakes: Sequence[Remake], limit_s: float) -> int:
    """The least peak of all sets and placements within ``limit_s``."""
    best = peak_of(problem, {})
    for chosen in sets_without_chains(remakes):
        left = with_remakes(problem, chosen)
        for placements in all_placements(left):
            peak_bytes = peak_of(left, placements)
            if peak_bytes < best and step_of(left, placements) <= limit_s:
                best = peak_bytes
    return best


def test_there_is_something_to_choose() -> None:
    """The seeds below contain recomputations from other storages, and plans that recompute and offload."""
    solved = [(tiny_problem(seed, plain=True), limit) for seed, limit in itertools.product(SEEDS, LIMITS)]
    assert any(one.sources for (_, remakes), _ in solved for one in remakes)
    read_early = 0
    for (problem, remakes), limit in solved:
        solution = solve_exactly(problem, max_slowdown=limit, remakes=remakes)
        chosen = [one for one in remakes if one.idx in solution.remade]
        read_early += any(set(one.sources) & set(solution.placements) for one in chosen)
    assert read_early >= 2, "nothing is recomputed from what is offloaded"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in SEEDS else pytest.mark.slow) for seed in range(100)]
)
def test_the_joint_optimum_is_that_of_brute_force(seed: int, limit: float) -> None:
    problem, remakes = tiny_problem(seed, plain=True)
    solution = solve_exactly(problem, max_slowdown=limit, remakes=remakes, relative_gap=0)
    assert solution.proven
    limit_s = (1 + limit) * problem.step_s
    assert least_peak(problem, remakes, limit_s * (1 + TOLERANCE)) <= solution.peak_bytes
    assert solution.peak_bytes <= least_peak(problem, remakes, limit_s * (1 - TOLERANCE))
    chosen = [one for one in remakes if one.idx in solution.remade]
    left = with_remakes(problem, chosen)
    assert peak_of(left, solution.placements) == solution.peak_bytes
    assert not set(solution.remade) & set(solution.placements)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_beats_the_bound_in_the_simulation(seed: int) -> None:
    """With staging, and copies that take the compute stream."""
    problem, remakes = tiny_problem(seed, plain=False)
    solution = solve_exactly(problem, max_slowdown=0.05, remakes=remakes, relative_gap=0)
    limit_s = 1.05 * problem.step_s * (1 + TOLERANCE)
    for chosen in sets_without_chains(remakes):
        left = with_remakes(problem, chosen)
        for placements in all_placements(left):
            if peak_of(left, placements) < solution.lower_bound_bytes:
                assert simulate(left, placements).step_s > limit_s


def test_recomputation_only_helps() -> None:
    for seed in range(12):
        problem, remakes = tiny_problem(seed, plain=False)
        alone = solve_exactly(problem, max_slowdown=0.05, relative_gap=0)
        both = solve_exactly(problem, max_slowdown=0.05, remakes=remakes, relative_gap=0)
        assert both.lower_bound_bytes <= alone.lower_bound_bytes
        assert not alone.remade


def test_storages_are_not_made_from_each_other() -> None:
    problem, _ = tiny_problem(1, plain=True)
    first, second = problem.movables[:2]
    chain = [
        Remake(idx=first.idx, seconds=0.0, sources=()),
        Remake(idx=second.idx, seconds=0.0, sources=(first.idx,)),
    ]
    with pytest.raises(ValueError, match="made from each other"):
        with_remakes(problem, chain)
    assert len(solve_exactly(problem, max_slowdown=0.0, remakes=chain).remade) <= 1
