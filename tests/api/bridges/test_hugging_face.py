"""Real models of transformers' with weights made at random: flashsim gives what "eager" gives."""

import copy
import inspect
import logging
from itertools import product

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_cases  # noqa: E402
from model_cases import CASES, SMALL, TEXT, WORDS, check, named  # noqa: E402

import flashsim.torch  # noqa: E402
from flashsim.errors import UnsupportedError  # noqa: E402
from flashsim.torch import hugging_face  # noqa: E402
from flashsim.torch.hugging_face import Band  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

N = 17
OLDEST = transformers.__version__.startswith("5.4.")  # `make transformers`


@pytest.fixture(scope="module", autouse=True)
def installed():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    assert "transformers" in flashsim.torch.install()


def of_case(name, n=N):
    """What makes the model of a case."""

    def make():
        return named(name)(n)[0]

    make.__name__ = name
    return make


llama, mistral, gpt2, vit = map(of_case, ("Llama", "Mistral", "GPT-2", "ViT"))
gemma2, llama4, whisper = of_case("Gemma2"), of_case("Llama4"), of_case("Whisper", 20)
DECODERS = {"llama": llama, "mistral": mistral, "gpt2": gpt2}
PADDING = {
    "whole": None,
    "padded left": [[1] * N, [0] * 4 + [1] * (N - 4)],
    "padded right": [[1] * N, [1] * (N - 4) + [0] * 4],
}


