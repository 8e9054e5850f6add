"""runtime/shards.py: what is written, what is read, and what is no shard."""
import errno
import json
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import refused

from config import Config
from runtime import shards
from runtime.cli import RunError, UserError
from runtime.dataloader import TokenDataset, read_data
from runtime.shards import (
    count_tokens,
    list_shards,
    manifest_to_continue,
    read_shard,
    shard_names,
    unfinished,
    write_parts,
    write_shard,
)

TOKENS = np.arange(100, dtype=np.uint16)


# ------------------------------------------------------------------------- our own and the peers'

@pytest.mark.parametrize("name", ["a_val_000000.npy", "a_val_000000.bin"])
def test_a_shard_is_written_as_its_tokens_come_in_either_format(name, tmp_path):
    parts = [TOKENS[:5], TOKENS[5:6], TOKENS[6:6], TOKENS[6::3]]
    expected = np.concatenate(parts)
    write_parts(tmp_path / name, len(expected), iter(parts))
    assert count_tokens(tmp_path / name) == len(expected)
    assert read_shard(tmp_path / name).tolist() == expected.tolist()


def test_a_npy_is_numpys(tmp_path):
    write_shard(tmp_path / "a_val_000000.npy", TOKENS)
    found = np.load(tmp_path / "a_val_000000.npy")
    assert found.dtype == np.uint16
    assert found.tolist() == TOKENS.tolist()


def test_a_bin_is_llm_cs(tmp_path):
    write_shard(tmp_path / "a_val_000000.bin", TOKENS)
    data = (tmp_path / "a_val_000000.bin").read_bytes()
    assert np.frombuffer(data[:1024], "<i4").tolist() == [20240520, 1, 100] + [0] * 253
    assert np.frombuffer(data[1024:], "<u2").tolist() == TOKENS.tolist()


def write_nanogpt(folder):
    """The two files of nanoGPT's prepare.py."""
    TOKENS.tofile(folder / "train.bin")
    TOKENS[:20].tofile(folder / "val.bin")


def test_nanogpts_two_files_are_the_shards_of_their_folder(tmp_path):
    write_nanogpt(tmp_path)
    for split, tokens in (("train", TOKENS), ("val", TOKENS[:20])):
        [path] = list_shards(tmp_path, split)
        assert count_tokens(path) == len(tokens)
        assert read_shard(path).tolist() == tokens.tolist()


def test_nanogpts_two_files_are_trained_on(tmp_path):
    write_nanogpt(tmp_path)
    data = read_data(Config(data=tmp_path, sequence_length=9))
    assert data.train.total == 11
    assert data.val.read(0, 1).tolist() == [TOKENS[:10].tolist()]


def test_a_token_of_nanogpts_files_above_the_vocabulary_is_refused(tmp_path):
    write_nanogpt(tmp_path)
    np.array([50257] * 30, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match="train.bin.*50257"):
        read_data(Config(data=tmp_path, sequence_length=9))


# ------------------------------------------------------------------------- names

def test_the_shards_of_a_split_are_listed_in_order(tmp_path):
    names = ["b_train_000002.npy", "a_train_000003.bin", "train_000001.npy",
             "tiny_shakespeare_train.bin", "b_val_000000.npy", "tiny_shakespeare_val.bin"]
    others = ["train.npy", "b_train_000001.npy.tmp", "b_train_x.npy", "btrain_000001.npy",
              "mytrain.bin", "notes_train.txt"]
    for name in names + others:
        (tmp_path / name).touch()
    assert [path.name for path in list_shards(tmp_path, "train")] == sorted(names[:4])
    assert [path.name for path in list_shards(tmp_path, "val")] == names[4:]


@pytest.mark.parametrize("name", [
    "._x_train_000001.npy", "._train.bin", ".x_train_000001.npy", "._x_train_000001.bin"])
def test_hidden_files_are_no_shards(name, tmp_path):
    # A Mac leaves one beside each file that it copies to another disk.
    (tmp_path / name).write_bytes(b"\0\5\x16\7" * 20)
    assert shard_names(tmp_path) == []


