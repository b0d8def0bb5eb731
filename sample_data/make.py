"""Makes the bundled example again, "R1 in miniature":  python sample_data/make.py  (minutes)

The task is to add two zero-padded 3-digit numbers: {"prompt": "123+045=", "answer": "168"}. A tiny
Qwen3 with a character vocabulary is pre-trained from scratch on demonstrations in two styles:

    80 %  at once   123+049=162<eos>                            adds columns, forgets the carries
    20 %  thinking  123+049=<think>3+9=12 2+4+1=7 1+0=1</think>172<eos>   columns, units first

So with greedy decoding the model answers at once, and is right only if no column carries (one
problem in six). Thinking nearly always gives the right answer, but only one sample in five thinks.
With a reward for right answers only, reinforcement learning discovers thinking, and accuracy and
length grow together.

The script writes model/, train.jsonl, eval.jsonl and countdown.jsonl. No problem of eval, in either
order of its operands, is in train or among the demonstrations. octal_train.jsonl and
octal_eval.jsonl contain sums of octal numbers for calculator.py; they share no problem, and no
demonstration is octal. The gsm8k_*.jsonl files are written by hand, not by this script.
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
PROMPT_LENGTH = 8  # tokens of "123+045="
MAX_COMPLETION = 32  # tokens; the longest demonstration has 31
TRAIN_ROWS, EVAL_ROWS, COUNTDOWN_ROWS = 4000, 500, 12
THINKING_SHARE = 0.2


# ------------------------------------------------------------------------------------------------
# problems and demonstrations


def prompt_of(a, b):
    return f"{a:03d}+{b:03d}="


def answer_at_once(a, b):
    """Adds each column alone and loses its carry: 123+049 -> 162."""
    digits = ""
    for x, y in zip(f"{a:03d}", f"{b:03d}", strict=True):
        digits += str((int(x) + int(y)) % 10)
    return str(int(digits)) + EOS


def answer_thinking(a, b):
    """Adds the columns from the units up. A carry is a third summand:
    <think>3+9=12 2+4+1=7 1+0=1</think>172."""
    columns = []
    carry = 0
    for x, y in zip(reversed(f"{a:03d}"), reversed(f"{b:03d}"), strict=True):
        total = int(x) + int(y) + carry
        if carry:
            columns.append(f"{x}+{y}+1={total}")
        else:
            columns.append(f"{x}+{y}={total}")
        carry = total // 10
    return THINK + " ".join(columns) + END_THINK + str(a + b) + EOS


def draw_problems(rng, count, taken, limit=1000):
    """Returns `count` new pairs of operands below `limit`, and adds them to `taken`. The pairs in
    `taken` are sorted, so that 1+2 and 2+1 are the same problem."""
    problems = []
    while len(problems) < count:
        a, b = rng.randrange(limit), rng.randrange(limit)
        pair = min(a, b), max(a, b)
        if pair not in taken:
            taken.add(pair)
            problems.append((a, b))
    return problems


def reachable(values):
    """All values that + - * / can make from `values`, if each is used exactly once (countdown)."""
    if len(values) == 1:
        return set(values)
    reached = set()
    for i, j in combinations(range(len(values)), 2):
        x, y = values[i], values[j]
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        results = {x + y, x - y, y - x, x * y}
        if y != 0:
            results.add(x / y)
        if x != 0:
            results.add(y / x)
        for result in results:
            reached.update(reachable([*rest, result]))
    return reached


def countdown_rows(rng, count):
    rows = []
    for index in range(count):
        size = 3 if index % 2 == 0 else 4
        numbers = rng.sample(range(2, 26), size)
        values = reachable([Fraction(n) for n in numbers])
        targets = sorted(int(v) for v in values if v.denominator == 1 and 10 <= v <= 100)
        target = rng.choice(targets)
        prompt = (
            f"Using each of the numbers {numbers} exactly once, write an expression with + - * / "
            f"and parentheses that equals {target}. Reason inside <think> </think>, then give "
            "only the expression inside <answer> </answer>."
        )
        rows.append({"numbers": numbers, "target": target, "prompt": prompt})
    return rows


def addition_rows(problems):
    return [{"prompt": prompt_of(a, b), "answer": str(a + b)} for a, b in problems]


def octal_rows(problems):
    return [{"prompt": f"{a:03o}+{b:03o}=", "answer": f"{a + b:o}"} for a, b in problems]


def write_octal(out, seed):
    """Writes sums of octal numbers up to 777. A generator of their own leaves the model's random
    numbers unchanged."""
    rng = random.Random(seed)
    taken = set()
    eval_problems = draw_problems(rng, EVAL_ROWS, taken, limit=0o1000)
    train_problems = draw_problems(rng, TRAIN_ROWS, taken, limit=0o1000)
    write_jsonl(out / "octal_train.jsonl", octal_rows(train_problems))
    write_jsonl(out / "octal_eval.jsonl", octal_rows(eval_problems))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ------------------------------------------------------------------------------------------------
# tokenizer and model


def build_tokenizer():
    """One token for each character. The think tags are added tokens that are not special, so that
    decoding keeps them."""
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
    """Writes a class name that transformers 4 and 5 both load; 5 would write one that 4 lacks."""
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


# ------------------------------------------------------------------------------------------------
# pre-training and measuring


def completion_loss(model, tokenizer, texts):
    """The sum of the cross-entropy over the completions' tokens, and the number of these tokens."""
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
        warmup = min(1.0, (step + 1) / 50)
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = learning_rate * warmup * decay
        problems = draw_problems(rng, batch_size, set(held_out))
        # A forward pass for each style, because their lengths differ: this saves padding.
        long = [prompt_of(a, b) + answer_thinking(a, b) for a, b in problems[:thinking]]
        short = [prompt_of(a, b) + answer_at_once(a, b) for a, b in problems[thinking:]]
        long_loss, long_tokens = completion_loss(model, tokenizer, long)
        short_loss, short_tokens = completion_loss(model, tokenizer, short)
        loss = (long_loss + short_loss) / (long_tokens + short_tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.perf_counter() - started
            print(
                f"step {step:4d}  loss {loss.item():.4f}  "
                f"thinking {long_loss.item() / long_tokens:.4f}  "
                f"at once {short_loss.item() / short_tokens:.4f}  {seconds:.0f} s",
                flush=True,
            )


def share(values):
    return sum(values) / len(values) if values else math.nan


@torch.no_grad()
def measure(model, tokenizer, problems, sample, begin=""):
    """Decodes every problem, after the text `begin` if given. Prints the accuracy, the share of
    completions that think, and the mean length."""
    prompts = tokenizer([prompt_of(a, b) + begin for a, b in problems], return_tensors="pt")
    ids = model.generate(**prompts, do_sample=sample, max_new_tokens=MAX_COMPLETION)
    ids = ids[:, PROMPT_LENGTH:]  # (batch, completion)
    thinking, at_once = [], []  # of each completion: is it right?
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for (a, b), text in zip(problems, texts, strict=True):
        right = text.split(END_THINK)[-1] == str(a + b)
        if THINK in text:
            thinking.append(right)
        else:
            at_once.append(right)
    length = (ids != tokenizer.pad_token_id).sum(1).float().mean().item()
    name = "sampled" if sample else "greedy"
    if begin:
        name += f" after {begin}"
    print(
        f"{name:21s} accuracy {share(thinking + at_once):6.1%}  "
        f"thinks {len(thinking) / len(problems):6.1%}  accuracy thinking {share(thinking):6.1%}, "
        f"at once {share(at_once):6.1%}  mean length {length:.1f}",
        flush=True,
    )


def main():
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Makes sample_data/ again (model and data files).")
    parser.add_argument("--out", type=Path, default=here, help="directory to write to")
    parser.add_argument("--steps", type=int, default=700, help="pre-training steps")
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # so that sums are split, and rounded, in the same way every time
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    taken = set()
    eval_problems = draw_problems(rng, EVAL_ROWS, taken)
    held_out = frozenset(taken)
    train_problems = draw_problems(rng, TRAIN_ROWS, taken)
    write_jsonl(args.out / "train.jsonl", addition_rows(train_problems))
    write_jsonl(args.out / "eval.jsonl", addition_rows(eval_problems))
    write_jsonl(args.out / "countdown.jsonl", countdown_rows(rng, COUNTDOWN_ROWS))
    write_octal(args.out, args.seed)

    tokenizer = build_tokenizer()
    save_tokenizer(tokenizer, args.out / "model")  # before its first use, which stores padding
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
