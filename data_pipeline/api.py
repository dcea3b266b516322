"""What the data pipeline offers to a trainer: `Batch`, `StatefulLoader`, and the two configuration sections it reads.

Shapes: B sentences in a micro-batch, S padded source length, T padded target length. Tokens count EOS, never pads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from data_pipeline.steps import DEFAULT_STEPS, Steps

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_IDS = {"pad": PAD, "bos": BOS, "eos": EOS, "unk": UNK}
"""Special ids of every tokenizer of this project; index.json records them and they are checked on reading."""

SECTION = ConfigDict(extra="forbid", allow_inf_nan=False)
"""How pydantic checks every section: no unknown key, no infinite or undefined number."""

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class CorpusConfig:
    """An entry of data.corpora: one corpus of a mixture, with shards of its own and the tokenizer of all."""

    __pydantic_config__ = SECTION

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]  # in metrics: share_NAME, epoch_NAME
    shards: str = ""  # folder or URL of its shards; empty: data.shards/NAME
    weight: Annotated[float, Field(gt=0.0)] | None = None  # share of micro-batches, relative to the other weights
    tag: str = ""  # put in front of every source, as in "<2de> Hello": translate wants the same
    valid: bool = True  # whether its held-out pairs are validated on


@dataclass(frozen=True)
class DataConfig:
    """Section `data`: the corpus, its cleaning, its shards (together the preparation's fingerprint), its batches."""

    __pydantic_config__ = SECTION

    # Corpus: parallel text files, one segment a line, plain or .gz/.xz/.zst; `embedded:` paths lie inside the package.
    source_language: str = "en"
    target_language: str = "de"
    train_source: str = "embedded:swmsg_ende/train.en.xz"
    train_target: str = "embedded:swmsg_ende/train.de.xz"
    valid_source: str = "embedded:swmsg_ende/valid.en.xz"
    valid_target: str = "embedded:swmsg_ende/valid.de.xz"
    expected_pairs: NotNegative = 0  # of the training corpus before cleaning; another number is warned of; 0: not known
    # Cleaning of training pairs. The two bounds are those of its steps `length` and `ratio`.
    clean: Steps = DEFAULT_STEPS  # steps in order; see steps.py
    max_length: Positive = 250  # tokens a side, without EOS; longer pairs are rejected (and counted)
    max_ratio: Annotated[float, Field(ge=1.0)] = 5.0  # characters of the longer side over the shorter; see steps.py
    # Shards.
    shards: str = "shards/swmsg_ende"  # a folder; to train on also a URL (http, https, s3, gs, hf, ...)
    shuffle_seed: int = 1
    pairs_per_block: Positive = 4096
    pairs_per_shard: Positive = 1_048_576
    prepare_workers: NotNegative = 0  # processes that encode; 0: one a core. Not part of the fingerprint.
    # Batches.
    batch_tokens: Positive = 25_000  # bound of a step's tokens, for the source and for the target side each
    micro_batches: Positive = (
        8  # M: a step is cut into exactly M micro-batches of at most batch_tokens / M padded tokens
    )
    lanes: Positive = 1  # L, a divisor of M: a rank reads only the lanes it serves; part of the data order
    window_pairs: Positive = 1_000_000  # pairs of a lane planned together
    packing: bool = False  # train on the sentences of a micro-batch laid end to end, without pads; same micro-batches
    workers: NotNegative = 1  # background threads that make batches ready; 0: made when asked for
    # Damaged shards: stop, or skip what cannot be read, up to a share of all training pairs.
    on_error: Literal["stop", "skip"] = "stop"
    most_skipped: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    # Shards behind a URL.
    cache: str = ""  # local folder for what was fetched, shared by all processes of a machine; "": the user's cache
    cache_gigabytes: NotNegative = 100  # bound of the blocks in it; 0: none
    # Mixtures: several corpora in the place of one.
    corpora: tuple[CorpusConfig, ...] = ()
    temperature: Annotated[float, Field(ge=1.0)] = (
        1.0  # shares are tokens^(1 / temperature), where no weights are given
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """Section `tokenizer`: from text to ids, with one vocabulary for both languages or one for each.

    bpe: a SentencePiece BPE that `prepare` trains. sentencepiece: your own model. words: text that is segmented already
    (subword-nmt's @@ is taken out again), by your own vocabulary or the most frequent tokens. ids: numbers already.
    """

    __pydantic_config__ = SECTION

    kind: Literal["bpe", "sentencepiece", "words", "ids"] = "bpe"
    model: str = ""  # sentencepiece: the model's file; words: a vocabulary, one token a line; "": counted
    shared: bool = True  # false: `model` is the source's, the target has its own; the model of the paper shares one
    target_model: str = ""  # like model, for the target side, if not shared
    vocab_size: Annotated[int, Field(ge=300)] = 4000  # bpe: 256 byte pieces + 4 special ids + characters + merges
    character_coverage: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    sample_lines: NotNegative = 4_000_000  # lines sampled (seeded) to train on; 0: all


@dataclass(frozen=True)
class Batch:
    """One micro-batch, padded on the right.

    source [B, S]: tokens EOS PAD...; target_in [B, T]: BOS tokens PAD...; labels [B, T]: tokens EOS PAD... (int64).
    source_lengths [B], target_lengths [B] count EOS. pair_ids [B]: position of each pair in the prepared data.
    index: number of the micro-batch in its step, 0..M-1: its identity, whichever rank trains on it; -1 marks a
    zero-weight micro-batch (one EOS a side, every label PAD, target_lengths 0), which fills a short round.
    corpus: number of the pairs' corpus in a mixture, else 0.
    """

    source: NDArray[np.int64]
    target_in: NDArray[np.int64]
    labels: NDArray[np.int64]
    source_lengths: NDArray[np.int64]
    target_lengths: NDArray[np.int64]
    pair_ids: NDArray[np.int64]
    index: int
    corpus: int = 0

    @property
    def source_tokens(self) -> int:
        """Real source tokens, EOS included."""
        return int(self.source_lengths.sum())

    @property
    def target_tokens(self) -> int:
        """Real target tokens, EOS included: the tokens that the loss is summed over."""
        return int(self.target_lengths.sum())

    @property
    def padded_tokens(self) -> int:
        """Cells of both sides, pads included; 0 for a zero-weight micro-batch."""
        return 0 if self.index < 0 else int(self.source.size + self.labels.size)


def zero_weight_batch() -> Batch:
    """The micro-batch that fills a short round: it runs forward and backward and contributes exactly nothing."""
    one = np.ones((1, 1), dtype=np.int64)
    return Batch(
        source=one * EOS,
        target_in=one * BOS,
        labels=one * PAD,
        source_lengths=np.zeros(1, dtype=np.int64),
        target_lengths=np.zeros(1, dtype=np.int64),
        pair_ids=np.zeros(0, dtype=np.int64),
        index=-1,
    )


@dataclass(frozen=True)
class CorpusPosition:
    """Where one corpus of a mixture stands. taken: micro-batches that each of its lanes has given, counted from the
    start of this window, which is that of the slowest lane: a lane ahead of it may have taken more than the window has.
    """

    epoch: int
    window: int
    taken: tuple[int, ...]


@dataclass(frozen=True)
class Position:
    """Where the next step starts: the loader's whole state. Resuming plans one window and replays nothing.

    Of a mixture: corpora has a position for each, step counts all steps so far, epoch is the lowest of the corpora.
    """

    epoch: int = 0
    window: int = 0
    step: int = 0
    corpora: tuple[CorpusPosition, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """A block of a corpus that cannot be read: its pairs have the ids first_id, first_id + 1, ...; reason: a
    sentence."""

    corpus: int
    block: int
    first_id: int
    pairs: int
    reason: str


class LostBlock(NamedTuple):
    """A block that a run has left out, and its pairs: what is kept of `Unreadable` from attempt to attempt."""

    corpus: NotNegative
    block: NotNegative
    pairs: Positive


@dataclass(frozen=True)
class StepBatches:
    """One step's micro-batches of one data-parallel rank, all ranks having equally many (ceil(M / dp)).

    left_out: pairs that were planned for them and cannot be read; unreadable: blocks of which the other ranks have to
    be told before the step, since they may have been able to read them.
    """

    micro_batches: Sequence[Batch]
    epoch: int
    next_position: Position
    left_out: int = 0
    unreadable: tuple[Unreadable, ...] = ()


class StatefulLoader(Protocol):
    """Endless stream of steps: a pure function of (seed, configuration, corpus, position), not of ranks or workers."""

    def next_step(self) -> StepBatches:
        """The micro-batches of the next step for this rank."""
        ...

    def leave_out(self, step: StepBatches, blocks: Sequence[Unreadable]) -> StepBatches:
        """The step without the pairs of blocks that some rank cannot read; later steps leave them out too. Raises
        InputError if they are too many."""
        ...

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """Lets `next_step` raise StoppedError, in the place of reading on, once asked() says True."""
        ...

    def seek(self, position: Position) -> None:
        """Continue at `position` (of a checkpoint written by any number of ranks)."""
        ...

    def close(self) -> None:
        """Stop background threads."""
        ...