def made(maker):
    """A model whose attention is far from uniform, and inputs for it (float64)."""
    torch.manual_seed(0)
    model = maker().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    words = torch.randint(3, WORDS, (2, N))
    if maker is vit:
        return model, {"pixel_values": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    if maker is whisper:
        sound = torch.randn(2, 8, 40, dtype=torch.float64)
        return model, {"input_features": sound, "decoder_input_ids": words}
    return model, {"input_ids": words}


def by_each(model, run, reference="eager"):
    """What `run` gives with the attention `reference`, and with flashsim's."""
    found = []
    for implementation in (reference, "flashsim"):
        model.zero_grad()
        model.set_attn_implementation(implementation)
        found.append(run())
    return found


def generating(n):
    """Arguments of `generate`, which makes n tokens."""
    return {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}


def close_to_sdpas(model, run, tolerance):
    """Compare tensors that `run` returns, and parameters' gradients, with those of SDPA."""
    each = by_each(model, lambda: [*run(), *(p.grad for p in model.parameters())], "sdpa")
    for x, y in zip(*each, strict=True):
        near = tolerance * float(x.abs().max()) + 1e-6
        torch.testing.assert_close(y, x, rtol=tolerance, atol=near)


#: Cases that run each time; the others are "thorough".
USUAL = ("Llama:", "Gemma3:", "GPT-OSS:", "Llama4:", "T5:", "Whisper:")


def each_case():
    """Every case in float32 and bfloat16, with and without padding."""
    for name, dtype, padding in product(CASES, (torch.float32, torch.bfloat16), (False, True)):
        if padding and name.startswith(model_cases.NEVER_PADDED):
            continue
        usual = dtype == torch.float32 and name.startswith(USUAL)
        marks = [] if usual else [pytest.mark.thorough]
        kind = f"{name.partition(':')[0]}-{str(dtype)[6:]}" + "-padding" * padding
        yield pytest.param(name, dtype, padding, id=kind, marks=marks)


@pytest.mark.parametrize(("name", "dtype", "padding"), [*each_case()])
def test_logits_and_gradients_are_as_good_as_eagers(name, dtype, padding):
    model, inputs, reference = model_cases.made(name, N, padding=padding)
    check(model, inputs, dtype, reference=reference)


@pytest.mark.parametrize("padding", [x for x in PADDING if x != "whole"])
@pytest.mark.parametrize("maker", DECODERS.values(), ids=DECODERS)
def test_batches_with_padding(maker, padding):
    """Judged by SDPA in float64: eager rows of padding alone are NaN there."""
    model, inputs = made(maker)
    inputs["attention_mask"] = torch.tensor(PADDING[padding])
    check(model, inputs, torch.float32, reference="sdpa")


def doge():
    """Its layers join the mask with one of their own, and hand on what comes of it."""
    return transformers.DogeForCausalLM(transformers.DogeConfig(**TEXT, keep_window_size=7))


@pytest.mark.skipif(OLDEST, reason="Doge computes with the mask there, which is an error of ours")
@pytest.mark.parametrize("padding", PADDING)
def test_a_model_that_joins_the_mask_with_its_own_gets_it_whole(padding):
    model, inputs = made(doge)
    if PADDING[padding]:
        inputs["attention_mask"] = torch.tensor(PADDING[padding])
    check(model, inputs, torch.float32, reference="sdpa")


def bigbird_pegasus():
    """Made for eager attention: its layers say that they are not causal."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": WORDS}
    config = transformers.BigBirdPegasusConfig(**sizes, decoder_ffn_dim=48, dropout=0.0)
    return transformers.BigBirdPegasusForCausalLM(config)


def test_a_decoder_whose_layers_say_that_they_are_not_causal():
    check(*made(bigbird_pegasus), torch.float32)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layers_word", [True, False, None])
def test_the_mask_is_believed_before_the_layer(causal, layers_word):
    layer = torch.nn.Module()
    if layers_word is not None:
        layer.is_causal = layers_word
    which = "causal" if causal else "bidirectional"
    function = getattr(transformers.masking_utils, f"{which}_mask_function")
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    got, _ = hugging_face.attend(layer, q, k, v, hugging_face.mask(1, 6, 6, mask_function=function))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(got, exact.transpose(1, 2))


GENERATING = {**DECODERS, "gpt-oss": of_case("GPT-OSS")}


@pytest.mark.parametrize("padding", ["whole", "padded left"])
@pytest.mark.parametrize("maker", GENERATING.values(), ids=GENERATING)
def test_generation_with_a_cache(maker, padding):
    model, inputs = made(maker)
    inputs["attention_mask"] = torch.tensor(PADDING[padding] or [[1] * N] * 2)
    asked = {"output_logits": True, "return_dict_in_generate": True}
    told = by_each(model, lambda: model.generate(**inputs, **asked, **generating(8)))
    assert told[0].sequences.tolist() == told[1].sequences.tolist()
    torch.testing.assert_close(*(t.logits for t in told), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: torch.ones(1, 1, 6, 6) + mask,
        lambda mask: torch.ones(1, 1, 6, 3) + mask[..., :3],
        lambda mask: torch.ones(6, 1, 6, 6).add_(mask.repeat(6, 1, 1, 1)),
        lambda mask: mask.reshape(6, 6) * -1e9,
        lambda mask: mask[:, :, 0].float(),
        lambda mask: torch.where(mask, 0, 1),
        lambda mask: mask.dtype,
        lambda mask: mask.to(torch.float32),
    ],
)
def test_a_model_that_computes_with_its_mask_is_told_so(compute):
    with pytest.raises(
        UnsupportedError, match="own code reads the attention mask as a tensor, but flashsim"
    ):
        compute(hugging_face.mask(1, 6, 6))
    assert copy.deepcopy(hugging_face.mask(1, 6, 6)).causal
    assert not hasattr(hugging_face.mask(1, 6, 6), "dtype")


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("which", ["causal", "all"])
def test_a_mask_can_be_laid_out_and_chosen_by(which, padding):
    """As a model does that knows SDPA's masks: it gets one of booleans."""
    function, _ = interfaces()[which]
    keys = torch.ones(2, 6, dtype=torch.bool)
    keys[1, 4:] = padding == "none"
    asked = {"mask_function": function, "attention_mask": keys}
    mask = hugging_face.mask(2, 6, 6, **asked)
    assert isinstance(mask, Band)
    exact = transformers.masking_utils.sdpa_mask(2, 6, 6, **asked, allow_is_causal_skip=False)
    x = torch.randn(2, 4, 6, 6)
    for lay_out in (
        lambda mask: mask[:, :, :, :3],
        lambda mask: mask.repeat(1, 4, 1, 1).reshape(8, 6, 6),
        lambda mask: ~mask.expand(2, 4, 6, 6),
        lambda mask: torch.where(mask.expand(2, 4, 6, 6), x, -1),
        lambda mask: x.masked_fill(~mask[:, :], -torch.inf).softmax(-1),
        lambda mask: torch.nn.functional.scaled_dot_product_attention(x, x, x, mask[:, :]),
    ):
        got, expected = lay_out(mask), lay_out(exact)
        assert torch.equal(got, expected)
        assert got.dtype == torch.bool or type(got) is torch.Tensor
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    for given in (mask, mask[:, :, :6, :6]):  # layers may cut it before they hand it on
        got, _ = hugging_face.attend(torch.nn.Module(), q, k, v, given)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, exact).transpose(1, 2)
        kept = keys if which == "causal" else torch.ones_like(keys)
        torch.testing.assert_close(got[kept], sdpa[kept])


