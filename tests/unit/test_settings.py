"""Configuration: layers, overrides, and every fault named at once."""

import time
from pathlib import Path

import pytest

from data_pipeline import settings
from data_pipeline.api import DataConfig, TokenizerConfig
from data_pipeline.command_line import parse_command_line
from data_pipeline.errors import ConfigError
from data_pipeline.settings import (
    Layers,
    build_sections,
    foreign_to,
    load_sections,
    override_tree,
    read_yaml_layers,
    split_overrides,
)
from dist_tfm.config.loading import (
    SECTIONS,
    check_sections,
    config_to_yaml,
    forbidden_changes,
    make_config,
    read_config,
)
from dist_tfm.config.schema import Config

CONFIGS = Path(__file__).parents[2] / "configs"


def load(path: Path, *argv: str) -> Config:
    overrides, rest = split_overrides(argv)
    assert rest == []
    return make_config(load_sections(str(path), overrides, SECTIONS))


def test_a_file_extends_another_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {d_model: 64, heads: 4}\noptim: {eps: 1e-9}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "big.yaml").write_text("extends: ../base.yaml\nmodel: {d_model: 128}\n")
    config = load(tmp_path / "sub" / "big.yaml", "--model.heads=8", "--model.heads", "2", "--train.run_dir=2024")
    assert (config.model.d_model, config.model.heads) == (128, 2), "the last value of a key given twice counts"
    assert config.optim.eps == 1e-9, "YAML 1.1 reads 1e-9 as text; the field's type makes it a number"
    assert config.train.run_dir == "2024", "an override of a text field stays text"


def test_lanes_divide_the_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {micro_batches: 6, lanes: 4}\n")
    sections = load_sections(str(tmp_path / "c.yaml"), [], SECTIONS)
    with pytest.raises(ConfigError, match=r"data\.lanes: expected a divisor of data\.micro_batches=6, found 4"):
        check_sections(sections)


