"""Choice of a token from logits, against plain NumPy in float64 (known faults SG-02, 03, 04, 08)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.sampling import Needs, Sampling, _kept, penalise, sample, seed_data, settings_of

_sample = jax.jit(sample, static_argnames="needs")
_kept_jit = jax.jit(_kept)


def choose(logits, rows, seed: Any = 0, positions=None, seen=None):
    """Run ``sample`` on [B, W] logits with one Sampling per row; NumPy results."""
    logits = jnp.asarray(logits, jnp.float32)
    batch = logits.shape[0]
    rows = [rows] * batch if isinstance(rows, Sampling) else rows
    settings, needs = settings_of(rows)
    positions = jnp.asarray(np.arange(batch) if positions is None else positions, jnp.int32)
    seen = None if seen is None else jnp.asarray(seen)
    out = _sample(logits, settings, seed_data(seed, batch), positions, seen, needs=needs)
    return tuple(np.asarray(x) for x in out)


def reference_kept(logits, s):
    """The filters in float64, one after the other, on one row."""
    z = np.asarray(logits, np.float64) / s.temperature
    order = np.argsort(-z, kind="stable")  # lowest id first among equals
    keep = list(order[: s.top_k] if s.top_k else order)
    p = np.exp(z[keep] - z[keep].max())
    p /= p.sum()
    if s.top_p < 1:
        count = int(np.searchsorted(np.cumsum(p), s.top_p)) + 1 if s.top_p > 0 else 1
        keep, p = keep[:count], p[:count]
    keep = [i for i, q in zip(keep, p, strict=True) if q >= s.min_p * p[0]]
    mask = np.zeros(len(z), bool)
    mask[keep or order[:1]] = True
    return mask


def kept(logits, s):
    settings, _ = settings_of([s])
    z = jnp.asarray(logits, jnp.float32)
    return np.asarray(_kept_jit((z - z.max()) / s.temperature, jax.tree.map(lambda a: a[0], settings)))


# -- greedy -----------------------------------------------------------------------------


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals():
    logits = np.array([[0, 3, 3, 1], [2, 2, 2, 2], [-np.inf, -5, -np.inf, -5], [-0.0, 0.0, -1, -1]])
    tokens, _, finite = choose(logits, Sampling())
    assert tokens.tolist() == [1, 0, 1, 0]
    assert finite.all()


@pytest.mark.parametrize("winner", [3, 700, 1023])
def test_greedy_sees_a_lead_of_one_float32_ulp_across_eight_shards(cpu_devices, winner):
    """SG-02: every shard of the vocabulary has a value below one bf16 step away from the largest."""
    logits = np.full((2, 1024), 7.0, np.float32)
    logits[:, winner] = np.nextafter(np.float32(7), np.float32(8))
    mesh = Mesh(np.array(cpu_devices[:8]), ("vocab",))
    sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "vocab")))
    assert choose(sharded, Sampling())[0].tolist() == [winner, winner]
    hot = Sampling(temperature=0.7, top_k=50, top_p=0.9)
    assert choose(sharded, hot)[0].tolist() == choose(logits, hot)[0].tolist()


def test_greedy_and_random_rows_mix_with_banned_tokens():
    """SG-04: temperature 0 next to 1, some logits -inf."""
    logits = np.full((4, 64), -np.inf, np.float32)
    logits[:, [5, 9, 30]] = [1.0, 2.0, 1.5]
    rows = [Sampling(), Sampling(temperature=1.0), Sampling(), Sampling(temperature=1e-30)]
    for seed in range(20):
        tokens, logprobs, finite = choose(logits, rows, seed=seed)
        assert tokens[[0, 2, 3]].tolist() == [9, 9, 9]
        assert tokens[1] in (5, 9, 30)
        assert finite.all()
        assert np.isfinite(logprobs).all()


def test_greedy_ignores_every_filter():
    logits = np.random.default_rng(0).normal(size=(3, 50))
    plain = choose(logits, Sampling())[0]
    filtered = choose(logits, Sampling(top_k=2, top_p=0.1, min_p=0.9))[0]
    assert plain.tolist() == filtered.tolist() == logits.argmax(-1).tolist()


# -- filters ----------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 29, 30, 31, 10**12]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_filters_keep_what_a_float64_reference_keeps(seed, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=30).astype(np.float32) * 2
    logits[rng.integers(30, size=3)] = -np.inf
    s = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mine = kept(logits, s) & np.isfinite(logits)
    assert mine.tolist() == (reference_kept(logits, s) & np.isfinite(logits)).tolist()
    assert mine[logits.argmax()]


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids():
    assert np.flatnonzero(kept([1, 2, 2, 2, 2], Sampling(temperature=1.0, top_k=2))).tolist() == [1, 2]
    assert np.flatnonzero(kept([3.0, -0.0, 0.0, -0.0], Sampling(temperature=1.0, top_k=2))).tolist() == [0, 1]


def test_top_p_counts_the_mass_that_top_k_left():
    """SG-03: of 0.4, 0.3, 0.2, 0.1 top_k=2 leaves shares 4/7 and 3/7, so 0.5 keeps one token."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, Sampling(temperature=1.0, top_k=2, top_p=0.5)).tolist() == [True, False, False, False]
    # Without top_k the first token holds 0.4 < 0.5 of the mass and the second is needed.
    assert kept(logits, Sampling(temperature=1.0, top_p=0.5)).tolist() == [True, True, False, False]


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 0.8, 1.0])
def test_one_token_always_survives(top_p):
    """SG-03's inputs: k = 1, p = 0.8, T = 0.01, and p at its ends."""
    logits = np.random.default_rng(1).normal(size=(4, 40))
    tokens, _, _ = choose(logits, Sampling(temperature=0.01, top_k=1, top_p=top_p))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_top_p_of_one_keeps_tokens_beyond_float32_rounding():
    logits = np.zeros(200_000, np.float32)
    logits[-1] = -17.0
    assert kept(logits, Sampling(temperature=1.0, min_p=0.0, top_k=0)).all()