def siglip2():
    config = transformers.Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=4)
    return transformers.Siglip2VisionModel(config)


@pytest.mark.parametrize("tokens", [16, 12])
def test_a_model_whose_head_lays_out_its_own_mask(tokens):
    """SigLIP 2 pools by torch's attention, whose mask it makes of the interface's."""
    torch.manual_seed(0)
    model, mask = siglip2().eval(), torch.ones(2, 16, dtype=torch.long)
    mask[1, tokens:] = 0
    inputs = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [tokens // 4, 4]]),
    }

    def run():
        given = model(**inputs)
        (given.pooler_output.square().sum() + given.last_hidden_state[0].sum()).backward()
        return [given.pooler_output.detach()]

    close_to_sdpas(model, run, 1e-5)


def cache_word(model):
    """What a model calls the keys and values of tokens before, which transformers renamed."""
    given = inspect.signature(model.forward).parameters
    return "cache" if "cache" in given else "past_key_values"


def test_a_cache_with_room_in_it():
    """A static cache has keys behind the last that was written; none may be seen."""
    model, inputs = made(llama)

    def run():
        given = {cache_word(model): transformers.StaticCache(model.config, max_cache_len=40)}
        return [model(x, **given).logits for x in (words, words[:, :3])]

    words = inputs["input_ids"]
    torch.testing.assert_close(*by_each(model, run), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padding", ["whole", "padded left"])
@pytest.mark.parametrize("maker", [llama, mistral, gemma2])
def test_generation_with_a_static_cache(maker, padding):
    """`generate` makes the masks itself then, before it calls the model."""
    model, inputs = made(maker)
    inputs["attention_mask"] = torch.tensor(PADDING[padding] or [[1] * N] * 2)
    how = {"cache_implementation": "static", "disable_compile": True, **generating(6)}
    told = by_each(model, lambda: model.generate(**inputs, **how).tolist())
    assert told[0] == told[1]


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_decoding(how):
    """The model checks several tokens at once, and the cache is cut back to those it takes."""
    (model, inputs), (assistant, _) = made(llama), made(llama)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.02 * torch.randn_like(assistant.lm_head.weight))
    inputs["input_ids"] = inputs["input_ids"][:1]
    told = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, **told)
    for one in (model, assistant):
        one.set_attn_implementation("flashsim")
    by = {"assistant_model": assistant} if how == "assistant" else {"prompt_lookup_num_tokens": 3}
    assert model.generate(**inputs, **told, **by).tolist() == wanted.tolist()


@pytest.mark.skipif(OLDEST, reason="continuous batching sees no memory on a CPU there")
@pytest.mark.parametrize("maker", [llama, mistral])
def test_continuous_batching_over_a_paged_cache(maker):
    """Prompts of different lengths, longer than a step's tokens: then they come in chunks."""
    batching = transformers.ContinuousBatchingConfig
    model, inputs = made(maker)
    prompts = [inputs["input_ids"][0, :n] for n in (N, 9, 1)]
    told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": WORDS}
    model.set_attn_implementation("eager")
    wanted = [model.generate(x[None], **told)[0, len(x) :].tolist() for x in prompts]
    model.set_attn_implementation("flashsim")
    found = model.generate_batch(
        inputs=[x.tolist() for x in prompts],
        generation_config=transformers.GenerationConfig(**told),
        continuous_batching_config=batching(num_blocks=32, max_batch_tokens=12, block_size=8),
        progress_bar=False,
    )
    assert [found[key].generated_tokens for key in sorted(found)] == wanted


