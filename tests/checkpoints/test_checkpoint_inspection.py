"""The report of ``k3jax inspect``, and finding checkpoints by path or name."""

import json
import re
import shutil

import numpy as np
import pytest

from k3jax import checkpoints
from k3jax.checkpoints import names
from k3jax.config import K3Config
from support.checkpoint_files import edit_json, small_config, write_small
from support.oracle import CASE_A


@pytest.fixture
def release_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(K3Config.preset("k3").to_hf_dict()))
    return path


@pytest.mark.parametrize("form", ["directory", "file"])
def test_the_releases_config_alone_prints_the_right_totals_and_what_is_missing(release_config, form):
    text = checkpoints.inspect_report(release_config if form == "file" else release_config.parent)
    for number in ("2,779,484,478,208", "104,189,614,848", "1,559,965,606,912", "449,372,160 + 27,648 per"):
        assert number in text
    assert "no weights: 497052 tensors missing" in text
    assert re.search(
        r"experts\.\*\.w1\.weight_packed +0 of 82432 +uint8 \[3072, 1792\] +453,790,138,368 B", text
    )
    assert re.search(r"A_log +0 of 69 +float32 \[128\]", text)


def test_the_bytes_of_the_table_add_up_to_the_releases(release_config):
    text = checkpoints.inspect_report(release_config)
    table = text.split("Tensors (")[1].split("\n\n")[0]
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) B$", table, re.MULTILINE)]
    assert sum(sizes) == 1_559_965_606_912


def test_a_whole_checkpoint_has_nothing_missing_and_lists_vision_as_skipped(tmp_path):
    vision = {f"vision_tower.encoder.blocks.{i}.wo.weight": np.ones(1, np.float32) for i in range(3)}
    _, tensors = write_small(tmp_path, extra=vision)
    text = checkpoints.inspect_report(tmp_path)
    assert "Nothing is missing or faulty." in text
    assert f"{len(tensors)} found of {len(tensors)} expected" in text
    assert re.search(r"Skipped.*3 tensors\n +3 vision_tower\.encoder\.blocks\.\*\.wo\.weight", text)


def test_case_a_is_described_by_its_own_numbers():
    text = checkpoints.inspect_report(CASE_A)
    assert "6 kda, 3 mla (mla at 3, 7, 8)" in text
    assert "1,002 found of 1,002 expected" in text
    assert re.search(r"kda_a_log_size +8\n", text)


def test_missing_and_faulty_tensors_are_counted_and_named(tmp_path):
    def damage(tensors):
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        tensors["model.layers.2.self_attn.A_log"][7] = 1.0

    write_small(tmp_path, damage)
    text = checkpoints.inspect_report(tmp_path)
    assert re.search(r"self_attn\.q_proj\.weight +1 of 2 ", text)
    assert "Missing or faulty: 2" in text
    assert "tensor model.layers.0.self_attn.q_proj.weight: missing" in text
    assert "layers.2.self_attn.A_log: expected zeros past the 4 heads" in text


def test_float_experts_have_rows_of_their_own(tmp_path):
    def unpack(tensors):
        for expert in range(8):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2"
            shape = tensors.pop(f"{name}.weight_packed").shape
            del tensors[f"{name}.weight_scale"]
            tensors[f"{name}.weight"] = np.zeros((shape[0], 2 * shape[1]), np.float32)

    write_small(tmp_path, unpack)
    text = checkpoints.inspect_report(tmp_path)
    assert "Nothing is missing or faulty." in text
    assert re.search(r"experts\.\*\.w2\.weight +8 of 8 +float32", text)
    assert re.search(r"experts\.\*\.w2\.weight_packed +8 of 8 +uint8", text)


def test_tensors_of_one_name_and_different_shapes_have_a_row_each(tmp_path):
    config, tensors = write_small(tmp_path / "src")
    shapes = [tensors[f"model.layers.{i}.self_attn.g_proj.weight"].shape for i in range(3)]
    assert config.layer_types == ("kda", "mla", "kda")
    assert shapes[0] == shapes[2] != shapes[1]
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    for folder in ("src", "dst"):
        text = checkpoints.inspect_report(tmp_path / folder)
        for count, shape in ((2, shapes[0]), (1, shapes[1])):
            size = count * 2 * int(np.prod(shape))
            row = rf"g_proj\S* +{count} of {count} +bfloat16 {re.escape(str(list(shape)))}  {size:,} B"
            assert re.search(row, text)


def test_a_tensor_of_the_wrong_shape_stays_in_the_row_that_expects_it(tmp_path):
    def damage(tensors):
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((3, 5), np.float32)
        tensors["model.layers.0.self_attn.q_proj.extra"] = np.zeros((3, 5), np.float32)

    write_small(tmp_path, damage)
    text = checkpoints.inspect_report(tmp_path)
    assert re.search(r"self_attn\.q_proj\.weight +2 of 2 +bfloat16", text)
    assert re.search(r"self_attn\.q_proj\.extra +1 unknown +F32 \[3, 5\]  60 B", text)


def test_inspect_takes_the_name_of_a_shipped_checkpoint():
    text = checkpoints.inspect_report("nano")
    assert text.startswith(f"{checkpoints.resolve('nano')} (release format)")
    assert "Nothing is missing or faulty." in text
    assert text.endswith("lengths of files were checked; the values were not.")


