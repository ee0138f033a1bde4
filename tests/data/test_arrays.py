"""What gets through is finite and floating; what does not is named by place and value."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import each
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metastable.core import InputError
from metastable.data import Dataset, Standardiser, check_data, load_array

ROWS = np.array([[0.5, -1.0], [2.0, 3.25], [4.0, -0.125]])


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- check_data ---------------------------------------------------------------------------------------


@each(
    "kind", ["f2", "f4", "f8", ">f4", ">f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", "?", "g"]
)
def test_every_kind_of_number_becomes_float(kind):
    array = np.array([[0, 1], [1, 0], [1, 1]], dtype=kind)
    assert check_data(array).dtype == torch.float32
    assert check_data(array).tolist() == [[0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_tensors_of_every_kind(dtype):
    x = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert torch.equal(check_data(x, dtype=torch.float64), x.double())


def test_views_are_read_as_they_look():
    base = np.arange(24.0).reshape(4, 6)
    assert check_data(base[::-1, ::2]).tolist() == base[::-1, ::2].tolist()
    assert check_data(torch.from_numpy(base).t()).is_contiguous()
    base.flags.writeable = False
    check_data(base).add_(1)
    assert base[0, 0] == 0


def test_one_dimension_is_rows_of_one_number():
    assert check_data(np.arange(3)).tolist() == [[0.0], [1.0], [2.0]]
    assert check_data(torch.zeros(5, 1, 8, 8)).shape == (5, 1, 8, 8)


def test_parameters_come_back_detached():
    assert not check_data(torch.nn.Parameter(torch.zeros(2, 2))).requires_grad


@each(
    "bad, rule",
    [
        (np.float64(3), "a single number"),
        (np.zeros((1, 2)), "at least 2 rows"),
        (np.zeros(0), "at least 2 rows"),
        (np.zeros((3, 0)), "at least one number in a row"),
        (np.array([["a", "b"], ["c", "d"]]), "must hold numbers, got dtype <U1"),
        (np.array([[1, None], [2, 3]], dtype=object), "must hold numbers, got dtype object"),
        (np.array(["2024-01-01", "2024-01-02"], dtype="M8[D]"), "must hold numbers"),
        (np.zeros(3, dtype=[("a", "f4")]), "must hold numbers"),
        (np.zeros((2, 2), dtype=complex), "must hold numbers"),
        (torch.zeros(2, 2, dtype=torch.complex64), "must be real"),
        (torch.eye(3).to_sparse(), "must be a dense tensor"),
        (np.ma.masked_equal(ROWS, 2.0), "no masked values"),
        ([[1.0], [2.0, 3.0]], "rows of equal length"),
    ],
)
def test_refusals_name_the_rule(bad, rule):
    with pytest.raises(InputError, match=re.escape(rule)) as caught:
        check_data(bad, "mine")
    assert str(caught.value).startswith("mine: ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_is_counted_and_placed(value):
    x = ROWS.copy()
    x[1, 1] = x[2, 0] = value
    with pytest.raises(InputError, match=r"got 2 NaN or infinite of 6 values, the first at row 1, column 1"):
        check_data(x)


def test_non_finite_in_an_image_is_placed():
    x = torch.zeros(4, 1, 2, 3)
    x[3, 0, 1, 2] = torch.nan
    with pytest.raises(InputError, match=r"row 3, index \(0, 1, 2\)"):
        check_data(x)


def test_a_value_too_large_for_the_dtype_is_not_called_infinite():
    with pytest.raises(InputError, match=r"must fit in torch.float32, got values up to 1e\+300"):
        check_data(ROWS * 1e300 / 4)
    assert float(check_data(ROWS * 1e300, dtype=torch.float64).max()) == 4e300


def test_integer_dtype_is_refused():
    with pytest.raises(InputError, match="dtype: must be a floating dtype"):
        check_data(ROWS, dtype=torch.int64)


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)))
def test_accepts_exactly_the_finite_arrays_of_two_rows(array):
    good = bool(np.isfinite(array).all()) and array.shape[0] >= 2
    if not good:
        with pytest.raises(InputError):
            check_data(array)
        return
    x = check_data(array)
    assert x.shape[0] == array.shape[0]
    assert x.dim() >= 2
    assert np.array_equal(x.numpy().ravel(), array.ravel())


# --- files --------------------------------------------------------------------------------------------


def test_npy_round_trip(tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    data = load_array(tmp_path / "a.npy", dtype=torch.float64)
    assert data.x.tolist() == ROWS.tolist()
    assert data.name == "a.npy"
    assert data.toy is None
    assert load_array(str(tmp_path / "a.npy")).event_shape == (2,)


@pytest.mark.parametrize("names", [["whatever"], ["y", "x"], ["labels", "data"], ["data", "x"]])
def test_npz_takes_the_only_array_or_x_or_data(tmp_path, names):
    arrays = {name: ROWS if name in ("x", "whatever") or "x" not in names else ROWS + 1 for name in names}
    arrays = {
        name: (np.zeros((2, 2)) if name in ("y", "labels") else value) for name, value in arrays.items()
    }
    np.savez(tmp_path / "a.npz", **arrays)
    assert load_array(tmp_path / "a.npz").x.tolist() == ROWS.tolist()


def test_npz_says_which_arrays_it_holds(tmp_path):
    np.savez(tmp_path / "a.npz", train=ROWS, test=ROWS)
    with pytest.raises(InputError, match="it holds train, test"):
        load_array(tmp_path / "a.npz")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.PKL", "a.npy", "a.npz"])
def test_no_file_runs_code(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError):
        load_array(tmp_path / name)
    np.save(tmp_path / "object.npy", np.array([Bomb(), Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="not a readable array file"):
        load_array("object.npy")
    assert not Path("exploded").exists()


def test_a_tensor_file_is_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"runs the code in it; save the array with numpy.save"):
        load_array("model.pt")


@pytest.mark.parametrize("ending", [".npy", ".npz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_array_files(tmp_path, ending, share):
    path = tmp_path / f"a{ending}"
    (np.save if ending == ".npy" else np.savez)(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match="not a readable array file"):
        load_array(path)


CSV_TEXT = "0.5,-1.0\n2,3.25\n4,-1.25e-1\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", CSV_TEXT),
        ("a.csv", "\ufeff" + CSV_TEXT),
        ("a.csv", "height,width\n" + CSV_TEXT),
        ("a.csv", '\ufeff"the height","width, mm"\r\n' + CSV_TEXT.replace("\n", "\r\n")),
        ("a.csv", "\n" + CSV_TEXT.replace("\n", "\n\n")),
        ("a.csv", CSV_TEXT.rstrip("\n")),
        ("a.csv", CSV_TEXT.replace(",", " , ")),
        ("a.TSV", "h\tw\n" + CSV_TEXT.replace(",", "\t")),
    ],
)
def test_tables_with_and_without_header(tmp_path, name, text):
    assert load_array(written(tmp_path, name, text), dtype=torch.float64).x.tolist() == ROWS.tolist()


def test_a_single_column_is_rows_of_one_number(tmp_path):
    assert load_array(written(tmp_path, "a.csv", "x\n1\n2\n")).x.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3,blue\n", r"row 3, column 2 \('b'\): 'blue' is not a number"),
        ("1,2\n3,blue\n", r"row 2, column 2: 'blue' is not a number"),
        ("1,blue\n3,4\n", r"row 1, column 2: 'blue' is not a number"),
        ("a,b\n1,\n", r"row 2, column 2 \('b'\): the cell is empty"),
        ("a;b\n1;2\n", "separate the cells with commas"),
        ("a,b\n1,2\n3\n", "row 3 has 1 cells, but the first row has 2"),
        ("a,b\n", "at least 2 rows, got shape \\(0, 2\\)"),
        ("", "at least 2 rows"),
        (
            "a,b,c\n1,2,3\n1,nan,inf\n,1,2\n",
            r"row 4, column 1 \('a'\): the cell is empty; drop or fill such rows",
        ),
        (
            "a,b,c\n1,2,3\n1,nan,inf\n1,nan,2\n",
            r"got 3 NaN or infinite of 9 values, 2 in 'b', 1 in 'c', the first in row 2 below the header; drop",
        ),
        ("1,nan\n2,3\n", r"the first at row 0, column 1 \(counting from 0\): nan"),
        (",a\n0,5\n1,6\n", r"column 1 has no name and only counts the rows; save with to_csv\(index=False\)"),
    ],
)
def test_tables_name_the_cell(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_array(written(tmp_path, "a.csv", text))


def test_a_binary_table_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe1,2\n")
    with pytest.raises(InputError, match="not a text table in UTF-8"):
        load_array(tmp_path / "a.csv")


@settings(max_examples=50, deadline=None)
@given(
    array=hnp.arrays(
        np.float64,
        st.tuples(st.integers(2, 5), st.integers(1, 4)),
        elements=st.floats(allow_nan=False, allow_infinity=False),
    ),
    header=st.booleans(),
)
def test_csv_round_trip(tmp_path_factory, array, header):
    lines = [",".join(map(repr, row)) for row in array.tolist()]
    lines = [",".join(f"c{i}" for i in range(array.shape[1])), *lines] if header else lines
    path = written(tmp_path_factory.mktemp("csv"), "a.csv", "\n".join(lines))
    assert load_array(path, dtype=torch.float64).x.numpy().tobytes() == array.tobytes()


def test_missing_and_unknown_files(tmp_path):
    written(tmp_path, "samples.csv", CSV_TEXT)
    written(tmp_path, "a.xlsx", "")
    with pytest.raises(InputError, match=r"no such file \(did you mean 'samples.csv'\?\)"):
        load_array(tmp_path / "sample.csv")
    with pytest.raises(InputError, match=r"unknown ending '.xlsx'; give a file ending in .npy"):
        load_array(tmp_path / "a.xlsx")
    with pytest.raises(InputError, match="is a folder"):
        load_array(tmp_path)
    with pytest.raises(InputError, match="did you mean 'toy:two-modes'"):
        load_array("two-modes")
    with pytest.raises(InputError, match="no such file"):
        load_array(tmp_path / "nowhere" / "a.npy")


# --- toy sets -----------------------------------------------------------------------------------------


def test_toy_sources():
    data = load_array("toy:two-modes?n=50&seed=1")
    assert data.toy is not None
    assert torch.equal(data.x, data.toy.sample(50, seed=1))
    assert len(load_array("toy:circles")) == 5000
    assert load_array("toy:digits").x.shape == (1797, 1, 8, 8)
    assert load_array("toy:circles?n=5", dtype=torch.float64).x.dtype == torch.float64


@each(
    "source, message",
    [
        ("toy:two-mode", "did you mean 'two-modes'"),
        ("toy:circles?n=many", "n must be an integer, got 'many'"),
        ("toy:circles?n=1", "at least 2 rows"),
        ("toy:circles?n=0", "n: must be an integer of at least 1"),
        ("toy:circles?sede=1", "unknown setting 'sede' .did you mean 'seed'"),
        ("toy:digits?n=5000", "has 1797 rows"),
        ("toy:circles?noise=1e300", r"noise: must be at most 1e\+30, got 1e\+300"),
        ("toy:circles?noise=many", "given noise as a finite number above 0, got 'many'"),
    ],
)
def test_toy_sources_are_checked(source, message):
    with pytest.raises(InputError, match=message):
        load_array(source)


def test_noise_is_no_more_than_the_dtype_holds():
    assert load_array("toy:circles?noise=6000", dtype=torch.float16).x.isfinite().all()
    with pytest.raises(InputError, match=r"noise: must be at most 6550\.4, got 7000"):
        load_array("toy:circles?noise=7000", dtype=torch.float16)


# --- Dataset ------------------------------------------------------------------------------------------


def test_digest_follows_the_content():
    data = load_array(ROWS)
    assert data.digest == load_array(ROWS.copy()).digest
    assert re.fullmatch("[0-9a-f]{16}", data.digest)
    others = [load_array(ROWS + 1), load_array(ROWS.reshape(3, 1, 2)), load_array(ROWS, dtype=torch.float64)]
    assert len({data.digest, *(other.digest for other in others)}) == 4
    assert data.digest in str(data)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(2, 60), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 1000))
def test_split_is_a_partition(n, fraction, seed):
    data = load_array(np.arange(n))
    train, held_out = data.split(fraction, seed)
    assert sorted(torch.cat([train.x, held_out.x]).flatten().tolist()) == list(range(n))
    assert len(held_out) == min(max(round(fraction * n), 1), n - 1)
    assert torch.equal(data.split(fraction, seed)[1].x, held_out.x)


def test_a_split_holds_out_whole_groups_whatever_their_numbers():
    groups = torch.tensor([40, 7, 40, 900, 7, 7, 31, 31])
    for seed in range(4):
        train, held_out = Dataset.of(torch.arange(8.0)[:, None], "rows", groups=groups).split(0.5, seed)
        sides = [set(part.groups.tolist()) for part in (train, held_out)]
        assert (len(sides[0]), len(sides[1])) == (2, 2)
        assert not sides[0] & sides[1]
        assert sorted([*train.x[:, 0].tolist(), *held_out.x[:, 0].tolist()]) == list(range(8))


def test_split_depends_on_the_seed_and_keeps_the_toy():
    data = load_array("toy:two-modes?n=100")
    train, held_out = data.split(0.5, seed=0)
    assert isinstance(train, Dataset)
    assert train.toy is held_out.toy is data.toy
    assert not torch.equal(held_out.x, data.split(0.5, seed=1)[1].x)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_split_refuses_a_bad_fraction(fraction):
    with pytest.raises(InputError, match="fraction: must be"):
        load_array(ROWS).split(fraction)


# --- Standardiser -------------------------------------------------------------------------------------


def test_standardiser_is_affine_and_invertible():
    x = torch.from_numpy(ROWS)
    s = Standardiser.fit(x)
    u = s.forward(x)
    torch.testing.assert_close(u.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(u.std(0, correction=0), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(s.inverse(u), x)


def test_log_det_is_the_jacobian():
    s = Standardiser.fit(
        torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 7
    )
    jacobian = torch.autograd.functional.jacobian(lambda v: s.forward(v[None])[0], torch.zeros(3).double())
    assert s.log_det == pytest.approx(float(torch.linalg.slogdet(jacobian).logabsdet))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 + 0.1])
def test_a_constant_coordinate_keeps_its_scale(constant):
    x = torch.stack([torch.full((1000,), constant), torch.arange(1000.0)], 1)
    assert float(Standardiser.fit(x).scale[0]) == 1.0
    assert float(Standardiser.fit(x).scale[1]) > 100
