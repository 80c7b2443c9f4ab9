"""Makers of example inputs: one row per input name, with its possible shapes, the likeliest first."""

from __future__ import annotations

from deadweight.source.example_makers import image, series, sound, text
from deadweight.source.example_makers.need import Example, Maker, Need, first, setting

__all__ = ["COMPANIONS", "MAKERS", "PARTNERS", "SIGNALS", "Example", "Maker", "Need", "first", "setting"]

MAKERS: dict[str, tuple[Maker, ...]] = {
    "input_ids": (text.tokens_of_queries, text.tokens, text.codebooks, text.text_and_codebooks),
    "decoder_input_ids": (text.decoder_tokens, text.codebooks, text.channels_last),
    "qformer_input_ids": (text.query_former_tokens,),
    "inputs": (text.tokens, text.embeddings, image.image),
    "token_type_ids": (text.token_types,),
    "attention_mask": (text.ones,),
    "bbox": (text.boxes, text.float_boxes, text.eight_corners),
    "inputs_embeds": (text.embeddings,),
    "query_embeds": (text.embeddings,),
    "noise_embeds": (text.embeddings,),
    "encoder_hidden_states": (text.cross_embeddings,),
    "context_hidden_states": (text.target_layer_states,),
    "visual_feats": (text.visual_features,),
    "visual_pos": (text.visual_boxes,),
    "task_inputs": (text.task_tokens,),
    "pixel_values": (
        image.flat_patches,
        image.batched_patches,
        image.square_patches,
        image.strip_of_patches,
        image.image,
        image.video,
        image.pair_of_images,
        image.one_image_of_a_list,
        image.default_image,
    ),
    "hidden_states": (image.flat_patches, text.embeddings, sound.wave_by_channel, sound.latents),
    "prompt_pixel_values": (image.image,),
    "prompt_masks": (image.image,),
    "pixel_values_videos": (image.video,),
    "grid_thw": (image.grid_thw,),
    "merge_sizes": (image.merge_sizes,),
    "spatial_shapes": (image.grid_hw,),
    "target_sizes": (image.grid_hw,),
    "pixel_position_ids": (image.patch_positions,),
    "pixel_attention_mask": (image.patch_mask,),
    "image_embeds_position_mask": (image.latent_positions,),
    "image_attention_mask": (image.image_of_each_token,),
    "input_values": (sound.wave, sound.wave_by_channel, sound.bare_wave, sound.frames_first, text.embeddings),
    "decoder_input_values": (text.embeddings,),
    "input_features": (
        sound.bands_first,
        sound.frames_first,
        sound.window_of_frames,
        sound.frames_of_tokens,
        sound.many_bands,
        sound.stacked_frames,
        sound.framed_image,
    ),
    "input_features_mask": (sound.frame_mask, sound.mask_of_window, sound.frame_mask_of_frames_first),
    "audio_mel": (sound.frames_first, sound.many_bands),
    "audio_mel_mask": (sound.nothing_masked,),
    "latents": (sound.latents,),
    "past_values": (series.past_values, series.past_patches),
    "past_time_features": (series.past_times,),
    "past_observed_mask": (series.all_observed,),
    "past_values_padding": (series.no_padding,),
    "future_values": (series.future_values,),
    "future_time_features": (series.future_times,),
    "freq": (series.frequency,),
    "states": (series.states,),
    "actions": (series.actions,),
    "rewards": (series.one_number_each,),
    "returns_to_go": (series.one_number_each,),
    "timesteps": (series.steps,),
}
SIGNALS = ("pixel_values", "input_values", "input_features", "pixel_values_videos")
# Inputs that always come together with another one: without them part of the model does not run.
PARTNERS: dict[str, tuple[str, ...]] = {
    "input_ids": ("bbox",),
    "past_time_features": ("future_values", "future_time_features"),
}
# Inputs that describe another one, or without which it is not accepted.
COMPANIONS: dict[str, tuple[str, ...]] = {
    "pixel_values": (
        "spatial_shapes",
        "pixel_attention_mask",
        "target_sizes",
        "image_embeds_position_mask",
        "image_attention_mask",
    ),
    "input_features": ("input_features_mask",),
    "input_values": ("decoder_input_values",),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
    "input_ids": ("visual_feats", "visual_pos"),
    "query_embeds": ("encoder_hidden_states",),
}