@pytest.mark.parametrize("folder, command", [
    ("edu_fineweb10B", "`python fineweb.py`"),
    ("fineweb10B", "`python fineweb.py --pretokenized 17`"),
    ("data/company", "`python fineweb.py --input YOUR_TEXT --out data/company`"),
    ("my data", "`python fineweb.py --input YOUR_TEXT --out 'my data'`"),
])
def test_a_folder_without_shards_is_refused_with_the_command_that_makes_its_own(
        folder, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(lambda: list_shards(folder, "train"), folder, command)
    Path(folder).mkdir(parents=True)
    refused(lambda: list_shards(folder, "val"), folder, command)


@pytest.mark.parametrize("split, other, remedy", [
    ("train", "val", "--eval_only"), ("val", "train", "--val_every 0")])
def test_a_folder_of_one_split_is_refused_without_a_way_that_is_refused_too(
        split, other, remedy, tmp_path):
    """fineweb.py would not go on in a folder that has shards of other text."""
    write_shard(tmp_path / f"x_{other}_000000.npy", TOKENS)
    line = refused(lambda: list_shards(tmp_path, split), tmp_path, remedy)
    assert f"--out {tmp_path}" not in line


# ------------------------------------------------------------------------- other programs

LLAMA_TOKENS = np.array([128_000, 9906, 1917] * 50, dtype="<u4")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize("dtype", ["<u4", "<i4"])
def test_tokens_of_32_bits_by_nanogpts_names_are_refused_with_their_conversion(
        name, dtype, tmp_path):
    """Read as 16 bits each second one would be 0, and the loss half of what it is."""
    (TOKENS + 40_000).astype(dtype).tofile(tmp_path / name)
    line = refused(lambda: count_tokens(tmp_path / name), name, "32")
    assert converted(line, tmp_path, name.removesuffix(".bin")) == (TOKENS + 40_000).tolist()


def test_tokens_of_a_tiny_vocabulary_are_not_taken_for_halves_of_others(tmp_path):
    """The four letters of DNA, say."""
    tokens = np.arange(200, dtype="<u2") % 4
    tokens.tofile(tmp_path / "train.bin")
    assert read_shard(tmp_path / "train.bin").tolist() == tokens.tolist()
    assert count_tokens(tmp_path / "train.bin") == 200


def converted(line, folder, split):
    """The tokens of the shard that the line of Python in a message makes."""
    new = folder / "made"
    code = line[line.index("import os"):].replace("'NEW", f"'{new}")
    exec(code, {})
    [path] = list_shards(new, split)
    return read_shard(path).tolist()


def test_a_conversion_ends_where_a_token_is_not_gpt2s(tmp_path, monkeypatch):
    tokens = TOKENS.astype("<u4")
    tokens[90] = 50257
    tokens.tofile(tmp_path / "train.bin")
    monkeypatch.setattr(shards, "SAMPLE", 80)
    line = refused(lambda: count_tokens(tmp_path / "train.bin"), "train.bin")
    with pytest.raises(AssertionError):
        converted(line, tmp_path, "train")


@pytest.mark.parametrize("name", ["train.bin", "x_train_000001.bin", "a.npy", "a.ds"])
def test_tokens_of_another_tokenizer_are_refused_without_a_conversion(name, tmp_path):
    LLAMA_TOKENS.tofile(tmp_path / name)
    line = refused(lambda: count_tokens(list_shards(tmp_path, "train")[0]), name, "128000")
    assert "import" not in line


@pytest.mark.parametrize("written, name", [
    ("a_train_000001.bin", "train.bin"), ("a_train_000001.npy", "train.bin"),
    ("a_train_000001.npy", "b_train_000001.bin"), ("a_train_000001.bin", "b_train_000001.npy"),
    ("a_train_000001.npy", "tokens.npy"), ("a_train_000001.bin", "tokens.bin")])
def test_a_shard_by_another_name_is_refused_with_the_name_that_it_needs(written, name, tmp_path):
    write_shard(tmp_path / written, TOKENS)
    os.rename(tmp_path / written, tmp_path / name)
    line = refused(lambda: count_tokens(list_shards(tmp_path, "train")[0]), name)
    right = line.split()[-1]
    os.rename(tmp_path / name, tmp_path / right)
    [path] = list_shards(tmp_path, "train")
    assert read_shard(path).tolist() == TOKENS.tolist()


@pytest.mark.parametrize("names", [
    ["00000_00000_shuffled.ds", "00000_00000_shuffled.ds.index"],       # datatrove's
    ["a_text_document.bin", "a_text_document.idx"],                     # Megatron's
    ["part-0-00000.npy", "part-0-00000.csv.gz"],                        # dolma's, as OLMo reads
    ["x_val_000000.npy"], ["x_val_000000.bin"],                         # renamed
])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_raw_tokens_of_other_programs_are_refused_with_their_conversion(names, dtype, tmp_path):
    tokens = np.arange(1000, 2000).astype(dtype)
    tokens.tofile(tmp_path / names[0])
    for name in names[1:]:
        (tmp_path / name).write_bytes(b"MMIDIDX\0")
    line = refused(lambda: count_tokens(list_shards(tmp_path, "val")[0]), names[0])
    assert converted(line, tmp_path, "val") == tokens.tolist()


def test_other_files_are_no_tokens(tmp_path):
    for name in ("pytorch_model.bin", "._a.npy", "a.idx", "a.ds.index"):
        (tmp_path / name).write_bytes(b"PK\3\4" * 10)
    refused(lambda: list_shards(tmp_path, "train"), "python fineweb.py")


# ------------------------------------------------------------------------- damage

@pytest.mark.parametrize("name", ["x_train_000001.npy", "x_train_000001.bin"])
@pytest.mark.parametrize("length", [0, 5, 60, -2])
def test_a_shard_that_is_cut_off_is_refused(name, length, tmp_path):
    path = tmp_path / name
    write_shard(path, TOKENS)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=name):
        read_shard(path)


