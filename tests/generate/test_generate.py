"""Generation: what comes back, and when it stops (known faults SG-01, 05, 06, 07, 08; NB-03, 04)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import k3jax
import k3jax.model
from k3jax import NonFiniteLogitsError, Sampling
from k3jax import generate as generation
from k3jax.axes import param_shardings
from support.generation import EOS, LIMIT, PAD, VOCABULARY, config, model, script_of, scripted

NEVER = Sampling(stop_tokens=())
COMPILED: Any = generation._decode_and_pick


def by_hand(prompt, new, max_length=256):
    """Greedy tokens and their log-probabilities through the model's public steps."""
    logits, state = model().prefill([prompt], max_length=max_length, logits="last")
    tokens, logprobs = [], []
    for _ in range(new):
        token = int(np.argmax(np.asarray(logits)[0]))
        logprobs.append(float(jax.nn.log_softmax(logits[0])[token]))
        tokens.append(token)
        logits, state = model().decode_step([token], state)
    return tokens, logprobs


# -- what comes back --------------------------------------------------------------------


def test_greedy_generation_is_prefill_and_decode_steps_with_argmax():
    prompt = [5, 250, 17, 17, 3]
    tokens, logprobs = by_hand(prompt, 12)
    result = model().generate(prompt, max_new_tokens=12, sampling=NEVER)
    assert result.tokens == [tokens]
    # The same program for the logits; two float32 log-sum-exps of 300 terms differ by a few ulp.
    np.testing.assert_allclose(result.logprobs[0], logprobs, rtol=0, atol=5e-6)
    assert result.finish_reason == ["length"]
    assert result.text == [model().tokenizer.decode(tokens)]


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], np.array([97, 98, 99]), jnp.array([97, 98, 99])])
def test_one_prompt_of_any_kind_gives_lists_of_one_row(prompt):
    result = model().generate(prompt, max_new_tokens=3, sampling=NEVER)
    assert result.tokens == [by_hand([97, 98, 99], 3)[0]]
    assert [len(x) for x in (result.text, result.logprobs, result.finish_reason)] == [1, 1, 1]


def test_ragged_rows_generate_what_each_generates_alone():
    prompts = ["a", "hello there", [7] * 70]
    together = model().generate(prompts, max_new_tokens=8, sampling=NEVER)
    alone = [model().generate([p], max_new_tokens=8, sampling=NEVER) for p in prompts]
    assert together.tokens == [r.tokens[0] for r in alone]
    for mine, single in zip(together.logprobs, alone, strict=True):
        # float32 through other batch shapes: the accuracy of logits that the library states.
        np.testing.assert_allclose(mine, single.logprobs[0], rtol=0, atol=1e-4)


def test_an_array_of_prompts_is_one_row_each():
    result = model().generate(np.array([[1, 2], [3, 4], [5, 6]]), max_new_tokens=2, sampling=NEVER)
    assert result.tokens == [by_hand(prompt, 2)[0] for prompt in ([1, 2], [3, 4], [5, 6])]


def test_the_needle_draws_the_same_at_any_place_in_any_batch():
    """SG-05; in float32 the small model's logits are reproducible enough that no draw flips."""
    s = Sampling(temperature=1.0, top_p=0.95, stop_tokens=())
    alone = model().generate("needle", max_new_tokens=6, sampling=s, seed=4).tokens[0]
    for at in range(3):
        prompts, seeds = ["hay 0", "hay 1", "hay 2"], [100, 101, 102]
        prompts[at], seeds[at] = "needle", 4
        assert model().generate(prompts, max_new_tokens=6, sampling=s, seed=seeds).tokens[at] == alone


def test_each_row_may_have_its_own_sampling_and_seed():
    hot = Sampling(temperature=1.5, top_k=200, stop_tokens=())
    mixed = model().generate(["row"] * 3, max_new_tokens=10, sampling=[NEVER, hot, hot], seed=[0, 1, 2])
    assert mixed.tokens[0] == by_hand(list(b"row"), 10)[0]
    assert len({tuple(tokens) for tokens in mixed.tokens}) == 3
    swapped = model().generate(["row"] * 3, max_new_tokens=10, sampling=[hot, hot, NEVER], seed=[2, 1, 0])
    assert swapped.tokens == mixed.tokens[::-1]
    assert model().generate("row", max_new_tokens=10, sampling=hot, seed=1).tokens[0] == mixed.tokens[1]


