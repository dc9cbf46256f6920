"""The fields of config.json and generation_config.json, and what each of them does.

A field is honoured, refused unless its value is neutral, not applied since it concerns
decoding, or without influence. docs/model_files.md is made of these tables. Any
other field is refused unless it is null, false or empty, since it may change results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


HONOURED = names(
    """
    architectures attention_bias attention_out_bias attn_logit_softcapping eos_token_id
    experts_per_token final_logit_softcapping first_k_dense_replace head_dim hidden_act
    hidden_activation hidden_size intermediate_size layer_types max_position_embeddings
    max_window_layers mlp_layer_types model_type moe_intermediate_size moe_k
    moe_layer_end_index moe_layer_start_index moe_num_experts moe_num_shared_experts
    moe_topk n_group n_routed_experts n_shared_experts no_rope_layer_interval
    no_rope_layers norm_topk_prob num_attention_heads num_experts num_experts_per_tok
    num_hidden_layers num_key_value_heads num_local_experts num_mtp_layers
    num_nextn_predict_layers num_shared_experts original_max_position_embeddings
    partial_rotary_factor qkv_bias quantization_config query_pre_attn_scalar
    rms_norm_eps rope_local_base_freq rope_parameters rope_scaling rope_theta rotary_dim
    routed_scaling_factor router_scaling_factor scoring_func
    shared_expert_intermediate_size sliding_window sliding_window_pattern swiglu_alpha
    swiglu_limit tie_word_embeddings topk_group topk_method use_qk_norm
    use_sliding_window vocab_size
    """
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "clip_qkv": (),
    "compression_config": (),
    "constraints": ([],),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "norm_type": ("rms",),
    "mlp_only_layers": ([],),
    "moe_gate": ("topk",),
    "moe_layer_freq": (1,),
    "moe_layer_interval": (1,),
    "moe_norm_min": (1e-12,),
    "moe_use_aux_free": (True,),
    "per_layer_config": ({},),
    "qk_norm_type": ("per_layer",),
    "quantization": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "use_bias": (False,),
    "use_bidirectional_attention": (False,),
    "use_cla": (False,),
    "use_rmsnorm": (True,),
    "watermarking_config": (),
}
"""Refused unless null or one of these values."""
DECODING = names(
    """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind diversity_penalty do_sample dola_layers early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    is_assistant length_penalty max_length max_matching_ngram_size max_new_tokens
    max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences
    penalty_alpha prompt_lookup_num_tokens remove_invalid_values renormalize_logits
    repetition_penalty speculation_type target_lookbehind temperature top_h top_k top_p
    typical_p use_mtp
    """
)
"""Not applied: how tokens are chosen is an argument of `generate`."""
UNUSED = names(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _commit_hash _experts_implementation _experts_implementation_internal
    _flash_attn_2_enabled _from_model_config _name_or_path _output_attentions
    _sliding_window_pattern attention_dropout attention_head_dim attn_implementation
    auto_map aux_loss_alpha bos_token_id cache_config cache_implementation
    chunk_size_feed_forward cla_share_factor class_num classifier_dropout compile_config
    continuous_batching_config decoder_start_token_id dense_list disable_compile dtype
    embd_pdrop enable_lm_head_fp32 enable_moe_fp32_combine eod_token_id finetuning_task
    gradient_checkpointing hidden_dropout id2label initial_context_length
    initializer_range is_decoder is_llama_config label2id low_memory max_cache_len
    max_sequence_length model_max_length moe_capacity name_or_path num_labels
    org_vocab_size output_attentions output_hidden_states output_logits
    output_router_logits output_scores pad_token_id pool_type prefill_chunk_size
    pretraining_tp problem_type resid_pdrop residual_dropout return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id
    seq_aux sliding_window_size tokenizer_class torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    """
)
"""Training, notes, outputs and implementations of other libraries. Dtypes are those of
`load`."""
EMPTY: tuple[Any, ...] = (False, "", [], {})
VARIANT_FIX = "use a model of which each variant is implemented"


def refuse_fields(fields: Mapping[str, Any], path: Path) -> None:
    """Raise ArgumentError that names the fields of the file `path` that are unknown or
    not neutral."""
    other_names = fields.keys() - HONOURED - DECODING - UNUSED
    faults = sorted(
        name
        for name in other_names
        if not is_among(fields[name], (None, *NEUTRAL.get(name, EMPTY)))
    )
    if faults:
        wanted = "; ".join(map(_wanted, faults))
        got = "; ".join(f"{name} = {short(fields[name])}" for name in faults)
        fix = f"{VARIANT_FIX}, or remove a field that does not change its results"
        raise refused(path, wanted, got, fix)


def _wanted(name: str) -> str:
    if name not in NEUTRAL:
        return f"no unknown field {name}"
    return f"{name} {' or '.join([*map(json.dumps, NEUTRAL[name]), 'null'])}"


def short(value: Any, most: int = 60) -> str:
    """The first characters of a value of JSON as text."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "data in too many levels"
    return text if len(text) <= most else f"{text[:most]}..."


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value of JSON is one of some. Bool is an int in Python: 0 is not false
    here."""
    return any(
        value == one_value and isinstance(value, bool) == isinstance(one_value, bool)
        for one_value in values
    )


def refused(path: Path, wanted: str, got: str, fix: str) -> ArgumentError:
    """The error for the file `path` of a model."""
    return ArgumentError(
        "the model cannot be loaded", where=str(path), wanted=wanted, got=got, fix=fix
    )