def test_the_order_of_penalty_temperature_and_filters_matters_and_is_as_documented():
    logits = np.array([[2.0, 1.9, 1.0, -1.0]], np.float32)
    seen = np.array([[True, False, False, True]])
    # The penalty makes 2.0 -> 1.0: top_k = 1 then leaves token 1 alone.
    s = Sampling(temperature=1.0, top_k=1, repetition_penalty=2.0)
    assert {int(choose(logits, s, seed=i, seen=seen)[0][0]) for i in range(20)} == {1}
    # min_p after temperature: 2.0 against 1.0 is exp(-1) = 0.37 at T = 1 and exp(-0.25) = 0.78 at T = 4.
    assert not kept(logits[0], Sampling(temperature=1.0, min_p=0.5))[2]
    assert kept(logits[0], Sampling(temperature=4.0, min_p=0.5))[2]


def test_the_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = jnp.asarray([[3.0, -3.0, 0.0, 3.0, -jnp.inf], [3.0, -3.0, 0.0, 3.0, 1.0]], jnp.float32)
    seen = jnp.asarray([[True, True, True, False, True], [True] * 5])
    out = penalise(logits, seen, jnp.asarray([1.5, 1.0], jnp.float32))
    assert out[0].tolist() == [2.0, -4.5, 0.0, 3.0, -np.inf]
    assert out[1].tolist() == logits[1].tolist()


def test_a_penalty_that_overflows_stays_usable():
    logits = np.array([[5.0, 1.0, -1.0]], np.float32)
    s = Sampling(temperature=1.0, repetition_penalty=2e-38)
    tokens, logprobs, finite = choose(logits, s, seen=np.array([[True, False, False]]))
    assert (tokens[0], bool(finite[0])) == (0, True)
    assert np.isfinite(logprobs[0])


# -- randomness -------------------------------------------------------------------------


