"""The narrow value of each setting of a config, by its name: one table for all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from deadweight.source.narrow_sizes import Size
from deadweight.source.type_aliases import RawConfig, Setting

Shrunk = Callable[[Size, Setting, RawConfig], Setting]  # the size, the old value, the config around it


def _kv_heads(size: Size, old: Setting, around: RawConfig) -> int:
    """Grouped queries stay grouped: one key-value head for both query heads."""
    n_heads = next((around[name] for name in HEADS if isinstance(around.get(name), int)), old)
    return 1 if isinstance(old, int) and isinstance(n_heads, int) and old < n_heads else size.heads


def _head_dim(size: Size, old: Setting, around: RawConfig) -> int:
    """With latent attention, head_dim is the size of the rotary part."""
    return size.head // 2 if "qk_rope_head_dim" in around else size.head


def _partial(size: Size, old: float, around: RawConfig) -> float:
    """Where part of a head was rotary, half of it is: of four dimensions only two are an even part."""
    return 1.0 if old >= 1 else 0.5


@dataclass(frozen=True)
class OwnShape:
    """The settings of our own transformer that its head sizes depend on."""

    heads: int
    d_model: int
    key_heads: int | None = None

    @classmethod
    def of(cls, config: RawConfig) -> OwnShape:
        return cls(*(config.get(field.name) for field in fields(cls)))  # type: ignore[arg-type]


def _own_head(size: Size, old: int, around: RawConfig) -> int:
    """A head size of our transformer. Heads that were as wide as the stream together stay so; others stay off it."""
    own = OwnShape.of(around)
    if old * own.heads == own.d_model:
        return size.width // min(own.heads, size.heads)
    if old * (own.key_heads or own.heads) == own.d_model:  # grouped: one key-value head is left
        return size.width
    return size.head - 2 if old * own.heads < own.d_model else size.head + 2


def _own_key_heads(size: Size, old: int, around: RawConfig) -> int:
    return 1 if old < OwnShape.of(around).heads else size.heads


HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
DERIVED = (  # left out, since they follow from the rest: label names, stages that a backbone gives out, layer numbers
    "id2label",
    "label2id",
    "out_features",
    "out_indices",
    "_out_features",
    "_out_indices",
    "stage_names",
    "hybrid_layer_ids",
)
NOT_BY_LAYER = ("biases",)  # lists that are no lists of layers, however long
OR_BY_LAYER = ("heads", "key_heads", "d_qk", "d_v")  # one for all layers, which a list of the others makes several
FILLED = {
    "head_dim",
    "hidden",
    "n_inner",
    "ffn_hidden_size",
    "num_key_value_heads",
    "num_kv_heads",
}  # None: derive, narrowly
DEPTH_NAMES = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth "
    "num_decoder_layers num_block_layers num_blocks num_hidden_groups decoder_num_hidden_layers "
    "encoder_num_hidden_layers n_encoder_layers num_mem_blocks mtp_num_hidden_layers"
)
FIRST_NAMES = (  # where, or for how many layers, a pattern of layers starts
    "first_k_dense_replace num_dense_layers moe_layer_start_index num_kv_shared_layers attn_layer_offset "
    "expert_layer_offset"
)
INTERVAL_NAMES = (  # after how many layers it comes again
    "decoder_sparse_step moe_layer_freq full_attention_interval sliding_window_pattern no_rope_layer_interval "
    "attn_layer_period expert_layer_period moe_every_n_layers interleave_moe_layer_step cross_attn_every_n_layers "
    "encoder_sparse_step global_attn_every_n_layers moe_layer_interval attention_every_n hybrid_layer_period"
)

# names -> the narrow value. A number is never enlarged; a list shrinks element by element.
ROWS: tuple[tuple[str, Shrunk], ...] = (
    (
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size hidden_dim projection_dim word_embed_proj_dim "
        "out_hidden_size text_hidden_size vision_hidden_size encoder_hidden_size decoder_hidden_size embedding_dim "
        "pooler_output_size cross_attention_hidden_size hidden_sizes encoder_dim decoder_dim d_embed conv_dim "
        "attention_hidden_size output_dim output_hidden_size shared_embedding_dim hidden_act_dim lru_width rnn_width "
        "embed_dims neck_hidden_sizes tdnn_dim xvector_output_dim codevector_dim proj_codevector_dim conv_channels "
        "router_hidden_size input_embedding_size output_embedding_size "
        "output_channels backbone_hidden_size classifier_proj_size audio_hidden_size projector_hidden_size num_embeds "
        "condition_dim codebook_dim upsample_groups vector_quantization_hidden_dimension subsampling_conv_channels "
        "output_proj_dims latent_dim d_latents d_latent encoder_hidden_dim projector_out_channels "
        "embed_dim_per_stage backbone_channel_list fpn_hidden_size projection_size mit_hidden_size "
        "pronunciation_embed_dim shape_embed_dim nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel",
        lambda s, old, d: s.width,
    ),
    (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_attn_heads mamba_n_heads "
        "num_attention_heads_per_layer swa_num_attention_heads n_mamba_heads mamba_num_heads "
        "linear_num_value_heads linear_num_key_heads linear_num_heads index_n_heads n_attention_heads "
        "decoder_num_attention_heads encoder_num_attention_heads num_swa_attention_heads linear_n_heads "
        "num_attention_heads_per_stage prompt_num_attention_heads mit_num_attention_heads",
        lambda s, old, d: s.heads,
    ),
    ("num_key_value_heads num_kv_heads n_head_kv kv_n_heads num_query_groups swa_num_key_value_heads", _kv_heads),
    ("head_dim", _head_dim),
    (
        "d_kv dim_head attention_head_dim kv_channels d_head v_head_dim qk_head_dim attention_head_size "
        "linear_key_head_dim linear_value_head_dim linear_head_dim global_head_dim swa_head_dim num_heads_dim "
        "query_pre_attn_scalar dim_bbox_projection",
        lambda s, old, d: s.head,
    ),
    ("qk_rope_head_dim qk_nope_head_dim rotary_dim", lambda s, old, d: s.head // 2),
    ("index_head_dim mamba_d_head mamba_head_dim mamba_headdim", lambda s, old, d: s.width),
    ("q_lora_rank kv_lora_rank o_lora_rank low_rank_dim", lambda s, old, d: s.width - 2),
    ("partial_rotary_factor rotary_pct rope_pct partial_rotary_factors", _partial),
    (
        "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim mlp_dim hidden_ffn_dim "
        "moe_intermediate_size shared_expert_intermediate_size ffn_intermediate_size feed_forward_size d_inner "
        "intermediate_size_mlp dense_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size "
        "dff dim_ff expert_ffn_hidden_size block_ff_dim feedforward_dim inner_dim expert_dim mlp_hidden_size "
        "attention_intermediate ffn_expansion_size conv_intermediate_size prefix_hidden_size expert_intermediate_size "
        "mit_intermediate_size",
        lambda s, old, d: s.inner,
    ),
    (
        "vocab_size n_vocab n_words text_vocab_size audio_vocab_size input_vocab_size output_vocab_size n_token "
        "decoder_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size entity_vocab_size "
        "num_embeddings pronunciation_vocab_size shape_vocab_size",
        lambda s, old, d: s.vocabulary,
    ),
    ("codebook_size", lambda s, old, d: 8),
    (
        "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len max_source_positions seq_length "
        "max_target_positions context_length block_size original_max_position_embeddings max_seq_length "
        "max_encoder_position_embeddings max_decoder_position_embeddings model_max_length seq_len max_context_length "
        "num_position_embeddings max_2d_position_embeddings",
        lambda s, old, d: s.length + s.spare,
    ),
    (DEPTH_NAMES, lambda s, old, d: s.layers),
    ("depths blocks_per_stage layer_depths num_register_tokens num_local_layers", lambda s, old, d: 1),
    ("num_block_repeats", lambda s, old, d: 1),
    (
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts n_experts num_moe_experts "
        "zero_expert_num n_zero_experts",
        lambda s, old, d: 3,
    ),
    (
        "num_experts_per_tok moe_topk moe_top_k top_k_experts num_selected_experts experts_per_token top_k moe_k "
        "num_experts_per_token router_top_k",
        lambda s, old, d: 2,
    ),
    ("n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups", lambda s, old, d: 1),
    ("mamba_n_groups mamba_ngroups num_expert_group expert_group moe_latent_size n_hash_layers", lambda s, old, d: 1),
    (FIRST_NAMES, lambda s, old, d: 1),
    (
        "vision_feature_layer insert_layer_id window_block_indices global_attn_indexes fullatt_block_indexes "
        "deepstack_visual_indexes",
        lambda s, old, d: s.layers - 1,
    ),
    (INTERVAL_NAMES, lambda s, old, d: 2),
    ("sliding_window sliding_window_size window_size_left attention_window_size", lambda s, old, d: 3),
    ("attention_chunk_size local_attention attention_window chunk_size mamba_chunk_size", lambda s, old, d: 4),
    ("context_size num_queries num_query_tokens latent_query_num", lambda s, old, d: 4),
    ("num_quantizers num_filters", lambda s, old, d: 4),
    ("index_topk index_block_size index_local_blocks", lambda s, old, d: 2),
    ("index_kpool", lambda s, old, d: 1),
    (
        "relative_attention_num_buckets relative_attention_max_distance num_buckets "
        "position_bias_num_buckets position_bias_max_distance",
        lambda s, old, d: 4,
    ),
    ("state_size mamba_d_state ssm_state_size d_state mamba_state_dim", lambda s, old, d: 4),
    ("mamba_d_ssm", lambda s, old, d: 2 * s.width),
    ("time_step_rank mamba_dt_rank dt_rank", lambda s, old, d: 2),
    ("hidden_size_per_layer_input laurel_rank altup_num_inputs hc_lowrank rel_extent", lambda s, old, d: 4),
    ("image_size img_size max_img_size", lambda s, old, d: s.image),
    ("image_embedding_size", lambda s, old, d: s.image // 2),
    ("patch_size patch_sizes temporal_patch_size tubelet_size encoder_stride", lambda s, old, d: 2),
    ("prompt_types prompt_length segment_types", lambda s, old, d: 3),
    ("coordinate_size", lambda s, old, d: s.width // 8),
    ("shape_size", lambda s, old, d: s.width // 4),
    ("block_multiple_of", lambda s, old, d: 1),
    ("axial_pos_embds_dim", lambda s, old, d: s.width // 2),
    ("axial_pos_shape", lambda s, old, d: 4),
    ("num_frames frames_per_clip", lambda s, old, d: 2),
    ("num_mel_bins input_feat_per_channel feature_projection_input_dim", lambda s, old, d: s.width // 2),
    ("num_conv_pos_embeddings", lambda s, old, d: 4),
    ("num_conv_pos_embedding_groups num_codevector_groups", lambda s, old, d: 2),
    ("max_length max_audio_length", lambda s, old, d: 4 * s.width),
)
TABLE: dict[str, Shrunk] = {name: rule for names, rule in ROWS for name in names.split()}

# Where one family means something else by a name.
EXCEPTIONS: dict[str, dict[str, Shrunk]] = {
    "mamba2": {"head_dim": lambda s, old, d: s.width},
    "zamba": {"attention_hidden_size": lambda s, old, d: 2 * s.width, "attention_head_dim": lambda s, old, d: s.width},
    "zamba2": {"attention_hidden_size": lambda s, old, d: 2 * s.width, "attention_head_dim": lambda s, old, d: s.width},
    "codegen": {"n_head": lambda s, old, d: 4},
    "deadweight": {
        "context": lambda s, old, d: s.length + s.spare,
        "heads": lambda s, old, d: s.heads,
        "key_heads": _own_key_heads,
        "d_qk": _own_head,
        "d_v": _own_head,
        "hidden": lambda s, old, d: s.inner,
    },
    "mpnet": {
        "relative_attention_num_buckets": lambda s, old, d: 32
    },  # its code counts on 32, whatever the config says
}

# What a family's own default config leaves out and its code cannot do without; by type, or type.nested.
MISSING: dict[str, RawConfig] = {
    "dbrx.attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "autoformer": {"prediction_length": 4},
    "blip-2": {"image_token_index": 10},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 12},
    "emu3": {"vocabulary_map": {"<image>": 8, "<|extra_200|>": 9}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    "instructblip": {"image_token_index": 10},
    "instructblipvideo": {"video_token_index": 10},
    "hunyuan_vl_text": {"head_dim": 4},
    "informer": {"prediction_length": 4},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": {"prediction_length": 4},
    "esm": {"vocab_size": 11, "pad_token_id": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 4,
        "indexer_budget": 2,
        "indexer_compress_ratio": 1,
    },
    "xmod": {"default_language": "en_XX"},
}


DEPTH: dict[str, Shrunk] = {name: TABLE[name] for name in f"{DEPTH_NAMES} {FIRST_NAMES} {INTERVAL_NAMES}".split()}
