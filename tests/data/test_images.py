"""Image sets from files of their publishers' layout: what is read is what was written, and damage is named."""

import gzip
import hashlib
import io
import os
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import each
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

import metastable
from metastable.cli.settings import resolve
from metastable.core import InputError
from metastable.data import Dataset, check_labels, load_array, load_images, open_images
from metastable.data import cifar as cifar_module
from metastable.data import images as images_module
from metastable.data.idx import TYPES, read_idx, write_idx
from metastable.data.image_files import FOLDER_VARIABLE, IMAGE_SETS, data_folder
from metastable.data.images import parse_images

RNG = np.random.default_rng(0)
ROWS = 40
DIGITS = RNG.integers(0, 256, (ROWS, 28, 28), dtype=np.uint8)
LABELS = (np.arange(ROWS) % 10).astype(np.uint8)
RECORDS = 6
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


def scaled(pixels: np.ndarray) -> torch.Tensor:
    return torch.tensor(pixels.astype(np.float64) / 127.5 - 1)


def write_mnist(folder: Path, images: np.ndarray = DIGITS, labels: np.ndarray = LABELS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_idx(folder / NAMES[0], images)
    write_idx(folder / NAMES[1], labels)
    return folder


def compress(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


@pytest.fixture
def mnist(tmp_path):
    return write_mnist(tmp_path / "digits")


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Six files of six records instead of ten thousand: (folder, records of the training files)."""
    monkeypatch.setattr(cifar_module, "RECORDS", RECORDS)
    folder = tmp_path / cifar_module.FOLDER
    folder.mkdir()
    records = RNG.integers(0, 256, (36, cifar_module.RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(36) % 10
    names = (*IMAGE_SETS["cifar10"].files["train"], "test_batch.bin")
    for name, part in zip(names, np.split(records, 6), strict=True):
        (folder / name).write_bytes(part.tobytes())
    return folder, records[:30]


# --- the idx codec -------------------------------------------------------------------------------------------

idx_arrays = st.sampled_from(sorted(TYPES.values())).flatmap(
    lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@settings(deadline=None, max_examples=100)
@given(array=idx_arrays, packed=st.booleans())
def test_idx_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.mktemp("idx") / "values"
    write_idx(path, array)
    found = read_idx(compress(path) if packed else path)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@settings(deadline=None, max_examples=50)
@given(cut=st.integers(1, 200), packed=st.booleans())
def test_an_idx_file_cut_anywhere_is_refused(tmp_path_factory, cut, packed):
    path = tmp_path_factory.mktemp("idx") / "values"
    write_idx(path, np.zeros((12, 16), np.uint8))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match="values"):
        read_idx(compress(path) if packed else path)


def test_the_bytes_are_those_of_the_format(tmp_path):
    write_idx(tmp_path / "f", np.array([[1, 2], [3, 258]], np.int16))
    expected = "00 00 0b 02 00000002 00000002 0001 0002 0003 0102"
    assert (tmp_path / "f").read_bytes() == bytes.fromhex(expected)


def test_what_idx_cannot_hold_is_refused(tmp_path):
    with pytest.raises(InputError, match="idx has no type for int64"):
        write_idx(tmp_path / "f", np.arange(3, dtype=np.int64))


@pytest.mark.parametrize(
    "head", [b"", b"\0\0", b"\0\0\x07\x01\0\0\0\1x", b"\1\0\x08\x01\0\0\0\1x", b"\x89PNG\r\n"]
)
def test_a_wrong_magic_number_is_named(tmp_path, head):
    (tmp_path / "f").write_bytes(head)
    with pytest.raises(InputError, match=r"f: is not an idx file: it must begin with 00 00"):
        read_idx(tmp_path / "f")


def test_a_header_that_ends_early_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"\0\0\x08\x03\0\0\0\1")
    with pytest.raises(InputError, match="header of 16 bytes, found 8"):
        read_idx(tmp_path / "f")


def test_plain_files_are_mapped_and_packed_ones_are_not(mnist):
    path = mnist / NAMES[0]
    assert isinstance(read_idx(path), np.memmap)
    assert not isinstance(read_idx(compress(path)), np.memmap)


def test_a_gz_file_that_was_unpacked_under_its_name_is_read(mnist):
    (mnist / NAMES[0]).rename(mnist / f"{NAMES[0]}.gz")
    assert isinstance(read_idx(mnist / f"{NAMES[0]}.gz"), np.memmap)
    assert len(load_images("mnist", mnist)) == ROWS


# --- MNIST ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_what_was_written(mnist, packed):
    if packed:
        for name in NAMES:
            compress(mnist / name)
    data = load_images("mnist", mnist)
    assert data.x.dtype == torch.float32
    assert data.event_shape == (1, 28, 28)
    assert data.classes == tuple("0123456789")
    torch.testing.assert_close(data.x.double(), scaled(DIGITS)[:, None], rtol=0, atol=1e-6)
    assert data.labels is not None
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == LABELS.tolist()


def test_black_is_minus_one_and_white_is_one(tmp_path):
    images = np.zeros((2, 28, 28), np.uint8)
    images[1] = 255
    x = load_images("mnist", write_mnist(tmp_path, images, LABELS[:2])).x
    assert x[0].unique().tolist() == [-1.0]
    assert x[1].unique().tolist() == [1.0]


def test_the_folder_above_or_the_environment_will_do(tmp_path, monkeypatch):
    write_mnist(tmp_path / "MNIST" / "raw")
    whole = load_images("mnist", tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert data_folder() == tmp_path
    assert load_images("mnist").digest == whole.digest == load_array("mnist").digest


def test_the_default_folder_is_in_the_cache(monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert data_folder() == Path("~/.cache/metastable").expanduser()


def test_missing_files_are_named_with_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    for name in IMAGE_SETS:
        with pytest.raises(InputError) as caught:
            load_images(name, tmp_path / "nowhere")
        message = str(caught.value)
        source = IMAGE_SETS[name]
        assert all(file in message for file in source.files["train"])
        assert source.page in message
        assert "which does not exist" in message
        assert str(tmp_path / "cache" / source.folders[0]) in message


def test_a_half_filled_folder_names_what_it_lacks(mnist):
    (mnist / NAMES[1]).unlink()
    with pytest.raises(InputError, match=f"holds {NAMES[0]}, but these files are missing: {NAMES[1]} "):
        load_images("mnist", mnist)


def test_a_file_in_place_of_a_folder(mnist):
    with pytest.raises(InputError, match="give the folder of"):
        load_images("mnist", mnist / NAMES[0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_file_is_named_with_both_sizes(mnist, packed):
    path = mnist / NAMES[0]
    whole = 16 + DIGITS.size
    path.write_bytes(path.read_bytes()[:1000])
    if packed:
        path = compress(path)
    with pytest.raises(InputError, match=rf"{path.name}: is cut short: .* {whole} bytes.*, found 1000"):
        load_images("mnist", mnist)


def test_a_truncated_gzip_file_is_named(mnist):
    packed = compress(mnist / NAMES[0])
    packed.write_bytes(packed.read_bytes()[:5000])
    with pytest.raises(
        InputError, match=rf"{packed.name}: is cut short: .* {16 + DIGITS.size} bytes when unpacked"
    ):
        load_images("mnist", mnist)


def test_a_gzip_file_without_its_checksum_is_refused(mnist):
    packed = compress(mnist / NAMES[0])
    packed.write_bytes(packed.read_bytes()[:-3])
    with pytest.raises(InputError, match=rf"{packed.name}: is cut short within its last bytes"):
        load_images("mnist", mnist)


def test_a_damaged_gzip_file_is_named(mnist):
    packed = compress(mnist / NAMES[0])
    raw = bytearray(packed.read_bytes())
    raw[-6] ^= 1  # of the CRC
    packed.write_bytes(raw)
    with pytest.raises(InputError, match=rf"{packed.name}: is a damaged gzip file"):
        load_images("mnist", mnist)


def test_a_file_that_is_too_long_is_named(mnist):
    with (mnist / NAMES[0]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="is too long"):
        load_images("mnist", mnist)


def test_pictures_of_another_size_are_refused(tmp_path):
    write_mnist(tmp_path, np.zeros((ROWS, 32, 32), np.uint8))
    with pytest.raises(
        InputError, match=r"must hold uint8 pictures of 28 × 28, got uint8 of shape \(40, 32, 32\)"
    ):
        load_images("mnist", tmp_path)


def test_labels_must_be_as_many_as_the_pictures(tmp_path):
    write_mnist(tmp_path, labels=LABELS[:-1])
    with pytest.raises(InputError, match=r"must hold 40 labels of type uint8.*got uint8 of shape \(39,\)"):
        load_images("mnist", tmp_path)


def test_labels_out_of_range_are_placed(tmp_path):
    labels = LABELS.copy()
    labels[7] = 11
    with pytest.raises(InputError, match="labels must be from 0 to 9, got 11 in record 7 "):
        load_images("mnist", write_mnist(tmp_path, labels=labels))


# --- checksums -----------------------------------------------------------------------------------------------


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def test_checksums_are_of_the_unpacked_content(mnist, monkeypatch):
    known = replace(IMAGE_SETS["mnist"], md5={name: md5(mnist / name) for name in NAMES})
    monkeypatch.setitem(images_module.IMAGE_SETS, "mnist", known)
    compress(mnist / NAMES[0])
    assert len(load_images("mnist", mnist, verify=True)) == ROWS
    altered = DIGITS.copy()
    altered[3, 4, 5] ^= 1
    (mnist / f"{NAMES[0]}.gz").unlink()
    write_idx(mnist / NAMES[0], altered)
    assert len(load_images("mnist", mnist)) == ROWS
    with pytest.raises(InputError, match=f"{NAMES[0]}: is not the publisher's"):
        load_images("mnist", mnist, verify=True)


def test_the_files_of_a_sister_set_are_recognised(mnist, monkeypatch):
    sister = replace(IMAGE_SETS["fashion-mnist"], md5={NAMES[1]: md5(mnist / NAMES[1])})
    monkeypatch.setitem(images_module.IMAGE_SETS, "fashion-mnist", sister)
    with pytest.raises(InputError, match="is a file of fashion-mnist, not of mnist"):
        load_images("mnist", mnist)


# --- CIFAR-10 ------------------------------------------------------------------------------------------------


def test_cifar_is_what_was_written(cifar):
    folder, records = cifar
    data = load_images("cifar10", folder)
    assert data.event_shape == (3, 32, 32)
    expected = scaled(records[:, 1:]).view(30, 3, 32, 32)
    torch.testing.assert_close(data.x.double(), expected, rtol=0, atol=1e-6)
    assert data.labels is not None
    assert data.labels.tolist() == records[:, 0].tolist()
    assert len(load_images("cifar10", folder.parent, "test")) == RECORDS


def test_cifar_is_mapped_and_not_copied(cifar):
    images = open_images("cifar10", cifar[0])
    for part in images.parts:
        assert isinstance(part, np.memmap)
        assert part.base is not None
        assert not part.flags.owndata
    assert images.parts[0].nbytes == RECORDS * 3072


def test_a_cifar_file_cut_between_records_is_named(cifar):
    path = cifar[0] / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[: -cifar_module.RECORD])
    expected, found = RECORDS * cifar_module.RECORD, (RECORDS - 1) * cifar_module.RECORD
    with pytest.raises(InputError, match=rf"data_batch_4.bin: must have {expected} bytes .*, found {found}"):
        load_images("cifar10", cifar[0])


def test_whole_cifar_files_have_their_published_length():
    assert cifar_module.RECORDS * cifar_module.RECORD == 30_730_000


def test_label_ten_is_placed(cifar):
    path = cifar[0] / "data_batch_2.bin"
    raw = bytearray(path.read_bytes())
    raw[4 * cifar_module.RECORD] = 10
    path.write_bytes(raw)
    with pytest.raises(
        InputError, match=r"data_batch_2.bin: labels must be from 0 to 9, got 10 in record 4 "
    ):
        load_images("cifar10", cifar[0])


def pack(folder: Path, names: tuple[str, ...]) -> Path:
    path = folder.parent / cifar_module.ARCHIVE
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            raw = (folder / name).read_bytes()
            info = tarfile.TarInfo(f"{cifar_module.FOLDER}/{name}")
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


def test_the_archive_reads_like_its_files(cifar):
    folder, _ = cifar
    whole = load_images("cifar10", folder)
    archive = pack(folder, IMAGE_SETS["cifar10"].files["train"])
    for path in folder.iterdir():
        path.unlink()
    assert load_images("cifar10", archive.parent).digest == whole.digest
    with pytest.raises(InputError, match=r"must hold cifar-10-batches-bin/test_batch.bin"):
        load_images("cifar10", archive.parent, "test")
    with pytest.raises(InputError, match=r"is not the publisher's cifar-10-binary.tar.gz"):
        load_images("cifar10", archive.parent, verify=True)
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(InputError, match="damaged or incomplete archive"):
        load_images("cifar10", archive.parent)


# --- rows, sizes, noise --------------------------------------------------------------------------------------


def test_classes_keep_their_labels_and_their_pictures(mnist):
    data = load_images("mnist", mnist, classes=[2, "3", 6])
    keep = np.isin(LABELS, [2, 3, 6])
    assert data.labels is not None
    assert data.labels.tolist() == LABELS[keep].tolist()
    torch.testing.assert_close(data.x.double(), scaled(DIGITS[keep])[:, None], rtol=0, atol=1e-6)


def test_classes_by_name(cifar):
    data = load_images("cifar10", cifar[0], classes=["frog", "cat"])
    assert data.labels is not None
    assert set(data.labels.tolist()) == {3, 6}


def test_counts_for_each_class_are_drawn_by_seed(mnist):
    drawn = [load_images("mnist", mnist, classes=[2, 3, 6], counts=[4, 2, 1], seed=s) for s in (0, 0, 1)]
    for data in drawn:
        assert data.labels is not None
        assert torch.bincount(data.labels, minlength=10).tolist() == [0, 0, 4, 2, 0, 0, 1, 0, 0, 0]
    assert drawn[0].digest == drawn[1].digest != drawn[2].digest


def test_n_rows_are_drawn_without_replacement(mnist):
    draw = [load_images("mnist", mnist, n=30, seed=s) for s in (0, 0, 1)]
    assert draw[0].digest == draw[1].digest != draw[2].digest
    assert len(draw[0].x.flatten(1).unique(dim=0)) == 30
    whole = load_images("mnist", mnist)
    assert whole.labels is not None
    assert draw[0].labels is not None
    for row, label in zip(draw[0].x, draw[0].labels, strict=True):
        place = int((whole.x == row).flatten(1).all(1).nonzero())
        assert whole.labels[place] == label


def test_shrinking_averages_areas(mnist):
    x = load_images("mnist", mnist, size=14).x
    assert x.shape == (ROWS, 1, 14, 14)
    blocks = scaled(DIGITS).view(ROWS, 14, 2, 14, 2).mean((2, 4))
    torch.testing.assert_close(x[:, 0].double(), blocks, rtol=0, atol=1e-5)
    assert open_images("mnist", mnist, size=16).event_shape == (1, 16, 16)


def test_noise_is_drawn_by_seed_with_its_scale(mnist):
    clean = load_images("mnist", mnist).x
    a, b, c = (load_images("mnist", mnist, noise=0.03, seed=s).x for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    # The relative error of a standard deviation from m values is about 1/√(2m).
    assert abs((a - clean).std().item() / 0.03 - 1) < 5 / (2 * a.numel()) ** 0.5


def test_rows_are_read_on_demand_as_load_images_reads_them(cifar, monkeypatch):
    monkeypatch.setattr(images_module, "BLOCK", 7)
    images, x = open_images("cifar10", cifar[0]), load_images("cifar10", cifar[0]).x
    assert torch.equal(images[3], x[3])
    assert torch.equal(images[-1], x[-1])
    assert torch.equal(images[4:20:3], x[4:20:3])
    index = torch.tensor([29, 0, 13, 13])
    assert torch.equal(images[index], x[index])
    assert torch.equal(images.tensor(), x)
    with pytest.raises(IndexError):
        images[30]


def test_batches_stream_every_row_once(cifar):
    images = open_images("cifar10", cifar[0])
    x = images.tensor()
    in_order = list(images.batches(8))
    assert [len(labels) for _, labels in in_order] == [8, 8, 8, 6]
    assert torch.equal(torch.cat([b for b, _ in in_order]), x)
    shuffled = list(images.batches(8, seed=1))
    rows, labels = torch.cat([b for b, _ in shuffled]), torch.cat([y for _, y in shuffled])
    places = [int((x == row).flatten(1).all(1).nonzero()) for row in rows]
    assert sorted(places) == list(range(30)) != places
    assert torch.equal(images.labels[places], labels)
    again = torch.cat([b for b, _ in images.batches(8, seed=1)])
    assert torch.equal(again, rows)
    noisy = torch.cat([b for b, _ in images.batches(8, noise=0.1)])
    assert abs((noisy - x).std().item() / 0.1 - 1) < 5 / (2 * x.numel()) ** 0.5


@pytest.mark.parametrize("options", [{"noise": 0.1}, {"seed": 1}, {"seed": 1, "noise": 0.1}])
def test_every_pass_has_an_order_and_a_noise_of_its_own_and_can_be_made_again(cifar, options):
    images = open_images("cifar10", cifar[0])
    passes = [torch.cat([b for b, _ in images.batches(8, epoch=e, **options)]) for e in (0, 1, 1)]
    assert torch.equal(passes[1], passes[2])
    assert not torch.equal(passes[0], passes[1])
    if "seed" not in options:  # independent noise: the correlation of n pairs has a standard error of 1/√n
        one, two = ((p - images.tensor()).flatten() for p in passes[:2])
        assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 5 / len(one) ** 0.5
    with pytest.raises(InputError, match="epoch: must be an integer of at least 0, got -1"):
        next(images.batches(8, epoch=-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "val"}, "split: unknown value 'val'"),
        ({"classes": [10]}, "classes: must be labels from 0 to 9 or names of mnist, got 10"),
        ({"classes": [-1]}, "classes: must be labels from 0 to 9"),
        ({"classes": []}, "classes: must be a list of labels or names"),
        ({"classes": "23"}, "classes: must be a list of labels or names"),
        ({"classes": [1, "1"]}, "classes: must be all different"),
        ({"n": 41}, "n: must be an integer from 1 to 40, the rows there are, got 41"),
        ({"n": 0}, "n: must be an integer from 1 to 40"),
        ({"n": 1}, "mnist: must have at least 2 rows"),
        ({"classes": [1], "counts": [5]}, r"counts \(class 1\): must be an integer from 1 to 4"),
        ({"classes": [1, 2], "counts": [3]}, "counts: must be one number for each of 2 classes"),
        ({"n": 3, "counts": [1]}, "counts: must be left out where n is given"),
        ({"size": 0}, "size: must be an integer from 1 to 28"),
        ({"size": 29}, "size: must be an integer from 1 to 28"),
        ({"noise": 1e300}, r"noise: must be at most 1e\+30, got 1e\+300"),
        ({"noise": -0.1}, "noise: must be a finite number of at least 0"),
        ({"noise": float("nan")}, "noise: must be a finite number of at least 0"),
        ({"dtype": torch.int64}, "dtype: must be a floating dtype"),
    ],
)
def test_bad_settings_are_named(mnist, options, message):
    with pytest.raises(InputError, match=message):
        load_images("mnist", mnist, **options)


def test_an_unknown_set_is_named():
    with pytest.raises(InputError, match=r"name: unknown value 'minst' \(did you mean 'mnist'\?\)"):
        load_images("minst")


# --- as text -------------------------------------------------------------------------------------------------


def test_text_means_what_the_arguments_mean(mnist):
    text = f"mnist:{mnist}?split=train&classes=2,3&counts=3,1&noise=0.1&size=7&seed=5&verify=0"
    given = load_images("mnist", mnist, classes=[2, 3], counts=[3, 1], noise=0.1, size=7, seed=5)
    assert load_array(text).digest == given.digest
    assert load_array(f"mnist:{mnist}?n=9", dtype=torch.float64).x.dtype == torch.float64
    assert parse_images("cifar10")["folder"] is None


@each(
    "query, message",
    [
        ("sizes=3", "unknown setting 'sizes' (did you mean 'size'?)"),
        ("n=many", "n must be an integer, got 'many'"),
        ("counts=1,x", "counts must be integers with commas between them, got '1,x'"),
        ("noise=", "noise must be a number, got ''"),
        ("verify=yes", "verify must be 1 or 0, got 'yes'"),
    ],
)
def test_bad_text_is_named(query, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_array(f"mnist:somewhere?{query}")


def test_a_misspelt_set_is_not_a_missing_file_only():
    with pytest.raises(InputError, match="did you mean 'mnist:'"):
        load_array("minst:data")


def test_a_bare_folder_says_how_to_name_a_set(tmp_path):
    with pytest.raises(InputError, match=r"is a folder; .*mnist:FOLDER, .*images:FOLDER"):
        load_array(tmp_path)


# --- labels of a dataset -------------------------------------------------------------------------------------


def test_labels_go_where_their_rows_go(mnist):
    data = load_images("mnist", mnist)
    train, held_out = data.split(0.25, seed=3)
    for part in (train, held_out):
        assert part.classes == data.classes
        assert part.labels is not None
        for row, label in zip(part.x, part.labels, strict=True):
            place = int((data.x == row).flatten(1).all(1).nonzero())
            assert label == LABELS[place]
    assert len(train) + len(held_out) == ROWS


def test_labels_are_part_of_the_digest():
    x = torch.zeros(3, 2)
    plain, a, b = (Dataset.of(x, "x", labels=y) for y in (None, [0, 0, 1], [0, 1, 1]))
    assert len({plain.digest, a.digest, b.digest}) == 3


@each(
    "labels, message",
    [
        ([0, 1], r"one for each of 3 rows, shape \(3,\), got \(2,\)"),
        ([0, 1, 3], "from 0 to 2, got 3 in row 2"),
        ([0, -1, 2], "from 0 to 2, got -1 in row 1"),
        ([0.0, 1.5, 2.0], "integers, got torch.float64, 1.5 in row 1"),
        ([[0], [1], [2]], r"shape \(3,\), got \(3, 1\)"),
    ],
)
def test_bad_labels_are_named(labels, message):
    with pytest.raises(InputError, match=f"labels: must be .*{message}"):
        check_labels(labels, 3, classes=3)


# --- folders of pictures -------------------------------------------------------------------------------------


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_a_folder_of_grey_pictures_by_class(tmp_path):
    for i in range(6):
        save(tmp_path / ("ant" if i % 2 else "bee") / f"{i}.png", DIGITS[i])
    data = load_array(f"images:{tmp_path}")
    assert (data.event_shape, data.classes) == ((1, 28, 28), ("ant", "bee"))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(data.x[:, 0].double(), scaled(DIGITS[[1, 3, 5, 0, 2, 4]]), rtol=0, atol=1e-6)
    assert len(load_array(f"images:{tmp_path}?classes=bee&n=2&size=14")) == 2
    assert len(load_array(f"images:{tmp_path}?n=1", least=1)) == 1
    with pytest.raises(InputError, match="must have at least 2 rows"):
        load_array(f"images:{tmp_path}?n=1")


def test_labels_are_numbered_by_the_names_of_others(tmp_path):
    for i in range(6):
        save(tmp_path / ("ant" if i % 2 else "bee") / f"{i}.png", DIGITS[i])
        save(tmp_path / "bees" / "bee" / f"{i}.png", DIGITS[i])
    bees = load_array(f"images:{tmp_path / 'bees'}")
    there = bees.numbered(("ant", "bee"))
    assert there.labels is not None
    assert (there.labels.tolist(), there.classes) == ([1] * 6, ("ant", "bee"))
    assert bees.numbered(()) is bees
    with pytest.raises(InputError, match="data: classes must be among ant, cow, got bee"):
        bees.numbered(("ant", "cow"))


def test_a_folder_of_colours_without_classes(tmp_path):
    pixels = RNG.integers(0, 256, (3, 8, 10, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        save(tmp_path / f"{i}.png", picture)
    data = load_images("images", tmp_path)
    assert (data.event_shape, data.labels, data.classes) == ((3, 8, 10), None, ())
    torch.testing.assert_close(data.x.double(), scaled(pixels).permute(0, 3, 1, 2), rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="they are not square"):
        load_images("images", tmp_path, size=4)


def test_grey_palettes_and_opaque_alpha_are_grey_pictures(tmp_path):
    grey = Image.fromarray(DIGITS[0])
    opaque = Image.merge("LA", (grey, Image.new("L", grey.size, 255)))
    for name, picture in (("0", grey), ("1", grey.convert("P")), ("2", opaque)):
        picture.save(tmp_path / f"{name}.png")
    data = load_images("images", tmp_path)
    assert data.event_shape == (1, 28, 28)
    assert bool((data.x == data.x[:1]).all())


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_transparent_pictures_are_named(tmp_path, mode):
    save(tmp_path / "0.png", DIGITS[0])
    picture = Image.fromarray(np.where(DIGITS[0] < 200, 0, 255).astype(np.uint8)).convert(mode)
    if "A" in mode:
        picture.putpixel((3, 4), (9,) * (len(mode) - 1) + (0,))
        picture.save(tmp_path / "1.png")
        hidden = 1
    else:
        picture.save(tmp_path / "1.png", transparency=0)
        hidden = int((np.asarray(picture) == 0).sum())
    with pytest.raises(InputError, match=rf"1.png: must be opaque, got {hidden} transparent pixels"):
        load_images("images", tmp_path)


@pytest.mark.parametrize("ending", ["png", "webp"])
def test_pictures_are_turned_as_their_exif_data_say(tmp_path, ending):
    upright = Image.fromarray(DIGITS[0, :20])
    upright.save(tmp_path / f"0.{ending}", lossless=True)
    lying = upright.transpose(Image.Transpose.ROTATE_90)
    exif = lying.getexif()
    exif[0x0112] = 6  # a quarter turn clockwise
    lying.save(tmp_path / f"1.{ending}", exif=exif, lossless=True)
    data = load_images("images", tmp_path)
    assert data.event_shape[1:] == (20, 28)
    assert torch.equal(data.x[0], data.x[1])


def test_a_picture_of_another_size_is_named(tmp_path):
    for i in range(3):
        save(tmp_path / f"{i}.png", DIGITS[i])
    save(tmp_path / "0-odd.png", DIGITS[0, :20])
    with pytest.raises(
        InputError, match=r"0-odd.png: all pictures must have one size, 28 × 28 .*, got 20 × 28"
    ):
        load_images("images", tmp_path)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        load_images("images", tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no picture"):
        load_images("images", tmp_path)
    with pytest.raises(InputError, match="give the folder"):
        load_images("images")
    with pytest.raises(InputError, match="split: must be left out"):
        load_images("images", tmp_path, "test")
    save(tmp_path / "a" / "1.png", DIGITS[0])
    save(tmp_path / "2.png", DIGITS[1])
    with pytest.raises(InputError, match=r"others outside of them, such as 2.png"):
        load_images("images", tmp_path)
    (tmp_path / "2.png").unlink()
    (tmp_path / "a" / "3.png").write_bytes((tmp_path / "a" / "1.png").read_bytes()[:200])
    with pytest.raises(InputError, match=r"3.png: is a damaged picture"):
        load_images("images", tmp_path)
    (tmp_path / "a" / "3.png").write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"3.png: is not a readable picture"):
        load_images("images", tmp_path)
    save(tmp_path / "a" / "3.png", DIGITS[0].astype(np.uint16))
    with pytest.raises(InputError, match=r"3.png: must have 8 bits"):
        load_images("images", tmp_path)


# --- in a training -------------------------------------------------------------------------------------------


def test_an_image_set_trains_and_its_run_remembers_it(mnist):
    source = f"mnist:{mnist}?classes=2,3,6&noise=0.2&size=8"
    run = metastable.fit(None, source, "cd", steps=2, held_out=0.2, evaluate=False)
    assert run.config["event_shape"] == [1, 8, 8]
    assert run.config["data"]["rows"] == 12
    assert run.status == "finished"


def test_channels_that_are_last_are_noted_before_training(tmp_path):
    np.save(tmp_path / "x.npy", RNG.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8))
    job = resolve({"data": str(tmp_path / "x.npy"), "method": "cd"})
    assert "data: shape (40, 16, 16, 3) looks like (N, H, W, C)" in job.notes[0]


def test_pixels_that_never_change_are_noted_before_training(tmp_path):
    images = DIGITS.copy()
    images[:, :4] = 0
    source = f"mnist:{write_mnist(tmp_path, images)}"
    job = resolve({"data": source, "method": "cd"})
    assert "112 of 784 pixels hardly change" in job.notes[0]
    assert job.dataset.name == source
    assert resolve({"data": f"{source}?noise=0.2", "method": "cd"}).notes == ()
    assert resolve({"data": source, "method": "cd", "trainer": {"data_noise": 0.2}}).notes == ()
    bare = {"name": "conv", "reference": "none"}
    assert resolve({"data": source, "method": "cd", "energy": bare}).notes == ()


# --- the real files ------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    FOLDER_VARIABLE not in os.environ, reason=f"{FOLDER_VARIABLE} names no folder of data sets"
)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", list(IMAGE_SETS))
def test_the_published_files(name, split):
    try:
        images = open_images(name, split=split, verify=name != "cifar10")
    except InputError as error:
        if "files are missing" not in str(error):
            raise
        pytest.skip(f"the files of {name} ({split}) are not in the folder that {FOLDER_VARIABLE} names")
    assert len(images) == {"train": 50_000 if name == "cifar10" else 60_000, "test": 10_000}[split]
    counts = torch.bincount(images.labels)
    assert len(counts) == 10
    if name == "mnist":
        assert counts[:3].tolist() == {"train": [5923, 6742, 5958], "test": [980, 1135, 1032]}[split]
    else:
        assert counts.unique().tolist() == [len(images) // 10]