def test_a_longer_generation_begins_with_the_shorter_one():
    s = Sampling(temperature=1.0, top_p=0.99, stop_tokens=())
    short = model().generate("go", max_new_tokens=4, sampling=s, seed=9).tokens[0]
    long = model().generate("go", max_new_tokens=9, sampling=s, seed=9).tokens[0]
    assert long[:4] == short
    # Continuing from a longer prompt is continuing: the random numbers go by position.
    rest = model().generate([*b"go", *short], max_new_tokens=5, sampling=s, seed=9).tokens[0]
    assert rest == long[4:]


# -- stopping ---------------------------------------------------------------------------


def test_the_configs_stop_token_ends_a_row_and_is_last_in_tokens_but_not_in_text(monkeypatch):
    fake = scripted(monkeypatch, script_of([[104, 105, EOS, 33], [111, 107, 33, 33]]))
    result = generation.generate(fake, ["a", "bc"], max_new_tokens=4)
    assert result.tokens == [[104, 105, EOS], [111, 107, 33, 33]]
    assert result.text == ["hi", "ok!!"]
    assert result.finish_reason == ["stop", "length"]
    assert [len(p) for p in result.logprobs] == [3, 4]


def test_a_stop_token_at_the_last_step_is_a_stop(monkeypatch):
    fake = scripted(monkeypatch, script_of([[104, EOS]]))
    assert generation.generate(fake, "a", max_new_tokens=2).finish_reason == ["stop"]
    fake = scripted(monkeypatch, script_of([[EOS]]))
    first = generation.generate(fake, "a", max_new_tokens=5)
    assert (first.tokens, first.text, first.finish_reason) == ([[EOS]], [""], ["stop"])


def test_stop_tokens_of_ones_own_replace_the_configs(monkeypatch):
    fake = scripted(monkeypatch, script_of([[104, EOS, 105, 33, 34]] * 2))
    rows = [Sampling(stop_tokens=(33, 7)), Sampling(stop_tokens=())]
    result = generation.generate(fake, ["a", "b"], max_new_tokens=5, sampling=rows)
    assert result.tokens == [[104, EOS, 105, 33], [104, EOS, 105, 33, 34]]
    assert result.finish_reason == ["stop", "length"]
    assert result.text == ["hi", 'hi!"']


def test_more_stop_tokens_than_a_block_all_stop(monkeypatch):
    many = tuple(range(100, 120))
    fake = scripted(monkeypatch, script_of([[5, 119, 6]]))
    assert generation.generate(fake, "a", max_new_tokens=3, sampling=Sampling(stop_tokens=many)).tokens == [
        [5, 119]
    ]


def test_padding_ends_a_row_and_is_no_text(monkeypatch):
    """SG-06: padding has the highest logit."""
    fake = scripted(monkeypatch, script_of([[104, PAD]]))
    result = generation.generate(fake, "a", max_new_tokens=50)
    assert (result.tokens, result.text, result.finish_reason) == ([[104, PAD]], ["h"], ["stop"])


def test_a_padding_id_that_is_an_ordinary_byte_is_not_taken_for_padding(monkeypatch):
    fake = scripted(monkeypatch, script_of([[104, 0, 105]]))
    fake.config = dataclasses.replace(fake.config, pad_token_id=0)
    assert generation.generate(fake, "a", max_new_tokens=3).tokens == [[104, 0, 105]]


def test_rows_that_have_finished_take_no_further_step(monkeypatch):
    fake = scripted(monkeypatch, script_of([[104, EOS], [33], [EOS]]))
    states = []
    real = generation._decode_and_pick

    def record(*args, **options):
        out = real(*args, **options)
        states.append(np.asarray(out[0].lengths).tolist())
        return out

    monkeypatch.setattr(generation, "_decode_and_pick", record)
    generation.generate(fake, ["a", "bb", "ccc"], max_new_tokens=5)
    # Prompts of 1, 2 and 3 tokens; a row's last token is never put into its state.
    assert states == [[2, 3, 3], [2, 4, 3], [2, 5, 3], [2, 6, 3]]