def test_draws_follow_the_softmax():
    """Pearson's chi-square over 20,000 draws of 8 tokens: 7 degrees of freedom, 99.99 % below 30."""
    count, logits = 20_000, np.array([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -0.5, -2.0])
    settings, needs = settings_of([Sampling(temperature=0.8)] * count)
    tokens, _, _ = sample(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, 8)), settings, seed_data(7, count),
        jnp.arange(count, dtype=jnp.int32), needs=needs,
    )  # fmt: skip
    p = np.exp(logits / 0.8)
    p /= p.sum()
    expected = p * count
    observed = np.bincount(np.asarray(tokens), minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 30


def test_a_rows_draw_depends_on_its_seed_and_position_alone():
    rng = np.random.default_rng(3)
    needle = rng.normal(size=100).astype(np.float32)
    s = Sampling(temperature=1.3, top_p=0.98)
    alone = int(choose(needle[None], s, seed=[11], positions=[17])[0][0])
    for batch in (2, 7):
        for at in range(batch):
            logits = rng.normal(size=(batch, 100)).astype(np.float32)
            logits[at] = needle
            seeds = rng.integers(0, 2**32, batch).tolist()
            seeds[at] = 11
            positions = rng.integers(0, 1000, batch)
            positions[at] = 17
            others = [dataclasses.replace(s, top_k=int(k)) for k in rng.integers(1, 9, batch)]
            others[at] = s
            assert choose(logits, others, seed=seeds, positions=positions)[0][at] == alone


def test_other_seeds_and_positions_draw_other_tokens_and_equal_ones_draw_the_same():
    logits = np.zeros((40, 1000), np.float32)
    s = Sampling(temperature=1.0)
    same = choose(logits, s, seed=5, positions=[9] * 40)[0]
    assert len(set(same.tolist())) == 1
    by_seed = choose(logits, s, seed=list(range(40)), positions=[9] * 40)[0]
    by_position = choose(logits, s, seed=5, positions=range(40))[0]
    # 40 uniform draws of 1000 collide about 0.8 times; 30 distinct ones are missed with p < 1e-9.
    assert len(set(by_seed.tolist())) > 30
    assert len(set(by_position.tolist())) > 30


def test_seeds_are_those_of_jax_and_reach_64_bits():
    for seed in (0, 1, 2**32 - 1):
        expected = jax.random.key_data(jax.random.key(np.uint32(seed), impl="threefry2x32"))
        assert np.array_equal(seed_data(seed, 1)[0], expected)
    assert np.asarray(seed_data(2**40 + 3, 2)).tolist() == [[256, 3], [256, 3]]


# -- log-probabilities and bad rows -----------------------------------------------------


def test_logprobs_are_of_the_raw_logits_whatever_the_sampling():
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(6, 80)).astype(np.float32) * 3
    logits[:, 10:20] = -np.inf
    s = Sampling(temperature=1.7, top_k=5, repetition_penalty=1.5)
    tokens, logprobs, _ = choose(logits, s, seen=rng.random((6, 80)) < 0.3)
    z = logits.astype(np.float64)
    expected = z[np.arange(6), tokens] - np.log(np.exp(z).sum(-1))
    # float32 log-sum-exp of values below 12: a few ulp of 1e-6.
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=5e-6)
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("s", [Sampling(), Sampling(temperature=1.0, top_p=0.9)])
def test_rows_with_nan_or_plus_infinity_or_nothing_to_choose_are_reported(s):
    logits = np.zeros((5, 20), np.float32)
    logits[:, 4] = 9
    logits[1, 7] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    tokens, logprobs, finite = choose(logits, s)
    assert finite.tolist() == [True, False, False, False, True]
    assert tokens[~finite].tolist() == [-1, -1, -1]
    assert np.isnan(logprobs[~finite]).all()
    assert tokens[0] == choose(logits[:1], s)[0][0]


# -- what is compiled, and checks -------------------------------------------------------


def test_filters_and_masks_are_compiled_only_where_a_row_needs_them():
    greedy, hot = Sampling(top_k=5, top_p=0.5), Sampling(temperature=1.0)
    assert settings_of([greedy])[1] == Needs(random=False, filters=False, penalty=False)
    assert settings_of([greedy, hot])[1] == Needs(random=True, filters=False, penalty=False)
    for filtered in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert settings_of([dataclasses.replace(hot, **filtered)])[1].filters
    assert settings_of([Sampling(repetition_penalty=1.1)])[1].penalty


def test_a_penalty_without_the_mask_of_seen_tokens_is_an_error():
    with pytest.raises(ValueError, match="seen: expected the mask"):
        choose(np.zeros((1, 4)), Sampling(repetition_penalty=1.1))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-0.1, float("nan"), float("inf"), 1e-40, True)),
        ("top_k", (-1, True)),
        ("top_p", (-0.01, 1.01, float("nan"))),
        ("min_p", (-0.01, 1.01, float("nan"))),
        ("repetition_penalty", (0.0, -1.0, float("nan"), float("inf"))),
        ("stop_tokens", ((-1,), (5, True))),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"Sampling\.{field}: expected"):
            Sampling(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("top_k", 1.5), ("top_p", None), ("stop_tokens", (1.5,)), ("stop_tokens", 3)],
)
def test_parameters_of_the_wrong_kind_are_refused_by_name(field, value):
    # TypeError is the runtime type checker's answer, where it is on.
    with pytest.raises((TypeError, ValueError), match=field):
        Sampling(**{field: value})


def test_sampling_is_hashable_and_takes_numbers_of_any_kind():
    s = Sampling(temperature=1, top_k=3, top_p=0.5, stop_tokens=[4, 5])
    assert s == Sampling(temperature=1.0, top_k=3, top_p=0.5, stop_tokens=(4, 5))
    assert hash(s) == hash(dataclasses.replace(s))


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ValueError, r"0..2\*\*64-1 for row 0, got -1"),
        (2**64, ValueError, "for row 0"),
        ([1, 2, 3], ValueError, "one for each of 2 rows, got 3"),
        ([1, 2.5], TypeError, "row 1, got 2.5"),
        (None, TypeError, "got None"),
        (True, TypeError, "got True"),
    ],
)
def test_seeds_that_are_not_64_bit_integers_are_refused(seed, error, message):
    with pytest.raises(error, match=message):
        seed_data(seed, 2)
