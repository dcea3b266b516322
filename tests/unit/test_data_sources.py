"""Reading parallel text: formats, line ends, and every way in which it can be wrong."""

import gzip
import hashlib
import lzma
import os
from pathlib import Path

import pytest
import zstandard

from data_pipeline.errors import InputError
from data_pipeline.sources import CORPORA, measure, read_lines, read_pairs, resolve

TEXT = "Guten Tag\nein\u2028Segment\r\n\nletzte"
LINES = ["Guten Tag", "ein\u2028Segment", "", "letzte"]
WRITERS = {
    ".txt": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data[:9]) + zstandard.ZstdCompressor().compress(data[9:]),
}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_lines_and_facts(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"corpus{suffix}", WRITERS[suffix](TEXT.encode()))
    assert list(read_lines(path)) == LINES
    facts = measure(path)
    assert facts.lines == 4
    assert facts.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


def test_lines_are_counted_with_and_without_a_final_newline(tmp_path: Path) -> None:
    assert measure(write(tmp_path / "a", "x\ny\n")).lines == 2
    assert measure(write(tmp_path / "b", "x\ny")).lines == 2
    assert list(read_lines(tmp_path / "a")) == ["x", "y"] == list(read_lines(tmp_path / "b"))


def test_lines_longer_than_a_read_stay_whole(tmp_path: Path) -> None:
    long = "ä" * 1_500_000
    path = write(tmp_path / "long", f"{long}\n{long}b\n")
    assert list(read_lines(path)) == [long, long + "b"]
    assert measure(path).lines == 2


@pytest.mark.parametrize(("left", "right"), [("a\nb\nc\n", "x\n"), ("a\n", "x\ny\nz\n")])
def test_sides_of_different_length_name_both_counts(tmp_path: Path, left: str, right: str) -> None:
    source, target = write(tmp_path / "s", left), write(tmp_path / "t", right)
    with pytest.raises(InputError) as caught:
        list(read_pairs(source, target))
    assert f"{source} has {left.count(chr(10))} lines" in str(caught.value)
    assert f"{target} has {right.count(chr(10))}" in str(caught.value)


@pytest.mark.parametrize("read", [measure, lambda path: list(read_lines(path))])
def test_wrong_encoding_names_file_line_and_byte(tmp_path: Path, read: object) -> None:
    path = write(tmp_path / "latin", "gut\nschön\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin, line 2, byte 4 of the line: expected UTF-8, found 0xf6"):
        read(path)


def test_a_character_cut_at_the_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected UTF-8"):
        measure(write(tmp_path / "cut", "schö".encode()[:-1]))


def test_utf_16_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="UTF-16"):
        measure(write(tmp_path / "wide", "some english text\n".encode("utf-16-le")))


def test_missing_empty_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        measure(tmp_path / "nothing")
    with pytest.raises(InputError, match="empty"):
        measure(write(tmp_path / "empty", ""))
    with pytest.raises(InputError, match="is a folder"):
        measure(tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("read", [measure, lambda path: list(read_lines(path))])
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path, suffix: str, read: object) -> None:
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)
    with pytest.raises(
        InputError, match=r"pipe.* cannot be read: expected a regular file, found a named pipe"
    ) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    device = tmp_path / f"device{suffix}"
    device.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="expected a regular file, found a character device"):
        read(device)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    write(tmp_path / "text", TEXT)
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert list(read_lines(tmp_path / "link")) == LINES


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_and_lying_archives_are_refused(tmp_path: Path, suffix: str) -> None:
    whole = WRITERS[suffix](("line of text\n" * 5000).encode())
    for name, data in (("cut", whole[:-6]), ("lie", b"this is plain text\n" * 20)):
        with pytest.raises(InputError, match="damaged"):
            measure(write(tmp_path / f"{name}{suffix}", data))


def test_embedded_paths_stay_inside_the_corpora() -> None:
    assert resolve("embedded:swmsg_ende/train.en.xz") == CORPORA / "swmsg_ende" / "train.en.xz"
    with pytest.raises(InputError, match="leaves the folder"):
        resolve("embedded:../settings.py")
    with pytest.raises(InputError, match="leaves the folder"):
        resolve("embedded:/etc/passwd")
    with pytest.raises(InputError, match="empty name"):
        resolve("")
    with pytest.raises(InputError, match="NUL in its name"):
        resolve("text\0")


def test_lines_across_reads_are_whole_and_faults_are_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"Zeile {n} \u00e4\u2028" + "\u4e2d" * (n % 7) for n in range(60)] + ["", "\r", "letzte\r", "ohne Ende"]
    text = "\r\n".join(lines)
    path = write(tmp_path / "text", text)
    expected = [line.removesuffix("\r") for line in text.split("\n")]
    for size in (1, 2, 3, 7, 64, 1000, 1 << 20):
        monkeypatch.setattr("data_pipeline.sources.READ_SIZE", size)
        assert list(read_lines(path)) == expected, size
        spoilt = write(tmp_path / "spoilt", text.encode().replace(b"Zeile 41", b"Zeile \xff"))
        with pytest.raises(InputError, match=r"spoilt, line 42, byte 7 of the line: expected UTF-8, found 0xff"):
            list(read_lines(spoilt))