def test_the_penalty_counts_prompt_and_generated_tokens(monkeypatch):
    logits = np.zeros((1, 1, VOCABULARY), np.float32)
    logits[0, 0, [65, 66, 67, 68]] = [4.0, 3.9, 3.8, 3.7]
    fake = scripted(monkeypatch, np.repeat(logits, 6, axis=1))
    s = Sampling(repetition_penalty=1.5, stop_tokens=())
    result = generation.generate(fake, [65, 9], max_new_tokens=4, sampling=s)
    # 65 is in the prompt: 66, 67, 68 come first; then all four are equally penalised.
    assert result.tokens == [[66, 67, 68, 65]]
    expected = np.log(np.exp([3.9, 3.8, 3.7, 4.0]) / np.exp(logits[0, 0].astype(np.float64)).sum())
    np.testing.assert_allclose(result.logprobs[0], expected, rtol=0, atol=5e-6)


def test_the_penalty_of_one_row_leaves_the_others_alone(monkeypatch):
    fake = scripted(monkeypatch, script_of([[70]] * 2, strength=1.0))
    rows = [Sampling(repetition_penalty=100.0, stop_tokens=()), NEVER]
    result = generation.generate(fake, ["a", "a"], max_new_tokens=3, sampling=rows)
    assert result.tokens[1] == [70, 70, 70]
    assert result.tokens[0][0] == 70


# -- capacity ---------------------------------------------------------------------------


def test_a_row_may_fill_every_position_and_one_more_is_refused_before_dispatch(monkeypatch):
    """SG-07."""
    prompt = [1] * (LIMIT - 3)
    assert len(model().generate(prompt, max_new_tokens=3, sampling=NEVER).tokens[0]) == 3
    monkeypatch.setattr(type(model()), "prefill", lambda *_: pytest.fail("dispatched"))
    with pytest.raises(
        ValueError, match=r"row 1: 509 prompt tokens and max_new_tokens=4 .*max_position_embeddings=512"
    ):
        model().generate([[1], prompt], max_new_tokens=4, sampling=NEVER)


@pytest.mark.parametrize(
    ("length", "new", "capacity"), [(5, 1, 256), (200, 56, 256), (200, 57, 512), (500, 12, 512)]
)
def test_the_state_holds_prompt_and_new_tokens_in_blocks_of_256(monkeypatch, length, new, capacity):
    class FoundError(Exception):
        pass

    def prefill(self, tokens, lengths, max_length, logits):
        raise FoundError(max_length)

    monkeypatch.setattr(type(model()), "prefill", prefill)
    with pytest.raises(FoundError) as caught:
        model().generate([[1] * length, [2]], max_new_tokens=new)
    assert caught.value.args == (capacity,)


# -- rows that go wrong -----------------------------------------------------------------


class PoisonedState(k3jax.Model):
    """The small model, but one value of a row's recurrent state is NaN after prefill."""

    def __init__(self, row):
        super().__init__(model().params, config())
        self.row = row

    def prefill(self, *args, **options):
        logits, state = super().prefill(*args, **options)
        first = dict(state.layers[0], S=state.layers[0]["S"].at[self.row, 1, 2, 3].set(jnp.nan))
        return logits, dataclasses.replace(state, layers=(first, *state.layers[1:]))


