"""The stages of a preparation: tokenizer and held-out split, slices of the corpus, shards.

Each stage leaves whole files and skips what is there, so that one process can run all of them, or an array of tasks
share the slices out. `prepare.py` decides who may run them.
"""

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.assemble import HeldOutSplit, Layout, make_index, write_train_shards, write_valid_shards
from data_pipeline.clean import CleaningReport, hash_of, hash_of_pair, normalise
from data_pipeline.encode import (
    Cleaner,
    Encoder,
    Piece,
    Rules,
    encode_pieces,
    held_out_filter,
    pieces_of,
    write_hashes,
)
from data_pipeline.errors import InputError
from data_pipeline.fetched import Fetched, fetch, open_fetched
from data_pipeline.files import write_bytes_atomically
from data_pipeline.index import write_index
from data_pipeline.parts import SAMPLE, Part, line_keys
from data_pipeline.prepared import TOKENIZER_FILE, TRAIN, VALID
from data_pipeline.progress import Log, Progress
from data_pipeline.record import Record, read_record, write_record
from data_pipeline.report import describe_rejections, print_report, warn_of_rare_tokens, write_report
from data_pipeline.sides import is_streamed, read_sides
from data_pipeline.slices import Slice, open_slice, read_slice, seal_slice
from data_pipeline.steps import Duplicates, HeldOut, find, pair_filters, steps_to_json
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer_training import learns, make_tokenizer

PAIRS_PER_PIECE = 32_768
"""Size of the pieces that a slice is cut into: what one process encodes, and an interruption loses, at a time."""

WORK_FOLDER = ".work"
SMALL_CORPUS = 200_000
"""Up to so many pairs are encoded without other processes, unless data.prepare_workers asks for them."""

_HELD_OUT_FILE = "held-out-hashes"


