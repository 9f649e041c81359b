"""Keys of `config.json` that change no number of a served model, although nothing reads them.

A key that is neither read nor here is named by `manta check`. `tests/workers/test_config_keys.py` compares the list
with transformers' configurations.
"""

from __future__ import annotations

HARMLESS_KEYS = frozenset(
    {
        # Names and versions.
        "_name_or_path",
        "_from_model_config",
        "auto_map",
        "model_type",
        "transformers_version",
        "tokenizer_class",
        "unsloth_fixed",
        "unsloth_version",
        # Training, and heads for other tasks than generation.
        "attention_dropout",
        "residual_dropout",
        "resid_pdrop",
        "aux_loss_alpha",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "embedding_initializer_range",
        "embd_pdrop",
        "initializer_range",
        "finetuning_task",
        "id2label",
        "label2id",
        "problem_type",
        "num_labels",
        "task_specific_params",
        "tie_encoder_decoder",
        "pruned_heads",
        # How transformers computes and what it returns.
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "cache_implementation",
        "chunk_size_feed_forward",
        "ep_size",
        "gradient_checkpointing",
        "is_decoder",
        "is_encoder_decoder",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_router_logits",
        "pretraining_tp",
        "return_dict",
        "return_dict_in_generate",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        "add_cross_attention",
        "cross_attention_hidden_size",
        # Flags of weights: the check of the file's tensors finds those that the model does not have.
        "attention_bias",
        "mlp_bias",
        # Tokens that the tokenizer adds, or nobody.
        "bos_token_id",
        "decoder_start_token_id",
        "pad_token_id",
        "prefix",
        "sep_token_id",
    }
)

HARMLESS_QUANTIZATION_KEYS = frozenset(
    {
        # How the checkpoint was made.
        "act_group_aware",
        "actorder",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_percent",
        "dataset",
        "global_compression_ratio",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "observer",
        "observer_kwargs",
        "pad_token_id",
        "quantization_status",
        "static_groups",
        "tokenizer",
        "true_sequential",
        # How another library computes.
        "backend",
        "dequantize",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "run_compressed",
        "use_cuda_fp16",
        "use_exllama",
        "use_optimized_inference",
        # What the tensors say themselves: which linears are quantised, their order of inputs, their scales' dtypes.
        "desc_act",
        "expert_dtype",
        "lm_head",
        "modules_in_block_to_quantize",
        "modules_to_convert",
        "scale_dtype",
        "zp_dtype",
        # Rounding that Manta does by scales of each step, or not at all: of activations, and of the KV cache.
        "activation_scheme",
        "block_structure",
        "group_size",
        "kv_cache_scheme",
        "scale_fmt",
        "strategy",
        "symmetric",
        # Versions of tools.
        "quantizer",
        "version",
    }
)
"""The same for the keys at any depth below `quantization_config`."""