def test_a_nan_in_one_rows_state_fails_that_row_alone_and_after_the_others_finished():
    """SG-01."""
    prompts = ["one", "two", "three"]
    good = model().generate(prompts, max_new_tokens=6, sampling=NEVER)
    with pytest.raises(NonFiniteLogitsError, match="row 1 after 1 new tokens") as caught:
        generation.generate(PoisonedState(1), prompts, max_new_tokens=6, sampling=NEVER)
    error = caught.value
    assert error.rows == [1]
    assert error.result.finish_reason == ["length", "error", "length"]
    for row in (0, 2):
        assert error.result.tokens[row] == good.tokens[row]
        assert error.result.text[row] == good.text[row]
    assert error.result.tokens[1] == good.tokens[1][:1]
    assert np.isfinite(error.result.logprobs[1]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("s", [NEVER, Sampling(temperature=1.0, top_k=5, stop_tokens=())])
def test_rows_without_finite_logits_never_become_token_0(monkeypatch, poison, s):
    script = script_of([[50, 51, 52, 53]] * 3)
    if poison == "all -inf":
        script[1, 2], script[2, 0] = -np.inf, -np.inf
    else:
        script[1, 2, 9] = script[2, 0, 200] = poison
    with pytest.raises(NonFiniteLogitsError) as caught:
        generation.generate(scripted(monkeypatch, script), ["a", "b", "c"], max_new_tokens=4, sampling=s)
    assert caught.value.rows == [1, 2]
    assert [len(t) for t in caught.value.result.tokens] == [4, 2, 0]
    assert not any(0 in tokens for tokens in caught.value.result.tokens)
    assert caught.value.result.finish_reason == ["length", "error", "error"]


def test_banned_tokens_have_no_influence_on_logprobs_and_are_not_chosen(monkeypatch):
    """SG-08: most of the vocabulary at -inf."""
    script = np.full((1, 3, VOCABULARY), -np.inf, np.float32)
    script[0, :, [10, 20]] = np.log([[0.25] * 3, [0.75] * 3])
    result = generation.generate(
        scripted(monkeypatch, script),
        "a",
        max_new_tokens=3,
        sampling=Sampling(temperature=1.0, stop_tokens=()),
    )
    assert set(result.tokens[0]) <= {10, 20}
    expected = [np.log({10: 0.25, 20: 0.75}[t]) for t in result.tokens[0]]
    np.testing.assert_allclose(result.logprobs[0], expected, rtol=0, atol=1e-6)


def test_after_an_interrupt_the_next_call_works(monkeypatch):
    """NB-04."""
    expected = model().generate("again", max_new_tokens=5, sampling=NEVER)
    calls = []
    get = jax.device_get

    def interrupted(value):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return get(value)

    monkeypatch.setattr(jax, "device_get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model().generate("again", max_new_tokens=5, sampling=NEVER)
    assert model().generate("again", max_new_tokens=5, sampling=NEVER) == expected


def test_the_loops_own_state_is_donated_and_says_so(monkeypatch):
    """NB-03."""
    kept = []
    real = generation._decode_and_pick

    def keep(params, state, *args, **options):
        kept.append(state)
        return real(params, state, *args, **options)

    monkeypatch.setattr(generation, "_decode_and_pick", keep)
    model().generate("ab", max_new_tokens=2, sampling=NEVER)
    with pytest.raises(k3jax.ConsumedStateError, match="state was consumed; use the returned one"):
        model().decode_step([1], kept[0])


# -- compilation ------------------------------------------------------------------------


def test_one_compilation_serves_any_number_of_steps_and_any_parameter_values(monkeypatch):
    traces = []
    plain = k3jax.model.decode_step

    def counted(*args, **options):
        traces.append(1)
        return plain(*args, **options)

    monkeypatch.setattr(k3jax.model, "decode_step", counted)
    COMPILED.clear_cache()
    hot = Sampling(temperature=1.0, top_p=0.9, stop_tokens=())
    for new in (1, 2, 3, 17, 60):
        model().generate(["a", "bb", "c"], max_new_tokens=new, sampling=hot, seed=new)
    for s in (
        Sampling(temperature=0.3, top_k=7, stop_tokens=(1, 2, 3)),
        Sampling(temperature=2.0, min_p=0.1),
        [Sampling(), Sampling(), Sampling(temperature=0.7, top_k=3)],
    ):
        model().generate(["something longer", [4], "d"], max_new_tokens=9, sampling=s)
    list(model().stream(["s", "t", "u"], max_new_tokens=6, sampling=hot))
    assert len(traces) == 1
    assert COMPILED._cache_size() == 1


def test_on_a_mesh_the_tokens_are_the_same_and_the_step_compiles_once(cpu_devices):
    s = Sampling(repetition_penalty=1.3, temperature=1.0, top_k=20, stop_tokens=())
    expected = model().generate(["mesh", "of four"], max_new_tokens=6, sampling=s)
    mesh = Mesh(np.array(cpu_devices[:4]).reshape(2, 2), ("data", "tensor"))
    params = jax.device_put(model().params, param_shardings(config(), mesh))
    before = COMPILED._cache_size()
    sharded = k3jax.Model(params, config(), mesh=mesh).generate(
        ["mesh", "of four"], max_new_tokens=6, sampling=s
    )
    assert sharded.tokens == expected.tokens
    assert COMPILED._cache_size() == before + 1
