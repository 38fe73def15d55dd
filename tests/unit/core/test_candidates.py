# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which of several checkpoints is the newest."""

from __future__ import annotations

from itertools import permutations

from lightning_resilience.core.candidates import Candidate, best_first, overtaking


def listed(*names: str) -> list[Candidate]:
    """Return files without manifests, each newer than the one before."""
    return [Candidate(url=f"s3://b/run/{name}", modified_s=t) for t, name in enumerate(names)]


def names(candidates: list[Candidate] | tuple[Candidate, ...]) -> list[str]:
    """Return their names."""
    return [candidate.url.rpartition("/")[2] for candidate in candidates]


def of_training(training: str, step: int | None, *, at_s: float) -> Candidate:
    """Return a checkpoint whose manifest says this, and that storage has got then."""
    url = f"s3://b/run/last-{training}-{step}.ckpt"
    return Candidate(url=url, modified_s=at_s, is_marked=True, step=step, training=training)


def test_the_newest_comes_first_whatever_its_name() -> None:
    """The storage's time of writing decides, not the number."""
    candidates = listed("last-v7.ckpt", "last.ckpt")

    assert names(best_first(candidates)) == ["last.ckpt", "last-v7.ckpt"]


def test_the_schedulers_highest_number_comes_first_whatever_its_time() -> None:
    """A copy of an older one is newer, and not further."""
    candidates = listed("hpc_ckpt_10.ckpt", "hpc_ckpt_9.ckpt")

    assert names(best_first(candidates, by_number=True)) == ["hpc_ckpt_10.ckpt", "hpc_ckpt_9.ckpt"]


def test_without_times_the_number_decides_and_then_the_name() -> None:
    """The order does not depend on that of the listing."""
    unordered = ("last-v2.ckpt", "last-v10.ckpt", "last.ckpt", "last-b.ckpt")
    files = [Candidate(url=f"s3://b/run/{name}") for name in unordered]

    orders = {tuple(names(best_first(order))) for order in permutations(files)}

    assert orders == {("last-v10.ckpt", "last-v2.ckpt", "last.ckpt", "last-b.ckpt")}


def test_one_without_a_time_comes_after_those_that_have_one() -> None:
    """It may be as old as anything."""
    timeless = Candidate(url="s3://b/run/last-v99.ckpt")

    assert best_first([timeless, *listed("last.ckpt")])[-1] == timeless


def test_a_file_that_two_callbacks_find_is_inspected_once() -> None:
    """Two callbacks may share a directory."""
    assert len(best_first([*listed("last.ckpt"), *listed("last.ckpt")])) == 1


def test_within_one_training_the_step_counts_and_not_when_storage_got_it() -> None:
    """One that has waited on a node through an outage comes late, and is no newer for that."""
    late, further = of_training("a", 4, at_s=9.0), of_training("a", 8, at_s=1.0)

    assert best_first([late, further]) == [further, late]


def test_between_two_trainings_the_time_counts_and_not_the_step() -> None:
    """Steps of an older training in the same directory say nothing about this one."""
    older = [of_training("a", 900, at_s=1.0), of_training("a", 1000, at_s=2.0)]
    newer = [of_training("b", 20, at_s=3.0), of_training("b", 10, at_s=4.0)]

    assert names(best_first([*older, *newer])) == [
        *("last-b-20.ckpt", "last-b-10.ckpt", "last-a-1000.ckpt", "last-a-900.ckpt")
    ]


def test_a_step_without_a_training_counts_for_nothing() -> None:
    """It cannot be told what it is compared with: a manifest of an earlier version."""
    assert names(best_first([of_training("", 9, at_s=1.0), of_training("", 1, at_s=2.0)])) == [
        *("last--1.ckpt", "last--9.ckpt")
    ]


def test_the_order_depends_on_neither_the_listing_nor_the_times_of_one_training() -> None:
    """Every order of the same files gives the same one."""
    files = [of_training("a", step, at_s=float(step % 3)) for step in range(4)]
    files.append(Candidate(url="s3://b/run/last.ckpt", modified_s=1.5))

    orders = {tuple(names(best_first(order))) for order in permutations(files)}

    assert orders == {
        ("last-a-3.ckpt", "last-a-2.ckpt", "last.ckpt", "last-a-1.ckpt", "last-a-0.ckpt")
    }


def test_one_that_has_lost_its_manifest_stands_where_storage_has_got_it() -> None:
    """A job that is killed just before it writes the manifest has made a newer one all the same."""
    training = [of_training("a", step, at_s=float(step)) for step in (1, 3, 4)]
    unmarked = [Candidate(url=f"s3://b/run/last-{at}.ckpt", modified_s=at) for at in (2.0, 3.5)]

    assert names(best_first([*training, *unmarked])) == [
        *("last-a-4.ckpt", "last-3.5.ckpt", "last-a-3.ckpt", "last-2.0.ckpt", "last-a-1.ckpt")
    ]


def test_what_overtakes_a_last_one_is_of_its_training_and_further() -> None:
    """The furthest first; another training is not compared by steps."""
    last = of_training("a", 4, at_s=1.0)
    others = [
        of_training("a", 6, at_s=0.0),
        of_training("a", 8, at_s=0.0),
        of_training("a", 4, at_s=9.0),
        of_training("b", 9, at_s=9.0),
        of_training("", 9, at_s=9.0),
    ]

    assert names(overtaking(last, others)) == ["last-a-8.ckpt", "last-a-6.ckpt"]


def test_a_last_one_of_which_nothing_is_known_is_overtaken_by_what_came_with_it_or_later() -> None:
    """Storage may tell times in whole seconds; without a time nothing can be told."""
    others = [of_training("a", 2, at_s=2.0), of_training("a", 6, at_s=5.0)]

    for at_s, expected in ((1.0, ["last-a-6.ckpt", "last-a-2.ckpt"]), (5.0, ["last-a-6.ckpt"])):
        last = Candidate(url="s3://b/run/last.ckpt", modified_s=at_s)
        assert names(overtaking(last, others)) == expected
    assert overtaking(Candidate(url="s3://b/run/last.ckpt"), others) == []
