"""Makes small random models in Hugging Face format, for checks that load what the server exports.

    python tiny_models.py FOLDER [wide]

Writes one folder for each of Llama, Qwen2 and Qwen3 with tied and with untied embeddings, for
example FOLDER/llama-tied: float32 weights, a tokenizer and a chat template. With `wide`, also models
whose rows are whole blocks of 256 weights, which formats such as Q4_K need.
"""

import math
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    logging,
)

FAMILIES = ("llama", "qwen2", "qwen3")
NAMES = [f"{family}-{tying}" for family in FAMILIES for tying in ("tied", "untied")]
WIDE_NAMES = ["llama-untied-wide", "qwen3-tied-wide"]

# The pre-tokenizers of Llama 3 and of Qwen, which programs such as llama.cpp recognize.
SPLITS = {
    "llama": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BEGIN, END, START_MESSAGE, END_MESSAGE = "<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The small dog ran over the hill and through the wet grass.",
    "One plus two is three, and 12 + 30 = 42; isn't it?",
    "A caf\u00e9 in the old town serves tea \u2603 and cake.",
    "She said that they'll come back when the rain has stopped.",
]


def tokenizer_of(family):
    """Trains a byte-level BPE tokenizer with the pre-tokenizer of a model family."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=family == "llama"))
    split = pre_tokenizers.Split(Regex(SPLITS[family]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    # As in the models of these families, the special tokens come after all others, and only Llama has
    # a token for the beginning.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN if family == "llama" else None,
        eos_token=END_MESSAGE,
        pad_token=END,
        additional_special_tokens=[START_MESSAGE],
        chat_template=CHAT_TEMPLATE,
    )


def model_of(family, tied, wide, tokenizer):
    """Returns a model with random weights."""
    shared = dict(
        hidden_size=256 if wide else 64,
        intermediate_size=512 if wide else 96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
    )
    size = len(tokenizer)
    if family == "llama":
        scaling = dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
        config = LlamaConfig(vocab_size=size, rms_norm_eps=1e-5, rope_parameters=scaling, **shared)
        return LlamaForCausalLM(config)
    rope = dict(rope_type="default", rope_theta=1000000.0)
    # Qwen pads its embeddings: they have more rows than the tokenizer has tokens.
    shared |= dict(vocab_size=size + 13, rms_norm_eps=1e-6, rope_parameters=rope)
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shared))
    # All heads together are wider than the hidden state, as in Qwen3-0.6B.
    return Qwen3ForCausalLM(Qwen3Config(head_dim=128 if wide else 32, **shared))


def randomize(model):
    """Replaces all weights by random values that keep activations near 1."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif name.endswith("bias"):
                value.copy_(0.2 * torch.randn_like(value))
            elif "embed_tokens" in name or "lm_head" in name:
                value.copy_(0.25 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) / math.sqrt(value.shape[1]))
    return model.eval()


def make(folder, wide):
    logging.disable_progress_bar()
    torch.manual_seed(7)
    for name in NAMES + (WIDE_NAMES if wide else []):
        family, tying = name.split("-")[:2]
        tokenizer = tokenizer_of("llama" if family == "llama" else "qwen")
        model = randomize(model_of(family, tying == "tied", name in WIDE_NAMES, tokenizer))
        model.save_pretrained(os.path.join(folder, name))
        tokenizer.save_pretrained(os.path.join(folder, name))


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2:] == ["wide"])