def test_two_misspelt_keys_and_two_wrong_values_are_named_together(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("train: {stepz: 3}\nmodle: {dropout: 0.1}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, "--model.dropout=1.5", "--precision.dtype=fp8")
    text = str(caught.value)
    assert "4 faults" in text
    assert "train.stepz: unknown key (found 3)" in text
    assert "nearest known key is train.steps" in text
    assert "modle.dropout: unknown key" in text
    assert "nearest known key is model.dropout" in text
    assert "model.dropout: expected less than 1, found '1.5', set on the command line" in text
    assert "precision.dtype: expected 'fp32', 'bf16' or 'fp16', found 'fp8'" in text
    assert str(file) in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train: [1, 2]", "expected keys below it"),
        ("- 1", "expected sections with keys"),
        ("train: {steps: true}", "expected no truth value"),
        ("train: {steps: 0}", "greater than or equal to 1"),
        ("schedule: {peak: .nan}", "schedule.peak"),
        ("schedule: {peak: .inf}", "schedule.peak"),
        ("train: {steps: 1.5}", "train.steps"),
        ("a: {b: [", "expected YAML"),
        ("extends: missing.yaml", "does not exist"),
        ("extends: c.yaml", "in a circle"),
        ("extends: [c.yaml]", "expected the name of a file"),
        ("train: &a {x: *a}", "line 1: expected at most 10 levels"),
        ("train: &a [*a]", "line 1: expected at most 10 levels"),
        ("train: {steps: " + "[" * 3000, "expected at most 10 levels, found more$"),
        ("train: {steps: " + "[" * 20 + "]" * 20 + "}", "line 1: expected at most 10 levels"),
        ("1: 2", r"line 1: expected a name as key, found 1 \(int\)"),
        ("train:\n  1: 2", r"line 2: expected a name as key, found 1 \(int\)"),
        ("train: {on: 2}", r"expected a name as key, found on \(bool\)"),
        ("train: {? [a] : 2}", "expected a name as key, found a collection"),
        ("train: {steps: 2024-13-45}", "a value without meaning"),
        ("train: {steps: !!bool maybe}", "a value without meaning"),
        ("train: {steps: !!timestamp soon}", "a value without meaning"),
        ("train: {steps: !!python/name:os.system x}", "expected YAML, found: could not determine a constructor"),
        ("train: {steps: 0x" + "f" * 5000 + "}", "expected a number of at most 100 digits, found 5002"),
        ('train: {run_dir: "\1"}', "special characters are not allowed"),
        ("train: {steps: *" + "a" * 5000 + "}", "found undefined alias"),
        ("train: {run_dir: [" + "x, " * 3000 + "]}", "expected at most 2000 values"),
        ("train: {steps: " + "x" * 5000 + "}", r"found 'x+\.\.\.x+', set"),
        ("train: {" + "x" * 1000 + ": 1}", r"train\.x+\.\.\.x+: unknown key"),
        ("train: " + "x" * 5000, "expected keys below it"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "c.yaml")
    text = str(caught.value)
    assert len(text.replace(str(tmp_path), "")) < 400
    assert text.count("\n") == int(text.startswith("the configuration has 1 fault:")), "one sentence"


BOMBS = {
    "lists": ("&{1} [{0}]", "*{0}"),
    "sections": ("&{1} {{{0}}}", "k{1}: *{0}"),
    "merge keys": ("&{1} {{<<: [{0}]}}", "*{0}"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_aliases_of_aliases_are_refused_before_they_unfold(tmp_path: Path, kind: str) -> None:
    whole, part = BOMBS[kind]
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 10):
        parts = ", ".join(part.format(f"a{level - 1}", number) for number in range(9))
        lines.append(f"a{level}: " + whole.format(parts, f"a{level}"))
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"line \d+: expected at most (2000 values|10 levels), found more") as caught:
        load(tmp_path / "c.yaml")
    assert time.perf_counter() - started < 2
    assert len(str(caught.value)) < 400


def test_a_file_that_is_not_utf_8_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"train: {run_dir: \xe4}")
    with pytest.raises(ConfigError, match=r"expected UTF-8, found byte 0xe4$"):
        load(tmp_path / "c.yaml")


def test_an_anchor_used_soberly_still_works(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train: {steps: 7}\nlog: {every_steps: &n 4}\ncheckpoint: {keep: *n}\n")
    config = load(tmp_path / "c.yaml")
    assert (config.train.steps, config.log.every_steps, config.checkpoint.keep) == (7, 4, 4)


def test_a_missing_file_names_the_bundled_ones() -> None:
    with pytest.raises(ConfigError, match=r"not found.*configs/tiny\.yaml"):
        load(Path("nowhere/else.yaml"))


def test_bundled_configurations_are_found_by_name_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Path("configs/tiny.yaml")) == load(Path("tiny"))


def test_null_lists_and_text_in_overrides() -> None:
    assert override_tree("model.d_k", "null") == {"model": {"d_k": None}}
    assert override_tree("a.b", "[1, 2]") == {"a": {"b": [1, 2]}}
    assert override_tree("a.b", "1e-9") == {"a": {"b": "1e-9"}}
    assert override_tree("train.run_dir", "2024-13-45") == {"train": {"run_dir": "2024-13-45"}}
    for odd in ("[" * 3000, "&a [*a]", "[" * 20 + "]" * 20, "{1: 2}", "0x" + "f" * 5000, "!!bool maybe"):
        assert override_tree("a.b", odd) == {"a": {"b": odd}}, "no plain YAML: its field will refuse the text"
    with pytest.raises(ConfigError, match=r"^--a\.a.*expected --section\.key=VALUE$"):
        override_tree(".".join("a" * 5000), "1")


@pytest.mark.parametrize("following", ["--dry-run", "--train.seed=3", "--train.seed", "--", "--no-such-option"])
def test_an_option_is_never_taken_for_a_value(following: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--train\.run_dir: expected a value, found the option {following}: give it"
    ):
        split_overrides(["--train.run_dir", following, "--train.steps=1"])
    assert split_overrides([f"--train.run_dir={following}"]) == ([("train.run_dir", following)], [])


def test_values_of_their_own_are_taken_and_missing_ones_named() -> None:
    assert split_overrides(["--a.b", "-1", "--dry-run", "--c.d", "x"]) == ([("a.b", "-1"), ("c.d", "x")], ["--dry-run"])
    with pytest.raises(ConfigError, match=r"^--a\.b: expected a value, found nothing: give it as --a\.b=VALUE$"):
        split_overrides(["--a.b"])


PREPARING = {"data": DataConfig, "tokenizer": TokenizerConfig}


def test_sections_of_another_program_are_left_to_it(tmp_path: Path) -> None:
    names = [name for name in SECTIONS if name not in PREPARING]
    assert len(names) > 5
    file = tmp_path / "c.yaml"
    file.write_text("data: {max_length: 9}\n" + "".join(f"{name}: {{nonsense: 1}}\n" for name in (*names, "newcomer")))
    sections = load_sections(str(file), [("optim.epz", "1")], PREPARING, foreign_to(*PREPARING))
    assert sections["data"].max_length == 9
    with pytest.raises(ConfigError, match=r"optim\.nonsense: unknown key"):
        load_sections(str(file), [], PREPARING)


@pytest.mark.parametrize(
    ("name", "key", "nearest"),
    [
        ("dta", "shards", "data.shards"),
        ("Data", "shards", "data.shards"),
        ("DATA", "max_lenght", "data.max_length"),
        ("datas", "batch_tokens", "data.batch_tokens"),
        ("tokeniser", "vocab_size", "tokenizer.vocab_size"),
        ("tokenizers", "vocab_size", "tokenizer.vocab_size"),
        ("data", "vocab_size", "tokenizer.vocab_size"),
    ],
)
def test_a_misspelt_section_is_not_taken_for_another_programs(name: str, key: str, nearest: str) -> None:
    layers = Layers()
    layers.merge({name: {key: 1}}, "in a test")
    with pytest.raises(ConfigError, match=rf"{name}\.{key}: unknown key .*the nearest known key is {nearest}$"):
        build_sections(layers, PREPARING, foreign_to(*PREPARING))


def test_faults_that_span_keys_are_found_together() -> None:
    layers = Layers()
    layers.merge({"model": {"d_model": 65, "heads": 4}, "data": {"batch_tokens": 10, "micro_batches": 8}}, "in a test")
    with pytest.raises(ConfigError) as caught:
        check_sections(build_sections(layers, SECTIONS))
    assert "model.d_model" in str(caught.value)
    assert "model.heads" in str(caught.value)
    assert "data.micro_batches" in str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_bundled_configuration_is_valid_and_survives_writing(path: Path, tmp_path: Path) -> None:
    sections = load_sections(str(path), [], SECTIONS)
    check_sections(sections)
    config = make_config(sections)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_what_may_change_on_resume_and_what_may_not() -> None:
    saved = load(CONFIGS / "tiny.yaml")
    free = load(
        CONFIGS / "tiny.yaml",
        *("--train.steps=9", "--train.validate_every=1", "--train.max_skips=2", "--data.workers=0"),
        *("--parallel.zero_stage=3", "--checkpoint.keep=7", "--log.every_steps=3", "--decode.show=0"),
        *("--launch.threads=1", "--train.activation_checkpointing=every_2", "--train.run_dir=elsewhere"),
        *("--train.compile=true",),
    )
    assert forbidden_changes(saved, free) == []
    bound = load(CONFIGS / "tiny.yaml", "--train.seed=99", "--model.dropout=0.35", "--data.batch_tokens=77")
    assert [key for key, *_ in forbidden_changes(saved, bound)] == ["model.dropout", "data.batch_tokens", "train.seed"]


def test_origins_name_the_file_that_set_a_value(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {d_model: 64, heads: 4}\n")
    (tmp_path / "c.yaml").write_text("extends: base.yaml\nmodel: {heads: 8}\n")
    layers = Layers()
    read_yaml_layers(tmp_path / "c.yaml", layers)
    assert layers.origins["model.d_model"].endswith("base.yaml")
    assert layers.origins["model.heads"].endswith("c.yaml")


@pytest.mark.parametrize(("speaks", "pauses"), [(True, []), (False, [settings.HEAD_START])])
def test_who_leaves_an_error_to_another_process_ends_after_it(
    speaks: bool, pauses: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher kills all others as soon as one has failed: also the one that has not yet said why."""
    waited: list[float] = []
    monkeypatch.setattr("data_pipeline.settings.time.sleep", waited.append)

    def fails() -> int:
        raise ConfigError("decode.beem: unknown key")

    with pytest.raises(SystemExit) as end:
        settings.run_main(fails, lambda _: speaks)
    assert end.value.code == 2
    assert waited == pauses
    assert capsys.readouterr().err == ("error: decode.beem: unknown key\n" if speaks else "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max_lenght=3"], r"unknown: --max_lenght; keys are given as --section\.key=VALUE"),
        (["--max-length", "3"], r"unknown: --max-length \(the key of this name is --data\.max_length\);"),
        (
            ["--vocab_size=9", "--kind=bpe"],
            r"unknown: --vocab_size \(.* is --tokenizer\.vocab_size\), --kind \(.* is --tokenizer\.kind\);",
        ),
        (["corpus.txt"], r"expected options alone, found corpus\.txt"),
    ],
)
def test_what_is_no_option_is_named_with_the_key_that_it_may_mean(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_command_line("prepare.py", "", PREPARING, "tiny", arguments)
