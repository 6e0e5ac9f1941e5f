"""Models of pictures and sound, of transformers and diffusers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.zoo.model import Parts, RealModel, Size, classes, images, named, tokens, transformers_model


def _labelled(size: Size, generator: Generator) -> dict[str, Tensor]:
    return {"pixel_values": images(size, generator), "labels": classes(size, generator)}


def _vit(size: Size) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.layers}
    config = ViTConfig(num_attention_heads=4, image_size=size.image, patch_size=8, num_labels=10, **shape)
    return ViTForImageClassification(config)


def _two_views(size: Size, generator: Generator) -> tuple[Tensor, Tensor]:
    return images(size, generator), images(size, generator)


def _agreement(parts: Parts, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Two forwards before the backward, as in contrastive learning."""
    first, second = (parts["model"](pixel_values=view).logits for view in batch)
    return F.mse_loss(first, second) + first.square().mean()


def _resnet(size: Size) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [size.width // 2, size.width]
    shape = {"embedding_size": size.width // 4, "hidden_sizes": sizes, "depths": [size.layers // 2] * 2}
    return ResNetForImageClassification(ResNetConfig(layer_type="bottleneck", num_labels=10, **shape))


def _convnext(size: Size) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = [size.width // 4, size.width // 2]
    config = ConvNextConfig(num_stages=2, hidden_sizes=sizes, depths=[1, size.layers], num_labels=10, patch_size=4)
    return ConvNextForImageClassification(config)


def _swin(size: Size) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    shape = {"embed_dim": size.width // 2, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    config = SwinConfig(image_size=size.image, patch_size=4, num_labels=10, drop_path_rate=0.1, **shape)
    return SwinForImageClassification(config)


def _clip(size: Size) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    shape: dict[str, Any] = {"hidden_size": size.width, "intermediate_size": 2 * size.width}
    shape |= {"num_hidden_layers": size.layers, "num_attention_heads": 4}
    of_text = {**shape, "vocab_size": size.vocabulary, "max_position_embeddings": size.length, "eos_token_id": 2}
    of_vision = {**shape, "image_size": size.image, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=of_text, vision_config=of_vision, projection_dim=size.width))


def _captioned(size: Size, generator: Generator) -> dict[str, Any]:
    ids = tokens(size, generator)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": images(size, generator), "return_loss": True}


def _wav2vec2(size: Size) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    shape = {"hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.layers}
    front = {"conv_dim": (size.width,) * 3, "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4)}
    inside = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
    config = Wav2Vec2Config(vocab_size=32, num_attention_heads=4, layerdrop=0.3, **shape, **front, **inside)
    return Wav2Vec2ForCTC(config)


def _speech(size: Size, generator: Generator) -> dict[str, Tensor]:
    sound = torch.randn(size.batch, 80 * size.length, generator=generator)
    return {"input_values": sound, "labels": torch.randint(1, 32, (size.batch, 5), generator=generator)}


def _whisper(size: Size) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16}
    depth = {"encoder_layers": size.layers, "decoder_layers": size.layers}
    width = {"d_model": size.width, "encoder_ffn_dim": 2 * size.width, "decoder_ffn_dim": 2 * size.width}
    markers = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": size.length, "max_target_positions": size.length}
    config = WhisperConfig(vocab_size=size.vocabulary, use_cache=False, **heads, **depth, **width, **markers, **lengths)
    return WhisperForConditionalGeneration(config)


def _spectrogram(size: Size, generator: Generator) -> dict[str, Tensor]:
    features = torch.randn(size.batch, 16, 2 * size.length, generator=generator)
    return {"input_features": features, "labels": tokens(size, generator)}


def _unet(size: Size) -> nn.Module:
    from diffusers import UNet2DModel

    channels = (size.width // 2, size.width)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(
        sample_size=size.image // 2, block_out_channels=channels, layers_per_block=1, norm_num_groups=4, **blocks
    )


def _noised(size: Size, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    shape = (size.batch, 3, size.image // 2, size.image // 2)
    times = torch.randint(0, 1000, (size.batch,), generator=generator)
    return torch.randn(shape, generator=generator), times, torch.randn(shape, generator=generator)


def _denoising(parts: Parts, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    sample, times, noise = batch
    return F.mse_loss(parts["model"](sample, times).sample, noise)


def _dit(size: Size) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    heads = {"num_attention_heads": 4, "attention_head_dim": size.width // 4, "num_layers": size.layers}
    kinds = {"num_embeds_ada_norm": 1000, "norm_type": "ada_norm_zero"}
    return DiTTransformer2DModel(in_channels=3, sample_size=size.image // 2, patch_size=4, **heads, **kinds)


def _denoising_of_class(parts: Parts, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    sample, times, noise = batch
    return F.mse_loss(parts["model"](sample, timestep=times, class_labels=times % 1000).sample, noise)


def _vae(size: Size) -> nn.Module:
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    channels = (size.width // 4, size.width // 2)
    return AutoencoderKL(block_out_channels=channels, norm_num_groups=4, sample_size=size.image, **kinds)


def _reconstruction(parts: Parts, batch: Tensor) -> Tensor:
    return F.mse_loss(parts["model"](batch).sample, batch)


PERCEPTION_MODELS = named(
    [
        transformers_model("ViT, two forwards", _vit, _two_views, {"model": _agreement}),
        transformers_model("ResNet", _resnet, _labelled),
        transformers_model("ConvNeXt", _convnext, _labelled),
        transformers_model("Swin", _swin, _labelled),
        transformers_model("CLIP", _clip, _captioned),
        transformers_model("wav2vec2, LayerDrop", _wav2vec2, _speech, unused=True),
        transformers_model("Whisper", _whisper, _spectrogram),
        RealModel("UNet", _unet, _noised, {"model": _denoising}, package="diffusers"),
        RealModel("DiT", _dit, _noised, {"model": _denoising_of_class}, package="diffusers"),
        RealModel("VAE", _vae, images, {"model": _reconstruction}, package="diffusers"),
    ]
)
