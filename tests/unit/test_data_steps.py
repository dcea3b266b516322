"""Cleaning steps: what each rejects, how a list of them is written and checked, how duplicates are found."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.api import DataConfig
from data_pipeline.clean import CleaningReport, hash_of, hash_of_pair
from data_pipeline.encode import Cleaner, held_out_filter, pieces_of, write_hashes
from data_pipeline.errors import ConfigError
from data_pipeline.parts import EncodedPairs, Part, write_part
from data_pipeline.settings import load_sections
from data_pipeline.slices import Slice, duplicate_keys, parse_slice
from data_pipeline.steps import (
    DEFAULT_STEPS,
    RATIO_FREE_CHARACTERS,
    Blank,
    Characters,
    Digits,
    HeldOut,
    Identical,
    ParallelText,
    Ratio,
    pair_filters,
    steps_from_json,
    steps_to_json,
)


def test_blank_and_ratio() -> None:
    assert Blank().rejects("", "etwas")
    assert Blank().rejects("something", "")
    assert not Blank().rejects("a", "b")
    assert not Ratio.filter(5.0)("OK", "In Ordnung, gemacht"), "short sides are free of the ratio"
    free = RATIO_FREE_CHARACTERS
    assert not Ratio.filter(2.0)("a" * free, "b")
    assert Ratio.filter(2.0)("a" * (free + 1), "b")
    assert Ratio.filter(2.0)("b", "a" * (free + 1))
    assert not Ratio.filter(5.0)("a" * 50, "b" * 10)
    assert Ratio.filter(5.0)("a" * 51, "b" * 10)


def test_characters_bound_each_side() -> None:
    step = Characters(least=2, most=4)
    assert [step.rejects("ab", side) for side in ("a", "ab", "abcd", "abcde")] == [True, False, False, True]
    assert [step.rejects(side, "ab") for side in ("a", "abcde")] == [True, True]


def test_identical_sides() -> None:
    assert Identical().rejects("Copyright", "COPYRIGHT")
    assert Identical().rejects("\u00df 1", "SS 1")
    assert not Identical().rejects("Copyright", "Urheberrecht")
    assert [Identical(longer_than=2).rejects(text, text) for text in ("OK", "abc")] == [False, True]


@pytest.mark.parametrize(
    ("source", "target", "differ"),
    [
        ("no digits", "keine Ziffern", 0),
        ("1,000.5 km", "1.000,5 km", 0),
        ("on 12/31", "am 31.12.", 0),
        ("page 3", "Seite", 1),
        ("page 12", "Seite 13", 2),
        ("\u0663 books", "3 Buecher", 0),  # an Arabic-Indic three
        ("22", "2", 1),
    ],
)
def test_digits_are_compared_as_a_bag(source: str, target: str, differ: int) -> None:
    for one, other in ((source, target), (target, source)):
        assert [Digits(tolerance=t).rejects(one, other) for t in range(4)] == [t < differ for t in range(4)]


@pytest.mark.parametrize("by", ["pair", "source"])
def test_held_out_pairs_are_found_by_pair_or_by_source(tmp_path: Path, by: str) -> None:
    test = [("one", "eins"), ("two", "zwei")]
    write_hashes(tmp_path / "hashes", (hash_of(s) if by == "source" else hash_of_pair(s, t) for s, t in test))
    rejects = held_out_filter(HeldOut(by=by), str(tmp_path / "hashes"))  # type: ignore[arg-type]
    assert rejects("one", "eins")
    assert rejects("one", "ein") == (by == "source")
    assert not rejects("three", "eins")
    assert hash_of_pair("a b", "c") != hash_of_pair("a", "b c")


def test_steps_run_in_the_order_of_the_list_and_count_a_pair_once() -> None:
    pairs = [("", "leer"), ("same 1", "same 1"), ("page 1", "Seite 2"), ("  page\u00a01", "Seite 1"), ("e\u0301", "x")]
    (piece,) = pieces_of(iter(pairs), 10)
    counted = {}
    for order in ((Identical(), Digits()), (Digits(), Identical())):
        report = CleaningReport()
        steps = (*DEFAULT_STEPS[:3], *order)
        rows, sources, targets = Cleaner(pair_filters(steps, 5.0, lambda s, t: False)).clean(piece, report)
        assert (rows, sources, targets) == ([3, 4], ["page 1", "\u00e9"], ["Seite 1", "x"])
        assert report.changed == {"nfc": 1, "controls": 1}
        counted[order[0].step] = report.rejected
    assert counted == {
        "identical": {"blank": 1, "identical": 1, "digits": 1},
        "digits": {"blank": 1, "digits": 1, "identical": 1},
    }
    swapped = Cleaner(pair_filters((Blank(), Digits(), Characters(least=7)), 5.0, lambda s, t: False))
    report = CleaningReport()
    swapped.clean(piece, report)
    assert report.rejected == {"blank": 1, "digits": 1, "characters": 3}, "the first step that rejects a pair counts it"


def clean_of(value: str) -> DataConfig:
    data = load_sections("tiny", [("data.clean", value)], {"data": DataConfig}, lambda _: True)["data"]
    assert isinstance(data, DataConfig)
    return data


def test_a_name_stands_for_a_step_with_its_defaults() -> None:
    data = clean_of("[nfc, controls, blank, {step: digits, tolerance: 2}, held_out, length, duplicates]")
    assert [step.step for step in data.clean] == [
        "nfc", "controls", "blank", "digits", "held_out", "length", "duplicates",
    ]  # fmt: skip
    assert data.clean[3] == Digits(tolerance=2)
    assert repr(data.clean) == "(nfc, controls, blank, {step: digits, tolerance: 2}, held_out, length, duplicates)"
    assert steps_from_json(steps_to_json(data.clean)) == data.clean
    test = HeldOut(test=(ParallelText("a", "b"),))
    assert steps_from_json(steps_to_json((*DEFAULT_STEPS[:3], test)))[3] == test
    assert DataConfig().clean == DEFAULT_STEPS == clean_of("[nfc, controls, blank, ratio, length]").clean


FAULTS = {
    "[nfc, controls, blank, nonsense]": "expected one of 'nfc', .*'duplicates' \\(at 4\\), found",
    "[nfc, controls, blank, {step: digits, tolerence: 2}]": r"no such key \(at 4\.digits\.tolerence\), found 2",
    "[nfc, controls, blank, {step: digits, tolerance: -1}]": r"greater than or equal to 0 \(at 4\.digits\.tolerance\)",
    "[nfc, controls, ratio]": "expected a list with blank, which every corpus goes through",
    "[nfc, controls, blank, length, digits]": "expected this order: nfc, controls, blank, digits, length",
    "[nfc, controls, blank, ratio, ratio]": "expected every step once, not ratio again",
    "ratio": "expected a list, found 'ratio'",
}


@pytest.mark.parametrize("value", FAULTS)
def test_a_wrong_list_is_one_clear_fault(value: str) -> None:
    with pytest.raises(ConfigError, match=FAULTS[value]) as caught:
        clean_of(value)
    assert str(caught.value).count("\n") == 1
    assert "data.clean: expected" in str(caught.value)


def test_a_slice_is_chosen_by_the_cleaned_source() -> None:
    sources = [f"sentence {n}" for n in range(300)]
    chosen = [[s for s in sources if Slice(i, 3).chooses(s)] for i in range(3)]  # type: ignore[misc]
    assert sorted(itertools.chain(*chosen)) == sorted(sources)
    assert all(60 < len(part) < 140 for part in chosen)
    assert [Slice(i, 3).chooses("  sentence\u00a07 ") for i in range(3)] == [  # type: ignore[misc]
        Slice(i, 3).chooses("sentence 7")  # type: ignore[misc]
        for i in range(3)
    ], "duplicates meet, however they are spelt"
    assert Slice(0, 1).chooses is None


@pytest.mark.parametrize("text", ["", "1", "3/3", "-1/3", "a/3", "1/b", "1/0", "1/2/3", "0.5/2", "0/99999999999"])
def test_tasks_are_numbered_from_0(text: str) -> None:
    assert parse_slice("2/3") == Slice(2, 3)
    with pytest.raises(ValueError, match=r"expected i/n with i from 0 to n - 1"):
        parse_slice(text)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 70), st.randoms())
def test_duplicates_are_all_but_the_lowest_key(
    tmp_path_factory: pytest.TempPathFactory, contents: list[int], parts: int, at_once: int, chance: object
) -> None:
    # Hashes at both ends of their range and in the middle, shared by several pairs in several parts.
    values = np.array([0, 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1], dtype=np.uint64)
    keys = list(range(1, len(contents) + 1))
    chance.shuffle(keys)  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("parts")
    for number in range(parts):
        own = np.array(keys[number::parts], dtype=np.uint64)
        one = np.ones(len(own), dtype=np.uint8)
        pairs = EncodedPairs(own, one, one, one, one)
        write_part(folder / str(number), pairs, values[contents[number::parts]], CleaningReport(), "x")
    opened = [Part(folder / str(number)) for number in range(parts)]
    found = duplicate_keys(opened, at_once).tolist()
    first = {content: min(k for k, c in zip(keys, contents, strict=True) if c == content) for content in contents}
    assert found == sorted(set(keys) - set(first.values()))
    left = [Part(folder / str(number), np.array(found, dtype=np.uint64)) for number in range(parts)]
    assert sorted(np.concatenate([part.keys for part in left]).tolist()) == sorted(first.values())
    for part in left:
        assert part.between(0, 1 << 64).keys.tolist() == part.keys.tolist()
        assert part.between(3, 20).keys.tolist() == [key for key in part.keys.tolist() if 3 <= key < 20]


def test_every_step_shows_its_own_reason() -> None:
    from data_pipeline.clean import CHANGES, REASONS
    from data_pipeline.report import reason_of

    steps = clean_of("[nfc, controls, blank, characters, ratio, identical, digits, held_out, length, duplicates]").clean
    assert [reason_of(step) for step in steps] == [*CHANGES, *REASONS]
    assert all(dataclasses.is_dataclass(step) and type(step).__doc__ for step in steps)
