"""Language models of transformers, and one of them with LoRA."""

from typing import Any

from torch import Generator, Tensor, nn

from benchmarks.zoo.model import RealModel, Size, named, text, tokens, transformers_model


def _decoder(size: Size) -> dict[str, Any]:
    """What the configs of Llama's kin have in common."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": size.length,
        "use_cache": False,
    }


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_embd": size.width, "n_layer": size.layers, "n_head": 4, "n_positions": size.length}
    return GPT2LMHeadModel(GPT2Config(vocab_size=size.vocabulary, **shape, **dropout, use_cache=False))


def _llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(size)))


def _qwen(size: Size, *, use_reentrant: bool = False) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**_decoder(size), head_dim=size.width // 4, tie_word_embeddings=True))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.layers}
    return BertForMaskedLM(BertConfig(vocab_size=size.vocabulary, num_attention_heads=4, **shape))


def _masked(size: Size, generator: Generator) -> dict[str, Tensor]:
    """Every seventh token is to be found; the last ones of the second sequence are padding."""
    ids = tokens(size, generator)
    labels = ids.clone()
    labels[:, 1::7], ids[:, 1::7] = ids[:, 1::7].clone(), 3
    mask = (ids > 0).long()
    mask[1, size.length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _t5(size: Size) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": size.width, "d_kv": size.width // 4, "d_ff": 2 * size.width, "num_layers": size.layers}
    config = T5Config(vocab_size=size.vocabulary, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, **shape)
    return T5ForConditionalGeneration(config)


def _mixtral(size: Size) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**_decoder(size), **experts))


def _switch(size: Size) -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    shape = {"d_model": size.width, "d_kv": size.width // 4, "d_ff": 2 * size.width, "num_layers": size.layers}
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 32}
    config = SwitchTransformersConfig(
        vocab_size=size.vocabulary, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, **shape, **experts
    )
    return SwitchTransformersForConditionalGeneration(config)


def _mamba(size: Size) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    shape = {"hidden_size": size.width, "num_hidden_layers": size.layers, "state_size": 8}
    return MambaForCausalLM(MambaConfig(vocab_size=size.vocabulary, use_cache=False, **shape))


def _modernbert(size: Size) -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    shape = {"hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.layers}
    markers = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(vocab_size=size.vocabulary, num_attention_heads=4, **shape, **markers)
    return ModernBertForMaskedLM(config)


def _deberta(size: Size) -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    shape = {"hidden_size": size.width, "intermediate_size": 2 * size.width, "num_hidden_layers": size.layers}
    attention = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    config = DebertaV2Config(vocab_size=size.vocabulary, num_attention_heads=4, **shape, **attention)
    return DebertaV2ForMaskedLM(config)


def _lora(size: Size) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return get_peft_model(_llama(size), LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))


LANGUAGE_MODELS = named(
    [
        transformers_model("GPT-2", _gpt2, text),
        transformers_model("Llama", _llama, text),
        transformers_model("Qwen3, checkpointed", _qwen, text),
        transformers_model("BERT", _bert, _masked),
        transformers_model("ModernBERT", _modernbert, _masked),
        transformers_model("DeBERTa", _deberta, _masked),
        transformers_model("T5", _t5, text),
        transformers_model("Mixtral", _mixtral, text),
        transformers_model("Switch", _switch, text, unused=True),
        transformers_model("Mamba", _mamba, text),
        RealModel("Llama with LoRA", _lora, text, package="peft"),
    ]
)
