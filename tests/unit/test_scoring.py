"""Scores: sacreBLEU's numbers and signatures, refusals, test sets by name, bootstrap, forced decoding."""

import json
import math
import subprocess
import sys
import urllib.error
from collections import Counter
from pathlib import Path

import pytest
import torch
from sacrebleu import utils

from data_pipeline.api import BOS, EOS
from dist_tfm.config.schema import ModelConfig
from dist_tfm.errors import ConfigError, InputError
from dist_tfm.inference.evaluation import Texts, load_texts, read_hypotheses
from dist_tfm.inference.forced import forced_scores
from dist_tfm.inference.scoring import (
    TestSet,
    compare_systems,
    compound_split_bleu,
    corpus_scores,
    refuse_subwords,
    refuse_unequal,
    split_compounds,
    tokenized_bleu,
)
from dist_tfm.inference.test_sets import load_test_set
from dist_tfm.model.initialization import initialize
from dist_tfm.model.transformer import Transformer
from tests.jobs import head

REFERENCES = head("valid.de.xz", 60).splitlines()
SWAPPED = [" ".join(reversed(line.split())) if i % 3 == 0 else line for i, line in enumerate(REFERENCES)]
WORSE = [line[: len(line) // 2] for line in REFERENCES]


def test_scores_and_signatures_are_those_of_the_program_sacrebleu(tmp_path: Path) -> None:
    files = {"ref": REFERENCES, "hyp": SWAPPED}
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "ref", "-i", "hyp", "-m", "bleu", "chrf", "ter", "-w", "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    theirs = [(s["name"], s["score"], s["signature"]) for s in json.loads(done.stdout)]
    ours = [(s.name, round(s.value, 6), s.signature) for s in corpus_scores(SWAPPED, TestSet([REFERENCES]))]
    assert ours == theirs
    assert [name for name, *_ in ours] == ["BLEU", "chrF2", "TER"]
    assert 20 < ours[0][1] < 95, "neither end of the scale, where mistakes would not show"


def test_signatures_tell_references_test_set_and_language() -> None:
    several = corpus_scores(SWAPPED, TestSet([WORSE, REFERENCES], "de", "wmt14", "en-de"))
    assert all(s.signature.startswith("nrefs:2|test:wmt14|lang:en-de|") for s in several)
    assert several[0].value == pytest.approx(corpus_scores(SWAPPED, TestSet([REFERENCES, WORSE]))[0].value)
    assert several[0].value >= corpus_scores(SWAPPED, TestSet([REFERENCES]))[0].value
    chinese = corpus_scores(["我喜欢猫。"], TestSet([["我喜欢狗。"]], "zh"))
    assert "tok:zh" in chinese[0].signature
    assert chinese[0].value > 10, "by words between blanks nothing would match"


@pytest.mark.parametrize("line", ["das Hau@@ s", "Haus@@", "\u2581das \u2581Haus", "a Hau@@\ts"])
def test_subwords_are_refused_and_the_line_is_named(line: str) -> None:
    with pytest.raises(InputError, match=r"out\.de, line 2: expected plain text, found the subword mark") as caught:
        refuse_subwords(["das Haus", line], "out.de")
    assert caught.value.exit_code == 2


def test_text_that_only_looks_a_little_like_subwords_is_scored() -> None:
    lines = ["@@ -1,3 +1,4 @@", "a @@ b", "me@@here", "a_b", "e-mail: me@example.org"]
    refuse_subwords(lines, "out.de")
    [bleu, chrf, *_] = corpus_scores(lines, TestSet([lines], "de"))
    assert (bleu.value, chrf.value) == (pytest.approx(100), pytest.approx(100)), "as they are, nothing taken out"


def test_unequal_and_empty_files_are_refused_with_both_counts() -> None:
    with pytest.raises(InputError, match="hyp has 2 lines but ref has 3"):
        refuse_unequal(["a", "b"], "hyp", ["a", "b", "c"], "ref")
    with pytest.raises(InputError, match="empty"):
        refuse_unequal([], "hyp", [], "ref")


def test_every_file_of_an_evaluation_is_checked(tmp_path: Path) -> None:
    for name, text in {"a": "eins\nzwei\n", "b": "eins\n", "c": "ei@@ ns\nzwei\n"}.items():
        (tmp_path / name).write_text(text)
    a, b, c = (str(tmp_path / name) for name in "abc")
    loaded = load_texts(Texts(a, (a, a), None, None), "de")
    assert (loaded.sources, loaded.test_set.language) == (["eins", "zwei"], "de")
    assert load_texts(Texts(None, (a,), None, "de-zh"), "de").test_set.language == "zh"
    for texts in (Texts(b, (a,), None, None), Texts(None, (a, b), None, None)):
        with pytest.raises(InputError, match=r"b has 1 lines but .*a has 2"):
            load_texts(texts)
    with pytest.raises(InputError, match=r"b has 1 lines but .*a has 2"):
        read_hypotheses(b, loaded)
    for read in (lambda: load_texts(Texts(None, (c,), None, None)), lambda: read_hypotheses(c, loaded)):
        with pytest.raises(InputError, match=r"c, line 1: .*'@@'"):
            read()


@pytest.mark.parametrize(
    ("texts", "translating", "said"),
    [
        (Texts("s", ("r",), "wmt14", "en-de"), True, "leave out --source"),
        (Texts(None, (), "wmt14", None), True, "needs --language-pair"),
        (Texts("s", (), None, None), True, "expected --reference"),
        (Texts(None, ("r",), None, None), True, "needs --source"),
        (Texts("s", ("r",), None, "german"), True, "two languages"),
    ],
)
def test_texts_that_do_not_go_together_are_refused(texts: Texts, translating: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        texts.check(translating)
    Texts(None, ("r",), None, None).check(translating=False)


def multi_bleu(hypotheses: list[str], references: list[str]) -> float:
    """BLEU over tokens between blanks (Papineni et al. 2002), written from the paper."""
    matches, totals = [0] * 4, [0] * 4
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        h, r = hypothesis.split(), reference.split()
        for n in range(4):
            of_h = Counter(tuple(h[i : i + n + 1]) for i in range(len(h) - n))
            of_r = Counter(tuple(r[i : i + n + 1]) for i in range(len(r) - n))
            matches[n] += sum((of_h & of_r).values())
            totals[n] += sum(of_h.values())
    sizes = [sum(len(line.split()) for line in lines) for lines in (hypotheses, references)]
    penalty = min(0.0, 1 - sizes[1] / sizes[0])
    return 100 * math.exp(penalty + sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / 4)


@pytest.mark.parametrize("hypotheses", [SWAPPED, WORSE])
def test_tokenized_bleu_takes_tokens_as_they_stand_and_warns(hypotheses: list[str]) -> None:
    score = tokenized_bleu(hypotheses, TestSet([REFERENCES]))
    assert score.value == pytest.approx(multi_bleu(hypotheses, REFERENCES))
    assert "29.3" in score.warning
    assert "28.6" in score.warning
    assert score.value != pytest.approx(corpus_scores(hypotheses, TestSet([REFERENCES]))[0].value)


def test_compounds_are_split_as_for_the_paper() -> None:
    assert split_compounds("Der Text-Editor, z. B.") == "Der Text ##AT##-##AT## Editor , z . B ."
    assert split_compounds("ab-cd-ef - x") == "ab ##AT##-##AT## cd ##AT##-##AT## ef - x"
    references = ["der alte Text-Editor war hier gut", "ein neuer E-Mail-Dienst kommt"]
    hypotheses = ["der alte Text-Betrachter war hier gut", "ein neuer E-Mail-Server kommt"]
    split = compound_split_bleu(hypotheses, TestSet([references]))
    expected = multi_bleu([split_compounds(h) for h in hypotheses], [split_compounds(r) for r in references])
    assert split.value == pytest.approx(expected)
    assert split.value > corpus_scores(hypotheses, TestSet([references]))[0].value + 1
    assert "not comparable" in split.warning


def test_bootstrap_tells_a_better_system_from_an_equal_one() -> None:
    test_set = TestSet([REFERENCES], "de", "wmt14", "en-de")
    better = compare_systems(SWAPPED, WORSE, test_set, samples=200)
    assert [c.name for c in better] == ["BLEU", "chrF2", "TER"]
    assert all(c.p_value < 0.05 for c in better)
    expected = {s.name: s.value for s in corpus_scores(SWAPPED, test_set)}
    assert {c.name: c.system for c in better} == pytest.approx(expected)
    assert better[0].baseline == pytest.approx(corpus_scores(WORSE, test_set)[0].value)
    assert better[0].baseline < better[0].system
    assert all("bs:200|seed:12345" in c.signature and "test:wmt14" in c.signature for c in better)
    mean, half = better[0].system_interval
    assert mean - half < better[0].system < mean + half
    assert compare_systems(SWAPPED, WORSE, test_set, samples=200) == better
    slightly = [SWAPPED[0] + ".", *SWAPPED[1:]]
    assert compare_systems(slightly, SWAPPED, test_set, samples=200)[0].p_value > 0.05
    equal = compare_systems(SWAPPED, list(SWAPPED), test_set, samples=200)
    assert all(c.p_value == 1.0 and c.system == c.baseline for c in equal)


def test_unknown_test_sets_are_refused_with_near_ones() -> None:
    with pytest.raises(InputError, match="no test set 'wmt1': expected one such as wmt"):
        load_test_set("wmt1", "en-de")
    with pytest.raises(InputError, match=r"no language pair 'en-xx': expected one of .*en-de"):
        load_test_set("wmt14", "en-xx")


@pytest.mark.parametrize("fault", [urllib.error.URLError("no route"), SystemExit(1)])
def test_offline_a_missing_test_set_is_one_error(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise fault

    monkeypatch.setattr(utils.DATASETS["wmt14"], "_outdir", str(tmp_path))
    monkeypatch.setattr(utils.DATASETS["wmt14"], "maybe_download", fail)
    with pytest.raises(InputError, match=r"could not be fetched.*sacrebleu -t wmt14 -l en-de") as caught:
        load_test_set("wmt14", "en-de")
    assert caught.value.exit_code == 2


def test_cached_test_set_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = utils.DATASETS["wmt14"]
    monkeypatch.setattr(dataset, "_outdir", str(tmp_path))
    for field in dataset.fieldnames("en-de"):
        (tmp_path / f"wmt14.en-de.{field}").write_text(f"{field} 1\n{field} 2\n")
    assert load_test_set("wmt14", "en-de") == (["src 1", "src 2"], [["ref 1", "ref 2"]])
    loaded = load_texts(Texts(None, (), "wmt14", "en-de"))
    assert (loaded.test_set.name, loaded.test_set.pair, loaded.test_set.language) == ("wmt14", "en-de", "de")


def model(seed: int) -> Transformer:
    config = ModelConfig(encoder_layers=1, decoder_layers=2, d_model=16, d_ff=32, heads=2, dropout=0.3, norm="pre")
    built = Transformer(config, 30)
    initialize(built, seed)
    with torch.no_grad():
        built.embedding.weight.mul_(4)  # far from uniform
    return built.eval()


def sentences(seed: int, count: int = 13) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 12, (count,), generator=generator).tolist()
    return [torch.randint(4, 30, (n,), generator=generator).tolist() for n in lengths]


def token_log_probabilities(built: Transformer, source: list[int], target: list[int]) -> list[float]:
    """One sentence alone, one token after the other."""
    found = []
    with torch.no_grad():
        for n, token in enumerate([*target, EOS]):
            logits = built.logits(built(torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *target[:n]]])))
            found.append(float(logits[0, -1].double().softmax(-1)[token].log()))
    return found


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_forced_scores_are_sums_over_the_sentence_alone(batch_tokens: int) -> None:
    built, sources, targets = model(1), sentences(2), sentences(3)
    assert [] in targets
    assert [] in sources
    scores = forced_scores([built], sources, targets, torch.device("cpu"), batch_tokens)
    for score, source, target in zip(scores, sources, targets, strict=True):
        expected = token_log_probabilities(built, source, target)
        assert score.log_probability == pytest.approx(sum(expected), rel=1e-5)
        assert score.tokens == len(target) + 1
        assert score.nll == pytest.approx(-sum(expected) / len(expected), rel=1e-5)


def test_forced_scores_of_an_ensemble_average_probabilities() -> None:
    one, other, sources, targets = model(1), model(2), sentences(2), sentences(3)
    cpu = torch.device("cpu")
    alone = forced_scores([one], sources, targets, cpu)
    twice = forced_scores([one, one], sources, targets, cpu)
    assert [s.log_probability for s in twice] == pytest.approx([s.log_probability for s in alone], rel=1e-6)
    both = forced_scores([one, other], sources, targets, cpu)
    for score, source, target in zip(both, sources, targets, strict=True):
        pairs = zip(*(token_log_probabilities(m, source, target) for m in (one, other)), strict=True)
        expected = sum(math.log((math.exp(a) + math.exp(b)) / 2) for a, b in pairs)
        assert score.log_probability == pytest.approx(expected, rel=1e-5)


def test_forced_scores_refuse_dropout_and_unequal_sides() -> None:
    with pytest.raises(ValueError, match="evaluation mode"):
        forced_scores([model(1).train()], [[5]], [[5]], torch.device("cpu"))
    with pytest.raises(ValueError, match="found 1 and 2"):
        forced_scores([model(1)], [[5]], [[5], [6]], torch.device("cpu"))
