"""TRL's SFTTrainer, of tokens that are there already: accumulation, clipping, a scheduler, gradient checkpointing.

The last is SFTConfig's default, and so is bf16.
"""

import functools
import sys
from collections.abc import Callable

import torch
from both_ways import Outcome, compare, copies, group_at_end
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from compiled_ddp.integrations.transformers import CompiledDDPMixin

VOCABULARY = 64


class Ours(CompiledDDPMixin, SFTTrainer):
    pass


def texts() -> Dataset:
    """Texts of different lengths, so that the ranks' batches have different numbers of tokens."""
    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 13, (32,), generator=source).tolist()
    return Dataset.from_dict(
        {"input_ids": [torch.randint(2, VOCABULARY, (length,), generator=source).tolist() for length in lengths]}
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Of words that are numbers. The trainer asks it for the token to pad with."""
    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(2, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def loop(
    folder: str, build: Callable[[], PreTrainedModel], *, make: Callable[..., SFTTrainer] = SFTTrainer, bf16: bool
) -> Outcome:
    set_seed(0)
    model = build()
    trainer = make(
        model,
        SFTConfig(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=5,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            bf16=bf16,
        ),
        train_dataset=texts(),
        processing_class=tokenizer(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5
    return Outcome(type(trainer.model_wrapped), losses, copies(model.state_dict()))


def adapter(backend: str) -> Callable[..., SFTTrainer]:
    return functools.partial(Ours, ddp_options={"backend": backend})


CASES = {"fp32": (gpt2, False), "bf16": (gpt2, True), "Llama": (llama, False)}

with group_at_end():
    for case, (build, bf16) in CASES.items():
        run = functools.partial(loop, f"{sys.argv[1]}/{case}", build, bf16=bf16)
        compare(case, run, lambda backend, run=run: run(make=adapter(backend)))
