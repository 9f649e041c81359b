"""The native family of each kind of text decoder that multimodal models have, and what their configurations leave out.

Plain data; imports no framework. `tests/workers/test_wrappers.py` compares it with transformers' classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """The sizes that transformers' class has as defaults, so that published configurations may leave them out. None is
    a size that the family derives from others, or does not have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    max_position_embeddings: int | None


class TextFamily(NamedTuple):
    architecture: str
    """The native family in `families.py`."""
    sizes: Sizes
    others: dict[str, Any] = {}
    """Values of other keys that differ from those that the family takes if a key is missing."""

    @property
    def usual(self) -> dict[str, Any]:
        """The values of keys that a configuration leaves out."""
        return {key: size for key, size in self.sizes._asdict().items() if size is not None} | self.others


_PADDED = {"unpadded_vocab_size": 200058}
TEXT_FAMILIES = {
    "axk1": TextFamily("AXK1ForCausalLM", Sizes(163840, 7168, 18432, 61, 64, None, 32768)),
    "axk2": TextFamily("AXK2ForCausalLM", Sizes(163840, 2048, 5120, 48, 32, None, 131072)),
    "bailing_hybrid": TextFamily("BailingHybridForCausalLM", Sizes(157184, 2560, 6144, 42, 32, None, None)),
    "bamba": TextFamily("BambaForCausalLM", Sizes(128000, 4096, 14336, 32, 32, 8, 262144)),
    "cohere2": TextFamily("Cohere2ForCausalLM", Sizes(256000, 8192, 22528, 40, 64, None, 8192)),
    "deepseek_v2": TextFamily("DeepseekV2ForCausalLM", Sizes(102400, 4096, 11008, 32, 32, None, 2048)),
    "deepseek_v3": TextFamily("DeepseekV3ForCausalLM", Sizes(129280, 7168, 18432, 61, 128, None, 4096)),
    "deepseek_v32": TextFamily("DeepseekV32ForCausalLM", Sizes(129280, 7168, 18432, 61, 128, None, 163840)),
    "deepseek_v4": TextFamily("DeepseekV4ForCausalLM", Sizes(129280, 4096, None, 43, 64, None, 1048576)),
    "dots3_note_text": TextFamily("Dots3NoteForCausalLM", Sizes(152064, 5120, 13824, 46, 128, None, 524288)),
    "emu3_text_model": TextFamily(
        "LlamaForCausalLM", Sizes(184622, 4096, 14336, 32, 32, 8, 9216), {"rms_norm_eps": 1e-05, "rope_theta": 1e6}
    ),
    "falcon_h1": TextFamily("FalconH1ForCausalLM", Sizes(128000, 4096, 14336, 32, 32, 8, 8192)),
    "falcon_mamba": TextFamily("FalconMambaForCausalLM", Sizes(50280, 768, None, 32, None, None, None)),
    "gemma2": TextFamily("Gemma2ForCausalLM", Sizes(256000, 2304, 9216, 26, 8, 4, 8192)),
    "gemma3_text": TextFamily("Gemma3ForCausalLM", Sizes(262208, 2304, 9216, 26, 8, 4, 131072)),
    "gemma3n_text": TextFamily("Gemma3nForCausalLM", Sizes(262400, 2048, 16384, 35, 8, 2, 32768)),
    "gemma4_text": TextFamily("Gemma4ForCausalLM", Sizes(262144, 2304, 9216, 30, 8, 4, 131072)),
    "gemma4_unified_text": TextFamily(
        "Gemma4ForCausalLM",
        Sizes(262144, 2304, 9216, 30, 8, 4, 262144),
        {"hidden_size_per_layer_input": 0, "sliding_window": 1024},
    ),
    "glm": TextFamily("GlmForCausalLM", Sizes(151552, 4096, 13696, 40, 32, 2, 131072)),
    "glm4": TextFamily("Glm4ForCausalLM", Sizes(151552, 4096, 13696, 40, 32, 2, 131072)),
    "glm4_moe": TextFamily("Glm4MoeForCausalLM", Sizes(151552, 4096, 10944, 46, 96, 8, 131072)),
    "glm4_moe_lite": TextFamily("Glm4MoeLiteForCausalLM", Sizes(154880, 2048, 10240, 47, 20, None, 202752)),
    "glm5_next_text": TextFamily("Glm5NextTextModel", Sizes(154880, 4096, 12288, 45, 64, None, 1048576)),
    "glm_moe_dsa": TextFamily("GlmMoeDsaForCausalLM", Sizes(154880, 6144, 12288, 78, 64, None, 202752)),
    "glm4v_moe_text": TextFamily("Glm4MoeForCausalLM", Sizes(151424, 4096, 10944, 46, 96, 8, 65536)),
    "glm4v_text": TextFamily("Glm4vTextModel", Sizes(151552, 4096, 13696, 40, 32, 2, 32768)),
    "glm_ocr_text": TextFamily(
        "Glm4vTextModel", Sizes(59392, 1024, 4096, 16, 16, 8, 131072), {"attention_bias": False}
    ),
    "gpt_oss": TextFamily(
        "GptOssForCausalLM",
        Sizes(201088, 2880, 2880, 36, 64, 8, 131072),
        {
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "granite": TextFamily("GraniteForCausalLM", Sizes(32000, 4096, 11008, 32, 32, None, 2048)),
    "granite4_vision_text": TextFamily("GraniteForCausalLM", Sizes(32000, 4096, 11008, 32, 32, None, 2048)),
    "granite_docling_text": TextFamily(
        "GraniteForCausalLM",
        Sizes(133800, 1024, 2048, 28, 16, 4, 32768),
        {
            "rms_norm_eps": 1e-05,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
            "attention_multiplier": 0.015625,
        },
    ),
    "granitemoehybrid": TextFamily("GraniteMoeHybridForCausalLM", Sizes(32000, 4096, 11008, 32, 32, None, 2048)),
    "inkling2_loop_text": TextFamily("Inkling2LoopForCausalLM", Sizes(201024, 2304, None, 24, 24, 8, 1048576), _PADDED),
    "inkling2_text": TextFamily("Inkling2ForCausalLM", Sizes(201024, 4608, None, 48, 48, 8, 1048576), _PADDED),
    "inkling_text": TextFamily("InklingForCausalLM", Sizes(201024, 6144, 24576, 66, 64, 8, 131072)),
    "internlm3": TextFamily("LlamaForCausalLM", Sizes(128512, 4096, 10240, 48, 32, 2, 32768), {"rms_norm_eps": 1e-05}),
    "hy_v4": TextFamily("HYV4ForCausalLM", Sizes(120832, 2816, 6912, 34, 32, None, 262144)),
    "iquestcoder": TextFamily(
        "LlamaForCausalLM", Sizes(76800, 5120, 27648, 80, 40, 8, 131072), {"rms_norm_eps": 1e-05}
    ),
    "jamba": TextFamily("JambaForCausalLM", Sizes(65536, 4096, 14336, 32, 32, 8, 262144)),
    "kimi_k2": TextFamily("DeepseekV3ForCausalLM", Sizes(129280, 7168, 18432, 61, 128, None, 4096)),
    "kimi_linear": TextFamily("KimiLinearForCausalLM", Sizes(163840, 2304, 9216, 27, 32, None, None)),
    "lara_mini": TextFamily("LaraMiniForCausalLM", Sizes(151936, 1024, None, 34, 16, 4, 131072)),
    "lfm2": TextFamily("Lfm2ForCausalLM", Sizes(65536, 2560, 12288, 32, 32, 8, 128000)),
    "lfm2_moe": TextFamily("Lfm2MoeForCausalLM", Sizes(65536, 2048, 7168, 32, 32, 8, 128000)),
    "lfm3": TextFamily("Lfm3ForCausalLM", Sizes(128000, 2048, 7680, 24, 16, 4, 128000)),
    "llama": TextFamily("LlamaForCausalLM", Sizes(32000, 4096, 11008, 32, 32, None, 2048)),
    "llama4_text": TextFamily("Llama4ForCausalLM", Sizes(202048, 5120, 8192, 48, 40, 8, 131072)),
    "longcat_flash": TextFamily("LongcatFlashForCausalLM", Sizes(131072, 6144, None, None, 64, None, 131072)),
    "mamba": TextFamily("MambaForCausalLM", Sizes(50280, 768, None, 32, None, None, None)),
    "mamba2": TextFamily("Mamba2ForCausalLM", Sizes(32768, 4096, None, 64, None, None, None)),
    "mimo_v2_flash": TextFamily("MiMoV2FlashForCausalLM", Sizes(152576, 4096, 16384, 48, 64, 4, 131072)),
    "minicpm3": TextFamily("MiniCPM3ForCausalLM", Sizes(73448, 2560, 6400, 62, 40, None, 32768)),
    "minimax": TextFamily("MiniMaxForCausalLM", Sizes(32000, 4096, 14336, 32, 32, 8, 131072), {"rope_theta": 1e6}),
    "mistral": TextFamily("MistralForCausalLM", Sizes(32000, 4096, 14336, 32, 32, 8, 131072)),
    "mistral4": TextFamily(
        "Mistral4ForCausalLM",
        Sizes(131072, 4096, 12288, 36, 32, None, 1048576),
        {
            "rope_parameters": {
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
                "partial_rotary_factor": 0.5,
                "rope_type": "yarn",
            }
        },
    ),
    "mistral_large4_text": TextFamily(
        "MistralLarge4TextModel",
        Sizes(204800, 6144, 24576, 72, 64, None, 1048576),
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2048.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.0,
            }
        },
    ),
    "mixtral": TextFamily("MixtralForCausalLM", Sizes(32000, 4096, 14336, 32, 32, 8, 131072), {"rope_theta": 1e6}),
    "nemotron_h": TextFamily("NemotronHForCausalLM", Sizes(131072, 4096, None, None, 32, None, None)),
    "olmo2": TextFamily("Olmo2ForCausalLM", Sizes(50304, 4096, 11008, 32, 32, None, 2048)),
    "olmo3": TextFamily("Olmo3ForCausalLM", Sizes(50304, 4096, 11008, 32, 32, None, 2048)),
    "olmo_hybrid": TextFamily(
        "OlmoHybridForCausalLM",
        Sizes(100352, 3840, 11008, 32, 30, None, 65536),
        {"rope_parameters": {"rope_theta": 10000.0}},
    ),
    "phi3": TextFamily("Phi3ForCausalLM", Sizes(32064, 3072, 8192, 32, 32, None, 4096)),
    "qwen2": TextFamily("Qwen2ForCausalLM", Sizes(151936, 4096, 22016, 32, 32, None, 32768)),
    "qwen2_5_omni_text": TextFamily(
        "Qwen2ForCausalLM", Sizes(152064, 3584, 18944, 28, 28, 4, 32768), {"rope_theta": 1e6}
    ),
    "qwen2_5_vl_text": TextFamily(
        "Qwen2ForCausalLM", Sizes(152064, 8192, 29568, 80, 64, 8, 32768), {"rms_norm_eps": 1e-05, "rope_theta": 1e6}
    ),
    "qwen2_vl_text": TextFamily(
        "Qwen2ForCausalLM", Sizes(152064, 8192, 29568, 80, 64, 8, 32768), {"rms_norm_eps": 1e-05, "rope_theta": 1e6}
    ),
    "qwen3": TextFamily("Qwen3ForCausalLM", Sizes(151936, 4096, 22016, 32, 32, None, 32768)),
    "qwen3_5_moe_text": TextFamily("Qwen3_5MoeForCausalLM", Sizes(248320, 2048, None, 40, 16, 2, 32768)),
    "qwen3_5_text": TextFamily("Qwen3_5ForCausalLM", Sizes(248320, 4096, 12288, 32, 16, 4, 32768)),
    "qwen3_moe": TextFamily("Qwen3MoeForCausalLM", Sizes(151936, 2048, 6144, 24, 32, 4, 32768)),
    "qwen3_next": TextFamily("Qwen3NextForCausalLM", Sizes(151936, 2048, 5632, 48, 16, 2, 32768)),
    "qwen3_omni_moe_text": TextFamily(
        "Qwen3MoeForCausalLM", Sizes(3584, 2048, 18944, 28, 28, 4, 32768), {"rope_theta": 1e6}
    ),
    "qwen3_vl_moe_text": TextFamily(
        "Qwen3VLMoeTextModel",
        Sizes(151936, 2048, 5632, 24, 16, None, 128000),
        {
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "rope_theta": 500000.0,
        },
    ),
    "qwen3_vl_text": TextFamily(
        "Qwen3ForCausalLM", Sizes(151936, 4096, 22016, 32, 32, None, 128000), {"rope_theta": 500000.0}
    ),
    "qwen4_exp_text": TextFamily("Qwen4ExpForCausalLM", Sizes(248320, 2048, None, 40, 16, 2, 32768)),
    "recurrent_gemma": TextFamily("RecurrentGemmaForCausalLM", Sizes(256000, 2560, 7680, 26, 10, None, None)),
    "rwkv": TextFamily("RwkvForCausalLM", Sizes(50277, 4096, None, 32, None, None, None)),
    "seed_oss": TextFamily("SeedOssForCausalLM", Sizes(155136, 4096, 27648, 64, 80, 8, 524288)),
    "smollm3": TextFamily("SmolLM3ForCausalLM", Sizes(128256, 2048, 11008, 36, 16, 4, 32768)),
    "vaultgemma": TextFamily("VaultGemmaForCausalLM", Sizes(256000, 2304, 9216, 26, 8, 4, 8192)),
    "xlstm": TextFamily("xLSTMForCausalLM", Sizes(50304, 4096, None, 32, None, None, None)),
    "youtu": TextFamily("YoutuForCausalLM", Sizes(128256, 2048, 6144, 32, 16, None, 131072)),
    "zamba": TextFamily("ZambaForCausalLM", Sizes(32000, 3712, 14848, 76, 16, None, 4096)),
    "zamba2": TextFamily("Zamba2ForCausalLM", Sizes(32000, 2560, None, 54, 32, None, 4096)),
    "zaya": TextFamily("ZayaForCausalLM", Sizes(262272, 2048, None, 40, 8, 2, 131072)),
}
"""The families by the `model_type` of the text decoder's configuration."""
