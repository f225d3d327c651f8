# SPDX-License-Identifier: Apache-2.0
"""Two commits beside each other: the same figures meet, and their ratio is that of each round."""

from __future__ import annotations

from bench import compare
from bench.report import Param, Result


def result(value: float, metric: str = "trace_ns", **params: Param) -> Result:
    return Result.of(metric, "ns", [value], params)


def test_what_is_observed_beside_a_figure_does_not_tell_two_apart() -> None:
    one = result(1, threads=1, paced=False, load=0.1, lost_share=0.5, node_ns=7.0)
    same = result(2, threads=1, paced=False, load=3.2, lost_share=0.0, node_ns=9.0)
    other = result(1, threads=2, paced=False, load=0.1, lost_share=0.5, node_ns=7.0)
    assert compare.key(one) == compare.key(same)
    assert compare.key(one) != compare.key(other)


def test_how_triggers_were_found_does_not_tell_two_apart() -> None:
    found = {"triggers": 50_000, "passes": 700, "found_after_ms": 5.1, "found_after_most_ms": 9.0}
    one = result(0.2, "trigger_cpu_share", rate_per_s=10_000, **found)
    same = result(0.3, "trigger_cpu_share", rate_per_s=10_000, **dict.fromkeys(found, 1))
    assert compare.key(one) == compare.key(same)


def test_a_hundred_lookups_are_not_one() -> None:
    assert compare.key(result(1, "lookup_ms", traces=1)) != compare.key(
        result(1, "lookup_ms", traces=100)
    )


def test_rounds_make_one_figure_with_the_extremes_of_all() -> None:
    rounds = [[result(value, threads=1, lost=1, lost_share=share)]
              for value, share in ((3, 0.1), (1, 0.2), (2, 0.6))]  # fmt: skip
    (merged,) = compare.merged(rounds)
    assert (merged.min, merged.value, merged.max) == (1, 2, 3)
    # Counts are added up; of shares the mean is taken.
    assert merged.params == {"threads": 1, "lost": 3, "lost_share": 0.3}


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    # The machine is ten times as slow in the second round, for both.
    before = [[result(10)], [result(100)], [result(10)]]
    after = [[result(5)], [result(50)], [result(20)]]
    (figure,) = compare.compared(before, after)
    assert figure.ratio == 0.5
    assert figure.before is not None
    assert (figure.before.value, figure.after.value) == (10, 20)


def test_what_the_older_one_alone_has_is_left_out_and_of_nothing_there_is_no_ratio() -> None:
    before = [[result(0, threads=1), result(1, threads=2)]]
    after = [[result(4, threads=1), result(1, threads=4)]]
    of_nothing, new = compare.compared(before, after)
    assert (of_nothing.after.params, of_nothing.ratio) == ({"threads": 1}, None)
    assert (new.after.params, new.before, new.ratio) == ({"threads": 4}, None, None)


def test_the_table_has_a_row_a_figure_and_a_section_a_metric() -> None:
    before = [
        [
            result(10, threads=1, paced=True, load=1.0, lost_share=0.5),
            result(12, threads=2, paced=True, load=1.0, lost_share=0.25),
            result(3, "pickup_ms", pool_bytes=64 << 20, times=5),
        ]
    ]
    after = [
        [
            result(5, threads=1, paced=True, load=2.0, lost_share=0.0),
            result(6, threads=2, paced=True, load=2.0, lost_share=0.0),
            result(3, "pickup_ms", pool_bytes=64 << 20, times=5),
        ]
    ]
    assert compare.table(compare.compared(before, after), "181b7fb", "now").splitlines() == [
        "### trace_ns",
        "",
        # Both rows are paced.
        "| threads | 181b7fb, ns | now, ns | ratio | lost before | lost now |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 | 10 (10 to 10) | 5 (5 to 5) | **0.5** | 0.5 | 0 |",
        "| 2 | 12 (12 to 12) | 6 (6 to 6) | **0.5** | 0.25 | 0 |",
        "",
        "### pickup_ms",
        "",
        "| pool_bytes | 181b7fb, ns | now, ns | ratio |",
        "| ---: | ---: | ---: | ---: |",
        "| 64 MiB | 3 (3 to 3) | 3 (3 to 3) | **1** |",
    ]


def test_what_the_older_commit_cannot_do_is_shown_and_what_stands_beside_a_figure() -> None:
    before = [[result(10, "payload_share", threads=0, at_full_speed=0.2)]]
    after = [
        [
            result(20, "payload_share", threads=0, at_full_speed=0.6),
            result(30, "payload_share", threads=32, at_full_speed=0.7),
        ]
    ]
    assert compare.table(compare.compared(before, after), "181b7fb", "now").splitlines()[2:] == [
        "| threads | 181b7fb, ns | now, ns | ratio | at_full_speed now |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 0 | 10 (10 to 10) | 20 (20 to 20) | **2** | 0.6 |",
        "| 32 |  | 30 (30 to 30) |  | 0.7 |",
    ]