@pytest.mark.parametrize("way", ["sinks", "bias", "gradient"])
def test_what_cannot_decode_sees_no_more_of_a_static_cache(way):
    """Its band says where keys begin and end; behind them is room."""
    q = torch.randn(2, 4, 1, 8, requires_grad=way == "gradient")
    k, v = torch.randn(2, 2, 2, 9, 8)
    starts, stops = torch.tensor([[0, 2], [6, 6]], dtype=torch.int32)
    band = hugging_face.mask(
        *(2, 1, 9, 5),
        attention_mask=torch.tensor([[1] * 6, [0] * 2 + [1] * 4]),
        allow_is_causal_skip=False,
        device="cpu",
    )
    assert band.keys is None
    assert (band.starts.tolist(), band.stops.tolist()) == (starts.tolist(), stops.tolist())
    more = {"sinks": torch.randn(4)} if way == "sinks" else {}
    more |= {"position_bias": torch.randn(1, 4, 1, 9)} if way == "bias" else {}
    got, _ = hugging_face.attend(torch.nn.Module(), q, k, v, band, **more)
    k[0, :, 6:] = v[0, :, 6:] = k[1, :, 6:] = v[1, :, 6:] = k[1, :, :2] = v[1, :, :2] = 1e4
    again, _ = hugging_face.attend(torch.nn.Module(), q, k, v, band, **more)
    assert torch.equal(got, again)


class PackedCache:
    """A cache of one layer that returns what it got after what it had."""

    def __init__(self, *had):
        self.had = had

    def update(self, *, key_states, value_states, layer_idx, read_index, write_index):
        assert layer_idx == 3
        new = (x[0].transpose(0, 1) for x in (key_states, value_states))
        return [torch.cat([x, y]) for x, y in zip(self.had, new, strict=True)]


@pytest.mark.parametrize("sliding", [None, 4])
def test_a_paged_cache_of_older_versions(sliding):
    """One token per sequence, by offsets; behind them, padding that gets zeros."""
    module = torch.nn.Module()
    module.layer_idx, module.sliding_window = 3, sliding
    k, v = torch.randn(2, 9, 2, 8)
    q = torch.randn(1, 4, 3, 8)
    of_k = torch.tensor([0, 5, 12, 12])
    told = {"cu_seq_lens_q": torch.tensor([0, 1, 2, 2]), "max_seqlen_q": 1, "read_index": [None]}
    told |= {"cu_seq_lens_k": {"full_attention": of_k, "sliding_attention": of_k}}
    new = torch.randn(2, 1, 2, 3, 8)
    with torch.no_grad():
        got, _ = hugging_face.attend_paged(
            *(module, q, *new, None), cache=PackedCache(k, v), write_index=[None], **told
        )
        k, v = (
            torch.cat([x, y[0].transpose(0, 1)]).transpose(0, 1)
            for x, y in zip((k, v), new, strict=True)
        )
        for i, (begin, end) in enumerate(((0, 5), (5, 12))):
            begin = max(begin, end - sliding) if sliding else begin
            wanted = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, i : i + 1], *(x[None, :, begin:end] for x in (k, v)), enable_gqa=True
            )
            torch.testing.assert_close(got[:, i], wanted[:, :, 0])
        assert (got[:, 2] == 0).all()
    with pytest.raises(UnsupportedError, match="generate_batch"):
        hugging_face.attend_paged(module, q, *new, None)


def test_a_version_of_transformers_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", lambda cache_position: None)
    with pytest.warns(UserWarning, match="needs transformers 5.4 or later, but found"):
        assert flashsim.torch.install() == ("torch",)


@pytest.mark.parametrize("maker", DECODERS.values(), ids=DECODERS)
def test_padding_without_values(maker):
    """On the meta device nobody can say which tokens are padding."""
    with torch.device("meta"):
        model, words = maker().eval(), torch.zeros(2, N, dtype=torch.long)
    model.set_attn_implementation("flashsim")
    logits = model(input_ids=words, attention_mask=torch.ones_like(words)).logits
    assert (logits.shape, logits.device.type) == ((2, N, WORDS), "meta")


def test_speech_is_written_down_with_its_caches():
    model, inputs = made(whisper)
    sound, words = inputs["input_features"].float(), inputs["decoder_input_ids"]

    def run():
        cache, steps = None, []
        states = model.get_encoder()(sound)
        for part in (words[:, :5], words[:, 5:6], words[:, 6:9]):
            given = {cache_word(model): cache}
            step = model(encoder_outputs=states, decoder_input_ids=part, **given)
            cache = step.past_key_values
            steps.append(step.logits)
        return torch.cat(steps, dim=1)

    torch.testing.assert_close(*by_each(model, run), rtol=1e-3, atol=1e-3)