class Preparation:
    """One process's work on a folder that is ours and locked."""

    def __init__(self, folder: Path, data: DataConfig, tokenizer: TokenizerConfig, record: Record, log: Log) -> None:
        self._folder = folder
        self._work = folder / WORK_FOLDER
        self._data = data
        self._tokenizer_config = tokenizer
        self._record = record
        self._log = log
        self._layout = Layout(data.pairs_per_block, data.pairs_per_shard)
        self._held_out_split: HeldOutSplit | None = None

    def begin(self) -> Tokenizer:
        """Marks the folder as ours; fetches a streamed corpus; makes the tokenizer; checks the held-out split.

        Raises InputError, OSError.
        """
        if read_record(self._folder) is None:
            write_record(self._folder, self._record)
        for folder in (self._work, self._folder / TRAIN, self._folder / VALID):
            folder.mkdir(exist_ok=True)
        if self._is_streamed:
            fetch(self._read_train, self._work, self._log)
        tokenizer = self._tokenizer()
        self._warn_of_long(self._held_out())
        return tokenizer

    def has_begun(self) -> bool:
        """Whether `begin` has ended."""
        fetched = not self._is_streamed or open_fetched(self._work) is not None
        return fetched and (self._folder / TOKENIZER_FILE).is_file() and self._work.is_dir()

    def encode(self, piece: Slice) -> None:
        """Cleans and encodes a slice of the corpus, or what is missing of it. Raises InputError, RunError, OSError."""
        tokenizer = Tokenizer.load(self._folder / TOKENIZER_FILE)
        folder = piece.folder(self._work)
        content = read_slice(folder)
        if content is not None and content.tokenizer_checksum == tokenizer.checksum:
            return
        folder.mkdir(exist_ok=True)
        names = self._parts(piece, folder, tokenizer)
        seal_slice(folder, names, tokenizer.checksum, find(self._data.clean, Duplicates) is not None)

    def finish(self, slices: Sequence[Slice]) -> None:
        """Merges complete slices into shards; writes the report, then the indexes. Raises InputError, OSError."""
        tokenizer = Tokenizer.load(self._folder / TOKENIZER_FILE)
        train_report, parts = CleaningReport(), list[Part]()
        for piece in slices:
            folder = piece.folder(self._work)
            content = read_slice(folder)
            if content is None or content.tokenizer_checksum != tokenizer.checksum:
                raise InputError(f"{folder} was encoded with another tokenizer: delete it and run its task again")
            train_report.add(content.report)
            parts += open_slice(folder, content)
        if not train_report.kept:
            raise InputError(f"no training pair is left after cleaning ({describe_rejections(train_report)})")
        held_out = self._held_out()
        with Progress("writing shards", train_report.kept, self._log) as progress:
            shards = write_train_shards(parts, self._folder / TRAIN, self._work, self._layout, progress.add)
        fingerprint = self._record.fingerprint
        train = make_index(TRAIN, fingerprint, tokenizer, shards, {})
        valid = make_index(VALID, fingerprint, tokenizer, held_out.shards, held_out.texts)
        splits = {TRAIN: (train_report, train), VALID: (held_out.report, valid)}
        write_report(self._folder, splits, held_out.long, self._data.clean)
        print_report(splits, self._data.clean, self._log)
        self._compare_with_expected(train_report.read)
        if learns(self._tokenizer_config):
            warn_of_rare_tokens(train, tokenizer, self._log)
        write_index(self._folder / VALID, valid)
        write_index(self._folder / TRAIN, train)
        shutil.rmtree(self._work, ignore_errors=True)

    @property
    def _is_streamed(self) -> bool:
        return is_streamed(self._data.train_source)

    def _read_train(self, skip: int) -> Iterator[tuple[str, str]]:
        return read_sides(self._data.train_source, self._data.train_target, skip)

    def _train_pairs(self) -> tuple[Iterator[tuple[str, str]], int]:
        """The training pairs, and how many they are."""
        if not self._is_streamed:
            return self._read_train(0), self._record.corpus["train_source"].lines
        fetched: Fetched | None = open_fetched(self._work)
        if fetched is None:
            raise InputError(f"{self._work} does not hold the whole corpus: run prepare.py --stage tokenizer first")
        return fetched.pairs(), fetched.lines

    def _tokenizer(self) -> Tokenizer:
        path = self._folder / TOKENIZER_FILE
        if not path.is_file():
            config = self._tokenizer_config
            if learns(config):
                self._log(f"training the tokenizer ({config.vocab_size:,} ids)")
            write_bytes_atomically(path, make_tokenizer(self._lines, config))
        return Tokenizer.load(path)

    def _lines(self) -> Iterator[str]:
        """What the tokenizer learns from. Raises InputError if there is nothing."""
        sample = self._sample()
        first = next(sample, None)
        if first is None:
            raise InputError(
                f"no pair of {self._data.train_source} and {self._data.train_target} is left to train a tokenizer on: "
                "data.clean rejects all of them, or all are blank"
            )
        return itertools.chain((first,), sample)

    def _sample(self) -> Iterator[str]:
        """Cleaned lines of both sides, of a seeded sample of the pairs that cleaning keeps (of those that are too long,
        or equal to another, it takes its share as well)."""
        pairs, lines = self._train_pairs()
        share = self._tokenizer_config.sample_lines / (2 * lines) if lines else 0
        # Keys are uniform over 64 bits, so those up to this one make the share.
        highest = (1 << 64) - 1 if share == 0 or share >= 1 else int(share * (1 << 64))
        steps = self._data.clean
        is_held_out = held_out_filter(find(steps, HeldOut), self._held_out_hashes(self._work))
        cleaner = Cleaner(pair_filters(steps, self._data.max_ratio, is_held_out))
        for piece in pieces_of(pairs, PAIRS_PER_PIECE):
            chosen = (line_keys(self._data.shuffle_seed, SAMPLE, piece.lines) <= highest).tolist()
            sides = [list(itertools.compress(side, chosen)) for side in (piece.sources, piece.targets)]
            _, sources, targets = cleaner.clean(Piece(piece.number, piece.lines, *sides), CleaningReport())
            yield from itertools.chain.from_iterable(zip(sources, targets, strict=True))

    def _held_out(self) -> HeldOutSplit:
        if self._held_out_split is None:
            pairs = read_sides(self._data.valid_source, self._data.valid_target)
            pieces, encoder = pieces_of(pairs, PAIRS_PER_PIECE), Encoder(self._rules(None, ""))
            self._held_out_split = write_valid_shards(pieces, encoder, self._folder / VALID, self._layout)
        return self._held_out_split

    def _held_out_hashes(self, folder: Path) -> str:
        """The file in `folder` with the hashes of pairs that must not be trained on; "" without step held_out."""
        step: HeldOut | None = find(self._data.clean, HeldOut)
        if step is None:
            return ""
        path = (folder / _HELD_OUT_FILE).resolve()
        names = [
            (self._data.valid_source, self._data.valid_target),
            *((test.source, test.target) for test in step.test),
        ]
        pairs = (pair for source, target in names for pair in read_sides(source, target))
        cleaned = ((normalise(source), normalise(target)) for source, target in pairs)
        write_hashes(path, (hash_of(pair[0]) if step.by == "source" else hash_of_pair(*pair) for pair in cleaned))
        return str(path)

    def _rules(self, shuffle_seed: int | None, held_out: str) -> Rules:
        return Rules(
            tokenizer=str((self._folder / TOKENIZER_FILE).resolve()),
            steps=steps_to_json(self._data.clean),
            max_length=self._data.max_length,
            max_ratio=self._data.max_ratio,
            shuffle_seed=shuffle_seed,
            held_out=held_out,
        )

    def _parts(self, piece: Slice, folder: Path, tokenizer: Tokenizer) -> list[Path]:
        """Every piece of the slice as a part, in order; parts of an earlier run are kept."""
        numbers: list[int] = []
        pairs, lines = self._train_pairs()

        def path_of(number: int) -> Path:
            return (folder / f"part-{number:06d}").resolve()

        def missing() -> Iterator[Piece]:
            for part in pieces_of(pairs, PAIRS_PER_PIECE, piece.chooses):
                numbers.append(part.number)
                path = path_of(part.number)
                if path.is_file() and Part(path).tokenizer_checksum == tokenizer.checksum:
                    progress.add(len(part.sources))
                else:
                    yield part

        with Progress("encoding", lines // piece.count, self._log) as progress:
            workers = self._workers(lines // piece.count)
            rules = self._rules(self._data.shuffle_seed, self._held_out_hashes(folder))
            encode_pieces(missing(), rules, path_of, workers, progress.add)
        return [path_of(number) for number in numbers]

    def _workers(self, pairs: int) -> int:
        asked = self._data.prepare_workers
        if asked == 0:
            asked = 1 if pairs <= SMALL_CORPUS else len(os.sched_getaffinity(0))
        return asked if asked > 1 else 0

    def _warn_of_long(self, held_out: HeldOutSplit) -> None:
        long = held_out.long
        if long.pairs:
            numbers = ", ".join(str(line) for line in long.lines)
            self._log(
                f"{long.pairs:,} of {held_out.report.kept:,} held-out pairs are longer than data.max_length = "
                f"{self._data.max_length} tokens (the longest has {long.longest:,}; lines {numbers}"
                f"{', ...' if long.pairs > len(long.lines) else ''} of {self._data.valid_source} and its other side): "
                "they stay, and slow every validation down"
            )

    def _compare_with_expected(self, found: int) -> None:
        expected = self._data.expected_pairs
        if expected and found != expected:
            self._log(
                f"warning: the training corpus has {found:,} pairs, data.expected_pairs says {expected:,}: it is "
                "another version, or part of it is missing"
            )


def discard(folder: Path, names: Sequence[str]) -> None:
    """Removes what a preparation has begun, the files called `names` last."""
    for name in (WORK_FOLDER, TRAIN, VALID):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
