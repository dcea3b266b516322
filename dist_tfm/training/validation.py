"""Validation: the loss over exactly the held-out pairs, and BLEU of a greedily decoded sample of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import sacrebleu
import torch

from data_pipeline.api import Batch
from data_pipeline.tokenizer import Tokenizer
from dist_tfm.config.schema import DecodeConfig
from dist_tfm.engine.base import DoesNotFitError, Engine, LossSums
from dist_tfm.errors import RunError
from dist_tfm.inference.greedy import greedy
from dist_tfm.metrics.meter import perplexity
from dist_tfm.metrics.writers import Console
from dist_tfm.parallel.topology import Topology

SHOWN_CHARACTERS = 120
"""Of each text that is shown: a model that has learned little repeats a word until it is stopped."""


@dataclass(frozen=True)
class HeldOut:
    """The validation set as one rank sees it.

    batches: this rank's share, equally many on every rank (filled with zero-weight ones); pairs: their number over all
    ranks; sources and references: the plain text of all pairs, by pair id; corpora: number and name of each corpus of a
    mixture that is validated on.
    """

    batches: Sequence[Batch]
    pairs: int
    sources: Sequence[str]
    references: Sequence[str]
    corpora: Mapping[int, str] = field(default_factory=dict)


def sample_ids(pairs: int, wanted: int) -> list[int]:
    """`wanted` pair ids spread evenly over the validation set: the same ones at every validation."""
    wanted = min(wanted, pairs)
    return [i * pairs // wanted for i in range(wanted)]


class Validator:
    """Runs one validation; every rank calls it at the same steps.

    averaged: whether the engine keeps a moving average of the weights, whose loss is then reported too.
    """

    def __init__(
        self,
        engine: Engine,
        held_out: HeldOut,
        tokenizer: Tokenizer,
        topology: Topology,
        decode: DecodeConfig,
        console: Console,
        averaged: bool = False,
    ) -> None:
        self._engine, self._held_out, self._tokenizer = engine, held_out, tokenizer
        self._topology, self._decode, self._console = topology, decode, console
        self._averaged = averaged
        self._sample = sample_ids(held_out.pairs, decode.valid_sentences)

    def run(self, step: int, epoch: int) -> dict[str, Any]:
        """The validation line of `step`: loss (smoothed), nll and perplexity per target token, BLEU of the sample;
        loss, nll and perplexity of the weights' moving average under valid_ema_*. BLEU is left out, and the reason
        said, where a rank has no memory for a whole model."""
        record = {"step": step, "epoch": epoch, **self._losses()}
        if self._averaged:
            with self._engine.averaged_weights():
                of_average = self._losses()
            record |= {f"valid_ema_{key}": of_average[f"valid_{key}"] for key in ("loss", "nll", "ppl")}
        if self._sample:
            try:
                record |= {"valid_bleu": self._bleu(step), "valid_decoded": len(self._sample)}
            except DoesNotFitError as reason:
                self._console.say(f"step {step}: no BLEU: {reason}")
        return record

    def _losses(self) -> dict[str, Any]:
        world, batches = self._topology.world, self._held_out.batches
        sums = [self._engine.evaluate(batch) for batch in batches]
        mine = sum(len(b.pair_ids) for b in batches) if self._topology.leads_replica else 0
        pairs, tokens = world.sum_ints([mine, sum(s.target_tokens for s in sums)])
        if pairs != self._held_out.pairs:
            raise RunError(f"validation covered {pairs} pairs over all ranks, expected exactly {self._held_out.pairs}")
        loss, nll = world.sum_floats([sum(s.loss for s in sums), sum(s.nll for s in sums)])
        return {
            "valid_loss": loss / tokens,
            "valid_nll": nll / tokens,
            "valid_ppl": perplexity(nll / tokens),
            "valid_pairs": pairs,
            "valid_tokens": tokens,
            **self._by_corpus(sums),
        }

    def _by_corpus(self, sums: Sequence[LossSums]) -> dict[str, float]:
        """valid_nll_NAME of each corpus of a mixture; nothing if there is but one."""
        numbers = sorted(self._held_out.corpora)
        if not numbers:
            return {}
        mine = list(zip(self._held_out.batches, sums, strict=True))
        of = [[s for batch, s in mine if batch.corpus == number and batch.index >= 0] for number in numbers]
        tokens = self._topology.world.sum_ints([sum(s.target_tokens for s in corpus) for corpus in of])
        nll = self._topology.world.sum_floats([sum(s.nll for s in corpus) for corpus in of])
        return {
            f"valid_nll_{self._held_out.corpora[number]}": total / count
            for number, total, count in zip(numbers, nll, tokens, strict=True)
        }

    def _bleu(self, step: int) -> float:
        """sacreBLEU of the sample, on every rank. The ranks of a replica hold the same batches and share out each one's
        sentences."""
        model = self._engine.plain_module()
        wanted, replica = np.asarray(self._sample), self._topology.axes.model
        decoded: dict[str, str] = {}
        for batch in self._held_out.batches:
            rows = np.flatnonzero(np.isin(batch.pair_ids, wanted))[replica.rank :: replica.size]
            if len(rows) == 0:
                continue
            width = int(batch.source_lengths[rows].max())
            source = torch.from_numpy(batch.source[rows, :width]).to(self._topology.device)
            outputs = greedy(model, source, max_extra=self._decode.max_extra)
            for row, ids in zip(rows, outputs, strict=True):
                decoded[str(int(batch.pair_ids[row]))] = self._tokenizer.decode(ids)
        texts: dict[str, str] = {}
        for part in self._topology.world.gather(cast(Any, decoded)):
            texts.update(cast(dict[str, str], part))
        hypotheses = [texts[str(i)] for i in self._sample]
        references = [self._held_out.references[i] for i in self._sample]
        self._show(step, hypotheses, references)
        return float(sacrebleu.corpus_bleu(hypotheses, [references]).score)

    def _show(self, step: int, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        shown = min(self._decode.show, len(self._sample))
        if shown:
            self._console.say(f"held-out samples at step {step}:")
        for k in range(shown):
            i = k * len(self._sample) // shown
            self._console.say(f"  source      {_cut(self._held_out.sources[self._sample[i]])}")
            self._console.say(f"  translation {_cut(hypotheses[i])}")
            self._console.say(f"  reference   {_cut(references[i])}")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
