"""Files that are damaged, or not what they say: each is refused in one line that names it.

No code of a file runs. The inputs here are harmless: a small compressed zip, a pickle that names a
harmless function, a truncated file, a flipped bit, a wrong shape, a number that is not finite.
"""
import json
import math
import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from helpers import script
from peers import make_model, own_checkpoint, save

from recipes import RECIPES, load_model
from runtime.cli import UserError

WPE = "transformer.wpe.weight"
SIZES = {"block_size": 8, "vocab_size": 96, "n_layer": 1, "n_head": 1, "n_embd": 4}


def good_checkpoint(recipe="gpt2"):
    model = make_model(cls=RECIPES[recipe].model, **SIZES)
    return own_checkpoint(model) | {"recipe": recipe}


def assert_refused(read, path, *arguments):
    """read(path) raises the UserError of one line that names the file."""
    with pytest.raises(UserError) as raised:
        read(path, *arguments)
    line = str(raised.value)
    assert path.name in line
    assert "\n" not in line
    assert len(line) < 1000


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


def flip_bit(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 8
    path.write_bytes(content)


def pack_again(path, method):
    """The same records, and correct sums, in a zip that is packed with `method`."""
    packed = path.with_name("packed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return packed


# ----------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("content", [b"", b"hello\n" * 100, b"PK\x03\x04", bytes(1000)])
def test_a_file_that_is_no_checkpoint_is_refused(content, tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    assert_refused(load_model, path)


def test_a_zip_of_something_else_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "no model")
    assert_refused(load_model, path)


def test_a_checkpoint_of_torchs_oldest_format_which_has_no_sums_is_refused(tmp_path):
    path = save(tmp_path / "a.pt", good_checkpoint(), _use_new_zipfile_serialization=False)
    assert_refused(load_model, path)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_truncated_checkpoint_is_refused(share, tmp_path):
    path = save(tmp_path / "a.pt", good_checkpoint())
    truncate(path, int(share * path.stat().st_size))
    assert_refused(load_model, path)


def test_a_flipped_bit_in_any_record_is_refused(tmp_path):
    path = save(tmp_path / "a.pt", good_checkpoint())
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size > 0]
        contents = [archive.read(record) for record in records]
    assert len(records) > 10

    for content in contents:
        at = path.read_bytes().index(content) + len(content) // 2
        flip_bit(path, at)
        assert_refused(load_model, path)
        flip_bit(path, at)
    load_model(path)


def test_a_compressed_checkpoint_is_refused(tmp_path):
    path = save(tmp_path / "a.pt", good_checkpoint())
    load_model(pack_again(path, zipfile.ZIP_STORED))
    assert_refused(load_model, pack_again(path, zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("function", [len, os.getcwd, print])
def test_a_pickle_that_names_a_function_is_refused(function, tmp_path):
    checkpoint = good_checkpoint()
    checkpoint["model_config"]["gelu"] = function
    assert_refused(load_model, save(tmp_path / "a.pt", checkpoint))


@pytest.mark.parametrize("content", [torch.zeros(3), [1, 2], {}, {"model": {}}])
def test_a_checkpoint_of_another_content_is_refused(content, tmp_path):
    assert_refused(load_model, save(tmp_path / "a.pt", content))


@pytest.mark.parametrize("key", ["model", "model_config", "recipe"])
def test_a_checkpoint_without_one_of_its_entries_is_refused(key, tmp_path):
    checkpoint = good_checkpoint()
    del checkpoint[key]
    assert_refused(load_model, save(tmp_path / "a.pt", checkpoint))


@pytest.mark.parametrize("name, value", [
    ("n_layer", 2),
    ("n_layer", 0),
    ("n_layer", True),
    ("n_head", 3),
    ("n_embd", -4),
    ("n_embd", "4"),
    ("n_embd", 4.0),
    ("block_size", 9),
    ("vocab_size", 95),
    ("gelu", "swish"),
])
def test_a_config_that_the_weights_contradict_or_no_model_has_is_refused(name, value, tmp_path):
    checkpoint = good_checkpoint()
    checkpoint["model_config"][name] = value
    assert_refused(load_model, save(tmp_path / "a.pt", checkpoint))


def test_an_unknown_recipe_is_refused(tmp_path):
    checkpoint = good_checkpoint() | {"recipe": "gpt9"}
    assert_refused(load_model, save(tmp_path / "a.pt", checkpoint))


@pytest.mark.parametrize("value", [
    torch.zeros(7, 4),                          # a wrong shape
    torch.zeros(8, 4, dtype=torch.int64),       # no floats
    torch.zeros(8, 4).to_sparse(),
    torch.full((8, 4), math.nan),
    torch.full((8, 4), -math.inf),
    3,
])
@pytest.mark.parametrize("recipe, name", [("gpt2", WPE), ("frontier", "transformer.wte.weight")])
def test_a_tensor_that_does_not_fit_or_is_not_finite_is_refused(recipe, name, value, tmp_path):
    checkpoint = good_checkpoint(recipe)
    checkpoint["model"][name] = value
    assert_refused(load_model, save(tmp_path / "a.pt", checkpoint))


def test_a_missing_and_an_additional_tensor_are_refused(tmp_path):
    missing = good_checkpoint()
    del missing["model"][WPE]
    assert_refused(load_model, save(tmp_path / "missing.pt", missing))

    additional = good_checkpoint()
    additional["model"]["transformer.extra"] = torch.zeros(3)
    assert_refused(load_model, save(tmp_path / "additional.pt", additional))


def test_a_head_that_differs_from_its_tied_embedding_is_refused(tmp_path):
    checkpoint = good_checkpoint()
    checkpoint["model"]["lm_head.weight"] = torch.zeros(96, 4)
    assert_refused(load_model, save(tmp_path / "a.pt", checkpoint))


def test_a_command_given_a_damaged_checkpoint_prints_one_line_and_exits_with_2(tmp_path):
    path = save(tmp_path / "a.pt", good_checkpoint())
    truncate(path, 1000)

    result = script("sample.py", "--model", path)

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("sample.py: ")
    assert "a.pt" in result.stderr
    assert result.stderr.count("\n") == 1


def test_control_characters_of_a_file_do_not_reach_the_terminal(tmp_path):
    checkpoint = good_checkpoint()
    checkpoint["model"]["\x1b[2J\u202e"] = torch.zeros(3)
    path = save(tmp_path / "a.pt", checkpoint)

    result = script("sample.py", "--model", path)

    assert result.returncode == 2
    assert result.stderr.removesuffix("\n").isprintable()


# ----------------------------------------------------------------------- Hugging Face folders

@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "exported"
    make_model(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good_folder, tmp_path):
    """A copy of an export, which a test may damage."""
    return shutil.copytree(good_folder, tmp_path / "exported")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_truncated_file_of_a_folder_is_refused(name, folder):
    truncate(folder / name, 100)
    assert_refused(load_model, folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_of_a_folder_is_refused(name, folder):
    (folder / name).unlink()
    assert_refused(load_model, folder)


@pytest.mark.parametrize("name, value", [
    ("n_layer", 2),
    ("n_layer", None),
    ("n_head", 3),
    ("n_embd", "4"),
    ("n_positions", 9),
    ("vocab_size", 95),
])
def test_a_folders_config_that_the_weights_contradict_is_refused(name, value, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    assert_refused(load_model, folder)


def test_a_number_that_is_not_finite_in_a_folder_is_refused(folder):
    not_a_number = np.float32(math.nan).tobytes()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + not_a_number)
    assert_refused(load_model, folder)


@pytest.mark.parametrize("recipe", ["gpt2", "frontier"])
def test_code_in_a_folder_is_not_run(recipe, tmp_path):
    make_model(cls=RECIPES[recipe].model, **SIZES).save_pretrained(tmp_path)
    trace = tmp_path / "trace"
    (tmp_path / "modeling_modern.py").write_text(f"open({str(trace)!r}, 'w')")
    assert load_model(tmp_path).recipe == recipe
    assert not trace.exists()
