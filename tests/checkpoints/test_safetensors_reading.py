"""Reading boxes of tensors out of safetensors files."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from k3jax.checkpoints import CheckpointError
from k3jax.checkpoints.safetensors_file import Reader, read_header
from k3jax.checkpoints.sources import Source

RNG = np.random.default_rng(0)
ARRAYS = {
    "vector": RNG.standard_normal(37).astype(np.float32),
    "matrix": RNG.standard_normal((11, 6)).astype(ml_dtypes.bfloat16),
    "cube": RNG.integers(0, 256, (5, 4, 3), dtype=np.uint8),
    "one": RNG.standard_normal((1, 9)).astype(ml_dtypes.bfloat16),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "some.safetensors"
    save_file(ARRAYS, path)
    return path


def test_the_header_gives_every_tensor_as_an_independent_writer_wrote_it(file):
    header = read_header(file)
    assert {name: tensor.shape for name, tensor in header.items()} == {n: a.shape for n, a in ARRAYS.items()}
    assert {name: tensor.dtype for name, tensor in header.items()} == {
        "vector": "F32", "matrix": "BF16", "cube": "U8", "one": "BF16"
    }  # fmt: skip


@given(data=st.data(), name=st.sampled_from(sorted(ARRAYS)))
def test_a_box_is_read_as_numpy_slices_it_and_nothing_else_is_read(file, data, name):
    array = ARRAYS[name]
    box = []
    for size in array.shape:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, size))))
    source = Source((read_header(file)[name],), stacked=False)
    with Reader() as reader:
        got = source.read(reader, tuple(box))
        assert got.dtype == array.dtype
        assert got.tobytes() == array[tuple(box)].tobytes()
        assert reader.bytes_read == got.nbytes


def test_a_stack_of_tensors_is_cut_along_both_the_stack_and_the_tensors(tmp_path):
    arrays = {f"expert{i}": RNG.integers(0, 256, (4, 6), dtype=np.uint8) for i in range(5)}
    for i, (name, array) in enumerate(arrays.items()):
        save_file({name: array}, tmp_path / f"{i % 2}{name}.safetensors")
    headers: dict = {}
    for path in tmp_path.iterdir():
        headers |= read_header(path)
    source = Source(tuple(headers[name] for name in arrays), stacked=True)
    whole = np.stack(list(arrays.values()))
    assert source.shape == whole.shape
    assert source.nbytes == whole.nbytes
    box = (slice(1, 4), slice(0, 4), slice(2, 5))
    with Reader() as reader:
        np.testing.assert_array_equal(source.read(reader, box), whole[box])
        assert reader.bytes_read == 3 * 4 * 3


def test_large_reads_are_split_over_threads_and_joined_again(tmp_path):
    array = RNG.integers(0, 256, (40, 1 << 20), dtype=np.uint8)
    save_file({"large": array}, tmp_path / "large.safetensors")
    source = Source((read_header(tmp_path / "large.safetensors")["large"],), stacked=False)
    with Reader() as reader:
        got = source.read(reader, (slice(1, 40), slice(0, 1 << 20)))
    np.testing.assert_array_equal(got, array[1:])


def write_header(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "expected an object, got list"),
        (None, "expected an object, got NoneType"),
        (5, "expected an object, got int"),
        (b"\xff\xfe{", "unreadable safetensors header"),
        (b"[" * 100_000, "unreadable safetensors header"),
        ({"x": []}, r"tensor x: unreadable header entry: expected an object, got \[\]"),
        (entry(dtype=["F32"]), "tensor x: .*dtype: expected one of"),
        (entry(dtype="F31"), "tensor x: .*dtype: expected one of"),
        (entry(shape=[0.0]), "tensor x: .*shape: expected a list of integers"),
        (entry(shape="00"), "tensor x: .*shape: expected a list of integers"),
        (entry(shape=[-1, 0]), "tensor x: .*shape: expected a list of integers"),
        (entry(shape=[False]), "tensor x: .*shape: expected a list of integers"),
        (entry(data_offsets=["0", "0"]), "tensor x: .*data_offsets: expected two integers"),
        (entry(data_offsets="00"), "tensor x: .*data_offsets: expected two integers"),
        (entry(data_offsets=[-4, -4]), "tensor x: .*data_offsets: expected two integers"),
        (entry(data_offsets=[0]), "tensor x: .*data_offsets: expected two integers"),
        (
            {"x": {"dtype": "F32", "shape": [0]}},
            "tensor x: .*data_offsets: expected two integers of at least 0, got None",
        ),
    ],
)
def test_a_header_of_another_structure_is_refused_by_file_and_tensor(tmp_path, header, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(write_header(tmp_path / "bad.safetensors", header))
    assert "bad.safetensors" in str(caught.value)


def test_an_empty_tensor_is_read_as_one(tmp_path):
    assert read_header(write_header(tmp_path / "good.safetensors", entry()))["x"].shape == (0,)


def test_more_files_than_are_kept_open_can_be_read(tmp_path):
    for i in range(150):
        save_file({"x": np.full(3, i, np.int32).view(np.float32)}, tmp_path / f"{i}.safetensors")
    with Reader() as reader:
        for i in range(150):
            source = Source((read_header(tmp_path / f"{i}.safetensors")["x"],), stacked=False)
            assert (source.read(reader, (slice(0, 3),)).view(np.int32) == i).all()
        assert len(reader._files) <= 65


def test_a_file_that_shrank_after_its_header_was_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.zeros(1000, np.float32)}, path)
    source = Source((read_header(path)["x"],), stacked=False)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 100)
    with (
        Reader() as reader,
        pytest.raises(CheckpointError, match=r"x\.safetensors: tensor x: the file ends at byte"),
    ):
        source.read(reader, (slice(0, 1000),))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
         "a name twice"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "begins at byte"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "is 8 bytes, the header gives it 0..4"),
        ('{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}', "unreadable header entry"),
        ('{"a":{"dtype":"F32","shape":[1]}}', "unreadable header entry"),
        ('{"a":', "unreadable safetensors header"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 4)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)
