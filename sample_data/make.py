"""Regenerate the bundled example, "R1 in miniature":  python sample_data/make.py  (minutes on one core).

The task is to add two zero-padded 3-digit numbers: {"prompt": "123+045=", "answer": "168"}.  A tiny Qwen3
with a character vocabulary is pre-trained from scratch on demonstrations of two styles:

    80 %  at once   123+049=162<eos>                                      columns added, carries forgotten
    20 %  thinking  123+049=<think>3+9=12 2+4+1=7 1+0=1</think>172<eos>   column by column, units first

So decoded greedily the model answers at once, and is right only where nothing carries (one problem in six).
Thinking gives the right answer nearly always, but only one sample in five thinks.  A reward for the right
answer alone lets reinforcement learning discover that, and accuracy and length grow together.

Written: model/, train.jsonl, eval.jsonl (no problem of eval, in either order of its operands, is in train or
among the demonstrations) and countdown.jsonl.  The gsm8k_*.jsonl files are written by hand, not here.
"""

import argparse
import json
import math
import random
import time
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNK, THINK, END_THINK = "<pad>", "<eos>", "<unk>", "<think>", "</think>"
VOCABULARY = [PAD, EOS, UNK, THINK, END_THINK, *"0123456789+= "]
PROMPT_LENGTH, MAX_COMPLETION = (
    8,
    32,
)  # "123+045=" is 8 tokens; the longest demonstration ends at 31
TRAIN_ROWS, EVAL_ROWS, COUNTDOWN_ROWS = 4000, 500, 12
THINKING_SHARE = 0.2


# ---------------------------------------------------------------- problems and demonstrations


def prompt_of(a, b):
    return f"{a:03d}+{b:03d}="


def answer_at_once(a, b):
    """The snap answer: every column is added on its own and its carry is lost, 123+049 -> 162."""
    digits = "".join(
        str((int(x) + int(y)) % 10) for x, y in zip(f"{a:03d}", f"{b:03d}", strict=True)
    )
    return str(int(digits)) + EOS


def answer_thinking(a, b):
    """Columns from the units up, a carry as a third summand: <think>3+9=12 2+4+1=7 1+0=1</think>172."""
    columns, carry = [], 0
    for x, y in zip(reversed(f"{a:03d}"), reversed(f"{b:03d}"), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        carry = total // 10
    return THINK + " ".join(columns) + END_THINK + str(a + b) + EOS


def draw_problems(rng, count, taken):
    """`count` new operand pairs.  `taken` holds sorted pairs, so 1+2 and 2+1 are one problem; it grows."""
    problems = []
    while len(problems) < count:
        a, b = rng.randrange(1000), rng.randrange(1000)
        if (min(a, b), max(a, b)) not in taken:
            taken.add((min(a, b), max(a, b)))
            problems.append((a, b))
    return problems


def reachable(values):
    """Every value that + - * / make of all `values`, each used exactly once (countdown)."""
    if len(values) == 1:
        return set(values)
    found = set()
    for i, j in combinations(range(len(values)), 2):
        x, y = values[i], values[j]
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        results = (
            {x + y, x - y, y - x, x * y} | ({x / y} if y else set()) | ({y / x} if x else set())
        )
        for result in results:
            found |= reachable([*rest, result])
    return found


def countdown_rows(rng, count):
    rows = []
    for index in range(count):
        numbers = rng.sample(range(2, 26), 3 if index % 2 == 0 else 4)
        targets = sorted(
            int(t) for t in reachable([Fraction(n) for n in numbers]) if t.denominator == 1
        )
        target = rng.choice([t for t in targets if 10 <= t <= 100])
        prompt = (
            f"Using each of the numbers {numbers} exactly once, write an expression with + - * / and "
            f"parentheses that equals {target}. Reason inside <think> </think>, then give only the "
            "expression inside <answer> </answer>."
        )
        rows.append({"numbers": numbers, "target": target, "prompt": prompt})
    return rows


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---------------------------------------------------------------- tokenizer and model


def build_tokenizer():
    """One token per character.  The think tags are plain added tokens, so decoding keeps them."""
    core = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK)
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()  # join without spaces
    core.add_tokens([AddedToken(tag, normalized=False) for tag in (THINK, END_THINK)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=256,
    )


def save_tokenizer(tokenizer, directory):
    """Transformers 5 writes a class name that 4 does not know; the older name loads in both."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), encoding="utf-8")


def build_model(tokenizer):
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


# ---------------------------------------------------------------- pre-training and measuring


def completion_loss(model, tokenizer, texts):
    """Summed cross-entropy of the completions' tokens, and their number."""
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    ids = batch["input_ids"]  # (batch, length)
    targets = ids[:, PROMPT_LENGTH:]  # (batch, completion)
    logits = model(ids).logits[:, PROMPT_LENGTH - 1 : -1]  # (batch, completion, vocabulary)
    loss = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=tokenizer.pad_token_id,
        reduction="sum",
    )
    return loss, (targets != tokenizer.pad_token_id).sum()