# -- masks ----------------------------------------------------------------------------------------


def whole_mask(band, n_q, n_kv):
    """The boolean mask that a `Band` stands for, one score at a time."""
    keys = torch.ones(1, n_kv, dtype=torch.bool) if band.keys is None else band.keys
    left, right = band.window or (n_kv, n_kv)
    kept = torch.zeros(len(keys), n_q, n_kv, dtype=torch.bool)
    for b, row in enumerate(keys):
        queries = torch.ones(n_q, dtype=torch.bool) if band.queries is None else band.queries[b]
        there, asked = row.nonzero().flatten().tolist(), queries.nonzero().flatten().tolist()
        for i, q in enumerate(asked):
            for j, k in enumerate(there):
                offset = j - (i + len(there) - len(asked))
                kept[b, q, k] = -left <= offset <= (0 if band.causal else right)
    return kept


def interfaces():
    m = transformers.masking_utils
    return {
        "causal": (m.causal_mask_function, None),
        "window": (m.sliding_window_causal_mask_function(4), 4),
        "both sides": (m.sliding_window_bidirectional_mask_function(3), 3),
        "all": (m.bidirectional_mask_function, None),
    }


@pytest.mark.parametrize("which", ["causal", "window", "both sides", "all"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [(9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (9, 12, 0, 0), (2, 7, 8, 3)],
    ids=["square", "one query", "three", "room", "cut cache"],
)
def test_a_band_says_what_transformers_mask_says(
    which, padding, q_length, kv_length, q_offset, kv_offset
):
    function, size = interfaces()[which]
    total = q_offset + q_length
    mask = torch.ones(2, total, dtype=torch.bool)
    if padding != "none":
        mask[1, :4] = False
        mask = mask if padding == "left" else mask.flip(1)
    asked = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": None if padding == "none" else mask,
        "local_size": size,
        "device": "cpu",
    }
    exact = transformers.masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)[:, 0]
    got = hugging_face.mask(**asked)
    if isinstance(got, torch.Tensor):
        assert which == "both sides"  # anything else is a band
        torch.testing.assert_close(got[:, 0], exact)
        return
    band = whole_mask(got, q_length, kv_length).expand_as(exact)
    tokens = mask[:, q_offset:total] if padding != "none" else torch.ones(2, q_length).bool()
    for b in range(2):
        torch.testing.assert_close(band[b, tokens[b]], exact[b, tokens[b]])


def test_a_mask_of_any_other_pattern_is_handed_on_whole():
    m = transformers.masking_utils
    odd = m.and_masks(m.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0)
    got = hugging_face.mask(2, 6, 6, mask_function=odd)
    assert got.shape == (2, 1, 6, 6)
    assert bool(got[0, 0, 3, 1])
    assert not bool(got[0, 0, 3, 2])
    other = m.sliding_window_causal_mask_function(3)  # not of the size that was named
    assert isinstance(hugging_face.mask(1, 6, 6, mask_function=other, local_size=4), torch.Tensor)
    gaps = torch.tensor([[True, False, True, True, True, True]])
    window = m.sliding_window_causal_mask_function(3)
    kept = hugging_face.mask(1, 6, 6, mask_function=window, local_size=3, attention_mask=gaps)
    assert isinstance(kept, torch.Tensor)


def test_packed_examples_do_not_see_each_other():
    """Position ids that start again, by transformers' mask; offsets, as collators give them."""
    model, inputs = made(llama)
    model.set_attn_implementation("flashsim")
    row = inputs["input_ids"][:1]
    apart = torch.cat([model(row[:, :9]).logits, model(row[:, 9:]).logits], dim=1)
    positions = torch.cat([torch.arange(9), torch.arange(N - 9)])[None]
    torch.testing.assert_close(
        model(row, position_ids=positions, use_cache=False).logits, apart, rtol=1e-3, atol=1e-3
    )

    q, k, v = (torch.randn(1, 2, N, 8) for _ in range(3))
    cuts = torch.tensor([0, 9, N], dtype=torch.int32)
    layer = torch.nn.Module()
    given = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 9, "max_length_k": 9}
    got, _ = hugging_face.attend(layer, q, k, v, None, is_causal=True, **given)
    expected = [
        hugging_face.attend(layer, *(x[:, :, part] for x in (q, k, v)), None, is_causal=True)[0]
        for part in (slice(0, 9), slice(9, N))
    ]
    torch.testing.assert_close(got, torch.cat(expected, dim=1))


