"""Conversion to Orbax and loading from there."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import k3jax
from k3jax import checkpoints
from k3jax.axes import auto_mesh, param_shardings
from k3jax.checkpoints import CheckpointError, orbax_files, orbax_store
from k3jax.quant import MXFP4
from support.checkpoint_files import assert_same_arrays, edit_json, small_config, write_small
from support.oracle import CASE_A


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """case_a, converted once."""
    folder = tmp_path_factory.mktemp("converted") / "case_a"
    checkpoints.convert(CASE_A, folder, progress=False)
    return folder


@pytest.fixture
def damaged(converted, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def load(path, **options):
    return checkpoints.load_params(path, progress=False, **options)


def replace_leaf(folder: Path, piece: str, key: str, value) -> None:
    """Write another array into a piece, past k3jax."""
    path = folder / "pieces" / piece
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(path)
        tree.pop(key)
        if value is not None:
            tree[key] = value
        checkpointer.save(path, tree, force=True)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_converted_checkpoint_loads_bit_for_bit_like_its_source(converted, dtype):
    params, config, report = load(converted, dtype=dtype)
    want, want_config, _ = load(CASE_A, dtype=dtype)
    assert_same_arrays(params, want)
    assert config == want_config
    assert (report.format, report.leaves) == ("orbax", len(jax.tree.leaves(want)))


@pytest.mark.parametrize(
    ("shape", "names"),
    [((1,), ("all",)), ((4,), ("tensor",)), ((8,), ("all",)), ((2, 4), ("expert", "tensor"))],
)
def test_ck08_restores_onto_the_given_mesh_whatever_devices_wrote_it(converted, cpu_devices, shape, names):
    count = int(np.prod(shape))
    mesh = Mesh(np.array(cpu_devices[:count]).reshape(shape), names)
    params, config, _ = load(converted, mesh=mesh)
    assert_same_arrays(params, load(CASE_A)[0])
    want = param_shardings(config, mesh)
    same = jax.tree.map(lambda array, sharding: array.sharding == sharding, params, want)
    assert all(jax.tree.leaves(same))
    assert {device for leaf in jax.tree.leaves(params) for device in leaf.devices()} == set(
        cpu_devices[:count]
    )


@pytest.mark.parametrize("source", ["release", "orbax"])
def test_logits_are_bit_equal_on_one_device_and_close_on_meshes(converted, cpu_devices, source):
    from support.compare import relative_rms

    path = CASE_A if source == "release" else converted
    tokens = np.arange(24).reshape(2, 12) * 7 % 512
    want = np.asarray(k3jax.load(CASE_A, dtype="float32", progress=False).prefill(tokens)[0])
    if source == "orbax":
        one = k3jax.load(path, dtype="float32", progress=False).prefill(tokens)[0]
        assert np.asarray(one).tobytes() == want.tobytes()
    for count, shape in ((4, (4,)), (8, (2, 4))):
        mesh = auto_mesh(
            Mesh(np.array(cpu_devices[:count]).reshape(shape), ("expert", "tensor")[-len(shape) :])
        )
        many = k3jax.load(path, dtype="float32", mesh=mesh, progress=False).prefill(tokens)[0]
        # Sums over devices are taken in another order; one-ulp noise moves these logits by up to 1.6e-5.
        assert relative_rms(many, want) <= 5e-5


def test_float_experts_and_skipped_vision_survive_the_conversion(tmp_path):
    config = small_config()
    name = "model.layers.1.block_sparse_moe.experts"

    def unpack(tensors):
        for expert in range(8):
            shape = tensors.pop(f"{name}.{expert}.w2.weight_packed").shape
            del tensors[f"{name}.{expert}.w2.weight_scale"]
            tensors[f"{name}.{expert}.w2.weight"] = np.full(
                (shape[0], 2 * shape[1]), expert, ml_dtypes.bfloat16
            )

    write_small(tmp_path / "src", unpack, config, extra={"vision_tower.x": np.ones(2, np.float32)})
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    params, got, report = load(tmp_path / "dst")
    assert_same_arrays(params, load(tmp_path / "src")[0])
    assert not isinstance(params["layers"][1]["block_sparse_moe"]["experts"]["w2"], MXFP4)
    assert report.skipped == ("vision_tower.x",)
    assert got == config


def test_tokenizer_and_settings_files_go_along_and_weights_and_index_do_not(tmp_path):
    write_small(tmp_path / "src", shards=2)
    files = {"tiktoken.model": b"AA== 0\n", "tokenizer_config.json": b"{}", "LICENSE": b"terms"}
    for name, content in files.items():
        (tmp_path / "src" / name).write_bytes(content)
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    found = {path.name: path.read_bytes() for path in (tmp_path / "dst").iterdir() if path.is_file()}
    assert found.keys() == files.keys() | {"config.json", "k3jax.json"}
    assert files.items() <= found.items()


def test_progress_goes_to_stderr_with_rate_and_time_left_on_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    write_small(tmp_path / "src")
    report = checkpoints.convert(tmp_path / "src", tmp_path / "dst")
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(r"convert: +\d+%.*B/s\]", err)
    assert str(report) in err
    assert "GB/s" in str(report)
    assert "peak host memory" in str(report)


def test_without_a_terminal_a_conversion_and_a_load_print_their_report_alone(tmp_path, capfd):
    write_small(tmp_path / "src")
    converted = checkpoints.convert(tmp_path / "src", tmp_path / "dst")
    assert capfd.readouterr().err == f"{converted}\n"
    for folder in ("src", "dst"):
        _, _, loaded = checkpoints.load_params(tmp_path / folder)
        assert capfd.readouterr().err == f"{loaded}\n"


@pytest.mark.parametrize(
    ("piece", "key", "change", "message"),
    [
        (
            "layers.001",
            "layers.1.block_sparse_moe.e_score_correction_bias",
            ml_dtypes.bfloat16,
            "got bfloat16 [16]",
        ),
        ("layers.001.w1", "layers.1.block_sparse_moe.experts.w1.codes", np.int8, "got int8 [16, 96, 32]"),
        ("final", "norm", np.float32, "expected bfloat16 [128], got float32 [128]"),
    ],
)
def test_ck06_an_array_stored_in_another_dtype_is_refused_never_cast(damaged, piece, key, change, message):
    with ocp.PyTreeCheckpointer() as checkpointer:
        value = checkpointer.restore(damaged / "pieces" / piece)[key]
    replace_leaf(damaged, piece, key, np.asarray(value).astype(change))
    with pytest.raises(CheckpointError) as caught:
        load(damaged)
    assert f"pieces/{piece}: leaf {key}: expected" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("size", [2, 8])
def test_ck07_an_array_of_another_length_is_refused_never_cut_or_padded(damaged, size):
    key = "layers.0.self_attn.A_log"
    replace_leaf(damaged, "layers.000", key, np.zeros(size, np.float32))
    with pytest.raises(
        CheckpointError, match=rf"leaf {re.escape(key)}: expected float32 \[4\], got float32 \[{size}\]"
    ):
        load(damaged)


@pytest.mark.parametrize("value", [None, np.zeros(3, np.float32)])
def test_ck07_a_missing_or_unknown_array_of_a_piece_is_refused(damaged, value):
    key = "norm" if value is None else "norm2"
    with ocp.PyTreeCheckpointer() as checkpointer:
        path = damaged / "pieces" / "final"
        tree = checkpointer.restore(path)
        tree.pop("norm", None) if value is None else tree.update(norm2=value)
        checkpointer.save(path, tree, force=True)
    with pytest.raises(
        CheckpointError, match=f"pieces/final: leaf {key}: {'missing' if value is None else 'unknown'}"
    ):
        load(damaged)


@pytest.mark.parametrize("kept", [("kda", "mla"), ("kda", "mla", "kda", "kda")])
def test_ck07_a_checkpoint_of_another_depth_is_refused_both_ways(tmp_path, kept):
    config, _ = write_small(tmp_path / "src")
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    other = dataclasses.replace(config, num_hidden_layers=len(kept), layer_types=kept)
    what = "unknown" if len(kept) == 2 else "missing"
    layer = 2 if len(kept) == 2 else 3
    for attempt in ("argument", "file"):
        if attempt == "file":
            (tmp_path / "dst" / "config.json").write_text(json.dumps(other.to_hf_dict()))
        with pytest.raises(CheckpointError, match=rf"leaf layers\.{layer}\.input_layernorm: {what}"):
            load(tmp_path / "dst", config=other if attempt == "argument" else None)


def test_ck07_nothing_of_the_library_restores_leniently():
    root = Path(checkpoints.__file__).resolve().parents[1]
    sources = [path for folder in ("k3jax", "checkpoints") for path in (root / folder).rglob("*.py")]
    assert len(sources) > 20
    assert [
        path
        for path in sources
        if re.search(r"strict\s*=\s*False.*orbax|orbax.*strict\s*=\s*False", path.read_text())
    ] == []
    assert [
        p
        for p in (root / "checkpoints").rglob("*.py")
        if re.search(r"ArrayRestoreArgs\([^)]*strict", p.read_text())
    ] == []


def test_a_missing_piece_is_refused_by_name(damaged):
    shutil.rmtree(damaged / "pieces" / "layers.004.w3")
    with pytest.raises(CheckpointError, match=r"pieces/layers\.004\.w3: missing"):
        load(damaged)


def test_an_unfinished_conversion_is_refused_and_says_to_resume(damaged):
    edit_json(damaged / "k3jax.json", lambda tree: tree.update(complete=False))
    shutil.rmtree(damaged / "pieces" / "layers.004.w3")
    with pytest.raises(
        CheckpointError, match=r"not finished: 35 of 36 pieces; run .*convert SRC DST.* again"
    ):
        load(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tree: tree.update(version=2),
            "expected format 'k3jax-orbax' version 1, got 'k3jax-orbax' version 2",
        ),
        (lambda tree: tree.update(format="x"), "expected format"),
        (lambda tree: tree.pop("pieces"), "missing key 'pieces'"),
        (lambda tree: tree.update(pieces=[]), "k3jax.json: not a record"),
        (lambda tree: tree["pieces"]["final"]["norm"].update(shape=[1.5]), "norm: shape: expected a list"),
        (lambda tree: tree["pieces"]["final"]["norm"].update(shape="64"), "norm: shape: expected a list"),
        (lambda tree: tree["pieces"]["final"]["norm"].update(dtype="f4"), "norm: dtype: expected one of"),
    ],
)
def test_a_record_of_another_format_or_version_is_refused(damaged, change, message):
    edit_json(damaged / "k3jax.json", change)
    with pytest.raises(CheckpointError, match=message):
        load(damaged)


def array_file(folder: Path, piece: str) -> Path:
    """The largest file of a piece: it holds arrays."""
    files = (path for path in (folder / "pieces" / piece).rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("piece", ["embed_tokens", "layers.000", "layers.001.w1"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_file_cut_short_or_gone_is_refused_by_piece_and_leaf_before_a_restore(
    damaged, monkeypatch, piece, gone
):
    monkeypatch.setattr(orbax_store.Store, "restore", None)
    file = array_file(damaged, piece)
    if gone:
        file.unlink()
        why = "is missing"
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        why = r"is cut short: needs at least \d+ bytes, has \d+"
    leaf = {
        "layers.000": r"layers\.0\.",
        "layers.001.w1": r"layers\.1\..*\.w1\.",
        "embed_tokens": "embed_tokens",
    }
    with pytest.raises(CheckpointError) as caught:
        load(damaged)
    assert str(damaged) in str(caught.value)
    faults = [
        rf"pieces/{piece}: leaf {leaf[piece]}.*: file \S+/{file.name} {why}" for _ in caught.value.faults
    ]
    assert faults
    for fault, want in zip(caught.value.faults, faults, strict=True):
        assert re.fullmatch(want, fault), fault
    with pytest.raises(CheckpointError, match=f"pieces/{piece}: leaf"):
        checkpoints.convert(CASE_A, damaged, progress=False)  # a resumed conversion does not accept it


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_an_unreadable_store_is_refused_by_its_piece(damaged, name):
    path = damaged / "pieces" / "final" / name
    file = path if path.is_file() else next(path.iterdir())
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="pieces/final: unreadable store of arrays"):
        load(damaged)


def test_a_read_that_fails_names_directory_piece_and_leaf_and_keeps_the_cause(damaged, monkeypatch):
    monkeypatch.setattr(orbax_store, "file_faults", lambda _: {})  # as if cut after that look
    file = array_file(damaged, "embed_tokens")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(
        CheckpointError, match=r'pieces/embed_tokens: cannot be restored: .*"embed_tokens/'
    ) as caught:
        load(damaged)
    assert str(damaged) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.__cause__ is not None


def test_what_is_not_the_files_fault_is_not_called_one(damaged, monkeypatch):
    def exhausted(*_args, **_options):
        raise MemoryError("host")

    monkeypatch.setattr(orbax_store.ocp.Checkpointer, "restore", exhausted)
    with pytest.raises(MemoryError, match="host"):
        load(damaged)


def test_keys_of_a_store_with_inner_nodes_are_put_together_from_their_parts(tmp_path):
    import tensorstore as ts

    small = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 8}
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/store/", "config": small}
    store = ts.KvStore.open(spec).result()
    with ts.Transaction() as transaction:
        for i in range(200):
            store.with_transaction(transaction)[f"leaf.{i:03d}/0.0"] = bytes(100)
    base = ts.KvStore.open(f"file://{tmp_path}/store/").result()
    version = ts.ocdbt.dump(base).result()["versions"][-1]
    assert version["root_height"] > 1
    found = [key.decode() for key, _, _ in orbax_files._chunks(base, version["root"], b"")]
    assert found == [f"leaf.{i:03d}/0.0" for i in range(200)]
    assert orbax_files.file_faults(tmp_path / "store") == {}


def test_converting_again_changes_nothing(converted):
    before = {path: path.stat().st_mtime_ns for path in converted.rglob("*") if "pieces" in path.parts}
    report = checkpoints.convert(CASE_A, converted, progress=False)
    after = {path: path.stat().st_mtime_ns for path in converted.rglob("*") if "pieces" in path.parts}
    assert (report.pieces, report.resumed, report.bytes) == (36, 36, 0)
    for times in (before, after):
        del times[converted / "pieces"]
    assert before == after


def test_another_source_is_refused_for_a_directory_begun_from_one(tmp_path):
    config, _ = write_small(tmp_path / "a")
    write_small(tmp_path / "b", lambda tensors: tensors["lm_head.weight"].fill(1), config)
    checkpoints.convert(tmp_path / "a", tmp_path / "dst", progress=False)
    with pytest.raises(CheckpointError, match="holds a conversion of another checkpoint"):
        checkpoints.convert(tmp_path / "b", tmp_path / "dst", progress=False)


def test_a_directory_with_other_files_is_not_written_to(tmp_path):
    write_small(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="dst: expected a new or empty directory"):
        checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    assert [path.name for path in (tmp_path / "dst").iterdir()] == ["notes.txt"]


def test_a_source_that_is_no_checkpoint_is_refused(tmp_path, converted):
    for source in (tmp_path, tmp_path / "nowhere", converted):
        with pytest.raises(FileNotFoundError, match="src: expected a directory in the release's format"):
            checkpoints.convert(source, tmp_path / "dst", progress=False)
