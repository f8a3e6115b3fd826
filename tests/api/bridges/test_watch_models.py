"""`flashsim.torch.watch` on models of transformers, with weights made at random."""

import csv
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from model_cases import TEXT, named  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import flashsim.torch  # noqa: E402
from flashsim.torch import watch  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, **options}))


TOKENS = {"input_ids": torch.arange(18).reshape(2, 9) + 3}
CAUSAL = ("causal", 9, 9)
#: Cases of `model_cases`, numbers of tokens, and each layer's mask, queries and keys.
MODELS = {
    "Llama": (9, {f"model.layers.{n}.self_attn": CAUSAL for n in (0, 1)}),
    "Mistral": (
        9, {f"model.layers.{n}.self_attn": ("causal, window 4:0", 9, 9) for n in (0, 1)},
    ),
    "GPT-2": (9, {f"transformer.h.{n}.attn": CAUSAL for n in (0, 1)}),
    "ViT": (9, {f"vit.layers.{n}.attention": ("dense", 17, 17) for n in (0, 1)}),
    "Whisper": (20, {
        f"model.{layer}": shape
        for n in (0, 1)
        for layer, shape in (
            (f"encoder.layers.{n}.self_attn", ("dense", 20, 20)),
            (f"decoder.layers.{n}.self_attn", CAUSAL),
            (f"decoder.layers.{n}.encoder_attn", ("dense", 9, 20)),
        )
    }),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_seen_and_nothing_changes(name, implementation):
    n, expected = MODELS[name]
    torch.manual_seed(0)
    model, inputs = named(name)(n)
    if name == "Whisper":  # fewer queries than keys
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :9]
    model.eval().set_attn_implementation(implementation)
    want = model(**inputs)[0]
    want.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    with watch(model) as seen:
        got = model(**inputs)[0]
        got.sum().backward()

    assert torch.equal(got, want)
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, again, gradients))
    assert len(again) == len(gradients)
    assert not seen.missed
    found = {c.name: (c.pattern.kind, c.problem.n_q, c.problem.n_kv) for c in seen}
    assert found == expected
    assert len(seen) == len(expected)
    assert all(call.backward for call in seen)
    assert all(("eager" in call.api) == (implementation == "eager") for call in seen)
    assert all(call.problem.heads == 4 and call.problem.head_dim == 8 for call in seen)


def test_generation_with_a_cache_is_many_short_calls():
    torch.manual_seed(0)
    model = llama().eval()
    with watch(model) as seen, torch.no_grad():
        model.generate(**TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=99)

    sizes = [(c.problem.n_q, c.problem.n_kv) for c in seen.named("layers.1.self_attn")]
    assert sizes == [(9, 9), (1, 10), (1, 11), (1, 12)]


def test_padding_is_said():
    torch.manual_seed(0)
    model = llama().eval()
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    with watch(model) as seen, torch.no_grad():
        model(**TOKENS, attention_mask=mask)

    assert all("counted as dense" in call.note for call in seen)


SEVENTY = {
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 8192},
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_seventy_billion_parameters_in_seconds(implementation):
    began = time.perf_counter()
    with torch.device("meta"):
        model = llama(**SEVENTY, dtype="bfloat16", attn_implementation=implementation)
        model = model.to(torch.bfloat16).eval()
    assert sum(p.numel() for p in model.parameters()) > 70e9
    with watch(model) as seen, torch.no_grad():
        model(input_ids=torch.zeros(1, 8192, dtype=torch.long, device="meta"))
    standard, flash2, *totals = seen.rows(device="H100", l2=False)
    seconds = time.perf_counter() - began

    assert len(seen) == standard["calls"] == flash2["calls"] == totals[0]["calls"] == 80
    assert standard["module"] == "model.layers.0-79.self_attn"
    p = seen["layers.3.self_attn"].problem
    assert (p.heads, p.kv_heads, p.n_q, p.head_dim, p.dtype) == (64, 8, 8192, 128, "bfloat16")
    assert p.causal
    assert standard["on"] == "meta"
    assert standard["scores B"] == 2 * 64 * 8192**2 * 2
    assert flash2["ms by"] == "predict"
    assert flash2["ms"] < standard["ms"]
    assert seconds < 60, "seconds on a laptop; this much on a busy machine"


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flashsim"])
def test_a_bias_for_each_head_is_counted_where_it_has_no_values(implementation):
    """T5 adds one to the scores: on the meta device as many bytes as on the CPU."""
    flashsim.torch.install()
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    counted = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            config = transformers.T5Config(**sizes, vocab_size=64, dropout_rate=0.0)
            model = transformers.T5ForConditionalGeneration(config).eval()
            words = torch.zeros(2, 33, dtype=torch.long)
        model.set_attn_implementation(implementation)
        with watch(model) as seen:
            model(input_ids=words, decoder_input_ids=words)
        calls = [seen[f"{side}.block.0.layer.0.SelfAttention"] for side in ("encoder", "decoder")]
        counted.append([(flashsim.count(c.problem).compulsory(), c.pattern.bias) for c in calls])
    assert counted[0] == counted[1]
    for compulsory, bias in counted[0]:
        assert bias == (1, 4)
        assert compulsory == 4 * (4 * 2 * 4 * 33 * 8 + 2 * 4 * 33 + 4 * 33 * 33)  # q, k, v, o; L; S


def test_a_model_under_fake_tensors():
    with FakeTensorMode():
        model = llama().eval()
        with watch(model) as seen, torch.no_grad():
            model(input_ids=torch.zeros(2, 9, dtype=torch.long))

    assert [call.device for call in seen] == ["cpu (fake)"] * 2
    assert all(call.problem.causal for call in seen)


def test_a_program_that_imports_transformers_while_it_is_watched(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, transformers\n"
        "config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=64,"
        " num_hidden_layers=2, num_attention_heads=2)\n"
        "model = transformers.LlamaForCausalLM(config)\n"
        "model.set_attn_implementation('eager')\n"
        "model(torch.arange(8)[None])\n"
    )
    flashsim = "from flashsim.cli.app import app; app()"
    command = [sys.executable, "-c", flashsim, "watch", "--csv", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    rows = [*csv.DictReader(done.stdout.splitlines())]
    assert {row["api"] for row in rows if row["module"] != "total"} == {"transformers, eager"}
    assert rows[0]["calls"] == "2"
