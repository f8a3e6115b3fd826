"""Small models of transformers with random weights, and their results with eager attention.

`CASES` names architectures by what is special about their attention. A case is a function of the
number of tokens that returns a model and its inputs, on the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers

WORDS, BATCH = 64, 2
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {
    **{**SMALL, "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
#: Options of an encoder and a decoder.
TWO_SIDES = {
    **{"d_model": 32, "vocab_size": WORDS, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
}
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)


def _words(n: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (BATCH, n))


def tokens(n: int) -> dict[str, torch.Tensor]:
    """Return the input of a text model."""
    return {"input_ids": _words(n)}


def two_texts(n: int) -> dict[str, torch.Tensor]:
    """Return the inputs of an encoder and a decoder."""
    return {"input_ids": _words(n), "decoder_input_ids": _words(n // 2 + 1)}


def case(
    name: str, head: str, inputs: Callable[[int], Any], config: str = "Config", **options: Any
) -> Callable[[int], Any]:
    """Return a case of the class `name` + `head` of transformers, with options of its config."""

    def make(n: int) -> Any:
        made = getattr(transformers, name + config)(**options)
        return getattr(transformers, name + head)(made), inputs(n)

    return make


def decoder(name: str, config: str = "Config", **more: Any) -> Callable[[int], Any]:
    """Return a case of a text decoder, by its name in transformers."""
    return case(name, "ForCausalLM", tokens, config, **TEXT | more)


def _whisper(n: int) -> Any:
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    ends |= {"begin_suppress_tokens": None, "suppress_tokens": None}
    sizes = {"num_mel_bins": 8, "max_source_positions": n, "max_target_positions": n}
    speech = lambda n: {  # noqa: E731
        **{"input_features": torch.randn(BATCH, 8, 2 * n), "decoder_input_ids": _words(n)}
    }
    options = {**TWO_SIDES, **sizes, **ends, **NO_DROPOUT}
    return case("Whisper", "ForConditionalGeneration", speech, **options)(n)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": WORDS}
GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"vocab_size": WORDS, "word_embed_proj_dim": 32, "max_position_embeddings": 512}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "initializer_factor": 0.25}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT |= {"vocab_size": WORDS, "max_position_embeddings": 512}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
LLAMA4 |= {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"]}
DEEPSEEK = {
    **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "first_k_dense_replace": 2,
}
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
#: Cases whose inputs have no tokens that could be padding.
NEVER_PADDED = ("ViT", "Whisper")
CASES: dict[str, Callable[[int], Any]] = {
    "Llama: causal, groups of heads": decoder("Llama"),
    "Qwen2: biases of projections": decoder("Qwen2"),
    "Qwen3: norms of q and k": decoder("Qwen3", head_dim=8),
    "Phi3: one projection": decoder("Phi3"),
    "OLMo2: norms behind layers": decoder("Olmo2"),
    "GPT-NeoX: part of a head is rotated": decoder("GPTNeoX"),
    "GPT-2: one projection": case(
        *("GPT2", "LMHeadModel", tokens), **GPT2, bos_token_id=1, eos_token_id=2
    ),
    "OPT: learned positions": case("OPT", "ForCausalLM", tokens, **OPT, **NO_DROPOUT),
    "Gemma: one key head": decoder("Gemma", head_dim=8, num_key_value_heads=1),
    "Mistral: a window": decoder("Mistral", sliding_window=5),
    "Starcoder2: a window, and biases": decoder("Starcoder2", sliding_window=7),
    "Gemma2: softcap, windows and full layers": decoder(
        "Gemma2", head_dim=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=8, **MIXED
    ),
    "Gemma3: windows and full layers": decoder(
        "Gemma3", "TextConfig", head_dim=8, query_pre_attn_scalar=8, **MIXED
    ),
    "Cohere2: layers with a window": decoder("Cohere2", **MIXED),
    "GPT-OSS: sinks, windows and full layers": decoder("GptOss", head_dim=8, **MIXED, **EXPERTS),
    "Llama4: chunks": decoder("Llama4", "TextConfig", **LLAMA4),
    "DeepSeek-V3: latent keys, narrow values": decoder("DeepseekV3", **DEEPSEEK),
    "T5: a bias of relative positions": case("T5", "ForConditionalGeneration", two_texts, **T5),
    "BART: encoder, decoder and cross attention": case(
        *("Bart", "ForConditionalGeneration", two_texts),
        **{**TWO_SIDES, **NO_DROPOUT, "max_position_embeddings": 512},
    ),
    "Whisper: speech, cross attention": _whisper,
    "BERT: both directions": case("Bert", "ForMaskedLM", tokens, **BERT),
    "ViT: pictures": case(
        *("ViT", "ForImageClassification", lambda n: {"pixel_values": torch.randn(2, 3, 32, 32)}),
        **{**SMALL, "image_size": 32, "patch_size": 8},
    ),
}


def named(name: str) -> Callable[[int], Any]:
    """Return the case of an architecture, such as "Llama"."""
    (case,) = (case for case in CASES if case.startswith(f"{name}:"))
    return CASES[case]


def made(case: str, n: int, *, padding: bool = False) -> Any:
    """Return a case's model, whose attention is far from uniform, its inputs, and its reference.

    All are float64. With `padding` the second sequence starts with padding tokens. Then the
    reference is "sdpa", since eager attention returns NaN for rows of padding. A model without sdpa
    gets its padding last.
    """
    torch.manual_seed(0)
    model, inputs = CASES[case](n)
    model = model.eval().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products do not support float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            else:
                parameter.mul_(4 if parameter.ndim > 1 else 1)
    reference = "eager"
    if padding:
        mask = inputs["attention_mask"] = torch.ones(BATCH, n, dtype=torch.long)
        mask[1, : n // 3] = 0
        reference = "sdpa" if model._supports_sdpa else "eager"
        inputs["attention_mask"] = mask if reference == "sdpa" else mask.flip(1)
    wide = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    return model, wide, reference


def computed(model: Any, inputs: Any, implementation: str, dtype: torch.dtype) -> Any:
    """Return logits and all gradients with one attention in one type."""
    model.to(dtype).zero_grad()
    model.set_attn_implementation(implementation)
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    logits = model(**inputs).logits
    if "attention_mask" in inputs and logits.shape[:2] == inputs["attention_mask"].shape:
        logits = logits[inputs["attention_mask"].bool()]
    logits.square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, **gradients}


def check(model: Any, inputs: Any, dtype: torch.dtype, reference: str = "eager") -> None:
    """Check that error <= 2 x eager attention's in the same type + one rounding.

    Logits are compared by their maximum. Gradients are compared by the norm of all of them as one
    vector: for a small tensor that sums over everything, such as a bias, eager's own error may be 0
    by chance.
    """
    state = {n: x.clone() for n, x in model.state_dict().items()}
    found = {}
    for kind in (torch.float64, dtype):
        for which in (reference,) if kind is torch.float64 else ("eager", "flashsim"):
            model.double().load_state_dict(state)
            x = computed(model, inputs, which, kind)
            logits, *gradients = (y.detach().double() for y in x.values())
            found[kind, which] = logits, torch.cat([g.flatten() for g in gradients])
    logits, gradient = found[torch.float64, reference]
    assert gradient.norm() > 0
    eps = torch.finfo(dtype).eps
    for place, size, true in ((0, torch.amax, logits), (1, torch.linalg.vector_norm, gradient)):
        error = {
            which: size((found[dtype, which][place] - true).abs())
            for which in ("eager", "flashsim")
        }
        assert error["flashsim"] <= 2 * error["eager"] + eps * size(true.abs()), (place, error)
