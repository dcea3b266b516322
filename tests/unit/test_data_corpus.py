"""The embedded corpus: what it holds, how large it is, and that its licences travel with it."""

from data_pipeline.clean import normalise
from data_pipeline.sources import CORPORA, read_lines, read_pairs

FOLDER = CORPORA / "swmsg_ende"
SIZES = {"train": 17_325, "valid": 400, "test": 700}
LICENCES = {
    "home-assistant": "home-assistant-frontend.txt",
    "jupyterlab": "jupyterlab-language-pack.txt",
    "login": "login.txt",
    "node-red": "node-red.txt",
    "poedit-common": "poedit-common.txt",
    "postgresql-15": "postgresql-15.txt",
    "python3-django": "python3-django.txt",
    "python3-django-horizon": "python3-django-horizon.txt",
    "subversion": "subversion.txt",
    "sudo": "sudo.txt",
    "typescript": "typescript.txt",
}


def test_sizes_and_text() -> None:
    for split, size in SIZES.items():
        pairs = list(read_pairs(FOLDER / f"{split}.en.xz", FOLDER / f"{split}.de.xz"))
        assert len(pairs) == size
        assert all(normalise(source) and normalise(target) for source, target in pairs)


def test_no_held_out_sentence_is_trained_on() -> None:
    train = set(read_lines(FOLDER / "train.en.xz"))
    for split in ("valid", "test"):
        assert not train & set(read_lines(FOLDER / f"{split}.en.xz"))


def test_every_source_has_its_licence_and_is_in_the_readme() -> None:
    tags = {tag for split in SIZES for tag in read_lines(FOLDER / f"{split}.src.xz")}
    assert tags == set(LICENCES)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for tag, name in LICENCES.items():
        text = (FOLDER / "licences" / name).read_text(encoding="utf-8")
        assert len(text) > 1000, name
        assert name in readme
        assert f"`{tag}`" in readme
    assert {path.name for path in (FOLDER / "licences").iterdir()} == {*LICENCES.values(), "subversion-NOTICE.txt"}
    apache = (FOLDER / "licences" / "node-red.txt").read_text(encoding="utf-8")
    assert "END OF TERMS AND CONDITIONS" in apache


def test_the_corpus_stays_under_a_megabyte() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 1_000_000
