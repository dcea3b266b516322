"""Encoding and the external shuffle: the same pairs whatever the pieces and processes; fair keys; workers that die."""

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import encode
from data_pipeline.api import TokenizerConfig
from data_pipeline.clean import BLANK, CONTROLS, RATIO, TOO_LONG, CleaningReport
from data_pipeline.encode import Encoder, Piece, Rules, encode_pieces, pieces_of
from data_pipeline.errors import InputError, RunError
from data_pipeline.parts import SHUFFLE, EncodedPairs, Part, line_keys, merge_slices
from data_pipeline.ragged import positions_of, starts_of
from data_pipeline.steps import DEFAULT_STEPS, steps_to_json
from data_pipeline.tokenizer import Tokenizer, train_tokenizer

PAIRS = [(f"the number {n} is a number", f"die Zahl {n} ist eine Zahl" + " und mehr" * (n % 3)) for n in range(700)]
PAIRS[5] = ("  \t", "nichts")
PAIRS[6] = ("etwas", "")
PAIRS[7] = ("kurz", "sehr viel laenger " * 10)
PAIRS[8] = ("long " * 60, "lang " * 60)
# On their way to a worker, segments must not be cut where str.splitlines would.
PAIRS[9] = ("one\u2028line", "eine\u2028Zeile")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer((side for pair in PAIRS for side in pair), TokenizerConfig(vocab_size=400)))
    return Rules(str(path), steps_to_json(DEFAULT_STEPS), max_length=50, max_ratio=5.0, shuffle_seed=11)


def encode_to(folder: Path, rules: Rules, size: int, workers: int) -> list[Part]:
    folder.mkdir()
    numbers: list[int] = []
    done: list[int] = []

    def pieces() -> Iterator[Piece]:
        for piece in pieces_of(iter(PAIRS), size):
            numbers.append(piece.number)
            yield piece

    encode_pieces(pieces(), rules, lambda number: folder / f"part-{number}", workers, done.append)
    assert sum(done) == len(PAIRS)
    return [Part(folder / f"part-{number}") for number in numbers]