def test_ignored_keys_of_the_config_are_listed(tmp_path):
    write_small(tmp_path)
    edit_json(tmp_path / "config.json", lambda tree: tree["text_config"].update(novel_option=3))
    assert re.search(r"ignored_keys +novel_option", checkpoints.inspect_report(tmp_path))


def test_a_converted_checkpoint_is_described_whole_and_damaged(tmp_path):
    write_small(tmp_path / "src")
    checkpoints.convert(tmp_path / "src", tmp_path / "dst", progress=False)
    text = checkpoints.inspect_report(tmp_path / "dst")
    assert "converted (Orbax)" in text
    assert "Nothing is missing or faulty." in text
    assert re.search(r"experts\.w1\.codes +2 of 2 +uint8", text)
    shutil.rmtree(tmp_path / "dst" / "pieces" / "final")
    assert "pieces/final: missing" in checkpoints.inspect_report(tmp_path / "dst")
    file = max((p for p in tmp_path.rglob("lm_head/**/d/*")), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-500])
    assert "pieces/lm_head: leaf lm_head: file " in checkpoints.inspect_report(tmp_path / "dst")
    edit_json(tmp_path / "dst" / "k3jax.json", lambda tree: tree.update(complete=False))
    assert "conversion not finished: 11 of 12 pieces" in checkpoints.inspect_report(tmp_path / "dst")


def test_a_directory_without_a_config_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the directory has neither.*config\.json"):
        checkpoints.inspect_report(tmp_path)


def test_a_path_or_a_shipped_name_resolves_and_anything_else_lists_the_accepted_forms(tmp_path, monkeypatch):
    from k3jax.checkpoints import locate

    write_small(tmp_path / "ships" / "toy")
    monkeypatch.setattr(locate, "SHIPPED", tmp_path / "ships")
    assert checkpoints.resolve(CASE_A) == CASE_A
    assert checkpoints.resolve(str(CASE_A)) == CASE_A
    assert checkpoints.resolve("toy") == tmp_path / "ships" / "toy"
    assert checkpoints.shipped_names() == ["toy"]
    (tmp_path / "file").write_text("")
    for wrong, why in (
        ("moonshotai/Kimi-K3", "no such directory"),
        (tmp_path, "has neither"),
        (tmp_path / "file", "is a file"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            checkpoints.resolve(wrong)
        for part in (why, "model.safetensors.index.json", "model.safetensors", "k3jax convert", "toy"):
            assert part in str(caught.value)


def test_a_file_in_place_of_a_checkpoint_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: expected a checkpoint of either format"):
        checkpoints.load_params(tmp_path, progress=False)


@pytest.mark.slow
def test_the_release_at_full_size_is_planned_from_its_headers(tmp_path):
    """All 497,052 text tensors of the release in sparse files: no weights, every header."""
    config = K3Config.preset("k3")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()))
    weight_map = {}
    shards = _release_shards(config)
    for number in range(1, 95):
        shapes = shards[number]
        header, position = {}, 0
        for name, (dtype, shape) in shapes.items():
            size = int(np.prod(shape)) * {"BF16": 2, "F32": 4, "U8": 1}[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
            position += size
        text = json.dumps(header).encode()
        file = f"model-{number:05d}-of-000096.safetensors"
        with (tmp_path / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
        weight_map |= dict.fromkeys(shapes, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    plan = checkpoints.preflight(tmp_path)
    padding = config.num_kda_layers * 32 * 4
    assert plan.tensors == 497_052
    assert plan.nbytes + padding == 1_559_965_606_912
    assert plan.config.kda_a_log_size == 128
    # Stated sizes of whole shards in the release, headers aside.
    assert sum(t.nbytes for t in _of_layer(plan, 1)) + 128 == 16_990_092_800
    assert sum(t.nbytes for t in _of_layer(plan, 3)) == 16_566_684_160


def _of_layer(plan, layer):
    from k3jax.checkpoints.manifest import parts

    return [
        a for path, leaf in plan.leaves.items() if path[:2] == ("layers", layer) for a in parts(leaf).values()
    ]


def _release_shards(config):
    """Names, dtypes and shapes of the files: one layer each, then what is outside the layers."""
    stored = {"bfloat16": "BF16", "float32": "F32"}
    shards = {number: {} for number in range(1, 95)}
    for slot in names.slots(config):
        found = shards[int(slot.path[1]) + 1 if slot.path[0] == "layers" else 94]
        name = names.PREFIX + slot.name
        if slot.expert:
            count, out, inner = slot.shape
            for expert in range(count):
                found[f"{name.format(expert)}.weight_packed"] = ("U8", (out, inner // 2))
                found[f"{name.format(expert)}.weight_scale"] = ("U8", (out, inner // 32))
        else:
            found[name] = (stored[slot.dtype], (128,) if slot.is_a_log else slot.shape)
    return shards


def test_the_small_configuration_of_these_tests_has_both_attentions_and_experts():
    config = small_config()
    assert (config.num_kda_layers, config.num_mla_layers, config.num_moe_layers) == (2, 1, 2)
