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
        "router_aux_loss_coef",
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