def texts_of(pairs: EncodedPairs, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    sides = []
    for flat, lengths in ((pairs.source, pairs.source_lengths), (pairs.target, pairs.target_lengths)):
        starts = starts_of(lengths)
        sides.append([tokenizer.decode(flat[a:b].tolist()) for a, b in itertools.pairwise(starts)])
    return list(zip(*sides, strict=True))


def test_pieces_and_processes_change_nothing(tmp_path: Path, rules: Rules) -> None:
    merged = []
    for number, (size, workers) in enumerate(((1000, 0), (90, 0), (64, 2))):
        parts = encode_to(tmp_path / str(number), rules, size, workers)
        report = CleaningReport()
        for part in parts:
            report.add(part.report)
        assert report == CleaningReport(
            read=700, kept=696, rejected={BLANK: 2, RATIO: 1, TOO_LONG: 1}, changed={CONTROLS: 4}
        )
        merged.append(merge_slices([part.between(0, 1 << 64) for part in parts]))
    for field in ("keys", "source", "source_lengths", "target", "target_lengths"):
        for other in merged[1:]:
            assert np.array_equal(getattr(merged[0], field), getattr(other, field)), field
    texts = texts_of(merged[0], Tokenizer.load(Path(rules.tokenizer)))
    kept = [pair for number, pair in enumerate(PAIRS) if number not in (5, 6, 7, 8)]
    kept[5] = ("one line", "eine Zeile")
    assert sorted(texts) == sorted(kept)
    assert texts != kept, "shuffled"


def test_slices_of_key_ranges_are_the_whole(tmp_path: Path, rules: Rules) -> None:
    parts = encode_to(tmp_path / "parts", rules, 150, 0)
    whole = merge_slices([part.between(0, 1 << 64) for part in parts])
    bounds = [0, *whole.keys[[100, 350, 351]].tolist(), 1 << 64]
    ranges = itertools.pairwise(bounds)
    pieces = [merge_slices([part.between(low, high) for part in parts]) for low, high in ranges]
    assert [len(piece.keys) for piece in pieces] == [100, 250, 1, 345]
    for field in ("keys", "source", "source_lengths", "target", "target_lengths"):
        assert np.array_equal(np.concatenate([getattr(p, field) for p in pieces]), getattr(whole, field)), field


def test_a_held_out_split_loses_blank_pairs_only_and_keeps_its_order(rules: Rules) -> None:
    held_out = dataclasses.replace(rules, shuffle_seed=None)
    encoder = Encoder(held_out)
    (piece,) = pieces_of(iter(PAIRS), 1000)
    encoded = encoder.encode(piece)
    pairs, report, texts = encoded.pairs, encoded.report, encoded.texts
    assert report == CleaningReport(read=700, kept=698, rejected={BLANK: 2}, changed={CONTROLS: 4})
    assert texts[:7] == [*PAIRS[:5], (PAIRS[7][0], PAIRS[7][1].strip()), (PAIRS[8][0].strip(), PAIRS[8][1].strip())]
    assert texts_of(pairs, encoder.tokenizer) == texts


def test_keys_are_unique_uniform_and_follow_the_line() -> None:
    keys = line_keys(1, SHUFFLE, np.arange(0, 100000))
    assert len(np.unique(keys)) == len(keys)
    assert np.array_equal(keys[500:700], line_keys(1, SHUFFLE, np.arange(500, 700)))
    # Mean of 100,000 uniform numbers: 0.5 +- 0.0009; five times that is out of reach for a fair generator.
    assert abs((keys / 2.0**64).mean() - 0.5) < 0.005
    order = np.argsort(keys)
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.02
    assert not np.array_equal(keys, line_keys(2, SHUFFLE, np.arange(0, 100000)))
    assert not np.array_equal(keys, line_keys(1, SHUFFLE + 1, np.arange(0, 100000)))


def test_positions_of_ragged_rows() -> None:
    flat = np.arange(100)
    starts, lengths = np.array([10, 50, 3, 7]), np.array([3, 0, 2, 1])
    assert flat[positions_of(starts, lengths)].tolist() == [10, 11, 12, 3, 4, 7]
    assert positions_of(starts[:0], lengths[:0]).tolist() == []


def broken_reader(count: int, fault: Exception) -> Iterator[tuple[str, str]]:
    yield from PAIRS[:count]
    raise fault


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_while_reading_stop_everything(tmp_path: Path, rules: Rules, workers: int) -> None:
    pairs = pieces_of(broken_reader(300, InputError("line 301 is no text")), 50)
    with pytest.raises(InputError, match="line 301"):
        encode_pieces(pairs, rules, lambda number: tmp_path / f"part-{number}", workers, lambda _: None)


def test_errors_in_a_worker_keep_their_sentence(tmp_path: Path, rules: Rules) -> None:
    def nowhere(number: int) -> Path:
        return tmp_path / "no such folder" / f"part-{number}"

    with pytest.raises(RunError, match=r"failed while writing .*no such folder"):
        encode_pieces(pieces_of(iter(PAIRS), 50), rules, nowhere, 2, lambda _: None)


def test_a_killed_worker_is_reported(tmp_path: Path, rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., None] = encode._Worker.write

    def kill_at_third(self: encode._Worker, piece: Piece, path: Path) -> None:
        if piece.number == 3:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        write(self, piece, path)

    monkeypatch.setattr(encode._Worker, "write", kill_at_third)
    with pytest.raises(RunError, match=r"ended unexpectedly \(exit status -9\): run the same command again"):
        encode_pieces(pieces_of(iter(PAIRS), 50), rules, lambda n: tmp_path / f"part-{n}", 2, lambda _: None)