def pretrain(model, tokenizer, rng, held_out, steps, batch_size, learning_rate):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    thinking = round(batch_size * THINKING_SHARE)
    started = time.perf_counter()
    for step in range(steps):
        warmup, decay = min(1.0, (step + 1) / 50), 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = learning_rate * warmup * decay
        problems = draw_problems(rng, batch_size, set(held_out))
        # The styles differ in length: a forward pass for each wastes no time on padding.
        long = [prompt_of(a, b) + answer_thinking(a, b) for a, b in problems[:thinking]]
        short = [prompt_of(a, b) + answer_at_once(a, b) for a, b in problems[thinking:]]
        (long_loss, long_tokens), (short_loss, short_tokens) = (
            completion_loss(model, tokenizer, texts) for texts in (long, short)
        )
        loss = (long_loss + short_loss) / (long_tokens + short_tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step:4d}  loss {loss.item():.4f}  thinking {long_loss.item() / long_tokens:.4f}  "
                f"at once {short_loss.item() / short_tokens:.4f}  "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )


@torch.no_grad()
def measure(model, tokenizer, problems, sample, begin=""):
    """Decode every problem (after `begin`, if given) and print accuracy, thinking share and length."""
    prompts = tokenizer([prompt_of(a, b) + begin for a, b in problems], return_tensors="pt")
    ids = model.generate(
        **prompts, do_sample=sample, max_new_tokens=MAX_COMPLETION
    )  # (batch, length)
    ids = ids[:, PROMPT_LENGTH:]  # (batch, completion)
    right = {True: [], False: []}  # by whether the completion thinks
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for (a, b), text in zip(problems, texts, strict=True):
        right[THINK in text].append(text.split(END_THINK)[-1] == str(a + b))
    length = (ids != tokenizer.pad_token_id).sum(1).float().mean().item()
    thought, at_once = (sum(r) / len(r) if r else math.nan for r in (right[True], right[False]))
    name = ("sampled" if sample else "greedy") + (f" after {begin}" if begin else "")
    print(
        f"{name:21s} accuracy {sum(right[True] + right[False]) / len(problems):6.1%}  "
        f"thinks {len(right[True]) / len(problems):6.1%}  accuracy thinking {thought:6.1%}, "
        f"at once {at_once:6.1%}  mean length {length:.1f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description="Regenerate sample_data/ (model and data files).")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent, help="where to write"
    )
    parser.add_argument("--steps", type=int, default=700, help="pre-training steps")
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(
        1
    )  # sums depend on how they are split: one thread gives the same file each time
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    taken = set()
    eval_problems = draw_problems(rng, EVAL_ROWS, taken)
    held_out = frozenset(taken)
    train_problems = draw_problems(rng, TRAIN_ROWS, taken)
    for name, problems in (("train", train_problems), ("eval", eval_problems)):
        write_jsonl(
            args.out / f"{name}.jsonl",
            [{"prompt": prompt_of(a, b), "answer": str(a + b)} for a, b in problems],
        )
    write_jsonl(args.out / "countdown.jsonl", countdown_rows(rng, COUNTDOWN_ROWS))

    tokenizer = build_tokenizer()
    save_tokenizer(
        tokenizer, args.out / "model"
    )  # before its first use, which would store padding in it
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    pretrain(model, tokenizer, rng, held_out, args.steps, args.batch_size, args.learning_rate)
    model.save_pretrained(args.out / "model")

    model.eval()
    measure(model, tokenizer, eval_problems, sample=False)
    measure(model, tokenizer, eval_problems, sample=True)
    measure(model, tokenizer, eval_problems, sample=False, begin=THINK)


if __name__ == "__main__":
    main()