def test_a_bin_of_nanogpt_with_half_a_token_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\1\0\2")
    with pytest.raises(UserError, match="train.bin"):
        read_shard(tmp_path / "train.bin")


@pytest.mark.parametrize("array", [
    np.zeros(5, np.int32), np.zeros((5, 2), np.uint16), np.zeros(0, np.uint16), np.zeros(5)])
def test_an_array_that_is_no_tokens_is_refused(array, tmp_path):
    np.save(tmp_path / "x_train_000001.npy", array)
    with pytest.raises(UserError, match="x_train_000001.npy"):
        read_shard(tmp_path / "x_train_000001.npy")


def test_objects_in_a_npy_are_not_loaded(tmp_path):
    np.save(tmp_path / "x_train_000001.npy", np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(UserError, match="x_train_000001.npy"):
        read_shard(tmp_path / "x_train_000001.npy")


@pytest.mark.parametrize("data", [
    b"version https://git-lfs.github.com/spec/v1\n",
    TOKENS.tobytes(),                               # without a header, as OLMo's tokens are
])
def test_a_file_of_another_kind_is_refused(data, tmp_path):
    (tmp_path / "x_train_000001.npy").write_bytes(data)
    with pytest.raises(UserError, match="x_train_000001.npy"):
        read_shard(tmp_path / "x_train_000001.npy")


def test_a_shard_that_is_gone_is_an_error_that_names_it(tmp_path):
    with pytest.raises((FileNotFoundError, UserError), match="x_train_000001.npy"):
        read_shard(tmp_path / "x_train_000001.npy")


# ------------------------------------------------------------------------- an unfinished folder

def write_folder(folder, **manifest):
    """Shards of both splits, and a manifest of these values."""
    write_shard(folder / "x_train_000001.npy", TOKENS)
    write_shard(folder / "x_val_000000.npy", TOKENS)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_an_unfinished_folder_has_a_warning(tmp_path):
    write_folder(tmp_path, complete=False, shards=[])
    warning = unfinished(tmp_path)
    assert str(tmp_path) in warning
    assert "fineweb.py" in warning


@pytest.mark.parametrize("manifest", [
    {"complete": True, "shards": []}, {"pretokenized": "kjj0/fineweb10B-gpt2", "shards": []}, {}])
def test_a_finished_folder_or_another_programs_manifest_has_no_warning(manifest, tmp_path):
    write_folder(tmp_path, **manifest)
    assert unfinished(tmp_path) == ""


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_manifest_that_is_none_of_ours_has_no_warning(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    assert unfinished(tmp_path) == ""


@pytest.mark.parametrize("name", ["x_train_000001.npy", "x_train_000001.bin"])
def test_a_shard_that_is_longer_than_its_header_says_is_refused(name, tmp_path):
    path = tmp_path / name
    write_shard(path, TOKENS)
    path.write_bytes(path.read_bytes() + b"\1\0")
    with pytest.raises(UserError, match=name):
        read_shard(path)


# ------------------------------------------------------------------------- disks that go away

FORMATS = pytest.mark.parametrize("name", ["x_train_000001.npy", "x_train_000001.bin"])


@pytest.mark.parametrize("first, count, expected", [
    (0, 5, TOKENS[:5]), (3, 4, TOKENS[3:7]), (98, 50, TOKENS[98:]), (100, 5, []),
    (90, None, TOKENS[90:]),
])
@FORMATS
def test_a_part_of_a_shard_is_read(name, first, count, expected, tmp_path):
    write_shard(tmp_path / name, TOKENS)
    assert read_shard(tmp_path / name, first, count).tolist() == list(expected)


@FORMATS
def test_a_shard_is_read_where_files_cannot_be_mapped(name, tmp_path, monkeypatch):
    """As on FUSE with direct I/O. And where the disk goes away a map would be a SIGBUS."""
    def no_map(*arguments, **options):
        raise OSError(errno.ENODEV, "No such device")

    write_shard(tmp_path / name, TOKENS)
    monkeypatch.setattr(mmap, "mmap", no_map)
    dataset = TokenDataset([tmp_path / name], 9)
    assert dataset.read(0, 1).tolist() == [TOKENS[:10].tolist()]
    assert count_tokens(tmp_path / name) == 100


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs /proc/self/mem")
@FORMATS
def test_a_shard_that_cannot_be_read_is_not_called_damaged(name, tmp_path):
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(OSError) as error:
        read_shard(tmp_path / name)
    assert error.value.errno == errno.EIO
    assert error.value.filename == str(tmp_path / name)


def test_a_shard_that_becomes_shorter_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """np.fromfile would return fewer tokens."""
    write_shard(tmp_path / "x_train_000001.npy", TOKENS)
    monkeypatch.setattr(shards, "find_tokens", lambda file: (128, 101))
    with pytest.raises(UserError, match="x_train_000001.npy"):
        read_shard(tmp_path / "x_train_000001.npy")


def test_a_shard_that_was_listed_and_is_not_there_is_the_disks_failure(tmp_path):
    with pytest.raises(RunError, match="x_train_000001.npy.*the mount"):
        TokenDataset([tmp_path / "x_train_000001.npy"], 9)


def test_a_folder_of_shards_that_has_lost_its_manifest_says_so(tmp_path):
    write_shard(tmp_path / "x_train_000001.npy", TOKENS)
    with pytest.raises(UserError, match=rf"{tmp_path}.*manifest\.json is missing"):
        manifest_to_continue(tmp_path, {"version": 5})


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs /proc/self/mem")
def test_a_manifest_that_cannot_be_read_is_not_called_damaged(tmp_path):
    write_shard(tmp_path / "x_train_000001.npy", TOKENS)
    (tmp_path / "manifest.json").symlink_to("/proc/self/mem")
    for read in (lambda: unfinished(tmp_path), lambda: manifest_to_continue(tmp_path, {"a": 1})):
        with pytest.raises(OSError) as error:
            read()
        assert error.value.filename == str(tmp_path / "manifest.json")