def test_a_position_bias_has_a_gradient_and_meets_padding():
    q, k, v = (torch.randn(2, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    keys = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    layer, band = torch.nn.Module(), Band(causal=False, keys=keys)
    got, _ = hugging_face.attend(layer, q, k, v, band, position_bias=bias, scaling=0.5)
    scores = (q @ k.mT * 0.5 + bias).masked_fill(~keys[:, None, None], float("-inf"))
    expected = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)
    torch.testing.assert_close(got, expected)
    (mine,) = torch.autograd.grad(got.square().sum(), bias)
    (theirs,) = torch.autograd.grad(expected.square().sum(), bias)
    torch.testing.assert_close(mine, theirs)


# -- rows without keys -----------------------------------------------------------------------------


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *product(["bool", "least", "bias", "-inf"], TYPES),
        ("-1e9", torch.float32),  # float16 has no such number, float64 digits for scores beside it
        ("-1e9", torch.bfloat16),
    ],
)
def test_a_row_that_a_mask_tensor_leaves_without_keys_is_zeros(kind, dtype):
    """Forward and backward: one row of a mask, and all rows of one batch entry."""
    q, k, v = (torch.randn(2, 2, 8, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    keep = torch.rand(2, 1, 8, 8) < 0.7
    keep[..., 0] = True
    keep[0, :, 2] = keep[1] = False
    least = {"-1e9": -1e9, "-inf": -torch.inf}.get(kind, torch.finfo(dtype).min)
    mask = (
        keep if kind == "bool" else torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, least)
    )
    given = {"attention_mask": mask}
    if kind == "bias":  # of a model that adds its mask to it
        given = {"attention_mask": torch.ones(8, dtype=torch.bool), "position_bias": mask}
    got, _ = hugging_face.attend(torch.nn.Module(), q, k, v, **given, scaling=0.25)
    assert (got[0, 2] == 0).all()
    assert (got[1] == 0).all()

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=keep, scale=0.25)
    weight = torch.randn(got.shape, dtype=torch.float64)  # rows without keys as well
    mine = torch.autograd.grad((got.double() * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((exact.transpose(1, 2) * weight).sum(), wide)
    near = {"rtol": 0, "atol": 40 * torch.finfo(dtype).eps}
    for x, y in zip((got, *mine), (exact.transpose(1, 2), *theirs), strict=True):
        torch.testing.assert_close(x.double(), y, **near)


def gemma3():
    sizes = {**TEXT, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
    sight = {**SMALL, "image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=sizes, vision_config=sight, mm_tokens_per_image=4,
        image_token_id=60, boi_token_id=61, eoi_token_id=62,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def padded_left(model):
    """A batch of two; of the second entry all but the last tokens are padding."""
    attention_mask = torch.ones(2, 40, dtype=torch.long)
    attention_mask[1, :24] = 0
    words = torch.randint(3, 60, (2, 40))
    inputs = {"input_ids": words, "attention_mask": attention_mask, "use_cache": False}
    if isinstance(model, transformers.Gemma3ForConditionalGeneration):
        words[:, 30:34] = 60  # one image, which is seen whole
        inputs["token_type_ids"] = (words == 60).long()
        inputs["pixel_values"] = torch.randn(2, 3, 8, 8)
    return inputs


def own_mask(inputs):
    """The same padding as a float mask of the caller's own, (batch, 1, n, n)."""
    least = torch.finfo(torch.float32).min
    keys = inputs["attention_mask"].bool()[:, None, None]
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    mask = torch.zeros(2, 1, 40, 40).masked_fill(~(keys & causal), least)
    return inputs | {"attention_mask": mask}


def length_of_gradient(model, implementation, inputs, labels):
    model.zero_grad()
    model.set_attn_implementation(implementation)
    model(**inputs, labels=labels).loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).norm().item()


@pytest.mark.parametrize("padding_in_loss", [False, True], ids=["tokens", "padding too"])
@pytest.mark.parametrize("way", ["llama4", "gemma3", "own mask", "compiled"])
def test_padding_on_the_left_adds_nothing_to_gradients(way, padding_in_loss):
    """Where the mask is a tensor. A label is what the token before it predicts, so one row of
    padding is in the loss even where padding's labels are left out. Eager has means in such rows.
    """
    torch.manual_seed(0)
    model = {"llama4": llama4, "gemma3": gemma3}.get(way, llama)().train()
    inputs = padded_left(model)
    labels = inputs["input_ids"].clone()
    if not padding_in_loss:
        labels[inputs["attention_mask"] == 0] = -100
    sdpa, eager = (length_of_gradient(model, x, inputs, labels) for x in ("sdpa", "eager"))
    if way == "own mask":
        inputs = own_mask(inputs)
    if way == "compiled":
        model.forward = torch.compile(model.forward, backend="aot_eager")
    got = length_of_gradient(model, "flashsim", inputs, labels)
    assert got == pytest.approx(sdpa, rel=1e-4)
    assert padding_in_loss or got == pytest.approx(eager, rel=1e-2)


@pytest.mark.parametrize("maker", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_batch_of_padding_alone(maker, tokens):
    """All of it, or all of one entry: zeros, as SDPA has them, and gradients."""
    model, inputs = made(maker)
    inputs["attention_mask"] = torch.zeros(2, N, dtype=torch.long)
    inputs["attention_mask"][0, N - tokens :] = 1

    def run():
        logits = model(**inputs).logits
        logits.square().sum().backward()
        return [logits.detach()]

    close_to_sdpas(model, run, 1e-3)


@pytest.mark.parametrize("side", ["both", "keys"])
def test_padding_alone_gives_zeros_and_a_gradient_of_zeros(side):
    """Decoders leave out their own queries with the keys; encoders' all ask."""
    q, k, v = (torch.randn(2, h, 6, 8, requires_grad=True) for h in (4, 2, 2))
    nothing = torch.zeros(2, 6, dtype=torch.bool)
    band = Band(side == "both", keys=nothing, queries=nothing if side == "both" else None)
    got, _ = hugging_face.attend(torch.nn.Module(), q, k, v, band)
    assert got.shape == (2, 6, 4, 8)
    assert (got == 0).all()
    for x in torch.autograd.grad(got.sum(), (q, k, v)):
        assert (x == 0).all()


@pytest.mark.parametrize("chunk", [1, 4])
def test_generation_begins_with_chunks_of_padding_alone(chunk):
    model, inputs = made(llama)
    inputs["attention_mask"] = torch.tensor([[0] * 6 + [1] * (N - 6), [0] * 9 + [1] * (N - 9)])
    how = {"prefill_chunk_size": chunk, **generating(6)}
    told = by_each(model, lambda: model.generate(**inputs, **how).tolist(), "sdpa")
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dropout": 0.1}, "no dropout, got dropout=0.1; set the model's attention"),
        ({"indices": torch.zeros(1, 6, 2)}, "only those keys that an indexer chose"),
        ({"block_indices": torch.zeros(1, 6, 2)}, "only those blocks of keys"),
        ({"output_attentions": True}, "the probabilities"),
    ],
)
@pytest.mark.parametrize("mask", [None, Band(causal=True)], ids=["no mask", "the usual mask"])
def test_what_a_layer_may_not_ask(given, text, mask):
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(UnsupportedError, match=text):
        hugging_face.attend(torch.nn.Module(), x, x, x, mask, is_causal=True, **given)


def test_probabilities_of_a_model_that_does_not_tell_its_layers_are_refused():
    """Siglip's layers get no `output_attentions`; its result would have no attentions."""
    config = transformers.SiglipTextConfig(**SMALL, vocab_size=64)
    model = transformers.SiglipTextModel(config)
    model.set_attn_implementation("flashsim")
    ids = torch.ones(1, 5, dtype=torch.long)
    model(ids)
    with pytest.raises(UnsupportedError, match="returning the probabilities"):
        model(ids, output_attentions=True)


def test_compiled_models():
    model, inputs = made(llama)
    model.set_attn_implementation("flashsim")
    expected = model(**inputs).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
