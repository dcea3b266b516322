"""Configuration: layers, overrides, and every fault named at once."""

from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.settings import (
    Layers,
    build_sections,
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
    assert "precision.dtype: expected 'fp32' or 'bf16', found 'fp8'" in text
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
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "c.yaml")


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
    with pytest.raises(ConfigError, match="expected a value"):
        split_overrides(["--train.steps", "--train.seed=3"])


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
        *("--launch.threads=1", "--train.activation_checkpointing=full", "--train.run_dir=elsewhere"),
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
