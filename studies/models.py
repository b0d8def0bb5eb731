"""Which models train here? Tiny models of transformers' causal kinds, made from their configs.

    python studies/models.py             # all kinds, an hour of one core: figures/models.md
    python studies/models.py --vllm llama mixtral       # some, in vLLM, too; prints their rows
    python studies/models.py --quick     # for CI: are four kinds right?

Columns: are sequences packed or padded; does extras/fast.py compute the head; the largest
difference of a token's log-probability, in nats and float32, to its sequence alone in transformers'
own attention (some sequences are longer than every window), to the hf sampler and to vLLM; does a
run's checkpoint have the names and shapes of the original files; the layers that get adapters.
"""

import contextlib
import io
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import unittest.mock
from collections import defaultdict
from pathlib import Path

import common
import numpy as np
import torch
import transformers
from safetensors import safe_open

import grpo
from extras import errors, fast, lora, models, packed

# sizes: a config gets the sizes that it knows; kinds: what each kind needs in addition
TINY = json.loads(Path(common.HERE, "models.json").read_text())
QUICK = ("exaone4", "gpt_oss", "mixtral", "phimoe")
CPU = torch.device("cpu")


def make(kind: str, folder: str, **more) -> None:
    """A model with random weights and the bundled tokenizer."""
    of_kind = transformers.CONFIG_MAPPING[kind]
    known = {*vars(of_kind()), *of_kind.attribute_map}
    sizes = {k: v for k, v in TINY["sizes"].items() if k in known} | TINY["kinds"][kind] | more
    config = of_kind(**{k: v for k, v in sizes.items() if v is not None})
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if config.get_text_config() is not config:
        auto = transformers.AutoModelForMultimodalLM
    model = auto.from_config(config)
    for name, p in model.named_parameters():
        if p.dim() < 2 and not re.search("A_log|dt_bias", name):  # norms and biases: not all alike
            p.data += 0.1 * torch.randn_like(p)
    model.get_input_embeddings().weight.data[0].normal_(0, 0.15)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{common.ROOT}/sample_data/model/{name}", folder)


def shapes_in(folder: str) -> dict:
    shapes = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    return shapes


def drawn(sampler, model, prompts: list) -> float:
    """The largest gap of a token between a sampler and its sequence alone."""
    seeds = [(0, i) for i in range(len(prompts))]
    completions = sampler.generate(prompts, seeds, 1.0)
    samples = [grpo.Sample(0, p, **c) for p, c in zip(prompts, completions, strict=True)]
    theirs = torch.from_numpy(np.concatenate([s.sampler_logps for s in samples]))
    return (of_one(model, samples) - theirs).abs().max().item()


@torch.no_grad()
def of_one(model, samples: list):
    """[n]: log-probabilities by the model itself, one sequence at a time."""
    parts = []
    for s in samples:
        ids = torch.from_numpy(np.append(s.prompt.ids, s.completion_ids))
        logits = model(ids[None], use_cache=False).logits[0, len(s.prompt.ids) - 1 : -1]
        parts.append(logits.log_softmax(-1).gather(1, ids[len(s.prompt.ids) :, None])[:, 0])
    return torch.cat(parts)


def measure(kind: str, row: dict, with_vllm: bool) -> None:
    """Fills in the row, column after column, so that it shows how far the kind came."""
    folder = tempfile.mkdtemp()
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    make(kind, f"{folder}/model", **heads if with_vllm else {})  # vLLM has no smaller ones
    Path(f"{folder}/rows.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "123+456="}')
    cfg = grpo.Config(model=f"{folder}/model", dtype="float32", max_completion_length=40)
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 64, n) for n in (5, 100, 30)]
    prompts = [grpo.Prompt(i, "", {}) for i in ids]
    plain = grpo.load_model(cfg.model, cfg, CPU)
    samples = fast.dummy_samples(prompts, [2, 60], plain)
    for s in samples:
        s.completion_ids[:] = rng.integers(3, 64, len(s.completion_ids))

    expected = of_one(plain, samples)
    model = grpo.load_model(cfg.model, cfg, CPU)
    with unittest.mock.patch.object(fast, "SMALL", 0):  # for tiny models, too
        policy = grpo.make_policy(model, prompts[:1], cfg)
    row["sequences"] = "packed" if packed.packs(model) else "padded"
    row["head"] = "fast" if type(policy).__name__ == "FastPolicy" else "own"
    with torch.no_grad():
        off = (policy(policy.collate(samples))[0] - expected).abs().max().item()
    row["error"] = f"{off:.0e}"

    row["hf gap"] = "cannot sample"
    row["adapters"] = adapters_of(cfg)
    form = grpo.HFSampler if models.has_plain_cache(model) else models.GenerateSampler
    sampler = form(model, [1], cfg)
    row["hf gap"] = f"{drawn(sampler, plain, prompts[::2]):.0e}"

    flags = dict(train_data=f"{folder}/rows.jsonl", reward="overlong", num_prompts=2, max_steps=1)
    flags |= dict(num_generations=2, out_dir=f"{folder}/out", rollout="hf", device="cpu")
    grpo.train(grpo.replace(cfg, **flags))
    before, after = shapes_in(cfg.model), shapes_in(f"{folder}/out/step_000001")
    row["checkpoint"] = "same" if before == after else "others"
    if with_vllm:
        row["vllm gap"] = "does not start"
        sampler = grpo.VLLMSampler(plain, [1], 160, cfg)
        gaps = []
        for _ in range(2):  # the second push takes another path through vLLM
            sampler.load_weights(plain)
            gaps.append(drawn(sampler, plain, prompts))
        row["vllm gap"] = f"{max(gaps):.0e}"


def adapters_of(cfg) -> str:
    """The layers that get an adapter, by block."""
    model = grpo.load_model(cfg.model, cfg, CPU)
    try:
        lora.add_adapters(model, {}, grpo.replace(cfg, lora_rank=2))
    except ValueError as error:
        return f"refused: {errors.one_line(error)[:60]}"
    layers = defaultdict(set)
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            block, _, layer = re.sub(r"^.*\.\d+\.", "", name).rpartition(".")
            layers[block].add(layer.removesuffix("_proj"))
    return "; ".join(f"{block}: {' '.join(sorted(names))}" for block, names in layers.items())


def in_child(kind: str, with_vllm: bool, connection) -> None:
    row = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            measure(kind, row, with_vllm)
        except (Exception, SystemExit) as error:
            row["note"] = f"{type(error).__name__}: {errors.one_line(error)[:120]}"
    connection.send(row)


def row_of(kind: str, with_vllm: bool) -> dict:
    """Measures in a process of its own, so that a crash costs no other kind."""
    here, there = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=in_child, args=(kind, with_vllm, there))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(1800) else dict(note="took longer than half an hour")
    except EOFError:
        return dict(note="its process ended")
    finally:
        child.kill()
        child.join()


COLUMNS = ("sequences", "head", "error", "hf gap", "vllm gap", "checkpoint", "adapters", "note")

if __name__ == "__main__":
    args = common.arguments(__doc__, "kinds*", "--vllm")
    table = [" | ".join(("kind", *COLUMNS))]
    for kind in args.kinds or (QUICK if args.quick else TINY["kinds"]):
        row = row_of(kind, args.vllm)
        table.append([kind, *[row.get(name, "") for name in COLUMNS]])
        print(*table[-1], sep=" | ", flush=True)
        if args.quick and (float(row["error"]) > 1e-4 or row["checkpoint"] != "same"):
            sys.exit(f"{kind}: {row}")
    if not args.kinds:
        common.save(args, "models", [], table)
